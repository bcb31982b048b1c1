"""The pieces of a detokenizer add up to the decoding of all tokens, with the prompt's tokens, cleaned up if so
configured; no half characters."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from gateway.offload import FairExecutor
from gateway.text.detokenizer import CleanedUp, cleaned_up
from gateway.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_fallback, byte_level, byte_level_bytes, wrapped

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_LEVEL = wrapped(byte_level())
BYTE_FALLBACK = wrapped(byte_fallback())


def pieces_of(tokenizer, token_ids, *, include_special_tokens=False, prompt=()):
    detokenizer = tokenizer.detokenizer(include_special_tokens=include_special_tokens, prompt=prompt)
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.flush()]


def encode(tokenizer, text):
    return tokenizer._tokenizer.encode(text, add_special_tokens=False).ids


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, BYTE_LEVEL.size + 3), max_size=80), special=st.booleans())
def test_byte_level_pieces_add_up_for_any_tokens(token_ids, special):
    pieces = pieces_of(BYTE_LEVEL, token_ids, include_special_tokens=special)
    assert "".join(pieces) == BYTE_LEVEL.decode(token_ids, include_special_tokens=special)


@settings(deadline=None)
@given(text=st.text(alphabet="a😀你é👍🏽 ", max_size=60))
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_no_piece_holds_half_a_character(tokenizer, text):
    pieces = pieces_of(tokenizer, encode(tokenizer, text))
    assert not any(REPLACEMENT in piece for piece in pieces)


@settings(deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_tokens_that_come_together_have_the_text_that_they_have_one_by_one(tokenizer, data):
    whole_characters = st.text(alphabet="a😀 你é👍🏽 ", max_size=20).map(lambda text: encode(tokenizer, text))
    any_tokens = st.lists(st.integers(0, tokenizer.size - 1), max_size=10)
    together, one_by_one = (tokenizer.detokenizer(include_special_tokens=False) for _ in range(2))
    for token_ids in data.draw(st.lists(st.one_of(whole_characters, any_tokens), max_size=8)):
        expected = "".join([one_by_one.push(token_id) for token_id in token_ids])
        assert together.push_all(token_ids) == expected
    assert together.flush() == one_by_one.flush()


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, BYTE_FALLBACK.size - 1), max_size=80))
def test_byte_fallback_takes_any_tokens(token_ids):
    text = "".join(pieces_of(BYTE_FALLBACK, token_ids))
    whole = BYTE_FALLBACK.decode(token_ids, include_special_tokens=False)
    if REPLACEMENT not in whole:
        assert text == whole
    assert text.replace(REPLACEMENT, "").startswith(whole.split(REPLACEMENT)[0][:1])


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, BYTE_LEVEL.size + 3), max_size=40), special=st.booleans(), data=st.data())
async def test_pieces_continue_the_text_of_a_prompt_that_ends_anywhere(token_ids, special, data):
    prompt = token_ids[: data.draw(st.integers(0, len(token_ids)))]
    shown = await BYTE_LEVEL.prompt_text(prompt, include_special_tokens=special)
    pieces = pieces_of(BYTE_LEVEL, token_ids[len(prompt) :], include_special_tokens=special, prompt=prompt)
    assert shown + "".join(pieces) == BYTE_LEVEL.decode(token_ids, include_special_tokens=special)


@settings(deadline=None)
@given(text=st.text(alphabet="the cat 😀你\N{REPLACEMENT CHARACTER}", max_size=30), data=st.data())
async def test_so_do_those_of_a_decoder_that_drops_the_first_space(text, data):
    token_ids = [1, *encode(BYTE_FALLBACK, text)]
    prompt = token_ids[: data.draw(st.integers(0, len(token_ids)))]
    shown = await BYTE_FALLBACK.prompt_text(prompt, include_special_tokens=False)
    pieces = pieces_of(BYTE_FALLBACK, token_ids[len(prompt) :], prompt=prompt)
    assert shown + "".join(pieces) == BYTE_FALLBACK.decode(token_ids, include_special_tokens=False)
    assert REPLACEMENT in text or not any(REPLACEMENT in each for each in (shown, *pieces[:-1]))


@pytest.mark.parametrize("num_silent", [0, 1, 40])
def test_special_tokens_at_the_end_of_a_prompt_are_no_text_before_the_answer(num_silent):
    the = encode(BYTE_FALLBACK, "the")
    assert "".join(pieces_of(BYTE_FALLBACK, the, prompt=[*the, *[2] * num_silent])) == " the"
    assert "".join(pieces_of(BYTE_FALLBACK, the, prompt=[2] * num_silent)) == "the"


async def test_a_token_of_a_prompt_may_complete_a_character_and_begin_the_next_one():
    spelled = ["\xe4\xb8", "\u0132\xd7", "\u0131"]  # bytes as byte-level vocabularies write them
    level = tokenizers.Tokenizer(models.BPE({each: number for number, each in enumerate(spelled)}, []))
    level.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(level, FairExecutor(1))
    assert await tokenizer.prompt_text([0, 1], include_special_tokens=False) == "丐"
    assert "".join(pieces_of(tokenizer, [2], prompt=[0, 1])) == b"\xd7\x8f".decode()


def test_punctuation_of_an_answer_is_cleaned_up_behind_the_prompt():
    words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "cat": 2, ".": 3}))
    words.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = Tokenizer(words, FairExecutor(1), {"clean_up_tokenization_spaces": True})
    assert "".join(pieces_of(tokenizer, [3, 1], prompt=[1, 2])) == ". the"


@pytest.mark.parametrize(
    "unit",
    [b"\x80", b"\xf0\x9f", b"\x9f\x98\x80\xf0", "\N{REPLACEMENT CHARACTER}".encode()],
    ids=["lone continuation", "never completed", "never at a boundary", "real replacement character"],
)
def test_cost_of_a_token_does_not_grow_over_odd_bytes(unit):
    alphabet = byte_level_bytes()
    token_ids = [alphabet[byte] for byte in unit * 3000]
    detokenizer = BYTE_LEVEL.detokenizer(include_special_tokens=False)
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.push(token_id))
        assert len(detokenizer._window) < 32  # pyrefly: ignore
    assert "".join(pieces) + detokenizer.flush() == (unit * 3000).decode(errors="replace")


class Pieces:
    """Gives the texts of a list, one for each token."""

    def __init__(self, texts: list[str]) -> None:
        self._texts: Iterator[str] = iter(texts)

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join([next(self._texts) for _ in token_ids])

    def flush(self) -> str:
        return next(self._texts)


def streamed(texts: list[str]) -> list[str]:
    cleaner = CleanedUp(cast(Any, Pieces(texts)))
    return [*(cleaner.push(0) for _ in texts[:-1]), cleaner.flush()]


@given(st.lists(st.text(alphabet=" 'nvrtesm.?,x", max_size=5), min_size=1))
def test_the_pieces_together_are_the_clean_up_of_the_whole(texts):
    assert "".join(streamed(texts)) == cleaned_up("".join(texts))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["the", " cat", " .", ""], ["the", " cat", ".", ""]),
        (["is", " n", "'", "t", " it", ""], ["is", "", "", "n't", " it", ""]),
        (["is", " ", ""], ["is", "", " "]),
        (["is", " n", "ever", ""], ["is", "", " never", ""]),
    ],
)
def test_text_is_held_back_only_while_it_may_change(texts, expected):
    assert streamed(texts) == expected
