"""What routing policies do to the time to the first token, without a machine's noise: the gateway's own choices
(`gateway.replicas.routing`) before two modelled replicas, in modelled time.

A replica is a cache of blocks, of which the least recently used ones go, and a batch whose steps take a fixed time, a
time for each row and a time for each token of a prompt that was not cached. Conversations arrive as in `bench routing`.
A replica that is killed loses its cache, and its requests go to the other one after the failover delay.
"""

import argparse
import heapq
import itertools
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import Series, median_ratio, write_results
from bench.routing import Conversations
from gateway.replicas.events import CacheUpdate
from gateway.replicas.routing import CachedBlocks, Candidate, Router, RoutingPolicy, prompt_hashes
from quire.load import LoadRequest, take
from quire.prefix_hashes import short

_BLOCK_SIZE = 16
_TENANT = "tenant"
_POLICIES = (RoutingPolicy.ROUND_ROBIN, RoutingPolicy.AFFINITY, RoutingPolicy.CACHE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=20, help="loads, each with every policy")
    parser.add_argument("--requests", type=int, default=150, help="of one run")
    parser.add_argument("--concurrency", type=int, default=6, help="conversations at once")
    parser.add_argument("--blocks", type=int, default=320, help="of each replica's pool, of 16 tokens")
    parser.add_argument("--kills", type=float, nargs="*", default=[0, 4, 2], help="seconds between two kills; 0: none")
    parser.add_argument("--away", type=float, default=1.5, help="seconds for which a killed replica is away")
    parser.add_argument("--failover", type=float, default=0.5, help="seconds until its requests go to the other one")
    parser.add_argument("--step-ms", type=float, default=3.0, help="of any step")
    parser.add_argument("--row-ms", type=float, default=0.3, help="more for each row")
    parser.add_argument("--token-ms", type=float, default=0.03, help="more for each token of a prompt")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    if any(0 < interval_s <= arguments.away for interval_s in arguments.kills):
        raise SystemExit(f"--kills must be above --away ({arguments.away:g} s): one replica is always there")
    series: list[Series] = []
    ratios: dict[str, dict[str, float]] = {}
    for interval_s in arguments.kills:
        name = f"kills every {interval_s:g} s" if interval_s else "no kills"
        runs: dict[RoutingPolicy, list[list[_Job]]] = {policy: [] for policy in _POLICIES}
        for seed in range(arguments.runs):
            load = take(Conversations(), arguments.requests, seed)
            for policy in _POLICIES:
                runs[policy].append(_Model(arguments, policy, load).run(interval_s, first=seed))
        figures = {kind: [_series(name, policy, kind, runs[policy]) for policy in _POLICIES] for kind in _FIGURES}
        series += itertools.chain.from_iterable(figures.values())
        *others, cache = figures["ms mean TTFT"]
        ratios[name] = {
            policy.value: median_ratio(cache, other) for policy, other in zip(_POLICIES, others, strict=False)
        }
        print(*itertools.chain.from_iterable(figures.values()), sep="\n")
        print(f"mean TTFT by cache against others: {ratios[name]}", flush=True)
    if arguments.out is not None:
        facts = {name: value for name, value in vars(arguments).items() if name != "out"}
        write_results(arguments.out, "Routing over two modelled replicas", series, mean_ttft_by_cache=ratios, **facts)


@dataclass(slots=True, eq=False)
class _Job:
    """One turn of a conversation, with those that follow it.

    Attributes:
        arrived_s, first_token_s: When it came, and when its first token did.
        num_uncached: Tokens of the prompt that the first replica that got it had to compute.
        load: Requests that this replica had.
        num_to_compute: Tokens of the prompt that the next step has to compute; 0 while it decodes.
    """

    turns: Sequence[LoadRequest]
    arrived_s: float
    first_token_s: float | None = None
    num_uncached: int | None = None
    load: int = 0
    num_to_compute: int = 0
    num_generated: int = 0
    blocks: list[bytes] = field(default_factory=list)


