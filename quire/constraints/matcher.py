"""The engine: computes the allowed next tokens, and advances by the chosen token.

The state of a matcher is a function of its tokens: matchers that consumed the same tokens, one by one or at once, in
any process, allow the same next tokens.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import filterfalse
from typing import Any, Self, cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from quire.common.v1.common_pb2 import Constraint
from quire.constraints.json_schema import ConstraintError
from quire.constraints.program import Free, Part, Program, fixed_texts, program_of
from quire.constraints.token_cache import token_table
from quire.constraints.tokens import Encode, Speller, TokenTable, tokenizer_encode
from quire.model_files.model_directory import ModelDirectory

Mask = NDArray[np.int32]
"""One bit per token, the least significant bit first: [words of the vocabulary]."""

# Deterministic limits, so that gateway and worker accept the same constraints. Fuel measures work: 1,000 is 0.02 ms of
# building a lexer, and 0.07 ms of a mask; 1,000 items are 0.05 ms of a mask. If a text can be parsed in many ways, as
# with `s: s s | "a"`, the time of an item grows with the text: 3,000 items take up to 5 ms, 20,000 up to 180. An object
# of 200 optional properties needs under 2,000.
_LIMITS = LLParserLimits(
    max_items_in_row=1_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=120_000,
    step_max_items=3_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# Sets of tokens, whose masks are made once for states in which the whole set may follow: characters of a JSON string,
# by the length of the token. If a set may follow only in part or not at all, the library checks each of its tokens,
# together with its neighbours within a larger set. So there are sets for each short length within a few larger ones.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_LENGTHS = ((1, 1, 2, 3, 4), (5, 5, 6, 7, 8), (9, 9, 10, 11, 12, 13, 14, 16), (17, 20, 24, 32))
"""For each set the length of its shortest tokens, then the maximum lengths of its subsets and of itself."""
_SLICES = [
    *(f"{_CHARACTER}{{{least},{most}}}" for least, *each in _LENGTHS for most in each),
    f"{_CHARACTER}+",
]
_SHOWN_ERROR, _SHOWN_PATTERN = 300, 20
# A pattern of one line, a mark below the faulty place, and the reason.
_REGEX_ERROR = re.compile(r"regex parse error:\n {4}(?P<pattern>.*)\n {4}(?P<before> *)\^.*\nerror: (?P<reason>[^\n]*)")
# The grammar allows one byte, which is shown as a character of Latin-1, and no token begins with it.
_FORCED_BYTE = re.compile(r"forced bytes: got '(?P<byte>.+?)'; applying")
_KEPT_MASKS = 256


class Vocabulary:
    """The vocabulary of a model, as the engine needs it.

    Attributes:
        special_tokens: Ids by text; `text_tokens` are the other added tokens. `quire.constraints.tokens` says which
            tokens a text may be made of.
        num_words: Number of words of a mask.
        eos: The ids that end a text.
        token_bytes: The bytes of each token; for a special token the bytes of its text.
        all_tokens: The mask of all tokens.
        mask_of_set: `mask_of` with a cache: requests use the same few sets.
    """

    def __init__(
        self, table: TokenTable, size: int | None, eos_token_ids: Sequence[int], encode: Encode | None = None
    ) -> None:
        """`size` is the width of the logits; None if it does not matter. `encode` tokenizes forced text as the
        tokenizer does; without it the text is spelled in the longest tokens, which is only right for a check."""
        self.special_tokens, self.text_tokens = table.special_tokens, table.text_tokens
        # A tokenizer may have more tokens than the model has logits, which the model never chooses.
        self.token_bytes = [*table.token_bytes, *[b""] * ((size or 0) - len(table.token_bytes))]
        eos = [token_id for token_id in eos_token_ids if token_id < len(table.token_bytes)]
        special = [*eos, *(each for each in self.special_tokens.values() if each not in eos)]
        self.speller = Speller(self.token_bytes, special, eos, encode)
        self.tokenizer = LLTokenizer(cast(Any, self.speller), eos_token=eos or None, slices=_SLICES)
        self.speller.greedy = self.tokenizer.greedy_tokenize
        self.num_words = -(-self.tokenizer.vocab_size // 32)
        self.eos = frozenset(eos or self.tokenizer.eos_tokens)
        self._order = sorted(range(len(self.token_bytes)), key=self.token_bytes.__getitem__)
        self._sorted_bytes = [self.token_bytes[each] for each in self._order]
        self.mask_of_set = lru_cache(_KEPT_MASKS)(self._mask_of_set)
        self.all_tokens = self.mask_of(range(len(self.token_bytes)))

    @classmethod
    def of_tokenizer(cls, tokenizer: Mapping[str, Any], size: int | None, eos_token_ids: Sequence[int]) -> Self:
        """The vocabulary of the content of a tokenizer.json. Raises ValueError as `of_model`."""
        encode = tokenizer_encode(json.dumps(tokenizer, ensure_ascii=False).encode())
        return cls(TokenTable.of(tokenizer, {}), size, eos_token_ids, encode)

    @classmethod
    def of_model(cls, directory: ModelDirectory, size: int | None, *, for_checks: bool = False) -> Self:
        """The vocabulary of a model directory. `for_checks`: it is for checks only, and is made in half the time.

        Raises:
            ConfigurationError: the directory has no tokenizer.
            ValueError: the bytes of this tokenizer's tokens cannot be derived.
        """
        table = token_table(directory)
        encode = None if for_checks else tokenizer_encode(directory.tokenizer_json())
        return cls(table, size, directory.eos_token_ids, encode)

    def longer_than(self, beginning: bytes) -> Iterator[int]:
        """The tokens that begin with these bytes and are longer."""
        place = bisect_right(self._sorted_bytes, beginning)
        while place < len(self._order) and self._sorted_bytes[place].startswith(beginning):
            yield self._order[place]
            place += 1

    def _mask_of_set(self, token_ids: frozenset[int]) -> Mask:
        return self.mask_of([each for each in token_ids if each < self.num_words * 32])

    def mask_of(self, token_ids: Collection[int]) -> Mask:
        """The mask of these tokens."""
        bits = np.zeros(self.num_words * 32, np.bool_)
        bits[list(token_ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


class _FreeText:
    """A state of free text, compiled for a vocabulary. All texts are bytes."""

    def __init__(self, state: Free, vocabulary: Vocabulary, entered: Callable[[int, bytes], LLMatcher | None]) -> None:
        """`entered` returns a state after the bytes of a token beyond its marker; None if the state refuses them."""
        self.may_end = state.may_end
        self._entered = entered
        self.markers = tuple((text.encode(), then) for text, then in state.markers)
        self._vocabulary = vocabulary
        self.mask = cache(self._mask)
        self._longest = max(len(text) for text, _ in self.markers)
        # Tokens that contain a whole marker before their end.
        self._containing = [
            token_id
            for marker, _ in self.markers
            for token_id, text in enumerate(vocabulary.token_bytes)
            if len(text) > len(marker) and marker in text[:-1]
        ]

    def advance(self, tail: bytes, token: bytes) -> tuple[bytes, int | None]:
        """The tail after a token; or the token's bytes beyond a marker that it completes, and the next state."""
        text = tail + token
        ends = [(place + len(marker), then) for marker, then in self.markers if (place := text.find(marker)) >= 0]
        if ends:
            end, then = min(ends)
            return text[end:], then
        return self._open_end(text), None

    def _open_end(self, text: bytes) -> bytes:
        """The longest suffix of the text that begins a marker."""
        ends = (text[-length:] for length in range(min(len(text), self._longest - 1), 0, -1))
        return next((end for end in ends if any(marker.startswith(end) for marker, _ in self.markers)), b"")

    def _mask(self, tail: bytes) -> Mask:
        """All tokens, except tokens whose bytes beyond a marker are refused by the next state."""
        refused = [token_id for token_id in self._beyond(tail) if not self._is_taken(tail, token_id)]
        return self._vocabulary.all_tokens & ~self._vocabulary.mask_of(refused)

    def _is_taken(self, tail: bytes, token_id: int) -> bool:
        rest, then = self.advance(tail, self._vocabulary.token_bytes[token_id])
        return then is not None and self._entered(then, rest) is not None

    def _beyond(self, tail: bytes) -> list[int]:
        found = list(self._containing)
        for marker, _ in self.markers:
            for length in range(1, min(len(tail), len(marker) - 1) + 1):
                if marker.startswith(tail[-length:]):
                    found += self._vocabulary.longer_than(marker[length:])
        return found


