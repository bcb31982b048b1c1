"""The cost of `--record`: processor time of a step of the scheduler's core, schedule and apply together, with a
recording and without, in turn; and that of the thread that writes it. Processor time, since the thread runs while the
core waits for the workers, and this loop has none to wait for."""

import argparse
import tempfile
import time
from pathlib import Path

from bench import core_load
from bench.core import time_steps
from bench.report import Series, write_results
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording.recorder import Recorder

_WITHOUT = "without"
_RECORDINGS = {"hidden tokens": False, "with tokens": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, default=256, help="running sequences, which all decode")
    parser.add_argument("--steps", type=int, default=300, help="steps to time")
    parser.add_argument("--runs", type=int, default=5, help="runs with and without")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    core: dict[str, list[float]] = {name: [] for name in (_WITHOUT, *_RECORDINGS)}
    writer: dict[str, list[float]] = {name: [] for name in _RECORDINGS}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        for run in range(arguments.runs):
            core[_WITHOUT].append(_time_core(arguments.sequences, arguments.steps))
            for name, with_token_ids in _RECORDINGS.items():
                path = Path(directory) / f"{run}-{name}"
                before = time.process_time()
                own = _time_recorded(path, with_token_ids, arguments.sequences, arguments.steps)
                core[name].append(own)
                writer[name].append((time.process_time() - before) / arguments.steps * 1e3 - own)
                sizes[name] = path.stat().st_size // arguments.steps
    series = [Series(f"core, {name}", "ms", tuple(values)) for name, values in core.items()]
    series += [Series(f"writing thread, {name}", "ms", tuple(values)) for name, values in writer.items()]
    print(f"processor time of a step of {arguments.sequences}:")
    for each in series:
        print(each)
    for name, size in sizes.items():
        print(f"{size} bytes a step, {name}")
    if arguments.out is not None:
        title = "the cost of recording what the scheduler's core is told"
        write_results(arguments.out, title, series, bytes_each=sizes)


def _time_core(num_sequences: int, num_steps: int) -> float:
    """Milliseconds of this thread's processor time for each step, the start of the load included."""
    started = time.thread_time()
    time_steps(core_load.steady_load(num_sequences, num_steps + 10), 8, num_steps, None)
    return (time.thread_time() - started) / num_steps * 1e3


def _time_recorded(path: Path, with_token_ids: bool, num_sequences: int, num_steps: int) -> float:
    recorder = Recorder.open(str(path), with_token_ids=with_token_ids, max_bytes=1 << 30)
    assert recorder is not None, "the disk is full"
    core_load.Scheduler = recorder.make_scheduler
    try:
        return _time_core(num_sequences, num_steps)
    finally:
        core_load.Scheduler = Scheduler
        recorder.close()
