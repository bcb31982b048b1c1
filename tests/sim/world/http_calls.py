"""Calls over HTTP: the bodies of OpenAI's and Anthropic's APIs, their answers and streams as events that a witness
compares, their errors, and a client that makes the calls."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import h11

from quire.client import GenerationOptions
from quire.rpc import errors
from quire.rpc.errors import QuireError, Unavailable
from tests.sim.world.gateways import HTTP_PORT, character_of, key_of
from tests.sim.world.http import connect
from tests.sim.world.network import Network
from tests.sim.world.oracles import Circumstances, FalseAnswerError, Testimony, Witness
from tests.sim.world.reference import ExpectedSequence
from tests.sim.world.traffic import (
    NUM_SPECIAL_TOKENS,
    TENANT,
    Front,
    Generate,
    Mistake,
    Request,
    Verb,
)
from tests.sim.world.world import Node
from tests.support.logprobs import Line

_SILENCE_S = 80.0
"""What a client waits for bytes: streams have comments every fifteen seconds."""
_KEPT_S = 60.0
"""For how long a client uses an idle connection again: shorter than the gateway keeps it."""
_TOLERANCE = 1e-6
_STATUS_OF_TYPE: Mapping[str, Sequence[int]] = {
    "invalid_request_error": (400, 401, 404, 405, 409, 413, 415, 408, 499),
    "authentication_error": (401,),
    "permission_error": (403,),
    "not_found_error": (404,),
    "request_too_large": (413,),
    "rate_limit_error": (429,),
    "server_error": (500, 503, 504),
    "api_error": (500,),
    "overloaded_error": (503,),
    "timeout_error": (504,),
}
_CLASSES: Mapping[int, Sequence[type[QuireError]]] = {
    400: (errors.InvalidArgument, errors.FailedPrecondition),
    404: (errors.NotFound,),
    409: (errors.Aborted, errors.AlreadyExists),
    429: (errors.ResourceExhausted,),
    499: (errors.Cancelled,),
    500: (errors.Internal,),
    503: (errors.Unavailable,),
    504: (errors.DeadlineExceeded,),
}
_UNTOLD: Mapping[int, Sequence[str]] = {
    429: ("RATE_LIMIT_EXCEEDED", "QUEUE_FULL", "CONCURRENCY_LIMIT"),
    500: ("NON_FINITE_LOGITS", "WORKER_LOST"),
    503: ("UNAVAILABLE", "MODEL_CHANGED"),
}
"""What an error of Anthropic's API may stand for: it has no code."""
_ANTHROPIC_STOPS = {"length": "max_tokens", "stop": "end_turn"}


@dataclass(frozen=True, slots=True)
class Entry:
    """The log probability of a token, and of the most likely ones, by their texts."""

    token: str
    logprob: float
    top: Mapping[str, float]


