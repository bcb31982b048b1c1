"""The replicas of the model: which one takes a request, and how requests live on while schedulers come and go."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from gateway.replicas.events import EventBatch, Welcome
from gateway.replicas.ledger import Ledger
from gateway.replicas.link import SchedulerLink, SchedulerRefusedError
from gateway.replicas.live import Arrivals, LiveRequest
from gateway.replicas.members import Members, Resolver, may_be_several
from gateway.replicas.offers import Offers
from gateway.replicas.roles import Stage, Work, has_room
from gateway.replicas.routing import Candidate, Choice, Router, RoutingPolicy, loads_of
from gateway.replicas.scheduler_calls import SchedulerCalls
from quire import compatibility, entropy
from quire.compatibility import (
    UNKNOWN_MODEL,
    ModelFingerprint,
    are_of_one_start,
    check_model,
    check_protocol,
    differing_parts,
)
from quire.failpoint import failpoint
from quire.replica_role import ReplicaRole
from quire.rpc.errors import FailedPrecondition, QuireError, ResourceExhausted, Unavailable
from quire.rpc.patience import LAST_LOOK_S
from quire.rpc.tls import TlsIdentity

_DEFAULT_RETRY_MS = 100
_MAX_RETRY_S = 5.0
# Each move makes a request wait four times as long before the next one, up to this many.
_MAX_COUNTED_MOVES = 3
# The wait for the answer to an abort. Without the answer, the usage lacks the values that only the scheduler has.
_USAGE_TIMEOUT_S = 1.0
# When requests leave a replica that drains and does not say for how long.
_LEAVE_AFTER_S = 15.0
# A request with fewer tokens to come is not worth a move.
_MIN_TOKENS_TO_MOVE = 16
_logger = logging.getLogger(__name__)


class Replicas:
    """Places live requests on replicas and keeps them running while schedulers come and go.

    - A request whose scheduler is lost stays with it for `failover_delay_s`, since its blocks may still be there when
      the scheduler is back; then any connected replica takes it.
    - Without a replica that takes requests it waits, and fails with UNAVAILABLE after `connect_timeout_s`. As long as a
      scheduler that drains runs requests it waits on: that one is about to have a successor.
    - From a scheduler that is connected and not ready it moves after the same delay, if another replica is ready and no
      tokens come. It waits longer before each further move without a token in between: the request may be what kills
      the workers, and one scheduler must see that often enough to find out.
    - A request that a scheduler refuses because it drains is placed anew. One that it runs goes on where another
      replica is ready, once that has room (see `offers`). Where all drain, one that was accepted goes on at one of
      them, at the one that had it last if possible.
    - One with a long prompt leaves a replica for prefill likewise, with its first token (see `roles`).
    - A replica that a DNS name has no longer is left (see `members`).

    Attributes:
        links: The stream to each scheduler, by address. They come and go where a DNS name stands for them.
        calls: Unary calls to the schedulers.
    """

    def __init__(
        self,
        targets: Sequence[str],
        ledger: Ledger,
        *,
        gateway_id: str,
        architecture: str,
        model: ModelFingerprint,
        connect_timeout_s: float,
        failover_delay_s: float,
        reconnect_grace_s: float,
        routing: RoutingPolicy = RoutingPolicy.CACHE,
        long_prompt: int = 256,
        tls: TlsIdentity | None = None,
        on_tokens: Callable[[str, Arrivals], object] = lambda address, arrivals: None,
        on_members: Callable[[Collection[str]], object] = lambda addresses: None,
        on_moved: Callable[[], object] = lambda: None,
        resolver: Resolver | None = None,
    ) -> None:
        """
        Args:
            targets: Addresses of schedulers, and names that stand for several, as `--schedulers` has them.
            on_tokens: Is called with the address of a replica and the tokens that a batch of its events brought.
            on_members: Is called with the addresses of all replicas when there are others than before.
            long_prompt: The uncached tokens from which on a prompt goes to replicas for prefill.
            on_moved: Is called when a request left a replica for prefill.
            resolver: Gives the addresses of names; by default the system does.
        """
        self._ledger = ledger
        self._on_tokens = on_tokens
        self._architecture = architecture
        self._model = model
        self._connect_timeout_s = connect_timeout_s
        self._failover_delay_s = failover_delay_s
        self._router = Router(routing, long_prompt)
        self._on_members = on_members
        self._on_moved = on_moved
        open_link = partial(
            SchedulerLink,
            gateway_id=gateway_id,
            grace_period_ms=round(reconnect_grace_s * 1000),
            model=model,
            listener=self,
            wants_cache_updates=routing is RoutingPolicy.CACHE and may_be_several(targets),
            tls=tls,
        )
        self._members = Members(targets, open_link, self, resolver or Resolver())
        self.links = self._members.links
        self.calls = SchedulerCalls(self.links)
        self._offers = Offers(self.links, self._takers, lambda live, takers: self._choose(live, takers).replica)
        # Set while at least one scheduler is connected.
        self._some_connected = asyncio.Event()
        # Set while at least one replica is ready, and while none is.
        self._some_ready = asyncio.Event()
        self._none_ready = asyncio.Event()
        self._none_ready.set()
        # At most one timer a request, by handle.
        self._timers: dict[int, asyncio.TimerHandle] = {}
        # The handles of the requests on each replica.
        self._placed = defaultdict[str, set[int]](set)
        self._work = defaultdict[str, Work](Work)
        # Those of them whose callers said how long they will be, by handle.
        self._hinted = defaultdict[str, dict[int, LiveRequest]](dict)
        # Durable requests that were released while their scheduler was away, by handle, with that scheduler's epoch.
        self._unended = defaultdict[str, dict[int, tuple[LiveRequest, int]]](dict)
        # Addresses of schedulers that refuse new requests until they end, and of those that refuse all.
        self._draining: set[str] = set()
        self._refusing: set[str] = set()

    @property
    def is_ready(self) -> bool:
        """Whether a connected replica runs steps now. Requests are placed on connected ones in any case."""
        return self._some_ready.is_set()

    @property
    def num_connected(self) -> int:
        return sum(link.is_connected for link in list(self.links.values()))

    @property
    def num_unplaced(self) -> int:
        """Requests that wait until a replica takes them."""
        return sum(1 for _ in self._waiting())

    @property
    def welcomes(self) -> list[Welcome]:
        """The properties of the connected replicas; if there are none, the last known ones."""
        known = [link for link in self.links.values() if link.welcome is not None]
        live = [link for link in known if link.is_connected]
        return [link.welcome for link in live or known if link.welcome is not None]

    @property
    def durable_grace_s(self) -> float:
        """The time that schedulers keep durable requests without a reader."""
        return max((welcome.durable_grace_s for welcome in self.welcomes), default=0.0)

    async def wait_until_ready(self) -> None:
        await self._some_ready.wait()

    async def wait_until_not_ready(self) -> None:
        """Waits until no replica is ready."""
        await self._none_ready.wait()

    async def wait_until_known(self, patience_s: float) -> list[Welcome]:
        """The welcomes, at once if a scheduler was ever reached, else after a wait for the first one.

        Raises:
            Unavailable: no scheduler was reached in that time.
        """
        if not self.welcomes:
            try:
                async with asyncio.timeout(patience_s):
                    await self._some_connected.wait()
            except TimeoutError:
                raise self._nobody(f"no scheduler was reached within {patience_s:g} s, nor before") from None
        return self.welcomes

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """The names of adapters that requests generate with, and of those whose requests have generated nothing yet."""
        named = {live.request.adapter.name: False for live in self._ledger if live.request.adapter is not None}
        for live in self._ledger:
            if live.request.adapter is not None and live.num_generated_tokens:
                named[live.request.adapter.name] = True
        return [name for name, runs in named.items() if runs], [name for name, runs in named.items() if not runs]

    def place(self, live: LiveRequest) -> None:
        """Sends a request to a replica, or keeps it until there is one."""
        candidates = self._candidates(live)
        if not candidates:
            others = self._taking()
            if fitting := next((link for link in others if not live.fits(link.model)), None):
                live.fail(_model_changed(live, fitting.model))
            elif others:
                live.fail(adapters_are_off())
            else:
                self._wait_for_scheduler(live)
            return
        self._place_on(live, candidates)

    def _place_on(self, live: LiveRequest, candidates: Mapping[str, SchedulerLink]) -> None:
        if len(candidates) == 1:
            (link,) = candidates.values()
            self._submit(live, link)
            return
        chosen = self._choose(live, candidates)
        link = candidates[chosen.replica]
        if not live.num_generated_tokens and chosen.num_new_tokens >= self._router.long_prompt:
            self._clear_for_prompt(link)
        self._submit(live, link, chosen.num_new_tokens)

    def _choose(self, live: LiveRequest, candidates: Mapping[str, SchedulerLink]) -> Choice:
        loads = self._loads(candidates)
        choices = {
            address: Candidate(
                loads[address],
                link.welcome.block_size,
                link.cached,
                link.welcome.role,
                self._work[address],
            )
            for address, link in candidates.items()
            if link.welcome is not None
        }
        request = live.request
        digest = None if request.adapter is None else request.adapter.digest
        return self._router.choose(
            request.prompt_token_ids, request.tenant, choices, digest, request.cache_salt, _stage_of(live)
        )

    def _loads(self, addresses: Iterable[str]) -> dict[str, float]:
        num_live = {address: len(self._placed[address]) for address in addresses}
        expected = {
            address: [live.num_expected_tokens or 1 for live in self._hinted[address].values()] for address in num_live
        }
        return loads_of(num_live, expected)

    def _clear_for_prompt(self, link: SchedulerLink) -> None:
        """Streams leave a replica for prefill before a long prompt comes."""
        if _role_of(link) is ReplicaRole.PREFILL and self._work[link.address].streams:
            for live in self._ledger.of_replica(link.address):
                if self._may_leave(live, link) and self._others_for_streams(live, link):
                    self._offers.open(live, link)

    def _leave_prefill(self, live: LiveRequest, link: SchedulerLink) -> None:
        """A request got its first token: if its prompt was long, it goes on where prompts do not delay its tokens,
        unless there are more streams there and no prompts here."""
        work = self._work[link.address]
        is_long = work.prompts.get(live.handle, 0) >= self._router.long_prompt
        work.remove(live.handle)
        if is_long and _role_of(link) is ReplicaRole.PREFILL and self._may_leave(live, link):
            others = self._others_for_streams(live, link)
            if others and not has_room(work, [self._work[other.address] for other in others]):
                self._offers.open(live, link)
        work.add_stream(live.handle)

    def _may_leave(self, live: LiveRequest, link: SchedulerLink) -> bool:
        num_left = live.max_generated_tokens - live.num_generated_tokens
        is_running = not live.is_over and bool(live.num_generated_tokens) and num_left >= _MIN_TOKENS_TO_MOVE
        return is_running and link.is_connected and live.replica == link.address and _stage_of(live) is not Stage.STAY

    def _others_for_streams(self, live: LiveRequest, link: SchedulerLink) -> list[SchedulerLink]:
        """The replicas that run steps, are not for prefill, and can fetch the request's blocks from where it is."""
        namespace = "" if link.welcome is None else link.welcome.kv_namespace
        return [
            other
            for other in self._candidates(live).values()
            if other.is_ready and _role_of(other) is not ReplicaRole.PREFILL
            if namespace and other.welcome is not None and other.welcome.kv_namespace == namespace
        ]

    def _takers(self, live: LiveRequest, link: SchedulerLink) -> dict[str, SchedulerLink]:
        """The replicas where a request may go on that is to leave this one."""
        if link.is_draining:
            return {address: other for address, other in self._candidates(live).items() if other.is_ready}
        return {other.address: other for other in self._others_for_streams(live, link)}

    def release(self, live: LiveRequest) -> None:
        """Ends a request at its scheduler; if its stream is broken, when it is back. Idempotent."""
        self._cancel_timer(live)
        link = self._link_of(live)
        if link is None:
            return
        if link.is_connected:
            link.withdraw(live)
        elif live.request.durable and link.welcome is not None:
            # A plain request ends by not being submitted again; the scheduler keeps a durable one for its next reader.
            unended = self._unended[link.address]
            unended[live.handle] = (live, link.welcome.scheduler_epoch)
            asyncio.get_running_loop().call_later(self.durable_grace_s, unended.pop, live.handle, None)
        self._assign(live, None)

    def detach(self, live: LiveRequest) -> None:
        """Its client is gone: a durable request that is not completed runs on for a while, another ends. Idempotent."""
        link = self._link_of(live)
        if not live.request.durable or live.is_completed or link is None:
            self.release(live)
            return
        self._cancel_timer(live)
        link.detach(live.handle)
        self._assign(live, None)

    def resume(self, live: LiveRequest, address: str) -> None:
        """Takes over a durable request from a replica. Raises Unavailable if its stream is broken by now."""
        link = self.links.get(address)
        if link is None or not link.is_connected:
            raise Unavailable(f"scheduler {address} is not connected", reason="NO_SCHEDULER")
        self._assign(live, address)
        self._note_model(live, link)
        live.submissions += 1
        link.resume(live)
        if not link.is_ready:
            self._wait_for_worker(live)

    def hand_over(self, earlier: LiveRequest, live: LiveRequest) -> None:
        """Continues a request by another entry of it, which has all that the earlier one has."""
        link = self._link_of(earlier)
        self._forget(earlier)
        if live.is_over:
            return
        live.is_heir = True
        if link is None:
            self.place(live)
        elif link.is_connected:
            self._submit(live, link)
            if not link.is_ready:
                self._wait_for_worker(live)
        else:
            self._assign(live, link.address)
            self._set_timer(live, self._failover_delay_s, self._fail_over)

    async def flush(self) -> None:
        """Waits until aborts are on their way."""
        await asyncio.gather(*(link.flush() for link in self.links.values()))

    async def run(self) -> None:
        """Keeps the streams open; ends only by cancellation."""
        await self._members.run()

    @property
    def problems(self) -> list[str]:
        """Why streams are not open, or names of schedulers cannot be resolved."""
        return self._members.problems

    # Callbacks of the members.

    def is_idle(self, address: str) -> bool:
        return not self._placed[address] and not self._unended[address]

    def on_found(self, address: str) -> None:
        self._on_members(self.links.keys())

    def on_gone(self, address: str) -> None:
        """Its requests need not wait for it."""
        self._unended.pop(address, None)
        self._draining.discard(address)
        self._refusing.discard(address)
        left = [live for live in self._ledger if live.replica == address]
        self._for_each(left, self._forget)
        self._for_each((live for live in left if not live.is_over), self.place)
        self._placed.pop(address, None)
        self._work.pop(address, None)
        self._hinted.pop(address, None)
        self._update_readiness()
        self._on_members(self.links.keys())

    # Callbacks of the links.

    def check_welcome(self, welcome: Welcome) -> None:
        if welcome.vocab_size < 1 or welcome.block_size < 1 or welcome.max_model_len < 2:
            raise SchedulerRefusedError(f"its welcome is invalid: {welcome}")
        if welcome.architecture != self._architecture:
            raise SchedulerRefusedError(
                f"it serves {welcome.architecture}, but this gateway's model directory has {self._architecture}"
            )
        us, them = "this gateway", "the scheduler"
        try:
            check_protocol("quire.scheduler.v1", compatibility.SCHEDULER_PROTOCOL, welcome.protocol, us=us, them=them)
            check_model(self._model, welcome.model, us=us, them=f"the worker of {them}")
        except FailedPrecondition as error:
            raise SchedulerRefusedError(str(error)) from error

    def on_connected(self, link: SchedulerLink) -> None:
        _logger.info("connected to scheduler %s", link.address)
        self._some_connected.set()
        self._draining.discard(link.address)
        self._refusing.discard(link.address)
        self._update_readiness()
        failpoint("gateway.connected.before_resubmit")
        # First, since a new request may have the id of one that ends.
        self._end_released(link)
        self._for_each(self._ledger.of_replica(link.address), lambda live: self._submit(live, link))
        self._for_each(self._waiting(), self.place)
        self._release_draining()
        self._watch_unready()

    def on_disconnected(self, link: SchedulerLink) -> None:
        if not self.num_connected:
            self._some_connected.clear()
        self._update_readiness()
        self._offers.lost(link.address)
        self._for_each((live for live in self._ledger if live.replica == link.address), self._outlive_scheduler)
        self._for_each(self._waiting(), self._wait_for_scheduler)
        self._members.lost(link.address)

    def on_readiness(self, link: SchedulerLink) -> None:
        state = "runs again" if link.is_ready else "lost its worker, or drains"
        _logger.info("scheduler %s %s", link.address, state)
        self._update_readiness()
        if link.is_ready:
            for live in self._ledger.of_replica(link.address):
                self._cancel_timer(live)
        if link.is_draining:
            self._draining.add(link.address)
            self._offers.drains(link.address)
        self._release_draining()
        self._watch_unready()

    def _release_draining(self) -> None:
        """Requests leave replicas that drain, where others can go on with them: first those that have no tokens, which
        may not have begun. To be called whenever either changes."""
        for link in self.links.values():
            if not (link.is_connected and link.is_draining):
                continue
            for live in sorted(self._ledger.of_replica(link.address), key=lambda live: live.num_generated_tokens > 0):
                if _stage_of(live) is not Stage.STAY and self._takers(live, link):
                    self._offers.open(live, link, link.leave_after_s or _LEAVE_AFTER_S)

    def on_events(self, link: SchedulerLink, batch: EventBatch) -> None:
        outcome = self._ledger.apply(link.address, batch)
        if outcome.arrivals.num_tokens:
            self._on_tokens(link.address, outcome.arrivals)
        for live in outcome.ended_here:
            link.abort(live.handle, wants_usage=True)
            self._set_timer(live, _USAGE_TIMEOUT_S, self._end_if_complete)
        for live, index in outcome.sequences_ended_here:
            link.abort(live.handle, index, wants_usage=True)
        for live, error in outcome.failed:
            self._for_each([live], partial(self._refused, link, error))
        if _role_of(link) is ReplicaRole.PREFILL and not link.is_draining:
            for _ in outcome.moved:
                self._on_moved()
        self._for_each(outcome.moved, self._go_on)
        for handle in batch.has_room:
            self._offers.has_room(link, handle)
        for failure in batch.failed:
            self._offers.refused(link.address, failure.handle)
        for live in outcome.over:
            self._forget(live)
        for live in outcome.broken:
            self.release(live)
        self._for_each(outcome.begun, partial(self._begin, link))
        for handle in outcome.unknown_handles:
            link.abort(handle)

    def _go_on(self, live: LiveRequest) -> None:
        """The request was released: it goes to the replica that keeps room for it, also if that drains by now."""
        self._cancel_timer(live)
        taker = self.links.get(self._offers.taker(live) or "")
        if taker is not None and (taker.address in self._candidates(live) or self._takes_back(live, taker)):
            self._submit(live, taker)
        else:
            self._forget(live)
            self.place(live)

    def _begin(self, link: SchedulerLink, live: LiveRequest) -> None:
        if live.replica == link.address:
            self._leave_prefill(live, link)

    def on_not_sent(self, live: LiveRequest, error: Exception) -> None:
        self._fail_unexpectedly(live, error)

    # Requests move between replicas.

    def _waiting(self) -> Iterable[LiveRequest]:
        """Requests that have no replica and need one."""
        return (live for live in self._ledger if live.replica is None and live.is_prepared and not live.is_over)

    def _taking(self) -> list[SchedulerLink]:
        """The replicas that take new requests."""
        taking = [link for link in self.links.values() if link.is_connected and link.address not in self._draining]
        return [link for link in taking if self._members.is_listed(link.address)] or taking

    def _candidates(self, live: LiveRequest) -> dict[str, SchedulerLink]:
        """The replicas that may get a request: those that run steps, else those that let it wait. Where there are
        none, one that was accepted before may go to those that drain, to the one that had it last if possible."""
        fitting = {link.address: link for link in self._taking() if _fits(live, link)}
        if not fitting:
            fitting = {link.address: link for link in self.links.values() if self._takes_back(live, link)}
            if live.last_replica in fitting:
                return {live.last_replica: fitting[live.last_replica]}
        return {address: link for address, link in fitting.items() if link.is_ready} or fitting

    def _takes_back(self, live: LiveRequest, link: SchedulerLink) -> bool:
        """Whether a replica drains and runs the request all the same, where no other one does."""
        drains = link.is_connected and link.is_draining and link.address not in self._refusing
        return drains and live.submissions > 0 and _fits(live, link)

    def _submit(self, live: LiveRequest, link: SchedulerLink, num_new_tokens: int | None = None) -> None:
        """`num_new_tokens` of its prompt are not cached there, None: all."""
        self._cancel_timer(live)
        if not _fits(live, link):
            # The scheduler came back with another model, or without adapters.
            self._assign(live, None)
            self.place(live)
            return
        self._assign(live, link.address, num_new_tokens)
        self._note_model(live, link)
        live.submissions += 1
        failpoint("gateway.submit.before_send")
        link.submit(live)

    def _note_model(self, live: LiveRequest, link: SchedulerLink) -> None:
        if not live.num_generated_tokens:
            live.begin_with(link.model)
        elif live.model == UNKNOWN_MODEL:
            live.model = link.model

    def _assign(self, live: LiveRequest, replica: str | None, num_new_tokens: int | None = None) -> None:
        self._offers.close(live, taken_by=replica)
        if live.replica in self._placed:
            self._placed[live.replica].discard(live.handle)
            self._hinted[live.replica].pop(live.handle, None)
            self._work[live.replica].remove(live.handle)
        if replica is not None:
            self._placed[replica].add(live.handle)
            if live.request.expected_tokens is not None:
                self._hinted[replica][live.handle] = live
            live.last_replica = replica
            if live.num_generated_tokens:
                self._work[replica].add_stream(live.handle)
            else:
                num_tokens = len(live.request.prompt_token_ids) if num_new_tokens is None else num_new_tokens
                self._work[replica].add_prompt(live.handle, num_tokens)
        live.replica = replica

    def _link_of(self, live: LiveRequest) -> SchedulerLink | None:
        """The link to the replica that has the request; None where none has it, or it is gone for good."""
        return None if live.replica is None else self.links.get(live.replica)

    def _forget(self, live: LiveRequest) -> None:
        """No scheduler runs the request any more, though its client may still read it."""
        self._cancel_timer(live)
        self._assign(live, None)

    def _end_released(self, link: SchedulerLink) -> None:
        """Ends durable requests that were released while their scheduler was away. A submission names the request
        exactly, and makes this stream its reader, who may abort it. A new scheduler does not have them."""
        assert link.welcome is not None
        for live, epoch in self._unended[link.address].values():
            if are_of_one_start(epoch, link.welcome.scheduler_epoch):
                live.submissions += 1
                link.submit(live)
                link.abort(live.handle)
        self._unended[link.address].clear()

    def _end_if_complete(self, live: LiveRequest) -> None:
        live.end_if_complete()
        if live.is_over:
            self._forget(live)

    def _outlive_scheduler(self, live: LiveRequest) -> None:
        """Ends a request whose end its lost scheduler had yet to report; another one waits for it for a while."""
        self._end_if_complete(live)
        if not live.is_over:
            self._set_timer(live, self._failover_delay_s, self._fail_over)

    def _refused(self, link: SchedulerLink, error: QuireError, live: LiveRequest) -> None:
        """A new request fails; one that ran before comes back later, since it was accepted once. A refusal because the
        scheduler drains sends a request to another one, or to its successor."""
        self._assign(live, None)
        if isinstance(error, Unavailable) and error.reason == "DRAINING":
            live.submissions -= 1
            self._draining.add(link.address)
            if live.submissions:
                # Schedulers of earlier releases take nothing back.
                self._refusing.add(link.address)
            self.place(live)
        elif error.reason == "REQUEST_TAKEN_OVER" and live.is_heir:
            # The call here is newer than the one that took it over.
            live.is_heir = False
            self.resume(live, link.address)
        elif error.reason == "MODEL_CHANGED":
            if _is_known(link, error):
                # The end of a request that was resumed after it, or submitted again: it would be told again.
                others = {at: other for at, other in self._candidates(live).items() if other is not link}
            else:
                # It takes nothing new until it is connected again, with a welcome that names its new model.
                self._draining.add(link.address)
                others = self._candidates(live)
            if others and not live.is_behind_client:
                self._place_on(live, others)
            else:
                self._fail(live, error)
        elif live.submissions > 1 and isinstance(error, ResourceExhausted | Unavailable):
            self._set_timer(live, self._retry_delay_s(error), self.place)
        else:
            self._fail(live, error)

    def _fail(self, live: LiveRequest, error: QuireError) -> None:
        """No scheduler runs it. Its client may read that later."""
        self._forget(live)
        live.fail(error)

    def _retry_delay_s(self, error: QuireError) -> float:
        """The scheduler names the time until one place is free. Requests that wait for one come back spread over as
        many such times as there are requests."""
        one_s = (error.retry_after_ms or _DEFAULT_RETRY_MS) / 1000
        return entropy.uniform(one_s, max(one_s, min(one_s * (1 + len(self._timers)), _MAX_RETRY_S)))

    def _fail_over(self, live: LiveRequest) -> None:
        self._assign(live, None)
        self.place(live)

    def _watch_unready(self) -> None:
        """Sets the timers of requests on schedulers that run no steps. Requests whose timer fired when no other replica
        was ready get a new one: something has changed since."""
        for link in self.links.values():
            if link.is_connected and not link.is_ready:
                for live in self._ledger.of_replica(link.address):
                    if live.handle not in self._timers:
                        self._wait_for_worker(live)

    def _wait_for_worker(self, live: LiveRequest) -> None:
        patience_s = self._failover_delay_s * 4 ** min(live.moves, _MAX_COUNTED_MOVES)
        self._set_timer(live, patience_s, self._move_from_unready)

    def _move_from_unready(self, live: LiveRequest) -> None:
        """Moves a request to a replica that runs steps, if there is one, unless tokens come from where it is."""
        left_s = self._failover_delay_s - live.seconds_since_news
        if left_s > 0:
            self._set_timer(live, left_s, self._move_from_unready)
        else:
            # A second look: tokens may wait to be read where this process stood still.
            self._set_timer(live, LAST_LOOK_S, self._leave_unready)

    def _leave_unready(self, live: LiveRequest) -> None:
        if live.is_over or not any(link.is_ready for link in self._candidates(live).values()):
            return
        if live.seconds_since_news < self._failover_delay_s:
            self._move_from_unready(live)
        else:
            live.moves += 1
            # A durable one, too: a copy that ran on there might draw other tokens than the one that is read.
            self.release(live)
            self.place(live)

    def _wait_for_scheduler(self, live: LiveRequest) -> None:
        if not self._taking():
            self._set_timer(live, self._connect_timeout_s, self._give_up)

    def _give_up(self, live: LiveRequest) -> None:
        connected = [link for link in self.links.values() if link.is_connected]
        if any(self._placed[link.address] or link.is_busy for link in connected):
            self._wait_for_scheduler(live)
        elif connected:
            addresses = ", ".join(link.address for link in connected)
            message = f"no scheduler took requests for {self._connect_timeout_s:g} s: {addresses} drained"
            live.fail(self._nobody(f"{message}; a start anew ends that"))
        else:
            live.fail(self._nobody(f"no scheduler could be reached for {self._connect_timeout_s:g} s"))

    def _nobody(self, message: str) -> Unavailable:
        """The error where no scheduler is connected; it says how far the first one is whose workers load."""
        loading = next((link.loading for link in self.links.values() if link.loading is not None), None)
        if loading is None:
            return Unavailable(message, reason="NO_SCHEDULER")
        message = f"{message}; the model is being loaded: {loading}"
        return Unavailable(message, reason="NO_SCHEDULER", metadata=loading.metadata())

    def _set_timer(self, live: LiveRequest, delay_s: float, action: Callable[[LiveRequest], None]) -> None:
        """Calls `action` with the request after that time, in place of an earlier timer."""
        self._cancel_timer(live)
        self._timers[live.handle] = asyncio.get_running_loop().call_later(delay_s, self._fire, live, action)

    def _cancel_timer(self, live: LiveRequest) -> None:
        if (timer := self._timers.pop(live.handle, None)) is not None:
            timer.cancel()

    def _fire(self, live: LiveRequest, action: Callable[[LiveRequest], None]) -> None:
        del self._timers[live.handle]
        self._for_each([live], action)

    def _for_each(self, requests: Iterable[LiveRequest], action: Callable[[LiveRequest], None]) -> None:
        """An error in one request does not affect the others."""
        for live in requests:
            try:
                action(live)
            except Exception as error:
                self._fail_unexpectedly(live, error)

    def _fail_unexpectedly(self, live: LiveRequest, error: Exception) -> None:
        live.fail_unexpectedly(error)
        self.release(live)

    def _update_readiness(self) -> None:
        set_event, cleared = self._some_ready, self._none_ready
        if not any(link.is_ready for link in self.links.values()):
            set_event, cleared = cleared, set_event
        set_event.set()
        cleared.clear()


