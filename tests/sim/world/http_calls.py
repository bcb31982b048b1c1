"""Calls over HTTP: requests of OpenAI's and Anthropic's APIs, the answers that they may get, and the client."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from random import Random
from typing import Any, cast

import grpc
import h11

from quire.client import GenerationOptions
from quire.messages.prefix_hashes import salt_digest
from quire.rpc.errors import QuireError, Unavailable, error_for_code
from tests.sim.world.gateways import HTTP_PORT, character_of, key_of
from tests.sim.world.http import connect
from tests.sim.world.network import Network
from tests.sim.world.oracles import Circumstances, FalseAnswerError, Testimony, Witness
from tests.sim.world.traffic import OPERATOR, TENANT, Front, Generate, Mistake, Request, Verb
from tests.sim.world.world import Node
from tests.support.fronts import Answer, Completions, Messages, OpenAiChat, Refusal, Responses

_SILENCE_S = 80.0
"""Maximum seconds that a client waits for bytes: streams have a comment every fifteen seconds."""
_KEPT_S = 60.0
"""Maximum age of an idle connection that a client uses again, less than the gateway's limit."""
_MAX_VISITS, _RETURN_S = 8, 1.0
"""Maximum calls of a durable stream's client, and its pause after a cut connection."""
_FRONTS = {each.path: each(cast(Any, None)) for each in (Completions, OpenAiChat, Responses, Messages)}
_OPENAI = (Front.COMPLETIONS, Front.CHAT)
# Candidates for an error in a stream, which has no status, and for Anthropic's errors, which have no reasons.
_CODES = ("UNAVAILABLE", "INTERNAL", "CANCELLED", "RESOURCE_EXHAUSTED", "ABORTED", "DEADLINE_EXCEEDED", "NOT_FOUND")
_REASONS: Mapping[str, Sequence[str]] = {
    "UNAVAILABLE": ("MODEL_CHANGED",),
    "INTERNAL": ("NON_FINITE_LOGITS", "WORKER_LOST"),
    "RESOURCE_EXHAUSTED": ("RATE_LIMIT_EXCEEDED", "QUEUE_FULL", "CONCURRENCY_LIMIT", "DURABLE_LIMIT"),
}
_ERROR_FIELDS = {"message", "type", "param", "code"}


class HttpWitness(Witness):
    """Compares an answer with texts in place of token ids with the undisturbed one."""

    def piece(self, index: int, text: str, logprobs: Sequence[float]) -> None:
        """The next text of a sequence, and the log probabilities of its tokens if the request asks for them."""
        self.num_events += 1
        said, expected = self._of(index)
        said.text += text
        self._demand(expected.text.startswith(said.text), f"says {said.text!r}, not {expected.text!r}")
        start, said.num_tokens = said.num_tokens, said.num_tokens + len(logprobs)
        wanted = [line.logprob for line in expected.lines[start : said.num_tokens]]
        self._demand([*logprobs] == wanted, f"has {logprobs} at {start}, not {wanted}")

    def end_of(self, index: int, finish: str, stop: str | int | None) -> None:
        """The end of a sequence, in the API's terms."""
        said, expected = self._of(index)
        front, options = self.request.front, self.request.options
        self._demand(said.text == expected.text, f"it ends with {said.text!r}, not {expected.text!r}")
        num_tokens = 0 if options.logprobs is None else len(expected.token_ids)
        self._demand(said.num_tokens == num_tokens, f"has log probabilities of {said.num_tokens} tokens")
        token_id = expected.stop_token_id if front in _OPENAI else None
        wanted = token_id if token_id in options.stop_token_ids else expected.stop_string
        is_right = finish == expected.finish_reason.value and (stop == wanted or front is Front.RESPONSES)
        self._demand(is_right, f"ends by {finish} {stop}, not by {expected.finish_reason} {wanted}")
        said.is_finished = True

    def over(self, usage: tuple[int, int] | None) -> None:
        """The answer is complete."""
        self._demand(len(self._said) == self.request.num_returned, "a sequence has said nothing")
        self._demand(all(said.is_finished for said in self._said.values()), "it completes before a sequence")
        counts = self.expected.num_generated
        num_prompt_tokens = self.request.num_prompt_tokens
        is_right = usage is not None and usage[0] == num_prompt_tokens and usage[1] in (counts or ())
        self._demand(is_right, f"{usage} of {num_prompt_tokens} tokens and {counts}")
        self.is_complete = True


