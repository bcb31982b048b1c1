"""The flat batch of one step: what the model computes and which logits are sampled, without Python per token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.model_input import AttentionMetadata, ModelInput
from worker_svc.rows import Rows
from worker_svc.steps import Batch, Int32Array
from worker_svc.transfer import to_device


def build_model_input(batch: Batch, rows: Rows, kv_caches: Sequence[Tensor], block_size: int) -> ModelInput:
    """The new tokens of all rows one after the other, where they lie in the pool, and what they attend to.

    The host sends a few numbers a token in one transfer; token ids and block ids are gathered on the device.
    """
    new = batch.num_new_tokens.astype(np.int64)
    computed = batch.num_computed_tokens.astype(np.int64)
    num_rows, ends, seq_lens = len(new), np.cumsum(new), computed + new
    num_tokens = int(ends[-1])
    row_of_token = np.repeat(batch.rows, new)
    positions = np.arange(num_tokens) + np.repeat(computed - (ends - new), new)
    packed = to_device(
        np.concatenate((row_of_token, positions, batch.rows, (0,), ends, seq_lens)), rows.token_ids.device
    )
    token_rows, token_positions, batch_rows, query_start_loc, lengths = packed.split(
        (num_tokens, num_tokens, num_rows, num_rows + 1, num_rows)
    )
    max_seq_len = int(seq_lens.max())
    num_blocks = -(-max_seq_len // block_size)
    block_ids = rows.block_tables[token_rows, token_positions // block_size].long()
    attention = AttentionMetadata(
        slot_mapping=block_ids * block_size + token_positions % block_size,
        block_tables=rows.block_tables[:, :num_blocks].index_select(0, batch_rows),
        query_start_loc=query_start_loc.to(torch.int32),
        seq_lens=lengths.to(torch.int32),
        max_query_len=int(new.max()),
        max_seq_len=max_seq_len,
    )
    token_ids = rows.token_ids[token_rows, token_positions].long()
    return ModelInput(token_ids=token_ids, positions=token_positions, attention=attention, kv_caches=kv_caches)


def pad_batch(batch: Batch, num_rows: int, padding_row: int) -> Batch:
    """The batch with so many rows: those behind its own compute the first token of `padding_row`, and none samples."""
    missing = num_rows - len(batch.rows)
    ones = np.ones(missing, np.int32)
    return Batch(
        rows=np.concatenate((batch.rows, ones * padding_row)),
        num_new_tokens=np.concatenate((batch.num_new_tokens, ones)),
        num_computed_tokens=np.concatenate((batch.num_computed_tokens, ones * 0)),
        samples=batch.samples,
    )


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Which logits are needed and who samples from them."""

    rows: Int32Array
    """[s], the rows that sample."""
    positions: NDArray[np.int64]
    """[s], index in each sampling row's sequence of the token that is drawn."""
    logit_tokens: NDArray[np.int64]
    """[l], index in the flat batch of the tokens whose logits are needed, each once."""
    logit_of_row: NDArray[np.int64] | None
    """[s], which of those logits each row samples from; None when it is one each in order."""


def plan_samples(batch: Batch) -> SamplePlan:
    """Logits that several rows sample from (the n samples of one prompt) are computed once."""
    samplers, sources = batch.samples.T
    ends = batch.num_computed_tokens.astype(np.int64) + batch.num_new_tokens
    last_tokens = np.cumsum(batch.num_new_tokens, dtype=np.int64) - 1
    if np.array_equal(sources, batch.rows):
        # The usual step, in which no two rows sample from the same logits.
        return SamplePlan(samplers, ends, last_tokens, None)
    order = np.argsort(batch.rows)
    places = order[np.searchsorted(batch.rows, sources, sorter=order)]
    logit_tokens, logit_of_row = np.unique(last_tokens[places], return_inverse=True)
    if len(logit_tokens) == len(places):
        return SamplePlan(samplers, ends[places], last_tokens[places], None)
    return SamplePlan(samplers, ends[places], logit_tokens, logit_of_row)
