"""Instructions: small things to do with the words of the request itself."""

from random import Random

from assets.training.questions import NAMES, NUMBER_WORDS, WORDS, MakeQuestion, Question, made_up_word

REPEAT_WORDINGS = (
    "Repeat after me: {x}", "Repeat this: {x}", "Say this: {x}", "Please repeat: {x}", "Say: {x}", "Repeat: {x}",
)  # fmt: skip
TIMES_WORDINGS = (
    'Say {x} {n} times.', 'Say the word {x} {n} times.', 'Repeat the word {x} {n} times.', 'Write {x} {n} times.',
    'Write the word {x} {n} times.', 'Repeat {x} {n} times.',
)  # fmt: skip
FIRST_WORDINGS = (
    "List the first {n} of: {x}.", "Name the first {n} of: {x}.", "Give me the first {n} of: {x}.",
    "What are the first {n} of: {x}?", "Write the first {n} of: {x}.",
)  # fmt: skip
LAST_WORDINGS = (
    "What is the last of: {x}?", "Name the last of: {x}.", "Which word is last: {x}?", "Tell me the last of: {x}.",
)  # fmt: skip
REVERSE_WORDINGS = (
    "Reverse the order: {x}.", "Reverse the order of: {x}.", "Say backwards: {x}.", "Write in reverse order: {x}.",
)  # fmt: skip
UPPER_WORDINGS = (
    "Write {x} in capital letters.", "Write {x} in upper case.", "Uppercase {x}.", "Make {x} upper case.",
    "Put {x} in capital letters.", "Write the word {x} in capitals.", "Convert {x} to upper case.",
    "How do you write {x} in capital letters?",
)  # fmt: skip
SPELL_WORDINGS = (
    "Spell {x}.", "Spell the word {x}.", "How do you spell {x}?", "How is {x} spelled?", "Please spell {x}.",
    "Spell {x} for me.", "Can you spell {x}?", "Tell me how to spell {x}.",
)  # fmt: skip
FIRST_LETTER_WORDINGS = (
    "What is the first letter of {x}?", "Which letter does {x} start with?", "Name the first letter of {x}.",
    "What letter does {x} begin with?", "Tell me the first letter of {x}.", "First letter of {x}?",
    "What is the first letter of the word {x}?", "With which letter does {x} start?",
)  # fmt: skip
LAST_LETTER_WORDINGS = (
    "What is the last letter of {x}?", "Which letter does {x} end with?", "Name the last letter of {x}.",
    "What letter does {x} end with?", "Tell me the last letter of {x}.", "Last letter of {x}?",
    "What is the last letter of the word {x}?", "With which letter does {x} end?",
)  # fmt: skip
LENGTH_WORDINGS = (
    "How many letters does {x} have?", "How many letters are in {x}?", "Count the letters of {x}.",
    "How many letters are in the word {x}?", "How long is the word {x}?", "Tell me how many letters {x} has.",
    "What is the length of the word {x}?",
)  # fmt: skip


def _any_word(rng: Random) -> str:
    return rng.choice((rng.choice(WORDS), rng.choice(WORDS), rng.choice(NAMES), made_up_word(rng)))


def _repeat(rng: Random) -> Question:
    words = " ".join(_any_word(rng) for _ in range(rng.randint(1, 5)))
    return Question("repeat", rng.choice(REPEAT_WORDINGS).format(x=words), words, key=f"repeat {words}")


def _times(rng: Random) -> Question:
    word, count = rng.choice(WORDS), rng.randint(2, 5)
    shown = rng.choice((str(count), NUMBER_WORDS[count]))
    text = rng.choice(TIMES_WORDINGS).format(x=word, n=shown)
    return Question("say_times", text, " ".join([word] * count), key=f"times {word} {count}")


def _first_of(rng: Random) -> Question:
    words, count = rng.sample(WORDS, rng.randint(4, 6)), rng.choice((2, 3))
    listed = ", ".join(words)
    text = rng.choice(FIRST_WORDINGS).format(x=listed, n=NUMBER_WORDS[count])
    return Question("first_of", text, ", ".join(words[:count]) + ".", key=f"list {listed}")


def _last_of(rng: Random) -> Question:
    words = rng.sample(WORDS, rng.randint(3, 5))
    listed = ", ".join(words)
    return Question("last_of", rng.choice(LAST_WORDINGS).format(x=listed), f"{words[-1]}.", key=f"list {listed}")


def _reverse(rng: Random) -> Question:
    words = rng.sample(WORDS, rng.randint(2, 4))
    listed = ", ".join(words)
    text = rng.choice(REVERSE_WORDINGS).format(x=listed)
    return Question("reverse_order", text, ", ".join(reversed(words)) + ".", key=f"list {listed}")


def _uppercase(rng: Random) -> Question:
    word = rng.choice(WORDS)
    text = rng.choice(UPPER_WORDINGS).format(x=word)
    return Question("uppercase", text, word.upper(), key=text)


def _spell(rng: Random) -> Question:
    word = rng.choice(WORDS)
    text = rng.choice(SPELL_WORDINGS).format(x=word)
    return Question("spell", text, "-".join(word), key=text)


def _first_letter(rng: Random) -> Question:
    word = rng.choice(WORDS)
    text = rng.choice(FIRST_LETTER_WORDINGS).format(x=word)
    return Question("first_letter", text, f"The first letter of {word} is {word[0]}.", key=text)


def _last_letter(rng: Random) -> Question:
    word = rng.choice(WORDS)
    text = rng.choice(LAST_LETTER_WORDINGS).format(x=word)
    return Question("last_letter", text, f"The last letter of {word} is {word[-1]}.", key=text)


def _length(rng: Random) -> Question:
    word = rng.choice(WORDS)
    text = rng.choice(LENGTH_WORDINGS).format(x=word)
    return Question("length", text, f"The word {word} has {NUMBER_WORDS[len(word)]} letters.", key=text)


INSTRUCTION_KINDS: dict[str, MakeQuestion] = {
    "repeat": _repeat,
    "say_times": _times,
    "first_of": _first_of,
    "last_of": _last_of,
    "reverse_order": _reverse,
    "uppercase": _uppercase,
    "spell": _spell,
    "first_letter": _first_letter,
    "last_letter": _last_letter,
    "length": _length,
}
