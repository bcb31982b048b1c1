"""Conversions between the inputs of the core and the messages of a recording.

Token ids are hidden unless they are to be recorded. A hidden id is a function of a token and its position. So prompts
that share a prefix still do, and the core plans as it did. A hidden id is at least 2**30, so it is never the id of a
token that ends a sequence.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from quire.messages.arrays import encode_int32
from quire.messages.logprob_columns import LogprobColumns
from quire.messages.prefix_hashes import HASH_BYTES, BlockHash, PrefixHash, hash_chain, hashes_of, pack
from quire.scheduler.v1 import recording_pb2
from scheduler_svc.core.beam_search import BeamParameters, Candidates, EarlyStopping
from scheduler_svc.core.config import PolicyKind, PreemptionMode, SchedulerConfig
from scheduler_svc.core.moves import KvSource
from scheduler_svc.core.paging.batch import Array
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.request import Adapter, ClientId, EmittedSequence, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import SampleLogprobs, StepPlan, StepResult

Header = recording_pb2.RecordingHeader
Operation = recording_pb2.RecordedOperation

_SAME_NAMED = (
    "request_id", "max_tokens", "tenant", "num_sequences", "num_returned", "priority", "accepted_before",
    "has_constraint", "cache_salt", "is_offer",
)  # fmt: skip
"""The values of a request that its message has under the same name."""

_DIGEST_BYTES = 8
_FIRST_HIDDEN = 1 << 30
_FACTORS = tuple(np.uint64(factor) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93))


class TokenHider:
    """Replaces token ids by hidden ones. No encryption: readers of the file see which tokens repeat, and where."""

    KEY_BYTES = 24

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._keys = np.frombuffer(key, "<u8")

    def hide(self, token_ids: SequenceOf[int] | Array, positions: Array) -> Array:
        """The hidden ids of n tokens at these positions, int64[n]."""
        mixed = np.asarray(token_ids, np.int64).astype(np.uint64) | positions.astype(np.uint64) << np.uint64(32)
        for key, factor in zip(self._keys, _FACTORS, strict=True):
            mixed = (mixed ^ key) * factor
            mixed ^= mixed >> np.uint64(32)
        return (mixed >> np.uint64(34)).astype(np.int64) | _FIRST_HIDDEN

    def hide_result(
        self, result: StepResult, rows: Array, known: Array, sequences: SequenceOf[Sequence | None]
    ) -> StepResult:
        """The workers' answer with hidden tokens, except tokens that end their sequence.

        Args:
            result: The answer, whether it belongs to the oldest step in flight or not.
            rows: The rows that sample in that step, int64[n]; none if no step is in flight.
            known: The number of known tokens of these rows before, int64[n].
            sequences: The sequences in these rows.
        """
        in_rows = zip(rows.tolist(), sequences, strict=True)
        stops = {row: each.stop_token_ids for row, each in in_rows if each is not None}
        candidates: dict[int, Candidates] = {}
        for row, each in result.candidates.items():
            positions = np.full(len(each.token_ids), known[rows == row].sum())
            tokens = np.asarray(each.token_ids, np.int64)
            is_stop = np.isin(tokens, list(stops.get(row, ())))
            hidden_ids = np.where(is_stop, tokens, self.hide(tokens, positions)).tolist()
            candidates[row] = replace(each, token_ids=hidden_ids)
        counts = np.ones_like(rows) if result.num_tokens is None else result.num_tokens
        fits = counts.shape == rows.shape and (counts > 0).all() and result.token_ids.shape == (counts.sum(),)
        if not fits:
            # The result of another step, which is refused.
            return replace(result, token_ids=np.zeros_like(result.token_ids), candidates=candidates)
        token_rows = rows.repeat(counts)
        behind = np.arange(len(token_rows)) - (np.cumsum(counts) - counts).repeat(counts)
        token_ids = self.hide(result.token_ids, known.repeat(counts) + behind)
        all_stops = frozenset[int]().union(*set(stops.values()))
        for index in np.flatnonzero(np.isin(result.token_ids, list(all_stops))).tolist():
            if int(result.token_ids[index]) in stops.get(int(token_rows[index]), ()):
                token_ids[index] = result.token_ids[index]
        return replace(result, token_ids=token_ids, candidates=candidates)

    def name_of(self, content: BlockHash) -> BlockHash:
        """A name for a block whose tokens the core does not know yet."""
        return BlockHash(blake2b(content, key=self.key, digest_size=HASH_BYTES).digest())


def hidden(hider: TokenHider | None, token_ids: SequenceOf[int] | Array, start: int = 0) -> Array:
    """Consecutive tokens from the position `start`, int64[n]; unchanged without a hider."""
    values = np.asarray(token_ids, np.int64)
    return values if hider is None else hider.hide(values, np.arange(start, start + len(values)))


def start_message(config: SchedulerConfig) -> Operation:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values |= {"policy": config.policy.value, "preemption_mode": config.preemption_mode.value}
    return Operation(start=recording_pb2.RecordedStart(**values))


def config_of(start: recording_pb2.RecordedStart) -> SchedulerConfig:
    values = {field.name: getattr(start, field.name) for field in fields(SchedulerConfig)}
    values |= {"policy": PolicyKind(start.policy), "preemption_mode": PreemptionMode(start.preemption_mode)}
    # 0 in recordings of earlier releases.
    values["max_passes"] = max(start.max_passes, 1)
    values["max_mixed_prefill_tokens"] = start.max_mixed_prefill_tokens or None
    values["full_groups"] = start.full_groups if start.windowed_groups else max(start.full_groups, 1)
    return SchedulerConfig(**values)


def submit_message(request: Request, now: float, hider: TokenHider | None) -> Operation:
    """Without parameters and seeds, which the core carries and never reads."""
    start = len(request.prompt)
    submit = recording_pb2.RecordedSubmit(
        **{name: getattr(request, name) for name in _SAME_NAMED},
        client=request.key.client,
        handle=request.key.handle,
        prompt=encode_int32(hidden(hider, request.prompt)),
        stop_token_ids=sorted(request.stop_token_ids),
        emitted=[
            recording_pb2.RecordedEmitted(
                token_ids=encode_int32(hidden(hider, each.token_ids, start)), has_ended=each.has_ended
            )
            for each in request.emitted
        ],
        logprobs=request.sampling.logprobs,
        prompt_logprobs=request.sampling.prompt_logprobs,
        prompt_logprobs_start=request.sampling.prompt_logprobs_start,
        adapter_digest=digest_of(request.adapter),
        has_kv_source=request.source is not None,
        replaced_handle=request.replaces,
    )
    if request.has_constraint:
        key = b"" if hider is None else hider.key
        submit.parameters_digest = blake2b(request.sampling.parameters, key=key, digest_size=HASH_BYTES).digest()
    if request.beam is not None:
        submit.beams.width = request.beam.width
        submit.beams.length_penalty = request.beam.length_penalty
        submit.beams.early_stopping = request.beam.early_stopping.name
    return Operation(now=now, submit=submit)


def request_of(submit: recording_pb2.RecordedSubmit) -> Request:
    beams = submit.beams if submit.HasField("beams") else None
    return Request(
        **{name: getattr(submit, name) for name in _SAME_NAMED},
        key=RequestKey(ClientId(submit.client), Handle(submit.handle)),
        prompt=tokens_of(submit.prompt),
        sampling=RowSampling(
            seed=0,
            parameters=submit.parameters_digest,
            logprobs=submit.logprobs if submit.HasField("logprobs") else None,
            prompt_logprobs=submit.prompt_logprobs if submit.HasField("prompt_logprobs") else None,
            prompt_logprobs_start=submit.prompt_logprobs_start,
        ),
        stop_token_ids=frozenset(submit.stop_token_ids),
        emitted=[EmittedSequence(tokens_of(each.token_ids), each.has_ended) for each in submit.emitted],
        beam=None
        if beams is None
        else BeamParameters(beams.width, beams.length_penalty, EarlyStopping[beams.early_stopping]),
        adapter=adapter_of(submit.adapter_digest),
        source=KvSource() if submit.has_kv_source else None,
        replaces=Handle(submit.replaced_handle) if submit.HasField("replaced_handle") else None,
    )


def digest_of(adapter: Adapter | None) -> bytes | None:
    return None if adapter is None else adapter.digest


def adapter_of(digest: bytes) -> Adapter | None:
    return Adapter(digest) if digest else None


def tokens_of(packed: bytes) -> list[int]:
    return np.frombuffer(packed, "<i4").tolist()


def call_message(name: str, /, now: float = 0.0, **values: object) -> Operation:
    """A call of the core by its name, with these values of the call's message; None leaves one out."""
    operation = Operation(now=now)
    message = getattr(operation, name)
    message.SetInParent()
    for field, value in values.items():
        if value is not None:
            setattr(message, field, value)
    return operation


