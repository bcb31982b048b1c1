"""A limit on the tokens of a model's reasoning: after them, the mark that ends the reasoning must follow.

The state is a function of the tokens of prompt and output, as a matcher's state is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """The maximum tokens of a sequence between two marks.

    Attributes:
        begin: The mark that begins the reasoning, with special tokens shown.
        end: The mark that ends it.
        end_token_ids: The tokens of `end`.
        max_tokens: The maximum tokens of all stretches of reasoning together.
    """

    begin: bytes
    end: bytes
    end_token_ids: tuple[int, ...]
    max_tokens: int


class ThinkingState:
    """Tracks whether a sequence is in its reasoning, and the number of its reasoning tokens."""

    __slots__ = ("_is_inside", "_limit", "_num_tokens", "_recent", "_tail", "_token_bytes")

    def __init__(self, limit: ThinkingLimit, token_bytes: Sequence[bytes], prompt: Iterable[int]) -> None:
        """The state after a prompt, whose tokens do not count. `token_bytes` has the bytes of each token id."""
        self._limit = limit
        self._token_bytes = token_bytes
        self._num_tokens = 0
        self._recent: tuple[int, ...] = ()
        text = b"".join(map(self._text_of, prompt))
        begin, end = text.rfind(limit.begin), text.rfind(limit.end)
        self._is_inside = begin > end
        passed = max(begin + len(limit.begin) if begin >= 0 else 0, end + len(limit.end) if end >= 0 else 0)
        self._tail = self._kept(text[passed:])

    def copy(self) -> Self:
        """An independent state."""
        other = object.__new__(type(self))
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def consume(self, token_id: int) -> None:
        """Advances by one token of the output."""
        limit, text = self._limit, self._tail + self._text_of(token_id)
        if self._is_inside:
            self._num_tokens += 1
            self._recent = (*self._recent, token_id)[-len(limit.end_token_ids) :]
            if (end := text.find(limit.end)) >= 0:
                self._is_inside, text = False, text[end + len(limit.end) :]
        if not self._is_inside and (place := text.find(limit.begin)) >= 0:
            self._is_inside, self._recent, text = True, (), text[place + len(limit.begin) :]
        self._tail = self._kept(text)

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow; empty if there is a choice."""
        end = self._limit.end_token_ids
        if not self._is_inside or self._num_tokens < self._limit.max_tokens:
            return ()
        counts = range(min(len(self._recent), len(end) - 1), 0, -1)
        begun = next((count for count in counts if self._recent[-count:] == end[:count]), 0)
        return end[begun:]

    def _text_of(self, token_id: int) -> bytes:
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def _kept(self, text: bytes) -> bytes:
        """The end of a text that may hold the beginning of a mark."""
        longest = max(len(self._limit.begin), len(self._limit.end)) - 1
        return text[-longest:] if longest else b""
