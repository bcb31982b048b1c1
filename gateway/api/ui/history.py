"""The load of each replica in the last ten minutes, for the charts of a newly opened page.

It has one sample every two seconds, from the schedulers' reports of their state.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.api.ui import watch_messages
from gateway.replicas.link import SchedulerLink
from quire.rpc.errors import QuireError
from quire.runtime import clock

_INTERVAL_S = 2.0
_KEPT_S = 600.0
_TIMEOUT_S = 1.0
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Replica:
    samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=int(_KEPT_S / _INTERVAL_S)))
    before: watch_messages.StateAt | None = None


class LoadHistory:
    """Samples of all replicas while `run` runs."""

    def __init__(self, links: Mapping[str, SchedulerLink], gateway_id: str) -> None:
        self._links = links
        self._request = watch_messages.state_request(gateway_id)
        self._replicas: dict[str, _Replica] = {}

    def of(self, address: str) -> list[dict[str, Any]]:
        """The samples of a replica, oldest first: "at", in Unix seconds, and numbers by the names in the page."""
        replica = self._replicas.get(address)
        return [] if replica is None else list(replica.samples)

    async def run(self) -> None:
        """Takes samples until cancelled."""
        has_failed = False
        while True:
            for address in [each for each in self._replicas if each not in self._links]:
                del self._replicas[address]
            try:
                await asyncio.gather(*(self._sample(link) for link in list(self._links.values())))
            except Exception:
                # An error here must not end the gateway, which ends if any part ends.
                if not has_failed:
                    _logger.exception("a sample of the load could not be taken")
                has_failed = True
            await asyncio.sleep(_INTERVAL_S)

    async def _sample(self, link: SchedulerLink) -> None:
        """Adds a sample of a replica, or a sample that marks it as down."""
        replica = self._replicas.setdefault(link.address, _Replica())
        now = clock.unix_s()
        try:
            state = await link.ask("GetState", self._request, _TIMEOUT_S)
        except QuireError:
            if replica.samples:
                replica.samples.append({"at": now, "down": True})
            replica.before = None
            return
        before, replica.before = replica.before, watch_messages.StateAt(now, state)
        sample = watch_messages.load_sample(replica.before, before)
        replica.samples.append({"at": now, "down": not link.is_ready, **sample})
