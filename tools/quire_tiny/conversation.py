"""Conversations: one question, several, or several that belong together."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from tools.quire_tiny.fact_questions import FACT_KINDS
from tools.quire_tiny.instruction_questions import INSTRUCTION_KINDS
from tools.quire_tiny.number_questions import NUMBER_KINDS
from tools.quire_tiny.question import MakeQuestion, Question, draw, draw_name, is_held_out
from tools.quire_tiny.small_talk import SMALL_TALK_KINDS

QUESTION_KINDS: dict[str, MakeQuestion] = {**FACT_KINDS, **NUMBER_KINDS, **INSTRUCTION_KINDS, **SMALL_TALK_KINDS}

# How often a kind is asked, where 1.0 does not suit it. Sums need the most practice, so they come first; each later
# emphasis goes to what is then still weak.
Emphasis = Mapping[str, float]
FIRST_EMPHASIS: Emphasis = {
    "addition": 12.0, "subtraction": 13.0, "multiplication": 1.5, "word_problem": 3.0, "comparison": 2.5,
    "reverse_order": 1.5, "count": 1.5, "last_of": 1.5, "length": 1.5, "spell": 1.5, "last_letter": 1.5,
    "about_itself": 0.0,
}  # fmt: skip
SECOND_EMPHASIS: Emphasis = {
    "addition": 9.0, "subtraction": 11.0, "multiplication": 5.0, "word_problem": 4.0, "comparison": 3.0,
    "reverse_order": 2.0, "count": 5.0, "last_of": 1.5, "length": 1.5, "spell": 4.0, "last_letter": 2.0,
    "uppercase": 4.0, "repeat": 4.0, "say_times": 4.0, "opposite": 2.0, "country": 2.0, "capital": 1.5,
    "next_number": 1.5, "parity": 1.5, "about_itself": 2.0,
}  # fmt: skip
THIRD_EMPHASIS: Emphasis = {
    "addition": 10.0, "subtraction": 11.0, "multiplication": 4.0, "word_problem": 4.0, "comparison": 6.0,
    "reverse_order": 1.5, "count": 4.0, "spell": 2.0, "uppercase": 3.0, "repeat": 10.0, "say_times": 8.0,
    "opposite": 2.0, "capital": 1.5, "category": 1.5, "identity": 2.0, "about_itself": 3.0,
}  # fmt: skip

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are quire-tiny, a small and friendly model.", "You are a friendly helper.",
    "Answer the questions of the user.", "Be brief and correct.", "You are a helpful assistant. Keep answers short.",
)  # fmt: skip

_TELL_NAME = ("My name is {x}.", "I am {x}.", "Hello, my name is {x}.", "Hi, I am {x}.", "Please call me {x}.")
_ASK_NAME = ("What is my name?", "Who am I?", "Do you know my name?", "Tell me my name.", "What am I called?")
_GIVE_NAME = ("Your name is {x}.", "You are {x}, a helpful assistant.", "You are {x}.", "You are called {x}.")
_ASK_GIVEN_NAME = ("What is your name?", "Who are you?", "Tell me who you are.", "Introduce yourself.")


@dataclass(frozen=True, slots=True)
class Turn:
    user: str
    assistant: str


@dataclass(frozen=True, slots=True)
class Conversation:
    kind: str
    turns: tuple[Turn, ...]
    system: str | None = None


def conversation_of(question: Question, system: str | None = None) -> Conversation:
    return Conversation(question.kind, (Turn(question.text, question.answer),), system)


def draw_question(rng: Random, emphasis: Emphasis = FIRST_EMPHASIS, *, held_out: bool) -> Question:
    """A question of any kind, emphasized kinds more often."""
    kinds = list(QUESTION_KINDS)
    kind = rng.choices(kinds, [emphasis.get(kind, 1.0) for kind in kinds])[0]
    return draw(QUESTION_KINDS[kind], rng, held_out=held_out)


def _turns(rng: Random, emphasis: Emphasis, count: int) -> list[Turn]:
    questions = (draw_question(rng, emphasis, held_out=False) for _ in range(count))
    return [Turn(question.text, question.answer) for question in questions]


def make_several_questions(rng: Random, emphasis: Emphasis) -> Conversation:
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.4 else None
    return Conversation("several", tuple(_turns(rng, emphasis, rng.randint(2, 5))), system)


def draw_name_memory(rng: Random, emphasis: Emphasis = FIRST_EMPHASIS, *, held_out: bool) -> Conversation:
    """The user tells a name, asks up to two other things, then asks for the name."""
    while True:
        name, tell, ask = draw_name(rng), rng.choice(_TELL_NAME), rng.choice(_ASK_NAME)
        if is_held_out(f"{name} {tell} {ask}") is held_out:
            break
    told = Turn(tell.format(x=name), f"Nice to meet you, {name}!")
    asked = Turn(ask, f"Your name is {name}.")
    return Conversation("name_memory", (told, *_turns(rng, emphasis, rng.randint(0, 2)), asked))


def draw_given_name(rng: Random, *, held_out: bool) -> Conversation:
    """The system prompt gives the model another name."""
    while True:
        name, give, ask = draw_name(rng), rng.choice(_GIVE_NAME), rng.choice(_ASK_GIVEN_NAME)
        if is_held_out(f"{name} {give} {ask}") is held_out:
            return Conversation("given_name", (Turn(ask, f"I am {name}."),), give.format(x=name))
