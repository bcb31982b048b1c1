"""Invariants that hold between any two operations of the scheduler. Tests call `check` after each."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from quire.prefix_hashes import block_hash, root_hash
from scheduler_svc.core.block_pool import BlockId, BlockPool
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceStatus


class InvariantViolationError(AssertionError):
    """The scheduler's state contradicts itself."""


def check(scheduler: Scheduler) -> None:
    """Raises InvariantViolationError that names what does not hold."""
    # Sequences that ended hold their blocks until these are reclaimed, though others of their group go on.
    running = [sequence for group in scheduler.running for sequence in group.unfinished]
    swapped = [sequence for group in scheduler.swapped for sequence in group.unfinished]
    waiting = [sequence for group in scheduler.waiting for sequence in group.unfinished]
    blocks = scheduler.batch.blocks
    tables = [each.block_table for each in running]
    _check_pool(blocks.pool, [*tables, *scheduler.pins.held_tables(), *blocks.retired_tables])
    _check_pool(scheduler.swap_space.pool, [each.block_table for each in swapped])
    _check_seals(scheduler, running)
    _check_pins(scheduler)
    _check_waiting(waiting)
    _check_swapped(scheduler, swapped)
    _check_occupancy(scheduler, running)
    _check_rows(scheduler, [sequence for sequence in running if sequence.status is SequenceStatus.RUNNING])
    _check_underway(scheduler)
    _check_order(scheduler)
    running_keys = [group.request.key for group in scheduler.running]
    _require(scheduler.trials.are_together(running_keys), "a suspect runs beside others than its cohort")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolationError(message)


def _check_pool(pool: BlockPool, tables: Iterable[SequenceOf[BlockId]]) -> None:
    free = pool.free_blocks()
    held = Counter(block for table in tables for block in table)
    _require(len(set(free)) == len(free), "a block is free twice")
    _require(not held.keys() & set(free), f"blocks {sorted(held.keys() & set(free))} are both free and held")
    _require(
        len(free) + len(held) == pool.num_blocks, f"{len(free)} free + {len(held)} held != {pool.num_blocks} blocks"
    )
    cached = [block for block in free if pool.hash_of(block) is not None]
    _require(len(cached) == pool.num_cached, f"{len(cached)} free blocks are sealed, {pool.num_cached} are counted")
    for block, holders in held.items():
        _require(
            pool.ref_count(block) == holders, f"block {block}: ref count {pool.ref_count(block)}, holders {holders}"
        )


