"""Not in the paper: the reservations on a real worker of this machine, next to the simulation of the same runs."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from simulator.paper.curves import Runner
from simulator.paper.drawing import Picture, draw_bars, legend, panels
from simulator.paper.figure import Data, Figure, table
from simulator.paper.systems import ORCAS, QUIRE

_ROOT = Path(__file__).parents[3]


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


_SYSTEMS = (QUIRE, *ORCAS)
_MODELS = {
    "quire-tiny": ("--requests", "120"),
    "llama-160m": ("--shape", "llama-160m", "--requests", "32"),
}


def _measure(runner: Runner) -> dict[str, Any]:
    # One after the other, with the machine to itself, since time is measured.
    del runner
    return {model: bench("reservations", *flags) for model, flags in _MODELS.items()}


def _draw(data: Data) -> Picture:
    picture, axes = panels(1, len(data))
    for each, (model, measured) in zip(axes, data.items(), strict=True):
        medians = measured["medians"]
        bars = {
            "real": [medians[f"{system}, tokens/s"] for system in _SYSTEMS],
            "simulated": [medians[f"{system}, tokens/s simulated"] for system in _SYSTEMS],
        }
        draw_bars(each, [system.replace(" ", "\n") for system in _SYSTEMS], bars, "{:.0f}")
        each.set(title=model, ylabel="tokens / s")
    legend(picture, *axes)
    return picture


def _section(data: Data) -> str:
    head = [
        "",
        "requests that run, mean over steps",
        "simulated",
        "tokens/s",
        "simulated",
        "Quire's tokens/s by these",
        "simulated",
    ]
    texts = [
        "Not in the paper. Quire's core and a real worker on this machine, in one process; the three reservations are "
        "the same core with another block manager, and the same pool. Lengths of ShareGPT, the pool and the longest "
        "sequence are scaled to 512 tokens together. All requests come at once. The simulator predicts the same runs "
        "with a cost model that is fitted to their steps (`simulator/measured.py`)."
    ]
    for model, measured in data.items():
        medians, machine = measured["medians"], measured["machine"]
        rows = [
            [
                system,
                f"{medians[f'{system}, requests that run']:.1f}",
                f"{medians[f'{system}, requests that run, simulated']:.1f}",
                f"{medians[f'{system}, tokens/s']:.0f}",
                f"{medians[f'{system}, tokens/s simulated']:.0f}",
                f"{medians[f'{QUIRE}, tokens/s'] / medians[f'{system}, tokens/s']:.2f}",
                f"{medians[f'{QUIRE}, tokens/s simulated'] / medians[f'{system}, tokens/s simulated']:.2f}",
            ]
            for system in _SYSTEMS
        ]
        texts += [f"{model}, {measured['slots']:,} slots, {machine['processor']}:", table(head, rows)]
    return "\n\n".join(texts)


REAL = Figure("real", "A real run of the small kind", _measure, _section, _draw)
