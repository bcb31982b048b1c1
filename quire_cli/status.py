"""`quire status`: health, models and replicas of gateways."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.client import Client, Model, QuireError, Replica, ReplicaRole
from quire.client.connection import open_channel, split_addresses
from quire.rpc.errors import Unavailable, from_rpc_error
from quire.runtime.settings import load_settings, setting
from quire_cli.feed import DEFAULT_URL, Deployment, ReplicaNumbers, line_of, object_of, read_feed
from quire_cli.flags import DEFAULT_ADDRESS, CredentialFlags
from quire_cli.main import explain

PROGRAM = "quire status"


@dataclass(frozen=True, slots=True)
class StatusFlags(CredentialFlags):
    """Shows health, models and replicas of gateways; the exit status is 0 when all serve."""

    address: str | None = setting(
        None,
        f"gRPC address of the gateway, {DEFAULT_ADDRESS} by default, or of several, with commas; with --watch its HTTP "
        f"address, {DEFAULT_URL} by default",
        metavar="HOST:PORT",
    )
    format: str = setting("text", "how to print", choices=("text", "json"))
    watch: bool = setting(False, "print a line of numbers for each replica every second, until Ctrl-C")
    url: str | None = setting(None, "earlier name of --address with --watch", metavar="URL")
    timeout: float = setting(5.0, "seconds to wait for an answer", minimum=0.1, metavar="SECONDS")


def main(argv: Sequence[str]) -> int:
    """Prints the status of each gateway; returns 0 if all serve requests."""
    flags = load_settings(StatusFlags, argv, os.environ, program=PROGRAM)
    if flags.watch:
        return _watch(flags)
    addresses = split_addresses(flags.address or DEFAULT_ADDRESS)
    if len(addresses) == 1:
        return 0 if _show(addresses[0], flags) else 1
    serving = [_show_or_explain(address, flags) for address in addresses]
    return 0 if all(serving) else 1


def _watch(flags: StatusFlags) -> int:
    """Prints the numbers of all replicas every second, until Ctrl-C. Raises Unavailable if the gateway ends."""
    deployment, url = Deployment(), flags.url or flags.address or DEFAULT_URL
    try:
        with closing(read_feed(flags, url)) as events:
            for name, value in events:
                deployment.add_event(name, value)
                # The gateway's own event comes once a second.
                if name == "gateway" and deployment.is_known:
                    for replica in deployment.replicas.values():
                        print(_numbers_line(flags.format, deployment, replica), flush=True)
    except KeyboardInterrupt:
        return 0
    raise Unavailable(f"{url}: it ended the feed")


def _numbers_line(form: str, deployment: Deployment, replica: ReplicaNumbers) -> str:
    if form == "json":
        return json.dumps({"unix_seconds": time.time(), **object_of(deployment, replica)})
    return f"{time.strftime('%H:%M:%S')} {line_of(deployment, replica)}"


def _show_or_explain(address: str, flags: StatusFlags) -> bool:
    """Shows the status of one of several gateways, or why it does not answer; the others are shown in any case."""
    try:
        return _show(address, flags)
    except QuireError as error:
        print(f"{PROGRAM}: error: {address}: {explain(error)}", file=sys.stderr, flush=True)
        return False


def _show(address: str, flags: StatusFlags) -> bool:
    """Prints the status of a gateway; returns whether it serves, raises QuireError when it does not answer."""
    serving = _is_serving(address, flags)
    with Client(address, api_key=flags.api_key, tls=flags.client_tls()) as client:
        info = client.server_info(timeout_s=flags.timeout)
        models = client.list_models(timeout_s=flags.timeout) if serving else ()
    if flags.format == "json":
        status = {
            "address": address,
            "serving": serving,
            **dataclasses.asdict(info),
            "models": [dataclasses.asdict(model) for model in models],
        }
        print(json.dumps(status, ensure_ascii=False))
    else:
        print(f"{'serving' if serving else 'not serving'} at {address} (quire {info.version})")
        for model in models:
            print(_model_line(model))
        are_several = len({replica.model for replica in info.replicas}) > 1
        for replica in info.replicas:
            of_model = f"model {replica.model}, " if are_several else ""
            print(f"{of_model}{_replica_line(replica)}")
    return serving


def _is_serving(address: str, flags: StatusFlags) -> bool:
    with open_channel(grpc, address, flags.client_tls()) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=flags.timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    return response.status == health_pb2.HealthCheckResponse.SERVING


def _model_line(model: Model) -> str:
    chat = "chat template" if model.has_chat_template else "no chat template"
    return f"model {model.name}: {model.architecture}, {model.dtype}, {model.max_model_len} tokens, {chat}"


def _replica_line(replica: Replica) -> str:
    if not replica.connected:
        return f"replica {replica.scheduler_address}: not connected"
    if replica.loading is not None:
        return f"replica {replica.scheduler_address}: its worker loads the model: {replica.loading}"
    size = f" ({replica.num_gpu_blocks * replica.block_bytes / 2**30:.2f} GiB)" if replica.block_bytes else ""
    groups = ""
    if (num_groups := replica.full_groups + replica.windowed_groups) > 1:
        groups = f" in one of {num_groups} groups of layers"
    if replica.windowed_groups:
        groups += f", {replica.windowed_groups} with a window of {replica.window:,} tokens"
    states = ""
    if replica.state_blocks:
        of_state = f" ({replica.state_blocks * replica.block_bytes / 2**20:.1f} MiB)" if replica.block_bytes else ""
        states = f", the state of a sequence in {replica.state_blocks} of them{of_state}"
    return (
        f"replica {replica.scheduler_address}: {replica.num_gpu_blocks} blocks of {replica.block_size} tokens{groups}"
        f"{size}{states}, "
        f"{replica.max_num_seqs} sequences and {replica.max_num_batched_tokens} tokens a step"
        + (f", on {replica.device_name}" if replica.device_name else "")
        + (f", for {replica.role.value}" if replica.role is not ReplicaRole.BOTH else "")
    )
