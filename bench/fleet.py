"""Prefill and decode together and apart on several simulated GPUs, in virtual time: first tokens, and the time between
tokens.

Each GPU is a replica: the real scheduler core with the roofline as its device (see `simulator`). The gateway's router
places requests by load and role; a request with a long prompt leaves a replica for prefill as `gateway.replicas` has
it, and its blocks go over the devices' links. What is assumed: `--move-latency` for the messages of a move, and that
transfers neither slow steps nor each other. Loads are the paper's: ShareGPT's lengths with Poisson arrivals, of which
`--long-share` have a prompt of `--long-prompt` tokens instead.
"""

import argparse
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from bench.report import Series, write_results
from gateway.replicas.roles import Stage, Work, has_room
from gateway.replicas.routing import Candidate, Router, RoutingPolicy
from quire.load import LoadRequest, arriving_at, make_arrivals, sharegpt, take
from quire.replica_role import ReplicaRole
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.moves import KvSource, Lease
from scheduler_svc.core.request import EmittedSequence, Request, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepResult
from simulator.drafts import work_with
from simulator.engine import CLIENT, MAX_STEPS_IN_FLIGHT, key_of
from simulator.hardware import Hardware
from simulator.models import MODELS
from simulator.roofline import Roofline
from simulator.tokens import TOKEN_ID, fake_tokens

