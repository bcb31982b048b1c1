"""Little stories, put together from sentences. Each is wholly decided by the draws that make it."""

from dataclasses import dataclass
from random import Random

from tools.quire_tiny.question import draw_name, is_held_out, with_article
from tools.quire_tiny.story_parts import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    ENDINGS,
    FEATURES,
    FOODS,
    HOMES,
    OPENINGS,
    PLACES,
    PLOTS,
    SETTINGS,
    THINGS,
)

REQUESTS = (
    "Tell me a story about {x}.",
    "Tell me a little story about {x}.",
    "Write a story about {x}.",
    "Write a short story about {x}.",
    "Can you tell me a story about {x}?",
    "Please tell me a story about {x}.",
    "I want a story about {x}.",
)
OPEN_REQUESTS = ("Tell me a story.", "Write a short story.", "Please tell me a story.", "Tell a story.")


@dataclass(frozen=True, slots=True)
class Story:
    animal: str
    name: str
    text: str


def _slots(rng: Random) -> dict[str, str]:
    name = draw_name(rng)
    friend = next(other for other in iter(lambda: draw_name(rng), None) if other != name)
    animal, friend_animal = rng.sample(ANIMALS, 2)
    return {
        "name": name,
        "friend": friend,
        "animal": animal,
        "friend_animal": friend_animal,
        "a_friend": with_article(friend_animal),
        "a_adj": with_article(rng.choice(ADJECTIVES)),
        "place": rng.choice(PLACES),
        "home": rng.choice(HOMES),
        "thing": rng.choice(THINGS),
        "colour": rng.choice(COLOURS),
        "food": rng.choice(FOODS),
        "feature": rng.choice(FEATURES),
    }


def draw_story(rng: Random, *, held_out: bool) -> Story:
    """The split looks at plot, hero and place: a held-out story has a mixture of them that training never shows."""
    while True:
        slots, plot = _slots(rng), rng.randrange(len(PLOTS))
        key = f"story {plot} {slots['name']} {slots['animal']} {slots['place']} {slots['thing']}"
        if is_held_out(key) is held_out:
            break
    variants = [rng.choice(sentence.split("|")) for sentence in PLOTS[plot]]
    setting = [rng.choice(SETTINGS)] if rng.random() < 0.7 else []
    sentences = [rng.choice(OPENINGS), *setting, *variants, rng.choice(ENDINGS)]
    return Story(slots["animal"], slots["name"], " ".join(sentences).format(**slots))


def draw_request(rng: Random, story: Story) -> str:
    """How a user might have asked for this story."""
    if rng.random() < 0.2:
        return rng.choice(OPEN_REQUESTS)
    subject = with_article(story.animal)
    if rng.random() < 0.4:
        subject += f" named {story.name}"
    return rng.choice(REQUESTS).format(x=subject)
