"""Prints and writes results."""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from quire.version import VERSION

_LOAD_AT_START = os.getloadavg()[0]
"""Other load on the machine when the measurement began: the load average of the minute before."""


@dataclass(frozen=True, slots=True)
class Series:
    """One figure over several interleaved runs."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        low, high = min(self.values), max(self.values)
        return f"{self.name:<34} {self.median:10.2f} {self.unit}   ({low:.2f} to {high:.2f}, {len(self.values)} runs)"


def median_ratio(a: Series, b: Series) -> float:
    """The median over runs of a / b, run by run, so that drift of the machine affects both alike."""
    return statistics.median(x / y for x, y in zip(a.values, b.values, strict=True))


def write_results(path: Path | None, title: str, series: Sequence[Series], **facts: object) -> None:
    """Writes a JSON file: the figures, the command, the commit, the machine with its load, and the versions. Without a
    path it does nothing."""
    if path is None:
        return
    versions = _versions()
    result = {
        "title": title,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", *sys.orig_argv[2:]]),
        "commit": _commit(),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "instruction_set": _instruction_set(),
            "load_at_start": _LOAD_AT_START,
            "python": platform.python_version(),
        },
        "versions": versions,
        "series": [{"name": s.name, "unit": s.unit, "median": s.median, "values": list(s.values)} for s in series],
        **facts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def add_results(path: Path | None, title: str, series: Sequence[Series], **facts: Mapping[str, object]) -> None:
    """As `write_results`, for a file that several runs fill: figures and entries of facts that have other names stay,
    and `runs` has the date, command and commit of each run."""
    if path is None:
        return
    earlier = json.loads(path.read_text()) if path.exists() else {}
    names = {each.name for each in series}
    write_results(path, title, series, **{name: {**earlier.get(name, {}), **fact} for name, fact in facts.items()})
    result = json.loads(path.read_text())
    kept = [each for each in earlier.get("series", []) if each["name"] not in names]
    run = {key: result[key] for key in ("date", "command", "commit")}
    runs = [*(each for each in earlier.get("runs", []) if each != run), run]
    path.write_text(json.dumps({**result, "series": kept + result["series"], "runs": runs}, indent=2) + "\n")


def _commit() -> str | None:
    """The commit of this checkout, with `-dirty` if files differ from it; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def _instruction_set() -> str | None:
    """The instruction set that the CPU kernels use; None if they were not built."""
    # Imports torch, which most measurements must not have in memory while they run.
    from quire_kernels.cpu.library import LibraryUnavailableError, available_isas

    try:
        return available_isas()[0]
    except LibraryUnavailableError:
        return None


def _versions() -> dict[str, str]:
    """Versions that the figures depend on: of this project, and of its dependencies if the run has loaded them."""
    loaded = {name: str(sys.modules[name].__version__) for name in ("numpy", "torch") if name in sys.modules}
    return {"quire": VERSION, **loaded}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
