"""Invariants that hold between any two operations of the scheduler. Tests call `check` after each operation, and so
does a replay of a recording. A message is built only for a violation."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from itertools import chain

from quire.messages.prefix_hashes import BlockHash, PrefixHash, hash_chain, in_group, pack
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.sequence import SequenceStatus
from scheduler_svc.core.prefix_index import PrefixIndex
from scheduler_svc.core.request import max_blocks, max_blocks_apart
from scheduler_svc.core.reservations import Kind
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence

_MAX_STEPS_IN_FLIGHT = 4
"""More than any caller has."""


class InvariantViolationError(AssertionError):
    """The scheduler's state contradicts itself."""


def check(scheduler: Scheduler) -> None:
    """Raises InvariantViolationError, which names the first violation."""
    # Sequences that ended hold their blocks until these are reclaimed, though others of their group go on.
    running = [sequence for group in scheduler.running for sequence in group.unfinished]
    swapped = [sequence for group in scheduler.swapped for sequence in group.unfinished]
    blocks = scheduler.batch.blocks
    tables = [each.block_table for each in running]
    tables += [each.state_blocks for each in (*running, *blocks.retired)]
    tables += [each.blocks for planned in scheduler.batch.checkpoints.values() for each in planned]
    reserved = scheduler.reservations.tables(*Kind)
    _check_pool(blocks.pool, [*tables, *reserved, *(each.block_table for each in blocks.retired), [*blocks.blank]])
    if scheduler.batch.draft.is_empty and (blocks.states.copies or blocks.states.held):
        raise InvariantViolationError("copies of states are left behind")
    if blocks.host.loading or blocks.sealed_by_step:
        raise InvariantViolationError("copies to the pool are left behind")
    _check_pool(blocks.host.pool, [*(each.block_table for each in swapped), [*blocks.blank_on_host]])
    _check_seals(scheduler, running, blocks.pool)
    _check_seals(scheduler, swapped, blocks.host.pool)
    _check_sizes(scheduler)
    _check_found(scheduler)
    _check_pins(scheduler)
    _check_waiting(scheduler)
    _check_swapped(scheduler, swapped)
    _check_occupancy(scheduler, running)
    _check_rows(scheduler, [sequence for sequence in running if sequence.status is SequenceStatus.RUNNING])
    if blocks.blank:
        _check_windows(scheduler, [sequence for sequence in running if sequence.status is SequenceStatus.RUNNING])
    _check_underway(scheduler)
    _check_held(scheduler)
    _check_preparations(scheduler)
    _check_adapters(scheduler)
    _check_order(scheduler)
    _check_beams(scheduler)
    if not scheduler.trials.are_together(group.request.key for group in scheduler.running):
        raise InvariantViolationError("a suspect runs together with groups outside its cohort")


def _check_pool(pool: PrefixIndex, tables: Iterable[SequenceOf[BlockId]]) -> None:
    free = pool.free_blocks()
    held = Counter(chain.from_iterable(tables))
    distinct = set(free)
    if len(distinct) != len(free):
        raise InvariantViolationError("a block is free twice")
    if not distinct.isdisjoint(held):
        raise InvariantViolationError(f"blocks {sorted(distinct & held.keys())} are both free and held")
    if len(free) + len(held) != pool.num_blocks:
        raise InvariantViolationError(f"{len(free)} free + {len(held)} held != {pool.num_blocks} blocks")
    names = [name for name in pool.names(0, pool.num_blocks) if name is not None]
    distinct_names = set(names)
    if len(distinct_names) != len(names) or distinct_names != set(pool.sealed_hashes()):
        raise InvariantViolationError("a block cannot be found by its hash, or two can")
    num_cached = len(free) - pool.hashes_of(free).count(None)
    if num_cached != pool.num_cached:
        raise InvariantViolationError(f"{num_cached} free blocks are sealed, {pool.num_cached} are counted")
    if pool.ref_counts_of(list(held)) != list(held.values()):
        block, count = next((block, count) for block, count in held.items() if pool.ref_count(block) != count)
        raise InvariantViolationError(f"block {block}: ref count {pool.ref_count(block)}, holders {count}")


