"""The gateways that are connected, and whose requests are whose."""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.rpc.errors import Cancelled
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey
from scheduler_svc.core.step_plan import ClientEvents
from scheduler_svc.service.outbox import Outbox
from scheduler_svc.service.prompt_logprobs import PromptLogprobs

_logger = logging.getLogger(__name__)
_MAX_CANCELLED = 256


@dataclass(slots=True, eq=False)
class Connection:
    """One stream of a gateway. `cancelled` are handles and ids of the newest of its requests that were ended by their
    ids: a gateway whose stream breaks before it hears so submits them again. Later requests may have its
    handles."""

    client: ClientId
    gateway_id: str
    grace_period_s: float
    outbox: Outbox = field(default_factory=Outbox)
    live: dict[RequestKey, Request] = field(default_factory=dict)
    cancelled: deque[tuple[Handle, str]] = field(default_factory=lambda: deque(maxlen=_MAX_CANCELLED))
    grace: asyncio.TimerHandle | None = None

    def check_not_cancelled(self, handle: Handle, request_id: str) -> None:
        """Raises Cancelled where the gateway submits a request again that was cancelled."""
        if (handle, request_id) in self.cancelled:
            raise was_cancelled(request_id)


def was_cancelled(request_id: str) -> Cancelled:
    """What the reader of a request is told that somebody has cancelled."""
    return Cancelled(f'request "{request_id}" was cancelled', reason="CANCELLED_BY_ID")


class Connections:
    """All streams, those that broke and whose grace period still runs included. `abort` ends a request, and says
    whether it still ran; `replace` does so where its gateway submits it again, and is told under which key."""

    def __init__(self, abort: Callable[[RequestKey], bool], replace: Callable[[RequestKey, RequestKey], bool]) -> None:
        self._abort = abort
        self._replace = replace
        self._by_client: dict[ClientId, Connection] = {}
        self._numbers = itertools.count()
        self._none_open = asyncio.Event()
        self._none_open.set()

    def __len__(self) -> int:
        return sum(connection.grace is None for connection in self._by_client.values())

    def open(self, gateway_id: str, grace_period_s: float) -> Connection:
        """A new stream. The gateway resubmits what lives, so its earlier streams and their requests end now."""
        connection = Connection(ClientId(next(self._numbers)), gateway_id, grace_period_s)
        for earlier in [each for each in self._by_client.values() if each.gateway_id == gateway_id]:
            connection.cancelled.extend(earlier.cancelled)
            self._drop(earlier, lambda key: self._replace(key, RequestKey(connection.client, key.handle)))
        self._by_client[connection.client] = connection
        self._none_open.clear()
        _logger.info("gateway %s connected", gateway_id)
        return connection

    def close(self, connection: Connection) -> None:
        """The stream ended; its requests end after the grace period."""
        if self._by_client.get(connection.client) is not connection:
            return
        _logger.info("gateway %s left with %d live requests", connection.gateway_id, len(connection.live))
        loop = asyncio.get_running_loop()
        connection.grace = loop.call_later(connection.grace_period_s, self._drop, connection, self._abort)
        if not len(self):
            self._none_open.set()

    async def wait_none_open(self) -> None:
        """Returns once no gateway is connected."""
        await self._none_open.wait()

    def end_broken(self) -> None:
        """Ends all that waits for its gateway to come back."""
        for connection in list(self._by_client.values()):
            if connection.grace is not None:
                self._drop(connection, self._abort)

    def cancel(self, tenant: str, request_id: str) -> bool:
        """Ends what the tenant's gateways run under this id, and tells them. Returns whether there was anything.

        Gateways know nothing of each other's ids, so there may be several.
        """
        named = [
            (connection, key)
            for connection in self._by_client.values()
            for key, request in connection.live.items()
            if (request.tenant, request.request_id) == (tenant, request_id)
        ]
        running = [(connection, key) for connection, key in named if self._abort(key)]
        for connection, key in running:
            del connection.live[key]
            connection.cancelled.append((key.handle, request_id))
            connection.outbox.put_refusal(key.handle, was_cancelled(request_id))
        return bool(running)

    def report_readiness(self, is_ready: bool) -> None:
        """Tells every gateway whether this replica is one to send requests to."""
        for connection in self._by_client.values():
            connection.outbox.put_readiness(is_ready)

    def deliver(self, step_id: int, events: dict[ClientId, ClientEvents]) -> None:
        """Puts each client's events into its outbox. Never waits."""
        for client, batch in events.items():
            connection = self._by_client.get(client)
            if connection is None:
                continue
            connection.outbox.put(step_id, batch)
            for end in batch.completed:
                connection.live.pop(RequestKey(client, end.handle), None)
            for failure in batch.failed:
                connection.live.pop(failure.key, None)

    def deliver_prompt_logprobs(self, routed: dict[ClientId, list[PromptLogprobs]]) -> None:
        """To be called before `deliver` for the same step. Never waits."""
        for client, entries in routed.items():
            connection = self._by_client.get(client)
            if connection is not None:
                connection.outbox.put_prompt_logprobs(entries)

    def _drop(self, connection: Connection, end: Callable[[RequestKey], bool]) -> None:
        if connection.grace is not None:
            connection.grace.cancel()
        self._by_client.pop(connection.client, None)
        connection.outbox.close()
        for key in connection.live:
            end(key)
        connection.live.clear()
