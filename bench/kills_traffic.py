"""The callers of `python -m bench kills`: each sends one request again and again, by the Python client over gRPC or by
OpenAI's client, and returns the answer in a form that can be compared."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import openai

from quire.client import (
    AsyncClient,
    BeamSearch,
    ChatMessage,
    Constraint,
    GenerationOptions,
    SequenceFinished,
    TokenChunk,
)
from quire_torture import traffic as torture
from quire_torture.client import Client, Progress
from quire_torture.traffic import Limits, draw_questions

_NUM_TOKENS = 160
_ASKED = "OpenAI: "
"""The beginning of the names of the kinds that `quire torture` has, too."""
_POLL_S = 0.25
_SCHEMA = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 30, "maxItems": 40}
_STORY = "Once upon a time there was a little girl who had a red ball. She went to the park with her dog. "
_FREE = GenerationOptions(temperature=1.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
_JSON = Constraint(json_schema=_SCHEMA)

Output = Any
"""The part of an answer that can be compared."""
Call = Callable[["Caller"], Awaitable[Output]]


class AnswerError(Exception):
    """A stream breaks a promise; the first word of the message says how: lost or doubled."""


@dataclass(slots=True)
class _Sequence:
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    end: str = ""
    logprobs: list[float] = field(default_factory=list[float])


@dataclass(slots=True)
class Caller:
    """A caller that sends the same request again and again.

    Attributes:
        number: Makes its prompt and its seed.
        kind: A key of `KINDS`.
        client: Over gRPC, to all gateways.
        http: OpenAI's client, to one of the gateways; `plain` and `base_url` lead there, too.
        on_token: Called whenever something of a stream came.
    """

    number: int
    kind: str
    client: AsyncClient
    http: openai.AsyncOpenAI
    plain: httpx.AsyncClient
    base_url: str
    model: str
    on_token: Callable[["Caller"], None]
    began: float = 0.0

    async def call(self) -> Output:
        """Raises AnswerError, QuireError or OpenAIError."""
        self.began = time.monotonic()
        return await KINDS[self.kind](self)

    @property
    def prompt(self) -> str:
        return f"Once upon a time, story {self.number}"


def _generate(options: GenerationOptions, *, length: int = 0, model: str | None = None, priority: int = 0) -> Call:
    async def call(caller: Caller) -> Output:
        prompt = caller.prompt + " " + _STORY * length
        return await _read_grpc(caller, prompt, options, model=model, priority=priority)

    return call


async def _pinned(caller: Caller) -> Output:
    prefix = f"{_STORY * 8} story {caller.number}"
    await caller.client.pin_prefix(prefix, time_to_live_ms=2_000)
    return await _read_grpc(caller, f"{prefix} and then", _FREE)


async def _turns(caller: Caller) -> Output:
    """Each turn has fixed texts as the model's earlier answers: blocks that requests generate are rounded as decodes
    (docs/architecture.md), so that the next turn would not be the same with and without them."""
    messages, answers = [ChatMessage("system", _STORY * 3)], []
    for turn in range(3):
        messages.append(ChatMessage("user", f"{caller.prompt}, turn {turn}"))
        answers.append(await _read_grpc(caller, messages, replace(_FREE, max_tokens=60)))
        messages.append(ChatMessage("assistant", f"The dog ran away, for the {turn}th time. {_STORY}"))
    return answers


async def _read_grpc(
    caller: Caller, prompt: str | Sequence[ChatMessage], options: GenerationOptions, **fields: Any
) -> Output:
    if options.beam_search is None:
        options = replace(options, seed=caller.number)
    sequences: dict[int, _Sequence] = {}
    if isinstance(prompt, str):
        stream = caller.client.generate_stream(prompt, options, durable=True, **fields)
    else:
        stream = caller.client.chat_stream(prompt, options, durable=True, **fields)
    async with stream:
        async for event in stream:
            caller.on_token(caller)
            if isinstance(event, TokenChunk):
                sequence = sequences.setdefault(event.sequence_index, _Sequence())
                has = len(sequence.token_ids)
                if event.offset != has:
                    raise AnswerError(f"{'lost' if event.offset > has else 'doubled'}: {event.offset} after {has}")
                sequence.token_ids += event.token_ids
                sequence.text += event.text
                sequence.logprobs += [each.chosen.logprob for each in event.logprobs]
            elif isinstance(event, SequenceFinished):
                sequence = sequences.setdefault(event.sequence_index, _Sequence())
                if sequence.end:
                    raise AnswerError("doubled: the end of a sequence")
                sequence.end = event.finish_reason
    if stream.completed is None or not all(each.end for each in sequences.values()):
        raise AnswerError("lost: the stream ended early")
    return sequences, stream.completed.usage.prompt_tokens


def _ask(kind: str) -> Call:
    """A request that `quire torture` sends, too."""

    async def call(caller: Caller) -> Output:
        (question,) = draw_questions(caller.number, 1, Limits(max_tokens=_NUM_TOKENS), [kind])
        progress = Progress(torture.Call(caller.number, question))
        answer = await Client(
            caller.plain, caller.base_url, caller.model, 0, on_output=lambda _: caller.on_token(caller)
        ).send(progress)
        if answer.breaches or not answer.is_complete:
            raise AnswerError(f"doubled: {answer.breaches}" if answer.breaches else "lost: the stream ended early")
        return answer

    return call


async def _background(caller: Caller) -> Output:
    made = await caller.http.responses.create(
        model=caller.model,
        input=caller.prompt,
        background=True,
        max_output_tokens=_NUM_TOKENS,
        extra_body={"seed": caller.number},
    )
    while made.status in ("queued", "in_progress"):
        await asyncio.sleep(_POLL_S)
        made = await _ask_again(caller.http.responses.retrieve, made.id)
    return made.status, made.output_text


async def _batch(caller: Caller) -> Output:
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": caller.model, "prompt": caller.prompt, "seed": number, "max_tokens": 60},
        }
        for number in range(6)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await caller.http.files.create(file=("requests.jsonl", content), purpose="batch")
    batch = await caller.http.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(_POLL_S)
        batch = await _ask_again(caller.http.batches.retrieve, batch.id)
    if batch.output_file_id is None:
        raise AnswerError(f"lost: a batch is {batch.status}: {batch.errors}")
    answers = (await _ask_again(caller.http.files.content, batch.output_file_id)).text
    return [
        (each["custom_id"], each["response"]["body"]["choices"][0]["text"])
        for each in map(json.loads, answers.splitlines())
    ]


async def _ask_again(ask: Callable[[str], Awaitable[Any]], asked_for: str) -> Any:
    """A call may be lost with its gateway, but the work that it starts may not."""
    while True:
        try:
            return await ask(asked_for)
        except (openai.APIConnectionError, openai.InternalServerError):
            await asyncio.sleep(_POLL_S)


KINDS: Mapping[str, Call] = {
    "greedy": _generate(GenerationOptions(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)),
    "sampled": _generate(_FREE),
    "three samples": _generate(replace(_FREE, n=3)),
    "best of four": _generate(GenerationOptions(temperature=1.0, n=2, best_of=4, max_tokens=_NUM_TOKENS // 2)),
    "beams": _generate(GenerationOptions(n=2, beam_search=BeamSearch(4), max_tokens=_NUM_TOKENS // 2)),
    "stop strings": _generate(replace(_FREE, stop=("zebra", " and the"), ignore_eos=None)),
    "log probabilities": _generate(replace(_FREE, logprobs=3)),
    "prompt log probabilities": _generate(replace(_FREE, logprobs=1, prompt_logprobs=1), length=4),
    "a JSON schema": _generate(GenerationOptions(temperature=0.9, constraint=_JSON, max_tokens=_NUM_TOKENS)),
    "a regular expression": _generate(
        GenerationOptions(temperature=1.0, constraint=Constraint(regex="([a-z]{3,8} ){20}[0-9]+"), max_tokens=300)
    ),
    "penalties": _generate(replace(_FREE, frequency_penalty=0.5, top_p=0.95, ignore_eos=None)),
    "a prediction": _generate(
        GenerationOptions(temperature=0.0, prediction=_STORY * 3, max_tokens=_NUM_TOKENS), length=2
    ),
    "long": _generate(_FREE, length=20),
    "first": _generate(_FREE, priority=5),
    "last": _generate(_FREE, priority=-5, length=2),
    "pinned": _pinned,
    "turns": _turns,
    **{_ASKED + kind: _ask(kind) for kind in torture.KINDS},
    "background": _background,
    "batch": _batch,
    "adapter a": _generate(_FREE, model="a"),
    "adapter b": _generate(replace(_FREE, n=2), model="b"),
}
DURABLE_KINDS = frozenset(each for each in KINDS if not each.startswith(_ASKED))
"""Kinds whose answers survive their gateway."""
