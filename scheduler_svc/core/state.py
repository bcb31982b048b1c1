"""The state that the parts of the scheduler share: requests in their queues, memory, and counts."""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.admission import Room, Stop, TokenShares
from scheduler_svc.core.cache_log import CacheLog
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.draft_budget import DraftCounts
from scheduler_svc.core.fault_isolation import Trials
from scheduler_svc.core.kv_cache import BlockManager
from scheduler_svc.core.moves import Arriving, KvSource, MoveCounts, Tier
from scheduler_svc.core.pace import Pace
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.sequence import SequenceStatus
from scheduler_svc.core.pins import PIN_CLIENT, Pins
from scheduler_svc.core.policy import POLICIES, GroupQueue, Queues
from scheduler_svc.core.prefix_index import HostMemory
from scheduler_svc.core.preparation import Preparations
from scheduler_svc.core.request import MovedBlocks, RequestKey
from scheduler_svc.core.reservations import Kind, Reservations
from scheduler_svc.core.running_batch import Batch
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step import StepInFlight


class State:
    """All requests of one replica, and the memory of its worker.

    Attributes:
        num_steps, num_preemptions: Since the start.
        num_swap_outs: Preemptions that moved blocks to host memory, since the start.
        num_attached_steps: Steps since the worker was attached.
        num_prompt_tokens: Prompt tokens of all requests that ran.
        num_cached_tokens: The part of `num_prompt_tokens` that the prefix cache had.
        stopped: Why the last step admitted no further group; None if no group was left.
        reservations: Blocks and rows that are kept for others than running requests.
        promised: The offers that got room in the last planned step.
        new_wait_until: Requests that never ran wait at least until this time, in seconds; None if they need not.
    """

    def __init__(self, config: SchedulerConfig, make_blocks: Callable[[SchedulerConfig], BlockManager]) -> None:
        """`make_blocks` makes an empty pool, at the start and after each loss of a worker."""
        self.config = config
        self._make_blocks = make_blocks
        self.policy = POLICIES[config.policy]()
        new_first = self.policy.new_first
        self.queues = Queues(waiting=GroupQueue(new_first), swapped=GroupQueue(new_first), running=GroupQueue())
        self.waiting, self.swapped, self.running = self.queues
        self.in_flight: deque[StepInFlight] = deque()
        self.pins = Pins(config)
        self.trials = Trials()
        self.num_arrivals = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_swap_outs = 0
        self.stopped: Stop | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.draft_counts = DraftCounts()
        self.move_counts = MoveCounts()
        self.new_wait_until: float | None = None
        self._cache_log: CacheLog | None = None
        self.make_pools()

    def make_pools(self) -> None:
        """Makes the pools of a worker that has computed nothing."""
        config = self.config
        self.batch = Batch(config, self._make_blocks(config), self.queues)
        self.batch.blocks.set_host(HostMemory(config.num_host_blocks, self.move_counts, caches=config.caches_on_host))
        self.reservations = Reservations(self.batch.blocks.pool)
        self.pins.move_to(self.reservations)
        self.promised = list[RequestKey]()
        self.tier = Tier()
        self.fetches = Fetches(self)
        self.preparations = Preparations(
            self.batch.adapters, self.trials, self.fetches.make_room, compiles=config.prepares_constraints
        )
        if self._cache_log is not None:
            self._cache_log.cleared()
            self.set_cache_log(self._cache_log)
        self.room = Room(self.batch, self.queues, self.reservations, self.pins)
        self.shares = TokenShares(self.batch, self.queues, config.max_prefill_share)
        self.pace = Pace()
        self.num_attached_steps = 0

    def groups(self) -> Iterator[SequenceGroup]:
        """All live requests: running ones, then swapped ones, then waiting ones."""
        return itertools.chain(self.running, self.swapped, self.waiting)

    def group(self, key: RequestKey) -> SequenceGroup | None:
        """A live request; None if it is not known (any more)."""
        return next((queue.get(key) for queue in self.queues if key in queue), None)

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        return len(self.running) + len(self.swapped) + len(self.waiting)

    def is_held_as_new(self, group: SequenceGroup) -> bool:
        """Whether a waiting request may not start yet because it never ran."""
        request = group.request
        is_new = group.cached_tokens is None and not (request.emitted or request.is_offer)
        return self.new_wait_until is not None and is_new and request.key.client != PIN_CLIENT

    def num_computed_tokens(self, sequence: Sequence) -> int:
        """Tokens whose keys and values are in a pool once all steps in flight are done, for any outcome of drafts."""
        if sequence.status is SequenceStatus.RUNNING and sequence.row is not None:
            return int(self.batch.rows.num_computed[sequence.row] - self.batch.rows.num_unsure[sequence.row])
        return sequence.num_swapped_tokens if sequence.status is SequenceStatus.SWAPPED else 0

    def log_cache(self) -> CacheLog:
        """Starts to record changes of the prefix cache."""
        log = CacheLog()
        self.set_cache_log(log)
        return log

    def set_cache_log(self, log: CacheLog | None) -> None:
        """Records changes of the prefix cache in `log` from now on, if it is not None."""
        blocks = self.batch.blocks
        self._cache_log = blocks.pool.log = blocks.host.log = self.tier.log = log
        if log is not None:
            log.tier, log.host = self.tier, blocks.host


