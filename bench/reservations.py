"""PagedAttention and the three reservations of Orca on a real worker with one pool, and the same in the simulator.

The scheduler's core and a worker's model runner run in one process. All requests come at once, so memory decides how
many run together; tokens a second measure the value of that. Lengths, pool and the longest sequence have the
proportions of OPT-13B in the paper's figure 12. The simulator predicts the same runs by a cost model that is fitted to
their steps.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.in_process import InProcessEngine
from bench.models import SHAPES, write_model
from bench.report import Series, write_results
from quire.load import Independent, LoadRequest, Lognormal, take
from quire.model_files.model_source import resolve_model
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan, StepWork
from simulator.baselines.contiguous import contiguous_memory
from simulator.engine import simulate
from simulator.load import LoadArrivals
from simulator.measured import Measured, Trace, TracedStep
from simulator.memory import paged_memory
from simulator.paper.systems import ORCAS, QUIRE, SYSTEMS, MakeBlocks
from worker_svc.settings import WorkerSettings

_SYSTEMS = (QUIRE, *ORCAS)
_SLOTS_OF_OPT_13B, _LONGEST = 15_700, 2048
_PROMPT, _OUTPUT = 161, 338
"""Mean lengths of ShareGPT."""
_BLOCK_SIZE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, help="shape of a model with random weights; default: quire-tiny")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--longest", type=int, default=512, help="maximum tokens of a sequence")
    parser.add_argument("--runs", type=int, default=1, help="interleaved runs of each system")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())


def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as directory:
        model = resolve_model(None)
        if arguments.shape is not None:
            model = Path(directory)
            write_model(arguments.shape, model)
        engine = InProcessEngine(_settings(model, arguments))
    load = draw(arguments.requests, arguments.longest)
    engine.run(load[:2])
    runs = {system: list[Run]() for system in _SYSTEMS}
    for _ in range(arguments.runs):
        for system in _SYSTEMS:
            runs[system].append(measure(engine, load, SYSTEMS[system]))
    costs = Measured.fit([Trace([run.steps for each in runs.values() for run in each], {})])
    print(costs.residual)
    series: list[Series] = []
    for system, measured in runs.items():
        rate, batched = predict(engine.config, costs, load, system)
        series += [
            Series(f"{system}, tokens/s", "tokens/s", tuple(run.rate for run in measured)),
            Series(f"{system}, tokens/s simulated", "tokens/s", (rate,)),
            Series(f"{system}, requests that run", "requests", tuple(run.batched for run in measured)),
            Series(f"{system}, requests that run, simulated", "requests", (batched,)),
        ]
    print(*series, sep="\n")
    facts = {"residual": str(costs.residual), "slots": engine.config.num_blocks * _BLOCK_SIZE}
    write_results(arguments.out, "reservations on a real worker", series, **facts)


def draw(num_requests: int, longest: int) -> list[LoadRequest]:
    """Lengths like ShareGPT's, scaled to the longest sequence."""
    scale = longest / _LONGEST
    prompt, output = Lognormal.fit(_PROMPT * scale, 1.3), Lognormal.fit(_OUTPUT * scale, 1.0)
    return take(Independent("scaled", prompt, output, longest, vocab_size=2000), num_requests, seed=0)


def _settings(model: Path, arguments: argparse.Namespace) -> WorkerSettings:
    return WorkerSettings(
        model=str(model),
        device="cpu",
        block_size=_BLOCK_SIZE,
        num_gpu_blocks=_SLOTS_OF_OPT_13B * arguments.longest // _LONGEST // _BLOCK_SIZE,
        max_num_seqs=64,
        max_model_len=arguments.longest,
        swap_space=0,
        multi_step_ms=0,
        speculate=("off",),
        num_threads=arguments.num_threads,
    )


@dataclass(frozen=True, slots=True)
class Run:
    """One run: tokens a second, the mean number of requests that ran in a step, and the steps."""

    rate: float
    batched: float
    steps: list[TracedStep]


def measure(engine: InProcessEngine, load: Sequence[LoadRequest], make_blocks: MakeBlocks) -> Run:
    """Runs a load on the worker."""
    running, steps = list[int](), list[TracedStep]()
    last = time.perf_counter()

    def look(scheduler: Scheduler, plan: StepPlan) -> None:
        nonlocal last
        now = time.perf_counter()
        # The next step begins when this one is over: one process computes all.
        steps.append(TracedStep(last, last, now, StepWork.of(plan)))
        last = now
        running.append(len(scheduler.running))

    seconds = engine.run(load, make_blocks=make_blocks, look=look)
    return Run(sum(request.output_len or 0 for request in load) / seconds, statistics.fmean(running), steps)


def predict(config: SchedulerConfig, costs: Measured, load: Sequence[LoadRequest], system: str) -> tuple[float, float]:
    """Tokens a second, and running requests, in the simulator."""
    look = paged_memory if system == QUIRE else contiguous_memory
    arrivals = LoadArrivals(load, num_tenants=len(load))
    simulation = simulate(arrivals, config, costs, make_blocks=SYSTEMS[system], look=look)
    running = [step.num_running for step in simulation.steps]
    return sum(request.output_len or 0 for request in load) / simulation.seconds, statistics.fmean(running)
