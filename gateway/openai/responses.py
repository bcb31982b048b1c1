"""Responses that are made while the client waits, and end when it leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.openai.errors import ErrorAnswer, ParamNames, error_answer

_EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies would hold back what they take for an ordinary body.
    "x-accel-buffering": "no",
}
_DONE = b"data: [DONE]\n\n"
_PIECE_BYTES = 1 << 16
_FEW = 64
_dumps = json.JSONEncoder(separators=(",", ":")).encode


def as_json(answer: Mapping[str, Any]) -> bytes:
    """An object as JSON. Long lists are written in pieces: where that is done in a thread, others get their turns in
    between.

    All characters beyond ASCII are escaped: some readers split lines at more of them than JSON does.
    """
    return _written(answer).encode()


def _written(value: Any) -> str:
    match value:
        case list() if len(value) > _FEW:
            pieces = (_dumps(value[begin : begin + _FEW])[1:-1] for begin in range(0, len(value), _FEW))
            return f"[{','.join(pieces)}]"
        case list() if _has_long_list(value):
            return f"[{','.join(map(_written, value))}]"
        case dict() if _has_long_list(value.values()):
            return f"{{{','.join(f'{_dumps(name)}:{_written(each)}' for name, each in value.items())}}}"
        case _:
            return _dumps(value)


def _has_long_list(values: Iterable[Any]) -> bool:
    """Whether there is one among the values, or in them."""
    for value in values:
        if isinstance(value, list) and (len(value) > _FEW or _has_long_list(value)):
            return True
        if isinstance(value, dict) and _has_long_list(value.values()):
            return True
    return False


class WatchedResponse(Response):
    """A response whose making is given up, and what it runs aborted, as soon as the client has left."""

    def __init__(self, names: ParamNames, headers: Mapping[str, str]) -> None:
        """`names` are the fields' names in errors."""
        self.background = None
        self._names = names
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        making = asyncio.create_task(self._make_or_fail(send))
        leaving = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait([making, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            making.cancel()
            await asyncio.wait([making, leaving])
        if not making.cancelled():
            making.result()

    async def _make_or_fail(self, send: Send) -> None:
        try:
            await self._make(send)
        except Exception as error:
            await self._send_error(send, error_answer(error, self._names, self._headers.get("x-request-id")))

    async def _make(self, send: Send) -> None:
        raise NotImplementedError

    async def _send_error(self, send: Send, answer: ErrorAnswer) -> None:
        await _start(send, answer.status, _json_headers(answer.body) | dict(self._headers) | dict(answer.headers))
        await send({"type": "http.response.body", "body": answer.body})


class WholeResponse(WatchedResponse):
    """One JSON object, once it is known."""

    def __init__(self, make: Callable[[], Awaitable[bytes]], names: ParamNames, headers: Mapping[str, str]) -> None:
        super().__init__(names, headers)
        self._make_body = make

    async def _make(self, send: Send) -> None:
        body = await self._make_body()
        await _start(send, 200, _json_headers(body) | dict(self._headers))
        # Piece by piece, each of which waits for the ones before to leave: over TLS what is written at once counts as
        # sent, and is cut off some time after that.
        for begin in range(0, len(body), _PIECE_BYTES):
            end = begin + _PIECE_BYTES
            await send({"type": "http.response.body", "body": body[begin:end], "more_body": end < len(body)})


class StreamedResponse(WatchedResponse):
    """Server-sent events, one a JSON object, and [DONE] at the end.

    An error before the first event is an ordinary error answer; later ones are the stream's last event.
    """

    def __init__(
        self, make: Callable[[], AsyncGenerator[bytes, None]], names: ParamNames, headers: Mapping[str, str]
    ) -> None:
        """`make` makes the objects, as JSON without line breaks."""
        super().__init__(names, headers)
        self._make_objects = make
        self._has_started = False

    async def _make(self, send: Send) -> None:
        async with aclosing(self._make_objects()) as objects:
            async for each in objects:
                if not self._has_started:
                    self._has_started = True
                    await _start(send, 200, _EVENT_STREAM | dict(self._headers))
                await send({"type": "http.response.body", "body": b"data: " + each + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": _DONE})

    async def _send_error(self, send: Send, answer: ErrorAnswer) -> None:
        if not self._has_started:
            return await super()._send_error(send, answer)
        return await send({"type": "http.response.body", "body": b"data: " + answer.body + b"\n\n"})


def _json_headers(body: bytes) -> dict[str, str]:
    return {"content-type": "application/json", "content-length": str(len(body))}


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
