"""Steps as values, for tests of the worker's parts."""

from collections.abc import Sequence

import numpy as np

from tests.support.sampling import make_sampling
from worker_svc.step import (
    AssignRow,
    Batch,
    CacheOperations,
    ReseedRow,
    RowChanges,
    RowSampling,
    SealedBlocks,
    SetTokens,
    Step,
)


def int32(values: Sequence[object], columns: int | None = None) -> np.ndarray:
    """An int32 array, of pairs or triples if `columns` is given."""
    array = np.array(values, dtype=np.int32)
    return array if columns is None else array.reshape(-1, columns)


def make_assign(
    row: int,
    token_ids: Sequence[int],
    block_table: Sequence[int],
    sampling: RowSampling | None = None,
    num_prompt_tokens: int | None = None,
    adapter_slot: int | None = None,
    state_blocks: Sequence[int] = (),
) -> AssignRow:
    """A sequence in a row; all of its tokens are prompt unless `num_prompt_tokens` says otherwise."""
    num_prompt_tokens = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    tokens, table = int32(token_ids), int32(block_table)
    sampling, states = sampling or make_sampling(), int32(state_blocks)
    return AssignRow(row, tokens, table, sampling, num_prompt_tokens, adapter_slot, state_blocks=states)


def make_changes(
    *,
    release: Sequence[int] = (),
    assign: Sequence[AssignRow] = (),
    fork: Sequence[tuple[int, int]] = (),
    reseed: Sequence[ReseedRow] = (),
    set_tokens: Sequence[SetTokens] = (),
    deltas: Sequence[tuple[int, int, int]] = (),
    state_tables: Sequence[Sequence[int]] = (),
) -> RowChanges:
    changed = tuple(assign), int32(fork, 2), tuple(reseed), tuple(set_tokens), int32(deltas, 3)
    return RowChanges(int32(release), *changed, *((int32(state_tables),) if state_tables else ()))


def make_batch(
    rows: Sequence[int] = (),
    new: Sequence[int] = (),
    computed: Sequence[int] = (),
    samples: Sequence[tuple[int, int]] | None = None,
) -> Batch:
    """A batch; every row samples from itself unless `samples` says otherwise."""
    pairs = [(row, row) for row in rows] if samples is None else samples
    return Batch(int32(rows), int32(new), int32(computed), int32(pairs, 2))


def make_operations(
    swap_out: Sequence[tuple[int, int]] = (),
    swap_in: Sequence[tuple[int, int]] = (),
    copy: Sequence[tuple[int, int]] = (),
) -> CacheOperations:
    return CacheOperations(int32(swap_out, 2), int32(swap_in, 2), int32(copy, 2))


def make_step(
    changes: RowChanges | None = None,
    batch: Batch | None = None,
    operations: CacheOperations | None = None,
    sealed: SealedBlocks | None = None,
    step_id: int = 1,
    checkpoints: Sequence[Sequence[int]] = (),
) -> Step:
    return Step(
        step_id,
        1,
        operations or make_operations(),
        changes or make_changes(),
        batch or make_batch(),
        sealed or SealedBlocks(int32(()), np.zeros((0, 32), np.uint8)),
        *((int32(checkpoints),) if checkpoints else ()),
    )
