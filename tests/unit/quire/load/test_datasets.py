"""Datasets: lengths as in the paper's figure 11, seeds, prefixes and conversations."""

from collections.abc import Callable, Sequence
from itertools import pairwise, product

import numpy as np
import pytest

from quire.load import (
    Chat,
    Constant,
    Dataset,
    alpaca,
    arriving_at,
    chat,
    describe,
    fixed,
    shared_prefix,
    sharegpt,
    take,
    with_decoding,
)

VOCAB_SIZE = 1000
DATASETS: Sequence[Callable[[], Dataset]] = [
    lambda: sharegpt(512, VOCAB_SIZE),
    lambda: shared_prefix(80, Constant(5), Constant(6), 512, VOCAB_SIZE, num_prefixes=3),
    lambda: chat(512, VOCAB_SIZE),
]


LOAD = take(fixed(3, 3, VOCAB_SIZE), 2, seed=0)
CHATS = take(chat(512, VOCAB_SIZE, mean_turns=20), 20, seed=0)


def contents(dataset: Dataset, count: int, seed: int) -> list[tuple[object, ...]]:
    return [
        (each.index, each.token_ids.tobytes(), each.output_len, each.group, each.turn, each.num_new_tokens)
        for each in take(dataset, count, seed)
    ]


def test_means_are_those_of_figure_11_where_the_model_takes_2048_tokens() -> None:
    for make, prompt_mean, output_mean in ((sharegpt, 161, 338), (alpaca, 19, 58)):
        facts = describe(take(make(2048, VOCAB_SIZE), 10_000, seed=0))
        assert facts["prompt_mean"] == pytest.approx(prompt_mean, rel=0.05)
        assert facts["output_mean"] == pytest.approx(output_mean, rel=0.05)


def test_the_same_seed_gives_the_same_requests_and_a_longer_load_begins_as_a_shorter_one() -> None:
    for make in DATASETS:
        assert contents(make(), 30, seed=3) == contents(make(), 60, seed=3)[:30]
        assert contents(make(), 30, seed=3) != contents(make(), 30, seed=4)


def test_every_request_fits_the_model_and_has_a_prompt_and_an_output() -> None:
    for make, longest in product((sharegpt, alpaca, chat), (2, 64)):
        for request in take(make(longest, VOCAB_SIZE), 300, seed=1):
            assert min(len(request.token_ids), request.output_len or 0) >= 1
            assert len(request.token_ids) + (request.output_len or 0) <= longest
            assert 10 <= request.token_ids.min() <= request.token_ids.max() < VOCAB_SIZE


def test_requests_take_shared_prefixes_in_turn_and_share_nothing_else() -> None:
    load = take(shared_prefix(80, Constant(16), Constant(2), 2048, VOCAB_SIZE, num_prefixes=2), 6, seed=0)
    assert [request.group for request in load] == [0, 1, 0, 1, 0, 1]
    assert [len({each.token_ids[part].tobytes() for each in load}) for part in (slice(80), slice(80, None))] == [2, 6]


def test_a_turn_carries_the_history_up_to_the_cut() -> None:
    dataset = Chat(Constant(10), Constant(5), 2048, VOCAB_SIZE, max_prompt_len=30, mean_turns=8)
    load = take(dataset, 200, seed=0)
    for earlier, later in pairwise(load):
        if later.turn == 0:
            assert later.group == (earlier.group or 0) + 1
            assert len(later.token_ids) == 10
            continue
        assert (later.group, later.turn) == (earlier.group, earlier.turn + 1)
        assert len(later.token_ids) == min(30, len(earlier.token_ids) + 15)
        kept = len(later.token_ids) - 15
        assert np.array_equal(later.token_ids[:kept], earlier.token_ids[len(earlier.token_ids) - kept :])
    assert max(request.turn for request in load) > 3


def test_a_turn_carries_the_answer_that_was_served_in_place_of_the_drawn_one() -> None:
    first, second = take(Chat(Constant(4), Constant(3), 64, VOCAB_SIZE, max_prompt_len=32, mean_turns=50), 2, seed=0)
    carried = second.carrying(first.token_ids, [7, 8, 9])
    expected = [*first.token_ids, 7, 8, 9, *second.token_ids[-4:]]
    assert carried.token_ids.tolist() == expected
    # A longer conversation than planned is cut at the beginning.
    longer = second.carrying(first.token_ids, [7, 8, 9, 11])
    assert longer.token_ids.tolist() == [*first.token_ids[1:], 7, 8, 9, 11, *second.token_ids[-4:]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sharegpt(1, 1000), "the model takes 1 tokens, must be at least 2"),
        (lambda: sharegpt(512, 10), "the vocabulary has 10 tokens, must be more than 10"),
        (lambda: fixed(0, 5, 1000), "a length is 0 tokens, must be at least 1"),
        (
            lambda: shared_prefix(511, Constant(1), Constant(1), 512, 1000),
            "the prefix has 511 tokens; a prompt and an output need one each of 512",
        ),
        (lambda: chat(512, 1000, mean_turns=0.5), "the mean number of turns is 0.5, must be at least 1"),
        (lambda: arriving_at(LOAD, (0.5,)), "2 requests and 1 times of arrival"),
        (lambda: with_decoding(LOAD, n=4, beam_width=2), "n is 4, must be at most the beam width, 2"),
        (lambda: with_decoding(CHATS, n=2), "n is 2, must be 1 for conversations"),
        (lambda: chat(512, 1000, max_prompt_len=512), r"the prompt is cut to 512 tokens, must be in \[1, 511\]"),
    ],
)
def test_impossible_datasets_are_refused_by_value_and_limit(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