def testimony_of(request: Generate, models: Sequence[int]) -> Testimony:
    """The expected answer of a request, in the form of its API."""
    if request.front is None:
        return Testimony.of(request, models)
    return Testimony([HttpWitness.of(request, model) for model in models])


# Requests that go over HTTP.


def with_http(draw: Random, requests: Sequence[Request], clients: Sequence[str]) -> tuple[Request, ...]:
    """Sends a share of the requests over HTTP, and adds wrong calls."""
    share = draw.choice((0.0, 0.0, 0.0, 0.3, 0.3, 1.0))
    if not share:
        return tuple(requests)
    changed = [
        _over_http(draw, each) if isinstance(each, Generate) and draw.random() < share else each for each in requests
    ]
    last_s = max((each.at for each in requests), default=0.0)
    for number in range(len(requests), len(requests) + draw.randrange(4)):
        front, what = draw.choice(tuple(Front)), draw.choice(tuple(_MISTAKES))
        changed.append(Mistake(number, draw.uniform(0, last_s), draw.choice(clients), "ann", front, what))
    return tuple(changed)


def _over_http(draw: Random, request: Generate) -> Generate:
    front, options = draw.choice(tuple(Front)), request.options
    verb = draw.choice((Verb.GENERATE, Verb.STREAM, Verb.STREAM))
    if options.beam_search is not None or options.constraint is not None:
        return request
    if front in _OPENAI or request.deadly_at is not None:
        front, options = front if front in _OPENAI else Front.CHAT, replace(options, prompt_logprobs=None)
    else:
        # Other fronts have neither seeds nor several sequences, nor an id by which another call could cancel them.
        stop, logprobs = (options.stop, None) if front is Front.MESSAGES else ((), options.logprobs)
        options = GenerationOptions(temperature=0.0, max_tokens=options.max_tokens, logprobs=logprobs, stop=stop)
        request = replace(request, cancels_after_s=None)
    return replace(request, front=front, options=options, verb=verb, timeout_s=None, taken_over_after_s=None)


def with_returns(draw: Random, requests: Sequence[Request]) -> tuple[Request, ...]:
    """Makes many of the requests durable streams over HTTP, whose clients leave and come back repeatedly."""
    return tuple(_returning(draw, each) if isinstance(each, Generate) else each for each in requests)


def _returning(draw: Random, request: Generate) -> Generate:
    over_http = request if request.front is not None else _over_http(draw, request)
    is_bound = request.others or request.adapter is not None or request.deadly_at is not None
    if is_bound or over_http.front is None or draw.random() < 0.3:
        return request
    # A call that comes back counts towards the rate limits of its key.
    return replace(
        over_http,
        verb=Verb.STREAM,
        tenant=request.tenant if request.tenant in ("ann", "bob") else "ann",
        timeout_s=None,
        leaves_after_s=None,
        taken_over_after_s=None,
        returns_after=draw.choice((1, 3, 10, 30)),
    )


def with_several_prompts(draw: Random, requests: Sequence[Request]) -> tuple[Request, ...]:
    """Makes many of the requests completions of several prompts, some with a common prefix."""
    return tuple(
        _of_several_prompts(draw, each) if isinstance(each, Generate) and draw.random() < 0.6 else each
        for each in requests
    )


def _of_several_prompts(draw: Random, request: Generate) -> Generate:
    options, is_plain = request.options, request.verb in (Verb.GENERATE, Verb.STREAM)
    is_bound = options.beam_search is not None or options.constraint is not None or request.deadly_at is not None
    if is_bound or request.adapter is not None or not (is_plain if request.front is None else request.front in _OPENAI):
        return request
    others = tuple(
        request.prompt[: draw.choice((0, 8, 90))] + tuple(draw.choice(request.prompt) for _ in range(9))
        for _ in range(draw.randint(1, 3))
    )
    options = replace(options, prompt_logprobs=None)
    request = replace(request, front=Front.COMPLETIONS, options=options, others=others)
    return replace(request, timeout_s=None, cancels_after_s=None)


