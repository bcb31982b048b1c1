"""The report of `quire bench` as text."""

from collections.abc import Mapping, Sequence

from quire.load import Report, Statistics

_LATENCIES = (
    ("TTFT", "ttft", "ms"),
    ("TPOT", "tpot", "ms"),
    ("ITL", "itl", "ms"),
    ("E2E", "e2e", "ms"),
    ("normalized", "normalized", "ms/token"),
)
_UNKNOWN = "-"


def make_table(
    labels: Sequence[str], reports: Sequence[Report], more: Mapping[str, Sequence[float | None]] | None = None
) -> str:
    """One column for each run. `more` has further rows by name."""
    rows: list[tuple[str, list[str]]] = [("request rate", list(labels))]

    def add(name: str, values: Sequence[float | None], digits: int = 0) -> None:
        if any(value is not None for value in values):
            rows.append((name, [_number(value, digits) for value in values]))

    add("requests", [report.requests for report in reports])
    add("failed", [report.requests - report.completed for report in reports])
    add("duration, s", [report.duration_s for report in reports], 1)
    add("requests/s", [report.requests_per_s for report in reports], 2)
    add("output tokens/s", [report.output_tokens_per_s for report in reports], 1)
    add("all tokens/s", [report.total_tokens_per_s for report in reports], 1)
    add("prompt tokens", [report.prompt_tokens for report in reports])
    add("cached tokens", [report.cached_tokens for report in reports])
    add("output tokens", [report.output_tokens for report in reports])
    add("preemptions", [report.preemptions for report in reports])
    drafts = [_drafts(report) for report in reports]
    add("drafts verified", [each and each[0] for each in drafts])
    add("drafts right, %", [each and 100 * each[1] for each in drafts], 1)
    for name, field, unit in _LATENCIES:
        statistics: list[Statistics | None] = [getattr(report, field) for report in reports]
        for part in ("mean", "p50", "p90", "p99"):
            label = f"{name} {part}, {unit}" if part == "mean" else f"{' ' * len(name)} {part}"
            add(label, [None if each is None else getattr(each, part) * 1e3 for each in statistics], 1)
    slo = next((report.slo for report in reports if report.slo is not None), None)
    add(f"goodput/s ({slo})", [report.goodput for report in reports], 2)
    add("share of good requests", [report.slo_share for report in reports], 3)
    add("client, share of a core", [report.client_cpu_share for report in reports], 2)
    for name, values in (more or {}).items():
        add(name, values, 1)
    widths = [max(len(row[1][column]) for row in rows) for column in range(len(reports))]
    name_width = max(len(name) for name, _ in rows)
    return "\n".join(
        f"{name:<{name_width}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, cells in rows
    )


def make_errors(reports: Sequence[Report], messages: Mapping[str, str]) -> list[str]:
    """A line for each reason of errors, over all runs."""
    counts: dict[str, int] = {}
    for report in reports:
        for reason, count in report.errors.items():
            counts[reason] = counts.get(reason, 0) + count
    return [
        f"{count:,} failed, {reason}{f': {messages[reason]:.200}' if reason in messages else ''}"
        for reason, count in sorted(counts.items(), key=lambda item: -item[1])
    ]


def _drafts(report: Report) -> tuple[float, float] | None:
    """The number of verified drafts, and the share of right ones; None if there were no drafts."""
    counters = report.counters or {}
    verified = counters.get("draft_tokens", 0.0)
    return (verified, counters["accepted_draft_tokens"] / verified) if verified else None


def _number(value: float | None, digits: int) -> str:
    return _UNKNOWN if value is None else f"{value:,.{digits}f}"
