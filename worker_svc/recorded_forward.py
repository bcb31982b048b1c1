"""The forward pass on the CPU as one call of the kernels' library, of a model whose layers are operations of it alone.

What CUDA graphs are for a GPU, without their padding: a recording runs with as many tokens and rows as a step has.
"""

import logging
from collections.abc import Callable

import torch

from kernels.record import NotRecordableError, record
from worker_svc.info import WorkerLimits
from worker_svc.kv_pool import KvPool
from worker_svc.model_input import AttentionMetadata, ModelInput
from worker_svc.models.base import CausalLM, NativeCausalLM

Forward = Callable[[ModelInput], torch.Tensor]
"""Gives a step's hidden states after the final norm, [T, hidden], which may be overwritten by the next step."""

_logger = logging.getLogger(__name__)


def make_forward(model: CausalLM, pool: KvPool, max_model_len: int, limits: WorkerLimits) -> Forward:
    """The model's forward pass over this pool: recorded where that can be, else the model itself."""
    if not isinstance(model, NativeCausalLM) or model.device.type != "cpu" or model.ranks.size > 1:
        return model
    try:
        return RecordedForward(model, room_for_largest_step(pool, max_model_len, limits))
    except NotRecordableError as reason:
        _logger.debug("operations of the model run one by one: %s", reason)
        return model


class RecordedForward:
    """Runs a model's layers from a recording, over tensors that each step's input is copied to.

    Args:
        room: as large as the largest step, over the pool that all steps are to use.

    Raises:
        NotRecordableError: the layers compute something that is no operation of the library.
    """

    def __init__(self, model: NativeCausalLM, room: ModelInput) -> None:
        self._model = model
        self._room = room
        one_token = ModelInput(room.token_ids[:1].zero_(), room.positions[:1].zero_(), room.attention, ())
        num_tokens = room.token_ids.shape[0]
        one_embedded = model.embed(one_token)
        embedded = one_embedded.new_empty(num_tokens, one_embedded.shape[1])
        outputs: list[torch.Tensor] = []
        self._recording = record(num_tokens, lambda: outputs.append(model.run_layers(embedded, room)))
        self._embedded, (self._output,) = embedded, outputs

    @torch.inference_mode()
    def __call__(self, inputs: ModelInput) -> torch.Tensor:
        num_tokens, num_rows = inputs.token_ids.shape[0], inputs.attention.seq_lens.shape[0]
        room, attention = self._room, inputs.attention
        self._embedded[:num_tokens] = self._model.embed(inputs)
        room.positions[:num_tokens] = inputs.positions
        room.attention.slot_mapping[:num_tokens] = attention.slot_mapping
        room.attention.block_tables[:num_rows, : attention.block_tables.shape[1]] = attention.block_tables
        room.attention.query_start_loc[: num_rows + 1] = attention.query_start_loc
        room.attention.seq_lens[:num_rows] = attention.seq_lens
        self._recording.run(num_tokens, num_rows)
        return self._output[:num_tokens]


def room_for_largest_step(pool: KvPool, max_model_len: int, limits: WorkerLimits) -> ModelInput:
    """Tensors of the sizes that the largest step has, whatever is in them."""
    tokens, rows = limits.max_num_batched_tokens, limits.max_num_rows
    attention = AttentionMetadata(
        slot_mapping=torch.empty(tokens, dtype=torch.int64),
        block_tables=torch.empty(rows, pool.geometry.blocks_for(max_model_len), dtype=torch.int32),
        query_start_loc=torch.empty(rows + 1, dtype=torch.int32),
        seq_lens=torch.empty(rows, dtype=torch.int32),
        max_query_len=min(tokens, max_model_len),
        max_seq_len=max_model_len,
    )
    token_ids, positions = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, dtype=torch.int64)
    return ModelInput(token_ids, positions, attention, pool.gpu)