class HttpWitness(Witness):
    """Compares an answer that has texts in place of token ids with the undisturbed one."""

    def piece(self, index: int, text: str, entries: Sequence[Entry] | None) -> None:
        """The next text of a sequence, with the log probabilities of its tokens where it has any."""
        self.num_events += 1
        said, expected = self._of(index)
        said.text += text
        self._demand(expected.text.startswith(said.text), f"says {said.text!r}, not {expected.text!r}")
        if self.request.options.logprobs is None:
            self._demand(entries is None, f"has {entries}")
        start, said.num_tokens = said.num_tokens, said.num_tokens + len(entries or ())
        lines = expected.lines[start : said.num_tokens]
        self._demand(len(lines) == len(entries or ()), f"{said.num_tokens} of {len(expected.lines)} tokens")
        for token_id, entry, line in zip(expected.token_ids[start:], entries or (), lines, strict=False):
            self._entry(entry, token_id, line)

    def end_of(self, index: int, how: Callable[[ExpectedSequence], tuple[Any, ...]], seen: tuple[Any, ...]) -> None:
        """A sequence has ended; `how` gives what the API says of that."""
        said, expected = self._of(index)
        self._demand(said.text == expected.text, f"it ends with {said.text!r}, not {expected.text!r}")
        has_all = self.request.options.logprobs is None or said.num_tokens == len(expected.token_ids)
        self._demand(has_all, f"it has the log probabilities of {said.num_tokens} tokens")
        self._demand(seen == how(expected), f"ends by {seen}, not {how(expected)}")
        said.is_finished = True

    def usage(self, prompt: int, cached: int, generated: int) -> None:
        self._demand(prompt == len(self.request.prompt) and 0 <= cached <= prompt, f"{prompt} tokens, {cached} cached")
        counts = self.expected.num_generated
        self._demand(counts is None or generated in counts, f"it has generated {generated} tokens, not {counts}")

    def prompt(self, seen: Sequence[Any]) -> None:
        """Log probabilities of the prompt, by token ids."""
        lines = self.expected.prompt_lines
        found = [next(iter(each.items())) for each in seen[1:]]
        self._demand([int(key) for key, _ in found] == [*self.request.prompt[1:]], "other tokens of the prompt")
        # The model's likely tokens have log probabilities of their own, under the same names.
        chosen = [(each, line) for (key, each), line in zip(found, lines, strict=True) if int(key) not in line[2]]
        is_right = all((each["logprob"], each["rank"]) == (line.logprob, line.rank) for each, line in chosen)
        self._demand(is_right, f"{chosen} are the log probabilities of the prompt")

    def over(self) -> None:
        """The answer is whole."""
        self._demand(len(self._said) == self.request.num_returned, "a sequence has said nothing")
        self._demand(all(said.is_finished for said in self._said.values()), "it completes before a sequence")
        self._demand(not self.is_complete, "it completes again")
        self.is_complete = True

    def _entry(self, entry: Entry, token_id: int, line: Line) -> None:
        top = {_spelled(each): value for each, value in zip(line.top_token_ids, line.top_logprobs, strict=True)}
        is_right = entry.token == _spelled(token_id) and abs(entry.logprob - line.logprob) < _TOLERANCE
        self._demand(is_right, f"{entry} is not {line} of {token_id}")
        # OpenAI's completions have the chosen token among the likely ones.
        self._demand(entry.top in (top, top | {entry.token: line.logprob}), f"{entry.top} are not {top}")


def _spelled(token_id: int) -> str:
    return f"<{token_id}>" if token_id < NUM_SPECIAL_TOKENS else character_of(token_id)


def testimony_of(request: Generate, models: Sequence[int]) -> Testimony:
    """What a client is to see of a request, by whatever API it asks."""
    if request.front is None:
        return Testimony.of(request, models)
    return Testimony([HttpWitness.of(request, model) for model in models])


# Which requests go over HTTP.


def with_http(draw: Random, requests: Sequence[Request], clients: Sequence[str]) -> tuple[Request, ...]:
    """A share of the requests goes over HTTP, and some calls have mistakes."""
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
    request = replace(request, verb=verb, timeout_s=None, taken_over_after_s=None)
    if front in (Front.RESPONSES, Front.MESSAGES) and request.deadly_at is None:
        # They have neither seeds nor several sequences.
        options = GenerationOptions(
            temperature=0.0,
            max_tokens=options.max_tokens,
            logprobs=options.logprobs if front is Front.RESPONSES else None,
            stop=options.stop if front is Front.MESSAGES else (),
        )
        return replace(request, front=front, options=options, cancels_after_s=None)
    front = front if front in (Front.COMPLETIONS, Front.CHAT) else Front.CHAT
    if verb is Verb.STREAM:
        options = replace(options, prompt_logprobs=None)
    return replace(request, front=front, options=options)


# Bodies.


