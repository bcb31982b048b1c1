"""Messages to watchers: the core's view as messages of quire.scheduler.v1."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.messages.arrays import encode_int32
from quire.rpc.errors import Unavailable, invalid_field
from quire.runtime import clock
from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.sequence import SequenceStatus
from scheduler_svc.core.prefix_index import PrefixIndex
from scheduler_svc.core.reservations import Kind
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import StepPlan, Usage
from scheduler_svc.core.view import Changes, Preempted, SequenceNumber, owners, waiting

Frame = scheduler_pb2.WatchResponse
StepNote = scheduler_pb2.StepNote
StepAnswer = scheduler_pb2.StepAnswer
ReplicaNumbers = scheduler_pb2.ReplicaNumbers
MemoryChanges = scheduler_pb2.MemoryChanges

_MAX_WAITING = 32
_NAME_BYTES = 8
_NO_NAME = bytes(_NAME_BYTES)


@dataclass(frozen=True, slots=True)
class ReplicaNow:
    """The replica as a frame shows it; `scheduler` is None before the first worker."""

    scheduler: Scheduler | None
    epoch: int
    is_ready: bool
    is_attached: bool
    is_draining: bool
    num_gateways: int
    block_bytes: int = 0
    """Bytes of one block, in all ranks together."""
    first_token_ms: tuple[float, float] | None = None
    """The median and the 95th percentile over the requests that ended in the last minute."""


class StepRecord(NamedTuple):
    """A planned step: the start and end of planning, in seconds, and the number of preemptions so far. A tuple, since
    each step makes one."""

    plan: StepPlan
    started: float
    planned: float
    num_preemptions: int


class Fork(NamedTuple):
    """A sequence that shares the blocks of another from this step on."""

    step_id: int
    parent: Sequence
    child: Sequence


def block_events(
    plans: Iterable[StepPlan],
    forks: SequenceOf[Fork],
    preempted: SequenceOf[Preempted],
    number_of: Callable[[Sequence], int | None],
    max_events: int,
) -> MemoryChanges:
    """The latest events of blocks, and the number of older ones that were left out. `number_of` returns the number of a
    sequence that was seen. Preemptions have no step: they are between two steps, or while one was planned."""
    kept: deque[tuple[int, int, int, int]] = deque(maxlen=max_events)
    count = len(forks) + len(preempted)
    for plan in plans:
        for kind, pairs in (
            (scheduler_pb2.MEMORY_EVENT_SWAP_OUT, plan.swap_out),
            (scheduler_pb2.MEMORY_EVENT_SWAP_IN, plan.swap_in),
            (scheduler_pb2.MEMORY_EVENT_COPY, plan.copy),
        ):
            count += len(pairs)
            kept.extend((kind, plan.step_id, source, target) for source, target in pairs[-max_events:].tolist())
    for fork in forks:
        parent, child = number_of(fork.parent), number_of(fork.child)
        if parent is None or child is None:
            # A child that has ended already held nothing that the view saw.
            count -= 1
        else:
            kept.append((scheduler_pb2.MEMORY_EVENT_FORK, fork.step_id, parent, child))
    kept.extend((scheduler_pb2.MEMORY_EVENT_PREEMPT, 0, each.number, int(each.is_swapped)) for each in preempted)
    return MemoryChanges(
        events=encode_int32([number for event in kept for number in event]), lost_events=count - len(kept)
    )


def add_queues(message: scheduler_pb2.GetStateResponse | scheduler_pb2.ReplicaNumbers, scheduler: Scheduler) -> None:
    """Sets the lengths of the queues, the preemptions, and the pools."""
    message.waiting_requests, message.swapped_requests = len(scheduler.waiting), len(scheduler.swapped)
    message.running_requests, message.waiting_tokens = len(scheduler.running), scheduler.waiting.num_tokens
    message.preemptions = scheduler.num_preemptions
    add_pools(message, scheduler)


def add_pools(
    message: scheduler_pb2.GetStateResponse | scheduler_pb2.InspectBlocksResponse | scheduler_pb2.ReplicaNumbers,
    scheduler: Scheduler,
) -> None:
    """Sets the numbers of blocks of both pools."""
    message.gpu_pool.CopyFrom(_pool_message(scheduler.batch.blocks.pool, scheduler.pins.num_pinned))
    message.host_pool.CopyFrom(_pool_message(scheduler.batch.blocks.host.pool))


def _pool_message(pool: PrefixIndex, num_pinned: int = 0) -> scheduler_pb2.PoolState:
    """The number of blocks of a pool in each state."""
    return scheduler_pb2.PoolState(
        total_blocks=pool.num_blocks,
        free_blocks=pool.num_free - pool.num_cached,
        cached_blocks=pool.num_cached,
        used_blocks=pool.num_used,
        pinned_blocks=num_pinned,
    )


def numbers(replica: ReplicaNow, counts: ReplicaNumbers, num_watchers: int) -> ReplicaNumbers:
    """Counters, queues and pools, in addition to the sums in `counts`."""
    message = ReplicaNumbers(
        ready=replica.is_ready,
        draining=replica.is_draining,
        scheduler_epoch=replica.epoch,
        connected_gateways=replica.num_gateways,
        watchers=num_watchers,
    )
    message.MergeFrom(counts)
    if replica.first_token_ms is not None:
        message.first_token_ms_p50, message.first_token_ms_p95 = replica.first_token_ms
    scheduler = replica.scheduler
    if scheduler is None:
        return message
    config = scheduler.config
    message.num_blocks, message.num_host_blocks = config.num_blocks, config.num_host_blocks
    message.block_size, message.policy = config.block_size, config.policy.value
    message.full_groups, message.windowed_groups, message.window = (
        config.full_groups,
        config.windowed_groups,
        config.window,
    )
    message.state_blocks = config.state_blocks
    blocks = scheduler.batch.blocks
    for blank in blocks.blank:
        message.blank_block = blank
    for blank in blocks.blank_on_host:
        message.blank_host_block = blank
    message.max_num_seqs, message.max_num_batched_tokens = config.max_num_seqs, config.max_num_batched_tokens
    add_queues(message, scheduler)
    message.running_sequences = int(np.count_nonzero(scheduler.batch.rows.active))
    message.swap_outs = scheduler.num_swap_outs
    drafts = scheduler.draft_counts
    message.draft_tokens, message.accepted_draft_tokens = drafts.num_drafts, sum(drafts.right_at)
    message.prompt_tokens, message.cached_tokens = scheduler.num_prompt_tokens, scheduler.num_cached_tokens
    message.block_bytes, message.disk_blocks = replica.block_bytes, len(scheduler.tier)
    message.arriving_blocks = scheduler.reservations.num_blocks(Kind.FETCH)
    message.offered_blocks = scheduler.reservations.num_blocks(Kind.LEASE)
    moves = scheduler.move_counts
    message.blocks_from_disk, message.blocks_from_replicas = moves.from_disk, moves.from_replicas
    message.blocks_from_host = moves.from_host
    message.blocks_that_did_not_come = moves.failed_from_disk + moves.failed_from_replicas
    message.requests_moved_in, message.requests_moved_out = moves.requests_in, moves.requests_out
    return message


def frame(
    replica: ReplicaNow,
    its_numbers: ReplicaNumbers,
    notes: Iterable[StepNote],
    answers: Iterable[StepAnswer],
    ended: Iterable[Usage],
    now: float,
) -> Frame:
    """All of a frame except memory. `now` is in the clock of the core's timelines."""
    message = Frame(unix_seconds=clock.unix_s(), numbers=its_numbers, steps=notes, answers=answers)
    message.ended.extend(
        scheduler_pb2.EndedRequest(
            prompt_tokens=each.prompt_tokens,
            cached_tokens=each.cached_tokens,
            generated_tokens=each.generated_tokens,
            queue_ms=each.queue_s * 1e3,
            prefill_ms=each.prefill_s * 1e3,
            decode_ms=each.decode_s * 1e3,
        )
        for each in ended
    )
    if replica.scheduler is not None:
        message.waiting.extend(_waiting_messages(replica.scheduler, now, is_attached=replica.is_attached))
    return message


