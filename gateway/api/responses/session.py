"""Responses over a WebSocket: several streams of one connection, which continue each other's responses.

A client sends `response.create` with the fields of a body, and gets the events of HTTP, each as one message. Responses
of the same `stream_id` run one after the other, others at once; their events name their stream. `response.resume` sends
the rest of a durable or background response, also one that began on a connection to another gateway (ADR 96).
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from websockets.frames import CloseCode

from gateway.api.answers import OPENAI, Dialect, HttpError, as_json, error_answer
from gateway.api.body import BodyLimits, load_json
from gateway.api.field_rule import begin_call
from gateway.api.fields import parse_fields
from gateway.api.respond import EventId, rest_of, streamed
from gateway.api.responses.background import BackgroundResponses
from gateway.api.responses.calls import RecentResponses, ResponseCall, conversation_with
from gateway.api.responses.read_response import ResponseBody
from gateway.api.responses.store import ResponseStore
from gateway.api.websocket import Message, WebSocket
from gateway.auth.caller import current_caller, set_caller
from gateway.auth.keys import Authenticator
from gateway.request.body_memory import message_memory
from gateway.request.models import Models
from gateway.request.violations import renaming, shortened
from gateway.types import ModelKind
from quire.rpc.errors import (
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    invalid_field,
)

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_RESPONSE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# As at OpenAI: responses that run at once, and named streams of a connection.
_MAX_RUNNING = 16
_MAX_STREAMS = 32
_MAX_WAITING = 64
# The events of a stream after the last event that the client has, which sets the dialect of later errors.
_Events = Callable[[Callable[[Dialect], object]], AsyncGenerator[bytes, None]]


@dataclass(frozen=True, slots=True)
class SessionContext:
    """The parts that all sessions of a gateway share. After `idle_s` without a response a connection closes; a ping is
    sent every `keep_alive_s`, unless that is 0."""

    models: Models
    authenticator: Authenticator
    store: ResponseStore
    background: BackgroundResponses
    limits: BodyLimits
    keep_alive_s: float
    sender_timeout_s: float
    idle_s: float


class ResponseSession:
    """The responses of one connection."""

    def __init__(self, context: SessionContext, socket: WebSocket) -> None:
        self._context = context
        self._socket = socket
        self._caller = current_caller()
        self._recent = RecentResponses(socket.hold)
        self._running = asyncio.Semaphore(_MAX_RUNNING)
        self._tasks: set[asyncio.Task[None]] = set()
        # The last task of each stream; None is the stream without a name.
        self._last: dict[str | None, asyncio.Task[None]] = {}
        self._is_draining = False

    async def run(self) -> None:
        """Answers the client until the connection ends."""
        watching = asyncio.create_task(self._watch())
        try:
            async for message in self._socket.messages():
                await self._begin(message)
        finally:
            for task in (watching, *self._tasks):
                task.cancel()
            await asyncio.wait([watching, *self._tasks])
            self._recent.close()

    def drain(self) -> None:
        """Refuses further responses, and closes the connection when the running ones have ended."""
        self._is_draining = True
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._is_draining and not self._tasks:
            self._socket.close(CloseCode.SERVICE_RESTART, "this gateway stops; connect again")

    async def _watch(self) -> None:
        """Closes the connection if nothing happens, or if a message does not end. Sends pings."""
        context, loop = self._context, asyncio.get_running_loop()
        used_at = loop.time()
        while True:
            await asyncio.sleep(min(context.keep_alive_s or context.idle_s, context.idle_s, context.sender_timeout_s))
            used_at = loop.time() if self._tasks else used_at
            begun_at = self._socket.begun_at
            if begun_at is not None and loop.time() - begun_at > context.sender_timeout_s:
                why = f"the message did not end within {context.sender_timeout_s:g} s"
                self._socket.close(CloseCode.POLICY_VIOLATION, why)
            elif loop.time() - max(used_at, begun_at or 0) >= context.idle_s:
                why = f"no response for {context.idle_s:g} s (--websocket-idle-timeout); connect again"
                self._socket.close(CloseCode.GOING_AWAY, why)
            elif context.keep_alive_s:
                self._socket.ping()

    async def _begin(self, message: Message) -> None:
        """Starts to serve a message. Messages of the same stream are served in order."""
        message_memory.set(message.held)
        stream_id: str | None = None
        try:
            fields = await load_json(message.data, self._context.limits)
            if not isinstance(fields, dict):
                raise InvalidArgument("a message must be a JSON object", reason="MALFORMED_MESSAGE")
            stream_id = _stream_of(cast(dict[str, Any], fields))
            self._check_room(stream_id)
        except (QuireError, HttpError) as error:
            message.held.release()
            await self._send_error(stream_id, error)
            return
        before = self._last.get(stream_id)
        serving = asyncio.create_task(self._serve(cast(dict[str, Any], fields), stream_id, before))
        self._tasks.add(serving)
        self._last[stream_id] = serving

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not message.held.is_kept:
                message.held.release()
            self._close_if_drained()

        serving.add_done_callback(ended)

    def _check_room(self, stream_id: str | None) -> None:
        """Raises QuireError if this connection has too many streams or responses."""
        if stream_id not in self._last and len(self._last) >= _MAX_STREAMS + (None in self._last or stream_id is None):
            description = f'is "{stream_id}", and this connection has {_MAX_STREAMS} streams, which is the max'
            raise InvalidArgument.of_field("stream_id", description, reason="WEBSOCKET_STREAM_LIMIT_REACHED")
        if len(self._tasks) >= _MAX_RUNNING + _MAX_WAITING:
            problem = f"{_MAX_RUNNING} responses of this connection run, and {_MAX_WAITING} wait, which is the max"
            raise ResourceExhausted(problem, reason="WEBSOCKET_QUEUE_FULL", retry_after_ms=1000)

    async def _serve(self, fields: dict[str, Any], stream_id: str | None, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        async with self._running:
            dialect: Dialect | None = None

            def use(found: Dialect) -> None:
                nonlocal dialect
                dialect = found

            try:
                self._check_serves()
                ignored = begin_call()
                begin = await self._events_of(fields, stream_id)
                head = {"ignored_fields": ignored.names} if ignored.count else {}
                async with aclosing(begin(use)) as events:
                    async for some in events:
                        for event in some.split(b"\n\n")[:-1]:
                            await self._send(stream_id, event.partition(b"\ndata: ")[2], **head)
                            head = {}
            except Exception as error:
                await self._send_error(stream_id, error, dialect)
                if isinstance(error, Unauthenticated):
                    self._socket.close(CloseCode.POLICY_VIOLATION, error.message)

    def _check_serves(self) -> None:
        """Checks the caller's key again, which may have been revoked, and whether this gateway drains."""
        caller = self._context.authenticator.find(self._caller.key_id, self._caller.tenant)
        if caller is None:
            raise Unauthenticated("the API key of this connection is no longer valid", reason="INVALID_API_KEY")
        set_caller(caller)
        if self._is_draining:
            raise Unavailable("this gateway is about to stop; connect again", reason="DRAINING")

    async def _events_of(self, fields: dict[str, Any], stream_id: str | None) -> _Events:
        match fields.pop("type", None):
            case "response.create":
                return await self._create(fields, stream_id)
            case "response.resume":
                return await self._resume(fields, stream_id)
            case kind:
                shown = "is missing" if kind is None else f'is "{shortened(str(kind))}"'
                raise invalid_field("type", f"{shown}; it must be response.create or response.resume")

    async def _create(self, fields: dict[str, Any], stream_id: str | None) -> _Events:
        context = self._context
        if fields.get("background"):
            raise invalid_field("background", "is true; over a WebSocket use durable, or POST the response")
        if fields.get("stream") is False:
            raise invalid_field("stream", "is false; over a WebSocket each response is a stream")
        generates = fields.pop("generate", None)
        if generates not in (None, True, False):
            raise invalid_field("generate", "must be true or false")
        if generates is False and fields.get("durable"):
            raise invalid_field("durable", "is true; a response that generates nothing has no stream to come back to")
        body = await parse_fields(ResponseBody, {**fields, "stream": True}, context.limits)
        generator = context.models.of(body.model, ModelKind.TEXT)
        conversation = await conversation_with(context.store, body, self._recent)
        model = body.model or generator.model.name
        call = ResponseCall(body, model, context.store, conversation, self._recent, generates=generates is not False)
        if stream_id is not None and body.durable:
            await context.store.run(context.store.name_stream, self._caller.tenant, stream_id, call.id)

        async def events(use: Callable[[Dialect], object]) -> AsyncGenerator[bytes, None]:
            async with aclosing(streamed(generator, call, [])) as each:
                async for some in each:
                    use(call.dialect)
                    yield some

        return events

    async def _resume(self, fields: dict[str, Any], stream_id: str | None) -> _Events:
        """The events after the number `starting_after` of a response: the newest of the stream, or `response_id`."""
        context, tenant = self._context, self._caller.tenant
        response_id, after = fields.pop("response_id", None), fields.pop("starting_after", None)
        if fields:
            known = "the fields are stream_id, response_id and starting_after"
            raise invalid_field(shortened(next(iter(fields))), f"is not a field of response.resume; {known}")
        if after is not None and not (isinstance(after, int) and not isinstance(after, bool) and 0 <= after < 10**9):
            raise invalid_field("starting_after", "must be the sequence_number of an event")
        if response_id is None and stream_id is None:
            raise invalid_field("stream_id", "is missing, and so is response_id; one of them names the response")
        if response_id is None:
            assert stream_id is not None
            response_id = await context.store.run(context.store.of_stream, tenant, stream_id)
            if response_id is None:
                problem = f'stream "{stream_id}" has no durable response that this gateway knows; give its response_id'
                raise NotFound(problem, reason="STREAM_NOT_FOUND")
        if not (isinstance(response_id, str) and _RESPONSE_ID.fullmatch(response_id)):
            raise invalid_field("response_id", "must be the id of a response")
        last = EventId(response_id, -1 if after is None else after)
        if await context.background.get(tenant, response_id) is not None:
            return lambda use: context.background.events(tenant, response_id, last.number)
        read_back = partial(ResponseCall.read_back, store=context.store)

        async def events(use: Callable[[Dialect], object]) -> AsyncGenerator[bytes, None]:
            with renaming(lambda: lambda name: "response_id" if name == "request_id" else name):
                async with aclosing(rest_of(context.models, last, read_back, [], use)) as rest:
                    async for some in rest:
                        yield some

        return events

    async def _send(self, stream_id: str | None, event: bytes, **head: str) -> None:
        """Sends an event, as JSON, with the name of its stream and further fields."""
        own = head if stream_id is None else {"stream_id": stream_id, **head}
        await self._socket.send(as_json(own)[:-1] + b"," + event[1:] if own else event)

    async def _send_error(self, stream_id: str | None, error: Exception, dialect: Dialect | None = None) -> None:
        """Sends an error; `dialect` is that of the stream if it has begun."""
        answer = error_answer(error)
        say = OPENAI.error if dialect is None else dialect.error_event or dialect.error
        event: dict[str, Any] = {**say(answer), "type": "error", "status": answer.status}
        detail: dict[str, Any] = dict(event["error"])
        if answer.param == "previous_response_id" and answer.code == "response_not_found":
            # The name by which clients of OpenAI's WebSockets know that they must send the whole conversation.
            detail["code"] = "previous_response_not_found"
        if answer.headers:
            detail["headers"] = dict(answer.headers)
        await self._send(stream_id, as_json({**event, "error": detail}))


def _stream_of(fields: dict[str, Any]) -> str | None:
    """Takes the name of the stream from a message; None if it has none. Raises InvalidArgument."""
    stream_id: Any = fields.pop("stream_id", None)
    if stream_id is not None and not (isinstance(stream_id, str) and _STREAM_ID.fullmatch(stream_id)):
        description = f'is {shortened(str(stream_id))!r}; it must be 1 to 256 letters, digits, "_", "-" or "."'
        raise InvalidArgument.of_field("stream_id", description, reason="INVALID_STREAM_ID")
    return stream_id
