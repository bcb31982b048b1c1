"""What a fake scheduler does with pins: it keeps them by content, and refuses on demand."""

import hashlib
from dataclasses import dataclass, field

import grpc.aio

from quire.arrays import decode_int32
from quire.rpc.errors import InvalidArgument, NotFound, QuireError
from quire.scheduler.v1 import scheduler_pb2


@dataclass
class FakePins:
    """The unary methods about pins.

    Attributes:
        block_size: Of pins; shorter prefixes are refused.
        pins: The pinned token ids by pin id.
        pin_requests: What came, in order.
        pin_error: Answers to every call about pins.
    """

    block_size: int = 16
    pins: dict[str, list[int]] = field(default_factory=dict)
    pin_requests: list[scheduler_pb2.PinPrefixRequest] = field(default_factory=list)
    pin_error: QuireError | None = None

    async def PinPrefix(
        self, request: scheduler_pb2.PinPrefixRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.PinPrefixResponse:
        self.pin_requests.append(request)
        self._admit()
        token_ids = decode_int32(request.token_ids, "token_ids", minimum=0).tolist()
        num_blocks = len(token_ids) // self.block_size
        if not num_blocks:
            raise InvalidArgument(f"the prefix has {len(token_ids)} tokens; a block has {self.block_size}")
        pinned = token_ids[: num_blocks * self.block_size]
        pin_id = hashlib.blake2b(f"{request.tenant}{pinned}".encode(), digest_size=16).hexdigest()
        self.pins[pin_id] = pinned
        return scheduler_pb2.PinPrefixResponse(pin_id=pin_id, pinned_tokens=len(pinned), pinned_blocks=num_blocks)

    async def UnpinPrefix(
        self, request: scheduler_pb2.UnpinPrefixRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.UnpinPrefixResponse:
        self._admit()
        if self.pins.pop(request.pin_id, None) is None:
            raise NotFound(f'no pin "{request.pin_id}"', reason="PIN_NOT_FOUND")
        return scheduler_pb2.UnpinPrefixResponse()

    def _admit(self) -> None:
        if self.pin_error is not None:
            raise self.pin_error
