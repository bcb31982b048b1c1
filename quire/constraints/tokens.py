"""The tokens that a text may consist of: the bytes of each token of a vocabulary, and the kinds of added tokens.

Gateway and worker derive both from tokenizer.json and tokenizer_config.json here. Added tokens are of two kinds:

- A special token is no part of a text, because an answer does not show it. A grammar names it by its id. A text that
  reads like one, in a choice or within a JSON string, consists of other tokens. Tokens that end a text are always
  special, even if the files disagree.
- Any other added token is text, such as `<tool_call>` and `<think>` of Qwen, or `<b>` and line breaks of Gemma. In a
  text, this token and all other tokens with the same bytes are allowed. So a mark of a tool call may be its own token
  or be spelled; forced text, which only one sequence of bytes can continue, has the tokens that the tokenizer makes.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Self

import tokenizers
from tokenizers import normalizers, pre_tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"
_MAX_TOKENS = 1 << 22
"""Several times the vocabulary of any model. It bounds the memory that a damaged file makes us take."""
_SPELLED_AT_ONCE = 1024
"""Characters of a forced text that are spelled before the first of their tokens is there, which takes 0.3 ms."""
_KEPT_SPELLINGS = 1024
_LAST_OF_UTF_8 = 0xF4


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The tokens of a vocabulary.

    Attributes:
        token_bytes: The bytes of each token; for a special token the bytes of its text, for an id without a token none.
        special_tokens: The ids of the special tokens by their texts.
        text_tokens: The ids of the other added tokens.
    """

    token_bytes: Sequence[bytes]
    special_tokens: Mapping[str, int]
    text_tokens: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> Self:
        """`tokenizer` and `config` are the contents of tokenizer.json and tokenizer_config.json.

        Raises:
            ValueError: the bytes of tokens cannot be derived, because the decoder is of another kind.
        """
        vocab: Any = tokenizer["model"]["vocab"]
        ids = vocab if isinstance(vocab, Mapping) else {piece: number for number, (piece, _) in enumerate(vocab)}
        added = _added_tokens(tokenizer, config, ids)
        size = max(*ids.values(), *(each["id"] for each in added), -1) + 1
        if size > _MAX_TOKENS:
            raise ValueError(f"it has the token id {size - 1}; at most {_MAX_TOKENS - 1} are possible")
        texts = [""] * size
        for text, token_id in ids.items():
            texts[token_id] = text
        for each in added:
            texts[each["id"]] = each["content"]
        token_bytes = _bytes_of(texts, list(_decoders(tokenizer.get("decoder"))))
        special = {each["content"]: each["id"] for each in added if each["special"]}
        for text, token_id in special.items():
            token_bytes[token_id] = text.encode()
        others = {each["content"]: each["id"] for each in added if not each["special"]}
        return cls(token_bytes, special, others)