_PartState = tuple[LLMatcher, int | None]
"""A fresh matcher, copied for each use, and the state after it."""


class Template:
    """A program, compiled for a vocabulary. Makes matchers."""

    def __init__(self, program: Program, vocabulary: Vocabulary) -> None:
        """Raises ConstraintError if a grammar is malformed or too large."""
        self.vocabulary = vocabulary
        self.states = tuple(
            _FreeText(state, vocabulary, self.entered) if isinstance(state, Free) else _compiled(state, vocabulary)
            for state in program
        )

    @classmethod
    def of(cls, constraint: Constraint, vocabulary: Vocabulary) -> Self:
        """Compiles a constraint. Raises ConstraintError if it cannot be enforced."""
        program = program_of(constraint, vocabulary.special_tokens, vocabulary.text_tokens)
        if not vocabulary.speller.has_all_bytes:
            for field, text in fixed_texts(constraint):
                for character in filterfalse(vocabulary.speller, text):
                    problem = f"has {character!r}, which no tokens of this model's vocabulary can write"
                    raise ConstraintError(field, problem)
        return cls(program, vocabulary)

    def entered(self, index: int, beginning: bytes) -> LLMatcher | None:
        """The grammar of a part after its first bytes; None if it does not take them, or needs none."""
        state = self.states[index]
        if isinstance(state, _FreeText):
            return None
        matcher = state[0].deep_copy()
        tokens = self.vocabulary.tokenizer.tokenize_bytes(beginning)
        return matcher if matcher.try_consume_tokens(tokens) == len(tokens) else None

    def matcher(self, ending_token_ids: Sequence[int]) -> "Matcher":
        """A new matcher of a text that ends with one of these tokens."""
        return Matcher(self, frozenset(ending_token_ids))


