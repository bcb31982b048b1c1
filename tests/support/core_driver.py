"""Drives the scheduler core without services: a stand-in for the worker that knows each sequence's next token."""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler_svc.core import invariants
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.logprobs import PositionLogprobs, TokenLogprob
from scheduler_svc.core.request import ClientId, EmittedSequence, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import ClientEvents, StepPlan, StepResult, Usage

CLIENT = ClientId(0)


def make_config(**changes: int | float) -> SchedulerConfig:
    defaults: dict = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 128,
        "watermark": 0.0,
    }
    return SchedulerConfig(**(defaults | changes))


def make_request(
    handle: int,
    *,
    prompt_len: int = 5,
    max_tokens: int = 6,
    stop: frozenset[int] = frozenset(),
    emitted: tuple[int, ...] = (),
    prompt: list[int] | None = None,
    tenant: str = "",
    num_sequences: int = 1,
    num_returned: int | None = None,
) -> Request:
    """A request with a prompt and a seed of its own, unless a prompt is given."""
    if prompt is None:
        prompt = [(handle * 7 + i) % 50 for i in range(prompt_len)]
    return Request(
        RequestKey(CLIENT, Handle(handle)),
        f"request-{handle}",
        prompt,
        RowSampling(seed=handle),
        max_tokens,
        stop,
        [EmittedSequence(emitted)] if emitted else (),
        tenant,
        num_sequences,
        num_sequences if num_returned is None else num_returned,
    )


def next_token(seed: int, position: int) -> int:
    """The token at `position` of the sequence with this seed: what a sample depends on, and on nothing else."""
    return (seed * 31 + position * 17) % 50


def token_logprob(seed: int, token_id: int) -> float:
    """A log probability that tells sequences apart."""
    return -0.01 * ((seed + token_id) % 89)


def expected_output(request: Request, index: int = 0) -> list[int]:
    """What the request's sequence gets, whatever runs beside it."""
    output = list(request.emitted[index].token_ids) if request.emitted else []
    seed = request.sampling_of(index).seed
    while len(output) < request.max_tokens:
        output.append(next_token(seed, len(request.prompt) + len(output)))
        if output[-1] in request.stop_token_ids:
            break
    return output


@dataclass
class WorkerRow:
    tokens: list[int]
    blocks: list[int]
    seed: int
    logprobs: int | None


@dataclass
class FakeDevice:
    """Executes plans like a worker: checks that every token has a slot and that nothing is skipped."""

    block_size: int
    rows: dict[int, WorkerRow] = field(default_factory=dict)
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Slot -> the token whose keys and values it holds and all tokens before it, which these depend on."""
    num_computed: int = 0
    """Tokens computed so far, over all rows."""

    def run(self, plan: StepPlan) -> StepResult:
        copied = {target: self._block(source) for source, target in plan.copies.tolist()}
        for target, content in copied.items():
            self.slots.update({target * self.block_size + offset: held for offset, held in content.items()})
        for row in plan.release.tolist():
            self.rows.pop(row, None)
        for assigned in plan.assign:
            assert assigned.row not in self.rows, "a row was assigned twice"
            self.rows[assigned.row] = WorkerRow(
                list(assigned.token_ids), list(assigned.block_table), assigned.sampling.seed, assigned.sampling.logprobs
            )
        for parent, child in plan.forks.tolist():
            self.rows[child] = replace(
                self.rows[parent], tokens=[*self.rows[parent].tokens], blocks=[*self.rows[parent].blocks]
            )
        for row, seed in plan.reseed:
            self.rows[row].seed = seed
        for row, index, block in plan.block_table_deltas.tolist():
            assert index <= len(self.rows[row].blocks), "a block table has a gap"
            self.rows[row].blocks[index : index + 1] = [block]
        batch = zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), plan.num_computed_tokens.tolist(), strict=True)
        for row, num_new, num_computed in batch:
            self._compute(self.rows[row], num_new, num_computed)
        sampled = [self._sample(row) for row, _ in plan.samples.tolist()]
        logprobs = {
            row: PositionLogprobs(TokenLogprob(token_id, token_logprob(self.rows[row].seed, token_id), 1), ())
            for (row, _), token_id in zip(plan.samples.tolist(), sampled, strict=True)
            if self.rows[row].logprobs is not None
        }
        return StepResult(plan.step_id, np.array(sampled, dtype=np.int64), logprobs)

    def _block(self, block: int) -> dict[int, tuple[int, ...]]:
        """Offset and content of the block's filled slots."""
        slots = ((offset, self.slots.get(block * self.block_size + offset)) for offset in range(self.block_size))
        return {offset: held for offset, held in slots if held is not None}

    def _slot(self, row: WorkerRow, position: int) -> int:
        return row.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _compute(self, row: WorkerRow, num_new: int, num_computed: int) -> None:
        self.num_computed += num_new
        for position in range(num_computed):
            context = tuple(row.tokens[: position + 1])
            assert self.slots[self._slot(row, position)] == context, "the context is not the row's own"
        for position in range(num_computed, num_computed + num_new):
            assert position < len(row.tokens), "a token was computed before it was known"
            self.slots[self._slot(row, position)] = tuple(row.tokens[: position + 1])

    def _sample(self, row: int) -> int:
        state = self.rows[row]
        state.tokens.append(next_token(state.seed, len(state.tokens)))
        return state.tokens[-1]


