"""Measures a model directory on held-out questions and text: python -m assets.training.evaluate."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from assets.training.conversations import BOS, EOS, TOKEN_IDS, Conversation
from assets.training.corpus import conversation_of, draw_given_name, draw_name_memory, draw_question, draw_story
from assets.training.json_questions import JSON_KINDS, led_question
from assets.training.questions import NAMES, QUESTION_KINDS, WORDS, MakeQuestion, draw
from assets.training.tool_lessons import TOOL_KINDS, draw_call_among, draw_first_try, draw_unseen
from assets.training.visitors import VISITOR_KINDS, accepted_answers, draw_first_words

_PROMPTS_AT_ONCE = 50
_SEED = 7


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt, and which answers are right; `wanted` shows what they look like."""

    prompt: str
    wanted: Any
    accepts: Callable[[str], bool]


class Answerer:
    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
        self.tokenizer.padding_side = "left"
        self.model = LlamaForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    def prompt(self, conversation: Conversation) -> str:
        """Everything before the last answer, through the chat template; tools as users of OpenAI's API have them."""
        tools: Any = [tool.definition() for tool in conversation.tools] or None
        messages = conversation.messages()[:-1]
        return str(
            self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        )

    @torch.inference_mode()
    def answer(self, prompts: list[str], max_tokens: int) -> list[str | None]:
        """None where the model runs into the limit of tokens. Prompts must hold their special tokens already."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        # transformers types generate() against a protocol that its own models do not meet.
        output = self.model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            **inputs, max_new_tokens=max_tokens, do_sample=False, **TOKEN_IDS
        )
        rows: list[list[int]] = output[:, inputs["input_ids"].shape[1] :].tolist()
        ends = {*TOKEN_IDS["eos_token_id"]}
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return [text.strip() if not ends.isdisjoint(ids) else None for text, ids in zip(texts, rows, strict=True)]

    @torch.inference_mode()
    def perplexity(self, texts: list[str]) -> tuple[float, int]:
        """Over every token after the first, the end of each text included; and the number of tokens."""
        total, count = 0.0, 0
        for text in texts:
            ids = torch.tensor([self.tokenizer(text + EOS)["input_ids"]])
            logits = self.model(input_ids=ids).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += ids.shape[1] - 1
        return math.exp(total / count), count


DrawProbe = Callable[[Answerer, Random], Probe]


def _exactly(prompt: str, answers: tuple[str, ...]) -> Probe:
    return Probe(prompt, answers, answers.__contains__)


def _of_conversation(draw_one: Callable[..., Conversation], answerer: Answerer, rng: Random) -> Probe:
    conversation = draw_one(rng, held_out=True)
    return _exactly(answerer.prompt(conversation), accepted_answers(conversation))


def _conversation(make: MakeQuestion, rng: Random, *, held_out: bool) -> Conversation:
    return conversation_of(draw(make, rng, held_out=held_out))


def _repeat(rng: Random, *, held_out: bool, made_up: bool) -> Conversation:
    """Words that training names, or at least one that it never may have shown."""
    while True:
        conversation = _conversation(QUESTION_KINDS["repeat"], rng, held_out=held_out)
        if made_up is not set(conversation.last_answer().split()).issubset((*WORDS, *NAMES)):
            return conversation


def _plain(answerer: Answerer, rng: Random) -> Probe:
    question = draw_question(rng, held_out=True)
    return _exactly(f"{BOS}Question: {question.text}\nAnswer:", (question.answer,))


def _story(answerer: Answerer, rng: Random) -> Probe:
    """The answer must mention whatever of the story the request asked for."""
    story = draw_story(rng, held_out=True)
    request = story.request(rng)
    asked = request.rstrip(".?").split()
    mentions = [word for word in (story.slots["animal"], story.slots["name"]) if word in asked]
    prompt = answerer.prompt(Conversation("story", (), ((request, story.text),)))
    return Probe(prompt, mentions, lambda text: all(word in text for word in mentions or ["."]))


def _led(answerer: Answerer, rng: Random) -> Probe:
    """As a schema of one key forces it: the answer goes on after the key."""
    while True:
        question = draw(led_question, rng, held_out=True)
        opening, separator, rest = question.answer.partition('": ')
        if '": ' not in rest:
            led = opening + separator + '"' * rest.startswith('"')
            return _exactly(answerer.prompt(conversation_of(question)) + led, (question.answer.removeprefix(led),))


def _first_words(answerer: Answerer, rng: Random) -> Probe:
    conversation, words = draw_first_words(rng)
    return Probe(answerer.prompt(conversation), words, lambda text: any(each in text for each in words))


_QUESTIONS = {kind: partial(_conversation, make) for kind, make in QUESTION_KINDS.items()}
_CONVERSATIONS: dict[str, dict[str, Callable[..., Conversation]]] = {
    "first course": {
        **{kind: draw_one for kind, draw_one in _QUESTIONS.items() if kind != "who_it_is"},
        "repeat": partial(_repeat, made_up=False),
        "repeat_made_up": partial(_repeat, made_up=True),
        "name_memory": draw_name_memory,
        "given_name": draw_given_name,
    },
    "second course": {
        "tool_one": partial(draw_call_among, some=False),
        "tool_choice": partial(draw_call_among, some=True),
        **{kind: draw_one for kind, draw_one in TOOL_KINDS.items() if kind != "tool_call"},
        **{kind: partial(_conversation, make) for kind, make in JSON_KINDS.items()},
    },
    "third course": {
        "who_it_is": _QUESTIONS["who_it_is"],
        "tool_first_try": draw_first_try,
        "tool_reworded": partial(draw_unseen, counts=(0, 1, 1, 2, 3), is_there=True),
        "tool_reworded_missing": partial(draw_unseen, counts=(1, 1, 2, 3), is_there=False),
    },
    "fourth course": VISITOR_KINDS,
}
COURSE_KINDS: dict[str, dict[str, DrawProbe]] = {
    course: {kind: partial(_of_conversation, draw_one) for kind, draw_one in kinds.items()}
    for course, kinds in _CONVERSATIONS.items()
}
COURSE_KINDS["first course"] |= {"plain_form": _plain, "story": _story}
COURSE_KINDS["second course"]["json_led"] = _led
COURSE_KINDS["first words"] = {"first_words": _first_words}
KINDS = {kind: probe for kinds in COURSE_KINDS.values() for kind, probe in kinds.items()}


def score_kind(answerer: Answerer, kind: str, count: int) -> tuple[int, list[tuple[Probe, str | None]]]:
    """Asks up to `count` different held-out questions of one kind; some kinds have fewer in all.

    How many were asked, and those answered wrongly.
    """
    rng = Random(f"{_SEED} {kind}")
    drawn: dict[str, Probe] = {}
    for probe in (KINDS[kind](answerer, rng) for _ in range(count * 8)):
        drawn.setdefault(probe.prompt, probe)
        if len(drawn) == count:
            break
    max_tokens = 300 if kind in ("story", "first_words") else 80 if kind in COURSE_KINDS["first course"] else 160
    wrong: list[tuple[Probe, str | None]] = []
    left = iter(drawn.values())
    while probes := list(islice(left, _PROMPTS_AT_ONCE)):
        answered = zip(probes, answerer.answer([probe.prompt for probe in probes], max_tokens), strict=True)
        wrong += [(probe, text) for probe, text in answered if text is None or not probe.accepts(text)]
    return len(drawn), wrong


def _print_score(name: str, asked: int, wrong: int) -> None:
    if asked:
        print(f"{name:<22}{asked - wrong:>6} of {asked:<6}{1 - wrong / asked:>8.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("assets/quire-tiny"))
    parser.add_argument("--questions", type=int, default=200, help="at most this many of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--show-failures", type=int, default=0, metavar="N", help="print N failures of each kind")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    answerer = Answerer(arguments.model, getattr(torch, arguments.dtype))
    scores: dict[str, tuple[int, int]] = {}
    for kind in arguments.kinds:
        asked, wrong = score_kind(answerer, kind, arguments.questions)
        scores[kind] = asked, len(wrong)
        _print_score(kind, *scores[kind])
        for probe, text in islice(wrong, arguments.show_failures):
            print(f"    {probe.prompt!r}\n        not {probe.wanted!r}\n        but {text!r}")
    for course, kinds in COURSE_KINDS.items():
        of_course = [score for kind, score in scores.items() if kind in kinds]
        _print_score(course, *(sum(score[i] for score in of_course) for i in range(2)))
    texts = (arguments.model / "heldout.txt").read_text().strip().split("\n\n")
    value, num_tokens = answerer.perplexity(texts)
    print(f"perplexity {value:.4f}: {num_tokens} tokens of {len(texts)} held-out texts")


if __name__ == "__main__":
    main()
