"""Measures a model directory on held-out questions and text: python -m assets.training.evaluate."""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from assets.training.corpus import (
    BOS,
    END_ID,
    EOS,
    EOS_ID,
    PAD_ID,
    QUESTION_KINDS,
    Conversation,
    Turn,
    conversation_of,
    draw_given_name,
    draw_name_memory,
    draw_question,
)
from assets.training.json_questions import JSON_KINDS, make_led_answer
from assets.training.questions import NAMES, WORDS, draw
from assets.training.stories import Story, draw_request, draw_story
from assets.training.third_course import THIRD_COURSE_TOOL_KINDS
from assets.training.tool_lessons import PROBED_KINDS
from assets.training.tools import ToolConversation


@dataclass(frozen=True, slots=True)
class Answer:
    """`ended` is false where the model ran into the limit of tokens."""

    text: str
    ended: bool


@dataclass(frozen=True, slots=True)
class Perplexity:
    documents: int
    tokens: int
    value: float


class Answerer:
    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
        self.tokenizer.padding_side = "left"
        self.model = LlamaForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    def chat_prompt(self, conversation: Conversation) -> str:
        """Everything before the last answer, through the chat template."""
        messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.assistant})
        return str(self.tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True))

    def tool_prompt(self, conversation: ToolConversation) -> str:
        """Everything before the last answer, with the tools as a user of OpenAI's API defines them."""
        tools: Any = [tool.definition() for tool in conversation.tools] or None
        messages = conversation.messages()[:-1]
        return str(
            self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        )

    @torch.inference_mode()
    def answer(self, prompts: list[str], max_tokens: int) -> list[Answer]:
        """Prompts must hold their special tokens already."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        # transformers types generate() against a protocol that its own models do not meet.
        output = self.model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=[EOS_ID, END_ID],
            pad_token_id=PAD_ID,
        )
        return [self._answer_of(ids) for ids in output[:, inputs["input_ids"].shape[1] :].tolist()]

    def _answer_of(self, ids: list[int]) -> Answer:
        ended = EOS_ID in ids or END_ID in ids
        return Answer(str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip(), ended)

    @torch.inference_mode()
    def perplexity(self, texts: list[str]) -> Perplexity:
        """Over every token after the first, the end of each text included."""
        total, count = 0.0, 0
        for text in texts:
            ids = torch.tensor([self.tokenizer(text + EOS)["input_ids"]])
            logits = self.model(input_ids=ids).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += ids.shape[1] - 1
        return Perplexity(len(texts), count, math.exp(total / count))


_PROMPTS_AT_ONCE = 50
_ANSWER_TOKENS = 80
_STORY_TOKENS = 300
_CALL_TOKENS = 160


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


def _led_probe(answerer: Answerer, rng: Random) -> Probe:
    """As a schema of one key forces it: the answer goes on after the key."""
    while True:
        question, _ = make_led_answer(rng, held_out=True)
        opening, separator, rest = question.answer.partition('": ')
        if '": ' not in rest:
            separator += '"' * rest.startswith('"')
            prompt = answerer.chat_prompt(conversation_of(question)) + opening + separator
            return Probe(prompt, question.answer.removeprefix(opening + separator))


_TOOL_KINDS = PROBED_KINDS | THIRD_COURSE_TOOL_KINDS


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
        case "json_led":
            return _led_probe(answerer, rng)
        case _ if kind in _TOOL_KINDS:
            conversation = _TOOL_KINDS[kind](rng, held_out=True)
            return Probe(answerer.tool_prompt(conversation), conversation.last_answer())
        case _:
            question = draw((QUESTION_KINDS | JSON_KINDS)[kind], rng, held_out=True)
            return _chat_probe(answerer, conversation_of(question))


FIRST_COURSE_KINDS = (
    *(kind for kind in QUESTION_KINDS if kind != "who_it_is"),
    "repeat_made_up",
    "name_memory",
    "given_name",
    "plain_form",
    "story",
)
SECOND_COURSE_KINDS = (*PROBED_KINDS, *JSON_KINDS, "json_led")
THIRD_COURSE_KINDS = ("who_it_is", *THIRD_COURSE_TOOL_KINDS)
KINDS = (*FIRST_COURSE_KINDS, *SECOND_COURSE_KINDS, *THIRD_COURSE_KINDS)


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
    max_tokens = _ANSWER_TOKENS
    if kind == "story":
        max_tokens = _STORY_TOKENS
    elif kind not in FIRST_COURSE_KINDS:
        max_tokens = _CALL_TOKENS
    return KindScore(kind, len(probes), tuple(_failures(answerer, probes, max_tokens)))


REQUIRED_ACCURACY = 0.95


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("assets/quire-tiny"))
    parser.add_argument("--questions", type=int, default=200, help="at most this many of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--show-failures", type=int, default=0, metavar="N", help="print N failures of each kind")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def _print_score(score: KindScore, shown_failures: int) -> None:
    mark = "" if score.accuracy >= REQUIRED_ACCURACY else "  below 95%"
    print(f"{score.kind:<22}{score.right:>6} of {score.asked:<6}{score.accuracy:>8.1%}{mark}", flush=True)
    for failure in score.failures[:shown_failures]:
        print(
            f"    {failure.probe.prompt!r}\n        not {failure.probe.expected!r}\n        but {failure.answer.text!r}"
        )


def _print_sum(name: str, scores: list[KindScore]) -> None:
    if asked := sum(score.asked for score in scores):
        right = sum(score.right for score in scores)
        print(f"{name:<22}{right:>6} of {asked:<6}{right / asked:>8.1%}")


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    answerer = Answerer(arguments.model, getattr(torch, arguments.dtype))
    scores: list[KindScore] = []
    for kind in arguments.kinds:
        scores.append(score_kind(answerer, kind, arguments.seed, arguments.questions))
        _print_score(scores[-1], arguments.show_failures)
    _print_sum("first course", [score for score in scores if score.kind in FIRST_COURSE_KINDS])
    _print_sum("second course", [score for score in scores if score.kind in SECOND_COURSE_KINDS])
    _print_sum("third course", [score for score in scores if score.kind in THIRD_COURSE_KINDS])
    texts = (arguments.model / "heldout.txt").read_text().strip().split("\n\n")
    perplexity = answerer.perplexity(texts)
    print(f"perplexity {perplexity.value:.4f}: {perplexity.tokens} tokens of {perplexity.documents} held-out texts")


if __name__ == "__main__":
    main()
