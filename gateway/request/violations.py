"""What is wrong with a request: the violations of one request collected, the checks that many fields need, and how
values are shown."""

import struct
from collections.abc import Callable, Iterable, Sequence, Sized

from quire.rpc.errors import FieldViolation, InvalidArgument, QuireError

_SHOWN_CHARACTERS = 80
_MAX_VIOLATIONS = 16


class Violations:
    """Collects what is wrong with a request, up to a number that somebody may want to read."""

    def __init__(self) -> None:
        self.found: list[FieldViolation] = []
        self._reason: str | None = None

    @property
    def are_enough(self) -> bool:
        """Whether what else is wrong would not be told."""
        return len(self.found) >= _MAX_VIOLATIONS

    def add(self, field: str, description: str, *, reason: str | None = None) -> None:
        """`reason`, where there is one, becomes that of the error, whatever else is wrong."""
        if not self.are_enough:
            self.found.append(FieldViolation(field, description))
            self._reason = self._reason or reason

    def check_range(self, field: str, value: float | None, low: float, high: float, *, above_low: bool = False) -> None:
        """`value` is in [low, high], or in (low, high] with `above_low`; NaN is in neither.

        Messages to the scheduler and the worker hold single precision, in which it must be above `low` still.
        """
        if value is None:
            return
        if not (value > low and _single(value) > low if above_low else value >= low) or not value <= high:
            bracket = "(" if above_low else "["
            self.add(field, f"is {shown(value)}; it must be in {bracket}{shown(low)}, {shown(high)}]")

    def check_count(self, field: str, values: Sized, limit: int) -> bool:
        if len(values) <= limit:
            return True
        self.add(field, f"has {len(values):,} entries; the most is {limit:,}")
        return False

    def check_token_ids(self, field: str, token_ids: Sequence[int], vocab_size: int) -> None:
        """Names the first id that is out of range."""
        # The list of a message takes four times as long for each look at it.
        token_ids = token_ids[:]
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            return
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                self.add(f"{field}[{position}]", f"is {token_id}; token ids of this model are below {vocab_size:,}")
                return

    def check_size(self, field: str, texts: Iterable[str], max_bytes: int) -> None:
        """`texts` are together of at most `max_bytes` bytes in UTF-8."""
        num_bytes = sum(utf8_size(text) for text in texts)
        if num_bytes > max_bytes:
            self.add(field, f"has {num_bytes:,} bytes; the most is {max_bytes:,}")

    def check_text(self, field: str, text: str) -> None:
        """Text that UTF-8 cannot write (a lone surrogate) can come through JSON."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            self.add(field, f"is not valid Unicode: character {error.start} is a lone surrogate")

    def raise_if_any(self) -> None:
        if self.found:
            raise InvalidArgument(summary(self.found), reason=self._reason, violations=self.found)


def _single(value: float) -> float:
    """The value as single precision has it; what is too large for that, as it is."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return value


def utf8_size(text: str) -> int:
    """The number of bytes of a text in UTF-8; a lone surrogate has three."""
    return len(text.encode(errors="surrogatepass"))


def summary(violations: Sequence[FieldViolation]) -> str:
    """All of them in one line."""
    return "; ".join(f"{violation.field} {violation.description}" for violation in violations)


def shown(value: float) -> str:
    """A number as people read it; JSON can bring one of thousands of digits."""
    return shortened(f"{value:,}" if isinstance(value, int) else f"{value:.7g}")


def shortened(text: str) -> str:
    """The start of a text that may be of any length."""
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def renamed(error: QuireError, name: Callable[[str], str]) -> QuireError:
    """The same error with the field names of a front end; `name` maps a field of the messages to one of the caller's.

    Violations that become equal, because the caller set two fields by one, are listed once.
    """
    violations = list(dict.fromkeys(FieldViolation(name(each.field), each.description) for each in error.violations))
    is_summary = bool(violations) and error.message == summary(error.violations)
    return type(error)(
        summary(violations) if is_summary else error.message,
        reason=error.reason,
        violations=violations,
        retry_after_ms=error.retry_after_ms,
        metadata=error.metadata,
    )
