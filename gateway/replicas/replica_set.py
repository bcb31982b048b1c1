"""The replicas of the model: their streams, and what follows from events on them."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

from gateway.replicas.events import EventBatch, Welcome
from gateway.replicas.ledger import Ledger
from gateway.replicas.link import SchedulerLink, SchedulerRefusedError
from gateway.replicas.live import Arrivals, LiveRequest
from gateway.replicas.members import Members, Resolver, may_be_several
from gateway.replicas.offers import Offers
from gateway.replicas.placements import Placements
from gateway.replicas.replica_table import Replica, ReplicaTable
from gateway.replicas.routing import Router, RoutingPolicy
from gateway.replicas.scheduler_calls import SchedulerCalls
from quire.messages.replica_role import ReplicaRole
from quire.rpc.errors import FailedPrecondition
from quire.rpc.tls import TlsIdentity
from quire.runtime.failpoint import failpoint
from quire.service import compatibility
from quire.service.compatibility import ModelFingerprint, check_model, check_protocol

_logger = logging.getLogger(__name__)


class Replicas(ReplicaTable):
    """Keeps a stream to each replica open, and handles the events on it. Requests are placed with `placements`.

    A replica that is no longer in the answers for a DNS name is removed (see `members`). Requests move away from
    draining replicas, and with long prompts from prefill replicas (see `offers`).

    Attributes:
        placements: Places requests on the replicas.
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
        open_link = partial(
            SchedulerLink,
            gateway_id=gateway_id,
            grace_period_ms=round(reconnect_grace_s * 1000),
            model=model,
            listener=self,
            wants_cache_updates=routing is RoutingPolicy.CACHE and may_be_several(targets),
            tls=tls,
        )
        super().__init__(Members(targets, open_link, self, resolver or Resolver()), Router(routing, long_prompt))
        self._ledger = ledger
        self._architecture = architecture
        self._model = model
        self._on_tokens = on_tokens
        self._on_members = on_members
        self._on_moved = on_moved
        self._offers = Offers(self, ledger)
        self.placements = Placements(
            self, self._offers, ledger, connect_timeout_s=connect_timeout_s, failover_delay_s=failover_delay_s
        )
        self.calls = SchedulerCalls(self.links)

    async def run(self) -> None:
        """Keeps the streams open until cancelled."""
        await self._members.run()

    async def flush(self) -> None:
        """Waits until queued messages, such as aborts, are written."""
        await asyncio.gather(*(each.link.flush() for each in self))

    @property
    def problems(self) -> list[str]:
        """Reasons why streams are not open, or names of schedulers cannot be resolved."""
        return self._members.problems

    @property
    def num_unplaced(self) -> int:
        """The number of requests that wait for a replica."""
        return sum(1 for _ in self._ledger.waiting())

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Names of adapters with a request that has generated tokens, and of other adapters that requests wait for."""
        named: dict[str, bool] = {}
        for live in self._ledger:
            if live.request.adapter is not None:
                name = live.request.adapter.name
                named[name] = named.get(name, False) or live.num_generated_tokens > 0
        return [name for name, runs in named.items() if runs], [name for name, runs in named.items() if not runs]

    # Callbacks of the members.

    def is_idle(self, address: str) -> bool:
        return self._replicas[address].is_idle

    def on_found(self, address: str) -> None:
        self._replicas[address] = Replica(self.links[address])
        self._on_members(self.links.keys())

    def on_gone(self, address: str) -> None:
        """Places the requests of a removed replica anew, without a delay."""
        del self._replicas[address]
        left = list(self._ledger.placed_on(address))
        self.placements.for_each(left, self.placements.unassign)
        self.placements.for_each((live for live in left if not live.is_over), self.placements.place)
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
        replica = self._replicas[link.address]
        self._some_connected.set()
        replica.rejects_new = replica.rejects_all = False
        self._update_readiness()
        failpoint("gateway.connected.before_resubmit")
        # Before new submissions, since a new request may have the id of an aborted one.
        replica.send_unsent_aborts()
        running = self._ledger.running_on(link.address)
        self.placements.for_each(running, lambda live: self.placements.submit(live, replica))
        self.placements.for_each(self._ledger.waiting(), self.placements.place)
        self._offers.offer_from_draining()
        self.placements.watch_unready()

    def on_disconnected(self, link: SchedulerLink) -> None:
        if not self.num_connected:
            self._some_connected.clear()
        self._update_readiness()
        self._offers.on_disconnected(link.address)
        self.placements.on_disconnected(link.address)
        self._members.on_disconnected(link.address)

    def on_readiness(self, link: SchedulerLink) -> None:
        state = "runs again" if link.is_ready else "lost its worker, or drains"
        _logger.info("scheduler %s %s", link.address, state)
        self._update_readiness()
        if link.is_ready:
            self.placements.on_ready(link.address)
        if link.is_draining and (replica := self.get(link.address)) is not None:
            replica.rejects_new = True
            self._offers.on_draining(link.address)
        self._offers.offer_from_draining()
        self.placements.watch_unready()

    def on_events(self, link: SchedulerLink, batch: EventBatch) -> None:
        replica, placements = self.get(link.address), self.placements
        if replica is None:
            return
        outcome = self._ledger.apply_events(link.address, batch)
        for live in outcome.arrivals.direct:
            self._write_directly(live)
        if outcome.arrivals.num_tokens:
            self._on_tokens(link.address, outcome.arrivals)
        for live in outcome.ended_here:
            link.abort(live.handle, wants_usage=True)
            placements.await_usage(live)
        for live, index in outcome.sequences_ended_here:
            link.abort(live.handle, index, wants_usage=True)
        for live, error in outcome.failed:
            placements.for_each([live], partial(placements.on_refusal, link, error))
        if replica.role is ReplicaRole.PREFILL and not link.is_draining:
            for _ in outcome.moved:
                self._on_moved()
        placements.for_each(outcome.moved, placements.submit_to_taker)
        for handle in batch.has_room:
            self._offers.on_room(replica, handle)
        for failure in batch.failed:
            self._offers.on_refusal(link.address, failure.handle)
        for live in outcome.over:
            placements.unassign(live)
        for live in outcome.broken:
            placements.abort(live)
        begun = (live for live in outcome.begun if live.replica == link.address)
        placements.for_each(begun, lambda live: self._offers.offer_after_prompt(live, replica))
        for handle in outcome.unknown_handles:
            link.abort(handle)

    def _write_directly(self, live: LiveRequest) -> None:
        try:
            live.write_directly()
        except Exception as error:
            self.placements.fail_unexpectedly(live, error)

    def on_not_sent(self, live: LiveRequest, error: Exception) -> None:
        self.placements.fail_unexpectedly(live, error)
