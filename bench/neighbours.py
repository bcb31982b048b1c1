"""Speed of `quire serve` with neighbours: with a busy process on the same processors, and within a container's limit of
processor time.

Each load runs in pairs, quiet and with the busy process (`while True: pass`, of the same niceness, on any processor),
server by server. Servers are this checkout, the checkout of `--before`, and each `--peer`, which runs already with the
model of `--files`. For the limit a control group is made, which takes a privileged user: time between tokens
must have no gap of a period, and a 99th percentile below twice the median.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from bench.report import Series, median_ratio, write_results
from bench.servers import run_load
from bench.serving import free_ports, model_of, quire_serve, served
from bench.states import ask
from quire.load import Report

_SHAPE = "llama-160m"
_LOADS = {
    1: "--prompt-len=100 --output-len=128 --max-concurrency=1 --num-requests=1",
    64: "--prompt-len=100 --output-len=48 --max-concurrency=64 --num-requests=64",
}
_LOADS_OF_LIMIT = {
    1: "--prompt-len=4 --output-len=256 --max-concurrency=1 --num-requests=1",
    64: "--prompt-len=4 --output-len=128 --max-concurrency=64 --num-requests=64",
}
"""Short prompts: steps with prompts must not count as stalls."""
_FLAGS_OF_ALL_LOADS = "--dataset=fixed --vocab-size=4000 --max-model-len=1024 --warm-up-requests=1"
_BOUNDS = {1: 0.65, 64: 0.70}
"""The least share of the quiet rate with a busy process."""
_PERIOD_S = 0.1
"""The period of a control group's quota."""
_GROUPS = Path("/sys/fs/cgroup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--files", type=Path, help="directory for the model and logs, which otherwise vanish")
    parser.add_argument(
        "--reports", type=Path, help="directory of the runs' files; a run whose file exists is not repeated"
    )
    parser.add_argument("--parts", nargs="+", choices=("busy", "limit"), default=["busy", "limit"])
    parser.add_argument("--streams", type=int, nargs="+", choices=[*_LOADS], default=[*_LOADS])
    parser.add_argument("--rounds", type=int, default=10, help="pairs of runs of each load")
    parser.add_argument("--processors", type=float, default=1.5, help="the limit, in processors")
    parser.add_argument("--before", type=Path, metavar="DIRECTORY", help="another checkout, whose server runs in turn")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="another server; part busy")
    parser.add_argument(
        "--flags", default="--speculate=off --kv-cache-memory=1GiB", help="further flags of `quire serve`"
    )


def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as made:
        files = arguments.files = arguments.files or Path(made)
        arguments.reports = arguments.reports or Path(made)
        arguments.reports.mkdir(parents=True, exist_ok=True)
        model_of(_SHAPE, files)
        series, missed = list[Series](), list[str]()
        if "busy" in arguments.parts:
            _with_a_busy_process(arguments, series, missed)
        if "limit" in arguments.parts:
            _within_a_limit(arguments, series, missed)
    write_results(arguments.out, "with neighbours", series, missed=missed)
    if missed:
        raise SystemExit("\n".join(missed))


def _with_a_busy_process(arguments: argparse.Namespace, series: list[Series], missed: list[str]) -> None:
    rates = dict[tuple[str, int, str], list[float]]()
    with ExitStack() as stack:
        urls = {name: stack.enter_context(_serve(arguments, name, root)) for name, root in _checkouts(arguments)}
        texts = {name: ask(url, "A text, ", 64).token_ids for name, url in urls.items()}
        urls |= (peer.split("=", 1) for peer in arguments.peer)
        for index in range(arguments.rounds):
            for streams in arguments.streams:
                # The first server goes first in every other round.
                for name in list(urls)[:: -1 if index % 2 else 1]:
                    for kind, neighbour in (("quiet", nullcontext()), ("busy", _busy_process())):
                        with neighbour:
                            report = _load(arguments, urls[name], name, streams, kind, index)
                        rates.setdefault((name, streams, kind), []).append(report.output_tokens_per_s)
        with _busy_process():
            changed = [name for name, text in texts.items() if ask(urls[name], "A text, ", 64).token_ids != text]
    missed += (f"{name}: the text is another one with a busy process" for name in changed)
    of = {key: Series(f"{key[0]}, {key[1]} streams, {key[2]}", "tok/s", tuple(each)) for key, each in rates.items()}
    series += of.values()
    print(*of.values(), sep="\n")
    for streams in arguments.streams:
        for name in urls:
            ratio = median_ratio(of[name, streams, "busy"], of[name, streams, "quiet"])
            others = [
                f"{median_ratio(of[first, streams, kind], of[name, streams, kind]):.3f} of {name}, {kind}"
                for first in list(urls)[:1]
                for kind in ("quiet", "busy")
                if name != first
            ]
            print(f"{name}, {streams} streams: {ratio:.3f} of its quiet rate", *others, sep="; ")
            if name == "now" and ratio < _BOUNDS[streams]:
                missed.append(f"{streams} streams: {ratio:.3f} of the quiet rate, expected {_BOUNDS[streams]}")


