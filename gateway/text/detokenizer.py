"""Token ids to text, one token at a time."""

from collections.abc import Callable, Container, Sequence

# A byte-level or byte-fallback decoder writes this for bytes that are not part of a character.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Of a character of UTF-8, which has four bytes at most, three can be there without the last one.
_MAX_INCOMPLETE = 3
# A window of more tokens is cut back to its last ones, of which these many are enough context.
_MAX_WINDOW = 14
_CONTEXT = 8


class Detokenizer:
    """Turns the tokens of one sequence into text that only ever grows and never shows half a character.

    The concatenation of all pieces, `flush` included, equals the decoding of all tokens at once. One exception: a
    byte-fallback decoder replaces a whole run of bytes when one byte of it is invalid; there, characters that were
    delivered before that byte stay.

    It decodes a window of the last tokens, of which the first ones are context (decoders treat the very first token in
    their own way) and the rest has not become text yet. The cost of a token is bounded whatever the tokens are.

    The `tokenizers` library's DecodeStream is not used: it raises on an invalid byte after a valid run, and its window
    grows without bound over tokens that give no text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], silent: Container[int]) -> None:
        """`decode` gives the text of token ids; `silent` holds the ids that never give text (special, unknown)."""
        self._decode = decode
        self._silent = silent
        self._window: list[int] = []
        # The text of the window that was delivered; the window's text starts with it, unless bytes are awaited.
        self._delivered = ""
        # Lengths of the window at which nothing was held back, the newest and the one before.
        self._boundary = 0
        self._older_boundary = 0

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that became certain with it, which may be empty."""
        if token_id in self._silent:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._delivered):
            if self._is_awaiting_bytes(text):
                return ""
            text = self._restart()
        certain = max(_certain_length(text), len(self._delivered))
        piece = text[len(self._delivered) : certain]
        self._delivered = text[:certain]
        self._mark_boundary(text)
        return piece

    def flush(self) -> str:
        """The rest, with replacement characters for incomplete bytes, once no token follows any more."""
        text = self._decode(self._window)
        if not text.startswith(self._delivered):
            text = self._restart()
        rest, self._delivered = text[len(self._delivered) :], text
        return rest

    def _is_awaiting_bytes(self, text: str) -> bool:
        """Whether text that was delivered looks broken only because a character after it is incomplete."""
        return len(self._window) - self._boundary <= _MAX_INCOMPLETE and text.endswith(_REPLACEMENT)

    def _restart(self) -> str:
        """Forgets the context before the tokens that gave no text yet; returns their text."""
        undelivered = min(len(self._window) - self._boundary, _MAX_INCOMPLETE + 1)
        self._window = self._window[-undelivered:]
        self._delivered = ""
        self._boundary = self._older_boundary = 0
        return self._decode(self._window)

    def _mark_boundary(self, text: str) -> None:
        if len(self._delivered) == len(text):
            self._older_boundary, self._boundary = self._boundary, len(self._window)
        if len(self._window) <= _MAX_WINDOW:
            return
        if self._boundary == len(self._window):
            self._cut(self._older_boundary, held=0)
        elif len(self._window) - self._boundary > _CONTEXT:
            self._cut(len(self._window) - _CONTEXT, held=len(text) - len(self._delivered))

    def _cut(self, start: int, *, held: int) -> None:
        """Drops the window's tokens before `start`, where `held` characters at its end are not delivered yet."""
        self._window = self._window[start:]
        text = self._decode(self._window)
        self._delivered = text[: len(text) - held]
        self._boundary = 0 if held else len(self._window)
        self._older_boundary = 0


def _certain_length(text: str) -> int:
    """The length without the replacement characters at the end that further bytes may turn into a character."""
    length = len(text)
    while length and len(text) - length < _MAX_INCOMPLETE and text[length - 1] == _REPLACEMENT:
        length -= 1
    return length
