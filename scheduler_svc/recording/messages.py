"""Conversions between the inputs of the core and the messages of a recording.

Token ids are hidden unless they are to be recorded. A hidden id is a function of a token and its position. So prompts
that share a prefix still do, and the core plans as it did. A hidden id is at least 2**30, so it is never the id of a
token that ends a sequence.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import fields
from hashlib import blake2b

import numpy as np

from quire.messages.arrays import encode_int32
from quire.messages.logprob_columns import LogprobColumns
from quire.messages.prefix_hashes import HASH_BYTES, BlockHash, hash_chain, hashes_of, pack
from quire.scheduler.v1 import recording_pb2
from scheduler_svc.core.beam_search import BeamParameters, Candidates, EarlyStopping
from scheduler_svc.core.config import PolicyKind, PreemptionMode, SchedulerConfig
from scheduler_svc.core.moves import KvSource
from scheduler_svc.core.paging.batch import Array
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.request import Adapter, ClientId, EmittedSequence, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.step import SampleLogprobs, StepInFlight, StepPlan, StepResult

Header = recording_pb2.RecordingHeader
Operation = recording_pb2.RecordedOperation

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
    return SchedulerConfig(**values)


def submit_message(request: Request, now: float, hider: TokenHider | None) -> Operation:
    """Without parameters and seeds, which the core carries and never reads."""
    start = len(request.prompt)
    submit = recording_pb2.RecordedSubmit(
        client=request.key.client,
        handle=request.key.handle,
        request_id=request.request_id,
        prompt=encode_int32(hidden(hider, request.prompt)),
        max_tokens=request.max_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        emitted=[
            recording_pb2.RecordedEmitted(
                token_ids=encode_int32(hidden(hider, each.token_ids, start)), has_ended=each.has_ended
            )
            for each in request.emitted
        ],
        tenant=request.tenant,
        num_sequences=request.num_sequences,
        num_returned=request.num_returned,
        priority=request.priority,
        accepted_before=request.accepted_before,
        logprobs=request.sampling.logprobs,
        prompt_logprobs=request.sampling.prompt_logprobs,
        prompt_logprobs_start=request.sampling.prompt_logprobs_start,
        has_constraint=request.has_constraint,
        adapter_digest=_digest_of(request.adapter),
        cache_salt=request.cache_salt,
        has_kv_source=request.source is not None,
        is_offer=request.is_offer,
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
        key=RequestKey(ClientId(submit.client), Handle(submit.handle)),
        request_id=submit.request_id,
        prompt=tokens_of(submit.prompt),
        sampling=RowSampling(
            seed=0,
            parameters=submit.parameters_digest,
            logprobs=submit.logprobs if submit.HasField("logprobs") else None,
            prompt_logprobs=submit.prompt_logprobs if submit.HasField("prompt_logprobs") else None,
            prompt_logprobs_start=submit.prompt_logprobs_start,
        ),
        max_tokens=submit.max_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        emitted=[EmittedSequence(tokens_of(each.token_ids), each.has_ended) for each in submit.emitted],
        tenant=submit.tenant,
        num_sequences=submit.num_sequences,
        num_returned=submit.num_returned,
        priority=submit.priority,
        beam=beams and BeamParameters(beams.width, beams.length_penalty, EarlyStopping[beams.early_stopping]),
        accepted_before=submit.accepted_before,
        has_constraint=submit.has_constraint,
        adapter=adapter_of(submit.adapter_digest),
        cache_salt=submit.cache_salt,
        source=KvSource() if submit.has_kv_source else None,
        is_offer=submit.is_offer,
        replaces=Handle(submit.replaced_handle) if submit.HasField("replaced_handle") else None,
    )


def _digest_of(adapter: Adapter | None) -> bytes | None:
    return None if adapter is None else adapter.digest


def adapter_of(digest: bytes) -> Adapter | None:
    return Adapter(digest) if digest else None


def tokens_of(packed: bytes) -> list[int]:
    return np.frombuffer(packed, "<i4").tolist()


CALLS: Mapping[str, Callable[..., Operation]] = {
    "abort": lambda key: Operation(abort=recording_pb2.RecordedAbort(client=key.client, handle=key.handle)),
    "abort_sequence": lambda key, index: Operation(
        abort_sequence=recording_pb2.RecordedAbort(client=key.client, handle=key.handle, sequence_index=index)
    ),
    "expire_pins": lambda now: Operation(now=now, expire_pins=recording_pb2.RecordedExpirePins()),
    "forget_cached": lambda: Operation(forget_cached=recording_pb2.RecordedForgetCached()),
    "move_away": lambda key, lease, now, lease_s: Operation(
        now=now,
        hand_over=recording_pb2.RecordedHandOver(
            client=key.client, handle=key.handle, lease=lease, lease_seconds=lease_s
        ),
    ),
    "hold_new": lambda now, seconds: Operation(now=now, hold_new=recording_pb2.RecordedHold(seconds=seconds)),
    "renew_lease": lambda lease, now, lease_s: Operation(
        now=now, renew_lease=recording_pb2.RecordedLease(lease=lease, lease_seconds=lease_s)
    ),
    "prepared": lambda number, failure=None, failed=frozenset(): Operation(
        prepared=recording_pb2.RecordedPrepared(
            number=number, failure=failure, failed_blocks=encode_int32(sorted(failed)) if failed else b""
        )
    ),
    # The seconds decide nothing.
    "end_late_preparation": lambda number, seconds: Operation(
        give_up_preparation=recording_pb2.RecordedPrepared(number=number)
    ),
    "refuse_in_flight": lambda detail: Operation(refuse_in_flight=recording_pb2.RecordedLoss(detail=detail)),
    "lose_in_flight": lambda detail=None: Operation(lose_in_flight=recording_pb2.RecordedLoss(detail=detail)),
    "judge_loss": lambda *, was_alive: Operation(judge_loss=recording_pb2.RecordedLoss(was_alive=was_alive)),
    "void_in_flight": lambda now: Operation(now=now, void_in_flight=recording_pb2.RecordedLoss()),
}
"""Calls of a core whose arguments are recorded as they are, with the message of these arguments."""


def pin_message(
    tenant: str,
    token_ids: SequenceOf[int],
    now: float,
    time_to_live: float,
    adapter: Adapter | None,
    hider: TokenHider | None,
) -> Operation:
    pin = recording_pb2.RecordedPin(
        tenant=tenant,
        token_ids=encode_int32(hidden(hider, token_ids)),
        time_to_live_seconds=time_to_live,
        adapter_digest=_digest_of(adapter),
    )
    return Operation(now=now, pin=pin)


def unpin_message(handle: Handle) -> Operation:
    return Operation(unpin=recording_pb2.RecordedUnpin(handle=handle))


def take_over_message(now: float) -> Operation:
    return Operation(now=now, take_over=recording_pb2.RecordedTakeOver())


def take_preparations_message() -> Operation:
    return Operation(take_preparations=recording_pb2.RecordedTakePreparations())


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
        num_copied=len(plan.copies),
        digest=_digest(plan),
    )
    return Operation(now=now, schedule=recording_pb2.RecordedSchedule(plan=summary))


def _digest(plan: StepPlan) -> bytes:
    """A digest of the parts of a plan that do not depend on token ids, seeds and sampling parameters."""
    parts: list[Array] = [
        plan.swap_out, plan.swap_in, plan.copies, plan.release, plan.forks, plan.set_tokens[:, :2],
        plan.block_table_deltas, plan.rows, plan.num_new_tokens, plan.num_computed_tokens, plan.samples,
    ]  # fmt: skip
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        # Includes the length, so that entries cannot move from the end of one part to the start of the next.
        digest.update(len(part).to_bytes(4, "little") + np.ascontiguousarray(part, "<i8").tobytes())
    for each in plan.assign:
        digest.update(np.array([each.row, len(each.token_ids), each.num_prompt_tokens, *each.block_table]).tobytes())
        if each.adapter_slot is not None:
            digest.update(each.adapter_slot.to_bytes(4, "little"))
    if plan.max_drafts is not None:
        digest.update(np.ascontiguousarray([plan.max_passes, *plan.max_drafts.tolist()], "<i8").tobytes())
    digest.update(np.array([row for row, _ in plan.reseed] + [block for block, _ in plan.sealed], "<i8").tobytes())
    return digest.digest()


def token_rows(step: StepInFlight, result: StepResult) -> Array | None:
    """The row of each token of a result; None for the result of another step, which is refused."""
    counts = np.ones_like(step.rows) if result.num_tokens is None else result.num_tokens
    fits = counts.shape == step.rows.shape and (counts > 0).all() and result.token_ids.shape == (counts.sum(),)
    return step.rows.repeat(counts) if fits else None


def apply_message(
    step: StepInFlight | None,
    known: Array,
    result: StepResult,
    now: float,
    hider: TokenHider | None,
    stops: Mapping[int, frozenset[int]],
) -> Operation:
    """A result as the core reads it: without the most likely tokens of log probabilities.

    Args:
        step: The oldest step in flight, if there was one.
        known: The number of known tokens of its rows before.
        result: The workers' answer, whether it belongs to the step or not.
        now: Seconds.
        hider: None records the token ids unchanged.
        stops: The tokens that end the sequence of a row, of all rows whose result may hold one.
    """
    hide = _ResultHider(step, known, result, hider, stops)
    apply = recording_pb2.RecordedApply(
        step_id=result.step_id,
        token_ids=encode_int32(hide.samples()),
        failures=[
            recording_pb2.RecordedFailure(row=row, message=message, is_refused=row in result.refused)
            for row, message in result.failures.items()
        ],
        candidates=[
            recording_pb2.RecordedCandidates(
                row=row,
                token_ids=encode_int32(hide.candidates(row, each.token_ids)),
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


class _ResultHider:
    """Hides the tokens of a step's result, except tokens that end their sequence."""

    def __init__(
        self,
        step: StepInFlight | None,
        known: Array,
        result: StepResult,
        hider: TokenHider | None,
        stops: Mapping[int, frozenset[int]],
    ) -> None:
        self._rows, self._positions = np.zeros(0) if step is None else step.rows, known
        self._token_rows = None if step is None else token_rows(step, result)
        self._result = result
        self._hider = hider
        self._stops = stops

    def samples(self) -> Array:
        token_ids, rows = self._result.token_ids, self._token_rows
        if self._hider is None or rows is None:
            return token_ids if self._hider is None else np.zeros_like(token_ids)
        positions = self._positions
        if (counts := self._result.num_tokens) is not None:
            behind = np.arange(len(rows)) - (np.cumsum(counts) - counts).repeat(counts)
            positions = positions.repeat(counts) + behind
        tokens = self._hider.hide(token_ids, positions)
        for token in np.flatnonzero(np.isin(rows, list(self._stops))).tolist():
            if int(token_ids[token]) in self._stops[int(rows[token])]:
                tokens[token] = token_ids[token]
        return tokens

    def candidates(self, row: int, token_ids: SequenceOf[int]) -> Array:
        tokens = np.asarray(token_ids, np.int64)
        if self._hider is None:
            return tokens
        position = self._positions[self._rows == row].sum()
        stops = np.isin(tokens, list(self._stops.get(row, ())))
        return np.where(stops, tokens, self._hider.hide(tokens, np.full(len(tokens), position)))


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


