"""Handlers that parse requests themselves, so that a malformed message is INVALID_ARGUMENT.

gRPC's own deserialization answers UNKNOWN to a message that protobuf refuses (invalid UTF-8, for example), and a
protobuf parser silently keeps the last of two fields that exclude each other.
"""

import inspect
from collections.abc import AsyncIterator, Callable
from itertools import islice
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from gateway.grpc_api.wire_fields import malformed_field, wire_fields
from quire.rpc.errors import FieldViolation, InvalidArgument, invalid_field

# No message of ours that has alternatives has as many fields; what comes after them is not looked at.
_MAX_FIELDS_LOOKED_AT = 256


def add_service(server: grpc.aio.Server, service: ServiceDescriptor, servicer: object) -> None:
    """Registers the servicer's methods, which have the names of the service's, under the service's full name.

    Methods that answer a stream are async generator functions, the others coroutine functions. One that takes a stream
    answers a stream, too.
    """
    handlers = {method.name: _handler(method, getattr(servicer, method.name)) for method in service.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def parse(kind: type[Message], data: bytes) -> Message:
    """The message in `data`.

    Raises:
        InvalidArgument: it is malformed, holds invalid UTF-8, or sets two fields that exclude each other.
    """
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        field, description = malformed_field(kind, data)
        raise InvalidArgument(
            f"the message is not a valid {kind.DESCRIPTOR.full_name}: {field} {description}",
            reason="MALFORMED_MESSAGE",
            violations=[FieldViolation(field, description)],
        ) from error
    _check_alternatives(kind, data)
    return message


def _handler(method: MethodDescriptor, behavior: Callable[[Any, Any], Any]) -> grpc.RpcMethodHandler:
    request_class = GetMessageClass(method.input_type)
    response_class = GetMessageClass(method.output_type)
    if method.client_streaming:

        async def exchange(data: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[Message]:
            responses = behavior(_parsed(request_class, data), context)
            try:
                async for response in responses:
                    yield response
            finally:
                await responses.aclose()

        return grpc.stream_stream_rpc_method_handler(exchange, response_serializer=response_class.SerializeToString)
    if inspect.isasyncgenfunction(behavior):

        async def stream(data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Message]:
            responses = behavior(parse(request_class, data), context)
            try:
                async for response in responses:
                    yield response
            finally:
                await responses.aclose()

        return grpc.unary_stream_rpc_method_handler(stream, response_serializer=response_class.SerializeToString)

    async def unary(data: bytes, context: grpc.aio.ServicerContext) -> Message:
        return await behavior(parse(request_class, data), context)

    return grpc.unary_unary_rpc_method_handler(unary, response_serializer=response_class.SerializeToString)


async def _parsed(kind: type[Message], messages: AsyncIterator[bytes]) -> AsyncIterator[Message]:
    async for data in messages:
        yield parse(kind, data)


def _check_alternatives(kind: type[Message], data: bytes) -> None:
    """Raises InvalidArgument when two fields of one `oneof` are on the wire."""
    alternatives = {
        field.number: (oneof.name, field.name)
        for oneof in kind.DESCRIPTOR.oneofs
        if len(oneof.fields) > 1
        for field in oneof.fields
    }
    if not alternatives:
        return
    chosen: dict[str, str] = {}
    for wire_field in islice(wire_fields(data), _MAX_FIELDS_LOOKED_AT):
        oneof, field = alternatives.get(wire_field.number, (None, None))
        if oneof is None or field is None:
            continue
        other = chosen.setdefault(oneof, field)
        if other != field:
            description = f"is set besides {other}; set exactly one of them"
            raise invalid_field(field, description)
