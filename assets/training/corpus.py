"""The documents of the first course, drawn one after the other from a seed: questions, stories and small talk."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from assets.training.conversations import BOS, EOS, PROMPT_WEIGHT, Conversation, Document, document
from assets.training.data import items, lists, load, pairs
from assets.training.questions import QUESTION_KINDS, WORDINGS, Question, draw, draw_name, draw_side, draw_until
from assets.training.questions import with_article

DrawConversation = Callable[..., Conversation]
# How often a kind is asked, where 1.0 does not suit it.
_EMPHASES: dict[str, dict[str, float]] = {}
for _name, _text in load("courses")["emphasis"].items():
    _weights = dict(pairs(_text))
    _EMPHASES[_name] = {**_EMPHASES.get(_weights.pop("like", ""), {}), **{k: float(v) for k, v in _weights.items()}}
_CHAT = lists(WORDINGS["chat"])
SYSTEM_PROMPTS = _CHAT["systems"]

_STORIES: dict[str, str] = load("stories")
# Of each plot the sentences, and of each sentence what may stand.
_PLOTS = [
    [tuple(re.split(r"\s+\| ", sentence)) for sentence in re.split(r"\n(?!\| )", plot)]
    for plot in _STORIES.pop("plots").split("\n\n")
]
_PARTS = lists(_STORIES)


def conversation_of(question: Question, system: str | None = None) -> Conversation:
    return Conversation(question.kind, (), ((question.text, question.answer),), system)


def choose(shares: Mapping[str, float], rng: Random) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]


def draw_question(rng: Random, emphasis: str = "first", *, held_out: bool = False) -> Question:
    """A question of any kind, emphasized kinds more often."""
    kind = choose({kind: _EMPHASES[emphasis].get(kind, 1.0) for kind in QUESTION_KINDS}, rng)
    return draw(QUESTION_KINDS[kind], rng, held_out=held_out)


def draw_exchange(rng: Random, emphasis: str, *, held_out: bool = False) -> tuple[str, str]:
    question = draw_question(rng, emphasis, held_out=held_out)
    return question.text, question.answer


def _named(rng: Random, given: str, asked: str, *, held_out: bool) -> tuple[str, ...]:
    """A name, how it is given, and how it is asked for."""
    return draw_side(
        lambda: (draw_name(rng), rng.choice(_CHAT[given]), rng.choice(_CHAT[asked])), " ".join, held_out=held_out
    )


def draw_name_memory(rng: Random, emphasis: str = "first", *, held_out: bool) -> Conversation:
    """The user tells a name, asks up to two other things, then asks for the name."""
    name, tell, ask = _named(rng, "tell_name", "ask_name", held_out=held_out)
    between = [draw_exchange(rng, emphasis) for _ in range(rng.randint(0, 2))]
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


@dataclass(frozen=True, slots=True)
class Story:
    """Wholly decided by its draws; `request` asks for it."""

    slots: Mapping[str, str]
    text: str

    def request(self, rng: Random) -> str:
        if rng.random() < 0.2:
            return rng.choice(_PARTS["open_requests"])
        named = f" named {self.slots['name']}" if rng.random() < 0.4 else ""
        return rng.choice(_PARTS["requests"]).format(x=with_article(self.slots["animal"]) + named)


def _slots(rng: Random) -> tuple[dict[str, str], int]:
    """What fills the sentences of a plot, and the plot."""
    name = draw_name(rng)
    friend = draw_until(lambda other: other != name, lambda: draw_name(rng))
    animal, friend_animal = rng.sample(_PARTS["animals"], 2)
    slots = {"name": name, "friend": friend, "animal": animal, "friend_animal": friend_animal}
    slots |= {"a_friend": with_article(friend_animal), "a_adj": with_article(rng.choice(_PARTS["adjectives"]))}
    slots |= {part: rng.choice(_PARTS[f"{part}s"]) for part in ("place", "home", "thing", "colour", "food", "feature")}
    return slots, rng.randrange(len(_PLOTS))


def draw_story(rng: Random, *, held_out: bool) -> Story:
    """The split looks at plot, hero and place: a held-out story has a mixture of them that training never shows."""
    slots, plot = draw_side(
        lambda: _slots(rng), lambda drawn: "story {1} {0[name]} {0[animal]} {0[place]} {0[thing]}".format(*drawn),
        held_out=held_out,
    )  # fmt: skip
    variants = [rng.choice(sentence) for sentence in _PLOTS[plot]]
    setting = [rng.choice(_PARTS["settings"])] if rng.random() < 0.7 else []
    sentences = [rng.choice(_PARTS["openings"]), *setting, *variants, rng.choice(_PARTS["endings"])]
    return Story(slots, " ".join(sentences).format(**slots))


def make_document(rng: Random, emphasis: str) -> Document:
    """One of the first course, never from the held-out side."""
    choice = rng.random()
    if choice < 0.06:
        story = draw_story(rng, held_out=False)
        if choice < 0.035:
            return (BOS, 0.0), (story.text + EOS, 0.5)
        return document(Conversation("story", (), ((story.request(rng), story.text),)))
    if choice < 0.16:
        return plain_question_document(draw_question(rng, emphasis))
    if choice < 0.19:
        return document(draw_name_memory(rng, emphasis, held_out=False))
    if choice < 0.205:
        return document(draw_given_name(rng, held_out=False))
    if choice < 0.32:
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.4 else None
        exchanges = tuple(draw_exchange(rng, emphasis) for _ in range(rng.randint(2, 5)))
        return document(Conversation("several", (), exchanges, system))
    text, answer = draw_exchange(rng, emphasis)
    asked = (loosely(text, rng, 0.08), answer)
    system = "You are a helpful assistant." if rng.random() < 0.1 else None
    return document(Conversation("single", (), (asked,), system))


def held_out_texts(seed: int, count: int) -> list[str]:
    """Plain texts from the held-out side, for perplexity: stories, and questions with answers."""
    rng = Random(seed)
    texts: list[str] = []
    for i in range(count):
        if i % 3 == 0:
            texts.append(draw_story(rng, held_out=True).text)
        else:
            texts.append("Question: {}\nAnswer: {}".format(*draw_exchange(rng, "first", held_out=True)))
    return texts
