"""The share of allocated blocks that holds tokens."""

import argparse

import numpy as np
import pytest

from bench import waste
from bench.lengths import sharegpt
from bench.waste import paged_use


def make_arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    waste.add_arguments(parser)
    return parser.parse_args(list(flags))


def test_blocks_of_one_token_waste_nothing() -> None:
    lengths = np.array([[5, 9]] * 40)
    use = paged_use(lengths, 1, make_arguments("--slots", "64", "--longest", "64", "--warm-up", "5"))
    assert use.of_blocks == 1


def test_one_token_in_blocks_of_sixteen_uses_a_sixteenth() -> None:
    lengths = np.array([[1, 1]] * 400)
    use = paged_use(lengths, 16, make_arguments("--slots", "256", "--longest", "64", "--warm-up", "20"))
    assert use.of_blocks == pytest.approx(1 / 16)
    # None grows, so none gives way.
    assert (use.preemptions_per_request, use.computed_per_needed) == (0, 1)


def test_what_gives_way_is_computed_again() -> None:
    # Two of 12 tokens grow to 20 each in a pool of 32.
    lengths = np.array([[12, 8]] * 60)
    use = paged_use(lengths, 1, make_arguments("--slots", "32", "--longest", "32", "--warm-up", "10"))
    assert use.preemptions_per_request > 0
    # At most all of a request, each time; at least its prompt but for what lies in cached blocks.
    assert 1 < use.computed_per_needed <= 1 + use.preemptions_per_request


def test_chats_use_more_than_96_percent_of_their_blocks() -> None:
    arguments = make_arguments("--requests", "250", "--warm-up", "60")
    use = paged_use(sharegpt(2048).draw(250, seed=1), 16, arguments)
    assert use.of_blocks >= 0.96
    assert use.of_pool >= 0.9
    assert use.num_running > 20


def test_rows_that_limit_are_refused() -> None:
    arguments = make_arguments("--slots", "4096", "--longest", "64", "--warm-up", "2", "--max-num-seqs", "2")
    with pytest.raises(ValueError, match="all 2 rows were taken"):
        paged_use(np.array([[5, 9]] * 20), 16, arguments)


def test_a_warm_up_without_end_is_refused() -> None:
    arguments = make_arguments("--slots", "64", "--longest", "64", "--warm-up", "100")
    with pytest.raises(ValueError, match="warm-up of 100 requests"):
        paged_use(np.array([[5, 9]] * 20), 16, arguments)
