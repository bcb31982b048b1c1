"""Drives the scheduler core without services: a stand-in for the worker that knows each sequence's next token."""

import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping, Reversible, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from quire.messages.prefix_hashes import BlockHash, prefix_of
from scheduler_svc.core import invariants, preparation
from scheduler_svc.core.beam_search import BeamParameters, BeamSearch, Candidates
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.moves import Arriving
from scheduler_svc.core.paging.block_tables import BlockTableLayout
from scheduler_svc.core.pins import PIN_CLIENT, Pin
from scheduler_svc.core.prefix_index import PrefixHashes
from scheduler_svc.core.preparation import Preparation
from scheduler_svc.core.request import (
    Adapter,
    ClientId,
    Constraint,
    EmittedSequence,
    Handle,
    MovedBlocks,
    Need,
    Request,
    RequestKey,
    RowSampling,
    cache_root,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.sequence import Sequence as CoreSequence
from scheduler_svc.core.step import ClientEvents, SampleLogprobs, StepPlan, StepResult, Usage
from tests.support.logprobs import Line, columns_of

CLIENT = ClientId(0)
VOCAB_SIZE = 50

Content = int | tuple[int, int]
"""Content of a slot: the number that `Contexts` gives the tokens up to the slot's own, since its keys and values depend
on all of them. If they are not finite, the mark of the row that computed them comes before."""

Blocks = dict[int, list[Content | None]]
"""Block -> contents of its slots."""


class Contexts:
    """Gives sequences of tokens numbers: equal sequences have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._lasts: list[tuple[int, int]] = [(0, 0)]

    def extend(self, numbers: list[int], tokens: Sequence[int], end: int, adapter: bytes = b"") -> None:
        """Extends `numbers`, which has the numbers of the first prefixes, to the prefixes of up to `end` tokens. An
        adapter is like a token before all others."""
        before = numbers[-1] if numbers else self._after(0, mark_of(adapter)) if adapter else 0
        for token_id in tokens[len(numbers) : end]:
            before = self._after(before, token_id)
            numbers.append(before)

    def _after(self, before: int, token_id: int) -> int:
        last = before, token_id
        if last not in self._numbers:
            self._numbers[last] = len(self._lasts)
            self._lasts.append(last)
        return self._numbers[last]

    def tokens(self, number: int) -> list[int]:
        """The sequence of tokens that has this number."""
        backwards: list[int] = []
        while number:
            number, token_id = self._lasts[number]
            backwards.append(token_id)
        return backwards[::-1]


def make_config(**changes: Any) -> SchedulerConfig:
    defaults: dict[str, Any] = {
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
    priority: int = 0,
    beam: BeamParameters | None = None,
    constraint: bytes = b"",
    prompt_logprobs_start: int | None = None,
    adapter: bytes = b"",
) -> Request:
    """A request with a prompt and a seed of its own, unless a prompt is given. See `allowed` for constraints. With
    `prompt_logprobs_start` it requests log probabilities of its prompt."""
    if prompt is None:
        prompt = [(handle * 7 + i) % 50 for i in range(prompt_len)]
    return Request(
        RequestKey(CLIENT, Handle(handle)),
        f"request-{handle}",
        prompt,
        RowSampling(
            seed=handle,
            parameters=constraint,
            prompt_logprobs=None if prompt_logprobs_start is None else 0,
            prompt_logprobs_start=prompt_logprobs_start or 1,
        ),
        max_tokens,
        stop,
        [EmittedSequence(emitted)] if emitted else (),
        tenant,
        num_sequences,
        num_sequences if num_returned is None else num_returned,
        priority,
        beam,
        has_constraint=bool(constraint),
        adapter=Adapter(adapter) if adapter else None,
    )


def mark_of(adapter: bytes) -> int:
    """The number, no token, that stands for an adapter, a digest of one byte, before the tokens that it computes."""
    return -1 - adapter[0]


def continued(request: Request, counts: Sequence[int]) -> Request:
    """The request as it comes back after its sequences got `counts` tokens each, or their last one."""
    outputs = [expected_output(request, index)[:count] for index, count in enumerate(counts)]
    ends = [len(output) == len(expected_output(request, index)) for index, output in enumerate(outputs)]
    return replace(request, emitted=[EmittedSequence(*each) for each in zip(outputs, ends, strict=True)])


def next_token(seed: int, position: int, adapter: bytes = b"") -> int:
    """The token at `position` of the sequence with this seed and adapter. A sample depends on nothing else."""
    return (seed * 31 + position * 17 + sum(adapter)) % 50


def allowed(parameters: bytes, tokens: Sequence[int], token_id: int) -> int:
    """The token that a sequence with a constraint gets in place of `token_id`, the token without the constraint. As in
    a grammar, it depends on all tokens so far."""
    if not parameters:
        return token_id
    residue = (sum(parameters) + sum(tokens)) % 3
    return token_id if token_id % 3 == residue else (token_id // 3 * 3 + residue) % 48


def token_logprob(seed: int, token_id: int) -> float:
    """A log probability that differs between sequences."""
    return -0.01 * ((seed + token_id) % 89)


def candidates_after(tokens: list[int], count: int) -> Candidates:
    """The most likely tokens after these, which depend on nothing else."""
    digest = blake2b(repr(tokens).encode(), digest_size=8).digest()
    order = sorted(range(VOCAB_SIZE), key=lambda token_id: (digest[token_id % 8] * 7 + token_id * 13) % 61)[:count]
    steps = [0.05 + digest[(rank + 3) % 8] / 256 for rank in range(len(order))]
    return Candidates(order, [-sum(steps[: rank + 1]) for rank in range(len(order))])


def allowed_candidates(parameters: bytes, tokens: list[int], candidates: Candidates, count: int) -> Candidates:
    """The first `count` of `candidates` that the constraint allows."""
    pairs = zip(candidates.token_ids, candidates.logprobs, strict=True)
    found = [(token_id, logprob) for token_id, logprob in pairs if allowed(parameters, tokens, token_id) == token_id]
    return Candidates([token_id for token_id, _ in found[:count]], [logprob for _, logprob in found[:count]])


def expected_hypotheses(request: Request) -> list[list[int]]:
    """The hypotheses of a beam search, which are independent of other requests."""
    assert request.beam is not None
    search = BeamSearch(request.beam, request.max_tokens, request.stop_token_ids)
    count = request.sampling_of(0).num_candidates
    assert count is not None
    outputs: list[list[int]] = [[] for _ in range(request.beam.width)]
    while outputs:
        texts = [[*request.prompt, *each] for each in outputs]
        parameters = request.sampling.parameters
        mark = [] if request.adapter is None else [mark_of(request.adapter.digest)]
        candidates = [
            allowed_candidates(parameters, text, candidates_after([*mark, *text], VOCAB_SIZE), count) for text in texts
        ]
        step = search.advance(candidates, outputs)
        outputs = [[*outputs[each.parent], each.token_id] for each in step.continuations]
    return [list(each.token_ids) for each in search.best()[: request.num_returned]]


def expected_output(request: Request, index: int = 0) -> list[int]:
    """The output of the request's sequence, which is independent of other requests."""
    if request.beam is not None:
        return expected_hypotheses(request)[index]
    output = list(request.emitted[index].token_ids) if request.emitted else []
    if request.emitted and request.emitted[index].has_ended:
        return output
    seed = request.sampling_of(index).seed
    adapter = b"" if request.adapter is None else request.adapter.digest
    while len(output) < request.max_tokens:
        tokens = [*request.prompt, *output]
        output.append(allowed(request.sampling.parameters, tokens, next_token(seed, len(tokens), adapter)))
        if output[-1] in request.stop_token_ids:
            break
    return output


@dataclass
class WorkerRow:
    tokens: list[int]
    blocks: list[int]
    seed: int
    logprobs: int | None
    num_candidates: int | None
    parameters: bytes
    adapter_slot: int | None = None
    has_drafted: bool = False
    contexts: list[int] = field(default_factory=list[int])
    """The numbers of the prefixes of the sequence."""
    state_blocks: list[int] = field(default_factory=list[int])
    checkpoints: list[tuple[int, Sequence[int]]] = field(default_factory=list[tuple[int, Sequence[int]]])
    """The checkpoints of the step that runs."""


@dataclass
class FakeDevice:
    """Executes plans like a worker, and checks that every token has a slot and that none is skipped."""

    layout: BlockTableLayout
    rows: dict[int, WorkerRow] = field(default_factory=dict)
    host_blocks: Blocks = field(default_factory=dict)
    blocks: Blocks = field(default_factory=dict)
    candidates: Callable[[list[int], int], Candidates] = candidates_after
    """Returns the most likely tokens after the given ones, and how many to return."""
    num_computed: int = 0
    """Tokens computed so far, over all rows."""
    seals: dict[int, BlockHash] = field(default_factory=dict)
    """Blocks that a later scheduler would adopt: block -> the hash that it is sealed under."""
    short_lived: set[int] = field(default_factory=set)
    """Sealed blocks that are not kept on disk."""
    contexts: Contexts = field(default_factory=Contexts)
    adapters: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """The digest of the adapter that is loaded, by slot."""
    disk: dict[int, tuple[BlockHash, list[Content | None]]] = field(default_factory=dict)
    """Blocks that are kept below the pool, by slot."""
    num_written: int = 0

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    def keep_on_disk(self, num_slots: int) -> list[int]:
        """Writes sealed blocks that are not on disk yet, over the oldest ones. Returns the slots that changed."""
        changed: list[int] = []
        for block, content in self.seals.items():
            if block not in self.short_lived and all(content != name for name, _ in self.disk.values()):
                slot = self.num_written % num_slots
                self.num_written += 1
                self.disk[slot] = content, list(self.blocks[block])
                changed.append(slot)
        return list(dict.fromkeys(changed))

    def fetch(self, arriving: Arriving) -> frozenset[int]:
        """Fills blocks from the disk. Returns the indices of missing ones."""
        on_disk = dict(self.disk.values())
        for block, content in zip(arriving.blocks, arriving.hashes, strict=True):
            self.seals.pop(block, None)
            if content in on_disk:
                self.blocks[block], self.seals[block] = list(on_disk[content]), content
        return frozenset(index for index, content in enumerate(arriving.hashes) if content not in on_disk)

    def run(
        self,
        plan: StepPlan,
        failing: Mapping[int, tuple[int, int]] | None = None,
        refusing: Collection[int] = (),
        deadly: Mapping[int, int] | None = None,
    ) -> StepResult:
        """`failing` rows compute nothing finite from a position on: row -> mark that no other row has, position. The
        constraint of `refusing` rows fails where they sample. Drafts of `deadly` rows end before a position."""
        failing = failing or {}
        self._move(plan.swap_out, self.blocks, self.host_blocks)
        self._move(plan.swap_in, self.host_blocks, self.blocks)
        self._move(plan.copy, self.blocks, self.blocks)
        for row in plan.release.tolist():
            self.rows.pop(row, None)
        for assigned in plan.assign:
            assert assigned.row not in self.rows, "a row was assigned twice"
            self.rows[assigned.row] = WorkerRow(
                list(assigned.token_ids),
                list(assigned.block_table),
                assigned.sampling.seed,
                assigned.sampling.logprobs,
                assigned.sampling.num_candidates,
                assigned.sampling.parameters,
                assigned.adapter_slot,
                state_blocks=list(assigned.state_blocks),
            )
        parents = {child: self.rows[parent] for parent, child in plan.fork.tolist()}
        self.rows |= {
            row: replace(each, tokens=[*each.tokens], blocks=[*each.blocks], contexts=[*each.contexts])
            for row, each in parents.items()
        }
        for row, seed in plan.reseed:
            self.rows[row].seed = seed
        for row, position, token_id in plan.set_tokens.tolist():
            assert position == len(self.rows[row].tokens), "a chosen token does not follow the row's own"
            self.rows[row].tokens.append(token_id)
        for row, index, block in plan.block_table_deltas.tolist():
            assert index <= len(self.rows[row].blocks), "a block table has a gap"
            self.rows[row].blocks[index : index + 1] = [block]
        for row, state_blocks in plan.state_tables:
            self.rows[row].state_blocks = list(state_blocks)
        for each in self.rows.values():
            each.checkpoints = []
        for row, num_tokens, copy in plan.checkpoints:
            assert row in plan.rows, "a checkpoint is of a row that computes nothing"
            self.rows[row].checkpoints.append((num_tokens, copy))
        starts = self.starts_of(plan)
        for row, num_new in zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), strict=True):
            self._compute(self.rows[row], num_new, starts[row], *failing.get(row, (0, sys.maxsize)))
        self._check_distinct_writes(plan)
        self.seals.update(plan.sealed)
        self.short_lived = (self.short_lived - dict(plan.sealed).keys()).union(plan.short_lived)
        candidates = {
            row: self._candidates(self.rows[row], count)
            for row, _ in plan.samples.tolist()
            if (count := self.rows[row].num_candidates) is not None
        }
        max_drafts = np.zeros(len(plan.samples), np.int64) if plan.max_drafts is None else plan.max_drafts
        limits = dict(deadly or {}) | {row: position for row, (_, position) in failing.items()}
        sampled: list[list[int]] = []
        num_drafts: list[int] = []
        for (row, _), limit in zip(plan.samples.tolist(), max_drafts.tolist(), strict=True):
            sampled.append([0 if row in candidates else self._sample(row)])
            num_drafts.append(0 if row in refusing else self._verify(row, sampled[-1], limit, limits.get(row)))
        counts = [len(tokens) for tokens in sampled]
        of_token = [row for (row, _), count in zip(plan.samples.tolist(), counts, strict=True) for _ in range(count)]
        token_ids = [token_id for tokens in sampled for token_id in tokens]
        logprobs = {
            token: Line(token_logprob(self.rows[row].seed, token_id))
            for token, (row, token_id) in enumerate(zip(of_token, token_ids, strict=True))
            if self.rows[row].logprobs is not None
        }
        news = zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), strict=True)
        ends = {row: starts[row] + num_new for row, num_new in news}
        not_finite = {row for row, (_, position) in failing.items() if ends.get(row, 0) > position}
        sources = plan.samples[:, 1].tolist()
        failures = {row: "not finite" for row, source in plan.samples.tolist() if source in not_finite}
        refused = frozenset(refusing).intersection(plan.samples[:, 0].tolist())
        failures |= dict.fromkeys(refused, "the constraint failed")
        of_tokens = [token for token in logprobs if of_token[token] not in failures]
        lines = columns_of(logprobs[token] for token in of_tokens)
        return StepResult(
            plan.step_id,
            np.array(token_ids, dtype=np.int64),
            SampleLogprobs(np.array(of_tokens), lines) if of_tokens else None,
            failures,
            {row: each for row, each in candidates.items() if row not in failures},
            frozenset(not_finite.difference(sources)),
            refused,
            np.array(counts) if any(num_drafts) else None,
            np.array(num_drafts) if any(num_drafts) else None,
        )

    def starts_of(self, plan: StepPlan) -> dict[int, int]:
        """The position of each row of the batch: as the plan says, or later if drafts of earlier steps were right."""
        samplers = set(plan.samples[:, 1].tolist())
        starts: dict[int, int] = {}
        batch = zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), plan.num_computed_tokens.tolist(), strict=True)
        for row, num_new, num_computed in batch:
            state = self.rows[row]
            starts[row] = len(state.tokens) - num_new if row in samplers and state.has_drafted else num_computed
            assert starts[row] >= num_computed, "more tokens are taken for computed than are"
        return starts

    def _verify(self, row: int, tokens: list[int], max_drafts: int, end: int | None) -> int:
        """Drafts tokens of a row that has just sampled, by a rule that is often right. Adds the right drafts and the
        token after them to `tokens`. Returns the number of drafts. No draft is computed from `end` on."""
        if not max_drafts:
            return 0
        state = self.rows[row]
        state.has_drafted = True
        salt = state.seed * 7 + len(state.tokens) * 5
        num_drafts = salt % (max_drafts + 1)
        num_right = (salt // 3) % (num_drafts + 1)
        for _ in range(num_right):
            if len(state.tokens) > (sys.maxsize if end is None else end):
                return num_drafts
            self._compute(state, 1, len(state.tokens) - 1, 0, sys.maxsize)
            tokens.append(self._sample(row))
        for position in range(len(state.tokens) - 1, len(state.tokens) - 1 + num_drafts - num_right):
            for block in self._blocks_at(state, position):
                self.seals.pop(block, None)
                self.blocks.setdefault(block, self._empty)[position % self.block_size] = (-1, position)
        return num_drafts

    def _move(self, pairs: np.ndarray, source: Blocks, target: Blocks) -> None:
        assert len(set(pairs[:, 1].tolist())) == len(pairs), "a block is written twice"
        # All sources are read before any target is written.
        moved = [(to, [*source.get(block, self._empty)]) for block, to in pairs.tolist()]
        for block, content in moved:
            if target is self.blocks:
                self.seals.pop(block, None)
            target[block] = content

    def _blocks_at(self, row: WorkerRow, position: int) -> list[int]:
        """The block of each group that holds a position."""
        first = position // self.block_size * self.layout.num_groups
        blocks = row.blocks[first : first + self.layout.num_groups]
        assert len(set(blocks)) == self.layout.num_groups, "groups share a block, or have none"
        return blocks

    @property
    def _empty(self) -> list[Content | None]:
        return [None] * self.block_size

    def _check_distinct_writes(self, plan: StepPlan) -> None:
        written = [
            block
            for row, computed, new in zip(plan.rows, plan.num_computed_tokens, plan.num_new_tokens, strict=True)
            for index in range(int(computed) // self.block_size, (int(computed + new) - 1) // self.block_size + 1)
            for block in self._blocks_at(self.rows[row], index * self.block_size)
        ]
        written += [block for row in plan.rows.tolist() for block in self.rows[row].state_blocks]
        written += [block for _, _, copy in plan.checkpoints for block in copy]
        assert len(set(written)) == len(written), "two rows write to one block"

    def _compute(self, row: WorkerRow, num_new: int, num_computed: int, mark: int, failing_from: int) -> None:
        self.num_computed += num_new
        size, end, own = self.block_size, num_computed + num_new, row.contexts
        assert end <= len(row.tokens), "a token was computed before it was known"
        self.contexts.extend(own, row.tokens, end, self._adapter_of(row))
        num_groups = self.layout.num_groups
        for group in range(num_groups):
            start = 0 if group < self.layout.num_full else max(num_computed - self.layout.window + 1, 0)
            for first in range(start, num_computed, size) if num_groups == 1 else range(start, num_computed):
                last = min(first + size, num_computed) if num_groups == 1 else first + 1
                held = self.blocks.get(row.blocks[first // size * num_groups + group], self._empty)
                held = held[first % size : first % size + last - first]
                # Blocks that a failing row took from the cache are as finite as before.
                is_own = held == [self._content(each, group) for each in own[first:last]] or all(
                    content == self._content(own[position], group)
                    or (position >= failing_from and content == (mark, own[position]))
                    for position, content in enumerate(held, first)
                )
                assert is_own, f"the context at {first} of group {group} is not the row's own"
        for position in range(num_computed, end):
            for group, block in enumerate(self._blocks_at(row, position)):
                self.seals.pop(block, None)
                content = self._content(own[position], group) if position < failing_from else (mark, own[position])
                self.blocks.setdefault(block, self._empty)[position % size] = content
        if row.state_blocks:
            self._advance(row, num_computed, end, mark if end > failing_from else None)

    def _advance(self, row: WorkerRow, start: int, end: int, mark: int | None) -> None:
        """Changes the row's state from the one after `start` tokens to the one after `end`."""
        if start:
            for piece, block in enumerate(row.state_blocks):
                held = self.blocks.get(block, self._empty)[0]
                is_own = held == self._state(piece, row.contexts[start - 1])
                assert is_own or mark is not None, f"the state after {start} tokens is not the row's own"
        copies = [(count, blocks) for count, blocks in row.checkpoints if start < count <= end]
        for count, blocks in ((end, row.state_blocks), *copies):
            for piece, block in enumerate(blocks):
                self.seals.pop(block, None)
                content = self._state(piece, row.contexts[count - 1]) if mark is None else (mark, count)
                self.blocks[block] = [content] * self.block_size

    @staticmethod
    def _state(piece: int, number: int) -> tuple[int, int]:
        """The content of a block of the state after the tokens that have this number."""
        return -100 - piece, number

    def _content(self, number: int, group: int) -> int:
        """The content that a group of layers keeps for the tokens that have this number."""
        return number * self.layout.num_groups + group

    def _adapter_of(self, row: WorkerRow) -> bytes:
        return b"" if row.adapter_slot is None else self.adapters[row.adapter_slot]

    def check_seals(self, plan: StepPlan, tenants: Reversible[str]) -> None:
        """Checks that each block that a step sealed holds the tokens of its hash, for one of these tenants."""
        for block, content in plan.sealed:
            held = self.blocks[block][-1]
            if isinstance(held, tuple) and held[0] <= self._state(0, 0)[0]:
                number, group = held[1], self.layout.num_groups - 100 - held[0]
            else:
                assert isinstance(held, int), f"block {block} is sealed, and it is not full or not finite"
                number, group = divmod(held, self.layout.num_groups)
            tokens = self.contexts.tokens(number)
            adapter = Adapter(bytes([-1 - tokens.pop(0)])) if tokens[0] < 0 else None
            hashes = (PrefixHashes(cache_root(tenant, adapter), self.block_size) for tenant in reversed(tenants))
            true = (each.first(len(tokens) // self.block_size, tokens)[-1:] for each in hashes)
            assert [prefix_of(content, group)] in true, f"block {block} is sealed under the hash of other tokens"

    def _sample(self, row: int) -> int:
        state = self.rows[row]
        token_id = next_token(state.seed, len(state.tokens), self._adapter_of(state))
        state.tokens.append(allowed(state.parameters, state.tokens, token_id))
        return state.tokens[-1]

    def _candidates(self, row: WorkerRow, count: int) -> Candidates:
        adapter = self._adapter_of(row)
        tokens = [mark_of(adapter), *row.tokens] if adapter else row.tokens
        if not row.parameters:
            return self.candidates(tokens, count)
        return allowed_candidates(row.parameters, row.tokens, self.candidates(tokens, VOCAB_SIZE), count)


class Driver:
    """A scheduler and a device with some steps in flight between them."""

    def __init__(self, config: SchedulerConfig, max_in_flight: int = 2) -> None:
        self.scheduler = Scheduler(config)
        self.device = FakeDevice(config.layout)
        self.max_in_flight = max_in_flight
        self.results: deque[StepResult | None] = deque()
        """Results of the steps in flight; None if the worker refuses or dies of the step, and for all after it."""
        self.poisoned: dict[int, int] = {}
        """Handles of requests, and the number of tokens from which on no step may compute them."""
        self.deadly: dict[int, int] = {}
        """Handles of requests, and the token (counted from 1) that the worker cannot compute without dying."""
        self.failing: dict[int, int] = {}
        """Handles of requests, and the position from which on their results are not finite."""
        self.refusing: dict[int, int] = {}
        """Handles of requests, and the number of tokens from which on the worker finds that their constraint fails."""
        self.told: deque[Preparation] = deque()
        """Constraints and adapters that the worker prepares and has not answered yet."""
        self.unloadable: set[bytes] = set()
        """Digests of adapters whose files are gone."""
        self.deadly_needs: set[Need] = set()
        """Needs that the worker cannot prepare without dying."""
        self.compiled: dict[bytes, None] = {}
        """The constraints that the worker keeps; the oldest comes first."""
        self.outputs: dict[int, list[int]] = {}
        """The output of each request's first sequence."""
        self.samples: dict[tuple[int, int], list[int]] = {}
        """The output of every sequence, by handle and index."""
        self.finished: set[int] = set()
        self.failed: set[int] = set()
        self.num_refusals = 0
        self.num_deaths = 0
        self.deaths: list[tuple[int, list[Need]]] = []
        """The number of steps in flight at each death, and the needs in preparation."""
        self.usage: dict[int, Usage] = {}
        self.clock = 0.0
        self._is_dead = False
        self._tenants: dict[str, None] = {}
        """All tenants that ever ran; the latest are at the end."""

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.submit(request, self.clock)
            for index in range(request.num_returned):
                emitted = list(request.emitted[index].token_ids) if request.emitted else []
                self.samples[request.key.handle, index] = emitted
            self.outputs[request.key.handle] = self.samples[request.key.handle, 0]
            self.check()

    def plan(self) -> StepPlan | None:
        """Plans one step, runs it, and holds its result back until `deliver`."""
        if len(self.results) >= self.max_in_flight:
            return None
        plan = self.scheduler.schedule(self.clock)
        if plan is not None:
            self._is_dead |= None not in self.results and self._is_deadly(plan)
            self.results.append(None if self._is_dead or self._is_refused(plan) else self._run(plan))
        self.check()
        return plan

    def next_plan(self) -> StepPlan:
        """Same as `plan`, if there is something to compute and room for a step in flight."""
        plan = self.plan()
        assert plan is not None
        return plan

    def _run(self, plan: StepPlan) -> StepResult:
        for group in self.scheduler.running:
            self._tenants.pop(group.request.tenant, None)
            self._tenants[group.request.tenant] = None
        self._check_prepared(plan)
        refusing = self._refusing_rows(plan)
        result = self.device.run(plan, self._failing_rows(plan), refusing, self._deadly_rows(plan))
        for row in result.refused:
            self.compiled.pop(self.device.rows[row].parameters, None)
        self.device.check_seals(plan, self._tenants)
        return result

    def _check_prepared(self, plan: StepPlan) -> None:
        """Checks that rows with a constraint wait for it, unless the scheduler tries requests one by one."""
        if self.scheduler.config.prepares_constraints and not self.scheduler.trials.are_on:
            for parameters in (each.sampling.parameters for each in plan.assign):
                assert not parameters or parameters in self.compiled, "a row came before its constraint"

    def _refusing_rows(self, plan: StepPlan) -> set[int]:
        return {row for row, (limit, _, num_tokens) in self._marked(plan, self.refusing).items() if num_tokens >= limit}

    def _marked(self, plan: StepPlan, marks: Mapping[int, int]) -> dict[int, tuple[int, int, int]]:
        """The rows of a plan whose requests have marks: the mark, the handle, and the number of tokens."""
        sequences = ((row, each.request.key.handle, each) for row, each in self._sequences_of(plan).items())
        return {row: (marks[handle], handle, each.num_tokens) for row, handle, each in sequences if handle in marks}

    def _sequences_of(self, plan: StepPlan) -> dict[int, CoreSequence]:
        """The sequences in the rows of a plan, without pins."""
        sequences = {row: self.scheduler.batch.rows.sequences[row] for row in plan.rows.tolist()}
        return {
            row: each for row, each in sequences.items() if each is not None and each.request.key.client != PIN_CLIENT
        }

    def tell(self) -> list[Preparation]:
        """Sends the worker the constraints to compile and the adapters to load now, and returns them."""
        told = list(self.scheduler.take_preparations())
        self.told += told
        for each in told:
            if each.slot is not None:
                # No row of a later step may use the adapter that was in the slot before.
                self.device.adapters.pop(each.slot, None)
        return told

    def tell_disk(self, changed: Sequence[int]) -> None:
        """The worker reports the present contents of these slots of its disk."""
        kept = [slot for slot in changed if slot in self.device.disk]
        empty = [slot for slot in changed if slot not in self.device.disk]
        self.scheduler.tier_changed([*kept, *empty], [self.device.disk[slot][0] for slot in kept])

    def compile_next(self) -> bool:
        """The worker compiles the next constraint or loads the next adapter, and answers. Returns whether there was
        one."""
        if not self.told:
            return False
        if self.told[0].need in self.deadly_needs:
            self._die()
            return True
        self._answer(self.told.popleft())
        return True

    def _answer(self, told: Preparation) -> None:
        failure, failed = None, frozenset[int]()
        if isinstance(told.need, Constraint):
            self.compiled.pop(told.need.parameters, None)
            self.compiled[told.need.parameters] = None
            if len(self.compiled) > preparation.NUM_KEPT:
                del self.compiled[next(iter(self.compiled))]
        elif isinstance(told.need, MovedBlocks):
            assert told.arriving is not None
            assert told.arriving.source is None, "this driver knows no other replica"
            failed = self.device.fetch(told.arriving)
        elif told.need.digest in self.unloadable:
            failure = "its files are gone"
        else:
            assert told.slot is not None
            self.device.adapters[told.slot] = told.need.digest
        self._record(self.scheduler.prepared(told.number, failure, failed))
        self.check()

    def give_up_next(self) -> None:
        """The worker takes too long for the next constraint or adapter, and answers after that."""
        told = self.told.popleft()
        self._record(self.scheduler.end_late_preparation(told.number, 5.0))
        self.check()
        self._answer(told)

    def _failing_rows(self, plan: StepPlan) -> dict[int, tuple[int, int]]:
        return {row: (-1 - handle, start) for row, (start, handle, _) in self._marked(plan, self.failing).items()}

    def deliver(self) -> dict[ClientId, ClientEvents]:
        """Applies the oldest result that was held back."""
        if not self.results:
            return {}
        self.clock += 1.0
        result = self.results.popleft()
        if result is None:
            return self._die() if self._is_dead else self._refuse()
        events = self.scheduler.apply(result, self.clock)
        self._record(events)
        self.check()
        return events

    def run_steps(self, count: int) -> None:
        """Plans steps and applies their results, one after the other."""
        for _ in range(count):
            self.plan()
            self.deliver()

    def run_what_can(self) -> None:
        """Runs steps until they wait for something else from the worker."""
        while self.plan() is not None or self.results:
            self.deliver()

    def preempt(self, request: Request | Pin) -> None:
        """Preempts a running request, as if blocks were short; it comes back by itself."""
        self.scheduler.planner.preempt(self.scheduler.running.get(request.key), self.clock)
        self.check()

    def run_until_idle(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            while self.plan() is not None:
                pass
            self.tell()
            if not self.compile_next() and not self.results:
                return
            self.deliver()
        raise AssertionError(f"still busy after {max_steps} steps")

    def finish(self, *requests: Request) -> None:
        """Runs all requests to their ends. `requests` then have their whole output, and only pins hold blocks."""
        self.run_until_idle()
        for request in requests:
            assert request.key.handle in self.finished
            for index in range(request.num_returned):
                assert self.samples[request.key.handle, index] == expected_output(request, index)
        blocks = self.scheduler.batch.blocks
        assert blocks.pool.num_used == self.scheduler.pins.num_pinned
        assert self.scheduler.batch.rows.num_free == self.scheduler.config.max_num_seqs
        assert blocks.host.pool.num_used == 0

    def crash(
        self,
        *,
        was_alive: bool = False,
        config: SchedulerConfig | None = None,
        detail: str | None = None,
        arrivals: Sequence[Request] = (),
    ) -> dict[ClientId, ClientEvents]:
        """The worker is lost with all steps in flight, and attached again; `config` changes its pool. `detail` is the
        reason of the loss. `arrivals` come in between."""
        self.scheduler.lose_in_flight(detail)
        self._forget_worker()
        for request in arrivals:
            self.submit(request)
        if config is not None:
            self._move_to(config)
        events = self.scheduler.judge_loss(was_alive=was_alive)
        self._note_failures(events)
        self.check()
        return events

    def _forget_worker(self) -> None:
        self.scheduler.void_in_flight(self.clock)
        self.results.clear()
        self.device = FakeDevice(self.scheduler.config.layout)
        self.told.clear()
        self.compiled.clear()
        self._is_dead = False
        self.check()

    def _move_to(self, config: SchedulerConfig) -> None:
        self.device = FakeDevice(config.layout)
        self.failed |= {failure.key.handle for failure in self.scheduler.refit(config, self.clock)}

    def _is_deadly(self, plan: StepPlan) -> bool:
        deadly = self._deadly_rows(plan)
        if not deadly:
            return False
        batch = zip(plan.rows.tolist(), plan.num_computed_tokens.tolist(), plan.num_new_tokens.tolist(), strict=True)
        for row, num_computed, num_new in batch:
            state = self.device.rows.get(row)
            start = len(state.tokens) - num_new if state is not None and state.has_drafted else num_computed
            if row in deadly and start <= deadly[row] < start + num_new:
                return True
        return False

    def _deadly_rows(self, plan: StepPlan) -> dict[int, int]:
        """Rows, and the position of the token at which the worker dies."""
        return {row: count - 1 for row, (count, *_) in self._marked(plan, self.deadly).items()}

    def _die(self) -> dict[ClientId, ClientEvents]:
        self.num_deaths += 1
        self.deaths.append((len(self.results), [told.need for told in self.told]))
        return self.crash()

    def _is_refused(self, plan: StepPlan) -> bool:
        poisoned = self._marked(plan, self.poisoned).values()
        return None in self.results or any(num_tokens >= limit for limit, _, num_tokens in poisoned)

    def _refuse(self) -> dict[ClientId, ClientEvents]:
        self.num_refusals += 1
        events = self.scheduler.refuse_in_flight("row 0 is poisoned")
        self._note_failures(events)
        self._forget_worker()
        self.scheduler.judge_loss(was_alive=True)
        return events

    def _note_failures(self, events: dict[ClientId, ClientEvents]) -> None:
        self.failed.update(each.key.handle for each in events.get(CLIENT, ClientEvents()).failed)

    def check(self) -> None:
        invariants.check(self.scheduler)

    def _record(self, events: dict[ClientId, ClientEvents]) -> None:
        # Handles of pins differ from handles of requests.
        for batch in (batch for client, batch in events.items() if client != PIN_CLIENT):
            self._record_batch(batch)

    def _record_batch(self, batch: ClientEvents) -> None:
        columns = zip(batch.handles, batch.sequence_indices, batch.offsets, batch.token_ids, strict=True)
        for handle, index, offset, token_id in columns:
            assert offset == len(self.samples[handle, index]), "an event was lost or repeated"
            self.samples[handle, index].append(token_id)
        for end in batch.finished:
            tokens = self.samples[end.handle, end.sequence_index]
            assert end.num_tokens == len(tokens)
            assert end.stop_token_id == (tokens[-1] if end.reason is FinishReason.STOP else None)
        self.failed.update(failure.key.handle for failure in batch.failed)
        self.finished.update(end.handle for end in batch.completed)
        self.usage.update((end.handle, end.usage) for end in batch.completed)
