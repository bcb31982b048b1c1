"""Text to token ids and back, as the model directory's tokenizer.json says."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Self

import tokenizers

from gateway.detokenizer import Detokenizer
from quire.settings import ConfigurationError

# Up to this many characters or tokens (about a millisecond) the work is done on the spot; more goes to a thread.
_INLINE_LENGTH = 4096


class Tokenizer:
    """The `tokenizers` library's tokenizer of one model. Thread-safe.

    Attributes:
        size: Ids are below it.
        longest_token_bytes: No token stands for more bytes of text, but for those that a normalizer drops. The
            vocabulary's spelling is taken, which is never shorter than the text.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, executor: Executor) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._executor = executor
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        self.longest_token_bytes = max((len(token.encode()) for token in vocabulary), default=1)
        special = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        unknown = frozenset(range(self.size)).difference(vocabulary.values())
        self._not_plain_text = _SilentIds(unknown | special, self.size)
        self._never_text = _SilentIds(unknown, self.size)

    @classmethod
    def open(cls, path: Path, executor: Executor) -> Self:
        """Reads a tokenizer.json; `executor` runs what takes long.

        Raises:
            ConfigurationError: it is no tokenizer.
        """
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigurationError(f"{path} is not a tokenizer: {error}") from error
        return cls(tokenizer, executor)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, with the special tokens of the tokenizer's post-processor if wanted."""
        if len(text) <= _INLINE_LENGTH:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._encode_long, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, include_special_tokens: bool) -> str:
        """Text of token ids; ids that the tokenizer does not know give none."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not include_special_tokens)

    async def spell(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them; an empty string for ids that it does not know."""
        if len(token_ids) <= _INLINE_LENGTH:
            return self._spell(token_ids)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._spell, token_ids)

    def detokenizer(self, *, include_special_tokens: bool) -> Detokenizer:
        """A fresh detokenizer for one sequence."""
        return Detokenizer(self._decode_all, self._never_text if include_special_tokens else self._not_plain_text)

    def _spell(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        # Unlike `encode`, the batch call lets other threads run, and it keeps no offsets.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


class _SilentIds:
    """The ids that never give text: those listed, and all beyond the vocabulary."""

    __slots__ = ("_end", "_ids")

    def __init__(self, ids: frozenset[int], end: int) -> None:
        self._ids = ids
        self._end = end

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._ids or (isinstance(token_id, int) and token_id >= self._end)
