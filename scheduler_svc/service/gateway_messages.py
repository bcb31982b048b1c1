"""Conversions between the messages of gateways and the values of the core. Arrays are checked before any use."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import chain
from typing import NamedTuple

from google.rpc import code_pb2

from quire.common.v1 import common_pb2
from quire.messages.arrays import decode_int32, encode_int32, encode_logprobs
from quire.messages.logprob_columns import LogprobLog
from quire.messages.prefix_hashes import SALT_BYTES, BlockHash
from quire.model_files.adapter_files import DIGEST_BYTES
from quire.model_files.progress import LoadProgress
from quire.rpc.errors import InvalidArgument, QuireError, invalid_field
from quire.scheduler.v1 import scheduler_pb2
from quire.service import compatibility
from quire.tracing import TraceContext
from scheduler_svc.core.beam_search import BeamParameters, EarlyStopping
from scheduler_svc.core.moves import KvSource, Lease
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.block_tables import BlockTableLayout
from scheduler_svc.core.paging.sequence import SequenceStatus
from scheduler_svc.core.request import Adapter, EmittedSequence, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import RequestFailure, SequenceEnd, Usage
from scheduler_svc.service.lifecycle import Lifecycle
from scheduler_svc.service.outbox import Outgoing
from scheduler_svc.service.replica import MODEL_CHANGED, Replica
from scheduler_svc.service.requests import GATEWAYS, AlreadyTakenOver
from scheduler_svc.service.watch_messages import add_pools, add_queues
from scheduler_svc.service.worker_messages import source_message

_MAX_HANDLE = 2**31 - 1
_MAX_UINT32 = 2**32 - 1
_BLOCKS_AT_ONCE = 1024
"""The number of blocks that are converted before the event loop gets a turn: about a millisecond."""

_FAILURE_CODES = {
    MODEL_CHANGED: code_pb2.UNAVAILABLE,
    "INVALID_SAMPLING": code_pb2.INVALID_ARGUMENT,
    "ADAPTER_NOT_LOADED": code_pb2.FAILED_PRECONDITION,
}
"""Statuses of failures that are not INTERNAL: after a change of the model a retry succeeds; invalid sampling is the
caller's fault; and an adapter's files may be gone or changed."""

_EARLY_STOPPING = {
    common_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.FALSE,
    common_pb2.EARLY_STOPPING_FALSE: EarlyStopping.FALSE,
    common_pb2.EARLY_STOPPING_TRUE: EarlyStopping.TRUE,
    common_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


# From gateways


def handle_from(handle: int) -> Handle:
    """Raises InvalidArgument for a handle that events, which carry handles as int32, could not name."""
    if handle > _MAX_HANDLE:
        raise invalid_field("handle", f"is {handle}; it must be at most {_MAX_HANDLE}")
    return Handle(handle)


def request_from_submit(
    submit: scheduler_pb2.Submit, *, vocab_size: int, max_num_seqs: int, kv_source: KvSource | None = None
) -> Request:
    """A gateway's submission, under the gateway's own handle. Another replica's blocks are used only if they have the
    format of ours, `kv_source`. Raises InvalidArgument."""
    output = submit.output
    num_returned = submit.sampling.n or 1
    beam = _beam_from(submit.sampling)
    num_sequences = submit.sampling.best_of or (num_returned if beam is None else beam.width)
    if num_sequences > max_num_seqs:
        # Checked before anything of that size is made.
        raise InvalidArgument(
            f"the request has {num_sequences} sequences; at most {max_num_seqs} run at once", reason="NEVER_FITS"
        )
    prompt = decode_int32(submit.prompt_token_ids, "prompt_token_ids", minimum=0, below=vocab_size)
    return Request(
        key=RequestKey(GATEWAYS, handle_from(submit.handle)),
        request_id=submit.request_id,
        prompt=prompt.tolist(),
        sampling=RowSampling(
            seed=submit.sampling.seed,
            parameters=submit.row_sampling,
            logprobs=output.logprobs if output.HasField("logprobs") else None,
            prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
            prompt_logprobs_start=output.prompt_logprobs_start or 1,
        ),
        max_tokens=submit.stopping.max_tokens,
        stop_token_ids=frozenset((*submit.stopping.stop_token_ids, *submit.eos_token_ids)),
        emitted=_emitted_from(submit, num_sequences, vocab_size),
        tenant=submit.tenant,
        num_sequences=num_sequences,
        num_returned=num_returned,
        priority=submit.priority,
        beam=beam,
        accepted_before=submit.resubmitted,
        has_constraint=submit.has_constraint,
        adapter=adapter_from(submit.adapter) if submit.HasField("adapter") else None,
        cache_salt=_salt_from(submit),
        source=_source_from(submit.kv_source, kv_source or KvSource()),
        is_offer=submit.offer,
    )


def _salt_from(submit: scheduler_pb2.Submit) -> bytes:
    if len(submit.cache_salt) not in (0, SALT_BYTES):
        raise invalid_field("cache_salt", f"has {len(submit.cache_salt)} bytes; it must have {SALT_BYTES}")
    return submit.cache_salt


def _source_from(source: common_pb2.KvSource, ours: KvSource) -> KvSource | None:
    """The source of a request's blocks; None if there is none, or if our workers could not use the blocks. An address
    equal to one of ours, such as a socket in another container, would lead back to our own workers."""
    is_like_ours = source.kv_namespace == ours.kv_namespace and len(source.endpoints) == len(ours.endpoints)
    is_elsewhere = set(source.endpoints).isdisjoint(ours.endpoints)
    if not (source.kv_namespace and source.lease and is_like_ours and is_elsewhere):
        return None
    return KvSource(source.kv_namespace, tuple(source.endpoints), Lease(source.lease))


def adapter_from(message: scheduler_pb2.Adapter) -> Adapter:
    """An adapter from its message. Raises InvalidArgument."""
    if len(message.digest) != DIGEST_BYTES:
        raise invalid_field("adapter.digest", f"has {len(message.digest)} bytes; it must have {DIGEST_BYTES}")
    return Adapter(message.digest, message.directory, message.name)


def _beam_from(sampling: common_pb2.SamplingParameters) -> BeamParameters | None:
    """The parameters of a beam search; None if it is none. Raises InvalidArgument."""
    if not sampling.HasField("beam_search"):
        return None
    beam = sampling.beam_search
    length_penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
    try:
        return BeamParameters(beam.beam_width, length_penalty, _EARLY_STOPPING[beam.early_stopping])
    except ValueError as error:
        raise InvalidArgument(f"sampling.beam_search: {error}") from error
    except KeyError as error:
        raise InvalidArgument(f"sampling.beam_search.early_stopping is {beam.early_stopping}") from error


def _emitted_from(submit: scheduler_pb2.Submit, num_sequences: int, vocab_size: int) -> list[EmittedSequence]:
    if not submit.emitted:
        return []
    sequences = [EmittedSequence(())] * num_sequences
    for each in submit.emitted:
        if each.sequence_index >= num_sequences:
            raise InvalidArgument(f"emitted names sequence {each.sequence_index}; the request has {num_sequences}")
        token_ids = decode_int32(each.token_ids, "emitted.token_ids", minimum=0, below=vocab_size).tolist()
        sequences[each.sequence_index] = EmittedSequence(token_ids, each.finished)
    return sequences


def trace_context_of(submit: scheduler_pb2.Submit) -> TraceContext | None:
    """The gateway's span of a request; None if it does not trace the request."""
    if not submit.HasField("trace_context"):
        return None
    trace = submit.trace_context
    return TraceContext(trace.traceparent, trace.tracestate if trace.HasField("tracestate") else None)


