"""Text to token ids and back, as tokenizer.json and tokenizer_config.json of the model directory define it."""

import codecs
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any, Self, TypeVar, cast

import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.normalizers

from gateway.auth.caller import current_tenant
from gateway.offload import FairExecutor
from gateway.text.detokenizer import CleanedUp, Detokenizer, TextPieces, WholeTexts, cleaned_up
from gateway.types import TokenIds
from quire.constraints.tokens import byte_level_alphabet
from quire.model_files.embedding_files import lowers_texts
from quire.model_files.model_directory import ModelDirectory
from quire.rpc.errors import InvalidArgument
from quire.runtime.settings import ConfigurationError

_Text = TypeVar("_Text")
# Up to this many characters or tokens (about a millisecond of work) run on the event loop; more run in a thread.
_INLINE_LENGTH = 4096
# The usual text of a token.
_BYTES_PER_TOKEN = 4
# Several times the vocabulary of any model. It bounds the memory that a damaged file makes us take.
_MAX_SIZE = 1 << 22
_NO_CONFIG: Mapping[str, Any] = MappingProxyType({})
# The special tokens that every model may name, in the order in which transformers adds them.
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The newer and the older section for further special tokens: a list, or an object with a name for each.
_FURTHER = ("extra_special_tokens", "additional_special_tokens")
_NAMED_FURTHER = "model_specific_special_tokens"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Decoders treat the first token of a text in a special way, so each token is decoded after this one.
_ANCHOR = "a"
# A detokenizer starts from this many tokens of the prompt; from more, where these begin inside a character.
_MIN_CONTEXT, _MAX_CONTEXT = 4, 9
# At most this many bytes, and tokens, are the beginning of a character.
_MAX_INCOMPLETE = 3
# Tokens with text are looked for among this many at the end of a prompt.
_PROMPT_END = 4096
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


