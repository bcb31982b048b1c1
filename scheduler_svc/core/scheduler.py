"""The scheduler: continuous batching over paged blocks (the paper's sections 4.2 to 4.5).

`submit` queues a request, `schedule` plans the next step, `apply` applies the result of the oldest step in flight.
Several steps may be in flight: planning counts tokens that are still to come, and a sequence that turns out to have
ended costs one wasted row-step. Only rows whose next token the scheduler itself chooses (beam search) wait for their
result.

`arrivals` puts requests into the queues and ends them, `planner` plans steps and applies their results; both work on
one `state`, and `arrivals` also handles losses of the worker. `policy` says which group is next, `admission` whether
there is room for it and how prompts share a step, `running_batch` moves groups into rows and out of them and builds the
step, `kv_cache` keeps blocks, `underway` the requests that wait for blocks of others, `states` and `windows` the blocks
of layers that do not read all tokens, `results` interprets step results, `pace` says when beam searches wait for each
other, `draft_budget` how many drafts rows may have, `preparation` knows which constraints are compiled and which
adapters are loaded, and `fault_isolation` finds requests that make steps fail.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.arrivals import Arrivals
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.kv_cache import BlockManager
from scheduler_svc.core.moves import Lease
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.reservations import Kind
from scheduler_svc.core.state import State


class Scheduler(State):
    """All requests of one replica, from arrival to end: the state, and the calls from outside."""

    def __init__(
        self, config: SchedulerConfig, make_blocks: Callable[[SchedulerConfig], BlockManager] = BlockManager.of
    ) -> None:
        """`make_blocks` makes an empty pool, at the start and after each loss of a worker."""
        super().__init__(config, make_blocks)
        self.arrivals = arrivals = Arrivals(self)
        self.submit, self.abort, self.abort_sequence = arrivals.submit, arrivals.abort, arrivals.abort_sequence
        self.pin, self.unpin, self.expire_pins = arrivals.pin, arrivals.unpin, arrivals.expire_pins
        self.move_away, self.refit = arrivals.move_away, arrivals.refit
        self.take_preparations, self.prepared = arrivals.take_preparations, arrivals.prepared
        self.end_late_preparation = arrivals.end_late_preparation
        self.planner = planner = Planner(self, arrivals)
        self.schedule, self.apply = planner.schedule, planner.apply
        self.refuse_in_flight, self.lose_in_flight = arrivals.refuse_in_flight, arrivals.lose_in_flight
        self.judge_loss, self.void_in_flight = arrivals.judge_loss, arrivals.void_in_flight

    def hold_new(self, now: float, seconds: float) -> None:
        """Keeps requests that never ran from starting for `seconds`: another replica may take them."""
        self.new_wait_until = now + seconds

    def renew_lease(self, lease: Lease, now: float, lease_s: float | None) -> None:
        """Blocks of a lease were fetched: extends it to `lease_s` seconds from now, or ends it with None."""
        if lease_s is not None:
            self.reservations.renew(Kind.LEASE, lease, now + lease_s)
        else:
            self.reservations.end(Kind.LEASE, lease)

    def tier_changed(self, slots: SequenceOf[int], hashes: SequenceOf[BlockHash]) -> None:
        """Updates the workers' tier: the first of these slots hold these blocks now, and the other slots are empty."""
        self.tier.change(slots, hashes)

    def forget_cached(self) -> int:
        """Forgets the content of cached blocks that have no holder; returns their number. Blocks of sequences and pins
        keep their names. Blocks of the tier are not fetched until workers are attached again."""
        self.tier.clear()
        self.batch.blocks.host.forget_cached()
        pool = self.batch.blocks.pool
        num_before = pool.num_cached
        pool.free(pool.allocate(pool.num_free))
        return num_before - pool.num_cached

    def restore_sealed(self, sealed: Iterable[tuple[BlockId, BlockHash]]) -> None:
        """Puts blocks into the prefix cache that a worker reported as final under an earlier scheduler, or before its
        stream broke. Called before anything runs. Blocks that this pool does not have are ignored."""
        num_blocks = self.config.num_blocks
        self.batch.blocks.pool.restore((block, content) for block, content in sealed if block < num_blocks)

    @property
    def is_sealing(self) -> bool:
        """Whether steps are in flight, or a step that only seals blocks is due."""
        return bool(self.in_flight) or self.batch.has_seals