# To gateways


def welcome_message(replica: Replica, durable_grace_s: float) -> scheduler_pb2.ConnectResponse:
    """The properties of this replica that a gateway needs. Workers were attached before."""
    assert replica.scheduler is not None
    assert replica.info is not None
    config, info = replica.scheduler.config, replica.info
    return scheduler_pb2.ConnectResponse(
        welcome=scheduler_pb2.Welcome(
            scheduler_epoch=replica.epoch,
            vocab_size=info.vocab_size,
            max_model_len=config.max_len,
            block_size=info.block_size,
            num_gpu_blocks=info.num_gpu_blocks,
            num_host_blocks=info.num_host_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            durable_grace_ms=round(durable_grace_s * 1e3),
            architecture=info.architecture,
            dtype=info.dtype,
            max_logprobs=info.max_logprobs,
            protocol=compatibility.SCHEDULER_PROTOCOL.message(),
            model=info.fingerprint.message(),
            device_name=info.device_name,
            max_adapters=info.max_adapters,
            max_drafts=info.max_drafts,
            takes_cache_salts=True,
            role=replica.role.message,
            kv_namespace=replica.kv_source.kv_namespace,
            takes_offers=True,
            block_bytes=replica.block_bytes,
            full_groups=config.full_groups,
            windowed_groups=config.windowed_groups,
            window=config.window,
            state_blocks=config.state_blocks,
            takes_batches=True,
        )
    )


