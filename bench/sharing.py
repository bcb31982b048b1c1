"""The blocks that sharing saves in beam search, for real beams: the lower half of the paper's figure 15.

Saved is 1 - (distinct physical blocks held) / (sum over sequences of the blocks in their tables), mean over steps
while requests wait. Requests share nothing with each other. Where beams part depends on what a model thinks of a text,
so quire-tiny runs them, on prompts of real text; `make paper ARGS=fig15` has the rest of the figure. Beside what beams
save stands the most that any table could: blocks that hold the same tokens after the same tokens, counted once.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.report import Series, write_results
from bench.rule_source import Drive, Source, key_of
from bench.texts import real_prompts
from quire.load import Independent, alpaca, describe, sharegpt, take
from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence as RunningSequence

_BLOCK_SIZE = 16
_VOCAB_SIZE = 1000
"""Of drawn prompts, of which only the lengths are used."""
_DATASETS: dict[str, tuple[Callable[[int, int], Independent], str]] = {
    "Alpaca": (alpaca, "37.6-55.2%"),
    "ShareGPT": (sharegpt, "44.3-66.3%"),
}
"""With what the paper saves with 2 to 6 beams."""

Share = Callable[[Scheduler], float]
"""A share of the blocks of all running sequences, between two steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6], help="beams of a request")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a sequence; quire-tiny takes 1024")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=16, help="requests that run at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    series: list[Series] = []
    drawn: dict[str, dict[str, float]] = {}
    print(f"{'lengths':<9} {'beams':>5} {'saved':>8} {'at most':>8}   paper, 2 to 6")
    for name, (dataset, paper) in _DATASETS.items():
        load = take(dataset(arguments.longest, _VOCAB_SIZE), arguments.requests, arguments.seed)
        drawn[name] = describe(load)
        lengths = [(len(request.token_ids), request.output_len or 0) for request in load]
        for width in arguments.widths:
            shares = _measure(arguments.longest, lengths, width, arguments.at_once)
            columns = "".join(f" {share:8.1%}" for share in shares)
            print(f"{name:<9} {width:>5}{columns}   {paper}", flush=True)
            names = (f"{name}, {width}", f"{name}, {width}, at most")
            series += [Series(each, "share", (share,)) for each, share in zip(names, shares, strict=True)]
    if arguments.out is not None:
        write_results(arguments.out, "the share of blocks that sharing saves in beam search", series, lengths=drawn)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, how many tokens to generate for each, and how many beams; a width of 1 samples."""

    prompts: Sequence[Sequence[int]]
    num_output_tokens: Sequence[int]
    width: int

    def __iter__(self) -> Iterator[Request]:
        for index, (prompt, num_tokens) in enumerate(zip(self.prompts, self.num_output_tokens, strict=True)):
            # A tenant of its own keeps a request from sharing with others.
            yield Request(
                key_of(index),
                str(index),
                prompt,
                RowSampling(seed=index),
                num_tokens,
                tenant=str(index),
                num_sequences=self.width,
                num_returned=1,
                beam=BeamParameters(self.width) if self.width > 1 else None,
            )


def _measure(longest: int, lengths: Sequence[tuple[int, int]], width: int, at_once: int) -> list[float]:
    config = _config(longest, width, at_once)
    prompts = real_prompts([prompt for prompt, _ in lengths])
    work = Workload(prompts, [output for _, output in lengths], width)
    return mean_shares(Drive(Scheduler(config), _model_source(config)), work, at_once, (saved, shareable))


def mean_shares(drive: Drive, work: Workload, at_once: int, shares: Sequence[Share]) -> list[float]:
    """Each of these shares, mean over the steps between the end of the first request and the start of the last.

    Raises ValueError where no such step is left.
    """
    requests = iter(work)
    seen: list[list[float]] = []
    num_left, has_ended = len(work.prompts), False
    while num_left or len(drive.scheduler.waiting):
        while num_left and len(drive.scheduler.waiting) < at_once:
            drive.scheduler.submit(next(requests), 0.0)
            num_left -= 1
        if drive.plan() is None:
            has_ended |= any(events.completed for events in drive.deliver().values())
        elif has_ended:
            seen.append([share(drive.scheduler) for share in shares])
    if not seen:
        raise ValueError(f"{len(work.prompts)} requests are too few for {at_once} at once")
    return np.mean(seen, axis=0).tolist()


def saved(scheduler: Scheduler) -> float:
    """The share of blocks that sharing saves now."""
    tables = [sequence.block_table for sequence in _running(scheduler)]
    return 1 - len({block for table in tables for block in table}) / sum(map(len, tables))


def shareable(scheduler: Scheduler) -> float:
    """The share that it would save where every two blocks of equal content, and equal content before, were one."""
    size, num_blocks = scheduler.config.block_size, 0
    contents: set[int] = set()
    for sequence in _running(scheduler):
        name = hash(sequence.request.key)
        for start in range(0, len(sequence.block_table) * size, size):
            name = hash((name, *sequence.token_ids[start : start + size]))
            contents.add(name)
        num_blocks += len(sequence.block_table)
    return 1 - len(contents) / num_blocks


def _running(scheduler: Scheduler) -> list[RunningSequence]:
    return [sequence for group in scheduler.running for sequence in group.unfinished]


def _config(longest: int, width: int, at_once: int) -> SchedulerConfig:
    rows = width * at_once
    return SchedulerConfig(
        num_blocks=rows * -(-longest // _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        max_num_seqs=rows,
        max_num_batched_tokens=2048,
        max_model_len=longest,
    )


def _model_source(config: SchedulerConfig) -> Source:
    # torch is imported by the runs that need it alone.
    from bench.model_source import ModelSource, load_worker
    from worker_svc.settings import WorkerSettings

    settings = WorkerSettings(
        device="cpu",
        block_size=config.block_size,
        num_gpu_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        swap_space=0,
        # Of a model this small, one thread makes the most, above all where other processes run (ADR 0005).
        num_threads=1,
    )
    return ModelSource(load_worker(settings))
