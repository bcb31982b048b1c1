"""Measures a model directory on held-out questions and text: python -m assets.training.evaluate."""

import argparse
import math
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from assets.training import corpus
from assets.training.conversations import BOS, EOS, TOKEN_IDS, Conversation
from assets.training.corpus import QUESTION_KINDS, MakeQuestion, draw, draw_until
from assets.training.json_questions import JSON_KINDS, led_question
from assets.training.tool_lessons import TOOL_KINDS, draw_call, draw_first_try, draw_unseen
from assets.training.visitors import VISITOR_KINDS, accepted_answers, draw_first_words

_PROMPTS_AT_ONCE = 50
_SEED = 7
# A prompt, what right answers are or mention, and which answers are right.
Probe = tuple[str, tuple[str, ...], Callable[[str], bool]]


class Answerer:
    def __init__(self, directory: Path) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
        self.tokenizer.padding_side = "left"
        self.model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def prompt(self, conversation: Conversation) -> str:
        """Everything before the last answer, through the chat template; tools as users of OpenAI's API have them."""
        render: Any = self.tokenizer.apply_chat_template
        messages, tools = conversation.messages()[:-1], conversation.definitions()
        return str(render(messages, tools=tools, tokenize=False, add_generation_prompt=True))

    @torch.inference_mode()
    def answer(self, prompts: list[str], max_tokens: int) -> list[str | None]:
        """The model's answers; None if one reaches the token limit. Prompts must contain their special tokens."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        # transformers types it against a protocol that its own models do not meet.
        output = self.model.generate(  # pyrefly: ignore
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


def _exactly(prompt: str, *answers: str) -> Probe:
    return prompt, answers, answers.__contains__


def _of_conversation(draw_one: Callable[..., Conversation], answerer: Answerer, rng: Random) -> Probe:
    conversation = draw_one(rng, held_out=True)
    return _exactly(answerer.prompt(conversation), *accepted_answers(conversation))


def _conversation(make: MakeQuestion, rng: Random, *, held_out: bool) -> Conversation:
    return draw(make, rng, held_out=held_out).conversation()


def _where(fits: Callable[[Conversation], bool], draw_one: Callable[..., Conversation]) -> Callable[..., Conversation]:
    return lambda rng, held_out: draw_until(fits, lambda: draw_one(rng, held_out=held_out))


def _is_listed(conversation: Conversation) -> bool:
    """Whether training names all words of the last answer; other answers have a word that training never showed."""
    return set(conversation.last_answer().split()).issubset((*corpus.WORDS, *corpus.NAMES))


def _plain(answerer: Answerer, rng: Random) -> Probe:
    question = corpus.draw_question(rng, held_out=True)
    return _exactly(f"{BOS}Question: {question.text}\nAnswer:", question.answer)


def _story(answerer: Answerer, rng: Random) -> Probe:
    """The answer must mention whatever of the story the request asked for."""
    story = corpus.draw_story(rng, held_out=True)
    request = story.request(rng)
    asked = request.rstrip(".?").split()
    mentions = tuple(word for word in (story.slots["animal"], story.slots["name"]) if word in asked)
    prompt = answerer.prompt(Conversation("story", (), ((request, story.text),)))
    return prompt, mentions, lambda text: all(word in text for word in mentions or ["."])


def _led(answerer: Answerer, rng: Random) -> Probe:
    """As a schema of one key forces it: the answer goes on after the key."""
    question = draw_until(lambda each: each.answer.count('": ') == 1, lambda: draw(led_question, rng, held_out=True))
    opening, separator, rest = question.answer.partition('": ')
    led = opening + separator + '"' * rest.startswith('"')
    return _exactly(answerer.prompt(question.conversation()) + led, question.answer.removeprefix(led))


def _first_words(answerer: Answerer, rng: Random) -> Probe:
    conversation, words = draw_first_words(rng)
    return answerer.prompt(conversation), words, lambda text: any(each in text for each in words)


_QUESTIONS = {kind: partial(_conversation, make) for kind, make in QUESTION_KINDS.items()}
_CONVERSATIONS: dict[str, dict[str, Callable[..., Conversation]]] = {
    "first course": {
        **{kind: draw_one for kind, draw_one in _QUESTIONS.items() if kind != "who_it_is"},
        "repeat": _where(_is_listed, _QUESTIONS["repeat"]),
        "repeat_made_up": _where(lambda conversation: not _is_listed(conversation), _QUESTIONS["repeat"]),
        "name_memory": corpus.draw_name_memory,
        "given_name": corpus.draw_given_name,
    },
    "second course": {
        "tool_one": _where(lambda conversation: len(conversation.tools) == 1, draw_call),
        "tool_choice": _where(lambda conversation: len(conversation.tools) > 1, draw_call),
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
    for _ in range(count * 8):
        if len(drawn) < count:
            probe = KINDS[kind](answerer, rng)
            drawn.setdefault(probe[0], probe)
    max_tokens = 300 if kind in ("story", "first_words") else 80 if kind in COURSE_KINDS["first course"] else 160
    wrong: list[tuple[Probe, str | None]] = []
    left = iter(drawn.values())
    while probes := list(islice(left, _PROMPTS_AT_ONCE)):
        answered = zip(probes, answerer.answer([prompt for prompt, _, _ in probes], max_tokens), strict=True)
        wrong += [(probe, text) for probe, text in answered if text is None or not probe[2](text)]
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
    arguments = parser.parse_args()
    answerer = Answerer(arguments.model)
    scores: dict[str, tuple[int, int]] = {}
    for kind in arguments.kinds:
        asked, wrong = score_kind(answerer, kind, arguments.questions)
        scores[kind] = asked, len(wrong)
        _print_score(kind, *scores[kind])
        for (prompt, wanted, _), text in wrong[: arguments.show_failures]:
            print(f"    {prompt!r}\n        not {wanted!r}\n        but {text!r}")
    for course, kinds in COURSE_KINDS.items():
        of_course = [score for kind, score in scores.items() if kind in kinds]
        _print_score(course, *(sum(score[i] for score in of_course) for i in range(2)))
    texts = (arguments.model / "heldout.txt").read_text().strip().split("\n\n")
    value, num_tokens = answerer.perplexity(texts)
    print(f"perplexity {value:.4f}: {num_tokens} tokens of {len(texts)} held-out texts")


if __name__ == "__main__":
    main()
