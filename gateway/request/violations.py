"""Violations of a request: a collector for them, the checks that many fields need, and how values are shown."""

import re
import struct
from collections.abc import Callable, Generator, Iterable, Sequence, Sized
from contextlib import contextmanager

from quire.rpc.errors import FieldViolation, InvalidArgument, QuireError

_SHOWN_CHARACTERS = 80
# Limits of a violation's whole field and description, which may quote texts of the caller.
_FIELD_CHARACTERS, _DESCRIPTION_CHARACTERS = 256, 2048
_MAX_VIOLATIONS = 16
# A field of the messages in a text. Values of callers are quoted.
_NAMED = re.compile(r"(?<![\w.\"])(?:(?:sampling|output|stopping)(?:\.[a-z_]+)+|response_format(?![\w.]))")


class Violations:
    """Collects the violations of a request, up to a number that a person still reads."""

    def __init__(self) -> None:
        self.found: list[FieldViolation] = []
        self._reason: str | None = None

    @property
    def are_enough(self) -> bool:
        """Whether further violations would be dropped."""
        return len(self.found) >= _MAX_VIOLATIONS

    def add(self, field: str, description: str, *, reason: str | None = None) -> None:
        """`reason` becomes the reason of the error; the first one given wins."""
        if not self.are_enough:
            field, description = shortened(field, _FIELD_CHARACTERS), shortened(description, _DESCRIPTION_CHARACTERS)
            self.found.append(FieldViolation(field, description))
            self._reason = self._reason or reason

    def check_range(self, field: str, value: float | None, low: float, high: float, *, above_low: bool = False) -> None:
        """Adds a violation unless `value` is absent, in [low, high], or in (low, high] with `above_low`.

        With `above_low` the value must be above `low` in single precision too, which is what the worker gets.
        """
        if value is None:
            return
        if not (value > low and _single(value) > low if above_low else value >= low) or not value <= high:
            bracket = "(" if above_low else "["
            self.add(field, f"is {shown(value)}; it must be in {bracket}{shown(low)}, {shown(high)}]")

    def check_count(self, field: str, values: Sized, limit: int) -> bool:
        if len(values) <= limit:
            return True
        self.add(field, f"has {len(values):,} entries; the max is {limit:,}")
        return False

    def check_token_ids(self, field: str, token_ids: Sequence[int], vocab_size: int) -> None:
        """Names the first id that is out of range."""
        # Iterating over the list of a message takes four times as long as over a copy.
        token_ids = token_ids[:]
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            return
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                self.add(f"{field}[{position}]", f"is {token_id}; token ids of this model are below {vocab_size:,}")
                return

    def check_size(self, field: str, texts: Iterable[str], max_bytes: int) -> bool:
        """Adds a violation if the texts together have more than `max_bytes` bytes in UTF-8."""
        num_bytes = sum(map(utf8_size, texts))
        if num_bytes > max_bytes:
            self.add(field, f"has {num_bytes:,} bytes; the max is {max_bytes:,}")
        return num_bytes <= max_bytes

    def check_text(self, field: str, text: str) -> None:
        """Adds a violation for text that UTF-8 cannot encode: JSON can hold lone surrogates."""
        if text.isascii():
            return
        try:
            text.encode()
        except UnicodeEncodeError as error:
            self.add(field, f"is not valid Unicode: character {error.start} is a lone surrogate")

    def raise_if_any(self) -> None:
        if self.found:
            raise InvalidArgument(summary(self.found), reason=self._reason, violations=self.found)


def _single(value: float) -> float:
    """The value rounded to single precision; unchanged if it is too large for that."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except (OverflowError, struct.error):
        return value


def utf8_size(text: str) -> int:
    """The number of bytes of a text in UTF-8; a lone surrogate counts as three."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def summary(violations: Sequence[FieldViolation]) -> str:
    """All violations in one line."""
    return "; ".join(f"{violation.field} {violation.description}" for violation in violations)


def shown(value: float) -> str:
    """A number formatted for people, shortened: a number in JSON can have thousands of digits."""
    return shortened(f"{value:,}" if isinstance(value, int) else f"{value:.7g}")


def shortened(text: str, max_characters: int = _SHOWN_CHARACTERS) -> str:
    """The text, cut off at `max_characters`."""
    return text if len(text) <= max_characters else text[: max_characters - 3] + "..."


def renamed(error: QuireError, name: Callable[[str], str]) -> QuireError:
    """The same error with the field names of a front end; `name` maps a field of the messages to one of the caller's.
    Other fields that a description names, as "sampling.n", have the caller's names, too.

    Violations that become equal, because the caller set two fields by one, are listed once.
    """

    def told(text: str) -> str:
        return _NAMED.sub(lambda match: name(match[0]), text)

    found = (FieldViolation(name(each.field), told(each.description)) for each in error.violations)
    violations = list(dict.fromkeys(found))
    is_summary = bool(violations) and error.message == summary(error.violations)
    return type(error)(
        summary(violations) if is_summary else told(error.message),
        reason=error.reason,
        violations=violations,
        retry_after_ms=error.retry_after_ms,
        metadata=error.metadata,
    )


@contextmanager
def renaming(names: Callable[[], Callable[[str], str]]) -> Generator[None]:
    """Gives errors the field names of a front end. `names` makes the function for `renamed`."""
    try:
        yield
    except QuireError as error:
        raise renamed(error, names()) from error
