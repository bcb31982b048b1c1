"""How much of the KV memory holds tokens: Quire's blocks, and the reservations of the paper's three Orcas.

Chat-like lengths, one pool, and always more requests waiting than fit, so that memory is what limits. Everything is
simulated without a model: the share depends on lengths alone. This is the paper's figure 2.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.lengths import describe, sharegpt
from bench.orca import Occupancy, Reservation, simulate
from bench.report import Series, write_results
from bench.rule_source import Drive, key_of
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan, StepResult, Usage

_PAPER = {"quire": 0.963, Reservation.ORACLE: 0.382, Reservation.POW2: 0.268, Reservation.MAX: 0.204}
_QUEUE = 16
"""Requests that are kept waiting; the pool never goes short of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=15_700, help="slots of the pool; the paper's OPT-13B has 15,700")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 8, 32], help="tokens of a block")
    parser.add_argument("--longest", type=int, default=2048, help="tokens that the model takes")
    parser.add_argument("--requests", type=int, default=3000, help="requests to run")
    parser.add_argument("--warm-up", type=int, default=300, help="requests that end before steps are counted")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="rows; must not be what limits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    lengths = sharegpt(arguments.longest).draw(arguments.requests, arguments.seed)
    print(f"{arguments.requests} requests, {arguments.slots} slots; lengths drawn:", _rounded(describe(lengths)))
    blocks = {size: paged_use(lengths, size, arguments) for size in arguments.block_sizes}
    pairs = [(int(prompt), int(output)) for prompt, output in lengths]
    orca = {each: simulate(pairs, each, arguments.slots, arguments.longest, arguments.warm_up) for each in Reservation}
    _print(blocks, orca)
    if arguments.out is not None:
        series = [Series(f"Quire, blocks of {size}", "share", (use.of_blocks,)) for size, use in blocks.items()]
        series += [Series(f"Orca ({each.value})", "share", (use.tokens,)) for each, use in orca.items()]
        facts = {
            "lengths": describe(lengths),
            "quire": {size: asdict(use) for size, use in blocks.items()},
            "orca": {each.value: asdict(use) for each, use in orca.items()},
        }
        write_results(arguments.out, "the share of the KV memory that holds tokens", series, **facts)


@dataclass(frozen=True, slots=True)
class PagedUse:
    """Means over steps.

    of_blocks    share of the slots of allocated blocks that hold a token, computed or being computed in the step
    of_pool      the same of all slots of the pool
    num_running  requests that run
    most_rows    the most rows that were taken at once

    And of all requests, from the first step to the last:

    preemptions_per_request  how often one was preempted, on average
    computed_per_needed      tokens computed for each that is needed: 1 where nothing is computed again
    """

    of_blocks: float
    of_pool: float
    num_running: float
    most_rows: int
    preemptions_per_request: float
    computed_per_needed: float


def paged_use(lengths: np.ndarray, block_size: int, arguments: argparse.Namespace) -> PagedUse:
    """Runs requests of these lengths through the scheduler's core. ValueError where memory is not what limits."""
    drive = Drive(Scheduler(_config(block_size, arguments)), _constant_tokens)
    num_computed = next_request = 0
    ended: list[Usage] = []
    samples: list[tuple[float, float, int]] = []
    while next_request < len(lengths):
        while len(drive.scheduler.waiting) < _QUEUE and next_request < len(lengths):
            drive.scheduler.submit(_request(next_request, *lengths[next_request].tolist()), 0.0)
            next_request += 1
        if (plan := drive.plan()) is None:
            ended += [end.usage for events in drive.deliver().values() for end in events.completed]
            continue
        num_computed += int(plan.num_new_tokens.sum())
        if len(ended) >= arguments.warm_up:
            samples.append(_look(drive.scheduler))
    again = num_computed / _num_needed(drive.scheduler, ended)
    return _summary(samples, drive.scheduler.num_preemptions / len(lengths), again, arguments)


def _config(block_size: int, arguments: argparse.Namespace) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=arguments.slots // block_size,
        block_size=block_size,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=max(arguments.longest, arguments.max_num_seqs),
        max_model_len=arguments.longest,
    )


def _request(index: int, prompt_len: int, output_len: int) -> Request:
    # A first token of its own keeps every prompt out of the prefix cache.
    return Request(key_of(index), str(index), [index] * prompt_len, RowSampling(index), output_len)


def _constant_tokens(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, np.full(len(plan.samples), 7))


def _num_needed(scheduler: Scheduler, ended: list[Usage]) -> int:
    """Tokens that those who ended had to compute, all but each one's last, and that those who run have."""
    return sum(usage.prompt_tokens + usage.generated_tokens - 1 for usage in ended) + _num_held(scheduler)


def _num_held(scheduler: Scheduler) -> int:
    return int(scheduler.batch.rows.num_computed[scheduler.batch.rows.active].sum())


def _look(scheduler: Scheduler) -> tuple[float, float, int]:
    tokens = _num_held(scheduler)
    pool, size = scheduler.batch.blocks.pool, scheduler.config.block_size
    return tokens / (pool.num_used * size), tokens / (pool.num_blocks * size), len(scheduler.running)


def _summary(
    samples: list[tuple[float, float, int]], preemptions: float, again: float, arguments: argparse.Namespace
) -> PagedUse:
    if not samples:
        raise ValueError(f"no step is left after a warm-up of {arguments.warm_up} requests; give more requests")
    most_rows = max(running for _, _, running in samples)
    if most_rows >= arguments.max_num_seqs:
        raise ValueError(f"all {arguments.max_num_seqs} rows were taken: give more rows, or fewer slots")
    of_blocks, of_pool, num_running = np.mean(samples, axis=0).tolist()
    return PagedUse(of_blocks, of_pool, num_running, most_rows, preemptions, again)


def _print(blocks: dict[int, PagedUse], orca: dict[Reservation, Occupancy]) -> None:
    print(
        f"\n{'':<22} {'tokens / allocated':>18} {'tokens / pool':>14} {'running':>8} {'paper':>7} "
        f"{'preemptions / request':>22} {'computed / needed':>18}"
    )
    for size, use in blocks.items():
        paper = f"{_PAPER['quire']:7.1%}" if size == 16 else f"{'':>7}"
        print(
            f"Quire, blocks of {size:<5} {use.of_blocks:18.1%} {use.of_pool:14.1%} {use.num_running:8.1f} {paper} "
            f"{use.preemptions_per_request:22.3f} {use.computed_per_needed:18.3f}"
        )
    print(f"\n{'':<22} {'tokens':>8} {'reserved':>9} {'internal':>9} {'external':>9} {'running':>8} {'paper':>7}")
    for each, use in orca.items():
        shares = f"{use.tokens:8.1%} {use.reserved:9.1%} {use.internal:9.1%} {use.external:9.1%}"
        print(f"Orca ({each.value}){'':<{15 - len(each.value)}} {shares} {use.num_running:8.1f} {_PAPER[each]:7.1%}")


def _rounded(facts: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in facts.items())
