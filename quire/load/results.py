"""Files of results: the same JSON for a run against a server and for a simulated one."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quire.load.records import RequestRecord
from quire.load.report import Report

_FORMAT = "quire.load/1"


@dataclass(frozen=True, slots=True)
class Run:
    """One rate: its report, and a table of its requests by column."""

    report: Report
    requests: Mapping[str, Sequence[Any]]

    @classmethod
    def of(cls, report: Report, records: Iterable[RequestRecord]) -> Self:
        rows = [
            {
                "index": record.index,
                "arrival_s": _rounded(record.arrival_s),
                "sent_s": _rounded(record.sent_s),
                "end_s": _rounded(record.end_s),
                "ttft_s": _rounded(record.ttft_s),
                "tpot_s": _rounded(record.tpot_s),
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "output_tokens": record.output_tokens,
                "preemptions": record.preemptions,
                "error": record.error,
            }
            for record in records
        ]
        return cls(report, {name: [row[name] for row in rows] for name in rows[0]} if rows else {})


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one command measured or simulated.

    Attributes:
        source: Which command: "bench" or "simulate".
        name: What a picture calls it.
        facts: By name, what the figures depend on: version, commit, machine, model, flags, load.
        runs: One for each rate.
    """

    source: str
    name: str
    facts: Mapping[str, Any]
    runs: tuple[Run, ...]

    def write(self, path: Path) -> None:
        """The same result gives the same file, to the byte. Raises OSError."""
        runs = [{"report": run.report.as_json(), "requests": run.requests} for run in self.runs]
        head = {"format": _FORMAT, "source": self.source, "name": self.name, "facts": self.facts}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head | {"runs": runs}, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises OSError, and ValueError with one line where the file is no result."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise ValueError(f"{path} is no JSON, so no result of quire bench or quire simulate") from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f'{path} is no result of quire bench or quire simulate: its format is not "{_FORMAT}"')
        try:
            runs = tuple(Run(Report.from_json(run["report"]), run["requests"]) for run in content["runs"])
            return cls(content["source"], content["name"], content["facts"], runs)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is a damaged result: {type(error).__name__} {error}") from None


def _rounded(seconds: float | None) -> float | None:
    """To the microsecond."""
    return None if seconds is None else round(seconds, 6)
