"""Spaces before punctuation, taken out of text that comes in pieces."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.detokenizer import CleanedUp, cleaned_up


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
