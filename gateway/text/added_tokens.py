"""Tokens that a model directory names beside its tokenizer.json, added as transformers adds them.

Which tokens are special, and a few that tokenizer.json does not have, may stand in tokenizer_config.json alone, or in
the files that came before it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from quire.settings import ConfigurationError

# The names that every model may give, in the order in which transformers adds them.
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Older and newer names of further special tokens: a list, or an object with a name for each.
_FURTHER = ("extra_special_tokens", "additional_special_tokens")
_NAMED_FURTHER = "model_specific_special_tokens"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def add_tokens(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds what tokenizer_config.json (`ModelDirectory.tokenizer_config`) has and the tokenizer does not.

    A token that the vocabulary has keeps its id; a new one gets the next id.

    Raises:
        ConfigurationError: an entry is no token.
    """
    listed = [*_listed(config), *_listed_before(config, tokenizer)]
    present = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    added = [token for token in listed if repr(token) not in present]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known |= {token.content for token in added}
    by_content = {token.content: token for token in listed}
    named = list(_named(config))
    for token in named + list(_unnamed(config)):
        if token.content not in known:
            known.add(token.content)
            added.append(by_content.get(token.content, token))
    names = {token.content for token in named}
    tokenizer.add_tokens([_as_special(token) if token.content in names else token for token in added])


def _listed(config: Mapping[str, Any]) -> list[tokenizers.AddedToken]:
    """The tokens that are listed by their ids, in the order of those."""
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict) or not all(name.isdecimal() for name in entries):
        raise ConfigurationError(
            "added_tokens_decoder in tokenizer_config.json is not an object with token ids as names"
        )
    return [_token(entries[token_id], f"added_tokens_decoder[{token_id}]") for token_id in sorted(entries, key=int)]


def _listed_before(config: Mapping[str, Any], tokenizer: tokenizers.Tokenizer) -> list[tokenizers.AddedToken]:
    """The tokens of an added_tokens.json that tokenizer.json lists none for, in the order of their ids."""
    present = tokenizer.get_added_tokens_decoder()
    ids = {text: token_id for text, token_id in config.get("added_tokens", {}).items() if token_id not in present}
    special = {token.content for token in (*_named(config), *_unnamed(config))}
    return [
        tokenizers.AddedToken(text, special=text in special, normalized=text not in special)
        for text in sorted(ids, key=lambda text: ids[text])
    ]


def _named(config: Mapping[str, Any]) -> Iterator[tokenizers.AddedToken]:
    """Special tokens that have a name, such as bos_token, or a name that only this model knows."""
    own = {name: value for name, value in config.items() if name.endswith("_token") and name not in _NAMES}
    own = {name: value for name, value in own.items() if isinstance(value, str) or _is_object(value)}
    for section in (*_FURTHER, _NAMED_FURTHER):
        if isinstance(further := config.get(section), dict):
            own |= further
    for name, value in ({name: config.get(name) for name in _NAMES} | own).items():
        if value is not None:
            yield _token(value, name, special=True)


def _unnamed(config: Mapping[str, Any]) -> Iterator[tokenizers.AddedToken]:
    for section in _FURTHER:
        if isinstance(values := config.get(section), list) and values:
            yield from (_token(value, f"{section}[{place}]", special=True) for place, value in enumerate(values))
            return


def _token(entry: Any, field: str, *, special: bool = False) -> tokenizers.AddedToken:
    """A token that is written as its text, or as an object with `content` and how it is matched."""
    fields = {"content": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str):
        raise ConfigurationError(f"{field} in tokenizer_config.json is {entry!r:.80}, not a token")
    flags = {name: bool(fields[name]) for name in _FLAGS if name in fields}
    return tokenizers.AddedToken(fields["content"], **({"special": special} | flags))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and "content" in value


def _as_special(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    token.special = True
    return token