def step_note(record: StepRecord, num_preempted: int, now: float) -> StepNote:
    """The decisions of one step. `now` is in the clock of the record."""
    plan = record.plan
    chunk_tokens = plan.num_new_tokens[plan.num_new_tokens > 1]
    return StepNote(
        step_id=plan.step_id,
        age_ms=max(0, round((now - record.started) * 1e3)),
        num_tokens=plan.num_tokens,
        num_decodes=len(plan.rows) - len(chunk_tokens),
        num_chunks=len(chunk_tokens),
        num_chunk_tokens=int(chunk_tokens.sum()),
        num_entered=len(plan.assign),
        num_preempted=num_preempted,
        num_copied=len(plan.copy),
        num_swapped_out=len(plan.swap_out),
        num_swapped_in=len(plan.swap_in),
        plan_us=round((record.planned - record.started) * 1e6),
    )


def _waiting_messages(scheduler: Scheduler, now: float, *, is_attached: bool) -> Iterator[scheduler_pb2.WaitingRequest]:
    for group, obstacle in waiting(scheduler, _MAX_WAITING):
        yield scheduler_pb2.WaitingRequest(
            request_id=group.request.request_id,
            tenant=group.request.tenant,
            num_sequences=group.request.num_sequences,
            tokens_to_compute=group.num_tokens_to_compute,
            waited_ms=max(0, round((now - group.timeline.arrived) * 1e3)),
            preemptions=group.preemptions,
            is_swapped=any(each.status is SequenceStatus.SWAPPED for each in group.unfinished),
            reason=f"WAIT_REASON_{obstacle.name if is_attached else 'NO_WORKER'}",
        )


