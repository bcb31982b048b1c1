"""The requests of `python -m bench kills` and `bench hostile`: durable streams by the Python client over gRPC, work
without a caller by OpenAI's client, and the requests of `quire torture`. All become answers that its oracle compares.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
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
    RetryPolicy,
    SequenceFinished,
    TokenChunk,
)
from quire.rpc.errors import QuireError, ResourceExhausted
from quire_torture import traffic as torture
from quire_torture.answers import Answer, Choice, Usage
from quire_torture.client import Client, FailedError, Progress
from quire_torture.traffic import STORY, Call, Limits, Question, draw_questions

_CALL_TIMEOUT_S = 600.0
_NUM_TOKENS = 160
_POLL_S = 0.25
_SCHEMA = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 30, "maxItems": 40}
_FREE = GenerationOptions(temperature=1.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
_JSON = Constraint(json_schema=_SCHEMA)


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of a kind that only Quire has, and the clients that it may use.

    Attributes:
        client: Over gRPC, to all gateways.
        http: OpenAI's client, to one of them.
    """

    progress: Progress
    client: AsyncClient
    http: openai.AsyncOpenAI
    model: str

    @property
    def number(self) -> int:
        return self.progress.call.question.number

    @property
    def prompt(self) -> str:
        return str(self.progress.call.question.body["prompt"])

    def note_output(self) -> None:
        self.progress.num_events += 1
        self.progress.note_output()


@dataclass(frozen=True, slots=True)
class Gateways:
    """One or more gateways under torture; callers take turns at them.

    Attributes:
        addresses: For gRPC.
        clients: Each goes on at the other gateways if its own breaks.
    """

    addresses: Sequence[str]
    clients: Sequence[AsyncClient]
    http: Sequence[openai.AsyncOpenAI]
    plain: Sequence[Client]
    model: str

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, grpc: Sequence[str], http: Sequence[str]) -> AsyncIterator["Gateways"]:
        """Waits until they serve. `grpc` and `http` have one address for each gateway."""
        async with contextlib.AsyncExitStack() as stack:
            # On a busy machine all processes may start later than the 30 s for which clients wait by default.
            retry = RetryPolicy(resume_for_s=_CALL_TIMEOUT_S)
            clients = [
                await stack.enter_async_context(AsyncClient([*grpc[number:], *grpc[:number]], retry=retry))
                for number, _ in enumerate(grpc)
            ]
            urls = [f"http://{address}" for address in http]
            openais = [
                await stack.enter_async_context(
                    openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=_CALL_TIMEOUT_S)
                )
                for url in urls
            ]
            limits = httpx.Limits(max_connections=None)
            plain = await stack.enter_async_context(httpx.AsyncClient(timeout=_CALL_TIMEOUT_S, limits=limits))
            await until_served(grpc)
            model = (await clients[0].list_models())[0].name
            yield cls(grpc, clients, openais, [Client(plain, url, model, 0) for url in urls], model)

    async def send(self, progress: Progress) -> Answer:
        place = progress.caller % len(self.clients)
        ask = KINDS.get(progress.call.question.kind)
        if ask is None:
            return await self.plain[place].send(progress)
        try:
            return await ask(Asked(progress, self.clients[place], self.http[place], self.model))
        except (QuireError, openai.OpenAIError) as error:
            kind = f"{error.code.name} {error.reason}" if isinstance(error, QuireError) else type(error).__name__
            raise FailedError(kind, detail=" ".join(str(error).split())[:200]) from error

    async def serves(self, call: Call, timeout_s: float) -> bool:
        """Whether each gateway serves."""
        return all(await asyncio.gather(*(_serves(address, timeout_s) for address in self.addresses)))


async def until_served(addresses: Iterable[str]) -> None:
    """Waits until a request succeeds through each gateway."""
    for address in addresses:
        while not await _serves(address, 20):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)


