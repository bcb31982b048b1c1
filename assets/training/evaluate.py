"""Measures a model directory on held-out questions and text: python -m assets.training.evaluate."""

import argparse
import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from assets.training.conversations import BOS, END_ID, EOS, EOS_ID, PAD_ID, Conversation, turn
from assets.training.corpus import conversation_of, draw_given_name, draw_name_memory, draw_question
from assets.training.json_questions import JSON_KINDS, make_led_answer
from assets.training.questions import NAMES, QUESTION_KINDS, WORDS, draw
from assets.training.rewordings import REWORDED_KINDS
from assets.training.stories import draw_request, draw_story
from assets.training.tool_lessons import PROBED_KINDS

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
    """A prompt, and what the answer must be; or, for a story, what it must mention."""

    prompt: str
    expected: str
    mentions: tuple[str, ...] = ()

    def accepts(self, answer: Answer) -> bool:
        if self.mentions:
            return answer.ended and all(word in answer.text for word in self.mentions)
        return answer.ended and answer.text == self.expected


def _probe(answerer: Answerer, conversation: Conversation) -> Probe:
    return Probe(answerer.prompt(conversation), conversation.last_answer())


def _repeat_probe(answerer: Answerer, rng: Random, *, made_up: bool) -> Probe:
    """Words that training names, or at least one that it never may have shown."""
    while True:
        question = draw(QUESTION_KINDS["repeat"], rng, held_out=True)
        if made_up is not set(question.answer.split()).issubset((*WORDS, *NAMES)):
            return _probe(answerer, conversation_of(question))


def _story_probe(answerer: Answerer, rng: Random) -> Probe:
    """The answer must mention whatever of the story the request asked for."""
    story = draw_story(rng, held_out=True)
    request = draw_request(rng, story)
    mentions = (word for word in (story.animal, story.name) if word in request.rstrip(".?").split())
    prompt = answerer.prompt(Conversation("story", (), (turn(request, story.text),)))
    return Probe(prompt, story.text, tuple(mentions) or (".",))


def _led_probe(answerer: Answerer, rng: Random) -> Probe:
    """As a schema of one key forces it: the answer goes on after the key."""
    while True:
        question, _ = make_led_answer(rng, held_out=True)
        opening, separator, rest = question.answer.partition('": ')
        if '": ' not in rest:
            separator += '"' * rest.startswith('"')
            prompt = answerer.prompt(conversation_of(question)) + opening + separator
            return Probe(prompt, question.answer.removeprefix(opening + separator))


_TOOL_KINDS = PROBED_KINDS | REWORDED_KINDS


def _draw_probe(answerer: Answerer, kind: str, rng: Random) -> Probe:
    match kind:
        case "name_memory":
            return _probe(answerer, draw_name_memory(rng, held_out=True))
        case "given_name":
            return _probe(answerer, draw_given_name(rng, held_out=True))
        case "plain_form":
            question = draw_question(rng, held_out=True)
            return Probe(f"{BOS}Question: {question.text}\nAnswer:", question.answer)
        case "repeat" | "repeat_made_up":
            return _repeat_probe(answerer, rng, made_up=kind == "repeat_made_up")
        case "story":
            return _story_probe(answerer, rng)
        case "json_led":
            return _led_probe(answerer, rng)
        case _ if kind in _TOOL_KINDS:
            return _probe(answerer, _TOOL_KINDS[kind](rng, held_out=True))
        case _:
            question = draw((QUESTION_KINDS | JSON_KINDS)[kind], rng, held_out=True)
            return _probe(answerer, conversation_of(question))


_OTHER_KINDS = ("repeat_made_up", "name_memory", "given_name", "plain_form", "story")
COURSE_KINDS = {
    "first course": (*(kind for kind in QUESTION_KINDS if kind != "who_it_is"), *_OTHER_KINDS),
    "second course": (*PROBED_KINDS, *JSON_KINDS, "json_led"),
    "third course": ("who_it_is", *REWORDED_KINDS),
}
KINDS = tuple(kind for kinds in COURSE_KINDS.values() for kind in kinds)


@dataclass(frozen=True, slots=True)
class KindScore:
    kind: str
    asked: int
    failures: list[tuple[Probe, Answer]]


def score_kind(answerer: Answerer, kind: str, seed: int, count: int) -> KindScore:
    """Asks up to `count` different held-out questions of one kind; some kinds have fewer in all."""
    rng = Random(f"{seed} {kind}")
    drawn: dict[str, Probe] = {}
    for probe in (_draw_probe(answerer, kind, rng) for _ in range(count * 8)):
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
