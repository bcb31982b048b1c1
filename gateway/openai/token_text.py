"""Tokens one by one as text and bytes, for log probabilities.

A token may stand for a part of a character, so its bytes are the truth and its text an approximation.
"""

import functools
import re
from collections.abc import Sequence
from typing import Self

from gateway.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Decoders treat the first token of a text in their own way, so that each token is decoded after this one.
_ANCHOR = "a"


class TokenTexts:
    """Texts and bytes of the vocabulary's tokens. Ids that the tokenizer does not know have neither."""

    def __init__(self, tokenizer: Tokenizer, spellings: Sequence[str]) -> None:
        """`spellings` are the vocabulary's own, by id."""
        self._tokenizer = tokenizer
        self._spellings = spellings
        self._anchor = [spellings.index(_ANCHOR)] if _ANCHOR in spellings else []
        self._bytes: dict[int, bytes] = {}

    @classmethod
    async def load(cls, tokenizer: Tokenizer) -> Self:
        return cls(tokenizer, await tokenizer.spell(range(tokenizer.size)))

    def bytes_of(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def text_of(self, token_id: int) -> str:
        """The token's text, with replacement characters for parts of characters."""
        return self.bytes_of(token_id).decode(errors="replace")

    def key_of(self, token_id: int) -> str:
        """As `text_of`, but parts of characters are written out as bytes, so that different tokens differ."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _find_bytes(self, token_id: int) -> bytes:
        text = self._decode_after_anchor(token_id)
        if _REPLACEMENT not in text or token_id >= len(self._spellings):
            return text.encode()
        spelling = self._spellings[token_id]
        if match := _BYTE_TOKEN.fullmatch(spelling):
            return bytes.fromhex(match[1])
        byte_of = _byte_level_alphabet()
        if all(character in byte_of for character in spelling):
            return bytes(byte_of[character] for character in spelling)
        return text.encode()

    def _decode_after_anchor(self, token_id: int) -> str:
        before = self._tokenizer.decode(self._anchor, include_special_tokens=True)
        text = self._tokenizer.decode([*self._anchor, token_id], include_special_tokens=True)
        if text.startswith(before):
            return text[len(before) :]
        return self._tokenizer.decode([token_id], include_special_tokens=True)


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable ones as themselves, others as characters from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}
