"""Gives modules that read clocks by themselves the clock of the world, until they all ask `quire.clock`.

`tools/check_clocks.py` lists them. grpc.aio makes deadlines of `time.time()`, so one of its modules stays here.
"""

import random
import secrets
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import ModuleType
from typing import Any

from quire import clock, entropy

_PACKAGES = ("gateway", "scheduler_svc", "worker_svc", "quire", "tests.support")
_OTHERS = ("grpc.aio._utils",)
_SEAMS = ("quire.clock", "quire.entropy")


class _Time(ModuleType):
    monotonic = staticmethod(clock.monotonic)
    perf_counter = staticmethod(clock.monotonic)
    thread_time = staticmethod(clock.monotonic)
    process_time = staticmethod(clock.monotonic)
    time = staticmethod(clock.unix_s)
    time_ns = staticmethod(clock.unix_ns)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def monotonic_ns() -> int:
        return round(clock.monotonic() * 1e9)

    perf_counter_ns = monotonic_ns

    @staticmethod
    def sleep(seconds: float) -> None:
        """What a thread would wait is part of its job."""


class _Secrets(ModuleType):
    token_bytes = staticmethod(entropy.random_bytes)
    token_hex = staticmethod(entropy.random_hex)
    randbits = staticmethod(entropy.random_bits)

    def __getattr__(self, name: str) -> Any:
        return getattr(secrets, name)


class _Random(ModuleType):
    uniform = staticmethod(entropy.uniform)

    @staticmethod
    def random() -> float:
        return entropy.uniform(0, 1)

    @staticmethod
    def Random(*seed: Any) -> Random:
        return Random(*seed) if seed else entropy.generator()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"random.{name} is not simulated")


class _Uuid(ModuleType):
    uuid4 = staticmethod(entropy.random_uuid)

    def __getattr__(self, name: str) -> Any:
        return getattr(uuid, name)


_STAND_INS = {
    time: _Time("time"),
    secrets: _Secrets("secrets"),
    random: _Random("random"),
    uuid: _Uuid("uuid"),
}


@contextmanager
def simulated_modules() -> Iterator[None]:
    """Inside the block, the modules that are loaded already read the clock and the entropy of their context."""
    changed: list[tuple[ModuleType, str, ModuleType]] = []
    for name, module in sorted(sys.modules.items()):
        if name in _SEAMS or not (name in _OTHERS or name.startswith(tuple(f"{each}." for each in _PACKAGES))):
            continue
        for attribute, stand_in in ((real.__name__, stand_in) for real, stand_in in _STAND_INS.items()):
            real = vars(module).get(attribute)
            if real is not None and real is sys.modules[attribute]:
                changed.append((module, attribute, real))
                setattr(module, attribute, stand_in)
    try:
        yield
    finally:
        for module, attribute, real in changed:
            setattr(module, attribute, real)
