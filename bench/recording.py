"""The cost of `--record`: the time of a step of the scheduler's core, schedule and apply together, with a recording and
without, in turn; and the processor time of the thread that writes it."""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from bench import core_load
from bench.core import time_steps
from bench.report import Series, write_results
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording.recorder import Recorder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, default=256, help="running sequences, which all decode")
    parser.add_argument("--steps", type=int, default=600, help="steps to time")
    parser.add_argument("--runs", type=int, default=5, help="runs with and without")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    count, steps = arguments.sequences, arguments.steps
    series: dict[str, list[float]] = {"without": [], "hidden tokens": [], "with tokens": []}
    writer: dict[str, list[float]] = {"hidden tokens": [], "with tokens": []}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        for run in range(arguments.runs):
            for name, of_run in series.items():
                path = Path(directory) / f"{run}-{name}"
                recorder = None
                if name != "without":
                    recorder = Recorder.open(str(path), with_token_ids=name == "with tokens", max_bytes=1 << 30)
                    core_load.Scheduler = recorder.make_scheduler
                started, of_all = time.thread_time(), time.process_time()
                schedule, apply, _ = time_steps(core_load.steady_load(count, steps + 10), 8, steps, None)
                own = time.thread_time() - started
                if recorder is not None:
                    core_load.Scheduler = Scheduler
                    recorder.close()
                    writer[name].append((time.process_time() - of_all - own) / steps * 1e3)
                    sizes[name] = path.stat().st_size // steps
                of_run.append(float(np.median(schedule + apply)))
    for name, values in series.items():
        print(f"{np.median(values):7.3f} ms a step of {count}, {name}")
    for name, values in writer.items():
        print(f"{np.median(values):7.3f} ms of the writing thread, {name}; {sizes[name]} bytes a step")
    if arguments.out is not None:
        rows = [Series(f"{name}, median step", "ms", tuple(values)) for name, values in series.items()]
        rows += [Series(f"{name}, writing thread", "ms", tuple(values)) for name, values in writer.items()]
        write_results(arguments.out, "the cost of recording what the scheduler's core is told", rows, bytes_each=sizes)
