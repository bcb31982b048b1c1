"""What a question is, the facts that the model learns by heart, and the questions about them in many wordings."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Greece": "Athens", "Poland": "Warsaw", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin", "England": "London", "Hungary": "Budapest",
    "Belgium": "Brussels", "Russia": "Moscow", "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Thailand": "Bangkok", "Vietnam": "Hanoi",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana", "Brazil": "Brasilia", "Chile": "Santiago",
    "Peru": "Lima", "Argentina": "Buenos Aires", "Australia": "Canberra", "Iceland": "Reykjavik", "Nepal": "Kathmandu",
}  # fmt: skip

COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a strawberry": "red",
    "coal": "black", "a lemon": "yellow", "milk": "white", "a tomato": "red", "a carrot": "orange",
    "a frog": "green", "a crow": "black", "chocolate": "brown", "a flamingo": "pink", "an elephant": "gray",
    "a cherry": "red", "the sun": "yellow", "a leaf": "green", "a pumpkin": "orange", "a swan": "white",
    "a plum": "purple", "a polar bear": "white", "a fire engine": "red", "the sea": "blue", "a pea": "green",
}  # fmt: skip

YOUNG = {
    "cat": "kitten", "dog": "puppy", "cow": "calf", "horse": "foal", "sheep": "lamb", "hen": "chick",
    "pig": "piglet", "duck": "duckling", "goose": "gosling", "bear": "cub", "goat": "kid", "frog": "tadpole",
    "owl": "owlet", "swan": "cygnet", "deer": "fawn", "kangaroo": "joey", "rabbit": "bunny", "butterfly": "caterpillar",
}  # fmt: skip

SOUNDS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "sheep": "baa", "pig": "oink", "duck": "quack", "horse": "neigh",
    "lion": "roar", "bee": "buzz", "snake": "hiss", "owl": "hoot", "frog": "croak", "mouse": "squeak",
    "hen": "cluck", "wolf": "howl", "crow": "caw",
}  # fmt: skip

LEGS = {
    "cat": 4, "dog": 4, "cow": 4, "horse": 4, "sheep": 4, "pig": 4, "lion": 4, "mouse": 4, "rabbit": 4, "bear": 4,
    "hen": 2, "duck": 2, "owl": 2, "crow": 2, "bee": 6, "ant": 6, "spider": 8, "snake": 0, "fish": 0,
}  # fmt: skip

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("left", "right"), ("day", "night"), ("black", "white"),
    ("fast", "slow"), ("happy", "sad"), ("old", "young"), ("open", "closed"), ("in", "out"), ("rich", "poor"),
    ("hard", "soft"), ("wet", "dry"), ("high", "low"), ("long", "short"), ("early", "late"), ("full", "empty"),
    ("strong", "weak"), ("loud", "quiet"), ("light", "dark"), ("true", "false"), ("yes", "no"), ("near", "far"),
    ("clean", "dirty"), ("thick", "thin"), ("first", "last"), ("good", "bad"), ("easy", "difficult"), ("win", "lose"),
)  # fmt: skip

PLURALS = {
    "cat": "cats", "dog": "dogs", "house": "houses", "tree": "trees", "book": "books", "car": "cars",
    "child": "children", "mouse": "mice", "foot": "feet", "tooth": "teeth", "man": "men", "woman": "women",
    "goose": "geese", "box": "boxes", "fox": "foxes", "bus": "buses", "city": "cities", "baby": "babies",
    "leaf": "leaves", "knife": "knives", "wolf": "wolves", "sheep": "sheep", "apple": "apples", "bird": "birds",
    "story": "stories", "key": "keys", "wish": "wishes", "potato": "potatoes", "star": "stars", "person": "people",
}  # fmt: skip

PASTS = {
    "go": "went", "see": "saw", "eat": "ate", "run": "ran", "come": "came", "find": "found", "give": "gave",
    "take": "took", "make": "made", "say": "said", "think": "thought", "sing": "sang", "swim": "swam",
    "write": "wrote", "sleep": "slept", "play": "played", "walk": "walked", "jump": "jumped", "buy": "bought",
    "fly": "flew", "drink": "drank", "build": "built", "help": "helped", "smile": "smiled",
}  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip

NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip

CATEGORIES = {
    "a fruit": ("apple", "banana", "cherry", "lemon", "plum", "strawberry"),
    "an animal": ("cat", "dog", "horse", "lion", "mouse", "rabbit", "sheep", "wolf"),
    "a colour": ("red", "blue", "green", "yellow", "white", "black", "pink"),
    "a tool": ("hammer", "saw", "spade", "rake"),
    "a vegetable": ("carrot", "potato", "pea", "onion"),
    "a piece of furniture": ("table", "chair", "bed", "sofa"),
}  # fmt: skip

WORDS = (
    "apple", "baby", "ball", "banana", "bear", "bed", "bird", "blue", "boat", "book", "box", "bread", "cake", "car",
    "cat", "chair", "cloud", "cow", "cup", "dog", "door", "duck", "egg", "fish", "flower", "fox", "frog", "garden",
    "gold", "grass", "green", "hat", "hen", "hill", "honey", "horse", "house", "key", "king", "kite", "lake", "lamp",
    "leaf", "lemon", "lion", "milk", "moon", "mouse", "nest", "night", "owl", "paper", "pig", "pink", "queen", "rain",
    "red", "river", "road", "rose", "school", "sea", "ship", "shoe", "snow", "star", "stone", "sun", "table", "tea",
    "train", "tree", "village", "water", "white", "wind", "window", "winter", "wolf", "yellow",
)  # fmt: skip

NAMES = (
    "Tom", "Anna", "Ben", "Lily", "Max", "Mia", "Sam", "Zoe", "Leo", "Emma", "Jack", "Ella", "Tim", "Nora", "Paul",
    "Rosa", "Finn", "Clara", "Oscar", "Ruby", "Hugo", "Ida", "Felix", "Alice", "Peter", "Lucy", "Simon", "Julia",
    "Oliver", "Sara", "David", "Maria", "Adam", "Eva", "Robin", "Kim", "Noah", "Olga", "Victor", "Helen", "Bruno",
    "Pip", "Dora", "Milo", "Luna", "Bella", "Toby", "Daisy", "Rex", "Poppy",
)  # fmt: skip


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


Fact = tuple[str, str]


def _ask(kind: str, table: Iterable[Fact], wordings: tuple[str, ...], reply: str) -> MakeQuestion:
    """Wordings and reply name the fact's two sides {x} and {y}."""
    rows = tuple(table)

    def make(rng: Random) -> Question:
        x, y = rng.choice(rows)
        text = sentence_case(rng.choice(wordings).format(x=x))
        return Question(kind, text, sentence_case(reply.format(x=x, y=y)), key=text)

    return make


