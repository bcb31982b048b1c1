"""Measures a model directory on held-out questions and text: python -m assets.training.evaluate."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from assets.training.conversations import BOS, END_ID, EOS, EOS_ID, PAD_ID, Conversation
from assets.training.corpus import DrawConversation, conversation_of, draw_given_name, draw_name_memory, draw_question
from assets.training.json_questions import JSON_KINDS, draw_led_question
from assets.training.questions import NAMES, QUESTION_KINDS, WORDS, MakeQuestion, draw
from assets.training.stories import draw_request, draw_story
from assets.training.tool_lessons import PROBED_KINDS, REWORDED_KINDS
from assets.training.visitors import VISITOR_KINDS, accepted_answers

_PROMPTS_AT_ONCE = 50
_REQUIRED_ACCURACY = 0.95


@dataclass(frozen=True, slots=True)
class Answer:
    """`ended` is false where the model ran into the limit of tokens."""

    text: str
    ended: bool


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
        rows: list[list[int]] = output[:, inputs["input_ids"].shape[1] :].tolist()
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return [Answer(text.strip(), EOS_ID in ids or END_ID in ids) for text, ids in zip(texts, rows, strict=True)]

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


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt, and what the answer may be; or, for a story, what it must mention."""

    prompt: str
    expected: tuple[str, ...]
    mentions: tuple[str, ...] = ()

    def accepts(self, answer: Answer) -> bool:
        if self.mentions:
            return answer.ended and all(word in answer.text for word in self.mentions)
        return answer.ended and answer.text in self.expected


DrawProbe = Callable[[Answerer, Random], Probe]


def _of_conversation(draw_one: DrawConversation) -> DrawProbe:
    def probe(answerer: Answerer, rng: Random) -> Probe:
        conversation = draw_one(rng, held_out=True)
        return Probe(answerer.prompt(conversation), accepted_answers(conversation))

    return probe


def _of_question(make: MakeQuestion) -> DrawProbe:
    return _of_conversation(lambda rng, *, held_out: conversation_of(draw(make, rng, held_out=held_out)))


def _repeat_kind(*, made_up: bool) -> DrawProbe:
    """Words that training names, or at least one that it never may have shown."""

    def draw_one(rng: Random, *, held_out: bool) -> Conversation:
        while True:
            question = draw(QUESTION_KINDS["repeat"], rng, held_out=held_out)
            if made_up is not set(question.answer.split()).issubset((*WORDS, *NAMES)):
                return conversation_of(question)

    return _of_conversation(draw_one)


def _plain(answerer: Answerer, rng: Random) -> Probe:
    question = draw_question(rng, held_out=True)
    return Probe(f"{BOS}Question: {question.text}\nAnswer:", (question.answer,))


def _story(answerer: Answerer, rng: Random) -> Probe:
    """The answer must mention whatever of the story the request asked for."""
    story = draw_story(rng, held_out=True)
    request = draw_request(rng, story)
    mentions = (word for word in (story.animal, story.name) if word in request.rstrip(".?").split())
    prompt = answerer.prompt(Conversation("story", (), ((request, story.text),)))
    return Probe(prompt, (story.text,), tuple(mentions) or (".",))


def _led(answerer: Answerer, rng: Random) -> Probe:
    """As a schema of one key forces it: the answer goes on after the key."""
    while True:
        question = draw_led_question(rng, held_out=True)
        opening, separator, rest = question.answer.partition('": ')
        if '": ' not in rest:
            separator += '"' * rest.startswith('"')
            prompt = answerer.prompt(conversation_of(question)) + opening + separator
            return Probe(prompt, (question.answer.removeprefix(opening + separator),))


_QUESTIONS = {kind: _of_question(make) for kind, make in QUESTION_KINDS.items()}
COURSE_KINDS: dict[str, dict[str, DrawProbe]] = {
    "first course": {
        **{kind: probe for kind, probe in _QUESTIONS.items() if kind != "who_it_is"},
        "repeat": _repeat_kind(made_up=False),
        "repeat_made_up": _repeat_kind(made_up=True),
        "name_memory": _of_conversation(draw_name_memory),
        "given_name": _of_conversation(draw_given_name),
        "plain_form": _plain,
        "story": _story,
    },
    "second course": {
        **{kind: _of_conversation(draw_one) for kind, draw_one in PROBED_KINDS.items()},
        **{kind: _of_question(make) for kind, make in JSON_KINDS.items()},
        "json_led": _led,
    },
    "third course": {
        "who_it_is": _QUESTIONS["who_it_is"],
        **{kind: _of_conversation(draw_one) for kind, draw_one in REWORDED_KINDS.items()},
    },
    "fourth course": {kind: _of_conversation(draw_one) for kind, draw_one in VISITOR_KINDS.items()},
}
KINDS = {kind: probe for kinds in COURSE_KINDS.values() for kind, probe in kinds.items()}


@dataclass(frozen=True, slots=True)
class KindScore:
    kind: str
    asked: int
    failures: list[tuple[Probe, Answer]]


def score_kind(answerer: Answerer, kind: str, seed: int, count: int) -> KindScore:
    """Asks up to `count` different held-out questions of one kind; some kinds have fewer in all."""
    rng = Random(f"{seed} {kind}")
    drawn: dict[str, Probe] = {}
    for probe in (KINDS[kind](answerer, rng) for _ in range(count * 8)):
        drawn.setdefault(probe.prompt, probe)
        if len(drawn) == count:
            break
    max_tokens = 300 if kind == "story" else 80 if kind in COURSE_KINDS["first course"] else 160
    failures: list[tuple[Probe, Answer]] = []
    left = iter(drawn.values())
    while probes := list(islice(left, _PROMPTS_AT_ONCE)):
        answers = answerer.answer([probe.prompt for probe in probes], max_tokens)
        failures += [pair for pair in zip(probes, answers, strict=True) if not pair[0].accepts(pair[1])]
    return KindScore(kind, len(drawn), failures)


def _print_scores(name: str, scores: list[KindScore]) -> None:
    if asked := sum(score.asked for score in scores):
        right = asked - sum(len(score.failures) for score in scores)
        mark = "" if right / asked >= _REQUIRED_ACCURACY else "  below 95%"
        print(f"{name:<22}{right:>6} of {asked:<6}{right / asked:>8.1%}{mark}", flush=True)


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


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    answerer = Answerer(arguments.model, getattr(torch, arguments.dtype))
    scores: list[KindScore] = []
    for kind in arguments.kinds:
        scores.append(score_kind(answerer, kind, arguments.seed, arguments.questions))
        _print_scores(kind, scores[-1:])
        for probe, answer in islice(scores[-1].failures, arguments.show_failures):
            print(f"    {probe.prompt!r}\n        not {probe.expected!r}\n        but {answer.text!r}")
    for course, kinds in COURSE_KINDS.items():
        _print_scores(course, [score for score in scores if score.kind in kinds])
    texts = (arguments.model / "heldout.txt").read_text().strip().split("\n\n")
    value, num_tokens = answerer.perplexity(texts)
    print(f"perplexity {value:.4f}: {num_tokens} tokens of {len(texts)} held-out texts")


if __name__ == "__main__":
    main()
