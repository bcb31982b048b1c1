"""The streams of gateways."""

import asyncio
import logging

from scheduler_svc.service.requests import Connection, Requests

_logger = logging.getLogger(__name__)


class Connections:
    """All open streams, one of each gateway. What they read belongs to `requests`."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._by_gateway: dict[str, Connection] = {}
        self._none_open = asyncio.Event()
        self._none_open.set()

    def __len__(self) -> int:
        return len(self._by_gateway)

    def open(self, gateway_id: str, grace_period_s: float) -> Connection:
        """A new stream. An earlier one of the gateway ends now, if it has not: it may be of a link that is broken."""
        earlier = self._by_gateway.get(gateway_id)
        if earlier is not None:
            self.close(earlier)
        connection = self._by_gateway[gateway_id] = Connection(gateway_id, grace_period_s)
        self._none_open.clear()
        _logger.info("gateway %s connected", gateway_id)
        return connection

    def close(self, connection: Connection) -> None:
        """The stream ended; its requests wait for their reader. Idempotent."""
        if self._by_gateway.get(connection.gateway_id) is not connection:
            return
        _logger.info("gateway %s left; it read %d requests", connection.gateway_id, len(connection.reads))
        del self._by_gateway[connection.gateway_id]
        self._requests.close(connection)
        if not self._by_gateway:
            self._none_open.set()

    async def wait_none_open(self) -> None:
        """Returns once no gateway is connected."""
        await self._none_open.wait()

    def report_readiness(self, is_ready: bool) -> None:
        """Tells every gateway whether this replica is one to send requests to."""
        for connection in self._by_gateway.values():
            connection.outbox.put_readiness(is_ready)