class _Replica:
    """A cache and a batch."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self.is_up = True
        self.clear()

    def clear(self) -> None:
        """It died. Steps that are under way belong to the batch of before."""
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self.cached = CachedBlocks()
        self.jobs: list[_Job] = []
        self.is_stepping = False

    def num_cached(self, blocks: Iterable[bytes]) -> int:
        """How many of the first blocks are there."""
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, blocks))

    def keep(self, blocks: Sequence[bytes]) -> None:
        """These blocks were used now."""
        self._blocks.update(dict.fromkeys(blocks))
        for block in blocks:
            self._blocks.move_to_end(block)
        surplus = max(len(self._blocks) - self._max_blocks, 0)
        removed = [self._blocks.popitem(last=False)[0] for _ in range(surplus)]
        self.cached.update(CacheUpdate(is_cleared=False, removed=removed, stored=list(blocks), sampling_bits=0))


class _Model:
    """Two replicas, callers that each hold a conversation, and a clock."""

    def __init__(self, arguments: argparse.Namespace, policy: RoutingPolicy, load: Sequence[LoadRequest]) -> None:
        self._arguments = arguments
        self._router = Router(policy)
        self._replicas = {name: _Replica(arguments.blocks) for name in ("one", "two")}
        self._num_jobs = len(load)
        self._conversations = [list(turns) for _, turns in itertools.groupby(load, lambda request: request.group)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._done: list[_Job] = []

    def run(self, kill_interval_s: float, *, first: int) -> list[_Job]:
        """All requests, as they ended; `first` says which replica is killed first."""
        for _ in range(self._arguments.concurrency):
            self._begin()
        if kill_interval_s:
            self._after(kill_interval_s, lambda: self._kill(first, kill_interval_s))
        while len(self._done) < self._num_jobs:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return self._done

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + delay_s, next(self._order), act))

    def _begin(self) -> None:
        if self._conversations:
            turns = self._conversations.pop(0)
            self._after(0, lambda: self._place(_Job(turns, self._now)))

    def _place(self, job: _Job) -> None:
        prompt = job.turns[0].token_ids
        choices = {
            name: Candidate(len(replica.jobs), _BLOCK_SIZE, replica.cached)
            for name, replica in self._replicas.items()
            if replica.is_up
        }
        replica = self._replicas[self._router.choose(prompt, _TENANT, choices).replica]
        job.blocks = [short(content) for content in prompt_hashes(prompt, _TENANT, _BLOCK_SIZE)]
        # At least one token is always computed.
        num_cached = min(replica.num_cached(job.blocks), (len(prompt) - 1) // _BLOCK_SIZE)
        job.num_to_compute = len(prompt) + job.num_generated - num_cached * _BLOCK_SIZE
        if job.num_uncached is None:
            job.num_uncached, job.load = job.num_to_compute, len(replica.jobs)
        replica.jobs.append(job)
        if not replica.is_stepping:
            self._step(replica)

    def _step(self, replica: _Replica) -> None:
        jobs = replica.jobs
        replica.is_stepping = bool(jobs)
        if jobs:
            flags, num_tokens = self._arguments, sum(job.num_to_compute for job in jobs)
            step_ms = flags.step_ms + flags.row_ms * len(jobs) + flags.token_ms * num_tokens
            batch = list(jobs)
            self._after(step_ms / 1e3, lambda: self._end_step(replica, jobs, batch))

    def _end_step(self, replica: _Replica, jobs: list[_Job], batch: Sequence[_Job]) -> None:
        if replica.jobs is not jobs:
            return
        for job in batch:
            if job.num_to_compute:
                replica.keep(job.blocks)
            job.num_to_compute = 0
            job.num_generated += 1
            if job.first_token_s is None:
                job.first_token_s = self._now
            if job.num_generated >= (job.turns[0].output_len or 1):
                jobs.remove(job)
                self._end(job)
        self._step(replica)

    def _end(self, job: _Job) -> None:
        self._done.append(job)
        if turns := job.turns[1:]:
            self._after(turns[0].delay_s, lambda: self._place(_Job(turns, self._now)))
        else:
            self._begin()

    def _kill(self, number: int, interval_s: float) -> None:
        replica = list(self._replicas.values())[number % 2]
        for job in replica.jobs:
            self._after(self._arguments.failover, lambda job=job: self._place(job))
        replica.clear()
        replica.is_up = False
        self._after(self._arguments.away, lambda: setattr(replica, "is_up", True))
        self._after(interval_s, lambda: self._kill(number + 1, interval_s))


def _ttft_ms(job: _Job) -> float:
    assert job.first_token_s is not None
    return 1e3 * (job.first_token_s - job.arrived_s)


_FIGURES: dict[str, Callable[[Sequence[_Job]], float]] = {
    "% hit": lambda jobs: 100 * (1 - sum(job.num_uncached or 0 for job in jobs) / sum(map(_prompt_len, jobs))),
    "requests there": lambda jobs: statistics.mean(job.load for job in jobs),
    "ms mean TTFT": lambda jobs: statistics.mean(map(_ttft_ms, jobs)),
    "ms median TTFT": lambda jobs: statistics.median(map(_ttft_ms, jobs)),
}


def _prompt_len(job: _Job) -> int:
    return len(job.turns[0].token_ids)


def _series(name: str, policy: RoutingPolicy, kind: str, runs: Sequence[Sequence[_Job]]) -> Series:
    return Series(f"{name}, {policy.value}", kind, tuple(map(_FIGURES[kind], runs)))
