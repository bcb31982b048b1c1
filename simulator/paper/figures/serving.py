"""Latency against rate: figures 12, 14, 16 and 17."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from quire.load import Lognormal, chat, shared_prefix
from simulator.paper.curves import LEVELS, Panel, Runner, ratios, sweep
from simulator.paper.drawing import Picture, draw_curves, legend
from simulator.paper.drawing import panels as empty_panels
from simulator.paper.figure import Comparison, Data, Figure, Range, compared, table
from simulator.paper.systems import (
    FASTER_TRANSFORMER,
    LLAMA_13B,
    MAX,
    MAX_MODEL_LEN,
    OPT_13B,
    OPT_66B,
    OPT_175B,
    ORACLE,
    ORCAS,
    QUIRE,
    VOCAB_SIZE,
    Load,
    alpaca_load,
    sharegpt_load,
)


def measure(runner: Runner, panels: Sequence[Panel]) -> dict[str, Any]:
    """Curves and ratios of each panel, as JSON."""
    found: dict[str, Any] = {}
    for panel, curves in zip(panels, sweep(runner, panels), strict=True):
        found[panel.title] = {
            "curves": {system: asdict(curve) for system, curve in curves.items()},
            "ratios": {system: asdict(ratio) | {"range": ratio.range} for system, ratio in ratios(curves).items()},
        }
    return found


def draw(data: Data, num_columns: int, published: Mapping[str, tuple[float, float]] = MappingProxyType({})) -> Picture:
    """A panel for each load; `published` are points of the paper by the panel's title."""
    picture, axes = empty_panels(-(-len(data) // num_columns), num_columns)
    for each, (title, panel) in zip(axes, data.items(), strict=False):
        draw_curves(each, title, panel["curves"], published.get(title))
    for each in axes[len(data) :]:
        each.set_visible(False)
    legend(picture, *axes[: len(data)])
    return picture


def ratio_range(data: Data, system: str, titles: Sequence[str]) -> Range | None:
    """The lowest and the highest ratio to a system over these panels and all levels."""
    ranges: list[Sequence[float]] = [each for title in titles if (each := data[title]["ratios"][system]["range"])]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def ratio_table(data: Data) -> str:
    """All ratios: Quire's rate divided by each other system's."""
    rows = [
        [title, system, *("-" if each is None else f"{each:.2f}" for each in (*ratio["at_levels"], ratio["saturated"]))]
        for title, panel in data.items()
        for system, ratio in panel["ratios"].items()
    ]
    return table(["", "rate by that of", *(f"at {level:g} times" for level in LEVELS), "requests always wait"], rows)


LEVEL_TEXT = (
    f"Ratios are of rates at equal normalized latency, {' / '.join(f'{level:g}' for level in LEVELS)} times the lowest "
    "of Quire in the same panel, by interpolation between the points of the curves; the last column has ratios of the "
    "rates that the systems serve if requests always wait."
)

_TITLES = {
    f"{setup.model.upper()}, {name}": (load, setup)
    for name, load in (("ShareGPT", sharegpt_load), ("Alpaca", alpaca_load))
    for setup in (OPT_13B, OPT_66B, OPT_175B)
}


def _measure_12(runner: Runner) -> dict[str, Any]:
    systems = [QUIRE, *ORCAS, FASTER_TRANSFORMER]
    return measure(runner, [Panel(title, setup, load(setup), systems) for title, (load, setup) in _TITLES.items()])


_PUBLISHED_12 = {"OPT-13B, ShareGPT": (2.0, 30.4 / (2 * 338)), "OPT-13B, Alpaca": (30.0, 132.44 / (30 * 58.45))}
"""The paper prints no numbers of its curves. These points follow from its figure 13, by Little's law: requests that run
divided by tokens a second."""


def _rows_12(data: Data) -> list[Comparison]:
    chats = [title for title in data if title.endswith("ShareGPT")]
    reached = [each for title in chats if (each := data[title]["ratios"][FASTER_TRANSFORMER]["at_levels"][-1])]
    return [
        Comparison("ShareGPT: rate by Orca (Oracle)'s", (1.7, 2.7), ratio_range(data, ORACLE, chats)),
        Comparison("ShareGPT: rate by Orca (Max)'s", (2.7, 8.0), ratio_range(data, MAX, chats)),
        Comparison("ShareGPT: highest rate by FasterTransformer's", 22.0, max(reached, default=None)),
    ]


def _section_12(data: Data) -> str:
    rows = compared(_rows_12(data), _REASON_12)
    return f"{LEVEL_TEXT} {_POINTS_12}\n\n{rows}\n\n{ratio_table(data)}\n\n{_ALPACA_12}"


_POINTS_12 = (
    "The paper prints no numbers of its curves; its point in two panels follows from its figure 13, by Little's law. "
    "It lies above the curve, as the paper's steps take longer than modelled ones."
)


_REASON_12 = (
    "Orca (Max): the highest ratio is that of OPT-66B. Its pool holds 4 reservations of 2,048 slots or 29 requests of "
    "the mean prompt and half of the mean output, so memory bounds the ratio to about 7; preempted requests that are "
    "computed again take a part of that. The lowest ratio is that of OPT-175B. There Quire runs five times as many "
    "requests, but a modelled step that reads all of the pool takes about twice as long as one that reads little of "
    f"it. FasterTransformer: compared at {LEVELS[-1]:g} times Quire's lowest latency. The nearer the latency is to the "
    "lowest that FasterTransformer has, as its requests wait for the longest of their batch, the higher the ratio, "
    f"without a bound: at {LEVELS[-2]:g} times it is 16 to 50. The paper does not say at which latency its 22 is."
)

_ALPACA_12 = (
    "As in the paper, OPT-175B with Alpaca is the exception: its pool is so large, and the sequences are so "
    "short, that Orca (Oracle) and Orca (Pow2) batch as many requests as the devices can compute."
)

FIGURE_12 = Figure(
    "fig12",
    "Figure 12: one sequence a request",
    _measure_12,
    _section_12,
    lambda data: draw(data, num_columns=3, published=_PUBLISHED_12),
    _rows_12,
)

_WIDTHS = (2, 4, 6)
_SINGLE = "1 sequence"


def _measure_14(runner: Runner) -> dict[str, Any]:
    samples = [Panel(f"{n} samples", OPT_13B, alpaca_load(OPT_13B, n=n), [QUIRE, *ORCAS]) for n in _WIDTHS]
    beams = [
        Panel(f"{width} beams", OPT_13B, alpaca_load(OPT_13B, beam_width=width), [QUIRE, *ORCAS]) for width in _WIDTHS
    ]
    single = Panel(_SINGLE, OPT_13B, alpaca_load(OPT_13B), [QUIRE, *ORCAS])
    return measure(runner, [single, *samples, *beams])


def _rows_14(data: Data) -> list[Comparison]:
    single, beams = _middle(data, _SINGLE, ORACLE), _middle(data, "6 beams", ORACLE)
    growth = None if single is None or beams is None else beams / single
    return [
        Comparison(f"{_SINGLE}: rate by Orca (Oracle)'s", 1.3, single, "{:.2f}"),
        Comparison("6 beams: rate by Orca (Oracle)'s", 2.3, beams, "{:.2f}"),
        Comparison("6 beams: the ratio by that of 1 sequence", 2.3 / 1.3, growth, "{:.2f}"),
    ]


def _section_14(data: Data) -> str:
    return f"OPT-13B, Alpaca. {LEVEL_TEXT}\n\n{compared(_rows_14(data), _REASON_14)}\n\n{ratio_table(data)}"


def _middle(data: Data, title: str, system: str) -> float | None:
    """The ratio at the middle level, None if it is not reached."""
    return data[title]["ratios"][system]["at_levels"][len(LEVELS) // 2]


_LONGER_STEPS = (
    "By Little's law the paper's figure 13 has steps that take 18.5 ms and 0.28 ms for each sequence longer than the "
    "model's"
)

_REASON_14 = (
    "A modelled step costs little more with more sequences, so memory decides how many run; the paper's steps grow "
    f"with the batch, which takes away part of what memory gives. {_LONGER_STEPS}; with such steps the first ratio, "
    "where requests always wait, falls from 2.1 to 1.7. So ours begins higher, and sharing adds less to it: with six "
    "beams Quire runs about eight times as many requests as Orca (Oracle), some hundreds of sequences in each step, "
    "and the rate grows less than the batch. Few requests come at these low rates, so neighbouring ratios differ by "
    "chance, too."
)

FIGURE_14 = Figure(
    "fig14",
    "Figure 14: parallel sampling and beam search",
    _measure_14,
    _section_14,
    lambda data: draw(data, num_columns=4),
    lambda data: _rows_14(data)[1:2],
)

_PREFIXES = {"1 example, prefix of 80 tokens": (80, 1.67), "5 examples, prefix of 341 tokens": (341, 3.58)}
_SENTENCE, _TRANSLATION = Lognormal.fit(30, 0.6), Lognormal.fit(40, 0.6)


def _measure_16(runner: Runner) -> dict[str, Any]:
    return measure(
        runner,
        [
            Panel(title, LLAMA_13B, _translations(prefix_len), [QUIRE, ORACLE])
            for title, (prefix_len, _) in _PREFIXES.items()
        ],
    )


def _translations(prefix_len: int) -> Load:
    dataset = shared_prefix(prefix_len, _SENTENCE, _TRANSLATION, MAX_MODEL_LEN, 32_000)
    return Load(dataset, duration_s=15, num_saturating=1000, shares_prefixes=True)


def _rows_16(data: Data) -> list[Comparison]:
    return [
        Comparison(f"{title}: rate by Orca (Oracle)'s", paper, _middle(data, title, ORACLE), "{:.2f}")
        for title, (_, paper) in _PREFIXES.items()
    ]


def _section_16(data: Data) -> str:
    text = (
        "LLaMA-13B. The paper's lengths of sentences are not published: sentences have 30 tokens on average and their "
        "translations 40, lognormal with a coefficient of variation of 0.6. Quire's prefix cache finds the prefix by "
        "itself; the paper's system is told of it."
    )
    return f"{text} {LEVEL_TEXT}\n\n{compared(_rows_16(data), _REASON_16)}\n\n{ratio_table(data)}"


_REASON_16 = (
    "Longer sentences change little: with 45 and 60 tokens the ratio for one example is 2.0. With the prefix computed "
    "once, Quire runs four times as many requests as Orca (Oracle), and a modelled step costs little more with more "
    f"sequences. {_LONGER_STEPS}; with such steps the ratio, where requests always wait, falls from 2.3 to 1.9."
)

FIGURE_16 = Figure(
    "fig16", "Figure 16: shared prefixes", _measure_16, _section_16, lambda data: draw(data, num_columns=2), _rows_16
)

_CHAT = "Chats"


def _measure_17(runner: Runner) -> dict[str, Any]:
    # With few turns, most turns would have a short history; the paper's conversations are long.
    dataset = chat(MAX_MODEL_LEN, VOCAB_SIZE, max_prompt_len=1024, mean_turns=_MEAN_TURNS)
    load = Load(dataset, duration_s=90, num_saturating=100)
    return measure(runner, [Panel(_CHAT, OPT_13B, load, [QUIRE, *ORCAS])])


_MEAN_TURNS = 8.0


def _rows_17(data: Data) -> list[Comparison]:
    return [Comparison(f"chats: rate by {system}'s", 2.0, _middle(data, _CHAT, system), "{:.2f}") for system in ORCAS]


def _section_17(data: Data) -> str:
    text = (
        "OPT-13B. A prompt is the history and the user's message, cut to its last 1,024 tokens; messages and answers "
        f"are as long as ShareGPT's, conversations have {_MEAN_TURNS:g} turns on average. Each turn arrives by itself, "
        "and blocks are not kept from one turn to the next, as in the paper."
    )
    return f"{text} {LEVEL_TEXT}\n\n{compared(_rows_17(data), _REASON_17)}\n\n{ratio_table(data)}"


_REASON_17 = "The reason for this difference is not known yet."

FIGURE_17 = Figure(
    "fig17",
    "Figure 17: chatbot",
    _measure_17,
    _section_17,
    lambda data: draw(data, num_columns=1),
    lambda data: _rows_17(data)[:1],
)