def gateway_messages(outgoing: Outgoing) -> Iterator[scheduler_pb2.ConnectResponse]:
    """The events that are sent together, as at most one message of each kind."""
    if (readiness := outgoing.readiness) is not None:
        loading = None if readiness.loading is None else readiness.loading.message()
        state = scheduler_pb2.ReplicaState(
            ready=readiness.is_ready,
            loading=loading,
            draining=readiness.is_draining,
            # The time of a drain is unbounded.
            leave_after_ms=min(round(readiness.leave_after_s * 1e3), _MAX_UINT32),
            busy=readiness.is_busy,
        )
        yield scheduler_pb2.ConnectResponse(state=state)
    if (cache := outgoing.cache) is not None:
        update = scheduler_pb2.CacheUpdate(
            cleared=cache.is_cleared,
            removed=cache.removed,
            stored=cache.stored,
            sampling_bits=cache.sampling_bits,
            disk_removed=cache.disk_removed,
            disk_stored=cache.disk_stored,
        )
        yield scheduler_pb2.ConnectResponse(cache=update)
    if outgoing.has_events:
        yield events_message(outgoing)


def events_message(outgoing: Outgoing) -> scheduler_pb2.ConnectResponse:
    """The events of one or more steps, oldest first, in one message."""
    batches, response = outgoing.batches, scheduler_pb2.ConnectResponse()
    # Filled in place: a message that is passed to the constructor of another is copied.
    message = response.events
    message.step_id = outgoing.step_id
    message.handles = _column([batch.handles for batch in batches])
    message.sequence_indices = _column([batch.sequence_indices for batch in batches])
    message.offsets = _column([batch.offsets for batch in batches])
    message.token_ids = _column([batch.token_ids for batch in batches])
    for entry in outgoing.prompt_logprobs:
        added = message.prompt_logprobs.add(
            handle=entry.handle, first_position=entry.first_position, token_ids=encode_int32(entry.token_ids)
        )
        encode_logprobs(entry.columns, added)
    with_logprobs: list[int] = []
    logprobs = LogprobLog()
    first = 0
    for batch in batches:
        if batch.with_logprobs:
            with_logprobs += [first + event for event in batch.with_logprobs]
            logprobs.extend(batch.logprobs)
        first += len(batch.token_ids)
        message.finished.extend(map(_sequence_end_message, batch.finished))
        message.completed.extend(_request_end_message(end.handle, end.usage) for end in batch.completed)
        message.failed.extend(map(_failure_message, batch.failed))
    if with_logprobs:
        message.token_logprobs.events = encode_int32(with_logprobs)
        encode_logprobs(logprobs.columns(), message.token_logprobs)
    message.completed.extend(_request_end_message(handle, usage) for handle, usage in outgoing.aborted)
    message.failed.extend(_refusal_message(handle, error) for handle, error in outgoing.refusals)
    for handle, source in outgoing.moved:
        has_source = bool(source.lease)
        message.moved.add(handle=handle, source=source_message(source) if has_source else None)
    message.has_room.extend(outgoing.has_room)
    return response


def _column(parts: SequenceOf[SequenceOf[int]]) -> bytes:
    """A column of events, of all batches."""
    return encode_int32(parts[0] if len(parts) == 1 else list(chain.from_iterable(parts)))


def _sequence_end_message(end: SequenceEnd) -> scheduler_pb2.SequenceEnd:
    return scheduler_pb2.SequenceEnd(
        handle=end.handle,
        sequence_index=end.sequence_index,
        num_tokens=end.num_tokens,
        reason=f"FINISH_REASON_{end.reason.name}",
        stop_token_id=end.stop_token_id,
        cumulative_logprob=end.cumulative_logprob,
        vector=end.vector,
    )


