"""What requests ask to be done to their logits before a token is drawn: bans, biases and penalties.

Only rows that ask for something cost anything. What a rule needs of the tokens so far is read from the rows' token
buffer at the time of the step, so that a forked, replayed or recomputed row gets what an undisturbed one gets.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.sampling.history import History, RuledRow
from worker_svc.sampling.penalties import apply_penalties
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.steps import Int32Array
from worker_svc.to_device import to_device


def apply_logit_rules(logits: Tensor, columns: SamplingColumns, history: History) -> None:
    """Changes the logits of the rows that ask for it, in place.

    In this order: tokens that are not allowed get -infinity; the bias is added, and stop tokens before min_tokens and
    last tokens of bad words get -infinity; then repetition, frequency and presence penalty (`apply_penalties`).

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
    ruled = [RuledRow(place, columns.rules[place]) for place in places.tolist()]
    _keep_allowed(logits, [each for each in ruled if len(each.rules.allowed_token_ids)])
    _add_bias(logits, ruled, history)
    _ban_bad_words(logits, [each for each in ruled if each.rules.bad_sequences], history)
    apply_penalties(logits, [each for each in ruled if each.rules.has_penalties], history)


def _normalise_candidates(logits: Tensor, places: NDArray[np.integer]) -> None:
    if len(places):
        index = to_device(places, logits.device)
        logits.index_copy_(0, index, logits[index].log_softmax(dim=1))


def _keep_allowed(logits: Tensor, ruled: list[RuledRow]) -> None:
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


def _add_bias(logits: Tensor, ruled: list[RuledRow], history: History) -> None:
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


def _ban_bad_words(logits: Tensor, ruled: list[RuledRow], history: History) -> None:
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