def _salt_text_of(request: Generate) -> str:
    return f"salt {request.number % 3}" if request.front is not None and request.number % 3 else ""


def salt_of(request: Generate) -> bytes:
    """The digest of the request's prefix cache salt; empty without a salt."""
    return salt_digest(_salt_text_of(request))


def _body_of(request: Generate) -> dict[str, Any]:
    assert request.front is not None
    options, text = request.options, "".join(map(character_of, request.prompt))
    names = ["temperature", "max_tokens", "logprobs", "stop"]
    fields: dict[str, Any] = {}
    if request.front in _OPENAI:
        names = [each.name for each in fields_of(options)]
        fields = {"priority": request.priority, "request_id": request.request_id}
    fields |= {name: getattr(options, name) for name in names if getattr(options, name) not in (None, (), {})}
    if salt := _salt_text_of(request):
        fields["cache_salt"] = salt
    is_list = request.front is Front.COMPLETIONS and request.number % 2
    prompt = [[*each] for each in (request.prompt, *request.others)] if request.others else [*request.prompt]
    front = _FRONTS[request.front.value]
    body = front._body(prompt if is_list or request.others else text, fields)
    streaming = front.streaming if request.verb is Verb.STREAM else {}
    return body | streaming | ({"durable": True} if request.returns_after else {})