_BLOCK_SIZE = 16
_LONG_UNCACHED = 256
"""`--long-prompt` of gateways."""
_MIN_TOKENS_TO_MOVE = 16
"""As of `gateway.replicas.replica_set`."""
_LEASE_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", default="a100-40gb", help="of each replica, as of `quire simulate`")
    parser.add_argument("--model", default="opt-13b", help="as of `quire simulate`")
    parser.add_argument("--efficiency", type=float, default=1.0, help="as of `quire simulate`")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--prefill", default="0,1,2", help="replicas for prefill, several numbers: a row each")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second, over all replicas")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--long-share", type=float, default=0.0, help="share of the prompts that are long")
    parser.add_argument("--long-prompt", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--move-latency", type=float, default=0.005, help="seconds of a move beside its bytes")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


@dataclass(slots=True)
class Life:
    """A request: how many tokens it has, when they came, and which of the gaps between them a move is in."""

    load: LoadRequest
    times: list[float] = field(default_factory=list[float])
    moved_at: list[int] = field(default_factory=list[int])
    replica: "Replica | None" = None


class Replica:
    """A core and its device. `next_at` says when its next step is answered."""

    def __init__(self, name: str, role: ReplicaRole, config: SchedulerConfig, costs: Roofline) -> None:
        self.name, self.role, self.scheduler, self.work = name, role, Scheduler(config), Work()
        self.num_live = 0
        self.answers = deque[tuple[float, StepResult]]()
        self._costs, self._free_at = costs, 0.0

    def plan(self, now: float) -> None:
        while len(self.scheduler.in_flight) < MAX_STEPS_IN_FLIGHT:
            if (plan := self.scheduler.schedule(now)) is None:
                return
            result = fake_tokens(plan, self.scheduler.batch.rows)
            took = self._costs.seconds(work_with(plan, result.num_drafts))
            self._free_at = over = max(now + took.launch, self._free_at) + took.device
            self.answers.append((max(over + took.answer, self.answers[-1][0] if self.answers else 0.0), result))


class Fleet:
    """Replicas in one virtual time, and a load. `lives` and `replicas` have what happened once `run` is over."""

    def __init__(self, arguments: argparse.Namespace, num_prefill: int, load: list[LoadRequest]) -> None:
        model, hardware = MODELS[arguments.model], Hardware.named(arguments.hardware)
        costs = Roofline(model, hardware, _BLOCK_SIZE, arguments.efficiency)
        config = SchedulerConfig(
            num_blocks=hardware.num_blocks(model, _BLOCK_SIZE, 0.9),
            block_size=_BLOCK_SIZE,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            max_model_len=model.max_model_len,
            max_waiting_requests=1 << 20,
            max_waiting_tokens=1 << 40,
        )
        roles = [ReplicaRole.PREFILL] * num_prefill
        roles += [ReplicaRole.DECODE if num_prefill else ReplicaRole.BOTH] * (arguments.replicas - num_prefill)
        self.replicas = {
            f"replica-{index}": Replica(f"replica-{index}", role, config, costs) for index, role in enumerate(roles)
        }
        self.lives = [Life(each) for each in load]
        self._router = Router(RoutingPolicy.AFFINITY, _LONG_UNCACHED)
        self._latency = arguments.move_latency
        self._block_s = model.slot_bytes * _BLOCK_SIZE / hardware.link_bandwidth
        self._later: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()

    def run(self) -> None:
        """Until all requests are over."""
        for index, life in enumerate(self.lives):
            self._at(life.load.arrival_s or 0.0, partial(self._place, index))
        while True:
            steps = ((each.answers[0][0], name) for name, each in self.replicas.items() if each.answers)
            answered = min(steps, default=None)
            if self._later and (answered is None or self._later[0][0] <= answered[0]):
                now, _, call = heapq.heappop(self._later)
                call(now)
            elif answered is not None:
                now = answered[0]
                self._answer(self.replicas[answered[1]], now)
            else:
                break
            for each in self.replicas.values():
                each.plan(now)
                self._fetch(each, now)
        assert not any(each.scheduler.num_live for each in self.replicas.values()), "requests are left"

    def _at(self, when: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._later, (when, next(self._numbers), call))

    def _place(self, index: int, now: float, source: KvSource | None = None) -> None:
        """Submits a request where the gateway's router says, with the tokens that it has."""
        life = self.lives[index]
        candidates = {
            name: Candidate(each.num_live, _BLOCK_SIZE, role=each.role, work=each.work)
            for name, each in self.replicas.items()
        }
        stage = Stage.STREAM if life.times else Stage.PROMPT
        chosen = self._router.choose(life.load.token_ids, "", candidates, stage=stage)
        replica = self.replicas[chosen.replica]
        is_long = not life.times and chosen.num_new_tokens >= _LONG_UNCACHED
        if is_long and replica.role is ReplicaRole.PREFILL:
            for handle in [each for each in replica.work.streams if self._may_leave(each)]:
                self._release(handle, replica, now)
        if life.times:
            replica.work.add_stream(index)
        else:
            replica.work.add_prompt(index, chosen.num_new_tokens)
        life.replica, replica.num_live = replica, replica.num_live + 1
        emitted = (EmittedSequence([TOKEN_ID] * len(life.times)),) if life.times else ()
        request = Request(
            key_of(index),
            str(index),
            life.load.token_ids.tolist(),
            RowSampling(seed=index),
            life.load.output_len or 1,
            emitted=emitted,
            source=source,
        )
        replica.scheduler.submit(request, now)

    def _may_leave(self, index: int) -> bool:
        life = self.lives[index]
        return bool(life.times) and (life.load.output_len or 1) - len(life.times) >= _MIN_TOKENS_TO_MOVE

    def _release(self, index: int, replica: Replica, now: float) -> None:
        """The request goes on elsewhere, once its release and its submission were told."""
        lease, life = (
            Lease(index.to_bytes(8, "big") + len(self.lives[index].times).to_bytes(4, "big")),
            self.lives[index],
        )
        if replica.scheduler.hand_over(key_of(index), lease, now, _LEASE_S) is None:
            return
        self._gone(index, replica)
        life.moved_at.append(len(life.times))
        source = KvSource("", (replica.name,), lease)
        self._at(now + self._latency, partial(self._place, index, source=source))

    def _gone(self, index: int, replica: Replica) -> None:
        replica.work.remove(index)
        replica.num_live -= 1
        self.lives[index].replica = None

    def _fetch(self, replica: Replica, now: float) -> None:
        for preparation in replica.scheduler.take_preparations():
            assert preparation.arriving is not None
            assert preparation.arriving.source is not None
            source, count = preparation.arriving.source, len(preparation.arriving.blocks)

            def fetched(later: float, number: int = preparation.number, source: KvSource = source) -> None:
                replica.scheduler.prepared(number)
                self.replicas[source.endpoints[0]].scheduler.renew_lease(source.lease, later, 0)

            self._at(now + count * self._block_s, fetched)

    def _answer(self, replica: Replica, now: float) -> None:
        _, result = replica.answers.popleft()
        events = replica.scheduler.apply(result, now).get(CLIENT)
        if events is None:
            return
        assert not events.failed
        firsts = [handle for handle in events.handles if not self.lives[handle].times]
        for handle in events.handles:
            self.lives[handle].times.append(now)
        for end in events.completed:
            self._gone(end.handle, replica)
        for handle in firsts:
            if self.lives[handle].replica is replica:
                self._first_token(handle, replica, now)

    def _first_token(self, index: int, replica: Replica, now: float) -> None:
        """As of `ReplicaSet._leave_prefill`."""
        is_long = replica.work.prompts.get(index, 0) >= _LONG_UNCACHED
        replica.work.add_stream(index)
        if is_long and replica.role is ReplicaRole.PREFILL and self._may_leave(index):
            others = [each.work for each in self.replicas.values() if each.role is not ReplicaRole.PREFILL]
            if not has_room(Work(replica.work.prompts, replica.work.num_prompt_tokens, set()), others):
                self._release(index, replica, now)


def main(arguments: argparse.Namespace) -> None:
    model = MODELS[arguments.model]
    load = take(sharegpt(model.max_model_len, model.vocab_size), arguments.requests, seed=0)
    rng = np.random.default_rng(1)
    long_ones = rng.random(len(load)) < arguments.long_share
    room = model.max_model_len - arguments.long_prompt
    for index in np.flatnonzero(long_ones).tolist():
        prompt = rng.integers(0, model.vocab_size, arguments.long_prompt).astype(np.int32)
        load[index] = replace(load[index], prompt=prompt, output_len=min(load[index].output_len or 1, room))
    load = arriving_at(load, make_arrivals(arguments.rate).times(len(load), 0))
    print(
        "| replicas | first token, p50 / p99 | time between tokens, p50 / p99 / p99.9 | moved | pause of a move, p99 |"
    )
    print("|---|---|---|---|---|")
    series: list[Series] = []
    for num_prefill in map(int, arguments.prefill.split(",")):
        fleet = Fleet(arguments, num_prefill, load)
        fleet.run()
        first = np.array([each.times[0] - (each.load.arrival_s or 0.0) for each in fleet.lives])
        gaps = np.concatenate([np.diff(each.times) for each in fleet.lives])
        pauses = [each.times[at] - each.times[at - 1] for each in fleet.lives for at in each.moved_at]
        name = (
            f"{num_prefill} + {arguments.replicas - num_prefill}" if num_prefill else f"{arguments.replicas} together"
        )
        first_ms, gap_ms = 1e3 * np.percentile(first, (50, 99)), 1e3 * np.percentile(gaps, (50, 99, 99.9))
        pause_ms = 1e3 * float(np.percentile(pauses, 99)) if pauses else 0.0
        shown = [f"{a:,.0f} / {b:,.0f} ms" for a, b in [first_ms]] + [
            " / ".join(f"{each:.0f}" for each in gap_ms) + " ms"
        ]
        print(f"| {name} | {shown[0]} | {shown[1]} | {len(pauses)} | {f'{pause_ms:.0f} ms' if pauses else ''} |")
        for what, value in zip(("p50", "p99"), first_ms.tolist(), strict=True):
            series.append(Series(f"{name}: first token, {what}", "ms", (value,)))
        for what, value in zip(("p50", "p99", "p99.9"), gap_ms.tolist(), strict=True):
            series.append(Series(f"{name}: time between tokens, {what}", "ms", (value,)))
    if arguments.out is not None:
        flags = {name: value for name, value in vars(arguments).items() if name != "out"}
        write_results(arguments.out, "Prefill and decode apart, simulated", series, **flags)