class Driver:
    """A scheduler and a device with some steps in flight between them."""

    def __init__(self, config: SchedulerConfig, max_in_flight: int = 2) -> None:
        self.scheduler = Scheduler(config)
        self.device = FakeDevice(config.block_size)
        self.max_in_flight = max_in_flight
        self.results: deque[StepResult] = deque()
        self.outputs: dict[int, list[int]] = {}
        """The output of each request's first sequence."""
        self.samples: dict[tuple[int, int], list[int]] = {}
        """The output of every sequence, by handle and index."""
        self.finished: set[int] = set()
        self.usage: dict[int, Usage] = {}
        self.clock = 0.0

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request, self.clock)
        for index in range(request.num_returned):
            emitted = list(request.emitted[index].token_ids) if request.emitted else []
            self.samples[request.key.handle, index] = emitted
        self.outputs[request.key.handle] = self.samples[request.key.handle, 0]
        self.check()

    def plan(self) -> StepPlan | None:
        """Plans one step, runs it, and keeps its result back."""
        if len(self.results) >= self.max_in_flight:
            return None
        plan = self.scheduler.schedule(self.clock)
        if plan is not None:
            self.results.append(self.device.run(plan))
        self.check()
        return plan

    def deliver(self) -> dict[ClientId, ClientEvents]:
        """Applies the oldest result that was kept back."""
        if not self.results:
            return {}
        self.clock += 1.0
        events = self.scheduler.apply(self.results.popleft(), self.clock)
        for batch in events.values():
            self._record(batch)
        self.check()
        return events

    def run_until_idle(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            while self.plan() is not None:
                pass
            if not self.results:
                return
            self.deliver()
        raise AssertionError(f"still busy after {max_steps} steps")

    def crash(self) -> None:
        """The worker is lost with everything in flight."""
        self.scheduler.void_in_flight()
        self.results.clear()
        self.device = FakeDevice(self.scheduler.config.block_size)
        self.check()

    def check(self) -> None:
        invariants.check(self.scheduler)

    def _record(self, batch: ClientEvents) -> None:
        columns = zip(batch.handles, batch.sequence_indices, batch.offsets, batch.token_ids, strict=True)
        for handle, index, offset, token_id in columns:
            assert offset == len(self.samples[handle, index]), "an event was lost or repeated"
            self.samples[handle, index].append(token_id)
        for end in batch.finished:
            assert end.num_tokens == len(self.samples[end.handle, end.sequence_index])
        self.finished.update(end.handle for end in batch.completed)
        self.usage.update((end.handle, end.usage) for end in batch.completed)