def _within_a_limit(arguments: argparse.Namespace, series: list[Series], missed: list[str]) -> None:
    for name, root in _checkouts(arguments):
        with _limit(arguments.processors) as group, _serve(arguments, name, root, group) as url:
            for streams in arguments.streams:
                rounds = range(min(arguments.rounds, 5))
                reports = [_load(arguments, url, name, streams, "limit", index) for index in rounds]
                gaps = [each.itl for each in reports if each.itl is not None]
                title = f"{name}, {arguments.processors} processors, {streams} streams"
                for what in ("p50", "p99", "maximum"):
                    values = tuple(1e3 * getattr(each, what) for each in gaps)
                    series.append(Series(f"{title}, between tokens, {what}", "ms", values))
                series.append(Series(f"{title}, output", "tok/s", tuple(each.output_tokens_per_s for each in reports)))
                statistics = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
                series.append(Series(f"{title}, stopped", "periods", (float(statistics["nr_throttled"]),)))
                print(*series[-5:], sep="\n", flush=True)
                p50, p99 = (each.median for each in series[-5:-3])
                if name == "now" and p99 >= min(2 * p50, p50 + 1e3 * _PERIOD_S):
                    missed.append(f"{title}: {p99:.1f} ms between tokens at p99, {p50:.1f} ms at the median")


def _checkouts(arguments: argparse.Namespace) -> list[tuple[str, Path]]:
    before = [] if arguments.before is None else [("before", arguments.before)]
    return [("now", Path(__file__).parents[1]), *before]


def _load(arguments: argparse.Namespace, url: str, name: str, streams: int, kind: str, index: int) -> Report:
    """A run of a load, each with other prompts."""
    path = arguments.reports / f"{name}-{streams}-{kind}-{index}.json"
    seed = 1000 * streams + 2 * index + (kind == "busy")
    load = (_LOADS_OF_LIMIT if kind == "limit" else _LOADS)[streams]
    return run_load(name, url, seed, f"{load} {_FLAGS_OF_ALL_LOADS}", path).runs[0].report


@contextmanager
def _serve(arguments: argparse.Namespace, name: str, root: Path, group: Path | None = None) -> Iterator[str]:
    """A server of a checkout, in a control group if there is one."""
    (port,) = free_ports(1)
    command = quire_serve(arguments.files / _SHAPE, port, "--max-num-seqs=64", *arguments.flags.split())
    enter = "" if group is None else f"echo $$ > {group}/cgroup.procs; "
    shell = ["sh", "-c", f'{enter}cd "$0" && exec "$@"', str(root), *command]
    with served(shell, port, arguments.files / f"{name}.log"):
        ask(url := f"http://127.0.0.1:{port}", [5] * 20, 1)
        yield url


@contextmanager
def _busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def _limit(processors: float) -> Iterator[Path]:
    """A control group whose processes together use this much processor time."""
    is_version_1 = (_GROUPS / "cpu").exists()
    group = (_GROUPS / "cpu" if is_version_1 else _GROUPS) / f"quire-neighbours-{os.getpid()}"
    period = round(1e6 * _PERIOD_S)
    quota = round(processors * period)
    try:
        group.mkdir()
        if is_version_1:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {period}")
    except OSError as error:
        raise SystemExit(
            f"{group} cannot limit processors: {error}; run as root, or leave out --parts limit"
        ) from error
    try:
        yield group
    finally:
        group.rmdir()
