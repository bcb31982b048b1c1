"""The schedulers that this gateway uses, and which of them has which live request."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from gateway.ledger import Ledger
from gateway.live_request import LiveRequest
from gateway.routing import affinity_key, choose_replica
from gateway.scheduler_client import SchedulerClient, SchedulerRefusedError
from gateway.scheduler_events import EventBatch, Welcome
from quire.rpc.errors import QuireError, ResourceExhausted, Unavailable
from quire.rpc.tls import TlsIdentity

_DEFAULT_RETRY_MS = 100
_logger = logging.getLogger(__name__)


class Replicas:
    """Places live requests on replicas and keeps them running while schedulers come and go.

    A request whose scheduler is lost stays with it for `failover_delay_s`, since its blocks may be there still when the
    scheduler is back; then any connected replica takes it over. Without one it waits, and fails with UNAVAILABLE after
    `connect_timeout_s`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        ledger: Ledger,
        *,
        gateway_id: str,
        architecture: str,
        connect_timeout_s: float,
        first_connect_timeout_s: float,
        failover_delay_s: float,
        reconnect_grace_s: float,
        tls: TlsIdentity | None = None,
    ) -> None:
        self._ledger = ledger
        self._architecture = architecture
        self._connect_timeout_s = connect_timeout_s
        self._first_connect_timeout_s = first_connect_timeout_s
        self._failover_delay_s = failover_delay_s
        grace_period_ms = round(reconnect_grace_s * 1000)
        self.clients = {
            address: SchedulerClient(
                address, gateway_id=gateway_id, grace_period_ms=grace_period_ms, listener=self, tls=tls
            )
            for address in addresses
        }
        # Set while at least one scheduler is connected.
        self._some_connected = asyncio.Event()
        # Set while at least one replica is ready, and while none is.
        self._some_ready = asyncio.Event()
        self._none_ready = asyncio.Event()
        self._none_ready.set()
        self._timers: dict[int, asyncio.TimerHandle] = {}

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

    async def wait_until_ready(self) -> None:
        await self._some_ready.wait()

    async def wait_until_not_ready(self) -> None:
        """Waits until no replica is ready."""
        await self._none_ready.wait()

    async def wait_until_known(self) -> list[Welcome]:
        """The welcomes, at once where a scheduler was ever reached, else after a short wait for the first one.

        Raises:
            Unavailable: no scheduler was reached in that time.
        """
        if not self.welcomes:
            try:
                async with asyncio.timeout(self._first_connect_timeout_s):
                    await self._some_connected.wait()
            except TimeoutError:
                raise Unavailable("no scheduler has been reached yet", reason="NO_SCHEDULER") from None
        return self.welcomes

    def place(self, live: LiveRequest) -> None:
        """Sends a request to a replica, or keeps it until there is one."""
        connected = {address: client for address, client in self.clients.items() if client.is_connected}
        # Those that are not ready take requests too, but let them wait.
        candidates = {address: client for address, client in connected.items() if client.is_ready} or connected
        if not candidates:
            self._await_scheduler(live)
            return
        if len(candidates) == 1:
            self._submit(live, *candidates.values())
            return
        live_requests = Counter(other.replica for other in self._ledger)
        loads = {address: live_requests[address] for address in candidates}
        block_size = min(client.welcome.block_size for client in candidates.values() if client.welcome is not None)
        self._submit(live, candidates[choose_replica(affinity_key(live.request.prompt_token_ids, block_size), loads)])

    def release(self, live: LiveRequest) -> None:
        """Ends whatever still runs for a request. Idempotent."""
        self._cancel_timer(live)
        if live.replica is not None:
            self.clients[live.replica].abort(live.handle)
            live.replica = None

    def resume(self, live: LiveRequest, client: SchedulerClient) -> None:
        """Takes over a durable request that a replica has. Raises Unavailable where its stream is gone by now."""
        if not client.is_connected:
            raise Unavailable(f"scheduler {client.address} is not connected", reason="NO_SCHEDULER")
        live.replica = client.address
        live.submissions += 1
        client.resume(live)

    def leave(self, live: LiveRequest) -> None:
        """Its client is gone: a durable request that is not completed runs on for a while, another ends. Idempotent."""
        if not live.request.durable or live.is_completed or live.replica is None:
            self.release(live)
            return
        self._cancel_timer(live)
        self.clients[live.replica].detach(live.handle)
        live.replica = None

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

    def on_connected(self, client: SchedulerClient) -> None:
        _logger.info("connected to scheduler %s", client.address)
        self._some_connected.set()
        self._update_readiness()
        for live in self._ledger.of_replica(client.address):
            self._submit(live, client)
        for live in self._ledger:
            if live.replica is None and not live.is_over:
                self.place(live)

    def on_disconnected(self, client: SchedulerClient) -> None:
        if not self.num_connected:
            self._some_connected.clear()
        self._update_readiness()
        for live in self._ledger.of_replica(client.address):
            live.settle()
            if not live.is_over:
                self._set_timer(live, self._failover_delay_s, self._fail_over)

    def on_readiness(self, client: SchedulerClient) -> None:
        state = "runs again" if client.is_ready else "lost its worker; its requests wait"
        _logger.info("scheduler %s %s", client.address, state)
        self._update_readiness()

    def on_events(self, client: SchedulerClient, batch: EventBatch) -> None:
        outcome = self._ledger.apply(client.address, batch)
        for live in outcome.ended_here:
            self.release(live)
        for live, index in outcome.sequences_ended_here:
            client.abort(live.handle, index)
        for live, error in outcome.failed:
            self._refused(live, error)
        for handle in outcome.unknown_handles:
            client.abort(handle)

    def _update_readiness(self) -> None:
        set_event, cleared = self._some_ready, self._none_ready
        if not any(client.is_ready for client in self.clients.values()):
            set_event, cleared = cleared, set_event
        set_event.set()
        cleared.clear()

    def _submit(self, live: LiveRequest, client: SchedulerClient) -> None:
        self._cancel_timer(live)
        live.replica = client.address
        live.submissions += 1
        client.submit(live)

    def _refused(self, live: LiveRequest, error: QuireError) -> None:
        """A new request fails; one that was running before comes back later, since it was accepted once."""
        live.replica = None
        if live.submissions > 1 and isinstance(error, ResourceExhausted | Unavailable):
            self._set_timer(live, (error.retry_after_ms or _DEFAULT_RETRY_MS) / 1000, self.place)
        else:
            live.fail(error)

    def _fail_over(self, live: LiveRequest) -> None:
        live.replica = None
        self.place(live)

    def _await_scheduler(self, live: LiveRequest) -> None:
        self._set_timer(live, self._connect_timeout_s, self._give_up)

    def _give_up(self, live: LiveRequest) -> None:
        message = f"no scheduler could be reached for {self._connect_timeout_s:g} s"
        live.fail(Unavailable(message, reason="NO_SCHEDULER"))

    def _set_timer(self, live: LiveRequest, delay_s: float, action: Callable[[LiveRequest], None]) -> None:
        self._cancel_timer(live)
        loop = asyncio.get_running_loop()
        self._timers[live.handle] = loop.call_later(delay_s, self._fire, live, action)

    def _fire(self, live: LiveRequest, action: Callable[[LiveRequest], None]) -> None:
        del self._timers[live.handle]
        action(live)

    def _cancel_timer(self, live: LiveRequest) -> None:
        timer = self._timers.pop(live.handle, None)
        if timer is not None:
            timer.cancel()
