"""The flat batch of one step: the input of the model and the logits to sample from, without Python per token."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels.states import StatePages
from worker_svc.device.kv_pool import LayerCaches
from worker_svc.device.rows import Rows
from worker_svc.layers.attention import AttentionMetadata
from worker_svc.models.base import ModelInput
from worker_svc.step import Batch, Int32Array
from worker_svc.streams import to_device


@dataclass(frozen=True, slots=True)
class Layout:
    """The new tokens of all rows, concatenated: T tokens of R rows, as int64 arrays on the host."""

    rows: NDArray[np.int64]
    """[R]"""
    row_of_token: NDArray[np.int64]
    """[T]"""
    positions: NDArray[np.int64]
    """[T], index of each token in its sequence."""
    query_start_loc: NDArray[np.int64]
    """[R + 1]"""
    seq_lens: NDArray[np.int64]
    """[R]"""
    max_query_len: int
    max_seq_len: int

    @classmethod
    def from_batch(cls, batch: Batch) -> "Layout":
        rows, computed = batch.rows.astype(np.int64), batch.num_computed_tokens.astype(np.int64)
        num_rows, max_query_len = len(rows), int(batch.num_new_tokens.max())
        if max_query_len == 1:
            # The usual step has only decodes.
            starts, seq_lens = np.arange(num_rows + 1), computed + 1
            return cls(rows, rows, computed, starts, seq_lens, 1, int(seq_lens.max()))
        new = batch.num_new_tokens.astype(np.int64)
        starts, seq_lens = np.concatenate(((0,), np.cumsum(new))), computed + new
        positions = np.arange(starts[-1]) + np.repeat(computed - starts[:-1], new)
        return cls(rows, np.repeat(rows, new), positions, starts, seq_lens, max_query_len, int(seq_lens.max()))


def build_model_input(
    batch: Batch, rows: Rows, caches: LayerCaches, block_size: int, checkpoints: Int32Array | None = None
) -> ModelInput:
    """The new tokens of all rows, concatenated, their places in the pool, and the context that they attend to.

    Args:
        checkpoints: as `Step` has them; the ones after tokens that the batch does not compute are left out.
    """
    layout = Layout.from_batch(batch)
    if rows.token_ids.device.type == "cpu":
        return input_on_host(layout, rows, caches, block_size, checkpoints)
    return input_on_device(layout, rows, caches, block_size)


def input_on_host(
    layout: Layout, rows: Rows, caches: LayerCaches, block_size: int, checkpoints: Int32Array | None = None
) -> ModelInput:
    """`build_model_input` by numpy, whose operations on a few numbers take a fraction of the time of torch's."""
    by_group, num_blocks = rows.by_group.numpy(), -(-layout.max_seq_len // block_size)
    blocks, offsets = np.divmod(layout.positions, block_size)
    slots = by_group[layout.row_of_token, blocks].T.astype(np.int64, order="C") * block_size + offsets
    tables = np.ascontiguousarray(by_group[layout.rows, :num_blocks].transpose(2, 0, 1))
    groups = _attention(
        layout,
        torch.from_numpy(slots),
        torch.from_numpy(tables),
        torch.from_numpy(layout.query_start_loc.astype(np.int32)),
        torch.from_numpy(layout.seq_lens.astype(np.int32)),
    )
    token_ids = rows.token_ids.numpy()[layout.row_of_token, layout.positions].astype(np.int64)
    of_tokens = rows.adapter_slots[layout.row_of_token]
    adapter_slots = torch.from_numpy(of_tokens) if of_tokens.any() else None
    positions = torch.from_numpy(layout.positions)
    states = None
    if caches.pages is not None:
        states = _states_on_host(layout, rows, caches.pages, groups[0], checkpoints)
    return caches.inputs(torch.from_numpy(token_ids), positions, groups, adapter_slots, states)


def _states_on_host(
    layout: Layout, rows: Rows, pages: Tensor, attention: AttentionMetadata, checkpoints: Int32Array | None
) -> StatePages:
    """The states of the rows of the batch, and the checkpoints that it reaches."""
    if checkpoints is None:
        checkpoints = np.zeros((0, 2), np.int32)
    of_tokens, tables = reached_checkpoints(checkpoints, layout.row_of_token, layout.positions, rows.state_blocks)
    return StatePages(
        pages,
        torch.from_numpy(rows.state_tables[layout.rows]),
        attention.query_start_loc,
        attention.seq_lens,
        torch.from_numpy(of_tokens),
        torch.from_numpy(tables),
    )


def reached_checkpoints(
    checkpoints: Int32Array, rows: NDArray[np.integer], positions: NDArray[np.integer], state_blocks: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The checkpoints that tokens of these rows and positions reach: for each token the index of the one after it, -1
    without one; and the blocks of each, [C, state_blocks]."""
    of_tokens = np.full(np.broadcast_shapes(rows.shape, positions.shape), -1, np.int32)
    if not len(checkpoints):
        return of_tokens, np.zeros((0, state_blocks), np.int32)
    tokens = (rows.astype(np.int64) << 32) + positions
    lasts = (checkpoints[:, 0].astype(np.int64) << 32) + checkpoints[:, 1] - 1
    order = np.argsort(lasts)
    found = order[np.minimum(np.searchsorted(lasts, tokens, sorter=order), len(order) - 1)]
    is_reached = lasts[found] == tokens
    of_tokens[is_reached] = np.arange(np.count_nonzero(is_reached))
    return of_tokens, checkpoints[found[is_reached], 2:]


def input_on_device(layout: Layout, rows: Rows, caches: LayerCaches, block_size: int) -> ModelInput:
    """`build_model_input` with one transfer of a few numbers a token; the device gathers token and block ids."""
    slots = rows.adapter_slots[layout.row_of_token]
    slots = slots if slots.any() else slots[:0]
    parts = (layout.row_of_token, layout.positions, layout.rows, layout.query_start_loc, layout.seq_lens, slots)
    packed = to_device(np.concatenate(parts), rows.token_ids.device)
    token_rows, positions, batch_rows, query_start_loc, seq_lens, of_tokens = packed.split(list(map(len, parts)))
    num_blocks = -(-layout.max_seq_len // block_size)
    block_ids = rows.by_group[token_rows, positions // block_size].long()
    slot_mappings = block_ids.t() * block_size + positions % block_size
    tables = rows.by_group[:, :num_blocks].index_select(0, batch_rows).permute(2, 0, 1).contiguous()
    starts = query_start_loc.to(torch.int32)
    groups = _attention(layout, slot_mappings.contiguous(), tables, starts, seq_lens.to(torch.int32))
    token_ids = rows.token_ids[token_rows, positions].long()
    return caches.inputs(token_ids, positions, groups, of_tokens if len(slots) else None)


def _attention(
    layout: Layout, slot_mappings: Tensor, tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> list[AttentionMetadata]:
    """The attention of each group of layers, from slots [groups, T] and block tables [groups, R, M]."""
    lengths = layout.max_query_len, layout.max_seq_len
    return [
        AttentionMetadata(slots, table, query_start_loc, seq_lens, *lengths)
        for slots, table in zip(slot_mappings, tables, strict=True)
    ]


def split_outputs(
    batch: Batch, num_prompt_tokens: NDArray[np.int64], places: NDArray[np.int64] | None = None
) -> tuple[Batch, NDArray[np.int64]] | None:
    """Gives output tokens that are computed again, after a loss or a preemption, an entry of one token each.

    Attention has one kernel for an entry of one token and one for several, whose rounding differs. So a token of the
    output is always computed by the kernel of the first decode, and its keys and values are bitwise the same.

    Args:
        num_prompt_tokens: For all rows.
        places: The result of `sample_places`; needed if a row is in the batch several times already.

    Returns:
        The batch in which a row may occur several times, and the place in its `rows` that each sample draws from: the
        last one of its row. None if nothing is split.
    """
    new = batch.num_new_tokens.astype(np.int64)
    if int(new.max(initial=1)) == 1:
        return None
    num_prompt = np.clip(num_prompt_tokens[batch.rows] - batch.num_computed_tokens, 0, new)
    splits = (new > 1) & (num_prompt < new)
    if not splits.any():
        return None
    num_entries = np.where(splits, new - num_prompt + (num_prompt > 0), 1)
    is_first = count_up(num_entries) == 0
    num_new = np.ones(len(is_first), np.int32)
    num_new[is_first] = np.where(splits, np.maximum(num_prompt, 1), new)
    starts = np.cumsum(num_new) - num_new
    # For each entry, the number of tokens of its row that precede it in this batch.
    before = starts - starts[is_first].repeat(num_entries)
    computed = (batch.num_computed_tokens.repeat(num_entries) + before).astype(np.int32)
    lasts = np.cumsum(num_entries) - 1
    places = sample_places(batch) if places is None else places
    return Batch(batch.rows.repeat(num_entries), num_new, computed, batch.samples), lasts[places]


def count_up(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """0, 1, ... for each of the counts, up to before it."""
    return np.arange(int(counts.sum())) - (np.cumsum(counts) - counts).repeat(counts)


def find_lone_tokens(batch: Batch, num_prompt_tokens: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    """Which entries of the batch are a single prompt token after others; None if there is none. They must be computed
    by the kernel for several tokens: rounding must not depend on how a prompt is cut. The first token of a sequence
    needs no such care, since attention to only itself is exact."""
    computed = batch.num_computed_tokens
    lone = (computed < num_prompt_tokens[batch.rows]) & (computed > 0) & (batch.num_new_tokens == 1)
    return lone if lone.any() else None


def pad_batch(batch: Batch, num_rows: int, padding_row: int) -> Batch:
    """The batch padded to `num_rows` rows: further rows compute the first token of `padding_row` and do not sample."""
    missing = num_rows - len(batch.rows)
    ones = np.ones(missing, np.int32)
    return Batch(
        rows=np.concatenate((batch.rows, ones * padding_row)),
        num_new_tokens=np.concatenate((batch.num_new_tokens, ones)),
        num_computed_tokens=np.concatenate((batch.num_computed_tokens, ones * 0)),
        samples=batch.samples,
    )


def samples_every_token(batch: Batch) -> bool:
    """Whether each row has one token from which one row samples, in the order of the batch. Not for an empty batch."""
    return np.array_equal(batch.samples[:, 1], batch.rows) and int(batch.num_new_tokens.max()) == 1


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """The logits that are needed, and the rows that sample from them."""

    rows: Int32Array
    """[s], the rows that sample."""
    positions: NDArray[np.int64]
    """[s], index of the drawn token in the sequence of its row."""
    logit_tokens: NDArray[np.int64]
    """[l], indices in the flat batch of the tokens whose logits are needed, each once."""
    logit_of_row: NDArray[np.int64] | None
    """[s], index of the logits that each row samples from; None if each row has its own, in order."""


def plan_samples(batch: Batch, places: NDArray[np.int64] | None = None) -> SamplePlan:
    """The samples of a batch. Logits that several rows sample from (the n samples of one prompt) are computed once.
    `places` is the result of `sample_places`; needed if a row is in the batch several times."""
    samplers = batch.samples[:, 0]
    ends, last_tokens = batch.ends, np.cumsum(batch.num_new_tokens, dtype=np.int64) - 1
    if np.array_equal(batch.samples[:, 1], batch.rows):
        # The usual step: every row samples from its own logits.
        return SamplePlan(samplers, ends, last_tokens, None)
    places = sample_places(batch) if places is None else places
    logit_tokens, logit_of_row = np.unique(last_tokens[places], return_inverse=True)
    if len(logit_tokens) == len(places):
        return SamplePlan(samplers, ends[places], last_tokens[places], None)
    return SamplePlan(samplers, ends[places], logit_tokens, logit_of_row)


def sample_places(batch: Batch) -> NDArray[np.int64]:
    """The place in `batch.rows` of the row that each sample draws from. The rows are distinct."""
    if np.array_equal(batch.samples[:, 1], batch.rows):
        return np.arange(len(batch.rows))
    order = np.argsort(batch.rows)
    return order[np.searchsorted(batch.rows, batch.samples[:, 1], sorter=order)]


def finite_tokens(batch: Batch, hidden: Tensor) -> Tensor | None:
    """Whether the hidden state of each new token is finite, [T] bool; None if every row samples.

    NaN in a hidden state remains in all later layers and the final norm, and spreads to every token that attends to its
    keys and values. So a chunk with finite final hidden states was computed from finite keys and values.
    """
    if np.array_equal(batch.samples[:, 1], batch.rows) or not _samples_nothing(batch).any():
        return None
    # A float32 sum of finite numbers of usable size is finite.
    return hidden[: int(batch.num_new_tokens.sum())].sum(-1, dtype=torch.float32).isfinite()


def non_finite_chunks(batch: Batch, is_finite: NDArray[np.bool_]) -> tuple[int, ...]:
    """The rows that do not sample and have a token that is not finite. `is_finite` comes from `finite_tokens`."""
    new = batch.num_new_tokens.astype(np.int64)
    is_chunk_finite = np.logical_and.reduceat(is_finite, np.cumsum(new) - new)
    return tuple(batch.rows[_samples_nothing(batch) & ~is_chunk_finite].tolist())


def _samples_nothing(batch: Batch) -> NDArray[np.bool_]:
    return ~np.isin(batch.rows, batch.samples[:, 1])