def _compiled(part: Part, vocabulary: Vocabulary) -> _PartState:
    matcher = LLMatcher(vocabulary.tokenizer, part.grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        # The first mask builds most of the lexer, and detects a grammar that matches nothing.
        matcher.compute_bitmask()
        matcher.reset()
    if matcher.is_error():
        raise ConstraintError(part.field, f"cannot be enforced: {_explained(matcher.get_error())}")
    return matcher, part.then


def _explained(error: str) -> str:
    """An error of the library in one line; exceeded limits and empty languages are explained. It shows only the part of
    a regular expression that is at fault."""
    if (found := _REGEX_ERROR.search(error)) is not None:
        pattern, place = found["pattern"], len(found["before"])
        return f'invalid regular expression: {found["reason"]} at "{pattern[place : place + _SHOWN_PATTERN]}"'
    text = " ".join(error.replace("<non-verbose/>", "").split("<state>")[0].split())
    if "NoExtension" in text:
        return "no text of the model's tokens matches it"
    if (forced := _FORCED_BYTE.search(text)) is not None:
        byte = forced["byte"]
        shown = f"'{byte}'" if byte.isascii() else f"the byte 0x{ord(byte):02X}"
        return f"only {shown} may follow, and no token of the model's vocabulary begins with it"
    if "too many" in text.lower():
        return f"it is too large or too ambiguous: {text.split('; try')[0]:.120}"
    return text if len(text) <= _SHOWN_ERROR else text[: _SHOWN_ERROR - 3] + "..."


class Matcher:
    """The state of a program after some tokens.

    Attributes:
        error: The reason why no token is allowed any more; None while some are.
    """

    __slots__ = ("_endings", "_free", "_grammar", "_has_ended", "_tail", "_template", "_then", "error")

    def __init__(self, template: Template, endings: frozenset[int]) -> None:
        self._template = template
        self._endings = endings
        self._has_ended = False
        self.error: str | None = None
        self._enter(0)

    def _enter(self, index: int) -> None:
        state = self._template.states[index]
        self._tail = b""
        self._then: int | None = None
        self._free: _FreeText | None = None
        self._grammar: LLMatcher | None = None
        if isinstance(state, _FreeText):
            self._free = state
        else:
            matcher, self._then = state
            self._grammar = matcher.deep_copy()
            self._leave_complete_part()

    def copy(self) -> Self:
        """An independent matcher in the same state."""
        other = object.__new__(type(self))
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        if self._grammar is not None:
            other._grammar = self._grammar.deep_copy()
        return other

    def consume(self, token_id: int) -> None:
        """Advances by one token. A token that the mask excludes sets `error`."""
        if self.error is not None or self._has_ended:
            return
        if token_id in self._endings and self.may_end:
            self._has_ended = True
        elif (grammar := self._grammar) is not None:
            self._consume_in_part(grammar, token_id)
        else:
            self._consume_in_free_text(token_id)

    def _consume_in_part(self, grammar: LLMatcher, token_id: int) -> None:
        if self._then is None:
            if not grammar.consume_token(token_id):
                self._fail(token_id)
        elif grammar.try_consume_tokens([token_id]):
            self._leave_complete_part()
        elif not grammar.is_error() and grammar.is_accepting():
            self._enter(self._then)
            self.consume(token_id)
        else:
            self._fail(token_id)

    def _leave_complete_part(self) -> None:
        grammar = self._grammar
        if self._then is not None and grammar is not None and grammar.is_stopped() and not grammar.is_error():
            self._enter(self._then)

    def _consume_in_free_text(self, token_id: int) -> None:
        assert self._free is not None
        texts = self._template.vocabulary.token_bytes
        text = texts[token_id] if token_id < len(texts) else b""
        rest, then = self._free.advance(self._tail, text)
        if then is None:
            self._tail = rest
            return
        self._enter(then)
        if rest:
            self._grammar = self._template.entered(then, rest)
            if self._grammar is None:
                self._fail(token_id)
            self._leave_complete_part()

    def _fail(self, token_id: int) -> None:
        grammar = self._grammar
        reason = _explained(grammar.get_error()) if grammar is not None and grammar.is_error() else ""
        self.error = f"token {token_id} cannot follow the tokens before it" + (f": {reason}" if reason else "")

    @property
    def may_end(self) -> bool:
        """Whether the text so far is complete."""
        if self._has_ended:
            return True
        if self._free is not None:
            return self._free.may_end
        grammar = self._grammar
        if grammar is None or not grammar.is_accepting():
            return False
        if self._then is None:
            return True
        after = self._template.states[self._then]
        return isinstance(after, _FreeText) and after.may_end

    @property
    def needs_grammar(self) -> LLMatcher | None:
        """The grammar whose mask `finish` completes; None if the mask needs no grammar."""
        return None if self._has_ended or self.error is not None else self._grammar

    def forced(self) -> list[int]:
        """The text that must follow, in the tokens that the tokenizer makes of it; empty if there is a choice. The
        model may generate the same text in other tokens."""
        grammar = self.needs_grammar
        if grammar is None or grammar.is_error():
            return []
        # A copy is asked, so that this cannot change a later mask.
        return grammar.deep_copy().compute_ff_tokens()

    def finish(self, mask: Mask, delays_end: bool) -> None:
        """Completes a mask. It contains the mask of `needs_grammar` if there is one, and otherwise zeros.

        Args:
            mask: Completed in place. If it is all zeros afterwards, `error` is set.
            delays_end: The text does not end while another token is possible.
        """
        grammar, vocabulary = self._grammar, self._template.vocabulary
        if self.error is None and grammar is not None and grammar.is_error():
            self.error = f"no token can follow: {_explained(grammar.get_error())}"
        if self.error is not None:
            mask[:] = 0
            return
        if self._has_ended:
            mask[:] = 0
        elif self._free is not None:
            mask[:] = self._free.mask(self._tail)
        elif self._then is not None:
            if grammar is not None and grammar.is_accepting():
                after = self._template.states[self._then]
                assert isinstance(after, _FreeText)
                mask |= after.mask(b"")
        elif self._endings == vocabulary.eos and not delays_end:
            # The library's mask already allows eos if the grammar may end.
            return
        mask &= ~vocabulary.mask_of_set(self._endings | vocabulary.eos)
        if self.may_end and not (delays_end and mask.any()):
            mask |= vocabulary.mask_of_set(self._endings)
        if not mask.any():
            self.error = "no token can follow: the text is complete, and no token ends it"


class MaskMaker:
    """Computes the masks of several matchers, in its own threads."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int) -> None:
        self._vocabulary = vocabulary
        self._executor = LLExecutor(num_threads)

    def make(self, matchers: Sequence[Matcher], delays_end: Sequence[bool]) -> Mask:
        """[n, words], one mask for each matcher. The matchers are distinct objects."""
        masks = np.zeros((len(matchers), self._vocabulary.num_words), np.int32)
        grammars = [(each, i) for i, matcher in enumerate(matchers) if (each := matcher.needs_grammar) is not None]
        if grammars:
            for grammar, _ in grammars:
                # The forced text is tokenized here and kept for the mask: in the executor's threads each tokenizing
                # would wait for the interpreter, up to 5 ms while another thread holds it.
                grammar.compute_ff_tokens()
            self._executor.unsafe_compute_mask_ptr(grammars, masks.ctypes.data, masks.shape[1] * 4, len(masks))
        for matcher, mask, delays in zip(matchers, masks, delays_end, strict=True):
            matcher.finish(mask, delays)
        return masks