async def _serves(address: str, timeout_s: float) -> bool:
    # A new client does not wait before it connects again.
    try:
        async with AsyncClient(address) as client:
            await client.generate("a", GenerationOptions(max_tokens=1), timeout_s=timeout_s)
    except QuireError as error:
        return isinstance(error, ResourceExhausted)
    return True


def draw(seed: int, count: int, kinds: Sequence[str]) -> list[Question]:
    """`count` questions of these kinds, ours and the kinds of `quire torture`, in turn."""
    places = [kinds[(seed + number) % len(kinds)] for number in range(count)]
    # Ours have the prompts of a completion.
    drawn = [each if each in torture.KINDS else "completion" for each in places]
    questions = draw_questions(seed, count, Limits(max_tokens=_NUM_TOKENS), drawn)
    return [replace(each, kind=kind) for each, kind in zip(questions, places, strict=True)]


@dataclass(slots=True)
class _Sequence:
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    end: str | None = None
    logprobs: list[float] = field(default_factory=list[float])


Ask = Callable[[Asked], Awaitable[Answer]]


def _generate(options: GenerationOptions, *, length: int = 0, model: str | None = None, priority: int = 0) -> Ask:
    async def ask(asked: Asked) -> Answer:
        prompt = asked.prompt + " " + STORY * length
        return await _read_grpc(asked, prompt, options, model=model, priority=priority)

    return ask


async def _pinned(asked: Asked) -> Answer:
    prefix = f"{STORY * 8} {asked.prompt}"
    await asked.client.pin_prefix(prefix, time_to_live_ms=2_000)
    return await _read_grpc(asked, f"{prefix} and then", _FREE)


async def _turns(asked: Asked) -> Answer:
    """Each turn has fixed texts as the model's earlier answers: blocks that requests generate are rounded as decodes
    (docs/architecture.md), so that the next turn would not be the same with and without them."""
    messages, answers = [ChatMessage("system", STORY * 3)], list[Answer]()
    for turn in range(3):
        messages.append(ChatMessage("user", f"{asked.prompt}, turn {turn}"))
        answers.append(await _read_grpc(asked, messages, replace(_FREE, max_tokens=60)))
        messages.append(ChatMessage("assistant", f"The dog ran away, for the {turn}th time. {STORY}"))
    choices = {turn: answer.choices[0] for turn, answer in enumerate(answers)}
    breaches = tuple(each for answer in answers for each in answer.breaches)
    return Answer(choices, None, all(each.is_complete for each in answers), breaches)


async def _read_grpc(
    asked: Asked, prompt: str | Sequence[ChatMessage], options: GenerationOptions, **fields: Any
) -> Answer:
    if options.beam_search is None:
        options = replace(options, seed=asked.number)
    sequences, breaches = dict[int, _Sequence](), list[str]()
    if isinstance(prompt, str):
        stream = asked.client.generate_stream(prompt, options, durable=True, **fields)
    else:
        stream = asked.client.chat_stream(prompt, options, durable=True, **fields)
    async with stream:
        async for event in stream:
            asked.note_output()
            if isinstance(event, TokenChunk):
                sequence = sequences.setdefault(event.sequence_index, _Sequence())
                if event.offset != len(sequence.token_ids):
                    breaches.append(f"token {event.offset} after {len(sequence.token_ids)} tokens")
                sequence.token_ids += event.token_ids
                sequence.text += event.text
                sequence.logprobs += [each.chosen.logprob for each in event.logprobs]
            elif isinstance(event, SequenceFinished):
                sequence = sequences.setdefault(event.sequence_index, _Sequence())
                if sequence.end is not None:
                    breaches.append("two ends of a sequence")
                sequence.end = event.finish_reason
    is_complete = stream.completed is not None and all(each.end is not None for each in sequences.values())
    # Token ids stand where other answers have tool calls, so that they are compared, too.
    choices = {
        index: Choice(each.text, (("token ids", str(each.token_ids)),), each.end, tuple(each.logprobs))
        for index, each in sequences.items()
    }
    num_prompt = 0 if stream.completed is None else stream.completed.usage.prompt_tokens
    num_output = sum(len(each.token_ids) for each in sequences.values())
    return Answer(choices, Usage(num_prompt, num_output, num_prompt + num_output), is_complete, tuple(breaches))


