"""Measurements on this machine in place of simulations: benchmarks of a checkout, each in a separate process."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


def bench(name: str, *flags: str) -> dict[str, Any]:
    """Runs `python -m bench NAME FLAGS`. Returns the medians of its series by name, and facts of the machine."""
    if not (_ROOT / "bench").is_dir():
        raise FileNotFoundError(f"{_ROOT} has no bench/: figures that are measured need a checkout of the repository")
    with tempfile.TemporaryDirectory(prefix="quire-paper-") as directory:
        out = Path(directory) / "figures.json"
        command = [sys.executable, "-m", "bench", name, *flags, "--out", str(out)]
        subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(out.read_text())
    medians = {each["name"]: statistics.median(each["values"]) for each in result["series"]}
    return {
        "medians": medians,
        **{key: result[key] for key in result if key in ("date", "machine", "versions", "residual", "slots")},
    }
