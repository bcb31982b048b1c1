"""The gateways that are connected, and whose requests are whose."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.core.request import ClientId, RequestKey
from scheduler_svc.core.step_plan import ClientEvents
from scheduler_svc.service.outbox import Outbox
from scheduler_svc.service.prompt_logprobs import PromptLogprobs

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Connection:
    """One stream of a gateway."""

    client: ClientId
    gateway_id: str
    grace_period_s: float
    outbox: Outbox = field(default_factory=Outbox)
    live: set[RequestKey] = field(default_factory=set)
    grace: asyncio.TimerHandle | None = None


class Connections:
    """All streams, those that broke and whose grace period still runs included."""

    def __init__(self, abort: Callable[[RequestKey], object]) -> None:
        self._abort = abort
        self._by_client: dict[ClientId, Connection] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return sum(connection.grace is None for connection in self._by_client.values())

    def open(self, gateway_id: str, grace_period_s: float) -> Connection:
        """A new stream. The gateway resubmits what lives, so requests of its earlier streams end now."""
        for earlier in [each for each in self._by_client.values() if each.gateway_id == gateway_id]:
            self._drop(earlier)
        connection = Connection(ClientId(next(self._numbers)), gateway_id, grace_period_s)
        self._by_client[connection.client] = connection
        _logger.info("gateway %s connected", gateway_id)
        return connection

    def close(self, connection: Connection) -> None:
        """The stream ended; its requests end after the grace period."""
        if self._by_client.get(connection.client) is not connection:
            return
        _logger.info("gateway %s left with %d live requests", connection.gateway_id, len(connection.live))
        loop = asyncio.get_running_loop()
        connection.grace = loop.call_later(connection.grace_period_s, self._drop, connection)

    def report_readiness(self, is_ready: bool) -> None:
        """Tells every gateway whether steps run."""
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
                connection.live.discard(RequestKey(client, end.handle))
            for failure in batch.failed:
                connection.live.discard(failure.key)

    def deliver_prompt_logprobs(self, routed: dict[ClientId, list[PromptLogprobs]]) -> None:
        """To be called before `deliver` for the same step. Never waits."""
        for client, entries in routed.items():
            connection = self._by_client.get(client)
            if connection is not None:
                connection.outbox.put_prompt_logprobs(entries)

    def _drop(self, connection: Connection) -> None:
        if connection.grace is not None:
            connection.grace.cancel()
        self._by_client.pop(connection.client, None)
        for key in connection.live:
            self._abort(key)
        connection.live.clear()
