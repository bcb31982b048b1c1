"""Invariants inside services that hold even if no answer shows them: sealed blocks match their names, no token is lost
on the way, a worker stays with the scheduler that started last, unwanted work stops, and runnable work runs."""

import itertools
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from gateway.app import Gateway
from gateway.auth.keys import KeyRing
from gateway.replicas import live, routing, sequence
from gateway.replicas.link import SchedulerLink
from gateway.replicas.live import LiveRequest
from gateway.replicas.placements import Placements
from gateway.replicas.sequence import TokenGapError
from quire.messages.prefix_hashes import BlockHash, PrefixHash, in_group, root_hash
from quire.rpc.errors import FailedPrecondition, QuireError
from quire.rpc.patience import LAST_LOOK_S
from quire.runtime.clock import CLOCK
from quire.service.compatibility import UNKNOWN_MODEL
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.cache_log import CachedTokens
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.kv_cache import BlockManager, cached_tokens
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.sequence import SequenceStatus
from scheduler_svc.core.prefix_index import PrefixHashes
from scheduler_svc.core.request import Handle, Request, RequestKey
from scheduler_svc.core.reservations import Kind
from scheduler_svc.core.scheduler import Scheduler as CoreScheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.states import Checkpoint
from scheduler_svc.service import step_loop
from scheduler_svc.service.history import Held
from scheduler_svc.service.lifecycle import Lifecycle
from scheduler_svc.service.outbox import Readiness
from scheduler_svc.service.readers import Connection, OwnedRequest, Reader
from scheduler_svc.service.replica import Replica
from scheduler_svc.service.requests import Requests
from scheduler_svc.service.step_loop import PendingOrders, StepLoop
from scheduler_svc.service.worker_link import (
    WorkerFaultyError,
    WorkerGroup,
    WorkerHangsError,
    WorkerLink,
    WorkerLostError,
    Workers,
)
from scheduler_svc.service.worker_messages import WorkerAnswer
from tests.sim.world.durations import misread_by_gateway, watch_worker
from tests.sim.world.network import Network
from tests.sim.world.ranks import worker_of
from tests.sim.world.world import Node
from tests.support.fake_pool import BlockError, Prefixes, salt_of
from worker_svc.device.seals import SealInventory
from worker_svc.protocol.session import _VACANT_S, Session, Sessions
from worker_svc.protocol.stream import Worker
from worker_svc.protocol.transfers import OnFetched
from worker_svc.step import SealedBlocks

_LOOK_EVERY_S = 0.25
_IDLE_S = 1.0
_SILENCE_S = 13.0
"""By then a scheduler that is not paused itself has noticed that its worker is silent."""

Names = dict[BlockHash, tuple[int, int, str, CachedTokens]]
"""The names that schedulers gave to blocks, each with the contents of the block's first and last slot, its owner, and
the tokens that watchers receive. Tenants share no blocks, nor do requests of one tenant with different salts."""


def parent_of(names: Names, name: BlockHash, num_full: int) -> BlockHash | None:
    """The block without which one is useless; None if it is the first, is not of the first `num_full` groups of layers,
    which have no windows, or has a name of another kind, as in recordings."""
    known = names.get(name)
    if known is None or known[3].parent is None or known[3].group >= num_full:
        return None
    return in_group(known[3].parent, known[3].group)


class FalseSealError(BlockError):
    """A worker seals a block whose contents do not match its name."""


class NamingBlocks(BlockManager):
    """Records the contents of blocks that get a name."""

    def __init__(self, config: SchedulerConfig, names: Names) -> None:
        super().__init__(config)
        self._names = names

    def cache_full_blocks(self, sequence: Sequence, first: int, end: int) -> list[tuple[BlockId, BlockHash]]:
        hashes = sequence.prefix_hashes.between(first, end, sequence.token_ids)
        owner = f"{sequence.request.tenant} {sequence.request.cache_salt.hex()}"
        # The same tokens may have had blocks of fewer groups of layers before.
        if not all(in_group(name, self.num_groups - 1) in self._names for name in hashes):
            adapter = b"" if sequence.request.adapter is None else sequence.request.adapter.digest
            slots = Prefixes(sequence.token_ids[: end * self.block_size], adapter).hashes(0, end * self.block_size)
            for index, name in enumerate(hashes, first):
                begin = index * self.block_size
                ends = int(slots[begin]), int(slots[begin + self.block_size - 1])
                for group in range(self.num_groups):
                    begins, ends_with = (each ^ salt_of(group) for each in ends)
                    tokens = cached_tokens(sequence, index, group)
                    self._names[in_group(name, group)] = begins, ends_with, owner, tokens
        if any(self._names[name][2] != owner for name in hashes):
            raise FalseSealError(f"a block of {owner} has the name of another one's")
        return super().cache_full_blocks(sequence, first, end)

    def seal_checkpoint(self, checkpoint: Checkpoint) -> list[tuple[BlockId, BlockHash]]:
        sequence, end = checkpoint.sequence, checkpoint.num_tokens
        if end % self.block_size:
            report(AssertionError(f"a checkpoint after {end} tokens is no whole number of blocks"))
        index = end // self.block_size - 1
        (content,) = sequence.prefix_hashes.between(index, index + 1, sequence.token_ids)
        owner = f"{sequence.request.tenant} {sequence.request.cache_salt.hex()}"
        adapter = b"" if sequence.request.adapter is None else sequence.request.adapter.digest
        state = int(Prefixes(sequence.token_ids[:end], adapter).hashes(end - 1, end)[0])
        for group in self.names.of_state:
            held = state ^ salt_of(group)
            self._names[in_group(content, group)] = held, held, owner, cached_tokens(sequence, index, group)
        newest = sequence.newest_checkpoint
        others = [(block, now) for block, name in newest if (now := self.pool.hash_of(block)) not in (None, name)]
        sealed = super().seal_checkpoint(checkpoint)
        if any(self.pool.hash_of(block) != now for block, now in others):
            report(AssertionError("a checkpoint takes the place of other content than the one before"))
        return sealed

    def take(self, count: int) -> list[BlockId]:
        """Takes blocks, and checks that their cached contents move to host memory, if it caches evicted blocks and has
        room, and are evicted there last."""
        host, evicted, lost = self.host, list[BlockHash](), list[BlockHash]()
        if host.caches:
            evicted = list(filter(None, self.pool.hashes_of(self.pool.free_blocks()[:count])))
            lost = evicted[-host.pool.num_free :] if host.pool.num_free else []
        blocks = super().take(count)
        if any(name not in host for name in lost):
            report(AssertionError("what the pool hands out for other content is not in host memory, which has room"))
        kept = {block for name in evicted if (block := host.find(name)) is not None and not host.pool.ref_count(block)}
        if kept and kept != set(host.pool.free_blocks()[-len(kept) :]):
            report(AssertionError("what the pool hands out for other content makes way in host memory before the rest"))
        return blocks

    def more_cached(self, sequence: Sequence, shared: list[BlockId], max_blocks: int = sys.maxsize) -> list[BlockId]:
        """Checks that blocks that come from host memory, and evicted blocks that go there, are counted once."""
        host, counts = self.host, self.host.counts
        before = len(host.loading) - counts.from_host, len(host.saving) - counts.to_host
        blocks = super().more_cached(sequence, shared, max_blocks)
        if (len(host.loading) - counts.from_host, len(host.saving) - counts.to_host) != before:
            report(AssertionError("blocks that come from host memory or go there are not counted, or others are"))
        return blocks

    def reclaim(self) -> bool:
        """Checks that finished requests release their blocks in the order in which they ended."""
        before = self.retired
        done = super().reclaim()
        if self.retired != before[len(before) - len(self.retired) :]:
            report(AssertionError("blocks of a finished request are free before those of one that ended earlier"))
        return done


