"""Sampling parameters in columns, for tests."""

from collections.abc import Sequence
from typing import Any

from quire.common.v1.common_pb2 import RowSampling as RowSamplingMessage
from quire.common.v1.common_pb2 import SamplingParameters, StoppingParameters, TokenIds
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.step import RowSampling

_RULES = ("suppress_token_ids", "begin_suppress_token_ids", "sequence_biases", "no_repeat_ngram_size")


def make_sampling(**changes: Any) -> RowSampling:
    """Plain sampling at temperature 1 with these changes."""
    parameters: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
    parameters |= {name: changes.pop(name) for name in ("temperature", "top_k", "top_p", "min_p") if name in changes}
    return RowSampling(SamplingParameters(**parameters), **changes)


def make_row_sampling(
    *,
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    bad_token_sequences: Sequence[Sequence[int]] = (),
    **sampling: Any,
) -> bytes:
    """A gateway's message for the worker: these parameters, and rules of the model by their names in the message."""
    rules = {name: sampling.pop(name) for name in tuple(sampling) if name in _RULES}
    message = RowSamplingMessage(
        **rules,
        sampling=SamplingParameters(**sampling),
        stopping=StoppingParameters(min_tokens=min_tokens, stop_token_ids=stop_token_ids),
        bad_token_sequences=[TokenIds(ids=each) for each in bad_token_sequences],
    )
    return message.SerializeToString()


def make_columns(rows: Sequence[RowSampling]) -> SamplingColumns:
    """The parameters of several rows."""
    columns = SamplingColumns.empty(len(rows))
    for row, sampling in enumerate(rows):
        columns.put(row, sampling, num_prompt_tokens=0)
    return columns
