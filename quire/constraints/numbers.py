"""Numbers of JSON schemas: which of them the engine enforces exactly, and bounds moved inwards to such numbers.

llguidance 1.9.1 holds numbers as doubles, reads numbers of more than 53 bits or with a large exponent with an error in
the last digit, makes 64-bit integers of bounds, and computes multiples in 32 bits.
"""

import math
from collections.abc import Collection, Iterable
from decimal import ROUND_FLOOR, Decimal, InvalidOperation
from typing import Any

Number = int | float | Decimal

LARGEST_BOUND = 9_223_372_036_854_770_000
"""The largest bound below 2^63 with 15 significant digits."""
# A power of ten that a double holds, and the largest bound from which the engine can count outwards without an end.
_LARGEST_EXPONENT, _LARGEST_OPEN = 22, 10**17
# A step with one more digit must fit into 32 bits.
_LARGEST_STEP = (2**32 - 10) // 10
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
BOUNDS = frozenset((*_LOWER, *_UPPER))


def read_float(text: str) -> Number:
    """A number with a fraction or an exponent; a Decimal if a double does not hold all of its digits."""
    value = float(text)
    try:
        exact = Decimal(text)
    except InvalidOperation:  # an exponent of many digits
        return Decimal("1e999" if value else "1e-999")
    # A sum with zero has no sign of zero.
    return value + 0.0 if math.isfinite(value) and Decimal(repr(value)) == exact else exact


def is_exact(value: Number) -> bool:
    """Whether the engine writes exactly this number, given as a constant."""
    if not isinstance(value, Decimal) and 2**53 < abs(value) < 2**63:
        return Decimal(float(value)) == (value if isinstance(value, int) else Decimal(repr(value)))
    return abs(value) <= 2**53 and _is_held(value)


def is_large(value: Any) -> bool:
    """Whether a constant is an integer that the engine cannot represent."""
    return isinstance(value, int) and not isinstance(value, bool) and not is_exact(value)


def _is_held(value: Number) -> bool:
    """Whether the engine reads a number without an error. `value` has at most 53 bits before the point."""
    if not isinstance(value, float):
        return isinstance(value, int)
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    return int("".join(map(str, digits))) <= 2**53 and abs(int(exponent)) <= _LARGEST_EXPONENT


def move_bounds(schema: dict[str, Any]) -> None:
    """Moves the bounds of numbers in a schema inwards to numbers of 15 digits where the engine does not hold them.

    Raises:
        ValueError: no number is left; the text names the bound.
    """
    for names, sign in ((_LOWER, 1), (_UPPER, -1)):
        inclusive, exclusive = names
        if isinstance(schema.get(exclusive), bool):
            # In an early draft, true makes the other bound an exclusive one.
            is_other = schema.pop(exclusive) and inclusive in schema
            schema |= {exclusive: schema.pop(inclusive)} if is_other else {}
        for name in names:
            value: Any = schema.get(name)
            if value is None or (abs(value) < 2**53 and _is_held(value)):
                continue
            if math.isnan(value) or value * sign >= LARGEST_BOUND:
                raise ValueError(f"{name} {value!s:.40}; numbers are enforced up to {LARGEST_BOUND:,}")
            least = Decimal(value if isinstance(value, int | Decimal) else repr(value)) * sign
            schema[name] = -LARGEST_BOUND * sign if least <= -LARGEST_BOUND else _larger(least) * sign
        if any(sign * schema.get(name, 0) > _LARGEST_OPEN for name in names):
            schema.setdefault(_UPPER[0] if sign > 0 else _LOWER[0], sign * LARGEST_BOUND)


def move_apart(schemas: Iterable[dict[str, Any]]) -> None:
    """Moves an exclusive integer bound inwards by a unit of the 15th digit if another bound is less than 1 away: the
    engine would include the integer in such a range."""
    schemas = list(schemas)
    bounds = [each[name] for each in schemas for name in BOUNDS & each.keys()]
    for schema in schemas:
        for (inclusive, exclusive), sign in ((_LOWER, 1), (_UPPER, -1)):
            value: Any = schema.get(exclusive)
            if value is None or value * sign < 0 or value != int(value):
                continue
            if any(0 < sign * (other - value) < 1 for other in bounds):
                moved = _larger(Decimal(schema.pop(exclusive)) * sign)
                schema[inclusive] = sign * max(moved, sign * schema.get(inclusive, sign * moved))


def _larger(value: Decimal) -> int | float:
    """A number of 15 digits that is larger, by at most a unit of the last one."""
    unit = Decimal(1).scaleb(max(value.adjusted() - 14, -_LARGEST_EXPONENT))
    moved = ((value / unit).to_integral_value(ROUND_FLOOR) + 1) * unit
    return int(moved) if unit >= 1 else float(moved)


def step_of(value: Number) -> tuple[int, int] | None:
    """`multipleOf` as the engine holds it: an integer and the power of ten that divides it; None if it is not exact."""
    if isinstance(value, Decimal) or not abs(value) <= _LARGEST_STEP or not _is_held(value):
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
