"""The documents of the first course, drawn one after the other from a seed."""

from collections.abc import Callable, Mapping
from random import Random

from assets.training.conversations import (
    BOS,
    EOS,
    PROMPT_WEIGHT,
    Conversation,
    Document,
    Exchange,
    chat_document,
)
from assets.training.data import items, load, pairs
from assets.training.questions import QUESTION_KINDS, WORDINGS, Question, draw, draw_name, draw_side
from assets.training.stories import draw_request, draw_story

DrawConversation = Callable[..., Conversation]
# How often a kind is asked, where 1.0 does not suit it.
Emphasis = Mapping[str, float]
EMPHASES: dict[str, Emphasis] = {}
for _name, _text in load("courses")["emphasis"].items():
    _weights = dict(pairs(_text))
    EMPHASES[_name] = {**EMPHASES.get(_weights.pop("like", ""), {}), **{k: float(v) for k, v in _weights.items()}}
_FIRST = EMPHASES["first"]
_CHAT = {name: items(text) for name, text in WORDINGS["chat"].items()}
SYSTEM_PROMPTS = _CHAT["systems"]


def conversation_of(question: Question, system: str | None = None) -> Conversation:
    return Conversation(question.kind, (), (exchange_of(question),), system)


def exchange_of(question: Question) -> Exchange:
    return question.text, question.answer


def choose(shares: Mapping[str, float], rng: Random) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]


def draw_question(rng: Random, emphasis: Emphasis = _FIRST, *, held_out: bool) -> Question:
    """A question of any kind, emphasized kinds more often."""
    kind = choose({kind: emphasis.get(kind, 1.0) for kind in QUESTION_KINDS}, rng)
    return draw(QUESTION_KINDS[kind], rng, held_out=held_out)


def _turns(rng: Random, emphasis: Emphasis, count: int) -> list[Exchange]:
    return [exchange_of(draw_question(rng, emphasis, held_out=False)) for _ in range(count)]


def _several_questions(rng: Random, emphasis: Emphasis) -> Conversation:
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.4 else None
    return Conversation("several", (), tuple(_turns(rng, emphasis, rng.randint(2, 5))), system)


def _named(rng: Random, given: str, asked: str, *, held_out: bool) -> tuple[str, ...]:
    """A name, how it is given, and how it is asked for."""
    return draw_side(
        lambda: (draw_name(rng), rng.choice(_CHAT[given]), rng.choice(_CHAT[asked])), " ".join, held_out=held_out
    )


def draw_name_memory(rng: Random, emphasis: Emphasis = _FIRST, *, held_out: bool) -> Conversation:
    """The user tells a name, asks up to two other things, then asks for the name."""
    name, tell, ask = _named(rng, "tell_name", "ask_name", held_out=held_out)
    between = _turns(rng, emphasis, rng.randint(0, 2))
    told, asked = (tell.format(x=name), f"Nice to meet you, {name}!"), (ask, f"Your name is {name}.")
    return Conversation("name_memory", (), (told, *between, asked))


def draw_given_name(rng: Random, *, held_out: bool) -> Conversation:
    """The system prompt gives the model another name."""
    name, give, ask = _named(rng, "give_name", "ask_given_name", held_out=held_out)
    return Conversation("given_name", (), ((ask, f"I am {name}."),), give.format(x=name))


def plain_question_document(question: Question) -> Document:
    """The form for prompts without a chat template."""
    prompt = f"Question: {question.text}\nAnswer:"
    return (BOS, 0.0), (prompt, PROMPT_WEIGHT), (f" {question.answer}{EOS}", 1.0)


def loosely(text: str, rng: Random, share: float = 0.06) -> str:
    """Now and then as people type: in lower case at the start, without the mark at the end."""
    if rng.random() < share:
        text = text[:1].lower() + text[1:]
    return text.rstrip("?.") if rng.random() < share else text


def _single_question(rng: Random, emphasis: Emphasis) -> Conversation:
    question = draw_question(rng, emphasis, held_out=False)
    asked = (loosely(question.text, rng, 0.08), question.answer)
    return Conversation(question.kind, (), (asked,), "You are a helpful assistant." if rng.random() < 0.1 else None)


def told_story(rng: Random, *, held_out: bool = False) -> Conversation:
    story = draw_story(rng, held_out=held_out)
    return Conversation("story", (), ((draw_request(rng, story), story.text),))


def make_document(rng: Random, emphasis: Emphasis) -> Document:
    """One of the first course, never from the held-out side."""
    choice = rng.random()
    if choice < 0.035:
        return (BOS, 0.0), (draw_story(rng, held_out=False).text + EOS, 0.5)
    if choice < 0.06:
        return chat_document(told_story(rng))
    if choice < 0.16:
        return plain_question_document(draw_question(rng, emphasis, held_out=False))
    if choice < 0.19:
        return chat_document(draw_name_memory(rng, emphasis, held_out=False))
    if choice < 0.205:
        return chat_document(draw_given_name(rng, held_out=False))
    make = _several_questions if choice < 0.32 else _single_question
    return chat_document(make(rng, emphasis))


def held_out_texts(seed: int, count: int) -> list[str]:
    """Plain texts from the held-out side, for perplexity: stories, and questions with answers."""
    rng = Random(seed)
    texts: list[str] = []
    for i in range(count):
        if i % 3 == 0:
            texts.append(draw_story(rng, held_out=True).text)
        else:
            question = draw_question(rng, held_out=True)
            texts.append(f"Question: {question.text}\nAnswer: {question.answer}")
    return texts