def report(error: Exception) -> None:
    node = CLOCK.get()
    assert isinstance(node, Node)
    node.fail(error)


class CheckedSeals(SealInventory):
    """Knows the contents that sealed blocks must have."""

    def __init__(self, num_gpu_blocks: int, names: Names) -> None:
        super().__init__(num_gpu_blocks)
        self._names = names
        self.on_add = lambda: None
        """Called when blocks were sealed."""
        self._expected = np.zeros((num_gpu_blocks, 2), np.int64)
        self._arriving = set[int]()

    def keep(self, sealed: NDArray[np.uint8], hashes: NDArray[np.uint8]) -> None:
        """Takes over the inventory of an earlier worker, in memory that outlived it."""
        self._sealed, self._hashes = sealed, hashes
        for block in sealed.nonzero()[0].tolist():
            self._expected[block] = self._names[BlockHash(hashes[block].tobytes())][:2]

    @property
    def memory(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        return self._sealed, self._hashes

    def add(self, sealed: SealedBlocks, step_number: int) -> None:
        super().add(sealed, step_number)
        for block, name in zip(sealed.block_ids.tolist(), sealed.hashes, strict=True):
            self._expected[block] = self._names[BlockHash(name.tobytes())][:2]
        self.on_add()

    def begin_transfer(self, block_ids: NDArray[np.integer]) -> None:
        super().begin_transfer(block_ids)
        self._arriving.update(block_ids.tolist())

    def end_transfer(self, sealed: SealedBlocks) -> None:
        super().end_transfer(sealed)
        if late := set(sealed.block_ids.tolist()) - self._arriving:
            report(FalseSealError(f"blocks {late} are sealed for a session that is over"))

    def end_session(self) -> None:
        """Forgets arriving blocks: blocks of the previous session are not sealed any more."""
        self._arriving.clear()

    def check(self, slots: np.ndarray) -> None:
        """Raises FalseSealError unless sealed blocks match their names; `slots` [n, block size] is the pool."""
        blocks = self._sealed.nonzero()[0]
        wrong = slots[blocks][:, [0, -1]] != self._expected[blocks]
        if np.count_nonzero(wrong):
            block = blocks[wrong.any(axis=1).argmax()]
            raise FalseSealError(f"block {block} is sealed and does not hold what its name says")


class CheckedSessions(Sessions):
    """Checks that a worker accepts newer schedulers, and an older one only after a long time without any scheduler."""

    def __init__(self, node: Node, worker_generation: int, max_steps_in_flight: int, seals: CheckedSeals) -> None:
        super().__init__(worker_generation, max_steps_in_flight)
        self._node, self._seals = node, seals
        self._newest = -1
        self._highest = -1
        self._refused_at: float | None = None
        """When an older scheduler was first refused since the worker was last attached."""

    def attach(self, epoch: int, now: float) -> Session:
        is_newer, self._newest = epoch > self._newest, max(epoch, self._newest)
        before = self._current
        had_one = before is not None and not before.ended
        try:
            session = super().attach(epoch, now)
        except FailedPrecondition as error:
            if is_newer:
                self._node.fail(AssertionError(f"the newest scheduler is refused: {error}"))
            if not had_one and self._refused_at is None:
                self._refused_at = now
            raise
        since = None if had_one else self._refused_at
        if epoch < self._highest and (since is None or now - since < _VACANT_S):
            self._node.fail(AssertionError(f"epoch {epoch} is taken after {self._highest}, which was there lately"))
        if before is not None and (not before.ended or epoch == self._highest):
            self._node.fail(AssertionError("a session goes on beside the next one, or has its epoch"))
        self._highest, self._refused_at = epoch, None
        end = session.end

        def ended() -> None:
            if not session.ended:
                self._refused_at = None
            end()

        session.end = ended
        self._seals.end_session()
        return session


class CheckedWorker(Worker):
    """Checks that a superseded session leaves no work to the next one, and that its end does not affect that."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.transfers is not None:
            watch_worker(self.transfers, report)
            serve, num_calls = self.transfers.serve_fetch, Counter[bytes]()

            async def serve_counted(request: worker_pb2.FetchBlocksRequest) -> AsyncGenerator[Any, None]:
                num_calls[request.lease] += 1
                try:
                    async with aclosing(serve(request)) as responses:
                        async for response in responses:
                            yield response
                finally:
                    num_calls[request.lease] -= 1
                    offer = self.transfers and self.transfers._offers.get(request.lease)
                    if offer and offer.num_calls > num_calls[request.lease]:
                        report(AssertionError("a call that fetched blocks counts on when it is over"))

            self.transfers.serve_fetch = serve_counted

    def attach(
        self,
        epoch: int,
        on_superseded: Callable[[QuireError], None],
        on_fetched: OnFetched = lambda lease, is_done: None,
    ) -> Session:
        session = super().attach(epoch, on_superseded, on_fetched)
        if any(self._underway()[3:]):
            report(AssertionError("what a session that was superseded had underway goes on for the next one"))
        return session

    def detach(self, session: Session) -> None:
        has_next, before = self._session is not session, self._underway()
        super().detach(session)
        if has_next and self._underway() != before:
            report(AssertionError("the end of a session that was superseded ends what the next one has underway"))

    def _underway(self) -> tuple[object, ...]:
        """The session and its callbacks, then its loads and moves, and the blocks that it offers."""
        moves = self.transfers
        moved = () if moves is None else ({*moves._moving}, {*moves._offers})
        return self._session, self._supersede, moves and moves._on_fetched, {**self._reads}, *moved


class RequestsViolationError(AssertionError):
    """The table of requests of a scheduler contradicts itself."""


@dataclass(slots=True)
class _Wait:
    """A request, the time since which it has or lacks a reader, and the time since which it is over."""

    owned: OwnedRequest
    since: float
    over_since: float
    is_unread: bool = False
    is_over: bool = False

    @property
    def due_at(self) -> float:
        """The earliest time at which it may be dropped."""
        is_from_end = self.owned.durable is not None and self.is_over
        return (self.over_since if is_from_end else self.since) + self.owned.retention_s


_DROPPING = ("cancel", "forget", "forget_outputs", "admit", "resubmit")
"""Operations that may drop a request that waits for a reader: its tenant's, its gateway's, its timer's, and requests
that take its room."""
_TIMER_S = 1e-6


def _now() -> float:
    return CLOCK.get().monotonic()


class CheckedRequests(Requests):
    """The table of requests, with invariants checked after each operation: a failure ends the world, even if no answer
    shows it."""

    _depth = 0
    is_ready = False
    """Whether gateways were notified that it runs steps."""
    num_times_ready = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._waits = dict[Handle, _Wait]()
        make_room = self.durable.make_room

        def make_enough() -> list[Handle]:
            forgotten = make_room()
            kept = [owned for handle, owned in self.durable.requests.items() if handle not in forgotten[:-1]]
            limits, num_tokens = self.durable.limits, sum(owned.charge for owned in kept)
            is_short = len(kept) > limits.max_requests or num_tokens > limits.max_tokens
            _demand(not forgotten or is_short, "drops more durable requests than a new one takes the room of")
            return forgotten

        self.durable.make_room = make_enough

    def report_readiness(self, readiness: Readiness) -> None:
        self.num_times_ready += readiness.is_ready and not self.is_ready
        self.is_ready = readiness.is_ready
        super().report_readiness(readiness)

    def dropped(self, operation: str, gateway_id: object) -> None:
        """Raises RequestsViolationError if an operation of this gateway drops a request that must still wait for a
        reader."""
        for handle in self._waits.keys() - self._by_handle.keys():
            wait = self._waits.pop(handle)
            is_plain, is_its = wait.owned.durable is None, wait.owned.gateway_id == gateway_id
            is_ended = wait.is_over or operation == "deliver"
            may_drop = operation in _DROPPING or (is_plain and (is_its if operation == "forget_unread" else is_ended))
            is_due = not wait.is_unread or wait.owned.is_offer or _now() > wait.due_at - _TIMER_S
            _demand(may_drop or is_due, f"is dropped by {operation} while it waits for a reader", wait.owned)

    def announce_room(self, key: RequestKey) -> None:
        super().announce_room(key)
        offer = self._by_handle.get(key.handle)
        is_bounded = offer is None or offer.reader is None or offer.expiry is not None
        _demand(is_bounded, "has room that is kept without an end", offer)

    def _check_wait(self, handle: Handle, owned: OwnedRequest) -> None:
        """Checks timers: unread requests expire a fixed time after their reader left, durable ones after their end."""
        wait = self._waits.get(handle)
        if wait is None:
            wait = self._waits[handle] = _Wait(owned, _now(), _now())
        is_unread = owned.reader is None
        if is_unread != wait.is_unread:
            wait.is_unread, wait.since = is_unread, _now()
        if owned.is_over and not wait.is_over:
            wait.is_over, wait.over_since = True, _now()
        if owned.expiry is not None and not owned.is_offer:
            due_at = owned.expiry.when()
            off_s = due_at - wait.due_at
            _demand(abs(off_s) < _TIMER_S, f"has a timer that is off by {off_s:.3f} s", owned)

    def _resumable(self, request: Request, nonce: int, reader: Reader, held: Held) -> OwnedRequest | None:
        """The running request without log probabilities of its prompt that a gateway submits again, if all output that
        the reader lacks is kept."""
        for owned in self._by_id.get((request.tenant, request.request_id), ()):
            is_its = owned.nonce == nonce and owned.gateway_id == reader.connection.gateway_id
            progress, kept = self._progress(owned.key), owned.history
            firsts = {index: output.first for index, output in kept._outputs.items()}
            if is_its and owned.comes_in_parts and progress is not None:
                left = [each for each in progress if each.index not in held.ended]
                has_ends = all(each.index in kept._ends for each in left if each.has_ended)
                nums = [(held.num_tokens.get(each.index, 0), firsts.get(each.index, each.num_tokens)) for each in left]
                return owned if has_ends and all(had >= first for had, first in nums) else None
        return None

    def check(self) -> None:
        """Raises RequestsViolationError if an invariant does not hold."""
        plain, readers = dict[Handle, int](), self._delivery.readers
        for handle, owned in self._by_handle.items():
            reader, is_timed = owned.reader, owned.reader is None or (owned.durable is not None and owned.is_over)
            _demand(owned in self._by_id[owned.tenant, owned.request_id], "is not found by its id", owned)
            _demand((handle in self._delivery.kept) == owned.keeps_events, "is kept, or is not", owned)
            _demand(owned.is_offer or (owned.expiry is not None) == is_timed, "has a timer, or has none", owned)
            self._check_wait(handle, owned)
            if reader is None:
                _demand(handle not in readers, "is told to a reader that left", owned)
            else:
                connection = reader.connection
                _demand(self._connections.get(connection.gateway_id) is connection, "is read by who left", owned)
                _demand(reader.request is owned, "is not what its reader reads", owned)
                is_replayed = reader.handle in connection.outbox._replays
                _demand(
                    readers.get(handle) == (None if is_replayed else reader),
                    "is told out of order",
                    owned,
                )
            if owned.is_over and owned.durable is None and reader is None:
                plain[handle] = owned.history.size
        _demand(readers.keys() <= self._by_handle.keys(), "tells readers of requests that it has forgotten")
        _demand(
            plain == self._ended.undelivered and self._ended.undelivered_size == sum(plain.values()),
            "counts what is kept",
        )
        durable = {handle: owned for handle, owned in self._by_handle.items() if owned.durable is not None}
        _demand(durable == self.durable.requests, "knows which are durable")
        if self.durable._is_summed:
            charges = Counter[str]()
            for owned in durable.values():
                charges[owned.tenant] += 0 if owned.is_over else owned.charge
            _demand(charges == self.durable._charge_running, "counts tokens of durable requests")
        for connection in self._connections.values():
            _demand((connection.outbox._credit or 0) >= 0, "sends a gateway more than it takes")
            ended = {handle for outgoing in connection.outbox.unacknowledged() for handle in outgoing.ended}
            for handle, owned in connection.reads.items():
                is_kept = owned.durable is None and owned.is_over and handle not in ended
                _demand(not is_kept, "is kept, though its reader has taken in the end", owned)
            for handle, replay in connection.outbox._replays.items():
                is_whole = replay._history._completed or replay._history._failed
                _demand(bool(is_whole) or handle in connection.reads, "goes on to who reads it no longer")


def _demand(holds: bool, what: str, owned: OwnedRequest | None = None) -> None:
    if not holds:
        error = RequestsViolationError(f"{'the table' if owned is None else owned.request_id} {what}")
        report(error)
        raise error


def _checked(name: str) -> Callable[..., Any]:
    operation = getattr(Requests, name)

    def call(self: CheckedRequests, *arguments: Any, **options: Any) -> Any:
        self._depth += 1
        durable = {*self.durable.requests} if name == "admit" else set[Handle]()
        resumable = self._resumable(*arguments) if name == "resubmit" else None
        try:
            result = operation(self, *arguments, **options)
        except QuireError:
            _demand(durable <= self.durable.requests.keys(), "drops durable requests for one that is refused")
            raise
        finally:
            self._depth -= 1
        if name == "acknowledge":
            _demand(arguments[0].outbox._num_acknowledged == arguments[1], "counts other messages than were taken in")
        _demand(resumable is None or result, "is computed again, though all that its reader lacks is kept", resumable)
        if not self._depth:
            self.dropped(name, arguments[0] if arguments else None)
            self.check()
        return result

    return call


for _name in ("connect", "close", "acknowledge", "admit", "attach", "resubmit", "detach", "end_durable", "cancel"):
    setattr(CheckedRequests, _name, _checked(_name))
for _name in ("forget", "forget_outputs", "forget_unread", "deliver"):
    setattr(CheckedRequests, _name, _checked(_name))


class CheckedReplica(Replica):
    """Checks that a hung worker is not judged as a lost link."""

    _hung = False

    def record_loss(self, error: WorkerLostError) -> None:
        self._hung = isinstance(error, WorkerFaultyError)
        super().record_loss(error)

    def judge_loss(self, scheduler: CoreScheduler, *, was_alive: bool) -> None:
        if was_alive and self._hung:
            report(AssertionError("a worker that hung counts as one whose link broke"))
        super().judge_loss(scheduler, was_alive=was_alive)


class CheckedDrains(Lifecycle):
    """Checks that a drain ends no earlier than leases, if it has time."""

    async def drain(self, timeout_s: float | None) -> int:
        began_s = _now()
        num_live = await super().drain(timeout_s)
        core = self._replica.scheduler
        num_leases = 0 if core is None or num_live else len(core.reservations[Kind.LEASE])
        if num_leases and (timeout_s is None or _now() - began_s < timeout_s):
            report(AssertionError(f"a drain ends, and {num_leases} leases do not"))
        return num_live


class MissedTokenError(TokenGapError):
    """Tokens were lost between a scheduler and a gateway. A new connection repairs that, so the world is notified."""

    def __init__(self, *what: object) -> None:
        super().__init__(*what)
        report(self)


_RELEASED = set[tuple[str, Any]]()
"""Durable requests that gateways have ended at their schedulers, by address and nonce, in this world."""


@contextmanager
def watched_errors(is_late: Callable[[], bool]) -> Iterator[None]:
    """Inside the block, the world ends if a gateway misses tokens or miscounts submissions, or if a scheduler gives up
    its worker for a step that is not late."""

    class CheckedHangsError(WorkerHangsError):
        def __init__(self, *what: object) -> None:
            super().__init__(*what)
            node = CLOCK.get()
            assert isinstance(node, Node)
            # After a pause, earlier messages are still unread.
            if not is_late() or node.monotonic() - node.went_on_s <= LAST_LOOK_S:
                node.fail(self)

    abort, hashes_of, refused = Placements.abort, routing.prompt_hashes, Placements.on_refusal
    hand_over, find_late = Placements.hand_over, PendingOrders.find_late
    receive, receive_of_all = WorkerLink.receive, WorkerGroup.receive
    num_heartbeats = Counter[Workers]()
    late_since = WeakKeyDictionary[PendingOrders, tuple[tuple[int, float] | None, float]]()

    def note_refused(placements: Placements, link: SchedulerLink, error: QuireError, request: LiveRequest) -> None:
        """Checks that a refusal by a draining scheduler is not counted as a submission: the request tries again."""
        num_before = request.submissions
        refused(placements, link, error, request)
        if error.reason == "DRAINING" and request.submissions != num_before - (request.replica is None):
            report(AssertionError(f"{request.request.request_id} counts its submission to a scheduler that drains"))

    def name(
        prompt: NDArray[np.int32], tenant: str, block_size: int, adapter: bytes | None = None, salt: bytes = b""
    ) -> list[PrefixHash]:
        names = hashes_of(prompt, tenant, block_size, adapter, salt)
        token_ids = prompt.tolist()
        if names != PrefixHashes(root_hash(tenant, adapter, salt), block_size).first(len(names), token_ids):
            report(AssertionError("a gateway looks for blocks under other names than schedulers give them"))
        return names

    def note_handed_over(placements: Placements, earlier: LiveRequest, live: LiveRequest) -> None:
        """Checks that a stream that another call continues keeps the model of its tokens."""
        hand_over(placements, earlier, live)
        if live.num_generated_tokens and UNKNOWN_MODEL != earlier.model != live.model:
            report(AssertionError(f"{live.request.request_id} has another model than the call that it continues"))

    async def note_heartbeat(link: WorkerLink) -> WorkerAnswer | None:
        answer = await receive(link)
        num_heartbeats[link] += answer is None
        return answer

    async def note_common_heartbeat(group: WorkerGroup) -> WorkerAnswer | None:
        """Checks that each rank has sent a heartbeat for each heartbeat of the group."""
        answer = await receive_of_all(group)
        num_heartbeats[group] += answer is None
        if answer is None and num_heartbeats[group] > min(num_heartbeats[each] for each in group._links):
            report(AssertionError("a group of ranks counts as alive, and a rank is silent"))
        return answer

    def find_late_twice(orders: PendingOrders, now: float) -> tuple[int, float] | None:
        """Checks that a late order was found late before, so that its answer had time to be read."""
        late, oldest = find_late(orders, now), next(iter(orders._sent_at.items()), None)
        before, since = late_since.get(orders, (None, now))
        is_late = oldest is not None and now - max(oldest[1], orders._oldest_since) > orders._timeout_s
        late_since[orders] = oldest if is_late else None, since if before == oldest else now
        if late is not None and now - late_since[orders][1] <= LAST_LOOK_S:
            report(AssertionError(f"order {late[0]} counts as late at the first look"))
        return late

    def note_aborted(placements: Placements, live: LiveRequest) -> None:
        if live.request.durable and live.replica is not None:
            _RELEASED.add((live.replica, live.request.nonce))
        abort(placements, live)

    _RELEASED.clear()
    with (
        patch.object(Placements, "abort", note_aborted),
        patch.object(Placements, "on_refusal", note_refused),
        patch.object(Placements, "hand_over", note_handed_over),
        patch.object(PendingOrders, "find_late", find_late_twice),
        patch.object(WorkerLink, "receive", note_heartbeat),
        patch.object(WorkerGroup, "receive", note_common_heartbeat),
        patch.object(routing, "prompt_hashes", name),
        patch.object(step_loop, "WorkerHangsError", CheckedHangsError),
        patch.object(sequence, "TokenGapError", MissedTokenError),
        patch.object(live, "TokenGapError", MissedTokenError),
    ):
        yield


_USAGE_S = 1.5
"""Longer than the second that gateways wait."""
_FOR_WORKERS = ("_move_from_unready", "_leave_unready")
"""Timers of gateways for requests whose replica runs no steps."""
_HEARD_S = 1.0
"""By then a scheduler has received its gateways' messages, if nothing was in the way."""


@dataclass(slots=True, eq=False)
class _Cancelled:
    """A request that a tenant has cancelled by its id, at one scheduler, with the nonces that were known there. Without
    `connections` the scheduler may not have heard of it, and then the request may run on unless it has a reader.

    Attributes:
        unwritten: Messages to the scheduler that gateways had not written when the client got its answer. They may
            include the end of a plain request, behind slow submissions. Durable requests are ended by a call.
        at: The time since which these are written, and nothing is in the way.
    """

    named: tuple[str, str]
    nonces: set[int]
    host: str
    table: Requests
    connections: list[Connection] | None
    unwritten: list[object]
    at: float
    is_heard: bool = False


@dataclass(slots=True)
class Watch:
    """Looks now and then for states that must not last long.

    Attributes:
        address_of: Returns the address by which gateways know a scheduler's host.
        failover_delay_s, reconnect_grace_s: Settings of all gateways.
        patience_s: Longer than any message of a gateway takes if nothing is broken.
    """

    network: Network
    running: Mapping[str, Node]
    address_of: Callable[[str], str]
    failover_delay_s: float
    patience_s: float
    loops: Mapping[str, StepLoop]
    workers: Mapping[str, Worker]
    reconnect_grace_s: float
    next_s: float = 0.0
    _since: dict[str, float] = field(default_factory=dict[str, float])
    _cancelled: list[_Cancelled] = field(default_factory=list[_Cancelled])

    def cancelling(
        self, named: tuple[str, str], gateways: Mapping[str, Gateway], tables: Mapping[str, Requests]
    ) -> Callable[[float], None]:
        """A client is about to cancel a tenant's request by its id. Call the result with the time of its answer."""
        connected = self._connected(gateways, tables)
        owned = [(host, table, list(table._by_id.get(named, ()))) for host, table in tables.items()]
        known = [each for each in owned if each[2]]

        def done(now: float) -> None:
            still = self._connected(gateways, tables)
            for host, table, own in known:
                connections = connected.get(table)
                is_sure = connections is not None and still.get(table) == connections
                if is_sure or len(known) == 1:
                    sure, nonces = connections if is_sure else None, {each.nonce for each in own}
                    is_called = all(each.durable is not None for each in own)
                    unwritten = [] if is_called else self._unwritten(gateways, host)
                    self._cancelled.append(_Cancelled(named, nonces, host, table, sure, unwritten, now))

        return done

    def _unwritten(self, gateways: Mapping[str, Gateway], host: str) -> list[object]:
        """Messages that gateways have yet to write to a scheduler."""
        links = (gateway._models.default.replicas.links.get(self.address_of(host)) for gateway in gateways.values())
        return [mail for link in links if link is not None for mail in link._outbox]

    def _connected(
        self, gateways: Mapping[str, Gateway], tables: Mapping[str, Requests]
    ) -> dict[Requests, list[Connection]]:
        """The tables of the schedulers that all gateways are connected to, with their connections."""
        found: dict[Requests, list[Connection]] = {}
        for (host, table), address in ((each, self.address_of(each[0])) for each in tables.items()):
            links = [gateway._models.default.replicas.links.get(address) for gateway in gateways.values()]
            ways = [self._is_disturbed(host, gateway) for gateway in gateways if host in self.running]
            if all(link is not None and link.is_connected for link in links) and ways and not any(ways):
                found[table] = list(table._connections.values())
        return found

    def _cancelled_runs(
        self, now: float, gateways: Mapping[str, Gateway], tables: Mapping[str, Requests]
    ) -> Iterator[str]:
        """Requests that run on though their tenant has cancelled them, at schedulers that heard of it."""
        connected = self._connected(gateways, tables)
        for each in self._cancelled:
            unwritten = set(map(id, () if each.is_heard else self._unwritten(gateways, each.host)))
            if each.table not in connected or any(id(mail) in unwritten for mail in each.unwritten):
                each.at = now
            elif not each.is_heard and now - each.at > _HEARD_S:
                each.is_heard = True
                if connected[each.table] != each.connections:
                    # The call may have been lost.
                    each.connections = None
            owned = [one for one in each.table._by_id.get(each.named, ()) if one.nonce in each.nonces]
            running = [one for one in owned if not one.is_over and (each.connections is not None or one.reader)]
            if each.is_heard and each.table in connected and running:
                yield f"{each.named} runs, and was cancelled"

    def look(self, now: float, gateways: Mapping[str, Gateway], tables: Mapping[str, Requests]) -> str | None:
        """A state that has lasted too long; None if there is none. Call it again at `next_s`, or soon after."""
        self.next_s = now + _LOOK_EVERY_S
        found = dict.fromkeys(self._orphans(gateways, tables), self.patience_s)
        found |= dict.fromkeys(self._unread(gateways, tables), self.patience_s)
        found |= dict.fromkeys(self._silent(tables), _SILENCE_S)
        found |= dict.fromkeys(self._left(gateways, tables), self.patience_s + 2 * self.failover_delay_s)
        found |= dict.fromkeys(self._shunned(gateways), self.patience_s)
        found |= dict.fromkeys(self._misinformed(gateways), self.patience_s)
        found |= dict.fromkeys(self._outdated(gateways), self.patience_s)
        found |= dict.fromkeys(self._misread(gateways, tables), 0.0)
        found |= dict.fromkeys(self._untold(), _IDLE_S)
        found |= dict.fromkeys(self._needless_timers(gateways), 0.0)
        found |= dict.fromkeys(self._idle(), _IDLE_S)
        found |= dict.fromkeys(self._useless_leases(), self.patience_s)
        found |= dict.fromkeys(self._cancelled_runs(now, gateways, tables), _HEARD_S)
        found |= dict.fromkeys(self._overcounted(gateways), _IDLE_S)
        found |= dict.fromkeys(self._prepared_on(gateways), 0.0)
        found |= dict.fromkeys(self._computed_on(gateways, tables), self._abort_s)
        found |= dict.fromkeys(self._without_usage(gateways), _USAGE_S)
        self._since = {what: self._since.get(what, now) for what in found}
        return next((what for what, patience_s in found.items() if now - self._since[what] > patience_s), None)

    def _orphans(self, gateways: Mapping[str, Gateway], tables: Mapping[str, Requests]) -> Iterator[str]:
        """Requests that a scheduler runs, or keeps for a reader, though their connected gateway has ended or moved
        them."""
        for (host, table), (gateway_host, gateway) in itertools.product(tables.items(), gateways.items()):
            address = self.address_of(host)
            link = gateway._models.default.replicas.links.get(address)
            if link is None or not link.is_connected or self._is_disturbed(host, gateway_host):
                continue
            gateway_id = link._hello.hello.gateway_id
            known = {each.request.nonce for each in gateway._models.default.ledger if each.replica == address}
            offers = gateway._models.default.replicas._offers._open.values()
            known |= {offer.live.request.nonce for offer in offers if address in offer.asked}
            for owned in table._by_handle.values():
                # The end of a request with a reader is kept until the reader has taken it in.
                is_kept = owned.durable is None and not (owned.is_over and owned.reader)
                is_released = not owned.is_over and (address, owned.nonce) in _RELEASED
                if (is_kept or is_released) and owned.gateway_id == gateway_id and owned.nonce not in known:
                    yield f"{host} goes on with {owned.request_id}, which {gateway_host} does not know any more"

    @property
    def _abort_s(self) -> float:
        """Longer than an abort takes behind submissions."""
        weather, queued = self.network.weather, 1e4
        per_byte_s = 1 / weather.bytes_per_s + 2 * weather.max_delay_s / weather.window_bytes
        return 0.2 + 4 * weather.max_delay_s + queued * per_byte_s

    def _without_usage(self, gateways: Mapping[str, Gateway]) -> Iterator[str]:
        """Requests that stop strings have ended, and whose clients wait for usage that a scheduler does not send."""
        for host, gateway in gateways.items():
            waiting = (each for each in gateway._models.default.ledger if each.awaits_usage and not each.is_over)
            if not self.running[host].is_stopped:
                yield from (f"{host} waits for the usage of {each.request.request_id}" for each in waiting)

    def _computed_on(self, gateways: Mapping[str, Gateway], tables: Mapping[str, Requests]) -> Iterator[str]:
        """Sequences that a scheduler computes though a stop string has ended them at their gateway."""
        for (host, table), (gateway_host, gateway) in itertools.product(tables.items(), gateways.items()):
            link = gateway._models.default.replicas.links.get(self.address_of(host))
            core = self.loops[host].replica.scheduler if host in self.loops else None
            if link is None or core is None or not link.is_connected or self._is_disturbed(host, gateway_host):
                continue
            gateway_id = link._hello.hello.gateway_id
            for owned in table._by_handle.values():
                is_read = owned.reader is not None and owned.reader.connection.gateway_id == gateway_id
                live = gateway._models.default.ledger.get(owned.tenant, owned.request_id) if is_read else None
                group = core.group(owned.key)
                if live is None or group is None or group.request.selects or live.replica != link.address:
                    continue
                for each in group.sequences:
                    has_ended = live.sequences[each.index].finished is not None
                    if has_ended and each.status is not SequenceStatus.FINISHED:
                        yield f"{host} computes sequence {each.index} of {owned.request_id}, which has ended"

    def _unread(self, gateways: Mapping[str, Gateway], tables: Mapping[str, Requests]) -> Iterator[str]:
        """Requests that a gateway waits for at a connected scheduler that sends them to no reader."""
        for (host, table), (gateway_host, gateway) in itertools.product(tables.items(), gateways.items()):
            link = gateway._models.default.replicas.links.get(self.address_of(host))
            if link is None or not link.is_connected or self._is_disturbed(host, gateway_host):
                continue
            gateway_id = link._hello.hello.gateway_id
            read = {
                (each.tenant, each.request_id)
                for each in table._by_handle.values()
                if each.reader is not None and each.reader.connection.gateway_id == gateway_id
            }
            outboxes = [each.outbox for each in table._connections.values() if each.gateway_id == gateway_id]
            # A durable request may be forgotten before a slow reader has received its end.
            sent = {handle for outbox in outboxes for handle in outbox._replays}
            sent |= {handle for outbox in outboxes for each in outbox.unacknowledged() for handle in each.ended}
            for each in gateway._models.default.ledger:
                is_waited_for = each.replica == link.address and not (each.is_over or each.awaits_usage)
                if (
                    is_waited_for
                    and each.handle not in sent
                    and (each.request.tenant, each.request.request_id) not in read
                ):
                    yield f"{gateway_host} waits for {each.request.request_id} at {host}, which sends it nothing"

    def _silent(self, tables: Mapping[str, Requests]) -> Iterator[str]:
        """Schedulers that rely on a paused worker."""
        for host, table in tables.items():
            if host not in self.running:
                # A rival, which ends soon.
                continue
            worker = host.replace("scheduler", "worker")
            if isinstance(table, CheckedRequests) and table.is_ready and not self.running[host].is_stopped:
                stopped = [each for each, node in self.running.items() if worker_of(each) == worker and node.is_stopped]
                yield from (f"{host} has not noticed that {each} is silent" for each in stopped)

    def _left(self, gateways: Mapping[str, Gateway], tables: Mapping[str, Requests]) -> Iterator[str]:
        """Requests that wait at a replica that runs no steps, while another replica with their model does: only that
        one can continue from their tokens. If the first replica runs again, they are tried there, however soon its
        worker dies of them."""
        times = {host: each.num_times_ready for host, each in tables.items() if isinstance(each, CheckedRequests)}
        for host, gateway in gateways.items():
            replicas = gateway._models.default.replicas
            running = {address: link.model for address, link in replicas.links.items() if link.is_ready}
            if not running or self.running[host].is_stopped:
                continue
            for each in gateway._models.default.ledger:
                model = each.model if each.num_generated_tokens else UNKNOWN_MODEL
                ready = [at for at, own in running.items() if own == model or UNKNOWN_MODEL in (own, model)]
                # The process's own clock, since no process is current here.
                is_silent = self.running[host].monotonic() - each._last_token_at > 1
                is_left = each.replica is not None and each.replica not in running and is_silent
                if ready and is_left and not (each.is_over or each.moves or each.awaits_usage):
                    at = f"{each.replica}, ready {times.get(str(each.replica).partition(':')[0])} times"
                    yield f"{each.request.request_id} of {host} waits at {at}, and {ready[0]} runs steps"

    def _attached(self) -> Iterator[tuple[str, CoreScheduler, list[str]]]:
        """Schedulers with undisturbed connections to their workers, with their cores and their workers' hosts."""
        for host, loop in self.loops.items():
            ranks = [each for each in self.running if worker_of(each) == host.replace("scheduler", "worker")]
            lives = host in self.running and not self.running[host].is_dead and loop.replica.is_attached
            core = loop.replica.scheduler
            if lives and core is not None and not any(self._is_disturbed(host, each) for each in ranks):
                yield host, core, ranks

    def _useless_leases(self) -> Iterator[str]:
        """Leases of blocks that cannot be fetched, since no worker offers them any more."""
        for host, core, ranks in self._attached():
            transfers = [self.workers[each].transfers for each in ranks if each in self.workers]
            offered = {lease for each in transfers if each is not None for lease in each._offers}
            useless = [lease for lease in core.reservations[Kind.LEASE] if lease not in offered]
            yield from (f"{host} keeps blocks under lease {lease!r}, which no worker offers" for lease in useless)

    def _idle(self) -> Iterator[str]:
        """Requests that wait without a reason at idle schedulers, since they were never woken. Also answers that
        schedulers wait for though no process owes them."""
        for host, core, _ in self._attached():
            loop, waits = self.loops[host], core.preparations
            owed = ((loop._steps, {each.step_id for each in core.in_flight}), (loop._preparations, waits._underway))
            for awaited, known in (*owed, (loop._moves, waits._underway)):
                yield from (f"{host} waits for answer {each} in vain" for each in awaited._sent_at if each not in known)
            if core.in_flight or waits.num_underway or core.reservations[Kind.PROMISE]:
                continue
            waiting = next(iter(core.waiting.next_few(1)), None)
            if waiting is not None and not (waiting.request.is_offer or core.trials.are_on):
                yield f"{host} is idle, and {waiting.request.request_id} waits"
            if not core.trials.are_on and any(need in waits._held for each in waits._wanted.values() for need in each):
                yield f"{host} is idle, and requests wait for what it could have prepared"

    def _overcounted(self, gateways: Mapping[str, Gateway]) -> Iterator[str]:
        """Keys whose limits count more requests than run; finished requests that wait for their client do not count."""
        for host, gateway in gateways.items():
            keys, keeps = gateway.authenticator, gateway._models.default.durable_reads.reads_without_client
            assert isinstance(keys, KeyRing)
            running = Counter(
                live.request.tenant for live in gateway._models.default.ledger if not (live.is_over and keeps(live))
            )
            for caller in keys._callers.values():
                num_running = running[caller.tenant] + gateway._models.default.ledger._num_arriving
                if len(caller.account._running) > num_running and not self.running[host].is_stopped:
                    yield f"{host} counts requests of {caller.tenant} that are over"

    def _prepared_on(self, gateways: Mapping[str, Gateway]) -> Iterator[str]:
        """Tenants whose prompts count as being prepared after all of them were submitted."""
        for host, gateway in gateways.items():
            if not (gateway._models.default.ledger._num_arriving or self.running[host].is_stopped):
                preparing = {live.request.tenant for live in gateway._models.default.ledger if not live.is_prepared}
                counted = gateway._models.default.preparations._num_requests
                yield from (f"{host} takes prompts of {each} to be prepared" for each in counted.keys() - preparing)

    def _shunned(self, gateways: Mapping[str, Gateway]) -> Iterator[str]:
        """Schedulers that run steps, but that a gateway takes to be draining, so that they get no new requests."""
        for host, gateway in gateways.items():
            replicas = gateway._models.default.replicas
            if self.running[host].is_stopped:
                continue
            for each in sorted(replicas, key=attrgetter("address")):
                is_wrong = each.rejects_new and each.link.is_ready
                if is_wrong and not self._is_disturbed(host, each.address.partition(":")[0]):
                    yield f"{host} takes {each.address} for draining"

    def _needless_timers(self, gateways: Mapping[str, Gateway]) -> Iterator[str]:
        """Timers of requests that are over or continued by another entry of the gateway, or that await a running
        worker."""
        for host, gateway in gateways.items():
            if not self.running[host].is_stopped:
                replicas = gateway._models.default.replicas
                timers = replicas.placements._timers
                known = {each.handle: each for each in gateway._models.default.ledger if not each.is_over}
                yield from (f"{host} has a timer for {handle}" for handle in timers if handle not in known)
                for handle in timers.keys() & known.keys():
                    link = replicas.links.get(known[handle].replica or "")
                    waits = timers[handle]._args[1].__name__ in _FOR_WORKERS
                    if waits and link is not None and link.is_ready:
                        yield f"{host} has {known[handle].request.request_id} wait for a worker that is back"

    def _misinformed(self, gateways: Mapping[str, Gateway]) -> Iterator[str]:
        """Gateways whose belief that a replica runs steps, or does not, is wrong."""
        for (host, loop), (gateway_host, gateway) in itertools.product(self.loops.items(), gateways.items()):
            link = gateway._models.default.replicas.links.get(self.address_of(host))
            if host not in self.running or link is None or not link.is_connected:
                continue
            if link.is_ready != loop.lifecycle.is_ready and not self._is_disturbed(host, gateway_host):
                yield f"{gateway_host} takes {host} to be ready: {link.is_ready}, and it says {loop.lifecycle.is_ready}"

    def _misread(self, gateways: Mapping[str, Gateway], tables: Mapping[str, Requests]) -> Iterator[str]:
        """Durations in messages that the receiver misreads."""
        for (host, table), (gateway_host, gateway) in itertools.product(tables.items(), gateways.items()):
            # A rival is in no such table.
            if host in self.loops.keys() & self.running.keys() and not self._is_disturbed(host, gateway_host):
                address, grace_s = self.address_of(host), self.reconnect_grace_s
                yield from misread_by_gateway(gateway, address, self.loops[host], table, grace_s)

    def _outdated(self, gateways: Mapping[str, Gateway]) -> Iterator[str]:
        """Gateways that know another pool size of a replica than its worker has."""
        for (host, loop), (gateway_host, gateway) in itertools.product(self.loops.items(), gateways.items()):
            link = gateway._models.default.replicas.links.get(self.address_of(host))
            if host not in self.running or link is None or not (link.is_connected and loop.replica.is_attached):
                continue
            welcome, info = link.welcome, loop.replica.info
            assert welcome is not None
            assert info is not None
            known, there = (
                (each.block_size, each.num_gpu_blocks, each.full_groups, each.windowed_groups)
                for each in (welcome, info)
            )
            if known != there and not (loop.lifecycle.is_draining or self._is_disturbed(host, gateway_host)):
                yield f"{gateway_host} takes {host} to have blocks {known}, and it has {there}"

    def _untold(self) -> Iterator[str]:
        """Schedulers without a worker that have yet to report that their caches are empty."""
        for host, loop in self.loops.items():
            log = loop.replica.cache._log
            if host not in self.running or self.running[host].is_stopped or loop.replica.is_attached or log is None:
                continue
            if log._is_cleared or log._removed or log._stored or log._in_tier or log._in_host:
                yield f"{host} has lost its worker, and does not tell that nothing is cached"

    def _is_disturbed(self, one: str, other: str) -> bool:
        if self.running[one].is_stopped or self.running[other].is_stopped:
            return True
        is_silent = any(each.up.is_silent and set(each.hosts) == {one, other} for each in self.network.connections)
        return is_silent or not (self.network.is_open(one, other) and self.network.is_open(other, one))
