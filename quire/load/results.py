"""Files of results: the same JSON for a run against a server and for a simulated one."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quire.load.records import RequestRecord
from quire.load.report import Report

_FORMAT = "quire.load/1"
_COLUMNS = (
    *("index", "arrival_s", "sent_s", "end_s", "ttft_s", "tpot_s"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "error"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One rate: its report, and a table of its requests by column."""

    report: Report
    requests: Mapping[str, Sequence[Any]]

    @classmethod
    def of(cls, report: Report, records: Iterable[RequestRecord]) -> Self:
        known = list(records)
        columns = {name: [_rounded(getattr(record, name)) for record in known] for name in _COLUMNS}
        return cls(report, columns if known else {})


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The results of one command that measured or simulated.

    Attributes:
        source: The command: "bench" or "simulate".
        name: The label in a picture.
        facts: By name, what the figures depend on: version, commit, machine, model, flags, load.
        runs: One for each rate.
    """

    source: str
    name: str
    facts: Mapping[str, Any]
    runs: tuple[Run, ...]

    def write(self, path: Path) -> None:
        """Writes the same file for the same result, to the byte. An existing file stays whole until then. Raises
        OSError."""
        runs = [{"report": run.report.as_json(), "requests": run.requests} for run in self.runs]
        head = {"format": _FORMAT, "source": self.source, "name": self.name, "facts": self.facts}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(head | {"runs": runs}, indent=1, allow_nan=False) + "\n"
        replace_file(path, lambda made: made.write_text(text, encoding="utf-8"))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises OSError, and ValueError with one line where the file is no result."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            raise ValueError(f"{path} is no JSON, so no result of quire bench or quire simulate") from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f'{path} is no result of quire bench or quire simulate: its format is not "{_FORMAT}"')
        try:
            runs = tuple(Run(Report.from_json(run["report"]), run["requests"]) for run in content["runs"])
            result = cls(str(content["source"]), str(content["name"]), content["facts"], runs)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is a damaged result: {type(error).__name__} {error}") from None
        if not runs:
            raise ValueError(f"{path} is a result without a run")
        return result


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a new file in the directory of `path` and moves it to `path`, so that a write that fails leaves the old
    content. Other files than regular ones, such as /dev/stdout, are written directly. Raises OSError."""
    if path.exists() and not path.is_file():
        write(path)
        return
    # A link stays one.
    path = path.resolve()
    made = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        write(made)
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


def _rounded(value: Any) -> Any:
    """Times to the microsecond; other values as they are."""
    return round(value, 6) if isinstance(value, float) else value
