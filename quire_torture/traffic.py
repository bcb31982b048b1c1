"""Draws requests by a seed: valid, ordinary ones, of the kinds that servers with OpenAI's API have in common."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_PEOPLE = ("girl", "boy", "king", "baker", "sailor", "doctor", "farmer", "teacher")
_THINGS = ("ball", "boat", "letter", "clock", "garden", "horse", "kite", "lamp")
_PLACES = ("park", "harbour", "forest", "market", "castle", "school", "river", "village")
STORY = "Once upon a time there was a little girl with a red ball. She went to the park with her dog. "
_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "size": {"enum": ["small", "large"]}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "find_place",
        "description": "Finds a place on the map.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
_SLOW, _LEAVES = 0.05, 0.05
"""Shares of callers that read slowly, and that go away before the end."""
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of requests.

    Attributes:
        max_tokens: Maximum tokens of an output.
        long_words: Words of a long prompt.
        api_keys: Each call has one of them; without keys, no call has one.
    """

    max_tokens: int = 64
    long_words: int = 200
    api_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose answer is known from an undisturbed run.

    Attributes:
        number: Its place among the questions of a seed.
        kind: A key of `KINDS`.
        canary: A word that is in no other question: it must not appear in the answer of another one.
        body: Without `model`.
    """

    number: int
    kind: str
    canary: str
    path: str
    body: Mapping[str, Any] = field(hash=False)

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))


@dataclass(frozen=True, slots=True)
class Call:
    """One sending of a question.

    Attributes:
        number: Its place in the traffic.
        pause_s: Time for which its caller does not read after each event.
        leaves_after: The number of events after which its caller goes away; None if it stays.
    """

    number: int
    question: Question
    api_key: str | None = None
    pause_s: float = 0.0
    leaves_after: int | None = None


_Draw = Callable[[Random, str, Limits], tuple[str, dict[str, Any]]]


def _tale(rng: Random, canary: str) -> str:
    person, thing, place = rng.choice(_PEOPLE), rng.choice(_THINGS), rng.choice(_PLACES)
    return f"{canary}: the {person} lost the {thing} near the {place}. Then the {person}"


def _completion(**fields: Any) -> _Draw:
    def draw(rng: Random, canary: str, limits: Limits) -> tuple[str, dict[str, Any]]:
        return COMPLETIONS, _sized(rng, limits) | {"prompt": _tale(rng, canary)} | fields

    return draw


def _chat(**fields: Any) -> _Draw:
    def draw(rng: Random, canary: str, limits: Limits) -> tuple[str, dict[str, Any]]:
        messages = [{"role": "user", "content": f"Tell me more. {_tale(rng, canary)}"}]
        return CHAT, _sized(rng, limits) | {"messages": messages} | fields

    return draw


def _sized(rng: Random, limits: Limits) -> dict[str, Any]:
    return {"max_tokens": rng.randint(max(1, limits.max_tokens // 4), limits.max_tokens), "temperature": 0.0}


def _sampled(inner: _Draw, **fields: Any) -> _Draw:
    def draw(rng: Random, canary: str, limits: Limits) -> tuple[str, dict[str, Any]]:
        path, body = inner(rng, canary, limits)
        return path, body | {"temperature": 0.8, "seed": rng.randrange(1 << 31)} | fields

    return draw


def _long(rng: Random, canary: str, limits: Limits) -> tuple[str, dict[str, Any]]:
    words = (STORY * (1 + limits.long_words // 20)).split()[: limits.long_words]
    prompt = f"{canary}. {' '.join(words)} {_tale(rng, canary)}"
    return COMPLETIONS, _sized(rng, limits) | {"prompt": prompt, **_STREAM}


def _shared(rng: Random, canary: str, limits: Limits) -> tuple[str, dict[str, Any]]:
    """All of these questions have the same beginning."""
    words = (STORY * (1 + limits.long_words // 20)).split()[: limits.long_words // 2]
    return COMPLETIONS, _sized(rng, limits) | {"prompt": f"{' '.join(words)} {_tale(rng, canary)}", **_STREAM}


def _turns(rng: Random, canary: str, limits: Limits) -> tuple[str, dict[str, Any]]:
    messages = [
        {"role": "system", "content": "You tell short stories."},
        {"role": "user", "content": _tale(rng, canary)},
        {"role": "assistant", "content": "They looked for it until the evening."},
        {"role": "user", "content": f"And what did the {rng.choice(_PEOPLE)} do?"},
    ]
    return CHAT, _sized(rng, limits) | {"messages": messages, **_STREAM}


_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
KINDS: Mapping[str, _Draw] = {
    "completion": _completion(),
    "completion stream": _completion(**_STREAM),
    "chat": _chat(),
    "chat stream": _chat(**_STREAM),
    "seeded": _sampled(_completion(**_STREAM)),
    "two samples": _sampled(_completion(**_STREAM), n=2),
    "log probabilities": _completion(logprobs=1, **_STREAM),
    "log probabilities of a chat": _chat(logprobs=True, top_logprobs=1),
    "a JSON schema": _chat(response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": _SCHEMA}}),
    "tools": _chat(tools=[_TOOL]),
    "turns": _turns,
    "a long prompt": _long,
    "a shared prefix": _shared,
}


def draw_questions(seed: int, count: int, limits: Limits, kinds: Sequence[str] = tuple(KINDS)) -> list[Question]:
    """`count` questions, of all kinds in turn. The same arguments give the same questions."""
    questions: list[Question] = []
    for number in range(count):
        rng, kind = Random(f"question {seed} {number}"), kinds[number % len(kinds)]
        canary = "".join(rng.choices("BCDFGHJKLMNPQRSTVWXZ", k=6)) + f"{number:03d}"
        path, body = KINDS[kind](rng, canary, limits)
        questions.append(Question(number, kind, canary, path, body))
    return questions


def draw_calls(seed: int, questions: Sequence[Question], limits: Limits, *, first: int = 0) -> Iterator[Call]:
    """Endless calls; call `number` depends on the seed and on its number only."""
    number = first
    while True:
        rng = Random(f"call {seed} {number}")
        question = rng.choice(questions)
        key = rng.choice(limits.api_keys) if limits.api_keys else None
        pause_s, leaves_after = 0.0, None
        if question.is_stream:
            drawn = rng.random()
            if drawn < _SLOW:
                pause_s = _PAUSE_S
            elif drawn < _SLOW + _LEAVES:
                leaves_after = rng.randint(1, 8)
        yield Call(number, question, key, pause_s, leaves_after)
        number += 1


def fits_schema(text: str) -> bool:
    """Whether the whole text is an object of the schema that questions have."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    names = _SCHEMA["properties"]
    return (
        isinstance(value, dict)
        and value.keys() == names.keys()
        and all(value[name] in names[name]["enum"] for name in names)
    )
