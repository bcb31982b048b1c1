"""The findings of a torture, as lines for people, as JSON, and as a script that repeats it."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire_torture.faults import NOTHING
from quire_torture.oracle import WRONG, Verdict
from quire_torture.run import Plan, Report, Step, Struck, Wrong
from quire_torture.statistics import Median, median_of
from quire_torture.traffic import Call

_MAX_SHOWN = 5
_COLUMNS = {
    "lost": (Verdict.LOST,),
    "repeated": (Verdict.REPEATED, Verdict.REORDERED),
    "changed": (Verdict.CHANGED,),
    "drifted": (Verdict.DRIFTED,),
    "foreign": (Verdict.CONTAMINATED,),
    "hung": (Verdict.HUNG,),
    "malformed": (Verdict.MALFORMED, Verdict.USAGE),
    "errors": (Verdict.ERROR,),
}


def table(reports: Mapping[str, Report]) -> Iterator[str]:
    """One line for each run."""
    yield f"{'':<20}{'requests':>9}{'equal':>7}{'left':>6}" + "".join(f"{name:>10}" for name in _COLUMNS)
    for name, report in reports.items():
        counts = "".join(f"{report.count(*verdicts):>10}" for verdicts in _COLUMNS.values())
        yield f"{name:<20}{report.num_calls:>9}{report.num_equal:>7}{report.num_left:>6}{counts}"


def first_outputs(reports: Mapping[str, Report]) -> Iterator[str]:
    """One line for each run: how long requests wait for their first output."""
    for name, report in reports.items():
        if report.firsts_s:
            longest = sorted(report.firsts_s)[-1 - len(report.firsts_s) // 100]
            median = median_of(report.firsts_s)
            yield f"{name:<20}seconds to the first output: median {median!s}, p99 {longest:.2f}"


def fault_table(reports: Mapping[str, Report], num_streams: int) -> Iterator[str]:
    """One line for each kind of fault, with medians of the pauses of callers and their 95% intervals."""
    yield f"{'times':>6}  {'seconds without a token':<24}{'seconds to service':<24}fault"
    for report in reports.values():
        for text, struck in by_text(report).items():
            pauses, served = medians_of(struck, num_streams)
            yield f"{len(struck):>6}  {pauses!s:<24}{served!s:<24}{text}"
        yield from (f"{count:>6}  did not happen: {text}" for text, count in report.missed.items())


def by_text(report: Report) -> dict[str, list[Struck]]:
    kinds: dict[str, list[Struck]] = {}
    for each in report.struck:
        kinds.setdefault(each.text, []).append(each)
    return dict(sorted(kinds.items()))


def medians_of(struck: Sequence[Struck], num_streams: int) -> tuple[Median | None, Median | None]:
    """Medians of the callers' median pause at each fault, where a caller without a pause has 0, and of the time until
    the server serves again."""
    pauses = list[float]()
    for each in struck:
        values = sorted(each.pauses_s.values(), reverse=True)
        middle = median_of([*values, *[0.0] * (num_streams - len(values))][:num_streams])
        pauses.append(0.0 if middle is None else middle.value)
    return median_of(pauses), median_of([each.served_s for each in struck if each.served_s is not None])


def findings(reports: Mapping[str, Report]) -> Iterator[str]:
    """The defects, some examples of each verdict, and the errors by kind."""
    for name, report in reports.items():
        shown = Counter[Verdict]()
        for wrong in report.wrongs:
            verdict = wrong.finding.verdict
            shown[verdict] += 1
            if verdict is not Verdict.ERROR and shown[verdict] <= _MAX_SHOWN:
                yield f"{name}: {verdict}: call {wrong.call.number}, {wrong.call.question.kind}: {wrong.finding.detail}"
        yield from (f"{name}: {count} x error: {kind}" for kind, count in report.errors.most_common())


def as_json(plan: Plan, reports: Mapping[str, Report], unsupported: Mapping[str, str]) -> dict[str, Any]:
    def of(report: Report) -> dict[str, Any]:
        faults = {
            text: dict(zip(("pause_s", "served_s"), map(_interval, medians_of(struck, plan.num_streams)), strict=True))
            | {"times": len(struck)}
            for text, struck in by_text(report).items()
        }
        return {
            "requests": report.num_calls,
            "equal": report.num_equal,
            "left": report.num_left,
            "retries": report.num_retries,
            "verdicts": {str(verdict): report.count(verdict) for verdict in Verdict},
            "errors": report.errors,
            "faults": faults,
            "did_not_happen": report.missed,
            "max_drift": max(report.drifts, default=None),
            "first_output_s": _interval(median_of(report.firsts_s)),
            "seconds": round(report.seconds, 1),
        }

    return {
        "url": plan.url,
        "model": plan.model,
        "seed": plan.seed,
        "streams": plan.num_streams,
        "not_supported": unsupported,
        "runs": {name: of(report) for name, report in reports.items()},
    }


def _interval(median: Median | None) -> dict[str, float] | None:
    if median is None:
        return None
    return {"median": round(median.value, 3), "low": round(median.low, 3), "high": round(median.high, 3)}


def script(plan: Plan, steps: Sequence[Step], wrongs: Sequence[Wrong]) -> str:
    """A shell script that sends the calls of a small story at once, with its faults between them."""
    base = plan.url.rstrip("/").removesuffix("/v1")
    lines = ["#!/bin/sh", "# Each answer is in answer-NUMBER. The defects were:"]
    lines += [
        f"# call {each.call.number}: {each.finding.verdict}: {each.finding.detail}" for each in wrongs[:_MAX_SHOWN]
    ]
    for step in steps:
        if isinstance(step, Call):
            key = "" if step.api_key is None else ' -H "Authorization: Bearer $API_KEY"'
            limit = "" if step.leaves_after is None else " --max-time 0.3"
            body = shlex.quote(json.dumps({"model": plan.model, **step.question.body}))
            head = f"curl -sN{limit}{key} -H 'Content-Type: application/json' {base}{step.question.path}"
            lines.append(f"{head} -d {body} > answer-{step.number} &")
        elif step is not NOTHING:
            lines += ["sleep 0.3", _as_command(step.text)]
    return "\n".join([*lines, "wait", ""])


def _as_command(fault: str) -> str:
    """A fault as a command of the shell, or as a comment if only the tool can do it."""
    word, _, name = fault.partition(" ")
    pid = f"$(pgrep -of {shlex.quote(name)})"
    match word:
        case "kill" | "term" if "{pid:" not in fault:
            return f"kill -{word.upper()} {pid}"
        case "stop":
            return f"kill -STOP {pid}; (sleep 5; kill -CONT {pid}) &"
        case _:
            command = re.sub(r"\{pid:([^{}]+)\}", lambda found: f"$(pgrep -of {shlex.quote(found[1])})", fault)
            return command if command != fault else f"# here: {fault}"


def wrong_beyond(report: Report, without: Report) -> set[Verdict]:
    """The verdicts that are more frequent than in the run without faults, and not by chance: by more than two standard
    deviations of that number."""
    ratio = report.num_calls / max(1, without.num_calls)
    expected = {each: without.count(each) * ratio for each in WRONG}
    return {each for each in WRONG if report.count(each) > expected[each] + 2 * expected[each] ** 0.5}


def write(path: Path, facts: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=2) + "\n")