def _check_seals(scheduler: Scheduler, sequences: list[Sequence], pool: PrefixIndex) -> None:
    if not sequences:
        return
    size, num_groups = scheduler.config.block_size, scheduler.batch.blocks.layout.num_groups
    for sequence in sequences:
        # Hashes are computed anew here: the hashes that the sequence keeps are under test.
        num_full = min(len(sequence.block_table) // num_groups, sequence.num_tokens // size)
        table = sequence.block_table[: num_full * num_groups]
        packed = pack(sequence.token_ids[: num_full * size])
        true = _true_names(sequence.request.cache_root, packed, 4 * size, num_groups)
        for block, sealed, content in zip(table, pool.hashes_of(table), true, strict=True):
            if sealed is not None and sealed != content:
                raise InvariantViolationError(f"block {block}: sealed under the hash of other tokens")


@lru_cache(maxsize=256)
def _true_names(root: PrefixHash, packed: bytes, block_bytes: int, num_groups: int) -> tuple[BlockHash, ...]:
    """The names in a block table, cached: between two operations few sequences fill a block."""
    hashes = hash_chain(root, packed, block_bytes)
    return tuple(in_group(content, group) for content in hashes for group in range(num_groups))


def _check_sizes(scheduler: Scheduler) -> None:
    """No group holds, or would take to continue, more blocks than its request's maximum, so it can run by itself."""
    blocks = scheduler.batch.blocks
    for queue in (scheduler.running, scheduler.swapped, scheduler.waiting):
        for group in queue:
            apart = max_blocks_apart(group.request, scheduler.config)
            most = max_blocks(group.request, scheduler.config) if apart is None else apart
            if queue is scheduler.running:
                held = set(chain.from_iterable((*each.block_table, *each.state_blocks) for each in group.unfinished))
                num_blocks = len(held - blocks.blank)
            elif queue is scheduler.swapped:
                num_blocks = blocks.blocks_to_swap_in(group.computing)
            else:
                num_blocks = blocks.blocks_to_allocate(group.computing)
            if num_blocks > most:
                raise InvariantViolationError(f"{group.request.request_id}: {num_blocks} blocks, it has at most {most}")


def _check_found(scheduler: Scheduler) -> None:
    """Blocks that are remembered as cached are in the prefix cache."""
    blocks = scheduler.batch.blocks
    for group in chain(scheduler.waiting, scheduler.swapped):
        for sequence in group.computing:
            start = blocks.cached_start(sequence)
            hashes = sequence.prefix_hashes.first(len(start.blocks) // blocks.num_groups, sequence.token_ids)
            names = blocks.names.needed(hashes, 0)
            found = [*chain(*([*blocks.blank] if name is None else blocks.pool.hits([name]) for name in names))]
            checkpoint = blocks.pool.hits(blocks.names.state(hashes[-1])) if start.checkpoint else []
            is_found = found == start.blocks and checkpoint == start.checkpoint
            if not is_found or blocks.pool.num_free_of(start.all_blocks) != start.num_free:
                raise InvariantViolationError(f"{group.request.request_id}: other blocks of it are cached than noted")


def _check_pins(scheduler: Scheduler) -> None:
    pool, pins = scheduler.batch.blocks.pool, scheduler.pins
    for pin in pins:
        if pin.is_held and pool.hits(pin.hashes) != pin.blocks:
            raise InvariantViolationError(f"pin {pin.pin_id}: its blocks are not cached")
        is_live = any(group.request.key == pin.key for group in scheduler.groups())
        if pin.is_held == is_live:
            raise InvariantViolationError(f"pin {pin.pin_id}: held {pin.is_held}, being computed {is_live}")
    held, counted = Counter(chain.from_iterable(pin.blocks for pin in pins)), pins.holders()
    if held != counted:
        raise InvariantViolationError(f"pins hold {held}, {counted} is counted")


def _check_waiting(scheduler: Scheduler) -> None:
    for group in scheduler.waiting:
        for sequence in group.sequences:
            holds = sequence.block_table or sequence.state_blocks or sequence.row is not None
            if holds and sequence.status is not SequenceStatus.FINISHED:
                raise InvariantViolationError(f"{group.request.request_id} waits and holds blocks or a row")


def _check_swapped(scheduler: Scheduler, swapped: list[Sequence]) -> None:
    for sequence in swapped:
        name = sequence.request.request_id
        if sequence.row is not None:
            raise InvariantViolationError(f"{name}: is swapped and has a row")
        if sequence.status is not SequenceStatus.SWAPPED:
            if sequence.block_table:
                raise InvariantViolationError(f"{name}: holds blocks and is not swapped")
            continue
        slots = len(sequence.block_table) // scheduler.batch.blocks.layout.num_groups * scheduler.config.block_size
        kept = sequence.num_swapped_tokens
        if not 0 < kept < sequence.num_tokens:
            raise InvariantViolationError(f"{name}: {kept} of {sequence.num_tokens} tokens are swapped")
        if not 0 <= slots - kept < scheduler.config.block_size:
            raise InvariantViolationError(f"{name}: {kept} swapped tokens in {slots} slots")


def _check_occupancy(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    rows = scheduler.batch.rows
    occupied = [row for row, sequence in enumerate(rows.sequences) if sequence is not None]
    held = sorted(sequence.row for sequence in sequences if sequence.row is not None)
    if held != occupied:
        raise InvariantViolationError(f"rows {occupied} are occupied, sequences hold {held}")
    if len(occupied) + rows.num_free != len(rows.sequences):
        raise InvariantViolationError("free and occupied rows do not add up")
    for sequence in sequences:
        if sequence.status is not SequenceStatus.RUNNING and sequence.block_table:
            raise InvariantViolationError(f"{sequence.request.request_id}: holds blocks and does not run")


def _check_rows(scheduler: Scheduler, running: list[Sequence]) -> None:
    rows, size = scheduler.batch.rows, scheduler.config.block_size
    in_flight, drafts = Counter[int](), Counter[int]()
    for step in scheduler.in_flight:
        for index in (rows.incarnation[step.rows] == step.incarnations).nonzero()[0].tolist():
            in_flight[int(step.rows[index])] += 1
            drafts[int(step.rows[index])] += 0 if step.max_drafts is None else int(step.max_drafts[index])
    columns = (
        rows.num_tokens,
        rows.num_computed,
        rows.num_slots,
        rows.active,
        rows.dependent,
        rows.num_known,
        rows.num_unsure,
    )
    table = list(zip(*(column.tolist() for column in columns), strict=True))
    for sequence in running:
        row, name = sequence.row, sequence.request.request_id
        assert row is not None
        planned, computed, num_slots, is_active, is_dependent, known, unsure = table[row]
        if rows.sequences[row] is not sequence:
            raise InvariantViolationError(f"{name}: row {row} holds another sequence")
        if not is_active:
            raise InvariantViolationError(f"{name}: row {row} is not active")
        if known != sequence.num_tokens:
            raise InvariantViolationError(f"{name}: {known} tokens are known of {sequence.num_tokens}")
        if planned != known + (0 if is_dependent else in_flight[row] + drafts[row]) or unsure != drafts[row]:
            raise InvariantViolationError(f"{name}: {planned} planned tokens, {unsure} of them unsure, do not add up")
        if planned > sequence.request.max_len:
            raise InvariantViolationError(f"{name}: {planned} planned tokens, it ends at {sequence.request.max_len}")
        if computed > planned:
            raise InvariantViolationError(f"{name}: {computed} computed of {planned} tokens")
        slots = len(sequence.block_table) // scheduler.batch.blocks.layout.num_groups * size
        if num_slots != slots:
            raise InvariantViolationError(f"{name}: {num_slots} slots recorded, the table has {slots}")
        if computed > slots:
            raise InvariantViolationError(f"{name}: {computed} computed tokens in {slots} slots")
        unused = slots - max(computed, sequence.num_tokens)
        # Slots of wrong drafts are left, at most of all steps that were in flight.
        growth = (1 + scheduler.config.max_drafts) * scheduler.config.max_passes
        if unused >= size + _MAX_STEPS_IN_FLIGHT * growth:
            raise InvariantViolationError(f"{name}: {unused} slots are reserved ahead of need")


def _check_windows(scheduler: Scheduler, running: list[Sequence]) -> None:
    """Each row has the blocks that its next token reads, in all groups, and of windowed groups few others."""
    rows, blank, layout = scheduler.batch.rows, scheduler.batch.blocks.blank, scheduler.batch.blocks.layout
    for sequence in running:
        row, name = sequence.row, sequence.request.request_id
        assert row is not None
        table, size = sequence.block_table, layout.num_groups
        computed = min(int(rows.num_computed[row] - rows.num_unsure[row]), sequence.num_tokens - 1)
        needed = range(layout.first_block_read(computed), -(-int(rows.num_computed[row]) // layout.block_size))
        for group in range(size):
            entries = table[group::size]
            held = {index for index, block in enumerate(entries) if block not in blank}
            wanted = set(needed) if group >= layout.num_full else set(range(len(entries)))
            if missing := wanted - held:
                raise InvariantViolationError(f"{name}: blocks {sorted(missing)} of group {group} are missing")
            most = len(entries) if group < layout.num_full else scheduler.config.max_windowed
            if len(held) > most and sequence.request.num_sequences == 1:
                raise InvariantViolationError(f"{name}: {len(held)} blocks of group {group}, it has at most {most}")


def _check_underway(scheduler: Scheduler) -> None:
    rows, underway = scheduler.batch.rows, scheduler.batch.underway
    for row, end, key in underway.awaited():
        sequence, group = rows.sequences[row], scheduler.waiting.get(key) if key in scheduler.waiting else None
        if group is not None and group.order < rows.order[row]:
            raise InvariantViolationError(f"{key} waits for row {row}, whose request comes after it")
        num_sealed = int(rows.num_sealed[row])
        if sequence is None or not num_sealed < end <= sequence.num_tokens // scheduler.config.block_size:
            raise InvariantViolationError(f"block {end - 1} of row {row} is awaited and never comes")
    of_rows: defaultdict[int, set[BlockHash]] = defaultdict(set)
    for content, row in underway.items():
        of_rows[row].add(content)
    for row, contents in of_rows.items():
        sequence = rows.sequences[row]
        if sequence is None or not rows.active[row]:
            raise InvariantViolationError(f"row {row} computes a block and is not active")
        num_full = sequence.num_tokens // scheduler.config.block_size
        if not contents.issubset(
            sequence.prefix_hashes.between(int(rows.num_sealed[row]), num_full, sequence.token_ids)
        ):
            raise InvariantViolationError(f"row {row} does not compute what it is said to")


def _check_held(scheduler: Scheduler) -> None:
    """No group is held that would never be released."""
    waiting, swapped, preparations = scheduler.waiting, scheduler.swapped, scheduler.preparations
    promised = set(scheduler.reservations.requests(Kind.PROMISE))
    for group in waiting.held_few(len(waiting)):
        key = group.request.key
        waits = scheduler.batch.underway.is_known(key) or preparations.needed_by(key) or key in promised
        if not (waits or scheduler.is_held_as_new(group)):
            raise InvariantViolationError(f"{key} is held for nothing")
    for group in swapped.held_few(len(swapped)):
        if not preparations.needed_by(group.request.key):
            raise InvariantViolationError(f"{group.request.key} is swapped and held for nothing")


def _check_preparations(scheduler: Scheduler) -> None:
    """A suspect need is prepared by itself, a prepared need has no counted losses, and blocks are kept only for
    fetches that are not over."""
    preparations, trials = scheduler.preparations, scheduler.trials
    if preparations.has_suspect_underway and (scheduler.in_flight or preparations.num_underway > 1):
        raise InvariantViolationError("a suspect is prepared together with steps or other needs")
    if ready := [need for need in trials.counted_needs if preparations.is_ready(need)]:
        raise InvariantViolationError(f"{ready} are prepared, and losses count for them")
    reserved = (*scheduler.reservations[Kind.FETCH], *scheduler.reservations[Kind.FETCH_START])
    if over := [number for number in reserved if isinstance(number, int) and preparations.arriving(number) is None]:
        raise InvariantViolationError(f"blocks are kept for fetches {over}, which are over")


def _check_adapters(scheduler: Scheduler) -> None:
    """Each row has its adapter in a slot, whose users are counted, and each slot that is loading is awaited."""
    requests = [each.request for each in scheduler.batch.rows.sequences if each is not None]
    users = Counter(each.adapter for each in requests if each.adapter is not None)
    counted = scheduler.batch.adapters.num_rows()
    if users != Counter(counted):
        raise InvariantViolationError(f"adapters are used by {users}, {counted} are counted")
    if len(counted) > scheduler.config.max_adapters:
        raise InvariantViolationError(f"{len(counted)} adapters are in {scheduler.config.max_adapters} slots")
    loading, awaited = scheduler.batch.adapters.loading(), scheduler.preparations.awaited_slots()
    if loading != awaited:
        raise InvariantViolationError(f"slots {loading} of adapters are being loaded, {awaited} are awaited")


def _check_order(scheduler: Scheduler) -> None:
    for queue in (scheduler.running, scheduler.swapped, scheduler.waiting):
        orders = [group.order for group in queue]
        if orders != sorted(set(orders)):
            raise InvariantViolationError(f"groups are out of order: {orders}")


def _check_beams(scheduler: Scheduler) -> None:
    """A search keeps log probabilities of no more texts than it may end with."""
    for group in scheduler.groups():
        if group.beams is not None and len(group.beams.logprobs) > group.request.num_sequences:
            name = group.request.request_id
            raise InvariantViolationError(f"{name}: log probabilities of {len(group.beams.logprobs)} texts are kept")
