"""Text to token ids and back, as the model directory's tokenizer.json says."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import tokenizers
import tokenizers.models

from gateway.text.added_tokens import add_tokens
from gateway.text.clean_up import CleanedUp, TextPieces, cleaned_up
from gateway.text.detokenizer import Detokenizer
from quire.settings import ConfigurationError

# Up to this many characters or tokens (about a millisecond) the work is done on the spot; more goes to a thread.
_INLINE_LENGTH = 4096
_NO_CONFIG: Mapping[str, Any] = MappingProxyType({})


class Tokenizer:
    """The `tokenizers` library's tokenizer of one model. Thread-safe.

    Attributes:
        size: Ids are below it.
        longest_token_bytes: No token stands for more bytes of text, but for those that a normalizer drops. The
            vocabulary's spelling is taken, which is never shorter than the text.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, executor: Executor, config: Mapping[str, Any] = _NO_CONFIG
    ) -> None:
        """`config` is what tokenizer_config.json says; ConfigurationError where a token in it is none."""
        add_tokens(tokenizer, config)
        tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
        # As in transformers: the spaces of a BPE tokenizer are those of the text.
        self._cleans_up = bool(config.get("clean_up_tokenization_spaces")) and not _is_bpe(tokenizer)
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
    def open(cls, path: Path, executor: Executor, config: Mapping[str, Any] = _NO_CONFIG) -> Self:
        """Reads a tokenizer.json; `executor` runs what takes long.

        `config` is what stands beside it in tokenizer_config.json. Of that, add_bos_token and add_eos_token have no
        effect, as in transformers: tokenizer.json says which tokens are put around a text.

        Raises:
            ConfigurationError: it is no tokenizer, or the configuration names a token that is none.
        """
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigurationError(f"{path} is not a tokenizer: {error}") from error
        return cls(tokenizer, executor, config)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, with the special tokens of the tokenizer's post-processor if wanted."""
        if len(text) <= _INLINE_LENGTH:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._encode_long, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, include_special_tokens: bool) -> str:
        """Text of a few token ids; ids that the tokenizer does not know give none."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=not include_special_tokens)
        return cleaned_up(text) if self._cleans_up else text

    async def decode_any(self, token_ids: Sequence[int], *, include_special_tokens: bool) -> str:
        """As `decode`, for any number of them."""
        if len(token_ids) <= _INLINE_LENGTH:
            return self.decode(token_ids, include_special_tokens=include_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._decode_long, token_ids, include_special_tokens)

    async def spell(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them; an empty string for ids that it does not know."""
        if len(token_ids) <= _INLINE_LENGTH:
            return self._spell(token_ids)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._spell, token_ids)

    def detokenizer(self, *, include_special_tokens: bool) -> TextPieces:
        """A fresh detokenizer for one sequence."""
        silent = self._never_text if include_special_tokens else self._not_plain_text
        detokenizer = Detokenizer(self._decode_all, silent)
        return CleanedUp(detokenizer) if self._cleans_up else detokenizer

    def _spell(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _decode_long(self, token_ids: Sequence[int], include_special_tokens: bool) -> str:
        # As for texts, the batch call lets other threads run.
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=not include_special_tokens)
        return cleaned_up(text) if self._cleans_up else text

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        # Unlike `encode`, the batch call lets other threads run, and it keeps no offsets.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _is_bpe(tokenizer: tokenizers.Tokenizer) -> bool:
    return isinstance(tokenizer.model, tokenizers.models.BPE)


class _SilentIds:
    """The ids that never give text: those listed, and all beyond the vocabulary."""

    __slots__ = ("_end", "_ids")

    def __init__(self, ids: frozenset[int], end: int) -> None:
        self._ids = ids
        self._end = end

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._ids or (isinstance(token_id, int) and token_id >= self._end)