class Fetches:
    """Room in the pool for blocks of waiting requests that workers fetch, from other replicas or from the tier."""

    def __init__(self, state: State) -> None:
        self._state = state
        # The pool's number of releases, and the requests for whose blocks there has been no room since.
        self._no_room: tuple[int, set[RequestKey]] = 0, set()

    def make_room(self, key: RequestKey, number: int) -> Arriving | MovedBlocks | None:
        """Takes pool blocks for the blocks of a waiting request that another replica has and that are not cached here,
        and reserves them for the preparation with this number. They are fetched once. If all are cached, the result has
        no blocks, and the call for it ends the lease. If no other replica has the request, its blocks in the tier are
        fetched once it fits, so that no other request takes the room again. Returns the need of another request that
        fetches the blocks already, if there is one, and None if there is nothing to fetch or no room."""
        state = self._state
        group, blocks = state.waiting.get(key) if key in state.waiting else None, state.batch.blocks
        if group is None or state.trials.are_on or key in self._without_room():
            # Each step tries the next request again, and has no time to look at all of its blocks.
            return None
        if group.source is None:
            # Groups that pass may take the room and evict fetched blocks: waits for them once, then computes the rest.
            return self._make_room_from_tier(group, number) if len(state.tier) and not group.others_went_first else None
        cached, hashes = blocks.missing_hashes(group.computing)
        num_free = len(hashes) + blocks.pool.num_free_of(cached)
        source = group.source
        if hashes and not blocks.has_room(num_free, reserve=state.room.to_grow(), others_run=state.room.others_run):
            self._without_room().add(key)
            return None
        group.source = None
        return self._arriving(number, source, cached if hashes else [], hashes)

    def restore_untold(self) -> None:
        """The worker was lost. The next worker may fetch the blocks that this one was not yet told to fetch."""
        for key, arriving in self._state.preparations.untold_fetches():
            if (group := self._state.group(key)) is not None:
                group.source = arriving.source

    def _make_room_from_tier(self, group: SequenceGroup, number: int) -> Arriving | MovedBlocks | None:
        state = self._state
        blocks = state.batch.blocks
        cached, hashes = blocks.missing_hashes(group.computing, state.tier)
        if not hashes:
            return None
        if (others := state.preparations.fetching(hashes[0])) is not None:
            return others
        while not state.room.has_room(group, state.room.to_grow()):
            # Blocks kept for others do not give way for blocks that can be computed.
            if state.room.others_run or not blocks.reclaim():
                self._without_room().add(group.request.key)
                return None
        return self._arriving(number, None, cached, hashes)

    def _without_room(self) -> set[RequestKey]:
        """The requests for whose blocks there has been no room since the last release of blocks."""
        num_releases = self._state.batch.blocks.pool.num_releases
        if self._no_room[0] != num_releases:
            self._no_room = num_releases, set()
        return self._no_room[1]

    def _arriving(
        self, number: int, source: KvSource | None, cached: list[BlockId], hashes: list[BlockHash]
    ) -> Arriving:
        """Reserves blocks for these hashes, which workers may write before the next step, and the cached ones. Cached
        content of the new blocks is lost."""
        pool = self._state.batch.blocks.pool
        pool.touch(cached)
        taken = pool.allocate(len(hashes))
        self._state.reservations.add(Kind.FETCH, number, taken)
        self._state.reservations.add(Kind.FETCH_START, number, cached)
        return Arriving(source, tuple(taken), tuple(hashes))

    def forget_failed(self, arriving: Arriving, failed: Collection[int]) -> None:
        """Blocks with these indices did not come. Blocks of the tier are not fetched again, since it may be slow."""
        if arriving.source is None:
            for index, content in enumerate(arriving.hashes):
                if index in failed:
                    self._state.tier.forget(content)
