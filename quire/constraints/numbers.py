"""Numbers of JSON schemas, which the engine holds as doubles: what it enforces exactly, and bounds moved inwards.

llguidance 1.9.1 reads a number with an error of its last digit where it has more than 53 bits or a large exponent, holds
bounds as doubles, makes 64-bit integers of them, and computes multiples in 32 bits.
"""

import math
from collections.abc import Collection, Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, InvalidOperation
from typing import Any

Number = int | float | Decimal

LARGEST_EXACT = 2**53
_LARGEST_EXPONENT = 22
"""A power of ten that is exact as a double."""
LARGEST = 9_223_372_036_854_770_000
"""Below 2^63, in 15 digits."""
_UNBOUNDED = 10**17
"""The largest bound for which the engine finds one digit more."""
_LARGEST_STEP = (2**32 - 10) // 10
_SIGNIFICANT = 15
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
BOUNDS = frozenset((*_LOWER, *_UPPER))


def read_float(text: str) -> Number:
    """A number with a fraction or an exponent; a Decimal if a double does not hold all of its digits."""
    value = float(text)
    try:
        exact = Decimal(text)
    except InvalidOperation:
        return Decimal("inf") if value else Decimal("nan")
    # A sum with zero has no sign of zero.
    return value + 0.0 if math.isfinite(value) and Decimal(repr(value)) == exact else exact


def numbers_of(value: Any) -> Iterator[Number]:
    """The numbers in a value, without recursion."""
    pending = [value]
    while pending:
        match pending.pop():
            case bool():
                pass
            case int() | float() | Decimal() as number:
                yield number
            case list() as values:
                pending += values
            case dict() as values:
                pending += values.values()


def is_exact(value: Number) -> bool:
    """Whether the engine writes this number, given as a constant, and no other one."""
    if not isinstance(value, Decimal) and LARGEST_EXACT < abs(value) < 2**63:
        return Decimal(float(value)) == (value if isinstance(value, int) else Decimal(repr(value)))
    return abs(value) <= LARGEST_EXACT and (isinstance(value, int) or _is_short(value))


def _is_short(value: Number) -> bool:
    if isinstance(value, Decimal):
        return False
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    return int("".join(map(str, digits))) <= LARGEST_EXACT and abs(exponent) <= _LARGEST_EXPONENT


def move_bounds(schema: dict[str, Any]) -> None:
    """Moves the bounds of numbers in a schema inwards where the engine does not hold them: to the next double where all
    numbers are integers, to 15 digits elsewhere, and within 64 bits.

    Raises:
        ValueError: no number is left; the text names the bound.
    """
    is_whole = schema.get("type") == "integer"
    for (name, exclusive), sign in ((_LOWER, 1), (_UPPER, -1)):
        for keyword in (name, exclusive):
            value: Any = schema.get(keyword)
            # In an early draft, true makes the other bound an exclusive one.
            if value is None or isinstance(value, bool) or _is_held(value):
                continue
            least = Decimal(value if isinstance(value, int | Decimal) else repr(value)) * sign
            if not least < LARGEST:
                raise ValueError(f"{keyword} {str(value):.40}; numbers are enforced up to {LARGEST:,}")
            moved = _whole_from(least, sign, is_exclusive=keyword == exclusive) if is_whole else _digits_from(least)
            del schema[keyword]
            target = name if is_whole else keyword
            schema[target] = sign * max(moved, sign * schema.get(target, sign * moved))
        # From a large bound the engine cannot count outwards without an end.
        if any(sign * schema.get(each, 0) > _UNBOUNDED for each in (name, exclusive)):
            schema.setdefault(_UPPER[0] if sign > 0 else _LOWER[0], sign * LARGEST)


def _is_held(value: Number) -> bool:
    return abs(value) < LARGEST_EXACT and (isinstance(value, int) or _is_short(value))


def _whole_from(least: Decimal, sign: int, *, is_exclusive: bool) -> int:
    """The least integer from a bound on that the engine holds; negated for upper bounds."""
    if least <= -LARGEST:
        # The engine takes the double 2^63 as the largest integer of 64 bits.
        return 1 - 2**63 if sign < 0 else -LARGEST
    whole = (
        int(least.to_integral_value(ROUND_FLOOR)) + 1 if is_exclusive else int(least.to_integral_value(ROUND_CEILING))
    )
    held = float(whole)
    return int(held if held >= whole else math.nextafter(held, math.inf))


def _digits_from(least: Decimal) -> int | float:
    """A number of 15 digits that is larger than a bound."""
    if least <= -LARGEST:
        return -LARGEST
    unit = Decimal(1).scaleb(max(least.adjusted() + 1 - _SIGNIFICANT, -_LARGEST_EXPONENT))
    moved = ((least / unit).to_integral_value(ROUND_FLOOR) + 1) * unit
    return int(moved) if unit >= 1 else float(moved)


def step_of(value: Number) -> tuple[int, int] | None:
    """`multipleOf` as the engine holds it: an integer and the power of ten that divides it; None if it is not exact."""
    if isinstance(value, Decimal) or not math.isfinite(value) or abs(value) > _LARGEST_STEP or not _is_short(value):
        return None
    held, exponent = abs(float(value)), 0
    while not held.is_integer():
        held, exponent = held * 10, exponent + 1
    is_equal = Decimal(held).scaleb(-exponent) == abs(Decimal(repr(value)))
    return (int(held), exponent) if is_equal and 0 < held <= _LARGEST_STEP else None


def can_be_intersected(steps: Collection[tuple[int, int]]) -> bool:
    """Whether the engine can compute the common multiples of these values of `multipleOf`, any of them together."""
    scale = max((exponent for _, exponent in steps), default=0)
    whole = {step * 10 ** (scale - exponent) for step, exponent in steps}
    return math.prod(whole) * max(whole, default=1) <= _LARGEST_STEP * 10
