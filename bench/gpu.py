"""Checks the Triton kernels against float64, and measures kernels, decode steps and serving on the GPU of this machine.

Needs torch, Triton and the working tree, not the installed package: `python -m bench.gpu` from the repository's root.
Decode steps need what a worker needs, serving what all services and transformers need; what cannot be imported costs
its own group and no other. No group is begun after `--seconds`.
"""

import argparse
import itertools
import json
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from bench.gpu_checks import Check
    from bench.gpu_figures import Figure

Item = TypeVar("Item")
Groups = Iterable[tuple[str, Iterator[Item]]]
RESULTS = Path(__file__).parent / "results" / "gpu.json"
SECONDS = 420.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: check only, interpreted")
    parser.add_argument("--check-only", action="store_true", help="measure nothing")
    parser.add_argument("--skip-checks", action="store_true", help="measure only")
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="groups to measure, by the start of their names")
    parser.add_argument("--shape", choices=("llama-1b", "llama-8b"), default="llama-1b", help="model that is served")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which no group is begun")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="of the random inputs; the clock's")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON file to write (default: %(default)s)")


def main(arguments: argparse.Namespace) -> None:
    if arguments.device == "cpu":
        if not arguments.check_only:
            sys.exit("bench.gpu: --device cpu interprets the kernels, whose speed says nothing: add --check-only")
        # Read by Triton when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench.gpu: torch sees no CUDA device; on a machine without one, --check-only --device cpu interprets")
    from bench.gpu_checks import check_groups

    print(f"seed {arguments.seed}, torch {torch.__version__}, {_device_name(arguments.device)}", flush=True)
    torch.manual_seed(arguments.seed)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    # The interpreter computes with numpy, which multiplies no bfloat16, and cuts it off where a GPU rounds.
    usable = dtypes if arguments.device == "cuda" else dtypes[:2]
    deadline = time.monotonic() + arguments.seconds
    checks, broken = [], []
    if not arguments.skip_checks:
        groups = itertools.chain(
            check_groups(arguments.device, usable), [("worker", _runner_checks(arguments.device, arguments.seed))]
        )
        checks, broken = _collect(groups, _print_check, math.inf)
    figures: list[Figure] = []
    if not arguments.check_only:
        figures, unmeasured = _collect(
            _chosen(_figure_groups(arguments.shape), arguments.only), _print_figure, deadline
        )
        broken += unmeasured
        _write(arguments, checks, figures, broken)
    wrong = [f"{check.name}, {check.dtype}" for check in checks if not check.passed]
    print(f"{len(checks) - len(wrong)} of {len(checks)} checks passed")
    if wrong or broken:
        sys.exit(f"bench.gpu: wrong: {'; '.join(wrong) or 'none'}. Stopped by an error: {'; '.join(broken) or 'none'}")


def _runner_checks(device: str, seed: int) -> "Iterator[Check]":
    # Only here and below: the other groups need torch and Triton alone.
    from bench.gpu_runner_checks import runner_checks

    yield from runner_checks(device, seed)


def _figure_groups(shape: str) -> "Groups[Figure]":
    """What matters most comes first."""
    from bench.gpu_figures import Figure, device_copy_rate, kernel_groups, tiling_groups

    memory = device_copy_rate()
    yield "memory", iter((Figure("device copy (ceiling)", "GB/s", memory, memory, 0.0),))
    yield from kernel_groups(memory)
    yield "step", _steps(memory)
    yield "serving", _serving(shape)
    yield from tiling_groups(memory)


def _steps(memory: float) -> "Iterator[Figure]":
    from bench.gpu_steps import step_figures

    yield from step_figures(memory)


def _serving(shape: str) -> "Iterator[Figure]":
    from bench.gpu_serving import serving_figures

    yield from serving_figures(shape)


def _chosen(groups: "Groups[Item]", only: list[str] | None) -> "Groups[Item]":
    """The groups whose names start with one of `only`; all where it is None."""
    return (each for each in groups if only is None or each[0].startswith(tuple(only)))


def _collect(groups: "Groups[Item]", show: Callable[[Item], None], deadline: float) -> tuple[list[Item], list[str]]:
    """All items, and the names of groups that an error cut short, or that came after the deadline (of
    `time.monotonic`); an error does not take the other groups along."""
    items, broken = [], []
    for name, group in groups:
        if time.monotonic() > deadline:
            broken.append(f"{name} (no time left)")
            continue
        try:
            for item in group:
                items.append(item)
                show(item)
        except Exception:
            traceback.print_exc()
            broken.append(name)
    return items, broken


def _print_check(check: "Check") -> None:
    verdict = "ok" if check.passed else "WRONG"
    print(f"{check.name:<28} {check.dtype:<9} error {check.error:9.2e} of {check.limit:.1e}  {verdict}", flush=True)


def _print_figure(figure: "Figure") -> None:
    rates = f"{figure.rate:8.1f} of {figure.ceiling:7.1f} {figure.unit}: {figure.share:.0%}"
    wanted = "" if figure.target is None else f", wanted {figure.target:.0%}"
    print(f"{figure.name:<62} {figure.microseconds:9.1f} us {rates}{wanted}", flush=True)


def _write(arguments: argparse.Namespace, checks: list["Check"], figures: list["Figure"], broken: list[str]) -> None:
    result = {
        "title": "Triton kernels on a GPU",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "seed": arguments.seed,
        "machine": _machine(),
        "checks": [asdict(check) | {"passed": check.passed} for check in checks],
        "stopped_by_an_error": broken,
        "figures": [asdict(figure) | {"share": figure.share} for figure in figures],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {arguments.out}")


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    add_arguments(parser)
    main(parser.parse_args())