def with_memory(frame: Frame, changes: Changes, events: MemoryChanges) -> Frame:
    """The frame with changes of block tables and names, and events of blocks."""
    memory = MemoryChanges(
        sequences=map(_sequence_message, changes.new),
        gone=encode_int32(changes.gone),
        progress=encode_int32(changes.progress),
        lengths=encode_int32(changes.lengths),
        tables=encode_int32(changes.tables),
        states=encode_int32(changes.states),
        named=encode_int32([block for block, _ in changes.names]),
        names=b"".join(_NO_NAME if name is None else name[:_NAME_BYTES] for _, name in changes.names),
        pins=encode_int32(changes.pins),
    )
    memory.MergeFrom(events)
    made = Frame(memory=memory)
    made.MergeFrom(frame)
    return made


def _sequence_message(numbered: SequenceNumber) -> scheduler_pb2.WatchedSequence:
    sequence, request = numbered.sequence, numbered.sequence.request
    return scheduler_pb2.WatchedSequence(
        number=numbered.number,
        request_id=request.request_id,
        tenant=request.tenant,
        sequence_index=sequence.index,
        num_sequences=request.num_sequences,
        prompt_tokens=len(request.prompt),
        max_tokens=request.max_len,
        is_beam=request.beam is not None,
    )


def block_message(
    scheduler: Scheduler | None, request: scheduler_pb2.ReadBlockRequest
) -> scheduler_pb2.ReadBlockResponse:
    """One block with its owners and the tokens that they have there. Raises QuireError."""
    if scheduler is None:
        raise Unavailable("no worker is attached yet", reason="NO_WORKER", retry_after_ms=100)
    pool = scheduler.batch.blocks.host.pool if request.is_host else scheduler.batch.blocks.pool
    if request.block_id >= pool.num_blocks:
        raise invalid_field("block_id", f"is {request.block_id}; the pool has {pool.num_blocks} blocks")
    block = BlockId(request.block_id)
    message = scheduler_pb2.ReadBlockResponse(block_hash=pool.hash_of(block), ref_count=pool.ref_count(block))
    # Most blocks of a pool have no owner, and a search for owners reads all tables.
    for owner in owners(scheduler, block, is_host=request.is_host) if message.ref_count else ():
        message.owners.add(
            request_id=owner.sequence.request.request_id,
            tenant=owner.sequence.request.tenant,
            sequence_index=owner.sequence.index,
            logical_index=owner.logical_index,
            group=owner.group,
            token_ids=encode_int32(owner.token_ids),
        )
    return message