CALLS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "abort": lambda key: {"client": key.client, "handle": key.handle},
    "abort_sequence": lambda key, index: {"client": key.client, "handle": key.handle, "sequence_index": index},
    "expire_pins": lambda now: {"now": now},
    "forget_cached": dict,
    "move_away": lambda key, lease, now, lease_s: {
        "client": key.client, "handle": key.handle, "lease": lease, "now": now, "lease_seconds": lease_s
    },
    "hold_new": lambda now, seconds: {"now": now, "seconds": seconds},
    "renew_lease": lambda lease, now, lease_s: {"lease": lease, "now": now, "lease_seconds": lease_s},
    "prepared": lambda number, failure=None, failed=(): {
        "number": number, "failure": failure, "failed_blocks": encode_int32(sorted(failed))
    },
    # The seconds decide nothing.
    "end_late_preparation": lambda number, seconds: {"number": number},
    "refuse_in_flight": lambda detail: {"detail": detail},
    "lose_in_flight": lambda detail=None: {"detail": detail},
    "judge_loss": lambda *, was_alive: {"was_alive": was_alive},
    "void_in_flight": lambda now: {"now": now},
}  # fmt: skip
"""Calls of a core whose arguments are recorded as they are: the values of their message, and the time."""

MESSAGE_OF_CALL = {"move_away": "hand_over", "end_late_preparation": "give_up_preparation"}
"""The message of a call that has another name."""


