"""Which tokens top-k, top-p and min-p keep, as the lowest score that is kept; and the most likely tokens.

The order is vLLM's: temperature, then min-p, then top-k of the rest, then top-p of the rest of that, renormalised. All
three keep the most likely tokens, so one threshold on the score expresses them all. Tokens that tie with the last one
kept are kept too: their order means nothing, and a threshold does not depend on how a sort orders equals.

On the CPU tokens are drawn by its library (`ops.draw`); this is for accelerators, and for processors without it. The
best tokens are found by numpy there, whose sorts and searches use vector instructions: of 64 rows of 32,768 columns the
8 best, of equals the lower ids, take 2.9 ms on one core by partition and 12 by sorting keys, which is for accelerators.
"""

import numpy as np
import torch
from torch import Tensor

from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.streams import to_device

CHUNK = 256
"""Columns that are summed in one step; see `inverse_cdf`."""

_LOG2_E = float(np.log2(np.e))


def lowest_kept(scores: Tensor, weights: Tensor, columns: SamplingColumns) -> Tensor | None:
    """The lowest score that each row keeps; None if no row excludes anything.

    Args:
        scores: [n, vocab] float32, logits over temperature, shifted so that each row's highest is 0.
        weights: [n, vocab] float32, their exponentials.
        columns: Parameters of the n rows.

    Returns:
        [n] float32.
    """
    vocab_size = scores.shape[1]
    truncated = np.flatnonzero(((columns.top_k > 0) & (columns.top_k < vocab_size)) | (columns.top_p < 1))
    if not len(truncated):
        return to_device(columns.min_score, scores.device) if np.isfinite(columns.min_score).any() else None
    floor = to_device(columns.min_score, scores.device)
    if len(truncated) == len(scores):
        return _rank_floor(scores, weights, columns, floor)
    index = to_device(truncated, scores.device)
    raised = _rank_floor(scores[index], weights[index], columns.take(truncated), floor[index])
    return floor.index_copy(0, index, raised)


def exponential(scores: Tensor, out: Tensor | None = None) -> Tensor:
    """e to the power of scores that are at most 0, by powers of two.

    Measured on two cores for 64 rows of 128,000: as fast as torch's `exp`, and when half of the scores are -infinity,
    as after a constraint, a quarter of its time, which leaves its fast path there.
    """
    scaled = torch.mul(scores, _LOG2_E, out=out)
    return torch.exp2(scaled, out=scaled)


def _rank_floor(scores: Tensor, weights: Tensor, columns: SamplingColumns, floor: Tensor) -> Tensor:
    """The floor that top-k and top-p raise. Sums are taken in one fixed order, so that other rows change nothing."""
    vocab_size, device = scores.shape[1], scores.device
    has_top_k = (columns.top_k > 0) & (columns.top_k < vocab_size)
    top_k = to_device(np.where(has_top_k, columns.top_k, vocab_size), device)
    top_p = to_device(columns.top_p.astype(np.float64), device)
    if has_top_k.all():
        best = scores.topk(int(columns.top_k.max()), dim=1).values
    else:
        # Selecting all of them would sort too, and do more.
        best = scores.sort(dim=1, descending=True).values
    is_possible = (torch.arange(best.shape[1], device=device) < top_k[:, None]) & (best >= floor[:, None])
    cumulative = (exponential(best) * is_possible).cumsum(dim=1, dtype=torch.float64)
    # With top-k the nucleus is a share of the k kept tokens, else of all tokens that min-p kept.
    mass = cumulative[:, -1]
    if not has_top_k.all():
        kept = weights * (scores >= floor[:, None]) if np.isfinite(columns.min_score).any() else weights
        mass = torch.where(top_k < vocab_size, mass, _mass(kept))
    # The nucleus ends with the token that reaches its share; without top-p all possible tokens stay.
    reaching = torch.searchsorted(cumulative, (top_p * mass)[:, None])
    last = (is_possible.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    last = torch.where((top_p < 1)[:, None], torch.minimum(reaching, last), last)
    return torch.maximum(floor, best.gather(1, last).squeeze(1))


def _mass(weights: Tensor) -> Tensor:
    """[n] float64. In two levels, since torch sums a single long row in another order than several rows."""
    missing = padded_width(weights.shape[1]) - weights.shape[1]
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    return padded.view(len(weights), -1, CHUNK).sum(dim=2).double().cumsum(dim=1)[:, -1]


def padded_width(vocab_size: int) -> int:
    """Columns that `inverse_cdf` needs for a vocabulary; those beyond it hold zeros."""
    return -(-vocab_size // CHUNK) * CHUNK


def best_tokens(scores: Tensor, count: int) -> Tensor:
    """The `count` most likely tokens of each row, best first, of equally likely ones the lower id first.

    Args:
        scores: [n, vocab] float32. The result of a row with NaN is undefined.
        count: At most the vocabulary.

    Returns:
        [n, count] int64, every id below the vocabulary.
    """
    if not count:
        return torch.zeros((len(scores), 0), dtype=torch.int64, device=scores.device)
    if scores.device.type != "cpu":
        return best_tokens_by_key(scores, count)
    return torch.from_numpy(_best_by_partition(scores.numpy(), count))


def best_tokens_by_key(scores: Tensor, count: int) -> Tensor:
    """`best_tokens` by one integer key a token: the score is the high half, the low half falls as the id rises."""
    last = scores.shape[1] - 1
    # The bits of floats rise as the floats do once negative ones are inverted. Adding 0 makes -0 into 0.
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.long() << 32) | torch.arange(last, -1, -1, device=scores.device)
    return last - (keys.topk(count, dim=1).values & 0xFFFFFFFF)


def _best_by_partition(scores: np.ndarray, count: int) -> np.ndarray:
    first = scores.shape[1] - count
    best = np.partition(scores, first, axis=1)[:, first:]
    result = np.zeros((len(scores), count), np.int64)
    # NaN sorts last, so that a row which has any has one among its best.
    for row in np.flatnonzero(~np.isnan(best).any(axis=1)):
        result[row] = _first_at_least(best[row, 0], scores[row], count)
    return result


def _first_at_least(floor: np.float32, scores: np.ndarray, count: int) -> np.ndarray:
    """`count` tokens of one row, best first: the tokens above the floor, then the lowest ids of the tokens on it."""
    token_ids = np.flatnonzero(scores >= floor)
    if len(token_ids) > count:
        is_above = scores[token_ids] > floor
        on_floor = token_ids[~is_above][: count - int(is_above.sum())]
        token_ids = np.concatenate((token_ids[is_above], on_floor))
    return token_ids[np.argsort(-scores[token_ids], kind="stable")]
