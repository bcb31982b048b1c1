"""The highest rate of requests that a replica serves within an SLO, and what limits it."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.load import Report, Slo
from quire.load.plots import as_text, check_picture, save_picture
from simulator.memory import Limit
from simulator.replica import Outcome

_TOLERANCE = 1.04
"""Maximum factor between the rate that is found and the next one that fails."""

_FIRST_RATE = 1.0
GREATEST_RATE = 4096.0

_MIN_WAIT_SHARE = 0.05
"""Minimum share of the time for which a limit keeps requests waiting, to count as the limit."""

DEFAULTS: Mapping[str, Sequence[str]] = {
    "num_gpu_blocks": ("25%", "50%", "100%"),
    "max_num_seqs": ("32", "64", "128", "256"),
    "policy": ("fcfs", "fair"),
    "block_size": ("8", "16", "32"),
    "max_num_batched_tokens": ("1024", "2048", "4096", "8192"),
    "max_prefill_share": ("0.25", "0.5", "1"),
    "preemption_mode": ("recompute", "swap"),
    "max_drafts": ("0", "3", "7"),
    "acceptance": ("0.3", "0.6", "0.9"),
    "prefill_replicas": ("0", "1"),
}
"""The settings that can be swept, with their default values. A share of blocks is relative to the default pool."""


def parse_sweep(text: str) -> dict[str, tuple[str, ...]]:
    """`num_gpu_blocks=500:1000,policy` as values by name. Raises ValueError."""
    chosen: dict[str, tuple[str, ...]] = {}
    for part in text.split(","):
        name, has_values, values = part.strip().replace("-", "_").partition("=")
        if name not in DEFAULTS:
            raise ValueError(f'"{name}" cannot be swept; expected NAME or NAME=VALUE:VALUE with {", ".join(DEFAULTS)}')
        if name in chosen:
            raise ValueError(f"{name} is there twice")
        chosen[name] = tuple(values.split(":")) if has_values else tuple(DEFAULTS[name])
        if not all(chosen[name]):
            raise ValueError(f"{name} has an empty value")
        if len({*chosen[name]}) < len(chosen[name]):
            raise ValueError(f"{name} has a value twice")
    return chosen


def combinations(sweep: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """All combinations of values, the last setting changing fastest."""
    return [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]


@dataclass(frozen=True, slots=True)
class Found:
    """The result for one setting.

    Attributes:
        rate: Requests a second; None if even the lowest rate that was tried breaks the SLO.
        outcome, report: The run at that rate, or at the lowest one that was tried.
        limited_by: The limit at higher rates: blocks, rows, tokens, prefix, or compute if it is nothing of the
            scheduler; None if no rate that was tried broke the SLO.
    """

    rate: float | None
    outcome: Outcome
    report: Report
    limited_by: str | None


def highest_rate(
    run: Callable[[float], Outcome],
    slo: Slo,
    min_share: float,
    lowest_rate: float,
    greatest_rate: float = GREATEST_RATE,
) -> Found:
    """Finds the highest rate at which this share of the requests keeps the SLO, by bisection.

    `run` serves requests that arrive at a rate for a while. Rates below `lowest_rate` or above `greatest_rate` are not
    tried. The share must fall as the rate rises; otherwise the result is any place where it crosses the bound.
    """
    known: dict[float, tuple[Outcome, Report]] = {}

    def keeps(rate: float) -> bool:
        outcome = run(rate)
        known[rate] = outcome, outcome.report(rate, slo)
        return (known[rate][1].slo_share or 0.0) >= min_share

    good, bad = _bracket(keeps, lowest_rate, greatest_rate)
    while good is not None and bad is not None and bad / good > _TOLERANCE:
        middle = (good * bad) ** 0.5
        if keeps(middle):
            good = middle
        else:
            bad = middle
    outcome, report = known[good if good is not None else min(known)]
    return Found(good, outcome, report, None if bad is None else _what_limits(known[bad][0]))


def _bracket(
    keeps: Callable[[float], bool], lowest_rate: float, greatest_rate: float
) -> tuple[float | None, float | None]:
    """Two neighbouring rates: the SLO is kept at the lower one only. Each is None if there is no such rate."""
    rate = max(_FIRST_RATE, lowest_rate)
    if keeps(rate):
        while 2 * rate <= greatest_rate:
            if not keeps(2 * rate):
                return rate, 2 * rate
            rate *= 2
        return rate, None
    while rate > lowest_rate:
        lower = max(rate / 2, lowest_rate)
        if keeps(lower):
            return lower, rate
        rate = lower
    return None, rate


def _what_limits(outcome: Outcome) -> str:
    waits = {limit: share for limit, share in outcome.limits().items() if limit is not Limit.DEMAND}
    if sum(waits.values()) < _MIN_WAIT_SHARE:
        return "compute"
    return max(waits, key=lambda limit: waits[limit]).value


def draw(found: Mapping[str, Found], path: Path, title: str) -> None:
    """Draws a bar for each setting by its name, in the colour of its limit. Raises as `check_picture`, and OSError."""
    check_picture(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    kinds = sorted({each.limited_by or "nothing" for each in found.values()})
    with mpl.rc_context({"svg.hashsalt": "quire", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7.5, 1.2 + 0.3 * len(found)), layout="constrained")
        axes = figure.subplots()
        for place, each in enumerate(found.values()):
            kind = each.limited_by or "nothing"
            axes.barh(place, each.rate or 0.0, color=f"C{kinds.index(kind)}")
            axes.annotate(f" {each.rate or 0.0:.3g}, {kind}", (each.rate or 0.0, place), va="center", fontsize=8)
        axes.set_yticks(range(len(found)), list(found))
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set_xlim(left=0)
        axes.set_xlabel("highest rate within the SLO, requests/s, and what limits it")
        axes.set_title(as_text(title), fontsize=10)
        save_picture(figure, path)
