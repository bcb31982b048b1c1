"""How well a model answers what training never showed it, kind by kind."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tools.quire_tiny.answerer import Answer, Answerer
from tools.quire_tiny.conversation import (
    QUESTION_KINDS,
    Conversation,
    Turn,
    conversation_of,
    draw_given_name,
    draw_name_memory,
    draw_question,
)
from tools.quire_tiny.facts import NAMES, WORDS
from tools.quire_tiny.question import draw
from tools.quire_tiny.stories import Story, draw_request, draw_story
from tools.quire_tiny.tokens import BOS

_PROMPTS_AT_ONCE = 50
_ANSWER_TOKENS = 80
_STORY_TOKENS = 300


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt, and what the answer must be; or, for a story, what it must mention."""

    prompt: str
    expected: str
    mentions: tuple[str, ...] = ()

    def accepts(self, answer: Answer) -> bool:
        if not answer.ended:
            return False
        if self.mentions:
            return all(word in answer.text for word in self.mentions)
        return answer.text == self.expected


@dataclass(frozen=True, slots=True)
class Failure:
    probe: Probe
    answer: Answer


@dataclass(frozen=True, slots=True)
class KindScore:
    kind: str
    asked: int
    failures: tuple[Failure, ...]

    @property
    def right(self) -> int:
        return self.asked - len(self.failures)

    @property
    def accuracy(self) -> float:
        return self.right / self.asked


def _chat_probe(answerer: Answerer, conversation: Conversation) -> Probe:
    return Probe(answerer.chat_prompt(conversation), conversation.turns[-1].assistant)


def _plain_probe(rng: Random) -> Probe:
    question = draw_question(rng, held_out=True)
    return Probe(f"{BOS}Question: {question.text}\nAnswer:", question.answer)


def _repeat_probe(answerer: Answerer, rng: Random, *, made_up: bool) -> Probe:
    """Words that training names, or at least one that it never may have shown."""
    while True:
        question = draw(QUESTION_KINDS["repeat"], rng, held_out=True)
        if made_up is not set(question.answer.split()).issubset((*WORDS, *NAMES)):
            return _chat_probe(answerer, conversation_of(question))


def _story_mentions(request: str, story: Story) -> tuple[str, ...]:
    """Whatever of the story the request asked for."""
    words = (word for word in (story.animal, story.name) if word in request.rstrip(".?").split())
    return tuple(words) or (".",)


def _story_probe(answerer: Answerer, rng: Random) -> Probe:
    story = draw_story(rng, held_out=True)
    request = draw_request(rng, story)
    asked = Conversation("story", (Turn(request, story.text),))
    return Probe(answerer.chat_prompt(asked), story.text, _story_mentions(request, story))


def _draw_probe(answerer: Answerer, kind: str, rng: Random) -> Probe:
    match kind:
        case "name_memory":
            return _chat_probe(answerer, draw_name_memory(rng, held_out=True))
        case "given_name":
            return _chat_probe(answerer, draw_given_name(rng, held_out=True))
        case "plain_form":
            return _plain_probe(rng)
        case "repeat":
            return _repeat_probe(answerer, rng, made_up=False)
        case "repeat_made_up":
            return _repeat_probe(answerer, rng, made_up=True)
        case "story":
            return _story_probe(answerer, rng)
        case _:
            return _chat_probe(answerer, conversation_of(draw(QUESTION_KINDS[kind], rng, held_out=True)))


KINDS = (*QUESTION_KINDS, "repeat_made_up", "name_memory", "given_name", "plain_form", "story")


def _different_probes(answerer: Answerer, kind: str, rng: Random, count: int) -> list[Probe]:
    """Up to `count`: some kinds have fewer held-out questions in all."""
    drawn: dict[str, Probe] = {}
    for _ in range(count * 8):
        probe = _draw_probe(answerer, kind, rng)
        drawn.setdefault(probe.prompt, probe)
        if len(drawn) == count:
            break
    return list(drawn.values())


def _failures(answerer: Answerer, probes: list[Probe], max_tokens: int) -> Iterator[Failure]:
    for start in range(0, len(probes), _PROMPTS_AT_ONCE):
        batch = probes[start : start + _PROMPTS_AT_ONCE]
        answers = answerer.answer([probe.prompt for probe in batch], max_tokens)
        for probe, answer in zip(batch, answers, strict=True):
            if not probe.accepts(answer):
                yield Failure(probe, answer)


def score_kind(answerer: Answerer, kind: str, seed: int, count: int) -> KindScore:
    """Asks up to `count` different held-out questions of one kind."""
    probes = _different_probes(answerer, kind, Random(f"{seed} {kind}"), count)
    max_tokens = _STORY_TOKENS if kind == "story" else _ANSWER_TOKENS
    return KindScore(kind, len(probes), tuple(_failures(answerer, probes, max_tokens)))
