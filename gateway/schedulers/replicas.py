"""The schedulers that this gateway uses, and which of them has which live request."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from gateway.requests.ledger import Ledger
from gateway.requests.live_request import LiveRequest
from gateway.requests.request_timers import RequestTimers
from gateway.schedulers.routing import affinity_key, choose_replica
from gateway.schedulers.scheduler_client import SchedulerClient, SchedulerRefusedError
from gateway.schedulers.scheduler_events import EventBatch, Welcome
from quire import compatibility
from quire.compatibility import UNKNOWN_MODEL, ModelFingerprint, check_model, check_protocol, differing_parts
from quire.rpc.errors import FailedPrecondition, QuireError, ResourceExhausted, Unavailable
from quire.rpc.tls import TlsIdentity

_DEFAULT_RETRY_MS = 100
_LONGEST_RETRY_S = 5.0
_MOST_MOVES_THAT_COUNT = 3
"""Each makes a request wait four times as long before the next one."""
# For the answer to an abort; without it, what only the scheduler knows of the cost is left out.
_USAGE_TIMEOUT_S = 1.0
_logger = logging.getLogger(__name__)


class Replicas:
    """Places live requests on replicas and keeps them running while schedulers come and go.

    A request whose scheduler is lost stays with it for `failover_delay_s`, since its blocks may be there still when the
    scheduler is back; then any connected replica takes it over. Without one it waits, and fails with UNAVAILABLE after
    `connect_timeout_s` without any connection: a scheduler that drains is about to have a successor. From a scheduler
    that is connected and not ready it moves as late, where another replica is ready, unless tokens come all the same.
    Each time before its next token it waits longer for that: it may be what the workers die of, and one scheduler has
    to see it often enough to find that out. What a scheduler refuses because it drains is placed anew.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        ledger: Ledger,
        *,
        gateway_id: str,
        architecture: str,
        model: ModelFingerprint,
        connect_timeout_s: float,
        failover_delay_s: float,
        reconnect_grace_s: float,
        tls: TlsIdentity | None = None,
    ) -> None:
        self._ledger = ledger
        self._architecture = architecture
        self._model = model
        self._connect_timeout_s = connect_timeout_s
        self._failover_delay_s = failover_delay_s
        grace_period_ms = round(reconnect_grace_s * 1000)
        self.clients = {
            address: SchedulerClient(
                address, gateway_id=gateway_id, grace_period_ms=grace_period_ms, model=model, listener=self, tls=tls
            )
            for address in addresses
        }
        # Set while at least one scheduler is connected.
        self._some_connected = asyncio.Event()
        # Set while at least one replica is ready, and while none is.
        self._some_ready = asyncio.Event()
        self._none_ready = asyncio.Event()
        self._none_ready.set()
        self._timers = RequestTimers(self._fail_unexpectedly)
        # The handles of the requests that each of them has.
        self._placed: dict[str, set[int]] = {address: set() for address in self.clients}
        # Addresses of schedulers that refuse what is new until they end.
        self._draining: set[str] = set()

    @property
    def is_ready(self) -> bool:
        """Whether a connected replica runs steps now. Requests are placed on connected ones in any case."""
        return self._some_ready.is_set()

    @property
    def num_connected(self) -> int:
        return sum(client.is_connected for client in self.clients.values())

    @property
    def welcomes(self) -> list[Welcome]:
        """What the connected schedulers are; while there are none, what they were."""
        known = [client for client in self.clients.values() if client.welcome is not None]
        live = [client for client in known if client.is_connected]
        return [client.welcome for client in live or known if client.welcome is not None]

    @property
    def durable_grace_s(self) -> float:
        """How long schedulers keep durable requests that nobody reads."""
        return max((welcome.durable_grace_s for welcome in self.welcomes), default=0.0)

    async def wait_until_ready(self) -> None:
        await self._some_ready.wait()

    async def wait_until_not_ready(self) -> None:
        """Waits until no replica is ready."""
        await self._none_ready.wait()

    async def wait_until_known(self, patience_s: float) -> list[Welcome]:
        """The welcomes, at once where a scheduler was ever reached, else after a wait for the first one.

        Raises:
            Unavailable: no scheduler was reached in that time.
        """
        if not self.welcomes:
            try:
                async with asyncio.timeout(patience_s):
                    await self._some_connected.wait()
            except TimeoutError:
                message = f"no scheduler was reached within {patience_s:g} s, nor before"
                raise Unavailable(message, reason="NO_SCHEDULER") from None
        return self.welcomes

    def place(self, live: LiveRequest) -> None:
        """Sends a request to a replica, or keeps it until there is one."""
        candidates = self._candidates(live)
        if not candidates:
            if others := self._taking():
                live.fail(_model_changed(live, others[0].model))
            else:
                self._await_scheduler(live)
            return
        if len(candidates) == 1:
            self._submit(live, *candidates.values())
            return
        loads = {address: len(self._placed[address]) for address in candidates}
        block_size = min(client.welcome.block_size for client in candidates.values() if client.welcome is not None)
        self._submit(live, candidates[choose_replica(affinity_key(live.request.prompt_token_ids, block_size), loads)])

    def release(self, live: LiveRequest) -> None:
        """Ends whatever still runs for a request. Idempotent."""
        self._timers.cancel(live)
        if live.replica is not None:
            self.clients[live.replica].abort(live.handle)
            self._assign(live, None)

    def resume(self, live: LiveRequest, client: SchedulerClient) -> None:
        """Takes over a durable request that a replica has. Raises Unavailable where its stream is gone by now."""
        if not client.is_connected:
            raise Unavailable(f"scheduler {client.address} is not connected", reason="NO_SCHEDULER")
        self._assign(live, client.address)
        self._note_model(live, client)
        live.submissions += 1
        client.resume(live)
        if not client.is_ready:
            self._await_worker(live)

    def hand_over(self, earlier: LiveRequest, live: LiveRequest) -> None:
        """Goes on with a request by another entry of it, which has all that the earlier one has."""
        replica = earlier.replica
        self._forget(earlier)
        if live.is_over:
            return
        if replica is None:
            self.place(live)
        elif self.clients[replica].is_connected:
            self._submit(live, self.clients[replica])
            if not self.clients[replica].is_ready:
                self._await_worker(live)
        else:
            self._assign(live, replica)
            self._timers.set(live, self._failover_delay_s, self._fail_over)

    def leave(self, live: LiveRequest) -> None:
        """Its client is gone: a durable request that is not completed runs on for a while, another ends. Idempotent."""
        if not live.request.durable or live.is_completed or live.replica is None:
            self.release(live)
            return
        self._timers.cancel(live)
        self.clients[live.replica].detach(live.handle)
        self._assign(live, None)

    async def flush(self) -> None:
        """Waits until aborts are on their way."""
        await asyncio.gather(*(client.flush() for client in self.clients.values()))

    # What the scheduler clients report.

    def check_welcome(self, welcome: Welcome) -> None:
        if welcome.vocab_size < 1 or welcome.block_size < 1 or welcome.max_model_len < 2:
            raise SchedulerRefusedError(f"its welcome makes no sense: {welcome}")
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

    def on_connected(self, client: SchedulerClient) -> None:
        _logger.info("connected to scheduler %s", client.address)
        self._some_connected.set()
        self._draining.discard(client.address)
        self._update_readiness()
        self._for_each(self._ledger.of_replica(client.address), lambda live: self._submit(live, client))
        self._for_each(
            (live for live in self._ledger if live.replica is None and live.is_prepared and not live.is_over),
            self.place,
        )
        self._watch_unready()

    def on_disconnected(self, client: SchedulerClient) -> None:
        if not self.num_connected:
            self._some_connected.clear()
        self._update_readiness()
        self._for_each((live for live in self._ledger if live.replica == client.address), self._outlive_scheduler)
        self._for_each(
            (live for live in self._ledger if live.replica is None and live.is_prepared and not live.is_over),
            self._await_scheduler,
        )

    def on_readiness(self, client: SchedulerClient) -> None:
        state = "runs again" if client.is_ready else "lost its worker, or drains"
        _logger.info("scheduler %s %s", client.address, state)
        self._update_readiness()
        if client.is_ready:
            for live in self._ledger.of_replica(client.address):
                self._timers.cancel(live)
        self._watch_unready()

    def on_events(self, client: SchedulerClient, batch: EventBatch) -> None:
        outcome = self._ledger.apply(client.address, batch)
        for live in outcome.ended_here:
            client.abort(live.handle, wants_usage=True)
            self._timers.set(live, _USAGE_TIMEOUT_S, self._settle)
        for live, index in outcome.sequences_ended_here:
            client.abort(live.handle, index, wants_usage=True)
        for live, error in outcome.failed:
            self._for_each([live], partial(self._refused, client, error))
        for live in outcome.over:
            self._forget(live)
        for live in outcome.broken:
            self.release(live)
        for handle in outcome.unknown_handles:
            client.abort(handle)

    def on_not_sent(self, live: LiveRequest, error: Exception) -> None:
        self._fail_unexpectedly(live, error)

    def _fail_unexpectedly(self, live: LiveRequest, error: Exception) -> None:
        live.fail_unexpectedly(error)
        self.release(live)

    def _update_readiness(self) -> None:
        set_event, cleared = self._some_ready, self._none_ready
        if not any(client.is_ready for client in self.clients.values()):
            set_event, cleared = cleared, set_event
        set_event.set()
        cleared.clear()

    def _taking(self) -> list[SchedulerClient]:
        """The replicas that take new requests."""
        connected = (client for client in self.clients.values() if client.is_connected)
        return [client for client in connected if client.address not in self._draining]

    def _candidates(self, live: LiveRequest) -> dict[str, SchedulerClient]:
        """The replicas that a request may go to: those that run steps, else those that let it wait."""
        fitting = {client.address: client for client in self._taking() if live.fits(client.model)}
        return {address: client for address, client in fitting.items() if client.is_ready} or fitting

    def _submit(self, live: LiveRequest, client: SchedulerClient) -> None:
        self._timers.cancel(live)
        if not live.fits(client.model):
            # The scheduler came back with another model.
            self._assign(live, None)
            self.place(live)
            return
        self._assign(live, client.address)
        self._note_model(live, client)
        live.submissions += 1
        client.submit(live)

    def _note_model(self, live: LiveRequest, client: SchedulerClient) -> None:
        if not live.num_generated_tokens or live.model == UNKNOWN_MODEL:
            live.model = client.model

    def _assign(self, live: LiveRequest, replica: str | None) -> None:
        if live.replica is not None:
            self._placed[live.replica].discard(live.handle)
        if replica is not None:
            self._placed[replica].add(live.handle)
        live.replica = replica

    def _forget(self, live: LiveRequest) -> None:
        """No scheduler works at the request any more, whatever its client still has to read."""
        self._timers.cancel(live)
        self._assign(live, None)

    def _settle(self, live: LiveRequest) -> None:
        live.settle()
        if live.is_over:
            self._forget(live)

    def _outlive_scheduler(self, live: LiveRequest) -> None:
        """What the scheduler of the request was about to say is said, or the request waits for it for a while."""
        self._settle(live)
        if not live.is_over:
            self._timers.set(live, self._failover_delay_s, self._fail_over)

    def _for_each(self, requests: Iterable[LiveRequest], action: Callable[[LiveRequest], None]) -> None:
        """What goes wrong with one request is no matter of the others."""
        for live in requests:
            try:
                action(live)
            except Exception as error:
                self._fail_unexpectedly(live, error)

    def _refused(self, client: SchedulerClient, error: QuireError, live: LiveRequest) -> None:
        """A new request fails; one that was running before comes back later, since it was accepted once. Whatever a
        scheduler refuses because it drains is for another one, or for its successor."""
        self._assign(live, None)
        if isinstance(error, Unavailable) and error.reason == "DRAINING":
            live.submissions -= 1
            self._draining.add(client.address)
            self.place(live)
        elif isinstance(error, FailedPrecondition) and error.reason == "MODEL_CHANGED":
            # Takes nothing new before it is connected again, and has said what it is now.
            self._draining.add(client.address)
            if self._candidates(live):
                self.place(live)
            else:
                live.fail(error)
        elif live.submissions > 1 and isinstance(error, ResourceExhausted | Unavailable):
            self._timers.set(live, self._retry_delay_s(error), self.place)
        else:
            live.fail(error)

    def _retry_delay_s(self, error: QuireError) -> float:
        """What the scheduler names is the time for one place; of those that wait for one, each takes another moment."""
        one_s = (error.retry_after_ms or _DEFAULT_RETRY_MS) / 1000
        return random.uniform(one_s, max(one_s, min(one_s * (1 + len(self._timers)), _LONGEST_RETRY_S)))

    def _fail_over(self, live: LiveRequest) -> None:
        self._assign(live, None)
        self.place(live)

    def _watch_unready(self) -> None:
        """Says when requests leave schedulers that run no steps. Those that could not leave then for want of another
        replica get another time, now that something has changed."""
        for client in self.clients.values():
            if client.is_connected and not client.is_ready:
                for live in self._ledger.of_replica(client.address):
                    if live not in self._timers:
                        self._await_worker(live)

    def _await_worker(self, live: LiveRequest) -> None:
        patience_s = self._failover_delay_s * 4 ** min(live.moves, _MOST_MOVES_THAT_COUNT)
        self._timers.set(live, patience_s, self._leave_unready)

    def _leave_unready(self, live: LiveRequest) -> None:
        """Moves a request to a replica that runs steps, where there is one, unless it goes on where it is."""
        if live.is_over or not any(client.is_ready for client in self._candidates(live).values()):
            return
        left_s = self._failover_delay_s - live.seconds_since_news
        if left_s > 0:
            self._timers.set(live, left_s, self._leave_unready)
        else:
            live.moves += 1
            # A durable one, too: a copy that went on there might draw other tokens than the one that is read.
            self.release(live)
            self.place(live)

    def _await_scheduler(self, live: LiveRequest) -> None:
        if not self.num_connected:
            self._timers.set(live, self._connect_timeout_s, self._give_up)

    def _give_up(self, live: LiveRequest) -> None:
        message = f"no scheduler could be reached for {self._connect_timeout_s:g} s"
        live.fail(Unavailable(message, reason="NO_SCHEDULER"))


def _model_changed(live: LiveRequest, model: ModelFingerprint) -> FailedPrecondition:
    parts = ", ".join(differing_parts(live.model, model))
    return FailedPrecondition(
        f"the replicas have another model than the one that this request began with (before and now: {parts}); it "
        "cannot go on: send it again",
        reason="MODEL_CHANGED",
    )
