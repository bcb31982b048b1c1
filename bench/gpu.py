"""Checks the Triton kernels against float64, and measures kernels, decode steps and serving on the GPU of this machine.

Needs torch, Triton and the working tree, not the installed package: `python -m bench gpu` from the repository's root.
Decode steps need what a worker needs, serving needs all services and transformers. A failed import costs only its own
group. No group begins after `--seconds`. After an error that leaves the device unusable for this process, another
process continues; `--resume` continues an interrupted run. Without `--out` and `--only`, the results go to
bench/results/gpu.json.
"""

import argparse
import itertools
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu_findings import Collector, DeviceLostError, Findings, Groups, Item

if TYPE_CHECKING:
    from bench.gpu_checks import Check
    from bench.gpu_figures import Figure

RESULTS = Path(__file__).parent / "results" / "gpu.json"
SECONDS = 420.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: checks only, interpreted")
    parser.add_argument("--check-only", action="store_true", help="measure nothing")
    parser.add_argument("--skip-checks", action="store_true", help="measure only")
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="groups to measure, by the start of their names")
    parser.add_argument("--shape", choices=("llama-1b", "llama-8b"), default="llama-1b", help="served model")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time after which no group begins")
    parser.add_argument("--seed", type=int, help="of random inputs; default: from the clock, or from --resume")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="JSON file whose groups are not run again")


def main(arguments: argparse.Namespace) -> None:
    if arguments.device == "cpu":
        if not arguments.check_only:
            sys.exit("bench.gpu: --device cpu interprets the kernels, whose speed says nothing: add --check-only")
        # Read by Triton when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench.gpu: torch sees no CUDA device; on a machine without one, --check-only --device cpu interprets")
    if arguments.only is not None:
        _check_names(arguments.only, arguments.shape)
    findings = _begin(arguments)
    print(f"seed {findings.seed}, torch {torch.__version__}, {_device_name(arguments.device)}", flush=True)
    torch.manual_seed(findings.seed)
    deadline = time.monotonic() + arguments.seconds
    try:
        _run(arguments, findings, deadline)
    except DeviceLostError as error:
        print(f"the device is lost to this process since {error}; another one goes on", flush=True)
        sys.exit(_run_another(findings, deadline))
    _report(findings)


def _begin(arguments: argparse.Namespace) -> Findings:
    """Empty findings, or the findings of --resume with their seed."""
    if arguments.resume is None:
        return Findings(time.time_ns() % 2**32 if arguments.seed is None else arguments.seed)
    findings = Findings.read(arguments.resume)
    if arguments.seed not in (None, findings.seed):
        sys.exit(
            f"bench.gpu: --seed is {arguments.seed}; what {arguments.resume} holds was drawn with {findings.seed}: "
            "leave --seed out"
        )
    return findings


def _path_of_results(arguments: argparse.Namespace) -> Path | None:
    """The file to write. A run of some groups does not replace a whole run's results, unless the file is named."""
    if arguments.check_only:
        return None
    return RESULTS if arguments.out is None and arguments.only is None else arguments.out


def _run(arguments: argparse.Namespace, findings: Findings, deadline: float) -> None:
    path = _path_of_results(arguments)
    header = {} if path is None else _header()

    def save() -> None:
        if path is not None:
            findings.write(path, header)

    def check(found: "Check") -> None:
        findings.checks.append(found)
        print(found, flush=True)

    def measure(found: "Figure") -> None:
        findings.figures.append(found)
        print(found, flush=True)

    collector = Collector(findings, save, _device_works if arguments.device == "cuda" else lambda: True)
    if not arguments.skip_checks:
        collector.collect(_check_groups(arguments.device, findings.seed), check, deadline)
    if not arguments.check_only:
        collector.collect(_chosen(_figure_groups(arguments.shape), arguments.only), measure, deadline)
    save()
    if path is not None:
        print(f"wrote {path}")


def _check_groups(device: str, seed: int) -> "Groups[Check]":
    import torch

    from bench.gpu_checks import check_groups

    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    # The interpreter computes with numpy, which cannot multiply bfloat16, and truncates where a GPU rounds.
    usable = dtypes if device == "cuda" else dtypes[:2]
    return itertools.chain(check_groups(device, usable), [("worker", _runner_checks(device, seed))])


def _runner_checks(device: str, seed: int) -> "Iterator[Check]":
    # Imported only here and below, since the other groups need only torch and Triton.
    from bench.gpu_runner_checks import runner_checks

    yield from runner_checks(device, seed)


def _figure_groups(shape: str) -> "Groups[Figure]":
    from bench.gpu_figures import Figure, device_copy_rate

    memory = device_copy_rate()
    yield "memory", iter((Figure("device copy (ceiling)", "GB/s", memory, memory, 0.0),))
    yield from _groups_beside(memory, shape)


def _groups_beside(memory: float, shape: str) -> "Groups[Figure]":
    """The most important groups come first."""
    from bench.gpu_figures import kernel_groups, tiling_groups

    yield from kernel_groups(memory)
    yield "step", _steps(memory, with_graphs=False)
    yield "step with graphs", _steps(memory, with_graphs=True)
    yield from tiling_groups(memory)
    yield "serving", _serving(shape)


def _steps(memory: float, *, with_graphs: bool) -> "Iterator[Figure]":
    from bench.gpu_steps import step_figures

    yield from step_figures(memory, with_graphs=with_graphs)


def _serving(shape: str) -> "Iterator[Figure]":
    from bench.gpu_serving import serving_figures

    yield from serving_figures(shape)


def _chosen(groups: "Groups[Item]", only: list[str] | None) -> "Groups[Item]":
    """The groups whose names start with one of `only`; all if it is None."""
    return (each for each in groups if only is None or each[0].startswith(tuple(only)))


def _check_names(only: list[str], shape: str) -> None:
    """Ends the process if no group would be measured for one of `only`."""
    names = ["memory", *(name for name, _ in _groups_beside(math.nan, shape))]
    if unknown := [each for each in only if not any(name.startswith(each) for name in names)]:
        sys.exit(f"bench.gpu: --only: no group begins with {', '.join(unknown)}; there are {', '.join(names)}")


def _device_works() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _run_another(findings: Findings, deadline: float) -> int:
    """Runs this command again for the groups that are left; returns its exit status."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        path = Path(folder) / "findings.json"
        findings.write(path, {})
        left = max(deadline - time.monotonic(), 0.0)
        # If a flag is given twice, the last one counts.
        flags = ["--resume", str(path), "--seconds", str(left)]
        return subprocess.run([sys.executable, *sys.orig_argv[1:], *flags], check=False).returncode


def _report(findings: Findings) -> None:
    """Ends the process with an error if anything is wrong or missing."""
    checks = findings.checks
    wrong = [f"{check.name}, {check.dtype}" for check in checks if not check.passed]
    broken = [*findings.broken, *(f"{name} (no time left)" for name in findings.late)]
    print(f"{len(checks) - len(wrong)} of {len(checks)} checks passed")
    if wrong or broken:
        sys.exit(f"bench.gpu: wrong: {'; '.join(wrong) or 'none'}. Stopped by an error: {'; '.join(broken) or 'none'}")


def _header() -> dict[str, Any]:
    return {
        "title": "Triton kernels on a GPU",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "machine": _machine(),
    }


def _machine() -> dict[str, Any]:
    import torch
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
    }


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(0) if device == "cuda" else "interpreted on the CPU"
