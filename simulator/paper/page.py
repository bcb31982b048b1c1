"""Writes docs/paper/README.md from the measurements of the figures."""

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.hardware import (
    COLLECTIVE_BASE_S,
    COLLECTIVE_HOP_S,
    COPY_LAUNCH_S,
    KERNEL_GAP_S,
    KERNELS_PER_LAYER,
    Hardware,
)
from simulator.paper.drawing import save
from simulator.paper.figure import Figure, table
from simulator.paper.figures import FIGURES
from simulator.paper.systems import OPT_13B, OPT_66B, OPT_175B

_HEAD = """# The paper's evaluation, run again

The claims of Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention* (SOSP
2023), and the results of Quire's scheduler under the same loads, simulated on the same devices:
"""

_AFTER_SUMMARY = """In a line with "by", Quire's number (in the paper vLLM's) is divided by the other system's. Rates
are compared at equal latency. Modelled steps take less time than the paper's:
[one fitted constant](#the-same-with-one-fitted-constant) shows the consequences, and each figure below explains
differences of more than 25%.
"""

_METHOD = """## How it is made

`make paper` makes this page and its pictures, `make paper ARGS=fig12` one figure; the numbers behind each are in the
JSON file of its name. [ADR 38](../adr/0038-the-evaluation-is-run-again.md) says why it is made in this way.

Quire's scheduler, the one that serves, runs in virtual time. A cost model gives the duration of each step on the
paper's devices. A step is planned when the one before it is over, as in the paper's systems; the server has two in
flight. The paper's other systems are the same scheduler and cost model with another block manager
(`simulator/baselines/`):

- **Orca** batches by iteration and reserves a contiguous region for each sequence when its request is admitted, from a
  buddy allocator: for the longest sequence of the model (Max), for the next power of two of the output (Pow2), or for
  the exact need of the request (Oracle). Nothing is shared, and a sequence that forks copies its parent.
- **FasterTransformer** gets the requests that came first, up to the number that fits with room for the longest sequence
  each, and runs this batch to its end; its requests are answered together.

Normalized latency is the mean over requests of end-to-end seconds by tokens of output. A difference from the paper of
more than 25% is set in bold and explained.
"""


_WRAPPER = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)


def write_figure(figure: Figure, directory: Path, data: Mapping[str, Any], scale: float) -> None:
    """Writes the measurements of a figure with loads of this scale, and its picture."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {"scale": scale, "data": _rounded(data)}
    _path(figure, directory).write_text(json.dumps(content, indent=1) + "\n")
    if figure.draw is not None:
        save(figure.draw(content["data"]), directory / f"{figure.name}.svg")


def write_page(directory: Path) -> None:
    """Writes the page of all figures that have data."""
    sections = [make_section(figure, directory) for figure in FIGURES.values()]
    (directory / "README.md").write_text("\n".join([_HEAD, _summary(directory), _METHOD, _constants(), *sections]))


def redraw(directory: Path) -> None:
    """Draws all pictures again from the existing data."""
    for figure in FIGURES.values():
        if figure.draw is not None and _path(figure, directory).exists():
            content = json.loads(_path(figure, directory).read_text())
            save(figure.draw(content["data"]), directory / f"{figure.name}.svg")


def _summary(directory: Path) -> str:
    """The claims of all figures that have data."""
    rows: list[tuple[str, ...]] = []
    for figure in FIGURES.values():
        if figure.claims is not None and _path(figure, directory).exists():
            number = figure.title.partition(":")[0].removeprefix("Figure ")
            anchor = re.sub(r"[^a-z0-9 -]", "", figure.title.lower()).replace(" ", "-")
            claims = figure.claims(json.loads(_path(figure, directory).read_text())["data"])
            rows += [
                (what, f"[{number}](#{anchor})", paper, ours) for what, paper, ours in (row.cells for row in claims)
            ]
    return f"{table(['', 'figure', 'paper', 'Quire'], rows)}\n\n{_AFTER_SUMMARY}"


def _path(figure: Figure, directory: Path) -> Path:
    return directory / f"{figure.name}.json"


def make_section(figure: Figure, directory: Path) -> str:
    """The text of a figure with its heading, from the data in this directory."""
    lines = [f"## {figure.title}", ""]
    if not _path(figure, directory).exists():
        return "\n".join([*lines, f"Not made yet; `make paper ARGS={figure.name}` makes it.", ""])
    content = json.loads(_path(figure, directory).read_text())
    if figure.draw is not None:
        lines += [f"![{figure.title}]({figure.name}.svg)", ""]
    if content["scale"] != 1:
        lines += [f"**Made with loads of {content['scale']:.0%} of their length (`--scale`); not to be quoted.**", ""]
    return "\n".join([*lines, wrapped(figure.section(content["data"])), ""])


def wrapped(text: str) -> str:
    """Wraps lines at 120 columns, except rows of tables."""
    lines = text.splitlines()
    return "\n".join(line if line.startswith("|") else _WRAPPER.fill(line) for line in lines)


def _rounded(value: Any) -> Any:
    """Floats to six digits: enough for every picture, and for readable files."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value


def _constants() -> str:
    setups = (OPT_13B, OPT_66B, OPT_175B)
    rows = [
        [
            setup.model.upper(),
            f"{hardware.num_devices} x {hardware.name.split('-x')[0]}",
            f"{setup.num_slots:,}",
            f"{hardware.bandwidth / 1e9:,.0f} GB/s",
            f"{hardware.flops / 1e12:,.0f} TFLOP/s",
            f"{hardware.link_bandwidth / 1e9:,.0f} GB/s",
            f"{hardware.host_bandwidth / 1e9:,.0f} GB/s",
        ]
        for setup in setups
        for hardware in [Hardware.named(setup.hardware)]
    ]
    head = ["", "devices", "slots", "memory", "products", "NVLink, one way", "PCIe, one way"]
    return f"""## The cost model

A step takes the time of its bytes at the memory's bandwidth, or of its products at the peak of 16-bit numbers,
whichever is more, separately for linear layers and attention. In addition it takes the time of:

- {KERNELS_PER_LAYER} kernels a layer, with {_us(KERNEL_GAP_S)} between each and the next;
- two all-reduces a layer over several devices: {_us(COLLECTIVE_BASE_S)}, {_us(COLLECTIVE_HOP_S)} a hop, and the bytes
  at the speed of NVLink;
- copies of blocks at the memory's bandwidth;
- swaps at the speed of PCIe, or {_us(COPY_LAUNCH_S)} for each piece of a block in each layer, whichever is more.

All constants are from data sheets and other publications of the makers, which `simulator/hardware.py` names; none is
tuned. The host's time for a step is not modelled, and kernels attain the peak, so a modelled device is faster than the
paper's system and serves higher rates. Only ratios of rates, and shares of memory, can be compared.

{table(head, rows)}
"""


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