def body_of(request: Generate) -> dict[str, Any]:
    """The body of a request."""
    options, text = request.options, "".join(map(character_of, request.prompt))
    body: dict[str, Any]
    streams = {"stream": True} if request.verb is Verb.STREAM else {}
    match request.front:
        case Front.RESPONSES:
            body = {"input": text, "temperature": 0, "max_output_tokens": options.max_tokens} | streams
            if options.logprobs is not None:
                body |= {"include": ["message.output_text.logprobs"], "top_logprobs": options.logprobs}
            return body
        case Front.MESSAGES:
            stops = {"stop_sequences": list(options.stop)} if options.stop else {}
            messages = [{"role": "user", "content": text}]
            return {"messages": messages, "temperature": 0, "max_tokens": options.max_tokens} | stops | streams
        case Front.COMPLETIONS:
            body = {"prompt": text if request.number % 2 else list(request.prompt), "logprobs": options.logprobs}
        case _:
            body = {"messages": [{"role": "user", "content": text}]}
            if options.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": options.logprobs}
    if (search := options.beam_search) is not None:
        early = None if search.early_stopping is None else search.early_stopping.value
        body |= {"use_beam_search": True, "best_of": search.beam_width, "length_penalty": search.length_penalty}
        body["early_stopping"] = {"true": True, "false": False}.get(early or "false", early)
    else:
        body["best_of"] = options.best_of
    if options.constraint is not None:
        body["guided_regex"] = options.constraint.regex
    names = ("n", "temperature", "top_k", "seed", "max_tokens", "ignore_eos", "prompt_logprobs")
    body |= {name: getattr(options, name) for name in names}
    body |= {"stop": list(options.stop), "stop_token_ids": list(options.stop_token_ids)}
    body |= {"priority": -request.priority, "request_id": request.request_id} | streams
    if streams:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": request.number % 2 == 0}
    return {name: value for name, value in body.items() if value is not None}


# Answers.


def _openai_end(request: Generate) -> Callable[[ExpectedSequence], tuple[Any, ...]]:
    def how(expected: ExpectedSequence) -> tuple[Any, ...]:
        token_id = expected.stop_token_id if expected.stop_token_id in request.options.stop_token_ids else None
        return expected.finish_reason.value, token_id if token_id is not None else expected.stop_string

    return how


def _entries(front: Front, shown: Any) -> list[Entry] | None:
    """The log probabilities of a choice or of a part of a response."""
    if shown is None:
        return None
    if front is Front.COMPLETIONS:
        tops = shown["top_logprobs"] or [{}] * len(shown["tokens"])
        return [Entry(*each) for each in zip(shown["tokens"], shown["token_logprobs"], tops, strict=True)]
    content = shown["content"] if front is Front.CHAT else shown
    return [
        Entry(each["token"], each["logprob"], {top["token"]: top["logprob"] for top in each["top_logprobs"]})
        for each in content
    ]