async def _background(asked: Asked) -> Answer:
    made = await asked.http.responses.create(
        model=asked.model,
        input=asked.prompt,
        background=True,
        max_output_tokens=_NUM_TOKENS,
        extra_body={"seed": asked.number},
    )
    while made.status in ("queued", "in_progress"):
        await asyncio.sleep(_POLL_S)
        made = await _ask_again(asked.http.responses.retrieve, made.id)
    return Answer({0: Choice(made.output_text, (), made.status, ())}, None, is_complete=True)


async def _batch(asked: Asked) -> Answer:
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": asked.model, "prompt": asked.prompt, "seed": number, "max_tokens": 60},
        }
        for number in range(6)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await asked.http.files.create(file=("requests.jsonl", content), purpose="batch")
    batch = await asked.http.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(_POLL_S)
        batch = await _ask_again(asked.http.batches.retrieve, batch.id)
    if batch.output_file_id is None:
        return Answer({}, None, is_complete=False, breaches=(f"the batch is {batch.status}: {batch.errors}",))
    answers = (await _ask_again(asked.http.files.content, batch.output_file_id)).text
    texts = {
        int(each["custom_id"]): each["response"]["body"]["choices"][0]["text"]
        for each in map(json.loads, answers.splitlines())
    }
    return Answer({number: Choice(text, (), None, ()) for number, text in texts.items()}, None, is_complete=True)


async def _ask_again(ask: Callable[[str], Awaitable[Any]], asked_for: str) -> Any:
    """A call may be lost with its gateway, but the work that it starts may not."""
    while True:
        try:
            return await ask(asked_for)
        except (openai.APIConnectionError, openai.InternalServerError):
            await asyncio.sleep(_POLL_S)


KINDS: Mapping[str, Ask] = {
    "durable greedy": _generate(GenerationOptions(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)),
    "durable sampled": _generate(_FREE),
    "durable three samples": _generate(replace(_FREE, n=3)),
    "durable best of four": _generate(GenerationOptions(temperature=1.0, n=2, best_of=4, max_tokens=_NUM_TOKENS // 2)),
    "durable beams": _generate(GenerationOptions(n=2, beam_search=BeamSearch(4), max_tokens=_NUM_TOKENS // 2)),
    "durable stop strings": _generate(replace(_FREE, stop=("zebra", " and the"), ignore_eos=None)),
    "durable log probabilities": _generate(replace(_FREE, logprobs=3)),
    "durable prompt log probabilities": _generate(replace(_FREE, logprobs=1, prompt_logprobs=1), length=4),
    "durable JSON schema": _generate(GenerationOptions(temperature=0.9, constraint=_JSON, max_tokens=_NUM_TOKENS)),
    "durable regular expression": _generate(
        GenerationOptions(temperature=1.0, constraint=Constraint(regex="([a-z]{3,8} ){20}[0-9]+"), max_tokens=300)
    ),
    "durable penalties": _generate(replace(_FREE, frequency_penalty=0.5, top_p=0.95, ignore_eos=None)),
    "durable prediction": _generate(
        GenerationOptions(temperature=0.0, prediction=STORY * 3, max_tokens=_NUM_TOKENS), length=2
    ),
    "durable long": _generate(_FREE, length=20),
    "durable first": _generate(_FREE, priority=5),
    "durable last": _generate(_FREE, priority=-5, length=2),
    "durable pinned": _pinned,
    "durable turns": _turns,
    "durable adapter a": _generate(_FREE, model="a"),
    "durable adapter b": _generate(replace(_FREE, n=2), model="b"),
    "background": _background,
    "batch": _batch,
}
"""The kinds that `quire torture` does not have."""
DURABLE = frozenset(each for each in KINDS if each.startswith("durable") and each != "durable pinned")
"""Kinds whose calls survive their gateway: the others are not durable, or create something with an unknown id."""
