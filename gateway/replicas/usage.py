"""The part of a request's usage that only the gateway knows: a scheduler parses no text and matches no prediction."""

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gateway.replicas.events import Usage
from gateway.replicas.generation_request import GenerationRequest
from gateway.replicas.sequence import SequenceStream


def with_gateway_counts(usage: Usage, request: GenerationRequest, sequences: Sequence[SequenceStream]) -> Usage:
    """The usage that a scheduler reports of a request, with the counts that only the gateway knows."""
    counts = {"reasoning_tokens": sum(stream.num_reasoning_tokens for stream in sequences)}
    if predicted := request.predicted:
        accepted = num_predicted(predicted, [stream.token_ids for stream in sequences])
        counts["accepted_prediction_tokens"] = sum(accepted)
        counts["rejected_prediction_tokens"] = sum(max(len(predicted) - each, 0) for each in accepted)
    if request.stopping.stop:
        # The scheduler generates tokens until the gateway notifies it that a stop string ended a sequence.
        counts["generated_tokens"] = sum(len(stream.token_ids) for stream in sequences)
    return dataclasses.replace(usage, **counts)


def num_predicted(predicted: Sequence[int], sequences: Sequence[Sequence[int]]) -> list[int]:
    """The number of correctly predicted tokens in each sequence. A token is compared with the next token of the
    prediction; after a difference, matching continues at the next place that has the sequence's last two tokens."""
    if not predicted:
        return [0] * len(sequences)
    # A prediction may be as long as a context: places are sorted once, and only of pairs that occur in a sequence.
    wanted = np.unique(np.concatenate([_pairs(each) for each in sequences]))
    pairs = _pairs(predicted)
    numbers = np.searchsorted(wanted, pairs, side="right") - 1
    hits = np.flatnonzero(wanted[numbers] == pairs) if wanted.size else numbers[:0]
    of_pair = np.argsort(numbers[hits], kind="stable")
    places: list[int] = (hits[of_pair] + 1).tolist()
    ends: list[int] = np.cumsum(np.bincount(numbers[hits], minlength=len(wanted))).tolist()
    ranges = dict(zip(wanted.tolist(), pairwise([0, *ends]), strict=True))
    return [_num_followed(predicted, places, ranges, token_ids) for token_ids in sequences]


def _num_followed(
    predicted: Sequence[int], places: list[int], ranges: dict[int, tuple[int, int]], token_ids: Sequence[int]
) -> int:
    num_right = following = 0
    for pair, token_id in zip([None, *_pairs(token_ids).tolist()], token_ids, strict=False):
        if following < len(predicted) and predicted[following] == token_id:
            num_right, following = num_right + 1, following + 1
        elif pair is not None:
            start, end = ranges[pair]
            if (index := bisect_left(places, following, start, end)) < end:
                num_right, following = num_right + 1, places[index] + 1
    return num_right


def _pairs(token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """A number for each pair of consecutive tokens."""
    ids = np.asarray(token_ids, np.int64)
    return ids[:-1] << 32 | ids[1:]
