"""The pieces of a detokenizer add up to the decoding of all tokens, cleaned up if so configured; no half characters."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.detokenizer import CleanedUp, cleaned_up
from tests.support.tokenizers import byte_fallback, byte_level, byte_level_bytes, wrapped

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_LEVEL = wrapped(byte_level())
BYTE_FALLBACK = wrapped(byte_fallback())


def pieces_of(tokenizer, token_ids, *, include_special_tokens=False):
    detokenizer = tokenizer.detokenizer(include_special_tokens=include_special_tokens)
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
@given(token_ids=st.lists(st.integers(0, BYTE_FALLBACK.size - 1), max_size=80))
def test_byte_fallback_takes_any_tokens(token_ids):
    text = "".join(pieces_of(BYTE_FALLBACK, token_ids))
    whole = BYTE_FALLBACK.decode(token_ids, include_special_tokens=False)
    if REPLACEMENT not in whole:
        assert text == whole
    assert text.replace(REPLACEMENT, "").startswith(whole.split(REPLACEMENT)[0][:1])


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
        assert len(detokenizer._window) < 32  # pyright: ignore[reportAttributeAccessIssue]
    assert "".join(pieces) + detokenizer.flush() == (unit * 3000).decode(errors="replace")


class Pieces:
    """Gives the texts of a list, one for each token."""

    def __init__(self, texts: list[str]) -> None:
        self._texts: Iterator[str] = iter(texts)

    def push(self, token_id: int) -> str:
        return next(self._texts)

    def flush(self) -> str:
        return next(self._texts)


def streamed(texts: list[str]) -> list[str]:
    cleaner = CleanedUp(Pieces(texts))
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
