"""Lengths of prompts and outputs."""

import math

import numpy as np
import pytest

from bench.lengths import LengthMix, alpaca, describe, lognormal_sigma, sharegpt


def test_means_and_variations_are_those_asked_for_where_nothing_is_cut() -> None:
    mix = LengthMix("wide", prompt_mean=161, output_mean=338, longest=10**6, prompt_variation=1.3, output_variation=1.0)
    facts = describe(mix.draw(200_000))
    assert facts["prompt_mean"] == pytest.approx(161, rel=0.02)
    assert facts["output_mean"] == pytest.approx(338, rel=0.02)
    assert facts["prompt_variation"] == pytest.approx(1.3, rel=0.05)
    assert facts["output_variation"] == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("longest", [2, 3, 64, 1024, 2048])
def test_every_sequence_fits_and_has_a_prompt_and_an_output(longest: int) -> None:
    for mix in (sharegpt(longest), alpaca(longest)):
        lengths = mix.draw(5000)
        assert lengths.min() >= 1
        assert lengths.sum(axis=1).max() <= longest


def test_the_same_seed_draws_the_same_lengths_and_another_draws_others() -> None:
    mix = sharegpt(2048)
    assert np.array_equal(mix.draw(50, seed=3), mix.draw(50, seed=3))
    assert not np.array_equal(mix.draw(50, seed=3), mix.draw(50, seed=4))


def test_no_requests_are_an_empty_list() -> None:
    assert sharegpt(2048).draw(0).shape == (0, 2)


def test_a_longest_without_room_for_an_output_is_refused() -> None:
    with pytest.raises(ValueError, match="longest is 1, must be at least 2"):
        sharegpt(1).draw(1)


def test_a_variation_of_one_is_a_sigma_of_the_root_of_log_two() -> None:
    assert lognormal_sigma(1.0) == pytest.approx(math.sqrt(math.log(2)))
