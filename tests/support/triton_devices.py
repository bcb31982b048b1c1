"""Devices that run Triton kernels in tests: Triton's interpreter, and a GPU if there is one.

Triton reads TRITON_INTERPRET when it is imported, so the interpreter has a process of its own.
"""

import functools
import inspect
import multiprocessing
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call, and its arguments as it left them; all tensors on the CPU."""

    result: Any
    arguments: tuple[Any, ...]


class KernelDevice(Protocol):
    dot_dtypes: tuple[torch.dtype, ...]
    """Types whose matrix products are right on this device."""

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Outcome:
        """Calls a function of a module of `quire_kernels.cuda` with copies; raises its errors here."""
        ...


class Interpreter:
    """A process in which Triton interprets kernels on the CPU, with numpy, which cannot multiply bfloat16."""

    dot_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16)

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, mp_context=context, initializer=_start_interpreter)

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Outcome:
        # Processes share the memory of tensors that they send.
        arguments, options = move(arguments, "cpu"), move(options, "cpu")
        return self._process.submit(_call, function, arguments, options).result(timeout=60)

    def close(self) -> None:
        self._process.shutdown()


class Gpu:
    dot_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Outcome:
        outcome = _call(function, move(arguments, "cuda"), move(options, "cuda"))
        return Outcome(move(outcome.result, "cpu"), move(outcome.arguments, "cpu"))


def move(value: Any, device: str) -> Any:
    """A copy of `value` with all tensors in it on `device`, of the same strides."""
    if isinstance(value, torch.Tensor):
        memory = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        return memory.to(device, copy=True).as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, tuple | list):
        return type(value)(move(each, device) for each in value)
    if isinstance(value, Mapping):
        return {name: move(each, device) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: move(getattr(value, each.name), device) for each in fields(value)})
    return value


def _start_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    # numpy warns if kernels overflow or divide by zero in lanes that nothing reads, as on a GPU.
    warnings.simplefilter("ignore", RuntimeWarning)
    _look_for_builtins_once()


def _look_for_builtins_once() -> None:
    """At each call of a device function the interpreter searches all of triton.language for functions to replace, which
    takes a third of its time. It finds the same names each time, so one search is enough."""
    from triton.language import core
    from triton.runtime import interpreter

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def replace_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = replace_builtins  # pyrefly: ignore[bad-assignment]


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Outcome:
    return Outcome(function(*arguments, **options), arguments)
