"""What a step must satisfy by itself, whatever the rows hold. Each rule raises InvalidArgument and changes nothing."""

import numpy as np

from quire.rpc.errors import invalid_field
from worker_svc.info import ModelGeometry, WorkerLimits
from worker_svc.steps import Batch, CacheOperations, Int32Array, RowChanges


def check_cache_operations(operations: CacheOperations) -> None:
    """No block is written twice by one list, and no copy reads what another writes: their order means nothing then."""
    check_distinct(operations.swap_out[:, 1], "cache_operations.swap_out", "host block", "as destination")
    check_distinct(operations.swap_in[:, 1], "cache_operations.swap_in", "block", "as destination")
    check_distinct(operations.copy[:, 1], "cache_operations.copy", "block", "as destination")
    _check_disjoint(operations.copy, "cache_operations.copy", "block", "as source and as destination")


def check_row_changes(changes: RowChanges) -> None:
    """No list names a row twice where only one of both could hold afterwards."""
    check_distinct(changes.release, "release", "row")
    check_distinct(changes.fork[:, 1], "fork", "child row")
    for field, named in (("assign", changes.assign), ("reseed", changes.reseed), ("set_tokens", changes.set_tokens)):
        if named:
            check_distinct(np.array([each.row for each in named], dtype=np.int32), field, "row")
    _check_distinct_places(changes.block_table_deltas)


def check_batch(batch: Batch, model: ModelGeometry, limits: WorkerLimits) -> None:
    """Each row once, within the token budget and the model's positions; samples draw from rows of the batch."""
    check_distinct(batch.rows, "batch.rows", "row")
    num_tokens = int(batch.num_new_tokens.sum(dtype=np.int64))
    if num_tokens > limits.max_num_batched_tokens:
        raise invalid_field(
            "batch.num_new_tokens",
            f"adds up to {num_tokens} tokens; a step takes at most {limits.max_num_batched_tokens}",
        )
    ends = batch.num_computed_tokens.astype(np.int64) + batch.num_new_tokens
    if (worst := first_true(ends > model.max_model_len)) is not None:
        raise invalid_field(
            "batch.num_new_tokens",
            f"takes row {batch.rows[worst]} to {ends[worst]} tokens; a sequence has at most {model.max_model_len}",
        )
    check_distinct(batch.samples[:, 0], "batch.samples", "row", "as the one that samples")
    is_in_batch = np.zeros(limits.max_num_rows, dtype=bool)
    is_in_batch[batch.rows] = True
    if (worst := first_true(~is_in_batch[batch.samples[:, 1]])) is not None:
        raise invalid_field("batch.samples", f"draws from row {batch.samples[worst, 1]}, which is not in batch.rows")


def check_distinct(values: Int32Array, field: str, noun: str, role: str = "") -> None:
    """Refuses a value that comes twice."""
    if len(values) < 2:
        return
    ordered = np.sort(values)
    if (worst := first_true(ordered[1:] == ordered[:-1])) is not None:
        raise invalid_field(field, " ".join(("holds", noun, str(ordered[worst]), "twice", role)).rstrip())


def _check_distinct_places(deltas: Int32Array) -> None:
    if len(deltas) < 2:
        return
    places = np.sort((deltas[:, 0].astype(np.int64) << 32) + deltas[:, 1])
    if (worst := first_true(places[1:] == places[:-1])) is not None:
        row, index = divmod(int(places[worst]), 1 << 32)
        raise invalid_field("block_table_deltas", f"sets block {index} of row {row} twice")


def first_true(mask: np.ndarray) -> int | None:
    """Index of the first True of a vector; None when there is none."""
    return int(mask.argmax()) if mask.any() else None


def _check_disjoint(pairs: Int32Array, field: str, noun: str, role: str) -> None:
    if len(pairs) and (worst := first_true(np.isin(pairs[:, 0], pairs[:, 1]))) is not None:
        raise invalid_field(field, f"holds {noun} {pairs[worst, 0]} {role}")
