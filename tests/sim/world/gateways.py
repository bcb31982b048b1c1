"""The gateway in a world: the real application, with a model whose tokens are characters."""

import asyncio
import functools
import hashlib
import json
import string
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gateway import app, sqlite
from gateway.app import Gateway
from gateway.offload import FairExecutor
from gateway.request.constraint_checker import ConstraintChecker
from gateway.request.served_model import ServedModel
from gateway.settings import GatewaySettings
from quire.model_files.adapter_files import read_adapter
from quire.service.compatibility import ModelFingerprint
from quire.service.model_flag import ModelFlag
from tests.sim.world.http import SimHttpServer
from tests.sim.world.traffic import (
    ADAPTERS,
    EOS_TOKEN_ID,
    NUM_SPECIAL_TOKENS,
    OPERATOR,
    TENANTS,
    VOCAB_SIZE,
    Tenant,
)
from tests.support.adapter_files import write_adapter

PORT, HTTP_PORT = 50051, 8000
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
_ALPHABET = string.ascii_letters + string.digits


def character_of(token_id: int) -> str:
    """The text of a token that is not special."""
    place = token_id - NUM_SPECIAL_TOKENS
    return _ALPHABET[place] if place < len(_ALPHABET) else chr(0x4E00 + place)


def key_of(tenant: Tenant) -> str:
    """The API key of a tenant."""
    return f"quire-key-of-{tenant.name}"


@functools.cache
def _directory() -> Path:
    """The model files that gateways read at their start; made once for all worlds of this process."""
    path = Path(tempfile.mkdtemp(prefix="world-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "eos_token_id": EOS_TOKEN_ID,
        "vocab_size": VOCAB_SIZE,
    }
    vocabulary = {f"<{number}>": number for number in range(NUM_SPECIAL_TOKENS)}
    vocabulary |= {character_of(token_id): token_id for token_id in range(NUM_SPECIAL_TOKENS, VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([f"<{number}>" for number in range(NUM_SPECIAL_TOKENS)])
    tokenizer.save(str(path / "tokenizer.json"))
    keys = [
        {"id": f"k-{tenant.name}", "sha256": hashlib.sha256(key_of(tenant).encode()).hexdigest()}
        | {"tenant": tenant.name, "may_pin": True, "max_priority": 100}
        | {name: limit for name, limit in tenant.limits.items() if limit is not None}
        for tenant in TENANTS
    ]
    operator = hashlib.sha256(key_of(OPERATOR).encode()).hexdigest()
    keys.append({"id": "k-operator", "sha256": operator, "tenant": OPERATOR.name, "is_operator": True})
    for name, content in {
        "config.json": config,
        "generation_config.json": {"do_sample": False},
        "tokenizer_config.json": {"chat_template": _TEMPLATE},
        "keys.json": {"keys": keys},
    }.items():
        (path / name).write_text(json.dumps(content))
    return path


@functools.cache
def _adapter(name: str) -> Path:
    """The directory of an adapter; made once for all worlds of this process."""
    modules = {"model.layers.0.self_attn.q_proj": (1, 2, 2)}
    return write_adapter(_directory() / name, modules, lora_alpha=1 + ADAPTERS.index(name))


@functools.cache
def digest_of(name: str | None) -> bytes:
    """The digest of an adapter; empty for the base model."""
    return b"" if name is None else read_adapter(_adapter(name)).digest


def fingerprint_of(model: int) -> ModelFingerprint:
    """The fingerprint of the model with this number, which has the gateways' tokenizer. Gateways have no weights."""
    return ModelFingerprint(tokenizer=_served_model().fingerprint.tokenizer, weights=str(model))


@functools.cache
def _served_model() -> ServedModel:
    return ServedModel.open(_directory(), "fake", FairExecutor(1))


def _open_model(path: Path, name: str | None, executor: FairExecutor, **_: Any) -> ServedModel:
    """The model, read once for all worlds. Its texts are so short that the executor is not used."""
    return replace(
        _served_model(),
        architecture="FakeForCausalLM",
        constraints=ConstraintChecker(_Trial()),
        executor=executor,
    )


class _Trial:
    """Replaces the process that compiles constraints before their requests are accepted."""

    async def verdict(self, content: bytes) -> None:
        await asyncio.to_thread(lambda: None)

    def close(self) -> None:
        """There is no process."""


class _NoThread(Executor):
    """Replaces the thread of a gateway's store. Its work runs in the caller, since a thread would outlive a kill."""

    def __init__(self, max_workers: int, thread_name_prefix: str) -> None:
        """Has the arguments of ThreadPoolExecutor."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def gateways_without_sockets() -> Iterator[None]:
    """Inside the block, gateways serve HTTP over their world's network, and use no threads and no model files."""
    # Before `open` is replaced.
    _served_model()
    with (
        patch.object(app, "HttpServer", SimHttpServer),
        patch.object(sqlite, "ThreadPoolExecutor", _NoThread),
        patch.object(ServedModel, "open", _open_model),
    ):
        yield


def settings_of(
    host: str, schedulers: tuple[str, ...], *, has_adapters: bool = False, **values: Any
) -> GatewaySettings:
    """The settings of a gateway of a world."""
    return GatewaySettings(
        models=(ModelFlag(None, str(_directory())),),
        grpc_host=host,
        grpc_port=PORT,
        http_host=host,
        http_port=HTTP_PORT,
        schedulers=schedulers,
        adapters=tuple(f"{name}={_adapter(name)}" for name in ADAPTERS) if has_adapters else (),
        keys_files=(_directory() / "keys.json",),
        log_level="error",
        # No page is opened in a world, and support for pages costs calls.
        ui=False,
        **values,
    )


async def run_gateway(settings: GatewaySettings, on_start: Callable[[Gateway], None]) -> None:
    """Runs a gateway until it is killed, or drains it when it is cancelled."""
    gateway = await Gateway.start(settings)
    on_start(gateway)
    try:
        await gateway.run()
    finally:
        await gateway.stop(settings.drain_timeout)
