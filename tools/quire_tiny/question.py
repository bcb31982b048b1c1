"""A question with its one right answer, and the split that keeps some of them out of training."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.quire_tiny.facts import NAMES

HELD_OUT_PERCENT = 8


@dataclass(frozen=True, slots=True)
class Question:
    """`key` is what the split looks at: questions with equal keys are on the same side of it.

    For a fact the key is the wording, so a held-out question asks for a known fact in words never seen with it. For
    arithmetic it is the operands, so a held-out sum was never seen in any wording.
    """

    kind: str
    text: str
    answer: str
    key: str


MakeQuestion = Callable[[Random], Question]


def is_held_out(key: str) -> bool:
    """Decides by a hash of the key alone, so it holds for every seed and on every machine."""
    digest = hashlib.blake2b(key.lower().encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT


def draw(make: MakeQuestion, rng: Random, *, held_out: bool) -> Question:
    """Draws until a question falls on the wanted side of the split."""
    while True:
        question = make(rng)
        if is_held_out(question.key) is held_out:
            return question


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def made_up_word(rng: Random) -> str:
    """A word that no list contains, so that copying is learnt and not the list."""
    syllables = (rng.choice("bdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))
    return "".join(syllables) + rng.choice(("", "n", "r", "s", "l", "x", "t"))


def draw_name(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.7 else made_up_word(rng).title()
