"""Converts a `Constraint` to a program: a small state machine of free text and of parts with a grammar.

A free state ends when one of its markers is complete; a part ends when its grammar is complete. So free text needs no
grammar, and grammars are independent of the text around them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import filterfalse, pairwise
from types import MappingProxyType
from typing import Any

from quire.common.v1.common_pb2 import Constraint
from quire.constraints.json_schema import (
    BY_NAME,
    ConstraintError,
    check_regex,
    enforced_schema,
    errors_of,
    schema_grammar,
)

MAX_CONSTRAINT_BYTES = 1 << 20
MAX_TAGS = 256
MAX_MARKER_BYTES = 256
MAX_CHOICES = 100_000

# Lark has a colon between the name of a rule and its definition.
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_SCHEMA_OF_LARK = re.compile(r"%json\s*(?=\{)")
_REGEX_OF_LARK = re.compile(r"/(?:[^/\\\n]|\\.)+/")
# Parts of a Lark grammar that may have or hide the name of a token: strings, comments, regexes, and the names.
_NAME_IN_LARK = re.compile(r'"(?:\\.|[^"\\])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|(?P<name><[^<>\s]+>)', re.DOTALL)
_NO_TOKENS: Mapping[str, int] = MappingProxyType({})
# Models put white space before a JSON text that follows other text.
_LEADING_SPACE = "/[ \\t\\n]{1,4}/"


# By whether at most one tag, and at least one, is allowed.
_REPETITIONS = {(True, True): "", (True, False): "?", (False, True): "+", (False, False): "*"}


@dataclass(frozen=True, slots=True)
class Part:
    """Text that matches a grammar, which is a list of llguidance's grammars as JSON. `then` is the next state; None if
    the text ends."""

    field: str
    grammar: str
    then: int | None


@dataclass(frozen=True, slots=True)
class Free:
    """Any text, up to the first occurrence of a marker. `may_end`: whether the text may end before it."""

    markers: tuple[tuple[str, int], ...]
    """The markers, each with the state after it; no marker is a prefix of another one."""
    may_end: bool


Program = tuple[Part | Free, ...]
"""The states; the first one is the initial state."""


def program_of(
    constraint: Constraint, special_tokens: Mapping[str, int], text_tokens: Mapping[str, int] = _NO_TOKENS
) -> Program:
    """The program of a constraint.

    Args:
        special_tokens: Ids of the special tokens of the vocabulary, by their text. No other tokens can produce it.
        text_tokens: Ids of the other added tokens, which a `lark` grammar may name, too.

    Raises:
        ConstraintError: a field is missing, malformed or not enforced.
    """
    size = constraint.ByteSize()
    if size > MAX_CONSTRAINT_BYTES:
        raise ConstraintError("", f"has {size:,} bytes; the max is {MAX_CONSTRAINT_BYTES:,}")
    constraint = _with_ids(constraint, text_tokens)
    states: list[Part | Free] = []
    after_text = constraint.HasField("begins_after")
    if after_text:
        _check_marker("begins_after", constraint.begins_after)
        states.append(Free(((constraint.begins_after, 1),), may_end=False))
    kind = constraint.WhichOneof("kind")
    if constraint.no_white_space and kind in ("regex", "choice", "lark"):
        raise ConstraintError("no_white_space", f"is true, and {kind} is not about JSON; leave it out")
    match kind:
        case None:
            raise ConstraintError(
                "", "has no kind; set one of json_schema, json_object, regex, choice, lark, structural_tags"
            )
        case "structural_tags":
            states += _tag_states(constraint, len(states), special_tokens)
        case "json_schema" | "json_object":
            schema = constraint.json_schema if kind == "json_schema" else '{"type": "object"}'
            grammar = _grammar(kind, "json_schema", schema, no_white_space=constraint.no_white_space)
            after = {"lark_grammar": f"start: {_LEADING_SPACE}? @body"}
            states.append(Part(kind, _dumps(after, body=grammar) if after_text else _dumps(grammar), None))
        case "choice":
            states.append(Part(kind, _dumps(_choice(constraint.choice.texts)), None))
        case _:
            states.append(Part(kind, _dumps(_grammar(kind, kind, getattr(constraint, kind))), None))
    return tuple(states)


def _with_ids(constraint: Constraint, text_tokens: Mapping[str, int]) -> Constraint:
    """The constraint with ids in place of names of tokens in Lark: the engine only knows names of special tokens."""

    def with_id(found: re.Match[str]) -> str:
        token_id = text_tokens.get(found["name"] or "")
        return found.group() if token_id is None else f"<[{token_id}]>"

    named = Constraint()
    named.CopyFrom(constraint)
    for each in (named, *named.structural_tags.tags):
        if each.HasField("lark") and _GBNF_RULE.search(each.lark) is None:
            each.lark = _NAME_IN_LARK.sub(with_id, each.lark)
    return named


def fixed_texts(constraint: Constraint) -> Iterator[tuple[str, str]]:
    """The fixed texts of a valid constraint, each with its field; only non-ASCII text of patterns and grammars."""
    for position, text in enumerate(constraint.choice.texts):
        yield f"choice.texts[{position}]", text
    tags = ((f"structural_tags.tags[{place}].", tag) for place, tag in enumerate(constraint.structural_tags.tags))
    for field, each in (("", constraint), *tags):
        if each.HasField("json_schema"):
            yield from ((f"{field}json_schema", text) for text in _texts_of_schema(json.loads(each.json_schema)))
        for kind in ("regex", "lark"):
            if each.HasField(kind):
                yield f"{field}{kind}", "".join(filterfalse(str.isascii, getattr(each, kind)))


def _texts_of_schema(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for each in schema:
            yield from _texts_of_schema(each)
    for name, value in schema.items() if isinstance(schema, dict) else ():
        if name in ("const", "enum"):
            yield json.dumps(value, ensure_ascii=False)
        elif name == "properties":
            yield from map(quoted, value)
        yield from _texts_of_schema(list(value.values()) if name in BY_NAME else value)


def _choice(texts: Any) -> dict[str, Any]:
    if not texts:
        raise ConstraintError("choice.texts", "is empty; at least 1 text is needed")
    if len(texts) > MAX_CHOICES:
        raise ConstraintError("choice.texts", f"has {len(texts):,} entries; the max is {MAX_CHOICES:,}")
    for position, text in enumerate(texts):
        if not text:
            raise ConstraintError(f"choice.texts[{position}]", "is empty; it needs at least 1 character")
    # One terminal, because each alternative of a rule would cost the parser an item.
    alternatives = " | ".join(quoted(text) for text in dict.fromkeys(texts))
    return {"lark_grammar": f"start: TEXT\nTEXT: {alternatives}"}


def _grammar(field: str, kind: str, text: str, *, no_white_space: bool = False) -> dict[str, Any]:
    """One grammar of llguidance's list of grammars."""
    if not text.strip() and kind == "lark":
        raise ConstraintError(field, "is empty; it needs at least a rule `start`")
    if not text and kind == "regex":
        raise ConstraintError(field, "is empty; it needs at least 1 character")
    with errors_of(field):
        if kind == "json_schema":
            return schema_grammar(text, no_white_space=no_white_space)
        if kind == "regex":
            check_regex(text)
            from llguidance import LLMatcher

            return json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]
        for found in _REGEX_OF_LARK.finditer(text):
            check_regex(found.group()[1:-1], f" in the terminal {found.group():.20}...")
        if _GBNF_RULE.search(text) is None:
            return {"lark_grammar": _with_enforced_schemas(field, text, no_white_space=no_white_space)}
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            return {"lark_grammar": gbnf_to_lark(text)}
        except Exception as error:
            # The converter raises errors of several types without a common base.
            raise ValueError(f"is not a grammar in GBNF: {error}") from error