class Tokenizer:
    """The `tokenizers` library's tokenizer of one model. Thread-safe.

    Attributes:
        size: Upper bound of the token ids, exclusive.
        longest_token_bytes: Upper bound of the UTF-8 bytes of text that one token stands for, except text that a
            normalizer drops. It is the longest spelling in the vocabulary, which is never shorter than the text.
        special_tokens: The ids of all special tokens by their texts.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, executor: FairExecutor, config: Mapping[str, Any] = _NO_CONFIG
    ) -> None:
        """`config` is the content of tokenizer_config.json. Raises ConfigurationError for a malformed token in it, and
        for an id beyond the range of any model."""
        _add_tokens(tokenizer, config)
        tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
        # As in transformers, BPE tokenizers are excepted: their spaces are the spaces of the text.
        is_bpe = isinstance(tokenizer.model, tokenizers.models.BPE)
        self._cleans_up = bool(config.get("clean_up_tokenization_spaces")) and not is_bpe
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._executor = executor
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        if self.size > _MAX_SIZE:
            raise ConfigurationError(
                f"the tokenizer has the token id {self.size - 1}; at most {_MAX_SIZE - 1} are possible"
            )
        self.longest_token_bytes = max((len(token.encode()) for token in vocabulary), default=1)
        unknown = frozenset(range(self.size)).difference(vocabulary.values())
        self.special_tokens = {
            token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._not_plain_text = _SilentIds(unknown.union(self.special_tokens.values()), self.size)
        self._never_text = _SilentIds(unknown, self.size)
        self._silent: dict[frozenset[str], _SilentIds] = {frozenset(): self._not_plain_text}
        self._decodes_bytes = isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel)
        # The texts of tokens, by the ids without text. Only for a decoder of bytes.
        self._whole: dict[_SilentIds, WholeTexts] = {}

    @classmethod
    def open(cls, directory: ModelDirectory, executor: FairExecutor) -> Self:
        """The tokenizer of a model; `executor` runs long work.

        As in transformers, add_bos_token and add_eos_token of tokenizer_config.json have no effect: tokenizer.json
        defines the tokens around a text.

        Raises:
            ConfigurationError: the model has no tokenizer, a damaged one, or a malformed token in its configuration.
        """
        content = directory.tokenizer_json()
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise ConfigurationError(f"{directory.path}: tokenizer.json is not a tokenizer: {error}") from error
        if lowers_texts(directory):
            tokenizer.normalizer = _with_lower_case(tokenizer.normalizer)
        return cls(tokenizer, executor, directory.tokenizer_config)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, optionally with the special tokens of the tokenizer's post-processor.

        Raises:
            InvalidArgument: the vocabulary has no tokens for a part of the text, and none for unknown text.
        """
        if len(text) <= _INLINE_LENGTH:
            with _encoding():
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        size = len(text)
        return await self._executor.run(current_tenant(), size, self._encode_long, text, add_special_tokens)

    def encode_now(self, text: str) -> list[int]:
        """Token ids of a short text, without special tokens around it. Raises as `encode`."""
        with _encoding():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    async def encode_pair(self, text: str, second: str) -> list[int]:
        """Token ids of two texts with the special tokens around them and between them. Raises as `encode`."""
        size = len(text) + len(second)
        if size <= _INLINE_LENGTH:
            with _encoding():
                return self._tokenizer.encode(text, second).ids
        return await self._executor.run(current_tenant(), size, self._encode_long_pair, text, second)

    async def beginning(self, text: str, max_tokens: int) -> str:
        """`text` up to the end of its token `max_tokens`, counted without special tokens. Raises as `encode`."""

        def cut() -> str:
            with _encoding():
                offsets = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].offsets
            return text if len(offsets) <= max_tokens else text[: offsets[max_tokens - 1][1]]

        if len(text) <= _INLINE_LENGTH:
            return cut()
        return await self._executor.run(current_tenant(), len(text), cut)

    def decode(self, token_ids: Sequence[int], *, include_special_tokens: bool) -> str:
        """Text of a few token ids; unknown ids have no text."""
        text = _decoded(self._tokenizer.decode, list(token_ids), not include_special_tokens)
        return cleaned_up(text) if self._cleans_up else text

    async def decode_any(self, token_ids: Sequence[int], *, include_special_tokens: bool) -> str:
        """Like `decode`, for any number of ids."""
        if len(token_ids) <= _INLINE_LENGTH:
            return self.decode(token_ids, include_special_tokens=include_special_tokens)
        size = _BYTES_PER_TOKEN * len(token_ids)
        return await self._executor.run(current_tenant(), size, self._decode_long, token_ids, include_special_tokens)

    async def spell(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them; an empty string for an unknown id."""

        def spell_all() -> list[str]:
            return [self.spelling(token_id) for token_id in token_ids]

        if len(token_ids) <= _INLINE_LENGTH:
            return spell_all()
        return await self._executor.run(current_tenant(), _BYTES_PER_TOKEN * len(token_ids), spell_all)

    @cached_property
    def token_texts(self) -> "TokenTexts":
        """Texts and bytes of single tokens."""
        return TokenTexts(self)

    def spelling(self, token_id: int) -> str:
        """One token as the vocabulary spells it; an empty string for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def id_of(self, spelling: str) -> int | None:
        """The id of a token by its spelling; None if the vocabulary has no such token."""
        return self._tokenizer.token_to_id(spelling)

    def detokenizer(
        self, *, include_special_tokens: bool, shown: frozenset[str] = frozenset(), prompt: TokenIds = ()
    ) -> TextPieces:
        """A new detokenizer for one sequence. The special tokens in `shown` always have text.

        Its pieces continue the `prompt_text` of `prompt`: both together are the text of all tokens. As in vLLM, the
        space before the first token of an answer is kept, and a character that the prompt begins is completed.
        """
        silent = self._never_text if include_special_tokens else self._silent_without(shown)
        context, incomplete = self._end_of(prompt, silent)
        whole = self._whole.setdefault(silent, WholeTexts(self._decode_all, silent)) if self._decodes_bytes else None
        detokenizer = Detokenizer(self._decode_all, self.token_texts.num_incomplete, silent, context, whole)
        for token_id in incomplete:
            detokenizer.push(token_id)
        return CleanedUp(detokenizer) if self._cleans_up else detokenizer

    async def prompt_text(self, token_ids: Sequence[int], *, include_special_tokens: bool) -> str:
        """The text of a prompt before an answer. If the prompt ends within a character, the answer's text has it."""
        text = await self.decode_any(token_ids, include_special_tokens=include_special_tokens)
        if not text.endswith(_REPLACEMENT):
            return text
        silent = self._never_text if include_special_tokens else self._not_plain_text
        context, incomplete = self._end_of(token_ids, silent)
        if not incomplete:
            return text
        first = max(len(token_ids) - _PROMPT_END, 0)
        with_text = [place for place in range(first, len(token_ids)) if token_ids[place] not in silent]
        start = with_text[-len(incomplete)]
        text = await self.decode_any(token_ids[:start], include_special_tokens=include_special_tokens)
        pieces = Detokenizer(self._decode_all, self.token_texts.num_incomplete, silent, context)
        return text + "".join(map(pieces.push, incomplete))

    def _end_of(self, prompt: TokenIds, silent: "_SilentIds") -> tuple[Sequence[int], Sequence[int]]:
        """The last tokens of a prompt that have text: a few up to a whole character, and the tokens after it."""
        ids = (int(token_id) for token_id in islice(reversed(prompt), _PROMPT_END))
        last = list(islice((each for each in ids if each not in silent), _MAX_CONTEXT + _MAX_INCOMPLETE))[::-1]
        if _REPLACEMENT not in self._decode_all(last[-_MIN_CONTEXT:]):
            return last[-_MIN_CONTEXT:], ()
        end = len(last)
        # A token may complete a character and begin the next one.
        while num_incomplete := self.token_texts.num_incomplete(last[:end]):
            end -= num_incomplete
        contexts = [last[max(end - size, 0) : end] for size in range(_MIN_CONTEXT, _MAX_CONTEXT + 1)]
        whole = (each for each in contexts if _REPLACEMENT not in self._decode_all(each))
        return next(whole, contexts[0]), last[end:]

    def _silent_without(self, shown: frozenset[str]) -> "_SilentIds":
        """The ids without text if the special tokens `shown` have text; there is one such set per format."""
        silent = self._silent.get(shown)
        if silent is None:
            ids = {self._tokenizer.token_to_id(token) for token in shown}
            silent = self._silent[shown] = self._not_plain_text.without(ids)
        return silent

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        return _decoded(self._tokenizer.decode, token_ids, False)

    # The batch calls release the interpreter lock, and `encode_batch_fast` keeps no offsets.

    def _decode_long(self, token_ids: Sequence[int], include_special_tokens: bool) -> str:
        (text,) = _decoded(self._tokenizer.decode_batch, [list(token_ids)], not include_special_tokens)
        return cleaned_up(text) if self._cleans_up else text

    def _encode_long_pair(self, text: str, second: str) -> list[int]:
        with _encoding():
            return self._tokenizer.encode_batch_fast([(text, second)])[0].ids

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        with _encoding():
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


@contextmanager
def _encoding() -> Iterator[None]:
    """Converts the errors of the library while it encodes a text."""
    try:
        yield
    except Exception as error:  # the library raises bare Exception
        raise InvalidArgument(f"the model's tokenizer cannot encode this text: {error}") from error


def _decoded(decode: Callable[..., _Text], token_ids: Sequence[Any], skip_special_tokens: bool) -> _Text:
    """Decodes tokens by the library. Raises RuntimeError if it panics: its own error is no Exception, and would end all
    requests of a step where it should end one."""
    try:
        return decode(token_ids, skip_special_tokens=skip_special_tokens)
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RuntimeError(f"the model's tokenizer cannot decode these tokens: {error}") from error
        raise


class TokenTexts:
    """Texts and bytes of the vocabulary's tokens. Ids that the tokenizer does not know have neither."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        anchor = tokenizer.id_of(_ANCHOR)
        self._anchor = [] if anchor is None else [anchor]
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def text_of(self, token_id: int) -> str:
        """The token's text, with replacement characters for parts of characters."""
        return self.bytes_of(token_id).decode(errors="replace")

    def key_of(self, token_id: int) -> str:
        """As `text_of`, but parts of characters are written as bytes, so that different tokens differ."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def num_incomplete(self, token_ids: Sequence[int]) -> int:
        """The number of tokens at the end that hold the beginning of a character and not its end."""
        data, lengths = b"", [0]
        for token_id in reversed(token_ids):
            data = self.bytes_of(token_id) + data
            lengths.append(len(data))
            if len(data) >= _MAX_INCOMPLETE:
                break
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(data)
        num_bytes = len(decoder.getstate()[0])
        return next(count for count, length in enumerate(lengths) if length >= num_bytes)

    def _find_bytes(self, token_id: int) -> bytes:
        text = self._decode_after_anchor(token_id)
        spelling = self._tokenizer.spelling(token_id)
        if _REPLACEMENT not in text or not spelling:
            return text.encode()
        if match := _BYTE_TOKEN.fullmatch(spelling):
            return bytes.fromhex(match[1])
        byte_of = byte_level_alphabet()
        if all(character in byte_of for character in spelling):
            return bytes(byte_of[character] for character in spelling)
        return text.encode()

    def _decode_after_anchor(self, token_id: int) -> str:
        before = self._tokenizer.decode(self._anchor, include_special_tokens=True)
        text = self._tokenizer.decode([*self._anchor, token_id], include_special_tokens=True)
        if text.startswith(before):
            return text[len(before) :]
        return self._tokenizer.decode([token_id], include_special_tokens=True)


class _SilentIds:
    """Ids without text: the listed ids, and all ids beyond the vocabulary."""

    __slots__ = ("_end", "_ids")

    def __init__(self, ids: frozenset[int], end: int) -> None:
        self._ids = ids
        self._end = end

    def without(self, ids: Collection[int | None]) -> "_SilentIds":
        return _SilentIds(self._ids.difference(ids), self._end)

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._ids or (isinstance(token_id, int) and token_id >= self._end)

    def isdisjoint(self, token_ids: Collection[int]) -> bool:
        """Whether all of these ids have text."""
        return self._ids.isdisjoint(token_ids) and max(token_ids, default=-1) < self._end


# Tokens of tokenizer_config.json. Only this file may mark a token as special, and it may have tokens that
# tokenizer.json lacks.


def _with_lower_case(normalizer: tokenizers.normalizers.Normalizer | None) -> tokenizers.normalizers.Normalizer:
    """The normalizer after one that changes texts to lower case, unless it has that itself."""
    is_sequence = isinstance(normalizer, tokenizers.normalizers.Sequence)
    parts = list(cast(Iterable[Any], normalizer)) if is_sequence else [] if normalizer is None else [normalizer]
    has_it = any(isinstance(part, tokenizers.normalizers.Lowercase) for part in parts)
    return tokenizers.normalizers.Sequence(parts if has_it else [tokenizers.normalizers.Lowercase(), *parts])


def _add_tokens(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds the tokens of tokenizer_config.json that the tokenizer lacks, in the order in which transformers adds them.

    A token of the vocabulary keeps its id; a new one gets the next id. Raises ConfigurationError for a malformed token.
    """
    present = tokenizer.get_added_tokens_decoder()
    named, unnamed = list(named_tokens(config).values()), list(_unnamed_tokens(config))
    listed = [*_tokens_by_id(config), *_tokens_of_older_file(config, present, named + unnamed)]
    written = {repr(token) for token in present.values()}
    added = [token for token in listed if repr(token) not in written]
    known = {token.content for token in (*present.values(), *added)}
    by_content = {token.content: token for token in listed}
    for token in named + unnamed:
        if token.content not in known:
            known.add(token.content)
            added.append(by_content.get(token.content, token))
    names = {token.content for token in named}
    for token in added:
        if token.content in names:
            token.special = True
    tokenizer.add_tokens(added)


def _tokens_by_id(config: Mapping[str, Any]) -> list[tokenizers.AddedToken]:
    """The entries of added_tokens_decoder, in the order of their ids."""
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict) or not all(name.isdecimal() for name in entries):
        raise ConfigurationError(
            "added_tokens_decoder in tokenizer_config.json is not an object with token ids as names"
        )
    return [_token(entries[token_id], f"added_tokens_decoder[{token_id}]") for token_id in sorted(entries, key=int)]


