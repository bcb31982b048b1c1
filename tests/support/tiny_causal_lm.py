"""A language model of one attention layer, whose logits depend on the whole history through the paged pool."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quire_kernels import ops
from worker_svc.models.base import CausalLM, ModelInput
from worker_svc.weights import Placement

VOCAB_SIZE = 61
MAX_MODEL_LEN = 48
_HEADS = 2
_HEAD_DIM = 8


class TinyCausalLM(CausalLM):
    """Random weights from a fixed seed. Hooks let a test make a step slow, fail it, or change logits."""

    architecture = "TinyForCausalLM"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(
            Placement(torch.device("cpu"), dtype),
            num_layers=1,
            num_kv_heads=_HEADS,
            head_dim=_HEAD_DIM,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
        )
        generator = torch.Generator().manual_seed(5)
        width = _HEADS * _HEAD_DIM
        self.tokens = torch.randn((VOCAB_SIZE, width), generator=generator).to(dtype)
        self.places = torch.randn((MAX_MODEL_LEN, width), generator=generator).to(dtype)
        self.output = torch.randn((width, VOCAB_SIZE), generator=generator).to(dtype)
        self.before_step: Callable[[ModelInput], None] = lambda inputs: None
        self.change_logits: Callable[[Tensor], Tensor] = lambda logits: logits

    @classmethod
    def from_config(cls, config: Mapping[str, Any], placement: Placement) -> "TinyCausalLM":
        raise NotImplementedError

    def forward(self, inputs: ModelInput) -> Tensor:
        self.before_step(inputs)
        states = (self.tokens[inputs.token_ids] + self.places[inputs.positions]).view(-1, _HEADS, _HEAD_DIM)
        attention, cache = inputs.attention[0], inputs.kv_caches[0]
        ops.reshape_and_cache(states, states.flip(2), cache, attention.slot_mapping)
        attended = ops.paged_attention(
            states,
            cache,
            attention.block_tables,
            attention.query_start_loc,
            attention.seq_lens,
            scale=0.3,
            max_query_len=attention.max_query_len,
            max_seq_len=attention.max_seq_len,
        )
        return (attended + states).flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.change_logits((hidden @ self.output).float())

    def naive_logits(self, token_ids: list[int]) -> Tensor:
        """Logits [vocab] after a whole sequence, without blocks or batches."""
        ids = torch.tensor(token_ids)
        states = (self.tokens[ids] + self.places[: len(ids)]).view(-1, _HEADS, _HEAD_DIM)
        weights = torch.einsum("hd,thd->ht", states[-1], states).mul(0.3).softmax(dim=1)
        attended = torch.einsum("ht,thd->hd", weights, states.flip(2))
        return ((attended + states[-1]).flatten() @ self.output).float()
