"""Finding and loading the library, and the effects of a failure."""

import logging
from ctypes import Structure, c_int64
from pathlib import Path

import pytest
import torch

from quire_kernels import backends, ops, reference
from quire_kernels.cpu import library
from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.cpu.library import LIBRARY, STRUCTS, Library, LibraryUnavailableError, available_isas, find_open_mp


def test_the_library_was_built_and_runs_here() -> None:
    assert isinstance(backends.implementation_for(torch.device("cpu")), CpuKernels)
    assert Library().isa == available_isas()[0]


def test_the_runtime_is_the_one_that_came_with_torch() -> None:
    assert Path(torch.__file__).parents[1] in find_open_mp().parents


def test_without_a_library_the_reference_runs_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    backends.fastest_for.cache_clear()
    monkeypatch.setattr(backends, "Library", lambda: Library(tmp_path / "libquire_cpu.so"))
    try:
        with caplog.at_level(logging.WARNING, logger="kernels"):
            x = torch.randn(2, 8)
            for _ in range(3):
                assert torch.equal(ops.silu_and_mul(x), reference.silu_and_mul(x))
    finally:
        backends.fastest_for.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "no CPU kernels, the operations run in plain torch: libquire_cpu.so was not built (it takes a C++20 compiler "
        "at installation)"
    ]


def refuse_here(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(library, name, value)
        library._opened.cache_clear()
        with pytest.raises(LibraryUnavailableError, match="was built from other sources"):
            Library()


def test_a_library_with_a_field_or_constant_more_less_or_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    constants, (first, *rest) = dict(library._CONSTANTS), list(STRUCTS)
    for changed in (constants | {"kPanel": 16}, constants | {"kNew": 1}, {"kPanel": 32}):
        refuse_here(monkeypatch, "_CONSTANTS", changed)
    for fields in (first._fields_[:-1], [*first._fields_, ("new", c_int64)]):
        other = type(first.__name__, (Structure,), {"_fields_": fields})
        refuse_here(monkeypatch, "STRUCTS", [other, *rest])


def test_what_is_not_our_library_or_not_for_this_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libquire_cpu.so"
    path.write_bytes(b"not a library")
    for load, message in (
        (lambda: Library(path), r"libquire_cpu\.so cannot be loaded"),
        (lambda: Library(find_open_mp()), r"cannot be loaded: .*quire_isas"),
        (lambda: Library(LIBRARY, isa="mmx"), rf"instruction set 'mmx' is not among .*{available_isas()[-1]}"),
    ):
        with pytest.raises(LibraryUnavailableError, match=message):
            load()


def test_a_process_without_openmp_gets_the_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none() -> Path:
        raise LibraryUnavailableError("torch has loaded no OpenMP runtime")

    monkeypatch.setattr(library, "find_open_mp", none)
    with pytest.raises(LibraryUnavailableError, match="no OpenMP runtime"):
        Library()
    monkeypatch.setattr(library, "find_open_mp", lambda: LIBRARY)
    with pytest.raises(LibraryUnavailableError, match=r"is not a usable OpenMP runtime: .*GOMP_parallel"):
        Library()