def _added_tokens(
    tokenizer: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The added tokens of tokenizer.json, with the further tokens and special flags of tokenizer_config.json. As in
    transformers, a token keeps the id that its text has in tokenizer.json, a new one gets the next id, and only a token
    that the configuration adds or changes becomes special because it has a name."""
    present = {each["content"]: each for each in tokenizer.get("added_tokens", ())}
    named, unnamed = _named_tokens(config), _unnamed_tokens(config)
    changed = {
        each["content"]: each
        for each in _listed_tokens(config, present, {**unnamed, **named})
        if _flags(each) != _flags(present.get(each["content"], {}))
    }
    for text, entry in (*named.items(), *unnamed.items()):
        if text not in present:
            changed.setdefault(text, {"special": True} | entry)
    added = {text: {"id": each["id"], "content": text, "special": each["special"]} for text, each in present.items()}
    end = max(*ids.values(), *(each["id"] for each in added.values()), -1) + 1
    for text, entry in changed.items():
        token_id = added[text]["id"] if text in added else ids.get(text, end)
        end = max(end, token_id + 1)
        added[text] = {"id": token_id, "content": text, "special": bool(entry.get("special")) or text in named}
    return list(added.values())


def _listed_tokens(
    config: Mapping[str, Any], present: Mapping[str, Mapping[str, Any]], special: Collection[str]
) -> Iterator[Mapping[str, Any]]:
    """The tokens that the configuration lists with ids, and tokens of the older added_tokens.json, by their ids."""
    decoder = config.get("added_tokens_decoder") or {}
    yield from (decoder[name] for name in sorted(decoder, key=int))
    known = {each["id"] for each in present.values()}
    older = {text: token_id for text, token_id in config.get("added_tokens", {}).items() if token_id not in known}
    for text in sorted(older, key=lambda text: older[text]):
        yield {"content": text, "special": text in special}


def _flags(token: Mapping[str, Any]) -> tuple[bool, ...]:
    special = bool(token.get("special"))
    matching = (bool(token.get(name)) for name in ("lstrip", "rstrip", "single_word"))
    return "content" in token, special, bool(token.get("normalized", not special)), *matching


_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FURTHER = ("extra_special_tokens", "additional_special_tokens")


def _named_tokens(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Special tokens with names, by their texts, in the order in which transformers adds them."""
    own = [config[name] for name in config if name.endswith("_token") and name not in _NAMES]
    values = [*(config.get(name) for name in _NAMES), *own]
    for section in (*_FURTHER, "model_specific_special_tokens"):
        if isinstance(further := config.get(section), dict):
            values += further.values()
    return _by_text(values)


def _unnamed_tokens(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return _by_text(next((values for each in _FURTHER if isinstance(values := config.get(each), list) and values), []))


def _by_text(values: Iterable[Any]) -> dict[str, dict[str, Any]]:
    entries = [{"content": value} if isinstance(value, str) else value for value in values]
    return {each["content"]: each for each in entries if isinstance(each, dict) and "content" in each}


def _decoders(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is not None and decoder["type"] == "Sequence":
        for each in decoder["decoders"]:
            yield from _decoders(each)
    elif decoder is not None:
        yield decoder


def _bytes_of(texts: Sequence[str], decoders: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """The bytes that the decoders make of each token, as it stands within a text."""
    kinds = {each["type"] for each in decoders}
    if "ByteLevel" in kinds:
        alphabet = byte_level_alphabet()
        # Other characters stand for no bytes: the decoder then takes the token's text unchanged.
        table = dict.fromkeys(range(256), "\uffff") | {ord(each): byte for each, byte in alphabet.items()}
        found = ((text, text.translate(table).encode("latin-1", "ignore")) for text in texts)
        return [data if len(data) == len(text) else text.encode() for text, data in found]
    if not kinds & {"ByteFallback", "Metaspace"}:
        raise ValueError(
            f"its decoder is {' and '.join(sorted(kinds)) or 'absent'}; byte-level BPE, byte fallback and "
            "SentencePiece can be read"
        )
    for each in decoders:
        old, new = None, " "
        if each["type"] == "Metaspace":
            old = each.get("replacement", _SPACE)
        elif each["type"] == "Replace":
            old, new = each["pattern"].get("String"), each["content"]
        if old:
            texts = [text.replace(old, new) for text in texts]
    encoded = [text.encode() for text in texts]
    # Without ByteFallback, as in files made of a T5Tokenizer's vocabulary, a text has such a token as it is spelled.
    for token_id, text in enumerate(texts if "ByteFallback" in kinds else ()):
        if len(text) == 6 and (match := _BYTE_TOKEN.fullmatch(text)):
            encoded[token_id] = bytes.fromhex(match[1])
    return encoded


@cache
def byte_level_alphabet() -> Mapping[str, int]:
    """The characters of bytes in byte-level vocabularies: printable bytes as themselves, others from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


Encode = Callable[[str], Sequence[int]]


def tokenizer_encode(content: bytes) -> Encode:
    """Encodes, with the tokenizer of a tokenizer.json, a text that follows another one: without special tokens, and
    without a space before it."""
    tokenizer = tokenizers.Tokenizer.from_buffer(content)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    found: list[Any] = [] if tokenizer.normalizer is None else list(_components(tokenizer.normalizer))
    kept = [each for each in found if not isinstance(each, normalizers.Prepend)]
    if len(kept) < len(found):
        tokenizer.normalizer = normalizers.Sequence(kept)
    for each in () if tokenizer.pre_tokenizer is None else _components(tokenizer.pre_tokenizer):
        if isinstance(each, pre_tokenizers.Metaspace):
            each.prepend_scheme = "never"
        elif isinstance(each, pre_tokenizers.ByteLevel):
            each.add_prefix_space = False
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _components(component: Any) -> Iterator[Any]:
    if isinstance(component, normalizers.Sequence | pre_tokenizers.Sequence):
        for each in component:
            yield from _components(each)
    else:
        yield component


class Speller:
    """Spells forced texts for the engine: in the tokens that the tokenizer makes of a text if they have the same bytes,
    else in the longest tokens. Tokenizers write some characters as others, such as "▁" as a space.

    Attributes:
        has_all_bytes: Whether the vocabulary can write every text, because each byte has a token.
        greedy: Spells a text in the longest tokens; for the engine to set.
    """

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(
        self, tokens: Sequence[bytes], special_token_ids: Sequence[int], eos: Sequence[int], encode: Encode | None
    ) -> None:
        """Sets the attributes that the engine expects of a tokenizer (llguidance's `TokenizerWrapper`). Without
        `encode` all texts are spelled in the longest tokens."""
        self.tokens, self.special_token_ids = tokens, special_token_ids
        # Without an eos token, the engine adds a token of its own, which no model chooses.
        self.eos_token_id = eos[0] if eos else None
        self._special = frozenset(special_token_ids)
        self._encode = encode
        self._spelled = lru_cache(_KEPT_SPELLINGS)(self._spell)
        self.greedy: Encode | None = None
        single = {each[0] for each in tokens if len(each) == 1}
        self.has_all_bytes = single.issuperset(range(_LAST_OF_UTF_8 + 1))

    def __call__(self, text: str) -> list[int]:
        """The tokens of the beginning of a text; none if no tokens have its bytes."""
        return self._spelled(text[:_SPELLED_AT_ONCE])

    def _spell(self, text: str) -> list[int]:
        data = text.encode()
        for encode in (self._encode, self.greedy):
            # The library raises bare Exception, for example where a text has a character without a token.
            with suppress(Exception):
                made = [] if encode is None else list(encode(text))
                if self._special.isdisjoint(made) and b"".join(map(self.tokens.__getitem__, made)) == data:
                    return made
        return []