def _is_known(link: SchedulerLink, changed: QuireError) -> bool:
    """Whether the welcome of the stream has the model already that a request failed for: then the stream goes on."""
    epoch = changed.metadata.get("scheduler_epoch")
    return epoch is not None and link.welcome is not None and link.welcome.scheduler_epoch >= int(epoch)


def _fits(live: LiveRequest, link: SchedulerLink) -> bool:
    """Whether the request can run there. A scheduler of an earlier release would ignore its adapter,
    and its salt."""
    has_adapter = live.request.adapter is not None
    takes_it = not has_adapter or (link.welcome is not None and link.welcome.max_adapters > 0)
    if live.request.cache_salt:
        takes_it = takes_it and link.welcome is not None and link.welcome.takes_cache_salts
    return takes_it and live.fits(link.model)


def _role_of(link: SchedulerLink) -> ReplicaRole:
    return ReplicaRole.BOTH if link.welcome is None else link.welcome.role


def _stage_of(live: LiveRequest) -> Stage:
    """A beam search, or a choice of the best of several, goes nowhere else before its end."""
    if live.request.chooses:
        return Stage.STAY
    return Stage.STREAM if live.num_generated_tokens else Stage.PROMPT


def adapters_are_off() -> FailedPrecondition:
    """The error where no worker takes adapters."""
    return FailedPrecondition(
        "the workers run no adapters: start them with --max-adapters above 0", reason="ADAPTERS_OFF"
    )


def _model_changed(live: LiveRequest, model: ModelFingerprint) -> Unavailable:
    parts = ", ".join(differing_parts(live.model, model))
    return Unavailable(
        f"the replicas have another model than the one that this request began with (before and now: {parts}); it "
        "cannot go on: send it again",
        reason="MODEL_CHANGED",
    )
