"""quire.gateway.v1.PrefixService: known to the contract, refused by this version."""

import grpc.aio

from quire.gateway.v1.prefix_pb2 import PinPrefixRequest, PinPrefixResponse, UnpinPrefixRequest, UnpinPrefixResponse
from quire.rpc.errors import Unimplemented


class PrefixServicer:
    """Refuses with our own error details, which gRPC's answer to an unknown service would not have."""

    async def PinPrefix(self, request: PinPrefixRequest, context: grpc.aio.ServicerContext) -> PinPrefixResponse:
        raise Unimplemented("PinPrefix is not supported by this version", reason="UNSUPPORTED_METHOD")

    async def UnpinPrefix(self, request: UnpinPrefixRequest, context: grpc.aio.ServicerContext) -> UnpinPrefixResponse:
        raise Unimplemented("UnpinPrefix is not supported by this version", reason="UNSUPPORTED_METHOD")