def _check_seals(scheduler: Scheduler, running: list[Sequence]) -> None:
    for sequence in running:
        parent = root_hash(sequence.request.tenant)
        size = scheduler.config.block_size
        for index, block in enumerate(sequence.block_table[: sequence.num_tokens // size]):
            parent = block_hash(parent, sequence.token_ids[index * size : (index + 1) * size])
            sealed = scheduler.batch.blocks.pool.hash_of(block)
            _require(sealed in (None, parent), f"block {block}: sealed under the hash of other tokens")


def _check_waiting(waiting: list[Sequence]) -> None:
    for sequence in waiting:
        name = sequence.request.request_id
        _require(not sequence.block_table and sequence.row is None, f"{name} waits and holds blocks or a row")


def _check_pins(scheduler: Scheduler) -> None:
    pool, pins = scheduler.batch.blocks.pool, scheduler.pins
    for pin in pins:
        _require(not pin.is_held or pool.hits(pin.hashes) == pin.blocks, f"pin {pin.pin_id}: its blocks are not cached")
        is_live = any(group.request.key == pin.key for group in scheduler.groups())
        _require(pin.is_held != is_live, f"pin {pin.pin_id}: held {pin.is_held}, being computed {is_live}")
    held = {block for table in pins.held_tables() for block in table}
    _require(len(held) == pins.num_pinned, f"{len(held)} blocks are pinned, {pins.num_pinned} are counted")


def _check_swapped(scheduler: Scheduler, swapped: list[Sequence]) -> None:
    for sequence in swapped:
        name = sequence.request.request_id
        _require(sequence.row is None, f"{name}: is swapped and has a row")
        if sequence.status is not SequenceStatus.SWAPPED:
            _require(not sequence.block_table, f"{name}: holds blocks and is not swapped")
            continue
        slots = len(sequence.block_table) * scheduler.config.block_size
        kept = sequence.num_swapped_tokens
        _require(0 < kept < sequence.num_tokens, f"{name}: {kept} of {sequence.num_tokens} tokens are swapped")
        _require(0 <= slots - kept < scheduler.config.block_size, f"{name}: {kept} swapped tokens in {slots} slots")


def _check_occupancy(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    rows = scheduler.batch.rows
    occupied = [row for row, sequence in enumerate(rows.sequences) if sequence is not None]
    held = sorted(sequence.row for sequence in sequences if sequence.row is not None)
    _require(held == occupied, f"rows {occupied} are occupied, sequences hold {held}")
    _require(len(occupied) + rows.num_free == len(rows.sequences), "free and occupied rows do not add up")
    for sequence in sequences:
        if sequence.status is not SequenceStatus.RUNNING:
            _require(not sequence.block_table, f"{sequence.request.request_id}: holds blocks and does not run")


def _check_rows(scheduler: Scheduler, running: list[Sequence]) -> None:
    rows = scheduler.batch.rows
    in_flight = Counter(
        row
        for step in scheduler.in_flight
        for row, incarnation in zip(step.rows.tolist(), step.incarnations.tolist(), strict=True)
        if rows.incarnation[row] == incarnation
    )
    for sequence in running:
        row, name = sequence.row, sequence.request.request_id
        assert row is not None
        planned, computed = int(rows.num_tokens[row]), int(rows.num_computed[row])
        _require(rows.sequences[row] is sequence, f"{name}: row {row} holds another sequence")
        _require(bool(rows.active[row]), f"{name}: row {row} is not active")
        to_come = 0 if rows.dependent[row] else in_flight[row]
        _require(planned == sequence.num_tokens + to_come, f"{name}: {planned} planned tokens do not add up")
        _require(computed <= planned, f"{name}: {computed} computed of {planned} tokens")
        slots = len(sequence.block_table) * scheduler.config.block_size
        _require(rows.num_slots[row] == slots, f"{name}: {rows.num_slots[row]} slots recorded, the table has {slots}")
        _require(computed <= slots, f"{name}: {computed} computed tokens in {slots} slots")
        unused = slots - max(computed, sequence.num_tokens)
        _require(unused < scheduler.config.block_size, f"{name}: {unused} slots are reserved ahead of need")


def _check_underway(scheduler: Scheduler) -> None:
    rows, underway = scheduler.batch.rows, scheduler.batch.underway
    for content, row in underway.items():
        sequence = rows.sequences[row]
        _require(sequence is not None and bool(rows.active[row]), f"row {row} computes a block and is not active")
        assert sequence is not None
        num_full = sequence.num_tokens // scheduler.config.block_size
        hashes = sequence.prefix_hashes.first(num_full, sequence.token_ids)
        _require(content in hashes[rows.num_sealed[row] :], f"row {row} does not compute what it is said to")
    _require(
        set(underway.awaited()) <= {content for content, _ in underway.items()}, "a block that is awaited never comes"
    )
    for group in scheduler.waiting:
        key = group.request.key
        is_known = underway.is_known(key) or scheduler.preparations.is_held(key)
        _require(not scheduler.waiting.is_held(key) or is_known, f"{key} is held for nothing")
    for group in scheduler.swapped:
        key = group.request.key
        is_held = scheduler.swapped.is_held(key)
        _require(not is_held or scheduler.preparations.is_held(key), f"{key} is swapped and held for nothing")


def _check_order(scheduler: Scheduler) -> None:
    for queue in (scheduler.running, scheduler.swapped, scheduler.waiting):
        orders = [group.order for group in queue]
        _require(orders == sorted(set(orders)), f"groups are out of order: {orders}")
