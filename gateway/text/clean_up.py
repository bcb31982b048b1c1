"""Spaces before punctuation taken out of text, for the models whose tokenizer_config.json asks for it.

Tokenizers that know no spaces (WordPiece) write one before each token; `clean_up_tokenization_spaces` is how
transformers mends that for English.
"""

from typing import Protocol

# In the order in which transformers replaces them.
_REPLACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
# What the start of one of them is made of. Only spaces are ever taken out, so text is certain up to the first space
# behind which there is nothing else.
_STARTS = " 'nvr"


class TextPieces(Protocol):
    """Tokens to text, piece by piece."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


def cleaned_up(text: str) -> str:
    for each in _REPLACED:
        text = text.replace(each, each.strip())
    return text


class CleanedUp:
    """The pieces of another detokenizer, whose concatenation is the clean-up of its concatenation."""

    def __init__(self, pieces: TextPieces) -> None:
        self._pieces = pieces
        self._held = ""

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that became certain with it."""
        text = self._held + self._pieces.push(token_id)
        certain = text.find(" ", len(text.rstrip(_STARTS)))
        if certain < 0:
            certain = len(text)
        self._held = text[certain:]
        return cleaned_up(text[:certain])

    def flush(self) -> str:
        """The rest, once no token follows any more."""
        text, self._held = self._held + self._pieces.flush(), ""
        return cleaned_up(text)
