"""Sends calls over HTTP as OpenAI's client does, its retries included, and reads the answers."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import httpx

from quire_torture.answers import Answer, Reading
from quire_torture.traffic import Call

_RETRIED = frozenset({408, 409, 429})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_RETRY_AFTER_S = 0.5, 8.0, 60.0


class FailedError(Exception):
    """A request that the server or the connection reports as failed; the message is its kind."""

    def __init__(self, kind: str, *, may_retry: bool = False, retry_after_s: float | None = None, detail: str = ""):
        super().__init__(kind)
        self.may_retry = may_retry
        self.retry_after_s = retry_after_s
        self.detail = detail


@dataclass(slots=True, eq=False)
class Progress:
    """A call that runs.

    Attributes:
        caller: The number of its caller.
        on_output: Called whenever output came.
        reading: Its answer as read so far; None before the first byte.
        has_left: Whether its caller goes away, or has gone.
        first_s: Seconds from its beginning to the first output.
    """

    call: Call
    caller: int = 0
    on_output: Callable[["Progress"], None] = lambda _: None
    began: float = field(default_factory=time.monotonic)
    reading: Reading | None = None
    has_left: bool = False
    num_events: int = 0
    num_retries: int = 0
    first_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether its stream has begun."""
        return self.reading is not None and self.reading.is_stream and self.num_events > 0 and not self.has_left

    def note_output(self) -> None:
        if self.first_s is None:
            self.first_s = time.monotonic() - self.began
        self.on_output(self)


class Server(Protocol):
    """A server under torture, as its callers see it."""

    async def send(self, progress: Progress) -> Answer:
        """Raises FailedError. `progress` has the part of the answer before it."""
        ...

    async def serves(self, call: Call, timeout_s: float) -> bool:
        """Whether it answers a call of one token like this one."""
        ...


@dataclass(frozen=True, slots=True)
class Client:
    """A client of one server with OpenAI's API.

    Attributes:
        base_url: Without /v1.
        num_retries: Maximum retries of a request that failed before its answer began; OpenAI's clients have 2.
    """

    http: httpx.AsyncClient
    base_url: str
    model: str
    num_retries: int

    async def send(self, progress: Progress) -> Answer:
        rng = Random(progress.call.number)
        while True:
            try:
                return await self._send(progress)
            except FailedError as error:
                if not error.may_retry or progress.num_retries >= self.num_retries:
                    raise
                pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**progress.num_retries) * rng.uniform(0.75, 1.0)
                if error.retry_after_s is not None:
                    pause_s = min(error.retry_after_s, _LONGEST_RETRY_AFTER_S)
                progress.num_retries += 1
                await asyncio.sleep(pause_s)

    async def serves(self, call: Call, timeout_s: float) -> bool:
        body = {**call.question.body, "model": self.model, "max_tokens": 1}
        url = self.base_url + call.question.path
        with contextlib.suppress(httpx.HTTPError):
            answer = await self.http.post(url, json=body, headers=_headers(call), timeout=timeout_s)
            # A full server that says so serves others.
            return answer.status_code in (200, 429)
        return False

    async def _send(self, progress: Progress) -> Answer:
        question = progress.call.question
        body, headers = {"model": self.model, **question.body}, _headers(progress.call)
        try:
            async with self.http.stream("POST", self.base_url + question.path, json=body, headers=headers) as response:
                if response.status_code != 200:
                    raise _refused(response, await response.aread())
                reading = progress.reading = Reading(question.num_choices, question.is_stream)
                if question.is_stream:
                    await self._read(response, reading, progress)
                else:
                    content = _parsed(await response.aread())
                    if _add(reading, content):
                        progress.note_output()
                    reading.done()
                return reading.answer()
        except httpx.HTTPError as error:
            has_begun = progress.reading is not None
            kind = "the connection broke in the answer" if has_begun else "the connection failed before an answer"
            raise FailedError(kind, may_retry=not has_begun, detail=type(error).__name__) from error

    async def _read(self, response: httpx.Response, reading: Reading, progress: Progress) -> None:
        call = progress.call
        async for data in event_data(response):
            if data == b"[DONE]":
                reading.done()
                continue
            event = _parsed(data)
            if error := event.get("error"):
                kind = error.get("code") or error.get("type") if isinstance(error, dict) else error
                raise FailedError(f"an error event in the stream ({kind})", detail=str(error))
            if _add(reading, event):
                progress.note_output()
            progress.num_events += 1
            if progress.has_left or call.leaves_after == progress.num_events:
                progress.has_left = True
                return
            if call.pause_s:
                await asyncio.sleep(call.pause_s)


def _headers(call: Call) -> dict[str, str]:
    return {} if call.api_key is None else {"authorization": f"Bearer {call.api_key}"}


def _add(reading: Reading, event: Any) -> bool:
    try:
        return reading.add(event)
    except ValueError as error:
        raise FailedError("an answer that is not of OpenAI's API", detail=str(error)) from error


async def event_data(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event of a stream, which has one line."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise FailedError("an answer that is no JSON", detail=repr(content[:80])) from error
    if not isinstance(value, dict):
        raise FailedError("an answer that is not of OpenAI's API", detail=repr(content[:80]))
    return value


def _refused(response: httpx.Response, content: bytes) -> FailedError:
    status, after = response.status_code, response.headers.get("retry-after", "")
    retry_after_s = float(after) if after.replace(".", "", 1).isdigit() else None
    detail = " ".join(content[:200].decode(errors="replace").split())
    may_retry = status in _RETRIED or status >= 500
    return FailedError(f"HTTP {status}", may_retry=may_retry, retry_after_s=retry_after_s, detail=detail)