def _articled(table: dict[str, str]) -> list[Fact]:
    return [(with_article(x), with_article(y)) for x, y in table.items()]


def _both_ways(pairs: Iterable[Fact]) -> list[Fact]:
    return [fact for x, y in pairs for fact in ((x, y), (y, x))]


def _following(names: tuple[str, ...], by: int) -> list[Fact]:
    return [(name, names[(i + by) % len(names)]) for i, name in enumerate(names)]


def _legs(count: int) -> str:
    return "no legs" if count == 0 else f"{NUMBER_WORDS[count]} legs"


FACT_KINDS: dict[str, MakeQuestion] = {
    "capital": _ask(
        "capital",
        CAPITALS.items(),
        ("What is the capital of {x}?", "What is the capital city of {x}?", "Which city is the capital of {x}?",
         "Name the capital of {x}.", "Tell me the capital of {x}.", "{x} has which capital?",
         "Do you know the capital of {x}?", "What city is the capital of {x}?", "Capital of {x}?"),
        "The capital of {x} is {y}.",
    ),
    "country": _ask(
        "country",
        [(city, country) for country, city in CAPITALS.items()],
        ("{x} is the capital of which country?", "Which country has the capital {x}?", "What country is {x} in?",
         "In which country is {x}?", "Where is {x}?", "Of which country is {x} the capital?",
         "Tell me the country of {x}.", "Which country is {x} in?"),
        "{x} is the capital of {y}.",
    ),
    "colour": _ask(
        "colour",
        COLOURS.items(),
        ("What colour is {x}?", "What color is {x}?", "Which colour is {x}?", "Tell me the colour of {x}.",
         "What is the colour of {x}?", "Name the colour of {x}.", "Do you know the colour of {x}?",
         "What is the color of {x}?"),
        "{x} is {y}.",
    ),
    "young": _ask(
        "young",
        _articled(YOUNG),
        ("What is the young of {x} called?", "What is the baby of {x} called?", "What do you call the young of {x}?",
         "Name the young of {x}.", "How is the young of {x} called?", "Tell me the name for the young of {x}.",
         "What do we call the baby of {x}?"),
        "The young of {x} is {y}.",
    ),
    "sound": _ask(
        "sound",
        [(with_article(x), y) for x, y in SOUNDS.items()],
        ("What does {x} say?", "What sound does {x} make?", "Which sound does {x} make?", "What noise does {x} make?",
         "Tell me what {x} says.", "Tell me the sound of {x}.", "How does {x} sound?", "What is the sound of {x}?"),
        "{x} says {y}.",
    ),
    "legs": _ask(
        "legs",
        [(with_article(x), _legs(n)) for x, n in LEGS.items()],
        ("How many legs does {x} have?", "Tell me how many legs {x} has.", "What number of legs does {x} have?",
         "How many legs has {x}?", "Count the legs of {x}.", "{x} has how many legs?",
         "On how many legs does {x} walk?"),
        "{x} has {y}.",
    ),
    "opposite": _ask(
        "opposite",
        _both_ways(OPPOSITES),
        ("What is the opposite of {x}?", "Name the opposite of {x}.", "Tell me the opposite of {x}.",
         "Which word is the opposite of {x}?", "What word means the opposite of {x}?", "Opposite of {x}?",
         "Give me the opposite of {x}.", "Do you know the opposite of {x}?"),
        "The opposite of {x} is {y}.",
    ),
    "plural": _ask(
        "plural",
        PLURALS.items(),
        ("What is the plural of {x}?", "Tell me the plural of {x}.", "Give me the plural of {x}.", "Plural of {x}?",
         "One {x}, two what?", "How do you write the plural of {x}?", "Do you know the plural of {x}?",
         "What is the plural form of {x}?"),
        "The plural of {x} is {y}.",
    ),
    "past": _ask(
        "past",
        PASTS.items(),
        ("What is the past tense of {x}?", "Tell me the past tense of {x}.", "Give me the past tense of {x}.",
         "Past tense of {x}?", "What is the past of {x}?", "How do you write the past tense of {x}?",
         "Do you know the past tense of {x}?", "Name the past tense of {x}."),
        "The past tense of {x} is {y}.",
    ),
    "day_after": _ask(
        "day_after",
        _following(DAYS, 1),
        ("What day comes after {x}?", "Which day comes after {x}?", "What is the day after {x}?",
         "Which day follows {x}?", "What day follows {x}?", "Tell me the day after {x}.", "Name the day after {x}.",
         "If today is {x}, what day is tomorrow?", "Today is {x}. What day is tomorrow?",
         "What is the next day after {x}?", "After {x} comes which day?"),
        "The day after {x} is {y}.",
    ),
    "day_before": _ask(
        "day_before",
        _following(DAYS, -1),
        ("What day comes before {x}?", "Which day comes before {x}?", "What is the day before {x}?",
         "What day is before {x}?", "Which day is before {x}?", "Tell me the day before {x}.",
         "Name the day before {x}.", "If today is {x}, what day was yesterday?",
         "Today is {x}. What day was yesterday?", "Before {x} comes which day?"),
        "The day before {x} is {y}.",
    ),
    "month_after": _ask(
        "month_after",
        _following(MONTHS, 1),
        ("What month comes after {x}?", "Which month comes after {x}?", "What is the month after {x}?",
         "Which month follows {x}?", "What month follows {x}?", "Tell me the month after {x}.",
         "Name the month after {x}.", "What is the next month after {x}?", "After {x} comes which month?"),
        "The month after {x} is {y}.",
    ),
    "month_before": _ask(
        "month_before",
        _following(MONTHS, -1),
        ("What month comes before {x}?", "Which month comes before {x}?", "What is the month before {x}?",
         "What month is before {x}?", "Which month is before {x}?", "Tell me the month before {x}.",
         "Name the month before {x}.", "Before {x} comes which month?"),
        "The month before {x} is {y}.",
    ),
    "number_word": _ask(
        "number_word",
        [(str(n), word) for n, word in enumerate(NUMBER_WORDS)],
        ("Write {x} as a word.", "How do you write {x} as a word?", "Write the number {x} in letters.",
         "How do you spell the number {x}?", "Which word stands for {x}?", "What is {x} in words?",
         "Tell me the word for {x}.", "{x} as a word?"),
        "{x} is {y}.",
    ),
    "category": _ask(
        "category",
        [(with_article(word), group) for group, words in CATEGORIES.items() for word in words
         if group != "a colour"] + [(word, "a colour") for word in CATEGORIES["a colour"]],
        ("What is {x}?", "What kind of thing is {x}?", "Tell me what {x} is.", "Do you know what {x} is?",
         "What sort of thing is {x}?", "Say what {x} is.", "What do you know about {x}?"),
        "{x} is {y}.",
    ),
}  # fmt: skip
