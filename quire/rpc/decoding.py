"""Requests from bytes, so that bytes which are no such message are INVALID_ARGUMENT on every method."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf.message import DecodeError

from quire.rpc.errors import FieldViolation, InvalidArgument

_DAMAGED = "cannot be parsed: the bytes are damaged, cut off or of another message"


def decoder(deserialize: Callable[[bytes], Any] | None) -> Callable[[Any], Any]:
    """A deserializer that raises InvalidArgument, reason MALFORMED_MESSAGE; the identity where a method has none."""
    if deserialize is None:
        return lambda request: request
    # Generated code hands over the class's own FromString.
    descriptor = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)
    name = "request" if descriptor is None else descriptor.full_name

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise InvalidArgument(
                f"{name} {_DAMAGED}", reason="MALFORMED_MESSAGE", violations=[FieldViolation(name, _DAMAGED)]
            ) from error

    return decode


async def decoded(decode: Callable[[Any], Any], requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Each request of a stream."""
    async for request in requests:
        yield decode(request)
