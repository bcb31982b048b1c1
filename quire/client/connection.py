"""A client's channel, and the stubs that call through it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.client.addresses import Target, find_target
from quire.client.credentials import show_key
from quire.client.retries import service_config
from quire.client.tls import ClientTls
from quire.gateway.v1 import generation_pb2_grpc, model_pb2_grpc, prefix_pb2_grpc
from quire.rpc.channel import channel_options
from quire.settings import ConfigurationError

ChannelOptions = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Stubs:
    """The gateway's services, of either gRPC API."""

    generation: generation_pb2_grpc.GenerationServiceStub
    models: model_pb2_grpc.ModelServiceStub
    prefixes: prefix_pb2_grpc.PrefixServiceStub


def open_channel(api: Any, address: str | Sequence[str], tls: ClientTls | None) -> Any:
    """A channel to the gateways at `address`, of either gRPC API: `api` is the module `grpc` or `grpc.aio`.

    Raises:
        ConfigurationError: an address is malformed, a file of `tls` cannot be read, or it does not say what gateways of
            several names are to be called.
        Unavailable: none of several names is known.
    """
    target = find_target(address)
    options = _options(target)
    if tls is None:
        return api.insecure_channel(target.uri, options=options)
    if len(target.hosts) > 1 and tls.server_name is None:
        raise ConfigurationError(
            f"TLS: gateways at {', '.join(target.hosts)} are believed under one name that all their certificates hold; "
            "say it by server_name"
        )
    return api.secure_channel(target.uri, tls.credentials(), options=[*options, *tls.options()])


def make_stubs(channel: Any, api_key: str | None) -> Stubs:
    """Raises Unauthenticated where no header can hold the key."""
    calls = show_key(channel, api_key)
    return Stubs(
        generation_pb2_grpc.GenerationServiceStub(calls),
        model_pb2_grpc.ModelServiceStub(calls),
        prefix_pb2_grpc.PrefixServiceStub(calls),
    )


def _options(target: Target) -> ChannelOptions:
    options: dict[str, Any] = dict(channel_options(target.addresses[0]))
    options["grpc.service_config"] = json.dumps(service_config(spread=not target.is_one_place))
    if target.is_list:
        # gRPC would take the whole list for the name of the server, and for that of one host behind a proxy.
        options["grpc.default_authority"] = target.addresses[0] if target.hosts else "localhost"
        options["grpc.enable_http_proxy"] = 0
    return list(options.items())
