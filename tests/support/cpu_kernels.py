"""The implementations that this machine has for tensors on the CPU."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kernels import ops, reference
from kernels.backends import Implementation
from kernels.cpu.bindings import CpuKernels
from kernels.cpu.library import Library, LibraryUnavailableError, available_isas


def _isas() -> tuple[str, ...]:
    try:
        return available_isas()
    except LibraryUnavailableError:  # Installed without a compiler: the reference is all there is to test.
        return ()


ISAS = _isas()
IMPLEMENTATIONS = ("reference", *ISAS)


@functools.cache
def make_implementation(name: str) -> Implementation:
    return reference if name == "reference" else CpuKernels(Library(isa=name))


@contextmanager
def without_packed_products() -> Iterator[None]:
    """Models that are loaded meanwhile multiply by torch, so they are not recorded for the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "has_packed_products", lambda *_: False)
        yield


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