def plan_message(plan: StepPlan | None, now: float) -> Operation:
    if plan is None:
        return Operation(now=now, schedule=recording_pb2.RecordedSchedule())
    summary = recording_pb2.RecordedPlan(
        step_id=plan.step_id,
        num_rows=len(plan.rows),
        num_tokens=plan.num_tokens,
        num_samples=len(plan.samples),
        num_assigned=len(plan.assign),
        num_released=len(plan.release),
        num_swapped_out=len(plan.swap_out),
        num_swapped_in=len(plan.swap_in),
        num_copied=len(plan.copy),
        digest=_digest(plan),
    )
    return Operation(now=now, schedule=recording_pb2.RecordedSchedule(plan=summary))


def _digest(plan: StepPlan) -> bytes:
    """A digest of the parts of a plan that do not depend on token ids, seeds and sampling parameters."""
    parts: list[Array] = [
        plan.swap_out, plan.swap_in, plan.copy, plan.release, plan.fork, plan.set_tokens[:, :2],
        plan.block_table_deltas, plan.rows, plan.num_new_tokens, plan.num_computed_tokens, plan.samples,
    ]  # fmt: skip
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        # Includes the length, so that entries cannot move from the end of one part to the start of the next.
        digest.update(len(part).to_bytes(4, "little") + np.ascontiguousarray(part, "<i8").tobytes())
    for each in plan.assign:
        counts = each.row, len(each.token_ids), each.num_prompt_tokens
        digest.update(np.array([*counts, *each.block_table, *each.state_blocks]).tobytes())
        if each.adapter_slot is not None:
            digest.update(each.adapter_slot.to_bytes(4, "little"))
    if plan.max_drafts is not None:
        digest.update(np.ascontiguousarray([plan.max_passes, *plan.max_drafts.tolist()], "<i8").tobytes())
    digest.update(np.array([row for row, _ in plan.reseed] + [block for block, _ in plan.sealed], "<i8").tobytes())
    digest.update(np.array(plan.short_lived, "<i8").tobytes())
    for line in (
        *((row, *blocks) for row, blocks in plan.state_tables),
        *((*each[:2], *each[2]) for each in plan.checkpoints),
    ):
        digest.update(np.array(line, "<i8").tobytes())
    return digest.digest()