def _request_end_message(handle: int, usage: Usage | None) -> scheduler_pb2.RequestEnd:
    """The end of a request; without usage, the answer to an Abort of an unknown request."""
    if usage is None:
        return scheduler_pb2.RequestEnd(handle=handle)
    return scheduler_pb2.RequestEnd(
        handle=handle,
        usage=common_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generated_tokens=usage.generated_tokens,
            queue_ms=usage.queue_s * 1e3,
            prefill_ms=usage.prefill_s * 1e3,
            decode_ms=usage.decode_s * 1e3,
            preemptions=usage.preemptions,
            drafted_tokens=usage.drafted_tokens,
            accepted_draft_tokens=usage.accepted_draft_tokens,
        ),
    )


def _failure_message(failure: RequestFailure) -> scheduler_pb2.RequestFailure:
    """The failure of a request that was accepted."""
    code = _FAILURE_CODES.get(failure.reason, code_pb2.INTERNAL)
    return scheduler_pb2.RequestFailure(
        handle=failure.key.handle,
        code=code,
        reason=failure.reason,
        message=failure.message,
        scheduler_epoch=failure.epoch,
    )


def _refusal_message(handle: int, error: QuireError) -> scheduler_pb2.RequestFailure:
    """The failure of a refused submission, or of a request that another call took over or cancelled."""
    code, _ = error.code.value
    return scheduler_pb2.RequestFailure(
        handle=handle,
        code=code,
        reason=error.reason,
        message=error.message,
        retry_after_ms=error.retry_after_ms,
        already_taken_over=isinstance(error, AlreadyTakenOver),
    )


# Answers of GetState and InspectBlocks: a snapshot between two operations of the core. Lists of blocks are copied at
# once and become messages in pieces: a pool of 30,000 blocks would block the event loop, and with it the steps, for
# tens of milliseconds.


async def state_message(
    replica: Replica,
    lifecycle: Lifecycle,
    *,
    include_sequences: bool,
    num_gateways: int,
    is_of_gateway: Callable[[RequestKey], bool] | None = None,
) -> scheduler_pb2.GetStateResponse:
    """Counters and, if requested, every live sequence with its block table, and the load of one gateway."""
    message = scheduler_pb2.GetStateResponse(
        scheduler_epoch=replica.epoch,
        draining=lifecycle.is_draining,
        asleep=lifecycle.is_asleep,
        connected_gateways=num_gateways,
        workers=_worker_messages(replica, lifecycle.loading),
    )
    scheduler = replica.scheduler
    if scheduler is None:
        return message
    message.last_step_id = scheduler.num_attached_steps
    message.steps = scheduler.num_steps
    add_queues(message, scheduler)
    if is_of_gateway is not None:
        message.gateway.CopyFrom(_load_message(scheduler, is_of_gateway))
        tokens = replica.metrics.step_tokens
        message.step_tokens.CopyFrom(
            scheduler_pb2.StepTokens(bounds=map(int, tokens.bounds), steps=tokens.counts, tokens=int(tokens.sum))
        )
        served = replica.metrics.served
        message.served.generated_tokens = served.num_tokens
        message.served.running_sequences = int(scheduler.batch.rows.active.sum())
        if (first_token_ms := served.first_token_ms()) is not None:
            message.served.first_token_ms_p50, message.served.first_token_ms_p95 = first_token_ms
        drafts = scheduler.draft_counts
        message.drafts.CopyFrom(
            scheduler_pb2.DraftCounts(samples=drafts.num_samples, drafts=drafts.num_drafts, accepted_at=drafts.right_at)
        )
    if include_sequences:
        sequences = (sequence for group in scheduler.groups() for sequence in group.unfinished)
        snapshots = [_snapshot_of(scheduler, sequence) for sequence in sequences]
        await _add_sequences(message, snapshots, scheduler.config.layout)
    return message


def _load_message(scheduler: Scheduler, is_of_gateway: Callable[[RequestKey], bool]) -> scheduler_pb2.GatewayLoad:
    running = [group for group in scheduler.running if is_of_gateway(group.request.key)]
    queued = [group for group in (*scheduler.waiting, *scheduler.swapped) if is_of_gateway(group.request.key)]
    num_held = sum(
        scheduler.waiting.is_held(group.request.key) or scheduler.swapped.is_held(group.request.key) for group in queued
    )
    return scheduler_pb2.GatewayLoad(
        running_requests=len(running), waiting_requests=len(queued) - num_held, held_requests=num_held
    )


