"""Several servers under the same load: `quire bench` against each in turn, round by round, each round with new prompts.

The servers run already, with the same model and limits. Ratios are to the first one, round by round.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench.report import Series, median_ratio, write_results
from quire.load import LoadResult, Report, Statistics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("servers", nargs="+", type=_server, metavar="NAME=URL", help="servers with OpenAI's API")
    parser.add_argument("--load", required=True, help="flags of `quire bench` that describe the load, as one string")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each server, in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each next round adds 1")
    parser.add_argument(
        "--reports",
        type=Path,
        required=True,
        help="directory of the runs' files; a run whose file exists is not repeated",
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    servers: dict[str, str] = dict(arguments.servers)
    arguments.reports.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[LoadResult]] = {name: [] for name in servers}
    for index in range(arguments.rounds):
        for name, url in servers.items():
            path = arguments.reports / f"{name}-{index + 1}.json"
            if not path.exists():
                _bench(name, url, arguments.seed + index, arguments.load, path)
            result = LoadResult.read(path)
            report = result.runs[0].report
            if report.completed < report.requests:
                raise SystemExit(f"{path}: {report.completed} of {report.requests} requests completed: {report.errors}")
            results[name].append(result)
    reports = {name: [each.runs[0].report for each in results[name]] for name in servers}
    series = [
        Series(f"{name}, {what}", unit, tuple(float(value(each)) for each in reports[name]))
        for what, unit, value in _FIGURES
        for name in servers
    ]
    print(*series, sep="\n")
    throughput = series[: len(servers)]
    ratios = {name: median_ratio(throughput[0], other) for name, other in zip(servers, throughput, strict=True)}
    first, *others = servers
    for name in others:
        print(f"{first} to {name}, output tokens: {ratios[name]:.2f}, median over the rounds")
    if arguments.out is not None:
        rounds = [
            {
                "date": result.facts["date"],
                "quire_bench_commit": result.facts["commit"],
                "prompt_tokens": report.prompt_tokens,
                "output_tokens": report.output_tokens,
            }
            for result, report in zip(results[first], reports[first], strict=True)
        ]
        ratio_to = {name: ratios[name] for name in others}
        write_results(arguments.out, "servers under the same load", series, ratio_to=ratio_to, rounds=rounds)


_FIGURES: tuple[tuple[str, str, Callable[[Report], float]], ...] = (
    ("output tokens", "tok/s", lambda each: each.output_tokens_per_s),
    ("first token, mean", "s", lambda each: _known(each.ttft).mean),
    ("inter-token latency, p50", "ms", lambda each: 1e3 * _known(each.itl).p50),
    ("cached prompt tokens", "", lambda each: each.cached_tokens or 0),
)


def _known(statistics: Statistics | None) -> Statistics:
    """All requests completed, so there is something to take a mean of."""
    assert statistics is not None
    return statistics


def _server(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    if not (name and separator and url):
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=URL")
    return name, url


def _bench(name: str, url: str, seed: int, load: str, path: Path) -> None:
    flags = ["--backend=openai", f"--url={url}", f"--name={name}", f"--seed={seed}", f"--out={path}"]
    command = [sys.executable, "-m", "quire_cli.main", "bench", *flags, *shlex.split(load)]
    print(shlex.join(["quire", "bench", *command[4:]]), flush=True)
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(f"quire bench against {name} failed (above)")