def sealed_message(sealed: SequenceOf[tuple[BlockId, BlockHash]], hider: TokenHider | None) -> Operation:
    blocks = [block for block, _ in sealed]
    hashes = [content if hider is None else hider.name_of(content) for _, content in sealed]
    return Operation(restore_sealed=recording_pb2.RecordedSealed(blocks=encode_int32(blocks), hashes=b"".join(hashes)))


def tier_message(slots: SequenceOf[int], hashes: SequenceOf[BlockHash], hider: TokenHider | None) -> Operation:
    names = [content if hider is None else hider.name_of(content) for content in hashes]
    return Operation(tier_changed=recording_pb2.RecordedTier(slots=encode_int32(slots), hashes=b"".join(names)))


def sealed_of(message: recording_pb2.RecordedSealed) -> list[tuple[BlockId, BlockHash]]:
    blocks = map(BlockId, tokens_of(message.blocks))
    return list(zip(blocks, hashes_of(message.hashes), strict=True))


class HiddenHashes:
    """The hashes of some consecutive blocks of a sequence as the recording has them, of hidden tokens: each is
    computed once, on first use. They follow those `before`, or are the sequence's first."""

    def __init__(self, root: BlockHash, block_size: int, before: "HiddenHashes | None", token_ids: list[int]) -> None:
        self._root = root
        self._block_size = block_size
        self._before = before
        self._first = 0 if before is None else before.end
        self._token_ids = token_ids
        self._hashes: list[BlockHash] = []
        self.end = self._first + len(token_ids) // block_size
        """The blocks of the sequence up to the last one of these."""

    def of(self, index: int, hider: TokenHider) -> BlockHash:
        """The hash of the sequence's block with this index, which is not behind `end`."""
        part = self
        while index < part._first:
            assert part._before is not None
            part = part._before
        return part._all(hider)[index - part._first]

    def _all(self, hider: TokenHider) -> list[BlockHash]:
        if not self._hashes:
            parent = self._root if self._before is None else self._before._all(hider)[-1]
            tokens = hidden(hider, self._token_ids, self._first * self._block_size)
            self._hashes = hash_chain(parent, pack(tokens.tolist()), 4 * self._block_size)
            self._token_ids = []
        return self._hashes


def rename_message(content: BlockHash, hashes: HiddenHashes, index: int, hider: TokenHider) -> Operation:
    """The block that was restored as `content` is the one with this index of a sequence."""
    return Operation(rename=recording_pb2.RecordedRename(name=hider.name_of(content), hash=hashes.of(index, hider)))
