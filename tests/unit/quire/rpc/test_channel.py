"""Channels between the services."""

from typing import Any

import pytest

from quire.rpc.channel import channel_options, open_channel
from quire.rpc.transport import TRANSPORT


class Noting:
    """Records the options of a channel."""

    def channel(self, address: str, credentials: object, options: Any) -> Any:
        return dict(options)


@pytest.mark.parametrize("address", ["scheduler.example:50052", "10.0.0.7:50053", "unix:/run/quire/worker.sock"])
def test_they_pass_by_a_proxy_for_what_is_outside(address: str) -> None:
    """The hub is often reached only by https_proxy, which gRPC would use even for prompts to a scheduler."""
    transport: Any = Noting()
    token = TRANSPORT.set(transport)
    try:
        options: Any = open_channel(address)
    finally:
        TRANSPORT.reset(token)
    assert options["grpc.enable_http_proxy"] == dict(channel_options())["grpc.enable_http_proxy"] == 0