class Reader:
    """Reads the answer of one call, and tells its witnesses."""

    def __init__(self, request: Generate, testimony: Testimony) -> None:
        assert request.front is not None
        self._request, self._front, self._testimony = request, request.front, testimony
        self._events: list[str] = []
        self._text = ""
        self.is_over = False
        """Whether the last event has come: nothing may follow."""

    def whole(self, answer: Any) -> None:
        """An answer that is no stream."""
        request, front = self._request, self._front
        if front is Front.RESPONSES:
            self._response(answer, says_all=True)
        elif front is Front.MESSAGES:
            text = "".join(block["text"] for block in answer["content"])
            self._tell(lambda each: each.piece(0, text, None))
            self._message_end(answer, answer["usage"])
        else:
            self._demand(len({each["index"] for each in answer["choices"]}) == request.num_returned, "wrong indices")
            for choice in answer["choices"]:
                self._choice(choice)
                self._choice_end(choice)
            if (seen := (answer | answer["choices"][0]).get("prompt_logprobs")) is not None:
                self._tell(lambda each: each.prompt(seen))
            self._openai_usage(answer["usage"])
        self._tell(lambda each: each.over())
        self.is_over = True

    def event(self, name: str | None, data: str) -> "_RefusedError | None":
        """An event of a stream; returns the error that it is. None may follow it."""
        self._demand(not self.is_over, f"{data} comes after the end")
        if self._front in (Front.COMPLETIONS, Front.CHAT):
            self._demand(name is None, f"an event has the name {name}")
            return self._chunk(data)
        value = json.loads(data)
        self._demand(name == value["type"], f"{value['type']} has the name {name}")
        self._events.append(value["type"])
        if self._front is Front.RESPONSES:
            self._demand(value["sequence_number"] == len(self._events) - 1, f"{value} is out of order")
        if value["type"] == "error":
            self.is_over = True
            return _RefusedError(None, value, {})
        self._response_event(value) if self._front is Front.RESPONSES else self._message_event(value)
        return None

    # OpenAI's completions and chats

    def _chunk(self, data: str) -> "_RefusedError | None":
        if data == "[DONE]":
            self._demand(self._events == ["usage"], "the stream ends without its usage")
            self._tell(lambda each: each.over())
            self.is_over = True
            return None
        value = json.loads(data)
        self._demand(not self._events, "a chunk comes after the usage")
        if "error" in value:
            self.is_over = True
            return _RefusedError(None, value, {})
        if not value["choices"]:
            self._events.append("usage")
            self._openai_usage(value["usage"])
        for choice in value["choices"]:
            if choice["finish_reason"] is None:
                self._choice(choice)
            else:
                self._choice_end(choice)
        return None

    def _choice(self, choice: Any) -> None:
        index, is_chat = choice["index"], self._front is Front.CHAT
        message = choice.get("delta") or choice.get("message") or {}
        text = (message.get("content") or "") if is_chat else choice["text"]
        entries = _entries(self._front, choice["logprobs"])
        self._tell(lambda each: each.piece(index, text, entries))

    def _choice_end(self, choice: Any) -> None:
        seen, how = (choice["finish_reason"], choice["stop_reason"]), _openai_end(self._request)
        self._tell(lambda each: each.end_of(choice["index"], how, seen))

    def _openai_usage(self, usage: Any) -> None:
        prompt, generated = usage["prompt_tokens"], usage["completion_tokens"]
        self._demand(usage["total_tokens"] == prompt + generated, f"{usage} does not add up")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self._tell(lambda each: each.usage(prompt, cached, generated))

    # OpenAI's responses

    def _response_event(self, value: Any) -> None:
        match value["type"].removeprefix("response."):
            case "output_text.delta":
                self._text += value["delta"]
                shows = self._request.options.logprobs is not None
                entries = _entries(self._front, value["logprobs"]) if shows else None
                self._tell(lambda each: each.piece(0, value["delta"], entries))
            case "output_text.done":
                self._demand(value["text"] == self._text, f"{value} ends {self._text}")
            case "completed" | "incomplete":
                self._response(value["response"], says_all=False)
                self._demand(self._events[:2] == ["response.created", "response.in_progress"], "it begins otherwise")
                self._tell(lambda each: each.over())
                self.is_over = True
            case _:
                pass

    def _response(self, answer: Any, *, says_all: bool) -> None:
        part = answer["output"][0]["content"][0]
        if says_all:
            shows = self._request.options.logprobs is not None
            entries = _entries(self._front, part["logprobs"]) if shows else None
            self._tell(lambda each: each.piece(0, part["text"], entries))
        elif not self._text:
            # All that it says is an empty text, or tokens without one.
            self._tell(lambda each: each.piece(0, "", None))
        self._demand(says_all or part["text"] == self._text, f"{part} ends {self._text}")
        usage = answer["usage"]
        counts = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
        self._tell(lambda each: each.usage(*counts))
        seen, how = (answer["status"],), {"length": "incomplete"}
        self._tell(lambda each: each.end_of(0, lambda end: (how.get(end.finish_reason.value, "completed"),), seen))

    # Anthropic's messages

    def _message_event(self, value: Any) -> None:
        match value["type"]:
            case "content_block_delta":
                self._tell(lambda each: each.piece(0, value["delta"]["text"], None))
            case "message_delta":
                if "content_block_delta" not in self._events:
                    self._tell(lambda each: each.piece(0, "", None))
                self._message_end(value["delta"], value["usage"])
            case "message_stop":
                blocks = ["content_block_start", "content_block_stop"] if "content_block_delta" in self._events else []
                wanted = ["message_start", "ping", *blocks, "message_delta", "message_stop"]
                self._demand([each for each in self._events if each != "content_block_delta"] == wanted, "other events")
                self._tell(lambda each: each.over())
                self.is_over = True
            case _:
                pass

    def _message_end(self, said: Any, usage: Any) -> None:
        def how(end: ExpectedSequence) -> tuple[Any, ...]:
            return "stop_sequence" if end.stop_string else _ANTHROPIC_STOPS[end.finish_reason.value], end.stop_string

        self._tell(lambda each: each.end_of(0, how, (said["stop_reason"], said["stop_sequence"])))
        cached = usage["cache_read_input_tokens"]
        self._tell(lambda each: each.usage(usage["input_tokens"] + cached, cached, usage["output_tokens"]))

    def _tell(self, say: Callable[[Any], None]) -> None:
        self._testimony.demand(say)

    def _demand(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise FalseAnswerError(f"{self._request.request_id}: {otherwise}")


# Errors.


class _RefusedError(Exception):
    """An error came: before an answer, with a status, or in a stream."""

    def __init__(self, status: int | None, value: Any, headers: Mapping[str, str]) -> None:
        super().__init__(f"{status} {value}")
        self.status, self.value, self.headers = status, value, headers

    def candidates(self, front: Front) -> list[QuireError]:
        """What it may stand for. Raises FalseAnswerError where it has not the form of its API."""
        error = self.value.get("error") if isinstance(self.value, dict) else None
        is_anthropic, status = front is Front.MESSAGES, self.status
        fields = {"type", "message"} if is_anthropic else {"message", "type", "param", "code"}
        if not isinstance(error, dict) or {*error} != fields or (is_anthropic and self.value["type"] != "error"):
            raise FalseAnswerError(f"{front}: the error {self} has another form")
        statuses = _STATUS_OF_TYPE[error["type"]]
        if status is not None and (status not in statuses or (status == 503 and not self.headers.get("retry-after"))):
            raise FalseAnswerError(f"{front}: the error {self} has another status, or does not say when to try again")
        found: list[QuireError] = []
        for each in statuses if status is None else (status,):
            reasons = _UNTOLD.get(each, ("",)) if is_anthropic else (error["code"].upper(),)
            found += [cls(error["message"], reason=reason) for cls in _CLASSES.get(each, ()) for reason in reasons]
        return found


class _CutError(Exception):
    """The connection ended before the answer did."""


# Calls.


class _Line:
    """A connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._state = h11.Connection(h11.CLIENT)
        self._used_at = asyncio.get_running_loop().time()

    @property
    def is_open(self) -> bool:
        """Whether another call may use it."""
        is_idle = self._state.states == {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}
        is_kept = asyncio.get_running_loop().time() - self._used_at < _KEPT_S
        return is_idle and is_kept and not self._reader.at_eof()

    def close(self) -> None:
        self._writer.close()

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes, part: float = 1.0) -> None:
        """Sends a request, or a part of its body. What the other end takes slowly is sent slowly."""
        named = {"host": "world", "content-length": str(len(body)), **headers}
        head = h11.Request(method=method, target=path, headers=[*named.items()])
        self._write(self._state.send(head))
        self._write(self._state.send(h11.Data(body[: int(part * len(body))])))
        if part == 1.0:
            self._write(self._state.send(h11.EndOfMessage()))
        with suppress(OSError):
            await self._writer.drain()

    def write(self, data: bytes) -> None:
        """Sends what is no request."""
        self._write(data)

    async def answer(self) -> tuple[int, Mapping[str, str]]:
        """The status and the headers. Raises _CutError, as `chunks` does."""
        head = await self._next()
        return head.status_code, {name.decode(): value.decode() for name, value in head.headers}

    async def chunks(self) -> AsyncIterator[bytes]:
        """The rest of an answer."""
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            yield bytes(event.data)
        if h11.DONE in self._state.states.values() and h11.MUST_CLOSE not in self._state.states.values():
            self._state.start_next_cycle()
        self._used_at = asyncio.get_running_loop().time()

    async def value(self) -> Any:
        """The rest of an answer as JSON."""
        return json.loads(b"".join([chunk async for chunk in self.chunks()]))

    async def events(self) -> AsyncIterator[tuple[str | None, str]]:
        """The rest of an answer as server-sent events: name and data."""
        text = b""
        async for chunk in self.chunks():
            text += chunk
            *whole, text = text.split(b"\n\n")
            for each in whole:
                lines = [line.partition(": ") for line in each.decode().split("\n") if not line.startswith(":")]
                fields = {name: value for name, _, value in lines}
                if "data" in fields:
                    yield fields.get("event"), fields["data"]
        if text:
            raise FalseAnswerError(f"a stream ends in the middle of an event: {text}")

    def _write(self, data: bytes | None) -> None:
        self._writer.write(data or b"")

    async def _next(self) -> Any:
        while (event := self._state.next_event()) is h11.NEED_DATA:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    data = await self._reader.read(65536)
            except (TimeoutError, OSError) as error:
                raise _CutError(str(error)) from error
            if not data:
                raise _CutError("its bytes end")
            self._state.receive_data(data)
        return event


@dataclass(slots=True)
class HttpClient:
    """Makes calls of gateways over HTTP. It uses connections again, and makes no call twice."""

    network: Network
    node: Node
    gateways: Sequence[str]
    circumstances: Circumstances
    _idle: list[_Line] = field(default_factory=list[_Line])

    async def ask(self, request: Generate, testimony: Testimony) -> None:
        """Makes a call. Raises QuireError where it fails for a reason, and else FalseAnswerError."""
        assert request.front is not None
        reader = Reader(request, testimony)
        try:
            async with self._line(request.number) as line:
                await line.send("POST", request.front.value, _headers(request.tenant), _json(body_of(request)))
                status, headers = await line.answer()
                if status != 200:
                    raise _RefusedError(status, await line.value(), headers)
                if "x-request-id" not in headers:
                    raise FalseAnswerError(f"{request.request_id} has no x-request-id")
                if request.verb is not Verb.STREAM:
                    reader.whole(await line.value())
                    return
                refused: _RefusedError | None = None
                async for name, data in line.events():
                    refused = reader.event(name, data) or refused
                    await asyncio.sleep(request.pause_s)
                if refused is not None:
                    raise refused
                if not reader.is_over:
                    raise FalseAnswerError(f"{request.request_id} ends before its last event")
        except _CutError as error:
            if not self.circumstances.may_cut:
                raise FalseAnswerError(f"{request.request_id}: its connection is cut: {error}") from error
            raise Unavailable(f"cut: {error}", reason="CONNECTION_CUT") from error
        except _RefusedError as error:
            raise self._meant(request, error, testimony) from error

    async def err(self, mistake: Mistake) -> None:
        """Makes a call that is wrong, and checks that it is refused as it must be."""
        trial = _MISTAKES[mistake.what]
        fields = _BODIES[mistake.front]
        try:
            async with self._line(mistake.number) as line:
                if trial.raw is not None:
                    line.write(trial.raw)
                else:
                    content = trial.body if trial.body is not None else _json({**fields, **trial.fields})
                    headers = {**_headers(mistake.tenant), **trial.headers}
                    path = trial.path or mistake.front.value
                    await line.send(trial.method, path, headers, content, trial.part)
                if trial.leaves:
                    return
                status, headers = await line.answer()
                value = await line.value() if trial.raw is None else None
        except _CutError as error:
            if not self.circumstances.may_cut:
                raise FalseAnswerError(f"{mistake}: its connection is cut: {error}") from error
            return
        if status == 503 and self.circumstances.has_faults:
            return
        if status != trial.status:
            raise FalseAnswerError(f"{mistake} gets {status}: {value}")
        if trial.raw is None:
            front = Front.CHAT if trial.path is not None else mistake.front
            candidates = _RefusedError(status, value, headers).candidates(front)
            if front is not Front.MESSAGES and value["error"]["code"] != trial.code:
                raise FalseAnswerError(f"{mistake} gets {value}, which may be {candidates}")

    def _meant(self, request: Generate, error: _RefusedError, testimony: Testimony) -> QuireError:
        """Of what the error may stand for, something that there is a reason for."""
        assert request.front is not None
        wrong: FalseAnswerError | None = None
        for candidate in error.candidates(request.front):
            try:
                self.circumstances.check_refusal(request, candidate, testimony.last)
            except FalseAnswerError as false:
                wrong = false
            else:
                return candidate
        raise wrong or FalseAnswerError(f"{request.request_id} fails by {error}")

    @asynccontextmanager
    async def _line(self, number: int) -> AsyncIterator[_Line]:
        """A connection to some gateway. It is kept where the call is over."""
        line = await self._connected(number)
        try:
            yield line
        finally:
            if line.is_open:
                self._idle.append(line)
            else:
                line.close()

    async def _connected(self, number: int) -> _Line:
        while self._idle:
            line = self._idle.pop()
            if line.is_open:
                return line
            line.close()
        first = number % len(self.gateways)
        for gateway in (*self.gateways[first:], *self.gateways[:first]):
            try:
                return _Line(*await connect(self.network, self.node, f"{gateway}:{HTTP_PORT}"))
            except OSError:
                continue
        raise _CutError("no gateway answers")


def _headers(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key_of(TENANT[tenant])}", "content-type": "application/json"}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@dataclass(frozen=True, slots=True)
class _Trial:
    """A call that is wrong, and its refusal; None as a path stands for that of the API."""

    status: int
    code: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    method: str = "POST"
    path: str | None = None
    body: bytes | None = None
    raw: bytes | None = None
    part: float = 1.0
    leaves: bool = False


_CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
_BODIES: Mapping[Front, Mapping[str, Any]] = {
    Front.COMPLETIONS: {"prompt": "abc", "max_tokens": 4},
    Front.CHAT: _CHAT,
    Front.RESPONSES: {"input": "abc", "max_output_tokens": 4},
    Front.MESSAGES: _CHAT,
}
_MISTAKES: Mapping[str, _Trial] = {
    "no JSON": _Trial(400, "malformed_message", body=b'{"prompt": '),
    "unknown field": _Trial(400, "invalid_argument", {"surprise": 1}),
    "wrong type": _Trial(400, "invalid_argument", {"temperature": "hot"}),
    "out of range": _Trial(400, "invalid_argument", {"top_p": 2.0}),
    "unknown model": _Trial(404, "model_not_found", {"model": "another"}),
    "wrong key": _Trial(401, "invalid_api_key", headers={"authorization": "Bearer nobody"}),
    "wrong media type": _Trial(415, "unsupported_media_type", headers={"content-type": "text/plain"}),
    "unknown path": _Trial(404, "path_not_found", path="/v1/nothing"),
    "wrong method": _Trial(405, "method_not_allowed", method="DELETE", path="/v1/completions"),
    "too large": _Trial(413, "body_too_large", headers={"content-length": str(1 << 40)}, part=0.5),
    "body that does not come": _Trial(408, "slow_sender", part=0.5),
    "client that leaves": _Trial(0, "", part=0.5, leaves=True),
    "no HTTP": _Trial(400, "", raw=b"what is this\r\n\r\n"),
}