def apply_message(result: StepResult, now: float) -> Operation:
    """A result as the core reads it: without the most likely tokens of log probabilities."""
    apply = recording_pb2.RecordedApply(
        step_id=result.step_id,
        token_ids=encode_int32(result.token_ids),
        failures=[
            recording_pb2.RecordedFailure(row=row, message=message, is_refused=row in result.refused)
            for row, message in result.failures.items()
        ],
        candidates=[
            recording_pb2.RecordedCandidates(
                row=row,
                token_ids=encode_int32(each.token_ids),
                logprobs=np.asarray(each.logprobs, "<f8").tobytes(),
            )
            for row, each in result.candidates.items()
        ],
        non_finite_chunks=sorted(result.non_finite_chunks),
    )
    if result.logprobs is not None:
        apply.logprob_samples = encode_int32(result.logprobs.samples)
        apply.logprobs = result.logprobs.columns.chosen_logprobs.astype("<f4").tobytes()
    if result.num_tokens is not None and result.num_drafts is not None:
        apply.num_tokens, apply.num_drafts = encode_int32(result.num_tokens), encode_int32(result.num_drafts)
        apply.num_passes = result.num_passes
    return Operation(now=now, apply=apply)


def result_of(apply: recording_pb2.RecordedApply) -> StepResult:
    """The result as the core reads it; each log probability is without the most likely tokens."""
    samples = np.frombuffer(apply.logprob_samples, "<i4").astype(np.int64)
    zeros, nothing = np.zeros(len(samples), np.int32), np.zeros(0)
    columns = LogprobColumns(
        np.frombuffer(apply.logprobs, "<f4"), zeros, zeros, nothing.astype(np.int32), nothing.astype(np.float32)
    )
    return StepResult(
        apply.step_id,
        np.frombuffer(apply.token_ids, "<i4").astype(np.int64),
        SampleLogprobs(samples, columns) if len(samples) else None,
        {each.row: each.message for each in apply.failures},
        {
            each.row: Candidates(tokens_of(each.token_ids), np.frombuffer(each.logprobs, "<f8").tolist())
            for each in apply.candidates
        },
        frozenset(apply.non_finite_chunks),
        frozenset(each.row for each in apply.failures if each.is_refused),
        np.frombuffer(apply.num_tokens, "<i4").astype(np.int64) if apply.num_tokens else None,
        np.frombuffer(apply.num_drafts, "<i4").astype(np.int64) if apply.num_tokens else None,
        apply.num_passes or 1,
    )


def sealed_of(message: recording_pb2.RecordedSealed) -> list[tuple[BlockId, BlockHash]]:
    blocks = map(BlockId, tokens_of(message.blocks))
    return list(zip(blocks, hashes_of(message.hashes), strict=True))


class HiddenHashes:
    """The hashes of some consecutive blocks of a sequence as the recording has them, of hidden tokens: each is
    computed once, on first use. They follow those `before`, or are the sequence's first."""

    def __init__(self, root: PrefixHash, block_size: int, before: "HiddenHashes | None", token_ids: list[int]) -> None:
        self._root = root
        self._block_size = block_size
        self._before = before
        self._first = 0 if before is None else before.end
        self._token_ids = token_ids
        self._hashes: list[PrefixHash] = []
        self.end = self._first + len(token_ids) // block_size
        """The blocks of the sequence up to the last one of these."""

    def of(self, index: int, hider: TokenHider) -> PrefixHash:
        """The hash of the sequence's block with this index, which is not behind `end`."""
        part = self
        while index < part._first:
            assert part._before is not None
            part = part._before
        return part._all(hider)[index - part._first]

    def _all(self, hider: TokenHider) -> list[PrefixHash]:
        if not self._hashes:
            parent = self._root if self._before is None else self._before._all(hider)[-1]
            tokens = hidden(hider, self._token_ids, self._first * self._block_size)
            self._hashes = hash_chain(parent, pack(tokens.tolist()), 4 * self._block_size)
            self._token_ids = []
        return self._hashes