def _tokens_of_older_file(
    config: Mapping[str, Any],
    present: Mapping[int, tokenizers.AddedToken],
    special_tokens: Sequence[tokenizers.AddedToken],
) -> list[tokenizers.AddedToken]:
    """The entries of added_tokens.json whose ids tokenizer.json does not list, in the order of their ids."""
    ids = {text: token_id for text, token_id in config.get("added_tokens", {}).items() if token_id not in present}
    special = {token.content for token in special_tokens}
    return [
        tokenizers.AddedToken(text, special=text in special, normalized=text not in special)
        for text in sorted(ids, key=lambda text: ids[text])
    ]


def named_tokens(config: Mapping[str, Any]) -> dict[str, tokenizers.AddedToken]:
    """Special tokens by their names: bos_token and the like, and further ones that this model names. Raises
    ConfigurationError for a malformed token."""
    own = {
        name: value
        for name, value in config.items()
        if name.endswith("_token")
        and name not in _NAMES
        and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
    }
    for section in (*_FURTHER, _NAMED_FURTHER):
        if isinstance(further := config.get(section), dict):
            own |= further
    named = {name: config.get(name) for name in _NAMES} | own
    return {name: _token(value, name, special=True) for name, value in named.items() if value is not None}


def _unnamed_tokens(config: Mapping[str, Any]) -> Iterator[tokenizers.AddedToken]:
    for section in _FURTHER:
        if isinstance(values := config.get(section), list) and values:
            yield from (_token(value, f"{section}[{place}]", special=True) for place, value in enumerate(values))
            return


def _token(entry: Any, field: str, *, special: bool = False) -> tokenizers.AddedToken:
    """A token written as its text, or as an object with `content` and matching flags."""
    fields = {"content": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str):
        raise ConfigurationError(f"{field} in tokenizer_config.json is {entry!r:.80}, not a token")
    flags = {name: bool(fields[name]) for name in _FLAGS if name in fields}
    return tokenizers.AddedToken(fields["content"], **({"special": special} | flags))