async def blocks_message(scheduler: Scheduler | None, request_id: str | None) -> scheduler_pb2.InspectBlocksResponse:
    """Every block that a live sequence holds, of one request or of all, and all blocks that can still be hit."""
    message = scheduler_pb2.InspectBlocksResponse()
    if scheduler is None:
        return message
    pool = scheduler.batch.blocks.pool
    add_pools(message, scheduler)
    groups = [each for each in scheduler.groups() if request_id is None or each.request.request_id == request_id]
    snapshots = [_snapshot_of(scheduler, sequence) for group in groups for sequence in group.unfinished]
    free = pool.free_blocks()
    cached = [
        (block, content) for block, content in zip(free, pool.hashes_of(free), strict=True) if content is not None
    ]
    block_size = scheduler.config.block_size
    await _add_sequences(message, snapshots, scheduler.config.layout)
    for start in range(0, len(cached), _BLOCKS_AT_ONCE):
        for block, content in cached[start : start + _BLOCKS_AT_ONCE]:
            message.cached.add(block_id=block, filled=block_size, block_hash=content)
        await asyncio.sleep(0)
    return message


def _worker_messages(replica: Replica, loading: LoadProgress | None) -> list[scheduler_pb2.WorkerState]:
    """The workers' states, in order of rank. All ranks are attached or none, and they share one generation."""
    return [
        scheduler_pb2.WorkerState(
            address=address,
            attached=replica.is_attached,
            worker_generation=0 if replica.info is None else replica.info.worker_generation,
            loading=None if loading is None else loading.message(),
        )
        for address in replica.workers
    ]


class _Snapshot(NamedTuple):
    """A sequence, the place in its table, reference count and hash of each of its blocks, and the blocks of its state
    with their reference counts."""

    state: scheduler_pb2.SequenceState
    places: SequenceOf[int]
    blocks: tuple[BlockId, ...]
    ref_counts: list[int]
    hashes: list[BlockHash | None]
    of_state: list[tuple[BlockId, int]]


def _snapshot_of(scheduler: Scheduler, sequence: Sequence) -> _Snapshot:
    is_swapped = sequence.status is SequenceStatus.SWAPPED
    blocks = scheduler.batch.blocks
    pool, blanks = (blocks.host.pool, blocks.blank_on_host) if is_swapped else (blocks.pool, blocks.blank)
    state = scheduler_pb2.SequenceState(
        request_id=sequence.request.request_id,
        sequence_index=sequence.index,
        status=f"SEQUENCE_STATUS_{sequence.status.name}",
        num_tokens=sequence.num_tokens,
        num_computed_tokens=scheduler.num_computed_tokens(sequence),
    )
    table, places = tuple(sequence.block_table), range(len(sequence.block_table))
    if blanks:
        places = [place for place in places if table[place] not in blanks]
        table = tuple(table[place] for place in places)
    of_state = list(zip(sequence.state_blocks, blocks.pool.ref_counts_of(sequence.state_blocks), strict=True))
    return _Snapshot(state, places, table, pool.ref_counts_of(table), pool.hashes_of(table), of_state)


async def _add_sequences(
    message: scheduler_pb2.GetStateResponse | scheduler_pb2.InspectBlocksResponse,
    snapshots: Iterable[_Snapshot],
    layout: BlockTableLayout,
) -> None:
    block_size, num_groups, num_blocks = layout.block_size, layout.num_groups, 0
    for state, *blocks, of_state in snapshots:
        sequence = message.sequences.add()
        sequence.CopyFrom(state)
        sequence.state.extend(
            scheduler_pb2.BlockState(block_id=block, ref_count=ref_count) for block, ref_count in of_state
        )
        num_blocks += len(of_state)
        for place, block, ref_count, content in zip(*blocks, strict=True):
            index, group = divmod(place, num_groups)
            filled = min(max(state.num_computed_tokens - index * block_size, 0), block_size)
            entry = sequence.block_table.add(block_id=block, filled=filled, ref_count=ref_count, block_hash=content)
            if num_groups > 1:
                entry.group, entry.logical_index = group, index
            num_blocks += 1
            if num_blocks % _BLOCKS_AT_ONCE == 0:
                await asyncio.sleep(0)
