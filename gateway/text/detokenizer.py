"""Incremental detokenization: token ids to text, as they come, with the clean-up of spaces if it is set."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, cast

# Byte-level and byte-fallback decoders write this for bytes that are not part of a character.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A UTF-8 character has at most four bytes, so at most three of them wait for the last one.
_MAX_INCOMPLETE = 3
# A longer window is cut back to its last `_CONTEXT` tokens, which are enough context.
_MAX_WINDOW = 14
_CONTEXT = 8
# The replacements of the clean-up, in the order of transformers.
_SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
# The characters before the last one of each. Clean-up only removes spaces, so text is certain up to the first space
# that only such characters follow.
_SPACED_STARTS = " 'nvr"


class SilentIds(Protocol):
    """Ids without text, as a set has them."""

    def __contains__(self, token_id: object, /) -> bool: ...
    def isdisjoint(self, token_ids: Collection[int], /) -> bool: ...


class WholeTexts(dict[int, str | None]):
    """The text of each token for a decoder of bytes, in which it does not depend on the tokens before it; None for a
    token with a part of a character. An entry is made when it is first read."""

    def __init__(self, decode: Callable[[Sequence[int]], str], silent: SilentIds) -> None:
        super().__init__()
        self._decode = decode
        self._silent = silent

    def __missing__(self, token_id: int) -> str | None:
        text = "" if token_id in self._silent else self._decode((token_id,))
        found = self[token_id] = None if _REPLACEMENT in text else text
        return found


class Detokenizer:
    """Turns the tokens of one sequence into text that only grows and never shows half a character.

    The concatenation of all pieces, `flush` included, equals the decoding of all tokens at once. One exception: a
    byte-fallback decoder replaces a whole run of bytes when one byte of it is invalid; there, characters that were
    delivered before that byte stay.

    It decodes a window of the last tokens. The first tokens of the window are context (decoders treat the very first
    token differently, SentencePiece's drop the space before it), the rest has not been delivered yet. The cost of a
    token is bounded.

    DecodeStream of the `tokenizers` library is not used: it raises on an invalid byte after a valid run, and its window
    grows without bound over tokens without text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        num_incomplete: Callable[[Sequence[int]], int],
        silent: SilentIds,
        context: Sequence[int] = (),
        whole: Mapping[int, str | None] | None = None,
    ) -> None:
        """`decode` returns the text of token ids; `num_incomplete` returns the number of last tokens that begin a
        character without ending it. `silent` has the ids without text (special, unknown). `context` are the last tokens
        with text before the sequence, which end with a whole character. `whole` has the texts of tokens if the decoder
        is one of bytes (`WholeTexts`).
        """
        self._decode = decode
        self._num_incomplete = num_incomplete
        self._silent = silent
        self._whole = whole
        self._window = list(context)
        # The delivered part of the window's text, which starts with it unless a character is incomplete.
        self._delivered = decode(self._window) if context else ""
        # The last two lengths of the window at which no text was held back.
        self._boundary = len(self._window)
        self._older_boundary = 0

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that became certain with it, which may be empty."""
        if self._whole is not None and not self._holds_text and (piece := self._whole[token_id]) is not None:
            return piece
        if token_id in self._silent:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._delivered):
            if self._is_incomplete(text):
                return ""
            text = self._restart()
        certain = self._certain_length(text)
        piece = text[len(self._delivered) : certain]
        self._delivered = text[:certain]
        self._mark_boundary(text)
        return piece

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that became certain with them: that of `push`, token by token."""
        if len(token_ids) == 1:
            return self.push(token_ids[0])
        new = list(token_ids)
        if self._whole is not None and not self._holds_text:
            pieces = [self._whole[token_id] for token_id in new]
            if None not in pieces:
                return "".join(cast(list[str], pieces))
        if not self._silent.isdisjoint(new):
            new = [token_id for token_id in new if token_id not in self._silent]
        if len(new) > 1:
            window = self._window + new
            text = self._decode(window)
            # Else a character is incomplete or invalid, and what was delivered before depends on each token.
            if _REPLACEMENT not in text and text.startswith(self._delivered):
                piece = text[len(self._delivered) :]
                self._window, self._delivered = window, text
                self._older_boundary = self._boundary = len(window)
                if len(window) > _MAX_WINDOW:
                    self._cut_whole()
                return piece
        return "".join([self.push(token_id) for token_id in new])

    def flush(self) -> str:
        """The rest of the text, after the last token, with replacement characters for incomplete bytes."""
        text = self._decode(self._window)
        if not text.startswith(self._delivered):
            text = self._restart()
        rest, self._delivered = text[len(self._delivered) :], text
        return rest

    @property
    def _holds_text(self) -> bool:
        """Whether text at the end of the window is held back."""
        return self._boundary != len(self._window)

    def _is_incomplete(self, text: str) -> bool:
        """Whether the text differs from what was delivered only because a character at its end is incomplete."""
        return len(self._window) - self._boundary <= _MAX_INCOMPLETE and text.endswith(_REPLACEMENT)

    def _certain_length(self, text: str) -> int:
        """The length without the replacement characters at the end that more bytes may complete to a character."""
        if not text.endswith(_REPLACEMENT):
            return len(text)
        certain = max(len(text.rstrip(_REPLACEMENT)), len(self._delivered))
        if len(text) - certain <= _MAX_INCOMPLETE:
            return certain
        if not (num_incomplete := self._num_incomplete(self._window)):
            return len(text)
        # A byte-fallback decoder writes one for each byte of the run, also for whole characters before it.
        whole = self._decode(self._window[:-num_incomplete])
        return max(len(whole), certain) if text.startswith(whole) else certain

    def _restart(self) -> str:
        """Drops the context of the tokens that have no text yet; returns their text."""
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

    def _cut_whole(self) -> None:
        """Cuts a window that ends with a whole character to one that also begins with one."""
        start = len(self._window) - _CONTEXT
        while start and self._decode(self._window[start:]).startswith(_REPLACEMENT):
            start -= 1
        self._cut(start, held=0)

    def _cut(self, start: int, *, held: int) -> None:
        """Drops the window's tokens before `start`; `held` characters at its end are not delivered yet."""
        self._window = self._window[start:]
        text = self._decode(self._window)
        self._delivered = text[: len(text) - held]
        self._boundary = 0 if held else len(self._window)
        self._older_boundary = 0


def cleaned_up(text: str) -> str:
    """The text without spaces before English punctuation.

    Tokenizers whose vocabulary has no spaces (WordPiece) write one before each token. transformers removes them in this
    way if tokenizer_config.json sets `clean_up_tokenization_spaces`.
    """
    for each in _SPACED:
        text = text.replace(each, each.strip())
    return text


class CleanedUp:
    """The pieces of another detokenizer, cleaned up: their concatenation is the clean-up of its concatenation."""

    def __init__(self, pieces: Detokenizer) -> None:
        self._pieces = pieces
        self._held = ""

    def push(self, token_id: int) -> str:
        return self.push_all((token_id,))

    def push_all(self, token_ids: Sequence[int]) -> str:
        text = self._held + self._pieces.push_all(token_ids)
        certain = text.find(" ", len(text.rstrip(_SPACED_STARTS)))
        if certain < 0:
            certain = len(text)
        self._held = text[certain:]
        return cleaned_up(text[:certain])

    def flush(self) -> str:
        text, self._held = self._held + self._pieces.flush(), ""
        return cleaned_up(text)


TextPieces = Detokenizer | CleanedUp
"""Converts the tokens of one sequence to pieces of text."""
