"""Checks the Triton kernels against float64 and measures them on the GPU of this machine, in a few minutes.

Needs torch, Triton and the working tree, not the installed package: `python -m bench.gpu` from the repository's root.
"""

import argparse
import json
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
RESULTS = Path(__file__).parent / "results" / "gpu.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: check only, interpreted")
    parser.add_argument("--check-only", action="store_true", help="measure nothing")
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
    checks, broken = _collect(check_groups(arguments.device, usable), _print_check)
    figures: list[Figure] = []
    if not arguments.check_only:
        from bench.gpu_figures import figure_groups

        figures, unmeasured = _collect(figure_groups(), _print_figure)
        broken += unmeasured
        _write(arguments, checks, figures, broken)
    wrong = [f"{check.name}, {check.dtype}" for check in checks if not check.passed]
    print(f"{len(checks) - len(wrong)} of {len(checks)} checks passed")
    if wrong or broken:
        sys.exit(f"bench.gpu: wrong: {'; '.join(wrong) or 'none'}. Stopped by an error: {'; '.join(broken) or 'none'}")


def _collect(
    groups: Iterable[tuple[str, Iterator[Item]]], show: Callable[[Item], None]
) -> tuple[list[Item], list[str]]:
    """All items, and the names of groups that an error cut short; it does not take the other groups along."""
    items, broken = [], []
    for name, group in groups:
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
