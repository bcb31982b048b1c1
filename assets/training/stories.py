"""Little stories, put together from sentences. Each is wholly decided by the draws that make it.

In the parts, {name} is the hero and {friend} the friend; the rest is named for what it is."""

from dataclasses import dataclass
from random import Random

from assets.training.questions import draw_name, is_held_out, with_article

ANIMALS = (
    "cat", "dog", "fox", "rabbit", "mouse", "bear", "duck", "frog", "owl", "horse", "pig", "hen", "sheep", "wolf",
    "lion", "bird", "goat", "squirrel", "hedgehog", "dragon",
)  # fmt: skip
ADJECTIVES = ("little", "brave", "kind", "curious", "clever", "shy", "happy", "young", "small", "gentle")
PLACES = ("forest", "village", "garden", "valley", "farm", "meadow")
HOMES = ("a small house", "a warm nest", "a cosy cave", "an old tree", "a red barn", "a little hut")
THINGS = ("ball", "hat", "kite", "book", "boat", "lamp", "bell", "cup", "drum", "basket")
COLOURS = ("red", "blue", "green", "yellow", "golden", "white")
FOODS = ("honey cake", "apple pie", "warm bread", "carrot soup", "sweet berries", "fresh milk")
FEATURES = ("lake", "river", "hill", "old bridge", "big stone", "tall tree")

OPENINGS = (
    "Once upon a time there was {a_adj} {animal} named {name}.",
    "Once upon a time, there was {a_adj} {animal} named {name}.",
    "Once upon a time, in a quiet {place}, there lived {a_adj} {animal} named {name}.",
    "Once upon a time {a_adj} {animal} named {name} lived in {home} near the {place}.",
    "Once there was {a_adj} {animal} called {name}.",
    "Long ago {a_adj} {animal} named {name} lived in a quiet {place}.",
    "There once was {a_adj} {animal} named {name} who lived near the {feature}.",
    "In a quiet {place} lived {a_adj} {animal} named {name}.",
    "{name} was {a_adj} {animal} who lived in {home}.",
)

SETTINGS = (
    "{name} lived in {home} and loved to eat {food}.",
    "{name} liked to play in the {place} every day.",
    "{name} had a {colour} {thing} and took it everywhere.",
    "Every morning {name} walked to the {feature} and looked at the sky.",
    "{name} had a good friend, {a_friend} named {friend}.",
)

PLOTS = (
    (
        "One day {name} lost the {colour} {thing}.|One morning the {colour} {thing} was gone.",
        "{name} looked under the bed and behind the door, but it was not there.|{name} looked everywhere, but could "
        "not find it.",
        "{name} felt sad and sat down by the {feature}.|{name} began to cry.",
        "Then {a_friend} named {friend} came by.|Just then {friend} the {friend_animal} came along.",
        '"Why are you sad?" asked {friend}. "I lost my {thing}," said {name}.',
        "They looked together, and soon {friend} saw the {thing} near the {feature}.|Together they searched the "
        "{place}, and there it was, behind the {feature}.",
        '"Thank you!" said {name}. "You are a true friend."',
    ),
    (
        "One day the wind was strong and dark clouds came.|One afternoon it began to rain very hard.",
        "{name} ran home as fast as possible.|{name} hurried home through the {place}.",
        "On the way {name} heard a small voice. It was {friend} the {friend_animal}.|"
        "Under the {feature} sat {a_friend} named {friend}, cold and wet.",
        '"Can you help me?" asked {friend}. "I am cold and I am lost."',
        '"Come with me," said {name}. "My home is warm and dry."',
        "They ate {food} and told each other stories until the rain stopped.|They sat by the fire and ate {food}.",
        "When the sun came out, {friend} went home with a smile.",
    ),
    (
        "One day {name} wanted to make {food}.|One morning {name} woke up and wanted {food}.",
        "But there was no sugar in the house.|But the basket was empty.",
        "{name} went to {friend} the {friend_animal} and asked for help.|So {name} walked to the {feature} where "
        "{friend} the {friend_animal} lived.",
        '"I will help you," said {friend}, "if we can share it."',
        "They worked all morning, and soon it smelled very good.|They mixed and stirred and laughed all morning.",
        "{name} gave half of it to {friend}, and they ate it in the garden.",
    ),
    (
        "One day {name} found a {colour} {thing} near the {feature}.|"
        "One morning {name} saw something by the {feature}. It was a {colour} {thing}.",
        '"Whose {thing} is this?" asked {name}.|{name} wondered who had lost it.',
        "{name} asked everyone in the {place}, but nobody knew.",
        "At last {name} met {friend} the {friend_animal}, who looked very sad.",
        '"That is my {thing}!" said {friend}. "I thought it was gone."',
        "{name} gave it back at once, and {friend} danced with joy.|{name} smiled and gave it back.",
        "From that day on they played with the {thing} together.",
    ),
    (
        "One day {name} planted a small seed in the {place}.|In spring {name} put a tiny seed into the ground.",
        "Every day {name} gave it water and waited.|{name} watered it every morning and every evening.",
        '"Nothing will grow there," said {friend} the {friend_animal}.',
        "But {name} did not give up.|But {name} was patient and went on.",
        "Then one morning a green leaf came out of the ground.",
        "By summer there was a beautiful {colour} flower, the biggest in the {place}.",
        '"You were right," said {friend}. "Good things take time."',
    ),
    (
        "One day there was a race to the {feature}.|One day all the animals met for a race around the {feature}.",
        "{friend} the {friend_animal} was very fast, and {name} was slow.",
        '"I will win," said {friend}, and ran away.',
        "But on the way {friend} fell and hurt a foot.",
        "{name} could have won, but {name} stopped to help.|{name} saw it and stopped at once.",
        "They walked to the end together, side by side.",
        "Everyone clapped, and both of them got a {colour} {thing}.",
    ),
    (
        "{name} was afraid of the dark.|At night {name} was always a little afraid.",
        "One evening {name} heard a strange sound near the {feature}.",
        '"Who is there?" asked {name}. "It is only me," said {friend} the {friend_animal}.',
        "{friend} showed {name} the moon and the bright stars.|{friend} had brought a {colour} lamp.",
        "They sat on the grass and counted the stars until it was late.",
        "After that night {name} was not afraid of the dark anymore.",
    ),
    (
        "It was the birthday of {name}, but nobody said a word.|Today was a special day: {name} had a birthday.",
        '"They forgot me," thought {name}, and went to the {feature} alone.',
        "There {name} found a {colour} {thing} with a little note.",
        'The note said: "Come to the {place}."',
        "When {name} came, all the friends were there with {food}.|In the {place} {friend} the {friend_animal} was "
        "waiting with {food}.",
        '"Happy birthday!" they shouted, and {name} laughed with joy.',
    ),
)

ENDINGS = (
    "And they lived happily ever after.",
    "From then on they were the best of friends.",
    "That night {name} slept very well.",
    "And {name} was very happy.",
    "{name} learned that a good friend is the best thing in the world.",
    "And that is the end of the story.",
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
