"""Sampling parameters in columns, for tests."""

from collections.abc import Sequence
from typing import Any

from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.steps import RowSampling


def make_sampling(**changes: Any) -> RowSampling:
    """Plain sampling at temperature 1 with these changes."""
    plain: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "logprobs": None,
        "num_candidates": None,
    }
    return RowSampling(**{**plain, **changes})


def make_columns(rows: Sequence[RowSampling]) -> SamplingColumns:
    """The parameters of several rows."""
    columns = SamplingColumns.empty(len(rows))
    for row, sampling in enumerate(rows):
        columns.put(row, sampling)
    return columns
