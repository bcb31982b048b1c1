"""The replicas of the model: places requests on them, and moves requests when schedulers fail, drain or return."""

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
from quire.messages.replica_role import ReplicaRole
from quire.rpc.errors import FailedPrecondition, QuireError, ResourceExhausted, Unavailable
from quire.rpc.patience import LAST_LOOK_S
from quire.rpc.tls import TlsIdentity
from quire.runtime import entropy
from quire.runtime.failpoint import failpoint
from quire.service import compatibility
from quire.service.compatibility import (
    UNKNOWN_MODEL,
    ModelFingerprint,
    are_of_one_start,
    check_model,
    check_protocol,
    differing_parts,
)

_DEFAULT_RETRY_MS = 100
_MAX_RETRY_S = 5.0
# Each move makes a request wait four times longer before the next move, up to this number of moves.
_MAX_COUNTED_MOVES = 3
# The wait for the answer to an abort. Without the answer, the usage lacks the values that only the scheduler has.
_USAGE_TIMEOUT_S = 1.0
# The time after which requests leave a draining replica that does not announce a time.
_LEAVE_AFTER_S = 15.0
# A request with fewer tokens to come is not worth a move.
_MIN_TOKENS_TO_MOVE = 16
_logger = logging.getLogger(__name__)


class Replicas:
    """Places live requests on replicas and keeps them running while schedulers come and go.

    - A request whose scheduler disconnects stays assigned to it for `failover_delay_s`, since the scheduler may return
      with its KV blocks; then the request moves to any connected replica.
    - If no replica takes requests, a request waits, and fails with UNAVAILABLE after `connect_timeout_s`. It waits
      longer while a draining scheduler still runs requests, because its successor starts after it exits.
    - If its scheduler is connected but not ready, a request moves after `failover_delay_s`, if another replica is ready
      and no tokens come. The wait grows with each further move without a token in between: the request may be the one
      that crashes the workers, and one scheduler must see several crashes to detect it.
    - A request that a draining scheduler rejects is placed on another one. A request that it runs moves to another
      ready replica as soon as that has room (see `offers`). If all replicas drain, a request that was accepted before
      may run on one of them, preferably the last one that had it.
    - A request with a long prompt leaves a prefill replica in the same way, after its first token (see `roles`).
    - A replica that is no longer in the answers for a DNS name is removed (see `members`).

    Attributes:
        links: The stream to each scheduler, by address. They change with the answers for DNS names.
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
            targets: The value of `--schedulers`: addresses of schedulers, and DNS names of several schedulers.
            on_tokens: Called with the address of a replica and the new tokens in a batch of its events.
            on_members: Called with the addresses of all replicas when the set changes.
            long_prompt: The number of uncached tokens from which a prompt goes to prefill replicas.
            on_moved: Called when a request has left a prefill replica.
            resolver: Resolves names; by default with the system's resolver.
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
        # Set while at least one replica is ready, and while no replica is ready.
        self._some_ready = asyncio.Event()
        self._none_ready = asyncio.Event()
        self._none_ready.set()
        # At most one timer per request, by handle.
        self._timers: dict[int, asyncio.TimerHandle] = {}
        # The handles of the requests on each replica.
        self._placed = defaultdict[str, set[int]](set)
        self._work = defaultdict[str, Work](Work)
        # Requests on each replica whose callers gave an expected length, by handle.
        self._hinted = defaultdict[str, dict[int, LiveRequest]](dict)
        # Durable requests that were released while their scheduler was disconnected, by handle, with its epoch.
        self._unended = defaultdict[str, dict[int, tuple[LiveRequest, int]]](dict)
        # Addresses of schedulers that reject new requests until they exit, and of schedulers that reject all requests.
        self._draining: set[str] = set()
        self._refusing: set[str] = set()

    @property
    def is_ready(self) -> bool:
        """Whether a connected replica runs steps now. Requests are placed on connected replicas in any case."""
        return self._some_ready.is_set()

    @property
    def num_connected(self) -> int:
        return sum(link.is_connected for link in list(self.links.values()))

    @property
    def num_unplaced(self) -> int:
        """The number of requests that wait for a replica."""
        return sum(1 for _ in self._waiting())

    @property
    def welcomes(self) -> list[Welcome]:
        """The properties of the connected replicas; if there are none, the last known ones."""
        known = [link for link in self.links.values() if link.welcome is not None]
        live = [link for link in known if link.is_connected]
        return [link.welcome for link in live or known if link.welcome is not None]

    @property
    def durable_grace_s(self) -> float:
        """Seconds for which schedulers keep durable requests without a reader."""
        return max((welcome.durable_grace_s for welcome in self.welcomes), default=0.0)

    async def wait_until_ready(self) -> None:
        await self._some_ready.wait()

    async def wait_until_not_ready(self) -> None:
        """Waits until no replica is ready."""
        await self._none_ready.wait()

    async def wait_until_known(self, patience_s: float) -> list[Welcome]:
        """The welcomes, at once if a scheduler was ever reached, else as soon as the first scheduler is reached.

        Raises:
            Unavailable: no scheduler was reached within `patience_s`.
        """
        if not self.welcomes:
            try:
                async with asyncio.timeout(patience_s):
                    await self._some_connected.wait()
            except TimeoutError:
                raise self._nobody(f"no scheduler was reached within {patience_s:g} s, nor before") from None
        return self.welcomes

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Names of adapters with a request that has generated tokens, and of other adapters that requests wait for."""
        named = {live.request.adapter.name: False for live in self._ledger if live.request.adapter is not None}
        for live in self._ledger:
            if live.request.adapter is not None and live.num_generated_tokens:
                named[live.request.adapter.name] = True
        return [name for name, runs in named.items() if runs], [name for name, runs in named.items() if not runs]

    def place(self, live: LiveRequest) -> None:
        """Sends a request to a replica, or queues it until a replica is available."""
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
        """Moves streams away from a prefill replica that is about to get a long prompt."""
        if _role_of(link) is ReplicaRole.PREFILL and self._work[link.address].streams:
            for live in self._ledger.of_replica(link.address):
                if self._may_leave(live, link) and self._others_for_streams(live, link):
                    self._offers.open(live, link)

    def _leave_prefill(self, live: LiveRequest, link: SchedulerLink) -> None:
        """Handles the first token of a request. If its prompt was long, the request leaves a prefill replica, whose
        prompts would delay its tokens, unless the other replicas have more streams and this one has no prompts."""
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
        """The ready replicas, except prefill replicas, that can fetch the request's KV blocks from its replica."""
        namespace = "" if link.welcome is None else link.welcome.kv_namespace
        return [
            other
            for other in self._candidates(live).values()
            if other.is_ready and _role_of(other) is not ReplicaRole.PREFILL
            if namespace and other.welcome is not None and other.welcome.kv_namespace == namespace
        ]

    def _takers(self, live: LiveRequest, link: SchedulerLink) -> dict[str, SchedulerLink]:
        """The replicas to which a request may move from this one."""
        if link.is_draining:
            return {address: other for address, other in self._candidates(live).items() if other.is_ready}
        return {other.address: other for other in self._others_for_streams(live, link)}

    def release(self, live: LiveRequest) -> None:
        """Ends a request at its scheduler, or if that is disconnected, after it reconnects. Idempotent."""
        self._cancel_timer(live)
        link = self._link_of(live)
        if link is None:
            return
        if link.is_connected:
            link.withdraw(live)
        elif live.request.durable and link.welcome is not None:
            # The scheduler ends a plain request that is not resubmitted, but keeps a durable one for its next reader.
            unended = self._unended[link.address]
            unended[live.handle] = (live, link.welcome.scheduler_epoch)
            asyncio.get_running_loop().call_later(self.durable_grace_s, unended.pop, live.handle, None)
        self._assign(live, None)

    def detach(self, live: LiveRequest) -> None:
        """Handles the loss of a request's client: a durable request runs on for a while, others end. Idempotent."""
        link = self._link_of(live)
        if not live.request.durable or live.is_completed or link is None:
            self.release(live)
            return
        self._cancel_timer(live)
        link.detach(live.handle)
        self._assign(live, None)

    def resume(self, live: LiveRequest, address: str) -> None:
        """Takes over a durable request from a replica. Raises Unavailable if the replica is disconnected."""
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
        """Continues a request with another entry, which has all tokens of the earlier one."""
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
        """Waits until queued messages, such as aborts, are written."""
        await asyncio.gather(*(link.flush() for link in self.links.values()))

    async def run(self) -> None:
        """Keeps the streams open until cancelled."""
        await self._members.run()

    @property
    def problems(self) -> list[str]:
        """Reasons why streams are not open, or names of schedulers cannot be resolved."""
        return self._members.problems

    # Callbacks of the members.

    def is_idle(self, address: str) -> bool:
        return not self._placed[address] and not self._unended[address]

    def on_found(self, address: str) -> None:
        self._on_members(self.links.keys())

    def on_gone(self, address: str) -> None:
        """Places the requests of a removed replica anew, without a delay."""
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
        # Before new submissions, since a new request may have the id of a released one.
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
        """Moves requests away from draining replicas if others can continue them; requests without tokens go first,
        since they may not have started. Must be called whenever a replica starts to drain or becomes available."""
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
        """Submits a released request to the replica that has reserved room for it, even if that has begun to drain."""
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

    # Placement of requests, and moves between replicas.

    def _waiting(self) -> Iterable[LiveRequest]:
        """Requests that wait for a replica."""
        return (live for live in self._ledger if live.replica is None and live.is_prepared and not live.is_over)

    def _taking(self) -> list[SchedulerLink]:
        """The replicas that take new requests."""
        taking = [link for link in self.links.values() if link.is_connected and link.address not in self._draining]
        return [link for link in taking if self._members.is_listed(link.address)] or taking

    def _candidates(self, live: LiveRequest) -> dict[str, SchedulerLink]:
        """The replicas that may get a request: ready replicas, else connected ones, which queue it. If there are none,
        a request that was accepted before may go to a draining replica, preferably the last one that had it."""
        fitting = {link.address: link for link in self._taking() if _fits(live, link)}
        if not fitting:
            fitting = {link.address: link for link in self.links.values() if self._takes_back(live, link)}
            if live.last_replica in fitting:
                return {live.last_replica: fitting[live.last_replica]}
        return {address: link for address, link in fitting.items() if link.is_ready} or fitting

    def _takes_back(self, live: LiveRequest, link: SchedulerLink) -> bool:
        """Whether a draining replica accepts the request, which was accepted before, in place of the other replicas."""
        drains = link.is_connected and link.is_draining and link.address not in self._refusing
        return drains and live.submissions > 0 and _fits(live, link)

    def _submit(self, live: LiveRequest, link: SchedulerLink, num_new_tokens: int | None = None) -> None:
        """Submits a request to a replica, whose cache lacks `num_new_tokens` of its prompt; None means all of them."""
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
        """The link to the replica that has the request; None if no replica has it, or the replica was removed."""
        return None if live.replica is None else self.links.get(live.replica)

    def _forget(self, live: LiveRequest) -> None:
        """Unassigns a request that no scheduler runs any more, though its client may still read it."""
        self._cancel_timer(live)
        self._assign(live, None)

    def _end_released(self, link: SchedulerLink) -> None:
        """Ends durable requests that were released while their scheduler was disconnected. Each is submitted first, and
        this stream becomes its reader, which may abort it. A restarted scheduler does not have these requests."""
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
        """Ends a request that lacks only the lost scheduler's report; other requests wait for the scheduler."""
        self._end_if_complete(live)
        if not live.is_over:
            self._set_timer(live, self._failover_delay_s, self._fail_over)

    def _refused(self, link: SchedulerLink, error: QuireError, live: LiveRequest) -> None:
        """Handles a rejection. A new request fails; a request that was accepted before is retried later. If the
        scheduler drains, the request goes to another scheduler, or waits for the successor."""
        self._assign(live, None)
        if isinstance(error, Unavailable) and error.reason == "DRAINING":
            live.submissions -= 1
            self._draining.add(link.address)
            if live.submissions:
                # While they drain, schedulers of earlier releases also reject requests that were accepted before.
                self._refusing.add(link.address)
            self.place(live)
        elif error.reason == "REQUEST_TAKEN_OVER" and live.is_heir:
            # The call at this gateway is newer than the call that took the request over.
            live.is_heir = False
            self.resume(live, link.address)
        elif error.reason == "MODEL_CHANGED":
            if _is_known(link, error):
                # The request was resumed or resubmitted after the change of model, and would fail here again.
                others = {at: other for at, other in self._candidates(live).items() if other is not link}
            else:
                # The scheduler gets no new requests until it reconnects, with a welcome that names its new model.
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
        """Fails a request that no scheduler runs. Its client may read the error later."""
        self._forget(live)
        live.fail(error)

    def _retry_delay_s(self, error: QuireError) -> float:
        """A random delay. The scheduler reports the time until one place is free; retries are spread over that time
        multiplied by the number of requests that have timers."""
        one_s = (error.retry_after_ms or _DEFAULT_RETRY_MS) / 1000
        return entropy.uniform(one_s, max(one_s, min(one_s * (1 + len(self._timers)), _MAX_RETRY_S)))

    def _fail_over(self, live: LiveRequest) -> None:
        self._assign(live, None)
        self.place(live)

    def _watch_unready(self) -> None:
        """Sets the timers of requests on schedulers that are not ready. A request whose timer fired while no other
        replica was ready gets a new timer, since the readiness of a replica has changed."""
        for link in self.links.values():
            if link.is_connected and not link.is_ready:
                for live in self._ledger.of_replica(link.address):
                    if live.handle not in self._timers:
                        self._wait_for_worker(live)

    def _wait_for_worker(self, live: LiveRequest) -> None:
        patience_s = self._failover_delay_s * 4 ** min(live.moves, _MAX_COUNTED_MOVES)
        self._set_timer(live, patience_s, self._move_from_unready)

    def _move_from_unready(self, live: LiveRequest) -> None:
        """Moves a request to a ready replica, if there is one, unless its present replica still sends tokens."""
        left_s = self._failover_delay_s - live.seconds_since_news
        if left_s > 0:
            self._set_timer(live, left_s, self._move_from_unready)
        else:
            # Checked once more after a moment: if this process was suspended, tokens may wait to be read.
            self._set_timer(live, LAST_LOOK_S, self._leave_unready)

    def _leave_unready(self, live: LiveRequest) -> None:
        if live.is_over or not any(link.is_ready for link in self._candidates(live).values()):
            return
        if live.seconds_since_news < self._failover_delay_s:
            self._move_from_unready(live)
        else:
            live.moves += 1
            # Also if it is durable: a copy that ran on there might sample other tokens than the one that is read.
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
            live.fail(self._nobody(f"{message}; restart them"))
        else:
            live.fail(self._nobody(f"no scheduler could be reached for {self._connect_timeout_s:g} s"))

    def _nobody(self, message: str) -> Unavailable:
        """The error if no scheduler is available, with the progress of a scheduler whose workers load the model."""
        loading = next((link.loading for link in self.links.values() if link.loading is not None), None)
        if loading is None:
            return Unavailable(message, reason="NO_SCHEDULER")
        message = f"{message}; the model is being loaded: {loading}"
        return Unavailable(message, reason="NO_SCHEDULER", metadata=loading.metadata())

    def _set_timer(self, live: LiveRequest, delay_s: float, action: Callable[[LiveRequest], None]) -> None:
        """Calls `action` with the request after `delay_s`. Replaces an earlier timer."""
        self._cancel_timer(live)
        self._timers[live.handle] = asyncio.get_running_loop().call_later(delay_s, self._fire, live, action)

    def _cancel_timer(self, live: LiveRequest) -> None:
        if (timer := self._timers.pop(live.handle, None)) is not None:
            timer.cancel()

    def _fire(self, live: LiveRequest, action: Callable[[LiveRequest], None]) -> None:
        del self._timers[live.handle]
        self._for_each([live], action)

    def _for_each(self, requests: Iterable[LiveRequest], action: Callable[[LiveRequest], None]) -> None:
        """Calls `action` with each request; an error in one request does not affect the others."""
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
    """Whether the stream's welcome already names the new model, whose change made a request fail."""
    epoch = changed.metadata.get("scheduler_epoch")
    return epoch is not None and link.welcome is not None and link.welcome.scheduler_epoch >= int(epoch)


