"""The data of the page as server-sent events: the state of this gateway and its replicas, and the frames of each
replica's scheduler (quire.scheduler.v1, Watch) as JSON.

    event: gateway   {"version", "model", "live_requests", "replicas": [{"address", "model", "connected", "ready",
                      "problem", "max_model_len", "role"}]}
    event: history   {"replica": address, "samples": [{"at", ...}]}, once for each replica
    event: frame     {"replica": address, "is_whole", "more_follows", "unix_seconds", "numbers", "memory", "steps",
                      "answers", "waiting", "ended"}

Names and arrays (flat lists of numbers) are as in the messages. A slow viewer slows down the stream from the scheduler,
which then skips frames.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from gateway.api.ui.watch_messages import StateAt, frame_object, is_long, load_sample, state_request
from gateway.auth.caller import Caller
from gateway.replicas.link import SchedulerLink
from gateway.request.models import Models
from quire.rpc.errors import QuireError
from quire.runtime import clock
from quire.version import VERSION

_GATEWAY_INTERVAL_S = 1.0
# The interval at which replicas are checked: a lost or returned replica is reported early.
_LOOK_INTERVAL_S = 0.1
_RETRY_S = 1.0
_MAX_QUEUED = 4
_SAMPLE_INTERVAL_S = 2.0
_KEPT_S = 600.0
_SAMPLE_TIMEOUT_S = 1.0
_logger = logging.getLogger(__name__)
_dumps = json.JSONEncoder(separators=(",", ":")).encode


async def feed(
    models: Models, caller: Caller, history: "LoadHistory", *, wants_memory: bool
) -> AsyncGenerator[bytes, None]:
    """The events, until the gateway drains or the caller's key is no longer valid."""
    events: asyncio.Queue[bytes] = asyncio.Queue(_MAX_QUEUED)
    following = asyncio.create_task(_follow(models, caller, history, events, wants_memory=wants_memory))
    try:
        while not following.done():
            getting = asyncio.create_task(events.get())
            try:
                await asyncio.wait([getting, following], return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    yield getting.result()
            finally:
                getting.cancel()
        following.result()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(
    models: Models, caller: Caller, history: "LoadHistory", events: asyncio.Queue[bytes], *, wants_memory: bool
) -> None:
    """Reports the state of the gateway periodically, and watches its present replicas."""
    watching: dict[SchedulerLink, asyncio.Task[None]] = {}
    try:
        while not (models.is_draining or caller.account.is_closed):
            links = list(models.links.values())
            for link in [each for each in watching if each not in links]:
                watching.pop(link).cancel()
            state = gateway_state(models)
            await events.put(event("gateway", state))
            for link in [each for each in links if each not in watching]:
                await events.put(event("history", {"replica": link.address, "samples": history.of(link.address)}))
                watching[link] = asyncio.create_task(_watch(link, events, wants_memory=wants_memory))
            said_at = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() < said_at + _GATEWAY_INTERVAL_S:
                await asyncio.sleep(_LOOK_INTERVAL_S)
                if gateway_state(models)["replicas"] != state["replicas"] or models.is_draining:
                    break
    finally:
        for task in watching.values():
            task.cancel()
        await asyncio.gather(*watching.values(), return_exceptions=True)


def gateway_state(models: Models) -> dict[str, Any]:
    """The state of this gateway and its replicas."""
    return {
        "version": VERSION,
        "model": models.default_text.model.name,
        "live_requests": models.num_live,
        "replicas": [
            {
                "address": link.address,
                "model": each.model.name,
                "connected": link.is_connected,
                "ready": link.is_ready,
                "problem": link.problem,
                "max_model_len": 0 if link.welcome is None else link.welcome.max_model_len,
                "role": "" if link.welcome is None else link.welcome.role.value,
            }
            for each in models
            for link in each.replicas.links.values()
        ],
    }


async def _watch(link: SchedulerLink, events: asyncio.Queue[bytes], *, wants_memory: bool) -> None:
    """Adds the frames of one replica until cancelled; reopens a broken stream."""
    while True:
        problem = None
        try:
            async with aclosing(link.watch(wants_memory=wants_memory)) as frames:
                async for frame in frames:

                    def write(frame: Any = frame) -> bytes:
                        return event("frame", frame_object(link.address, frame))

                    await events.put(await asyncio.to_thread(write) if is_long(frame) else write())
        except QuireError as error:
            problem = error.message
        except Exception as error:
            # No code waits for this task, so its error must be logged and shown.
            _logger.exception("frames of scheduler %s cannot be shown", link.address)
            problem = f"its frames cannot be shown: {type(error).__name__}"
        if problem is not None and link.is_connected:
            await events.put(event("problem", {"replica": link.address, "problem": problem}))
        await asyncio.sleep(_RETRY_S)


def event(name: str, value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return f"event: {name}\ndata: {_dumps(value)}\n\n".encode()


@dataclass(slots=True)
class _Replica:
    samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=int(_KEPT_S / _SAMPLE_INTERVAL_S)))
    before: StateAt | None = None


class LoadHistory:
    """The load of each replica in the last ten minutes, for the charts of a newly opened page: one sample every two
    seconds, from the schedulers' reports of their state, while `run` runs."""

    def __init__(self, models: Models, gateway_id: str) -> None:
        self._models = models
        self._request = state_request(gateway_id)
        self._replicas: dict[str, _Replica] = {}

    def of(self, address: str) -> list[dict[str, Any]]:
        """The samples of a replica, oldest first: "at", in Unix seconds, and numbers by the names in the page."""
        replica = self._replicas.get(address)
        return [] if replica is None else list(replica.samples)

    async def run(self) -> None:
        """Takes samples until cancelled."""
        has_failed = False
        while True:
            links = self._models.links
            for address in [each for each in self._replicas if each not in links]:
                del self._replicas[address]
            try:
                await asyncio.gather(*(self._sample(link) for link in links.values()))
            except Exception:
                # An error here must not end the gateway, which ends if any part ends.
                if not has_failed:
                    _logger.exception("a sample of the load could not be taken")
                has_failed = True
            await asyncio.sleep(_SAMPLE_INTERVAL_S)

    async def _sample(self, link: SchedulerLink) -> None:
        """Adds a sample of a replica, or a sample that marks it as down."""
        replica = self._replicas.setdefault(link.address, _Replica())
        now = clock.unix_s()
        try:
            state = await link.ask("GetState", self._request, _SAMPLE_TIMEOUT_S)
        except QuireError:
            if replica.samples:
                replica.samples.append({"at": now, "down": True})
            replica.before = None
            return
        before, replica.before = replica.before, StateAt(now, state)
        sample = load_sample(replica.before, before)
        replica.samples.append({"at": now, "down": not link.is_ready, **sample})
