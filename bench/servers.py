"""Runs `quire bench` against several servers under the same loads, in turn, load by load and round by round, each time
with new prompts.

The servers run already, with the same model and limits. Ratios are to the first server, round by round; of several
loads, the load with the lowest ratio comes first.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.report import Series, median_ratio, write_results
from quire.load import LoadResult, Report, Statistics


@dataclass(frozen=True, slots=True)
class NamedLoad:
    """Flags of `quire bench` that describe a load."""

    name: str
    flags: str

    @classmethod
    def parse(cls, text: str) -> "NamedLoad":
        """Parses NAME=FLAGS, or FLAGS without a name."""
        name, separator, flags = text.partition("=")
        return cls(name, flags) if separator and not name.startswith("-") else cls("", text)

    def of(self, server: str) -> str:
        """The name of this load's figures of a server."""
        return f"{server}, {self.name}" if self.name else server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("servers", nargs="+", type=named_server, metavar="NAME=URL", help="servers with OpenAI's API")
    parser.add_argument(
        "--load",
        required=True,
        action="append",
        type=NamedLoad.parse,
        metavar="[NAME=]FLAGS",
        help="flags of `quire bench` that describe the load, as one string; may be given several times",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each server, in turn")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first load; later ones count up, so that all prompts differ"
    )
    parser.add_argument(
        "--reports",
        type=Path,
        required=True,
        help="directory of the runs' files; a run whose file exists is not repeated",
    )


def main(arguments: argparse.Namespace) -> None:
    servers: dict[str, str] = dict(arguments.servers)
    loads: list[NamedLoad] = arguments.load
    arguments.reports.mkdir(parents=True, exist_ok=True)
    results: dict[tuple[str, str], list[LoadResult]] = {(load.name, name): [] for load in loads for name in servers}
    for index in range(arguments.rounds):
        for position, load in enumerate(loads):
            seed = arguments.seed + index * len(loads) + position
            for name, url in servers.items():
                path = arguments.reports / f"{'-'.join(filter(None, (name, *load.name.split())))}-{index + 1}.json"
                results[load.name, name].append(run_load(name, url, seed, load.flags, path))
    first, *others = servers
    series: list[Series] = []
    ratios: dict[str, dict[str, float]] = {}
    for load in loads:
        figures = {name: [each.runs[0].report for each in results[load.name, name]] for name in servers}
        throughput = {name: _series(load.of(name), _FIGURES[0], figures[name]) for name in servers}
        ratios[load.name] = {name: median_ratio(throughput[first], throughput[name]) for name in others}
        series += throughput.values()
        # Answers of one token have no time between tokens.
        has_gaps = all(each.itl is not None for reports in figures.values() for each in reports)
        others_of_load = [each for each in _FIGURES[1:] if has_gaps or each is not _BETWEEN_TOKENS]
        series += [_series(load.of(name), figure, figures[name]) for figure in others_of_load for name in servers]
    print(*series, sep="\n")
    for load in sorted(loads, key=lambda load: min(ratios[load.name].values(), default=0.0)):
        of_load = ", ".join(f"{ratio:.2f} to {name}" for name, ratio in ratios[load.name].items())
        print(f"{load.of(first)}: output tokens {of_load}, medians over the rounds")
    of_rounds = [_round(result) for load in loads for result in results[load.name, first]]
    ratio_to = ratios if len(loads) > 1 else ratios[loads[0].name]
    write_results(arguments.out, "servers under the same load", series, ratio_to=ratio_to, rounds=of_rounds)


_Figure = tuple[str, str, Callable[[Report], float]]

_BETWEEN_TOKENS: _Figure = ("inter-token latency, p50", "ms", lambda each: 1e3 * _known(each.itl).p50)
_FIGURES: tuple[_Figure, ...] = (
    ("output tokens", "tok/s", lambda each: each.output_tokens_per_s),
    ("first token, mean", "s", lambda each: _known(each.ttft).mean),
    _BETWEEN_TOKENS,
    ("cached prompt tokens", "", lambda each: each.cached_tokens or 0),
)


def _series(name: str, figure: _Figure, reports: list[Report]) -> Series:
    what, unit, value = figure
    return Series(f"{name}, {what}", unit, tuple(float(value(each)) for each in reports))


def _round(result: LoadResult) -> dict[str, object]:
    report = result.runs[0].report
    return {
        "date": result.facts["date"],
        "quire_bench_commit": result.facts["commit"],
        "prompt_tokens": report.prompt_tokens,
        "output_tokens": report.output_tokens,
    }


def _known(statistics: Statistics | None) -> Statistics:
    """The statistics of a run in which all requests completed, so that there is a mean."""
    assert statistics is not None
    return statistics


def named_server(text: str) -> tuple[str, str]:
    """Parses NAME=URL."""
    name, separator, url = text.partition("=")
    if not (name and separator and url):
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=URL")
    return name, url


def _completed(path: Path) -> LoadResult:
    result = LoadResult.read(path)
    report = result.runs[0].report
    if report.completed < report.requests:
        raise SystemExit(f"{path}: {report.completed} of {report.requests} requests completed: {report.errors}")
    return result


def run_load(name: str, url: str, seed: int, load: str, path: Path) -> LoadResult:
    """The result of `quire bench` with the flags of a load, which is not run again if its file exists. SystemExit if a
    request fails."""
    if path.exists():
        return _completed(path)
    flags = ["--backend=openai", f"--url={url}", f"--name={name}", f"--seed={seed}", f"--out={path}"]
    command = [sys.executable, "-m", "quire_cli.main", "bench", *flags, *shlex.split(load)]
    print(shlex.join(["quire", "bench", *command[4:]]), flush=True)
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(f"quire bench against {name} failed (above)")
    return _completed(path)
