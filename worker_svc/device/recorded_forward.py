"""The forward pass on the CPU as one call of the kernels' library, for models whose layers consist of its operations.

It is to the CPU what CUDA graphs are to a GPU, without padding: a recording runs with the tokens and rows of a step.
"""

import logging
from collections.abc import Callable
from typing import TypeGuard

import torch

from kernels.cpu.recording import NotRecordableError, record
from worker_svc.device.kv_pool import KvPool
from worker_svc.layers.attention import AttentionMetadata
from worker_svc.models.base import CausalLM, ModelInput, NativeCausalLM
from worker_svc.step import WorkerLimits

Forward = Callable[[ModelInput], torch.Tensor]
"""Returns a step's hidden states after the final norm, [T, hidden], which the next step may overwrite."""

Decodes = Callable[[ModelInput], torch.Tensor]
"""Returns the logits of all rows, [R, vocab] float32, of a step in which each row has one token."""

_logger = logging.getLogger(__name__)


def make_forward(model: CausalLM, pool: KvPool, max_model_len: int, limits: WorkerLimits) -> Forward:
    """The model's forward pass over this pool: recorded where possible, else the model itself."""
    if not _is_recordable(model):
        return model
    try:
        room = room_for(pool, max_model_len, num_tokens=limits.max_num_batched_tokens, num_rows=limits.max_num_rows)
        return RecordedForward(model, room)
    except NotRecordableError as reason:
        _logger.debug("operations of the model run one by one: %s", reason)
        return model


def make_decodes(model: CausalLM, pool: KvPool, max_model_len: int, limits: WorkerLimits) -> Decodes | None:
    """The layers and the output layer in one recording, for steps of decodes alone; None where not possible.

    In one recording the threads go on from the layers to the output layer instead of sleeping and waking between them.
    """
    if not _is_recordable(model):
        return None
    try:
        room = room_for(pool, max_model_len, num_tokens=limits.max_num_rows, num_rows=limits.max_num_rows)
        logits = RecordedForward(model, room, model.outputs)
    except NotRecordableError:
        return None
    return lambda inputs: logits(inputs).float()


def _is_recordable(model: CausalLM) -> TypeGuard[NativeCausalLM]:
    return isinstance(model, NativeCausalLM) and model.device.type == "cpu" and model.ranks.is_recordable


class RecordedForward:
    """Runs a model's layers from a recording, on tensors to which each step's input is copied.

    Args:
        room: tensors of the size of the largest step, over the pool of all steps.
        finish: applied to the hidden states, and recorded too.

    Raises:
        NotRecordableError: the layers compute something that is not an operation of the library.
    """

    def __init__(
        self, model: NativeCausalLM, room: ModelInput, finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self._model = model
        one_token = ModelInput(room.token_ids[:1].zero_(), room.positions[:1].zero_(), room.attention, ())
        num_tokens = room.token_ids.shape[0]
        one_embedded = model.embed(one_token)
        embedded = one_embedded.new_empty(num_tokens, one_embedded.shape[1])
        outputs: list[torch.Tensor] = []

        def run() -> None:
            hidden = model.run_layers(embedded, room)
            outputs.append(hidden if finish is None else finish(hidden))

        self._recording = record(num_tokens, run)
        self._embedded, (self._output,) = embedded, outputs
        attention = room.attention
        self._positions, self._slot_mapping = room.positions.numpy(), attention.slot_mapping.numpy()
        self._block_tables = attention.block_tables.numpy()
        self._query_start_loc, self._seq_lens = attention.query_start_loc.numpy(), attention.seq_lens.numpy()

    @torch.inference_mode()
    def __call__(self, inputs: ModelInput) -> torch.Tensor:
        num_tokens, num_rows = inputs.token_ids.shape[0], inputs.attention.seq_lens.shape[0]
        attention = inputs.attention
        self._embedded[:num_tokens] = self._model.embed(inputs)
        # By numpy, which takes a fraction of the time of torch for a few numbers.
        self._positions[:num_tokens] = inputs.positions
        self._slot_mapping[:num_tokens] = attention.slot_mapping
        self._block_tables[:num_rows, : attention.block_tables.shape[1]] = attention.block_tables
        self._query_start_loc[: num_rows + 1] = attention.query_start_loc
        self._seq_lens[:num_rows] = attention.seq_lens
        self._recording.run(num_tokens, num_rows)
        return self._output[:num_tokens]


def room_for(pool: KvPool, max_model_len: int, *, num_tokens: int, num_rows: int) -> ModelInput:
    """Uninitialised tensors for steps of at most so many tokens and rows."""
    attention = AttentionMetadata(
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64),
        block_tables=torch.empty(num_rows, pool.geometry.blocks_for(max_model_len), dtype=torch.int32),
        query_start_loc=torch.empty(num_rows + 1, dtype=torch.int32),
        seq_lens=torch.empty(num_rows, dtype=torch.int32),
        max_query_len=min(num_tokens, max_model_len),
        max_seq_len=max_model_len,
    )
    token_ids, positions = torch.empty(num_tokens, dtype=torch.int64), torch.empty(num_tokens, dtype=torch.int64)
    return ModelInput(token_ids, positions, attention, pool.gpu)
