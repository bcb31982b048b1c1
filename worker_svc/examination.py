"""Examines this machine as workers see it: torch, kernels for the CPU, GPUs. For `quire doctor`."""

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Iterator

import torch

from quire.runtime.finding import Finding, Verdict
from quire_kernels import reference
from quire_kernels.backends import fastest_for
from quire_kernels.cpu.library import Library, LibraryUnavailableError, available_isas

_GIB = 1 << 30


def examine_device() -> Iterator[Finding]:
    """Looks at torch, the kernels, the GPUs, and the packages that only some models need."""
    yield _torch()
    yield _cpu_kernels()
    yield from _gpus()
    yield _compiler()
    yield _package("transformers", "for models that Quire has no own code for")
    yield _package("gguf", "for models in GGUF files")


def _torch() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a build for the CPU"
    return Finding("torch", Verdict.OK, f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")


def _cpu_kernels() -> Finding:
    try:
        library = Library()
    except LibraryUnavailableError as error:
        advice = "models run in plain torch, many times slower; install again with a C++ compiler (g++ 11 or later)"
        return Finding("CPU kernels", Verdict.WRONG, str(error), advice)
    others = [isa for isa in available_isas() if isa != library.isa]
    found = library.isa + (f" (also: {', '.join(others)})" if others else "")
    if library.isa == "avx2":
        return Finding("CPU kernels", Verdict.NOTE, found, "the processor has no AVX-512, which is faster")
    if library.isa == "neon":
        return Finding("CPU kernels", Verdict.NOTE, found, "the processor has no dot products of int8 (ARMv8.2)")
    return Finding("CPU kernels", Verdict.OK, found)


def _gpus() -> Iterator[Finding]:
    driver = shutil.which("nvidia-smi") is not None
    if not torch.cuda.is_available():
        advice = "install a torch with CUDA" if driver and not torch.version.cuda else ""
        found = "nvidia-smi is there, torch sees no GPU" if driver else "none; models run on the CPU"
        yield Finding("GPU", Verdict.WRONG if driver else Verdict.OK, found, advice)
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found = f"{gpu.name}, {gpu.total_memory / _GIB:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        yield Finding(f"GPU {index}", Verdict.OK, found)
    yield _triton()


def _triton() -> Finding:
    # The same choice as the worker's, which logs the reason of a refusal.
    if fastest_for(torch.device("cuda")) is reference:
        advice = "the operations run in plain torch, many times slower; see the warning above"
        return Finding("Triton", Verdict.WRONG, "missing, or does not work", advice)
    return Finding("Triton", Verdict.OK, _version("triton"))


def _compiler() -> Finding:
    found = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    if found is None:
        advice = "Triton, on GPUs, compiles with one when it runs, and an installation from source needs g++"
        return Finding("C compiler", Verdict.NOTE, "none", advice)
    return Finding("C compiler", Verdict.OK, found)


def _package(name: str, purpose: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, Verdict.NOTE, "not installed", purpose)
    return Finding(name, Verdict.OK, _version(name))


def _version(module: str) -> str:
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        # Its distribution has another name, as pytorch-triton.
        names = importlib.metadata.packages_distributions().get(module)
        return importlib.metadata.version(names[0]) if names else "of unknown version"