class _Reader:
    """Reads the answer of one call, and passes it to its witnesses.

    Attributes:
        is_over: Whether the last event has arrived: no other one may follow.
        num_events: Number of events so far.
        last_id: The id of the last event that had one.
    """

    def __init__(self, request: Generate, testimony: Testimony) -> None:
        assert request.front is not None
        self._request, self._testimony = request, testimony
        self._front = _FRONTS[request.front.value]
        self._answers: dict[int, Answer] = {}
        self._events: list[str] = []
        self.is_over = False
        self.num_events = 0
        self.last_id: str | None = None

    def whole(self, data: Any) -> None:
        """Reads an answer that is not a stream."""
        self._take(data, is_whole=True)
        self._end()

    def event(self, event_id: str | None, name: str | None, data: str) -> Refusal | None:
        """Reads an event of a stream; returns its error, if it is one."""
        self._demand(not self.is_over, f"{data} comes after the end")
        if data == "[DONE]":
            self._end()
            return None
        value = json.loads(data)
        if "error" not in value:
            self._number(event_id, data)
        self._demand(name == value.get("type"), f"{value} has the name {name}")
        self._events.append(name or "")
        if "sequence_number" in value:
            self._demand(value["sequence_number"] == len(self._events) - 1, f"{value} is out of order")
        if "error" in value:
            self.is_over = True
            return _refusal_of(self._request.front, "", value)
        self._take(value, is_whole=False)
        if name in ("response.completed", "response.incomplete", "message_stop"):
            self._check_events()
            self._end()
        return None

    def _number(self, event_id: str | None, data: str) -> None:
        """Checks event ids: events of durable streams are numbered, other events have no id."""
        if self._request.returns_after is None:
            self._demand(event_id is None, f"{data} has the id {event_id}")
            return
        prefix, _, number = (event_id or "").rpartition(":")
        is_known = self.last_id is None or prefix == self.last_id.rpartition(":")[0]
        self._demand(is_known and number == str(self.num_events), f"event {self.num_events} has the id {event_id}")
        self.num_events, self.last_id = self.num_events + 1, event_id

    def _take(self, data: Any, *, is_whole: bool) -> None:
        if "choices" not in data:
            answer = self._answers.setdefault(0, Answer())
            self._front._add_whole(answer, data) if is_whole else self._front._add_event(answer, data)
            self._tell(0)
        elif not data["choices"]:
            self._front._add_event(self._answers[0], data)
        for choice in data.get("choices", ()):
            answer = self._answers.setdefault(choice["index"], Answer())
            self._front._add_event(answer, {**data, "choices": [choice]})
            self._tell(choice["index"])

    def _tell(self, index: int) -> None:
        """Passes the new part of a sequence to the witnesses."""
        answer = self._answers[index]
        text, logprobs, finish, stop = answer.text, answer.logprobs, answer.finish, answer.stop
        answer.pieces, answer.logprobs, answer.finish = [], [], None
        if text or logprobs:
            self._testimony.demand(lambda each: each.piece(index, text, logprobs))
        if finish is not None:
            self._testimony.demand(lambda each: each.end_of(index, finish, stop))

    def _check_events(self) -> None:
        said = [each for each in self._events if not each.endswith(".delta") and each != "content_block_delta"]
        ends = ("content_block_start", "content_block_stop") if "content_block_delta" in self._events else ()
        messages = ["message_start", "ping", *ends, "message_delta", "message_stop"]
        item = ("output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done")
        responses = [f"response.{each}" for each in ("created", "in_progress", *item)]
        wanted = messages if self._request.front is Front.MESSAGES else [*responses, said[-1]]
        self._demand(said == wanted, f"the events {said} are not {wanted}")

    def _end(self) -> None:
        usage = self._answers[0].usage if self._answers else None
        self._testimony.demand(lambda each: each.over(usage))
        self.is_over = True

    def _demand(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise FalseAnswerError(f"{self._request.request_id}: {otherwise}")


def _refusal_of(front: Front | None, status: str, value: Any, headers: Mapping[str, str] | None = None) -> Refusal:
    """Raises FalseAnswerError if an error does not have the form of its API."""
    is_anthropic, error = front is Front.MESSAGES, value["error"]
    has_form = {*error} == ({"type", "message"} if is_anthropic else _ERROR_FIELDS)
    if not has_form or (is_anthropic and value["type"] != "error"):
        raise FalseAnswerError(f"{front}: the error {value} has another form")
    if status == "UNAVAILABLE" and not (headers or {}).get("retry-after"):
        raise FalseAnswerError(f"{front}: the error {value} does not say when to try again")
    return Messages._refusal(status, error) if is_anthropic else Completions._refusal(status, error)


class _RefusedError(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class _CutError(Exception):
    """The connection ended before the answer did."""


# Calls.


class _Line:
    """A client's connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers_within_s: float | None
    ) -> None:
        """A whole answer may take as long as the world runs; `answers_within_s` is the limit if connections break."""
        self._reader, self.writer = reader, writer
        self._answers_within_s = answers_within_s
        self._state = h11.Connection(h11.CLIENT)
        self._used_at = asyncio.get_running_loop().time()

    @property
    def is_open(self) -> bool:
        """Whether another call may use the connection."""
        is_idle = self._state.states == {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}
        is_kept = asyncio.get_running_loop().time() - self._used_at < _KEPT_S
        return is_idle and is_kept and not self._reader.at_eof()

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes, part: float = 1.0) -> None:
        """Sends a request, or a part of its body, as slowly as the other end reads it."""
        named = {"host": "world", "content-length": str(len(body)), "content-type": "application/json", **headers}
        events = [h11.Request(method=method, target=path, headers=[*named.items()])]
        events += [h11.Data(body[: int(part * len(body))]), *([h11.EndOfMessage()] if part == 1.0 else [])]
        self.writer.write(b"".join(self._state.send(event) or b"" for event in events))
        with suppress(OSError):
            await self.writer.drain()

    async def answer(self) -> tuple[int, Mapping[str, str]]:
        """The status and the headers. Raises _CutError, as `chunks` does."""
        head = await self._next(self._answers_within_s)
        return head.status_code, {name.decode(): value.decode() for name, value in head.headers}

    async def chunks(self) -> AsyncIterator[bytes]:
        """The rest of an answer."""
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            yield bytes(event.data)
        if [*self._state.states.values()] == [h11.DONE, h11.DONE]:
            self._state.start_next_cycle()
        self._used_at = asyncio.get_running_loop().time()

    async def value(self) -> Any:
        """The rest of an answer as JSON."""
        return json.loads(b"".join([chunk async for chunk in self.chunks()]))

    async def events(self) -> AsyncIterator[tuple[str | None, str | None, str]]:
        """The rest of an answer as server-sent events: id, name and data."""
        text = b""
        async for chunk in self.chunks():
            *whole, text = (text + chunk).split(b"\n\n")
            for each in whole:
                fields = dict(line.split(": ", 1) for line in each.decode().split("\n"))
                if "data" in fields:
                    yield fields.get("id"), fields.get("event"), fields["data"]
        if text:
            raise FalseAnswerError(f"a stream ends in the middle of an event: {text}")

    async def _next(self, within_s: float | None = _SILENCE_S) -> Any:
        while (event := self._state.next_event()) is h11.NEED_DATA:
            try:
                async with asyncio.timeout(within_s):
                    data = await self._reader.read(65536)
            except (TimeoutError, OSError) as error:
                raise _CutError(str(error)) from error
            if not data:
                raise _CutError("its bytes end")
            self._state.receive_data(data)
        return event


@dataclass(slots=True)
class HttpClient:
    """Makes calls of gateways over HTTP. It reuses connections, and repeats no call."""

    network: Network
    node: Node
    gateways: Sequence[str]
    circumstances: Circumstances
    _idle: list[_Line] = field(default_factory=list[_Line])

    async def ask(self, request: Generate, testimony: Testimony) -> None:
        """Makes a call, or several calls of a durable stream, where each gets the rest. Raises QuireError if it fails
        for a valid reason, and else FalseAnswerError."""
        reader = _Reader(request, testimony)
        for number in range(_MAX_VISITS):
            is_last = request.returns_after is None or number == _MAX_VISITS - 1
            if await self._visit(request, testimony, reader, number, is_last=is_last):
                return

    async def _visit(
        self, request: Generate, testimony: Testimony, reader: _Reader, number: int, *, is_last: bool
    ) -> bool:
        """Makes one of the calls of a request. Returns whether it was the last one."""
        assert request.front is not None
        refused, before = None, reader.num_events
        try:
            async with self._line(request.number + number, is_new=number > 0) as line:
                sent = {"authorization": f"Bearer {key_of(TENANT[request.tenant])}"}
                if reader.last_id is not None:
                    sent["last-event-id"] = reader.last_id
                await line.send("POST", request.front.value, sent, json.dumps(_body_of(request)).encode())
                status, headers = await line.answer()
                if status != 200:
                    named = _STATUSES[status]
                    raise _RefusedError(_refusal_of(request.front, named, await line.value(), headers))
                if request.verb is not Verb.STREAM:
                    reader.whole(await line.value())
                    return True
                async for event_id, name, data in line.events():
                    refused = reader.event(event_id, name, data) or refused
                    await asyncio.sleep(request.pause_s)
                    if not is_last and reader.num_events - before == request.returns_after and not refused:
                        return False
                if refused is not None:
                    raise _RefusedError(refused)
                if not reader.is_over:
                    raise FalseAnswerError(f"{request.request_id} ends before its last event")
                return True
        except _CutError as error:
            cut = self._cut(request.request_id, error)
            if is_last or reader.last_id is None:
                raise cut from error
            await asyncio.sleep(_RETURN_S)
            return False
        except _RefusedError as error:
            raise self._meant(request, error.refusal, testimony) from error

    async def err(self, mistake: Mistake) -> None:
        """Makes a wrong call, and checks that it is refused as expected."""
        status, code, how = _MISTAKES[mistake.what]
        fields = _FRONTS[mistake.front.value]._body("abc", {"max_tokens": 4}) | how.get("fields", {})
        headers = {"authorization": f"Bearer {key_of(TENANT[mistake.tenant])}"} | how.get("headers", {})
        path, value, seen = how.get("path", mistake.front.value), None, 0
        answered: Mapping[str, str] = {}
        try:
            async with self._line(mistake.number) as line:
                if "raw" in how:
                    line.writer.write(how["raw"])
                else:
                    content = how.get("body", json.dumps(fields).encode())
                    await line.send(how.get("method", "POST"), path, headers, content, how.get("part", 1.0))
                if status:
                    seen, answered = await line.answer()
                    value = None if "raw" in how else await line.value()
        except _CutError as error:
            self._cut(str(mistake), error)
            return
        if seen == 503 and self.circumstances.has_faults:
            return
        if seen != status:
            raise FalseAnswerError(f"{mistake} gets {seen}: {value}")
        if value is not None:
            front = Front.CHAT if "path" in how else mistake.front
            reason = _refusal_of(front, _STATUSES.get(seen, ""), value, answered).reason
            code = code if reason is not None else None
            if (reason or "").lower() != (code or ""):
                raise FalseAnswerError(f"{mistake} gets {value}")

    async def command(self, number: int, method: str, path: str) -> tuple[int, Any]:
        """Makes an operator's call, of the gateway with this number first. Returns the status and the answer. Raises as
        `ask` does."""
        try:
            async with self._line(number) as line:
                await line.send(method, path, {"authorization": f"Bearer {key_of(OPERATOR)}"}, b"")
                status, headers = await line.answer()
                value = await line.value()
        except _CutError as error:
            raise self._cut(path, error) from error
        if status not in (200, 503) or "error" in value:
            _refusal_of(Front.COMPLETIONS, _STATUSES.get(status, ""), value, headers)
        return status, value

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().writer.close()

    def _cut(self, what: str, error: _CutError) -> QuireError:
        if not self.circumstances.may_cut:
            raise FalseAnswerError(f"{what}: its connection is cut: {error}") from error
        return Unavailable(f"cut: {error}", reason="CONNECTION_CUT")

    def _meant(self, request: Generate, refusal: Refusal, testimony: Testimony) -> QuireError:
        """The first error that the refusal may stand for and that has a valid reason."""
        for code in (refusal.status,) if refusal.status else _CODES:
            for reason in (None, *_REASONS.get(code, ())) if refusal.reason is None else (refusal.reason,):
                found = error_for_code(grpc.StatusCode[code], refusal.message, reason=reason)
                with suppress(FalseAnswerError):
                    self.circumstances.check_refusal(request, found, testimony.last)
                    return found
        raise FalseAnswerError(f"{request} fails by {refusal}")

    @asynccontextmanager
    async def _line(self, number: int, *, is_new: bool = False) -> AsyncIterator[_Line]:
        """A connection to some gateway, which is kept if the call is over."""
        line = await self._connected(number, is_new=is_new)
        try:
            yield line
        finally:
            if line.is_open:
                self._idle.append(line)
            else:
                line.writer.close()

    async def _connected(self, number: int, *, is_new: bool) -> _Line:
        while self._idle and not is_new:
            line = self._idle.pop()
            if line.is_open:
                return line
            line.writer.close()
        first = number % len(self.gateways)
        answers_within_s = _SILENCE_S if self.circumstances.may_cut else None
        for gateway in (*self.gateways[first:], *self.gateways[:first]):
            with suppress(OSError):
                ends = await connect(self.network, self.node, f"{gateway}:{HTTP_PORT}")
                return _Line(*ends, answers_within_s=answers_within_s)
        raise _CutError("no gateway answers")


_UNREAD = ("prompt_embeds", "conversation", "container")
"""Fields that an API refuses; each API refuses one of them."""
_STATUSES = {
    400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 409: "ABORTED", 429: "RESOURCE_EXHAUSTED", 499: "CANCELLED",
    500: "INTERNAL", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip
_MISTAKES: Mapping[str, tuple[int, str, dict[str, Any]]] = {
    "no JSON": (400, "malformed_message", {"body": b'{"prompt": '}),
    "field that is refused": (400, "invalid_argument", {"fields": dict.fromkeys(_UNREAD, "a")}),
    "wrong type": (400, "invalid_argument", {"fields": {"temperature": "hot"}}),
    "out of range": (400, "invalid_argument", {"fields": {"top_p": 2.0}}),
    "unknown model": (404, "model_not_found", {"fields": {"model": "another"}}),
    "wrong key": (401, "invalid_api_key", {"headers": {"authorization": "Bearer nobody"}}),
    "wrong media type": (415, "unsupported_media_type", {"headers": {"content-type": "text/plain"}}),
    "unknown path": (404, "path_not_found", {"path": "/v1/nothing"}),
    "wrong method": (405, "method_not_allowed", {"path": "/v1/completions", "method": "DELETE"}),
    "too large": (413, "body_too_large", {"headers": {"content-length": str(1 << 40)}, "part": 0.5}),
    "body that does not come": (408, "slow_sender", {"part": 0.5}),
    "client that leaves": (0, "", {"part": 0.5}),
    "no HTTP": (400, "", {"raw": b"what is this\r\n\r\n"}),
}
"""Status and code of the refusal, and the mistake."""
