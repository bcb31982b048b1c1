"""quire.gateway.v1.PrefixService."""

import grpc.aio

from gateway.grpc_api import convert
from gateway.request.prompts import Prefixes
from quire.gateway.v1.prefix_pb2 import PinPrefixRequest, PinPrefixResponse, UnpinPrefixRequest, UnpinPrefixResponse

Context = grpc.aio.ServicerContext


class PrefixServicer:
    """See protos/quire/gateway/v1/prefix.proto for what each method promises."""

    def __init__(self, prefixes: Prefixes) -> None:
        self._prefixes = prefixes

    async def PinPrefix(self, request: PinPrefixRequest, context: Context) -> PinPrefixResponse:
        pin = await self._prefixes.pin(
            convert.optional(request, "model"),
            convert.prefix_of(request),
            convert.optional(request, "time_to_live_ms"),
            timeout_s=context.time_remaining(),
        )
        return PinPrefixResponse(
            pin_id=pin.pin_id,
            pinned_tokens=pin.num_tokens,
            pinned_blocks=pin.num_blocks,
            time_to_live_ms=pin.time_to_live_ms,
        )

    async def UnpinPrefix(self, request: UnpinPrefixRequest, context: Context) -> UnpinPrefixResponse:
        await self._prefixes.unpin(request.pin_id, timeout_s=context.time_remaining())
        return UnpinPrefixResponse()
