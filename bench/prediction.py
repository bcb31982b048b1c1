"""How close `quire simulate` comes: its prediction of a live server beside what `quire bench` measured of that server.

In each round one server is traced under a load, another is measured under other requests at other rates, and the costs
that were fitted to the trace predict the measurement. What clients and gateways add (`--frontend-latency`) is what the
simulated time to the first token lacks at the lowest traced rate. Errors are of each round's own prediction.
"""

import argparse
import asyncio
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.models import SHAPES, write_model
from bench.report import Series, write_results
from quire.load import LoadResult, Report, Statistics
from quire_cli.supervisor import LocalServer, ServeSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="llama-160m", help="of a model with random weights")
    parser.add_argument("--rounds", type=int, default=3, help="traces, each with a measurement that it predicts")
    parser.add_argument("--traced-rates", default="0.8,2.2,6", help="requests a second while steps are traced")
    parser.add_argument("--traced-seconds", type=float, default=14, help="at each of these rates")
    parser.add_argument("--rates", default="1,2,3.5", help="requests a second to predict")
    parser.add_argument("--seconds", type=float, default=60, help="at each of these rates")
    parser.add_argument("--seed", type=int, default=0, help="of the first load; each next load adds 1")
    parser.add_argument("--load", default="--dataset sharegpt --length-scale 0.25", help="flags of `quire bench`")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    rounds: list[_Round] = []
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as directory:
        model = Path(directory) / "model"
        write_model(arguments.shape, model)
        settings = ServeSettings(
            model=str(model),
            max_model_len=arguments.max_model_len,
            num_threads=1,
            grpc_port=0,
            http_port=0,
            log_level="warning",
        )
        for index in range(arguments.rounds):
            made = Path(directory) / str(index)
            made.mkdir()
            rounds.append(_run_round(arguments, settings, made, arguments.seed + 2 * index))
            print(f"round {index + 1}: --frontend-latency {rounds[-1].frontend_latency_s:.4f}", flush=True)
    series = [
        Series(f"{rate}/s, {what}, {kind}", unit, tuple(value(_reports(each, kind)[at]) for each in rounds))
        for at, rate in enumerate(arguments.rates.split(","))
        for what, unit, value in _FIGURES
        for kind in ("real", "simulated")
    ]
    errors = [
        Series(real.name.removesuffix(", real"), "% off", _errors_percent(real, simulated))
        for real, simulated in zip(series[::2], series[1::2], strict=True)
    ]
    print(*series, *errors, sep="\n")
    if arguments.out is not None:
        facts = {
            "frontend_latency_s": [each.frontend_latency_s for each in rounds],
            "seeds": [each.seed for each in rounds],
            "requests": [[report.requests for report in each.real] for each in rounds],
        }
        write_results(arguments.out, "predictions of quire simulate", [*series, *errors], **facts)


@dataclass(frozen=True)
class _Round:
    """One server that was measured, and what was predicted of it; a report for each rate."""

    seed: int
    frontend_latency_s: float
    real: Sequence[Report]
    simulated: Sequence[Report]


def _run_round(arguments: argparse.Namespace, settings: ServeSettings, directory: Path, seed: int) -> _Round:
    load, trace = shlex.split(arguments.load), directory / "steps.json"
    traced = [*load, f"--request-rate={arguments.traced_rates}", f"--duration={arguments.traced_seconds}"]
    traced += [f"--seed={seed}"]
    measured = [*load, f"--request-rate={arguments.rates}", f"--duration={arguments.seconds}", f"--seed={seed + 1}"]
    lowest = asyncio.run(_measure(replace(settings, trace_steps=str(trace)), traced, directory / "traced.json"))[0]
    costs = [f"--cost-trace={trace}"]
    lacks_s = _ttft(lowest).mean - _ttft(_quire("simulate", [*costs, *traced], directory / "fitted.json")[0]).mean
    frontend_latency_s = max(lacks_s, 0.0)
    real = asyncio.run(_measure(settings, measured, directory / "real.json"))
    costs.append(f"--frontend-latency={frontend_latency_s}")
    simulated = _quire("simulate", [*costs, *measured], directory / "simulated.json")
    return _Round(seed, frontend_latency_s, real, simulated)


async def _measure(settings: ServeSettings, load: Sequence[str], out: Path) -> Sequence[Report]:
    async with LocalServer(settings, report=lambda _: None) as server:
        await server.wait_ready()
        url = f"--url={server.grpc_address}"
        reports = await asyncio.to_thread(_quire, "bench", [url, *load], out)
        await server.stop()
    for report in reports:
        if report.completed < report.requests:
            raise SystemExit(f"{report.completed} of {report.requests} requests completed: {report.errors}")
    return reports


def _quire(command: str, flags: Sequence[str], out: Path) -> Sequence[Report]:
    program = [sys.executable, "-m", "quire_cli.main", command]
    if subprocess.run([*program, *flags, f"--out={out}"], stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(f"quire {command} failed (above)")
    return [run.report for run in LoadResult.read(out).runs]


def _known(statistics: Statistics | None) -> Statistics:
    """All requests completed, so there is something to take a mean of."""
    assert statistics is not None
    return statistics


def _ttft(report: Report) -> Statistics:
    return _known(report.ttft)


_FIGURES: tuple[tuple[str, str, Callable[[Report], float]], ...] = (
    ("output", "tokens/s", lambda each: each.output_tokens_per_s),
    ("TTFT p50", "ms", lambda each: 1e3 * _ttft(each).p50),
    ("TTFT p99", "ms", lambda each: 1e3 * _ttft(each).p99),
    ("TPOT p50", "ms", lambda each: 1e3 * _known(each.tpot).p50),
)


def _reports(of: _Round, kind: str) -> Sequence[Report]:
    return of.real if kind == "real" else of.simulated


def _errors_percent(real: Series, simulated: Series) -> tuple[float, ...]:
    """How far each prediction is off, in percent of what was measured."""
    return tuple(100 * (b / a - 1) for a, b in zip(real.values, simulated.values, strict=True))