def _fits(live: LiveRequest, link: SchedulerLink) -> bool:
    """Whether a replica can run the request. Schedulers of earlier releases would ignore its adapter and its salt."""
    has_adapter = live.request.adapter is not None
    takes_it = not has_adapter or (link.welcome is not None and link.welcome.max_adapters > 0)
    if live.request.cache_salt:
        takes_it = takes_it and link.welcome is not None and link.welcome.takes_cache_salts
    return takes_it and live.fits(link.model)


def _role_of(link: SchedulerLink) -> ReplicaRole:
    return ReplicaRole.BOTH if link.welcome is None else link.welcome.role


def _stage_of(live: LiveRequest) -> Stage:
    """The next stage of a request. A request that chooses among candidate sequences does not move before its end."""
    if live.request.chooses:
        return Stage.STAY
    return Stage.STREAM if live.num_generated_tokens else Stage.PROMPT


def adapters_are_off() -> FailedPrecondition:
    """The error if no worker supports adapters."""
    return FailedPrecondition(
        "the workers run no adapters: start them with --max-adapters above 0", reason="ADAPTERS_OFF"
    )


def _model_changed(live: LiveRequest, model: ModelFingerprint) -> Unavailable:
    parts = ", ".join(differing_parts(live.model, model))
    return Unavailable(
        f"the replicas have another model than when this request began (before and now: {parts}); it cannot continue: "
        "send it again",
        reason="MODEL_CHANGED",
    )
