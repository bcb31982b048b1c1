import numpy as np
import torch

from worker_svc.sampling.inverse_cdf import CHUNK, inverse_cdf, padded_width


def make_weights(lines: np.ndarray) -> torch.Tensor:
    """Padded as the sampler pads."""
    padded = torch.zeros((len(lines), padded_width(lines.shape[1])))
    padded[:, : lines.shape[1]] = torch.from_numpy(lines)
    return padded


def test_the_place_is_that_of_a_plain_cumulative_sum() -> None:
    generator = np.random.default_rng(1)
    lines = generator.exponential(size=(200, 3 * CHUNK + 17)).astype(np.float32)
    lines[generator.random(lines.shape) < 0.7] = 0
    numbers = generator.random(200)
    cumulative = lines.astype(np.float64).cumsum(axis=1)
    expected = (cumulative <= numbers[:, None] * cumulative[:, -1:]).sum(axis=1)
    places = inverse_cdf(make_weights(lines), torch.from_numpy(numbers)).numpy()
    # The two sums round differently, which may move a number across the edge of a token, once in millions.
    assert (places != expected).sum() <= 1
    assert (np.take_along_axis(lines, places[:, None], axis=1) > 0).all()


def test_the_ends_of_the_range_fall_on_tokens_that_are_possible() -> None:
    lines = np.zeros((2, 2 * CHUNK), np.float32)
    lines[:, [5, 300]] = 0.1, 0.3
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(make_weights(lines), edges).tolist() == [5, 300]


def test_a_row_without_any_weight_leads_somewhere_in_range() -> None:
    places = inverse_cdf(torch.zeros((1, CHUNK)), torch.tensor([0.5], dtype=torch.float64))
    assert 0 <= places.item() < CHUNK
