"""Questions about numbers. The split looks at the operands: a held-out sum was never seen in any wording."""

from random import Random

from assets.training.questions import NAMES, MakeQuestion, Question

SUM_WORDINGS = (
    "What is {a} + {b}?", "{a} + {b} = ?", "{a} + {b}", "What is {a} plus {b}?", "How much is {a} + {b}?",
    "Add {a} and {b}.", "Calculate {a} + {b}.", "What is the sum of {a} and {b}?", "How much is {a} plus {b}?",
)  # fmt: skip
DIFFERENCE_WORDINGS = (
    "What is {a} - {b}?", "{a} - {b} = ?", "{a} - {b}", "What is {a} minus {b}?", "How much is {a} - {b}?",
    "Subtract {b} from {a}.", "Calculate {a} - {b}.", "How much is {a} minus {b}?",
)  # fmt: skip
PRODUCT_WORDINGS = (
    "What is {a} * {b}?", "{a} * {b} = ?", "{a} * {b}", "What is {a} times {b}?", "How much is {a} * {b}?",
    "Multiply {a} by {b}.", "Calculate {a} * {b}.", "How much is {a} times {b}?", "Multiply {a} and {b}.",
)  # fmt: skip
BIGGER_WORDINGS = (
    "Which is bigger, {a} or {b}?", "Which number is bigger, {a} or {b}?", "What is bigger: {a} or {b}?",
    "Which is larger, {a} or {b}?", "Which is greater, {a} or {b}?", "Tell me which is bigger: {a} or {b}.",
)  # fmt: skip
SMALLER_WORDINGS = (
    "Which is smaller, {a} or {b}?", "Which number is smaller, {a} or {b}?", "What is smaller: {a} or {b}?",
    "Which is less, {a} or {b}?", "Tell me which is smaller: {a} or {b}.",
)  # fmt: skip
PARITY_WORDINGS = (
    "Is {n} even or odd?", "Is {n} odd or even?", "Is the number {n} even or odd?", "Tell me if {n} is even or odd.",
    "Even or odd: {n}?", "Say whether {n} is even or odd.",
)  # fmt: skip
NEXT_WORDINGS = (
    "What number comes after {n}?", "Which number comes after {n}?", "What is the next number after {n}?",
    "What comes after {n}?", "Name the number after {n}.", "Which number follows {n}?",
)  # fmt: skip
COUNT_WORDINGS = (
    "Count from {a} to {b}.", "Please count from {a} to {b}.", "Can you count from {a} to {b}?",
    "List the numbers from {a} to {b}.", "Write the numbers from {a} to {b}.",
)  # fmt: skip
THINGS = ("apples", "books", "balls", "cakes", "stars", "eggs", "shoes", "flowers", "stones", "keys")


def sum_key(a: int, b: int) -> str:
    """One key for a + b and b + a."""
    return f"sum {min(a, b)} {max(a, b)}"


def difference_key(a: int, b: int) -> str:
    return f"difference {a} {b}"


def _addition(rng: Random) -> Question:
    a, b = rng.randrange(100), rng.randrange(100)
    text = rng.choice(SUM_WORDINGS).format(a=a, b=b)
    return Question("addition", text, f"{a} + {b} = {a + b}.", sum_key(a, b))


def _subtraction(rng: Random) -> Question:
    b, a = sorted((rng.randrange(100), rng.randrange(100)))
    text = rng.choice(DIFFERENCE_WORDINGS).format(a=a, b=b)
    return Question("subtraction", text, f"{a} - {b} = {a - b}.", difference_key(a, b))


def _multiplication(rng: Random) -> Question:
    """Times tables are learnt by heart, so here the wording is what is held out."""
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    text = rng.choice(PRODUCT_WORDINGS).format(a=a, b=b)
    return Question("multiplication", text, f"{a} * {b} = {a * b}.", key=text)


def _gaining(rng: Random) -> Question:
    a, b, name, things = rng.randint(2, 20), rng.randint(2, 20), rng.choice(NAMES), rng.choice(THINGS)
    text = rng.choice(
        (
            f"{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
            f"{name} has {a} {things}. {name} finds {b} more. How many {things} does {name} have?",
        )
    )
    return Question("word_problem", text, f"{a} + {b} = {a + b}. {name} has {a + b} {things}.", sum_key(a, b))


def _losing(rng: Random) -> Question:
    a, name, things = rng.randint(4, 30), rng.choice(NAMES), rng.choice(THINGS)
    b = rng.randint(2, a - 2)
    text = rng.choice(
        (
            f"{name} has {a} {things} and gives away {b}. How many {things} does {name} have now?",
            f"{name} has {a} {things}. {name} loses {b}. How many {things} does {name} have?",
        )
    )
    return Question("word_problem", text, f"{a} - {b} = {a - b}. {name} has {a - b} {things}.", difference_key(a, b))


def _word_problem(rng: Random) -> Question:
    return rng.choice((_gaining, _losing))(rng)


def _comparison(rng: Random) -> Question:
    a, b = rng.sample(range(100), 2)
    bigger = rng.random() < 0.5
    text = rng.choice(BIGGER_WORDINGS if bigger else SMALLER_WORDINGS).format(a=a, b=b)
    word, answer = ("bigger", max(a, b)) if bigger else ("smaller", min(a, b))
    return Question("comparison", text, f"{answer} is {word}.", key=f"comparison {min(a, b)} {max(a, b)}")


def _parity(rng: Random) -> Question:
    """Every number is seen; the pair of number and wording is held out."""
    n = rng.randrange(100)
    text = rng.choice(PARITY_WORDINGS).format(n=n)
    return Question("parity", text, f"{n} is {'odd' if n % 2 else 'even'}.", key=text)


def _next_number(rng: Random) -> Question:
    n = rng.randrange(100)
    text = rng.choice(NEXT_WORDINGS).format(n=n)
    return Question("next_number", text, f"After {n} comes {n + 1}.", key=text)


def _count(rng: Random) -> Question:
    a = rng.randint(0, 50)
    b = a + rng.randint(2, 12)
    text = rng.choice(COUNT_WORDINGS).format(a=a, b=b)
    return Question("count", text, ", ".join(map(str, range(a, b + 1))) + ".", key=f"count {a} {b}")


NUMBER_KINDS: dict[str, MakeQuestion] = {
    "addition": _addition,
    "subtraction": _subtraction,
    "multiplication": _multiplication,
    "word_problem": _word_problem,
    "comparison": _comparison,
    "parity": _parity,
    "next_number": _next_number,
    "count": _count,
}
