"""Tokens that the library draws compared with an exact computation in float64, on every instruction set."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.cpu.library import Library, available_isas
from quire_kernels.draw_rules import DrawRules

NUM_ROWS = 60


def naive_token(logits: NDArray[np.float32], rules: DrawRules, row: int, number: float) -> tuple[int, float]:
    """The token, and the distance of the random number to the next token's range, as a share of all."""
    if not rules.temperature[row]:
        return int(logits.argmax()), 1.0
    scores = (logits - logits.max()) / rules.temperature[row]
    weights = np.where(scores >= rules.min_score[row], np.exp(scores.astype(np.float64)), 0)
    order = np.argsort(-scores, kind="stable")
    kept = np.ones(len(logits), np.bool_)
    if 0 < rules.top_k[row] < len(logits):
        kept &= scores >= scores[order[rules.top_k[row] - 1]]
        weights[order[rules.top_k[row] :]] = 0
    edge = 1.0
    if rules.top_p[row] < 1:
        shares = weights[order].cumsum() / weights.sum()
        edge = float(np.abs(shares - rules.top_p[row]).min())
        last = min(int(np.searchsorted(shares, rules.top_p[row])), len(logits) - 1)
        kept &= scores >= scores[order[last]]
    weights = np.where(kept & (scores >= rules.min_score[row]), np.exp(scores.astype(np.float64)), 0)
    shares = weights.cumsum() / weights.sum()
    return int((shares <= number).sum()), min(edge, float(np.abs(shares - number).min()))


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("vocab_size", [3, 257, 5000, 40_003])
def test_each_row_draws_what_an_exact_computation_draws(isa: str, vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(generator.standard_normal((NUM_ROWS, vocab_size)).astype(np.float32))
    logits *= torch.from_numpy(generator.choice([0.01, 1, 5, 20], (NUM_ROWS, 1)).astype(np.float32))
    # Half of the rows are like rows of bfloat16 models, with many equal logits; some have banned tokens.
    logits[::2] = logits[::2].bfloat16().float()
    logits[::5, 1::2] = -torch.inf
    with np.errstate(divide="ignore"):
        rules = DrawRules(
            temperature=generator.choice([0, 0.5, 1, 3], NUM_ROWS).astype(np.float32),
            top_k=generator.choice([0, 0, 1, 40, 700, vocab_size - 1, 2 * vocab_size], NUM_ROWS),
            top_p=generator.choice([1.0, 0.95, 0.3, 0.999, 1e-6], NUM_ROWS),
            min_score=np.log(generator.choice([0, 0, 0.01, 1], NUM_ROWS).astype(np.float32)),
        )
    numbers = generator.choice([0.0, 1 - 2**-53, *generator.random(98)], NUM_ROWS)
    token_ids, highest = CpuKernels(Library(isa=isa)).draw(logits, rules, numbers)
    assert torch.equal(highest, logits.max(1).values)
    for row in range(NUM_ROWS):
        expected, distance = naive_token(logits[row].numpy(), rules, row, numbers[row])
        # Sums in float32 may fall on the other side of an edge.
        assert int(token_ids[row]) == expected or distance < 2e-6, (row, rules.top_k[row], rules.top_p[row])
        assert logits[row, token_ids[row]] > -torch.inf


@pytest.mark.parametrize("isa", available_isas())
def test_strided_rows_are_drawn_as_contiguous_ones_and_bad_ones_are_named(isa: str) -> None:
    wide = torch.randn((4, 1000), generator=torch.Generator().manual_seed(1))
    wide[1, 7], wide[2, 9], wide[3, :300] = torch.nan, torch.inf, -torch.inf
    ones = np.ones(4, np.float32)
    rules = DrawRules(ones, np.zeros(4, np.int64), ones.astype(np.float64), np.full(4, -np.inf, np.float32))
    kernels, numbers = CpuKernels(Library(isa=isa)), np.full(4, 0.5)
    token_ids, highest = kernels.draw(wide[:, :300], rules, numbers)
    assert token_ids.equal(kernels.draw(wide[:, :300].contiguous(), rules, numbers)[0])
    assert highest.isnan().tolist() == [False, True, True, False]
    assert highest[3] == -torch.inf
    assert token_ids[1:].tolist() == [0, 0, 0]
