"""What requests ask to be done to their logits before a token is drawn: bans, biases and penalties.

Only rows that ask for something cost anything. What a rule needs of the tokens so far is read from the rows' token
buffer at the time of the step, so that a forked, replayed or recomputed row gets what an undisturbed one gets.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.sampling_table import SamplingColumns
from worker_svc.steps import Int32Array, LogitRules
from worker_svc.transfer import to_device

# Penalties count tokens in a table of rows x vocabulary (or x length); it is made in pieces of at most these entries.
_MAX_COUNTS = 4 * 2**20


@dataclass(frozen=True, slots=True)
class History:
    """The tokens that the sampling rows have so far. All but `token_ids` are of shape [n]."""

    token_ids: Tensor
    """[rows of the worker, width] int32 on the device."""
    rows: NDArray[np.integer]
    num_prompt_tokens: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    """Prompt and output."""


@dataclass(frozen=True, slots=True)
class _Ruled:
    """A sampling row that has rules, and its place among the sampling rows."""

    place: int
    rules: LogitRules


def apply_logit_rules(logits: Tensor, columns: SamplingColumns, history: History) -> None:
    """Changes the logits of the rows that ask for it, in place.

    In this order: tokens that are not allowed get -infinity; the bias is added, and stop tokens before min_tokens and
    last tokens of bad words get -infinity; then repetition, frequency and presence penalty. The penalties are those of
    vLLM: repetition divides a positive logit and multiplies another one of each token in prompt or output; frequency
    and presence look at the output alone.

    Rows that report candidates (beam search) become log probabilities first and are not normalised again: there the
    rules work on scores, as in transformers.

    Args:
        logits: [n, vocab] float32.
        columns: Parameters of the n rows.
        history: Tokens of the n rows.
    """
    places = np.flatnonzero(columns.has_rules)
    if not len(places):
        return
    _normalise_candidates(logits, np.flatnonzero(columns.has_rules & (columns.num_candidates > 0)))
    ruled = [_Ruled(place, columns.rules[place]) for place in places.tolist()]
    _keep_allowed(logits, [each for each in ruled if len(each.rules.allowed_token_ids)])
    _add_bias(logits, ruled, history)
    _ban_bad_words(logits, [each for each in ruled if each.rules.bad_sequences], history)
    penalised = [each for each in ruled if each.rules.has_penalties]
    for piece in _pieces(penalised, max(logits.shape[1], history.token_ids.shape[1])):
        _penalise(logits, piece, history)


def _normalise_candidates(logits: Tensor, places: NDArray[np.integer]) -> None:
    if len(places):
        index = to_device(places, logits.device)
        logits.index_copy_(0, index, logits[index].log_softmax(dim=1))


def _keep_allowed(logits: Tensor, ruled: list[_Ruled]) -> None:
    if not ruled:
        return
    lists = [each.rules.allowed_token_ids for each in ruled]
    places = np.array([each.place for each in ruled])
    lines, token_ids = to_device(
        np.stack((np.repeat(places, [len(each) for each in lists]), np.concatenate(lists))), logits.device
    )
    kept = logits[lines, token_ids]
    logits.index_fill_(0, to_device(places, logits.device), -torch.inf)
    logits[lines, token_ids] = kept


def _add_bias(logits: Tensor, ruled: list[_Ruled], history: History) -> None:
    """The bias, and the ban of stop tokens, which is a bias of -infinity."""
    places: list[int] = []
    token_ids: list[Int32Array] = []
    values: list[np.ndarray] = []
    num_output_tokens = history.num_tokens - history.num_prompt_tokens
    for each in ruled:
        rules = each.rules
        if len(rules.bias_token_ids):
            places.append(each.place)
            token_ids.append(rules.bias_token_ids)
            values.append(rules.bias_values)
        if len(rules.stop_token_ids) and num_output_tokens[each.place] < rules.min_tokens:
            places.append(each.place)
            token_ids.append(rules.stop_token_ids)
            values.append(np.full(len(rules.stop_token_ids), -np.inf, np.float32))
    if places:
        lines, ids = to_device(
            np.stack((np.repeat(places, [len(each) for each in token_ids]), np.concatenate(token_ids))), logits.device
        )
        logits.index_put_((lines, ids), to_device(np.concatenate(values), logits.device), accumulate=True)


def _ban_bad_words(logits: Tensor, ruled: list[_Ruled], history: History) -> None:
    """The last token of a bad word cannot follow the others of it. The output alone is looked at."""
    if not ruled:
        return
    sequences = [(each.place, sequence) for each in ruled for sequence in each.rules.bad_sequences]
    places = np.array([place for place, _ in sequences])
    prefix_lengths = np.array([len(sequence) - 1 for _, sequence in sequences])
    is_complete = prefix_lengths <= (history.num_tokens - history.num_prompt_tokens)[places]
    width = int(prefix_lengths.max())
    # Prefixes end where the tokens so far end.
    prefixes = np.zeros((len(sequences), width), np.int64)
    for line, (_, sequence) in enumerate(sequences):
        prefixes[line, width - len(sequence) + 1 :] = sequence[:-1]
    last_tokens = np.array([sequence[-1] for _, sequence in sequences])
    numbers = np.stack(
        (places, history.rows[places], history.num_tokens[places], prefix_lengths, last_tokens, is_complete)
    )
    lines, rows, ends, lengths, last, complete = to_device(numbers.astype(np.int64), logits.device)
    back = torch.arange(width, 0, -1, device=logits.device)
    found = history.token_ids[rows[:, None], (ends[:, None] - back).clamp_(min=0)]
    differs = (found != to_device(prefixes, logits.device)) & (back <= lengths[:, None])
    is_banned = (complete > 0) & ~differs.any(dim=1)
    logits.index_put_((lines, last), torch.where(is_banned, -torch.inf, 0.0), accumulate=True)


def _pieces(ruled: list[_Ruled], width: int) -> list[list[_Ruled]]:
    size = max(_MAX_COUNTS // width, 1)
    return [ruled[start : start + size] for start in range(0, len(ruled), size)]


def _penalise(logits: Tensor, ruled: list[_Ruled], history: History) -> None:
    places = np.array([each.place for each in ruled])
    penalties = np.array(
        [(each.rules.repetition_penalty, each.rules.frequency_penalty, each.rules.presence_penalty) for each in ruled],
        np.float32,
    ).T.copy()
    numbers = np.stack(
        (places, history.rows[places], history.num_prompt_tokens[places], history.num_tokens[places])
    ).astype(np.int64)
    index, rows, prompt_ends, ends = to_device(numbers, logits.device)
    repetition, frequency, presence = to_device(penalties, logits.device)[:, :, None]
    longest = int(numbers[3].max())
    tokens = history.token_ids[:, :longest].index_select(0, rows).long()
    positions = torch.arange(longest, device=logits.device)
    is_known = positions < ends[:, None]
    picked = logits[index]
    if (penalties[0] != 1).any():
        is_seen = _counts(tokens, is_known, picked) > 0
        weighted = torch.where(picked > 0, picked / repetition, picked * repetition)
        picked = torch.where(is_seen, weighted, picked)
    if penalties[1:].any():
        counts = _counts(tokens, is_known & (positions >= prompt_ends[:, None]), picked)
        picked = picked - frequency * counts - presence * (counts > 0)
    logits.index_copy_(0, index, picked)


def _counts(tokens: Tensor, counted: Tensor, like: Tensor) -> Tensor:
    """How often each token is among the counted ones of its row: [m, vocab] float32."""
    return torch.zeros_like(like).scatter_add_(1, tokens, counted.to(like.dtype))