def _with_enforced_schemas(field: str, lark: str, *, no_white_space: bool) -> str:
    """A grammar whose JSON schemas are enforced, except schemas with `x-guidance`, which have been before."""
    parts: list[str] = []
    place = 0
    for found in _SCHEMA_OF_LARK.finditer(lark):
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            continue  # The engine reports it.
        if found.start() >= place and "x-guidance" not in schema:
            read = enforced_schema(field, lark[found.end() : end], no_white_space=no_white_space)
            parts += lark[place : found.end()], json.dumps(read, ensure_ascii=False)
            place = end
    return "".join(parts) + lark[place:]


def _dumps(grammar: dict[str, Any], **named: dict[str, Any]) -> str:
    """A grammar together with the grammars that it refers to by name."""
    grammars = [grammar, *(each | {"name": name} for name, each in named.items())]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def quoted(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _tag_states(constraint: Constraint, offset: int, special_tokens: Mapping[str, int]) -> list[Part | Free]:
    field, tags = "structural_tags.tags", constraint.structural_tags
    if not tags.tags:
        raise ConstraintError(field, "is empty; at least 1 tag is needed")
    if len(tags.tags) > MAX_TAGS:
        raise ConstraintError(field, f"has {len(tags.tags):,} entries; the max is {MAX_TAGS:,}")
    by_begin: dict[str, list[int]] = {}
    for position, tag in enumerate(tags.tags):
        _check_marker(f"{field}[{position}].begin", tag.begin)
        if tag.WhichOneof("content") is None:
            raise ConstraintError(f"{field}[{position}]", "has no content; set one of json_schema, regex, lark")
        by_begin.setdefault(tag.begin, []).append(position)
    if not tags.no_free_text:
        _check_apart(by_begin)
    contents: list[dict[str, Any]] = []
    for position, tag in enumerate(tags.tags):
        kind: Any = tag.WhichOneof("content")
        where, text = f"{field}[{position}].{kind}", getattr(tag, kind)
        contents.append(_grammar(where, kind, text, no_white_space=constraint.no_white_space))
    bodies = [f"@tag_{place} {literals(tag.end, special_tokens)}".rstrip() for place, tag in enumerate(tags.tags)]
    if tags.no_free_text:
        whole = [f"{literals(tag.begin, special_tokens)} {body}" for tag, body in zip(tags.tags, bodies, strict=True)]
        lark = f"start: (tag){_REPETITIONS[tags.single, tags.required]}\ntag: {' | '.join(whole)}"
        named = {f"tag_{place}": content for place, content in enumerate(contents)}
        return [Part("structural_tags", _dumps({"lark_grammar": lark}, **named), None)]
    # The first state is free text, then there is a part for each beginning, then the free text after a tag.
    markers = tuple((begin, offset + 1 + index) for index, begin in enumerate(by_begin))
    then = None if tags.single else offset + 1 + len(by_begin)
    states: list[Part | Free] = [Free(markers, may_end=not tags.required)]
    for positions in by_begin.values():
        lark = f"start: {' | '.join(bodies[place] for place in positions)}"
        named = {f"tag_{place}": contents[place] for place in positions}
        states.append(Part(f"{field}[{positions[0]}]", _dumps({"lark_grammar": lark}, **named), then))
    if then is not None:
        states.append(Free(markers, may_end=True))
    return states


def literals(text: str, special_tokens: Mapping[str, int]) -> str:
    """A text in Lark: special tokens by their ids, all else quoted. Empty for an empty text."""
    found = sorted((token for token in special_tokens if token in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
    items = (f"<[{special_tokens[each]}]>" if each in special_tokens else quoted(each) for each in pieces if each)
    return " ".join(items)


def _check_marker(field: str, text: str) -> None:
    if not text:
        raise ConstraintError(field, "is empty; it needs at least 1 character")
    size = len(text.encode())
    if size > MAX_MARKER_BYTES:
        raise ConstraintError(field, f"has {size:,} bytes; the max is {MAX_MARKER_BYTES:,}")


def _check_apart(by_begin: dict[str, list[int]]) -> None:
    """Raises ConstraintError if one `begin` is a prefix of another one, which then could never be reached."""
    ordered = sorted(by_begin)
    for shorter, longer in pairwise(ordered):
        if longer.startswith(shorter):
            raise ConstraintError(
                f"structural_tags.tags[{by_begin[longer][0]}].begin",
                f"is {longer!r:.80}, which begins with {shorter!r:.80}, the begin of tags[{by_begin[shorter][0]}]; "
                "give both the same begin and put the rest into the content",
            )
