"""`quire status`: is it up, what does it serve, with what."""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.cli.flags import ConnectionFlags
from quire.client import Client, Model, Replica
from quire.client.tls import connect
from quire.rpc.channel import channel_options
from quire.rpc.errors import from_rpc_error
from quire.settings import load_settings, setting

PROGRAM = "quire status"


@dataclass(frozen=True, slots=True)
class StatusFlags(ConnectionFlags):
    """Shows health, models and replicas of a gateway; the exit status is 0 when it serves."""

    format: str = setting("text", "how to print", choices=("text", "json"))
    timeout: float = setting(5.0, "seconds to wait for an answer", minimum=0.1, metavar="SECONDS")


def main(argv: Sequence[str]) -> int:
    """Prints the status; 0 when requests are served."""
    flags = load_settings(StatusFlags, argv, os.environ, program=PROGRAM)
    serving = _is_serving(flags)
    with Client(flags.address, api_key=flags.api_key, tls=flags.client_tls()) as client:
        info = client.server_info(timeout_s=flags.timeout)
        models = client.list_models(timeout_s=flags.timeout) if serving else ()
    if flags.format == "json":
        status = {
            "serving": serving,
            **dataclasses.asdict(info),
            "models": [dataclasses.asdict(model) for model in models],
        }
        print(json.dumps(status, ensure_ascii=False))
    else:
        print(f"{'serving' if serving else 'not serving'} at {flags.address} (quire {info.version})")
        for model in models:
            print(_model_line(model))
        for replica in info.replicas:
            print(_replica_line(replica))
    return 0 if serving else 1


def _is_serving(flags: StatusFlags) -> bool:
    with connect(grpc, flags.address, channel_options(flags.address), flags.client_tls()) as channel:
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
    return (
        f"replica {replica.scheduler_address}: {replica.num_gpu_blocks} blocks of {replica.block_size} tokens, "
        f"{replica.max_num_seqs} sequences and {replica.max_num_batched_tokens} tokens a step"
    )
