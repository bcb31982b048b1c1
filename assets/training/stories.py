"""Little stories, put together from the sentences of `data/stories.toml`. Each is wholly decided by its draws."""

import re
from dataclasses import dataclass
from random import Random
from typing import Any

from assets.training.data import items, load
from assets.training.questions import draw_name, draw_side, with_article

_DATA: dict[str, Any] = load("stories")
_PARTS = {name: items(text) for name, text in _DATA.items() if name != "plots"}
# Of each plot the sentences, and of each sentence what may stand.
_PLOTS = [
    [tuple(re.split(r"\s+\| ", sentence)) for sentence in re.split(r"\n(?!\| )", plot["sentences"])]
    for plot in _DATA["plots"]
]


@dataclass(frozen=True, slots=True)
class Story:
    animal: str
    name: str
    friend: str
    text: str


def _slots(rng: Random) -> dict[str, str]:
    name = draw_name(rng)
    friend = next(other for other in iter(lambda: draw_name(rng), None) if other != name)
    animal, friend_animal = rng.sample(_PARTS["animals"], 2)
    slots = {"name": name, "friend": friend, "animal": animal, "friend_animal": friend_animal}
    slots |= {"a_friend": with_article(friend_animal), "a_adj": with_article(rng.choice(_PARTS["adjectives"]))}
    for part in ("place", "home", "thing", "colour", "food", "feature"):
        slots[part] = rng.choice(_PARTS[f"{part}s"])
    return slots


def _key(story: tuple[dict[str, str], int]) -> str:
    slots, plot = story
    return f"story {plot} {slots['name']} {slots['animal']} {slots['place']} {slots['thing']}"


def draw_story(rng: Random, *, held_out: bool) -> Story:
    """The split looks at plot, hero and place: a held-out story has a mixture of them that training never shows."""
    slots, plot = draw_side(lambda: (_slots(rng), rng.randrange(len(_PLOTS))), _key, held_out=held_out)
    variants = [rng.choice(sentence) for sentence in _PLOTS[plot]]
    setting = [rng.choice(_PARTS["settings"])] if rng.random() < 0.7 else []
    sentences = [rng.choice(_PARTS["openings"]), *setting, *variants, rng.choice(_PARTS["endings"])]
    return Story(slots["animal"], slots["name"], slots["friend"], " ".join(sentences).format(**slots))


def draw_request(rng: Random, story: Story) -> str:
    """How a user might have asked for this story."""
    if rng.random() < 0.2:
        return rng.choice(_PARTS["open_requests"])
    subject = with_article(story.animal)
    if rng.random() < 0.4:
        subject += f" named {story.name}"
    return rng.choice(_PARTS["requests"]).format(x=subject)
