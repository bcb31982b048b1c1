"""Which tokens top-k, top-p and min-p leave, as the lowest score that is kept.

The order is vLLM's: temperature, then min-p, then top-k of what is left, then top-p of what is left of that,
renormalised. All three keep the most likely tokens, so one threshold on the score says it all. Tokens that tie with the
last one kept are kept too: which of them comes first has no meaning, and a threshold does not depend on the order in
which a sort leaves equals.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.sampling.inverse_cdf import CHUNK, padded_width
from worker_svc.sampling.ranking import best_scores
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.to_device import to_device

# On the CPU a nucleus is looked for among this many most likely tokens first: it seldom goes beyond, and sorting a
# whole vocabulary costs more than the rest of the sampler. An accelerator sorts fast, and asking whether it was enough
# would make the host wait.
_HEADS = (256, 2048)


def lowest_kept(scores: Tensor, weights: Tensor, columns: SamplingColumns) -> Tensor | None:
    """The lowest score that stays possible in each row; None when no row excludes anything.

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
        return _min_p_floor(columns, scores.device) if columns.min_p.any() else None
    floor = _min_p_floor(columns, scores.device)
    if len(truncated) == len(scores):
        return _rank_floor(scores, weights, columns, floor)
    index = to_device(truncated, scores.device)
    raised = _rank_floor(scores[index], weights[index], columns.take(truncated), floor[index])
    return floor.index_copy(0, index, raised)


def _min_p_floor(columns: SamplingColumns, device: torch.device) -> Tensor:
    """A token needs min_p times the probability of the most likely one, whose score is 0."""
    with np.errstate(divide="ignore"):
        return to_device(np.log(columns.min_p), device)


def _rank_floor(scores: Tensor, weights: Tensor, columns: SamplingColumns, floor: Tensor) -> Tensor:
    """The floor that top-k and top-p raise. Sums are taken in one fixed order, so that other rows change nothing."""
    vocab_size, device = scores.shape[1], scores.device
    has_top_k = (columns.top_k > 0) & (columns.top_k < vocab_size)
    top_k = to_device(np.where(has_top_k, columns.top_k, vocab_size), device)
    top_p = to_device(columns.top_p.astype(np.float64), device)
    widths = _head_widths(vocab_size, columns.top_k[has_top_k], bool(has_top_k.all()), device)
    head = _Head.of(scores, widths[0], top_k, floor)
    if has_top_k.all():
        return torch.maximum(floor, head.lowest_kept(top_p * head.mass, top_p < 1))
    # With top-k the nucleus is a share of those k; without, of all that min-p left.
    mass = _mass(weights * (scores >= floor[:, None]) if columns.min_p.any() else weights)
    wanted = top_p * torch.where(top_k < vocab_size, head.mass, mass)
    return _raise_floor(scores, head, _Limits(floor, top_k, top_p, wanted), widths[1:])


@dataclass(frozen=True, slots=True)
class _Limits:
    """What bounds each of n rows."""

    floor: Tensor
    """[n] float32, what min-p leaves."""
    top_k: Tensor
    """[n] int64; the vocabulary's size where there is none."""
    top_p: Tensor
    """[n] float64."""
    wanted: Tensor
    """[n] float64, the weight that the nucleus must reach."""


def _raise_floor(scores: Tensor, head: "_Head", limits: _Limits, widths: list[int]) -> Tensor:
    """The floor as far as the head shows it; rows whose nucleus goes beyond are looked at in the wider ones."""
    floor = torch.maximum(limits.floor, head.lowest_kept(limits.wanted, limits.top_p < 1))
    if not widths:
        return floor
    rest = ((head.mass < limits.wanted) & (limits.top_k > head.width)).nonzero().squeeze(1)
    if not len(rest):
        return floor
    beyond = _Limits(limits.floor[rest], limits.top_k[rest], limits.top_p[rest], limits.wanted[rest])
    scores = scores[rest]
    wider = _Head.of(scores, widths[0], beyond.top_k, beyond.floor)
    return floor.index_copy(0, rest, _raise_floor(scores, wider, beyond, widths[1:]))


@dataclass(frozen=True, slots=True)
class _Head:
    """The most likely tokens of each row, best first."""

    scores: Tensor
    """[n, width] float32."""
    num_possible: Tensor
    """[n] int64: how many of them min-p and top-k leave."""
    cumulative: Tensor
    """[n, width] float64, sums of the weights of those."""

    @classmethod
    def of(cls, scores: Tensor, width: int, top_k: Tensor, floor: Tensor) -> "_Head":
        head = best_scores(scores, width)
        is_possible = (torch.arange(width, device=scores.device) < top_k[:, None]) & (head >= floor[:, None])
        cumulative = (head.exp() * is_possible).cumsum(dim=1, dtype=torch.float64)
        return cls(head, is_possible.sum(dim=1), cumulative)

    @property
    def width(self) -> int:
        return self.scores.shape[1]

    @property
    def mass(self) -> Tensor:
        """[n] float64."""
        return self.cumulative[:, -1]

    def lowest_kept(self, wanted: Tensor, has_top_p: Tensor) -> Tensor:
        """[n]: the nucleus ends with the token that reaches what is wanted; without top-p all possible ones stay."""
        reaching = torch.searchsorted(self.cumulative, wanted[:, None])
        last = (self.num_possible[:, None] - 1).clamp(min=0)
        last = torch.where(has_top_p[:, None], torch.minimum(reaching, last), last)
        return self.scores.gather(1, last).squeeze(1)


def _mass(weights: Tensor) -> Tensor:
    """[n] float64. In two levels, because torch sums a single long row in another order than several."""
    missing = padded_width(weights.shape[1]) - weights.shape[1]
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    return padded.view(len(weights), -1, CHUNK).sum(dim=2).double().cumsum(dim=1)[:, -1]


def _head_widths(vocab_size: int, top_k: np.ndarray, all_have_top_k: bool, device: torch.device) -> list[int]:
    """Widths of the head to try in turn; the first holds every row's top-k, the last is always enough."""
    least = int(top_k.max()) if len(top_k) else 1
    if all_have_top_k:
        return [least]
    if device.type != "cpu":
        return [vocab_size]
    return [*(width for width in _HEADS if least <= width <= vocab_size // 4), vocab_size]
