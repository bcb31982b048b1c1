"""Prints the coverage of each package as a table, from the data of `make coverage`.

usage: python -m tools.coverage_by_package [FILE]   (by default .coverage)
"""

import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from coverage import Coverage


def lines(files: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The table, of the `files` in coverage's JSON report. A package is a folder, and its first folder below."""
    packages: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path, file in files.items():
        package = "/".join(PurePath(path).parts[:-1][:2])
        for name in (package, "all"):
            packages[name].update({key: file["summary"][key] for key in _COUNTS})
    yield "| package | statements | covered | branches | covered |"
    yield "|---|---|---|---|---|"
    for name in (*sorted(packages.keys() - {"all"}), "all"):
        counts = packages[name]
        cells = (
            f"{counts['num_statements']:,}",
            _share(counts["covered_lines"], counts["num_statements"]),
            f"{counts['num_branches']:,}",
            _share(counts["covered_branches"], counts["num_branches"]),
        )
        yield f"| `{name}` | {' | '.join(cells)} |"


def main(argv: Iterable[str]) -> None:
    coverage = Coverage(data_file=next(iter(argv), ".coverage"))
    coverage.load()
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        coverage.json_report(outfile=report.name)
        files = json.loads(Path(report.name).read_text(encoding="utf-8"))["files"]
    for line in lines(files):
        print(line)


_COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


if __name__ == "__main__":
    main(sys.argv[1:])
