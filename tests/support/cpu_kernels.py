"""The implementations that this machine has for tensors on the CPU."""

import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_kernels import ops, reference
from quire_kernels.backends import Implementation
from quire_kernels.cpu import library
from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.cpu.library import Library, LibraryUnavailableError, available_isas
from tests.support.emulated_amx import EMULATED_AMX, emulated_library
from tests.support.pairwise import pairwise

# A build with sanitizers, and the runtime for its threads (tests/sanitizers/run.sh).
if "QUIRE_TEST_CPU_LIBRARY" in os.environ:
    library.LIBRARY = Path(os.environ["QUIRE_TEST_CPU_LIBRARY"])
if "QUIRE_TEST_OPEN_MP" in os.environ:
    library.find_open_mp = lambda: Path(os.environ["QUIRE_TEST_OPEN_MP"])


def _isas() -> tuple[str, ...]:
    try:
        built = available_isas()
    except LibraryUnavailableError:  # Installed without a compiler: the reference is all there is to test.
        return ()
    can_build = "QUIRE_TEST_CPU_LIBRARY" not in os.environ and shutil.which("cmake") and shutil.which("c++")
    # Code for matrix units counts on vectors of 16 floats, which each processor with matrix units has.
    return (*built, EMULATED_AMX) if can_build and built[0].startswith(("amx", "avx512")) else built


ISAS = _isas()
IMPLEMENTATIONS = ("reference", *ISAS)


def _marks(value: object) -> tuple[pytest.MarkDecorator, ...]:
    """Marks cases of all but the best instruction set, which `make test` leaves out."""
    return (pytest.mark.all_isas,) if value in ISAS[1:] else ()


ISA_PARAMS = [pytest.param(isa, marks=_marks(isa)) for isa in ISAS]
IMPLEMENTATION_PARAMS = [pytest.param(name, marks=_marks(name)) for name in IMPLEMENTATIONS]


def parametrize_pairwise(names: str, *axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with pairwise combinations of the axes. The first axis has instruction sets or
    implementations; its name is `isa` or the name of a fixture."""
    cases = [pytest.param(*case, marks=_marks(case[0])) for case in pairwise(*axes)]
    first = names.split(",")[0]
    return pytest.mark.parametrize(names, cases, indirect=[] if first == "isa" else [first])


def library_of(isa: str) -> Library:
    return Library(emulated_library() if isa == EMULATED_AMX else None, isa)


@functools.cache
def make_implementation(name: str) -> Implementation:
    return reference if name == "reference" else CpuKernels(library_of(name))


@contextmanager
def without_packed_products() -> Iterator[None]:
    """Models that are loaded in the block multiply by torch, so they are not recorded for the CPU."""
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
