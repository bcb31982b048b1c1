"""The data of the page as server-sent events: the state of this gateway and its replicas, and the frames of each
replica's scheduler (quire.scheduler.v1, Watch) as JSON.

    event: gateway   {"version", "model", "live_requests", "replicas": [{"address", "connected", "ready", "problem",
                      "max_model_len", "role"}]}
    event: history   {"replica": address, "samples": [{"at", ...}]}, once for each replica (gateway.api.ui.history)
    event: frame     {"replica": address, "is_whole", "more_follows", "unix_seconds", "numbers", "memory", "steps",
                      "answers", "waiting", "ended"}

Names and arrays (flat lists of numbers) are as in the messages. A slow viewer slows down the stream from the scheduler,
which then skips frames.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from gateway.api.ui.history import LoadHistory
from gateway.api.ui.watch_messages import frame_object, is_long
from gateway.auth.caller import Caller
from gateway.replicas.link import SchedulerLink
from gateway.request.generator import Generator
from quire.rpc.errors import QuireError
from quire.version import VERSION

_GATEWAY_INTERVAL_S = 1.0
# The interval at which replicas are checked: a lost or returned replica is reported early.
_LOOK_INTERVAL_S = 0.1
_RETRY_S = 1.0
_MAX_QUEUED = 4
_logger = logging.getLogger(__name__)
_dumps = json.JSONEncoder(separators=(",", ":")).encode


async def feed(
    generator: Generator, caller: Caller, history: LoadHistory, *, wants_memory: bool
) -> AsyncGenerator[bytes, None]:
    """The events, until the gateway drains or the caller's key is no longer valid."""
    events: asyncio.Queue[bytes] = asyncio.Queue(_MAX_QUEUED)
    following = asyncio.create_task(_follow(generator, caller, history, events, wants_memory=wants_memory))
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
    generator: Generator, caller: Caller, history: LoadHistory, events: asyncio.Queue[bytes], *, wants_memory: bool
) -> None:
    """Reports the state of the gateway periodically, and watches its present replicas."""
    watching: dict[SchedulerLink, asyncio.Task[None]] = {}
    try:
        while not (generator.is_draining or caller.account.is_closed):
            links = list(generator.replicas.links.values())
            for link in [each for each in watching if each not in links]:
                watching.pop(link).cancel()
            state = gateway_state(generator)
            await events.put(event("gateway", state))
            for link in [each for each in links if each not in watching]:
                await events.put(event("history", {"replica": link.address, "samples": history.of(link.address)}))
                watching[link] = asyncio.create_task(_watch(link, events, wants_memory=wants_memory))
            said_at = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() < said_at + _GATEWAY_INTERVAL_S:
                await asyncio.sleep(_LOOK_INTERVAL_S)
                if gateway_state(generator)["replicas"] != state["replicas"] or generator.is_draining:
                    break
    finally:
        for task in watching.values():
            task.cancel()
        await asyncio.gather(*watching.values(), return_exceptions=True)


def gateway_state(generator: Generator) -> dict[str, Any]:
    """The state of this gateway and its replicas."""
    return {
        "version": VERSION,
        "model": generator.model.name,
        "live_requests": generator.num_live,
        "replicas": [
            {
                "address": link.address,
                "connected": link.is_connected,
                "ready": link.is_ready,
                "problem": link.problem,
                "max_model_len": 0 if link.welcome is None else link.welcome.max_model_len,
                "role": "" if link.welcome is None else link.welcome.role.value,
            }
            for link in generator.replicas.links.values()
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
