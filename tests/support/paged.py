"""Runs a model over a small paged pool as a worker would, but without a worker."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_kernels import ops
from quire_kernels.packed_weight import Coding, Quantization
from quire_kernels.states import StatePages
from worker_svc.device.arena import arena_shape, caches_of, pages_of
from worker_svc.device.kv_pool import block_bytes
from worker_svc.layers.attention import AttentionMetadata
from worker_svc.layers.embedding_norm import TiedHead
from worker_svc.layers.linear import Linear
from worker_svc.layers.products import CodedProduct, OwnProduct
from worker_svc.layers.state_layer import StateSize
from worker_svc.models.base import CausalLM, ModelInput
from worker_svc.models.registry import load_model
from worker_svc.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens [start, end) of sequence `row`, to be run in one step."""

    row: int
    start: int
    end: int


class PagedRunner:
    """Runs spans of fixed sequences; block ids are scrambled and slots that were never written hold NaN."""

    def __init__(self, model: CausalLM, sequences: Sequence[Sequence[int]], *, block_size: int, seed: int = 0) -> None:
        self.model = model
        self.forward: Callable[[ModelInput], torch.Tensor] = model
        self.sequences = [list(sequence) for sequence in sequences]
        self.adapter_slots = [0] * len(sequences)
        """Adapter slot of each sequence, from 1 on; 0 is no adapter."""
        self._block_size = block_size
        blocks_per_row = -(-max(len(sequence) for sequence in sequences) // block_size) + 8
        num_blocks = blocks_per_row * len(sequences) + 3
        generator = torch.Generator().manual_seed(seed)
        scrambled = torch.randperm(num_blocks, generator=generator)[: blocks_per_row * len(sequences)]
        self._tables = scrambled.view(len(sequences), blocks_per_row)
        self._pages: torch.Tensor | None = None
        # Where the state of a sequence goes after some of its tokens, in addition.
        self._checkpoints: dict[tuple[int, int], torch.Tensor] = {}
        if model.state is not None:
            self._add_arena(model.state, num_blocks, len(sequences), generator)
            return
        shapes = (
            (model.lines_per_token, num_blocks, layer.num_kv_heads, block_size, layer.head_dim)
            for layer in model.cache_layers
        )
        self.pools = [torch.full(shape, float("nan"), dtype=model.dtype) for shape in shapes]

    def _add_arena(self, state: StateSize, num_blocks: int, num_rows: int, generator: torch.Generator) -> None:
        """The pool of a model whose layers keep states: the blocks of states follow the others."""
        model, size = self.model, block_bytes(self.model, self._block_size)
        num_state_blocks = state.num_blocks(size)
        count = num_rows * num_state_blocks
        self._state_tables = (num_blocks + torch.randperm(count, generator=generator)).view(num_rows, num_state_blocks)
        arena = torch.full(arena_shape(num_blocks + count, size, model.dtype), float("nan"), dtype=model.dtype)
        self._pages = pages_of(arena)
        shapes = [
            (model.lines_per_token, layer.num_kv_heads, self._block_size, layer.head_dim)
            for layer in model.cache_layers
        ]
        self.pools = list(caches_of(arena, shapes))

    def _states(self, spans: Sequence[Span], attention: AttentionMetadata) -> StatePages | None:
        if self._pages is None:
            return None
        tokens = [(span.row, end) for span in spans for end in range(span.start + 1, span.end + 1)]
        reached = [token for token in tokens if token in self._checkpoints]
        places = [reached.index(token) if token in reached else -1 for token in tokens]
        tables = [self._checkpoints[token] for token in reached]
        return StatePages(
            self._pages,
            self._state_tables[[span.row for span in spans]].to(torch.int32),
            attention.query_start_loc,
            attention.seq_lens,
            torch.tensor(places, dtype=torch.int32),
            torch.stack(tables).to(torch.int32) if tables else self._state_tables[:0].to(torch.int32),
        )

    def share_blocks(self, source: int, target: int, *, num_blocks: int) -> None:
        """The sequence `target` begins with the first blocks of `source`, as from a prefix cache."""
        self._tables[target, :num_blocks] = self._tables[source, :num_blocks]
        if self._pages is not None:
            self._checkpoints[source, num_blocks * self._block_size] = self._state_tables[target]

    @torch.inference_mode()
    def step(self, *spans: Span) -> torch.Tensor:
        """Logits of all tokens of all spans, [T, vocab_size]."""
        return self.model.logits(self.forward(self.inputs(*spans)))

    def inputs(self, *spans: Span) -> ModelInput:
        """A model's input to compute the tokens of these spans."""
        positions = [torch.arange(span.start, span.end) for span in spans]
        tokens = [token for span in spans for token in self.sequences[span.row][span.start : span.end]]
        slots = [
            self._tables[span.row, position // self._block_size] * self._block_size + position % self._block_size
            for span, position in zip(spans, positions, strict=True)
        ]
        lengths = [span.end - span.start for span in spans]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        metadata = AttentionMetadata(
            slot_mapping=torch.cat(slots),
            block_tables=self._tables[[span.row for span in spans]].to(torch.int32),
            query_start_loc=starts.to(torch.int32),
            seq_lens=torch.tensor([span.end for span in spans], dtype=torch.int32),
            max_query_len=max(lengths),
            max_seq_len=max(span.end for span in spans),
        )
        of_tokens = [self.adapter_slots[span.row] for span in spans for _ in range(span.start, span.end)]
        adapter_slots = torch.tensor(of_tokens) if any(of_tokens) else None
        states = self._states(spans, metadata)
        return ModelInput(
            torch.tensor(tokens), torch.cat(positions), [metadata], self.pools, adapter_slots, states=states
        )


def codings_of(layer: Linear | TiedHead) -> list[Coding | None]:
    """Codings of a layer's weights; None for a weight that is not in codes."""
    product = layer._product
    if isinstance(product, CodedProduct):
        return [weight.coding for weight in product.packed]
    assert isinstance(product, OwnProduct)
    return [product.weight.coding]


def codings_in_use(
    model: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch, *, quantization: Quantization = Quantization.NONE
) -> dict[bool, set[Coding | None]]:
    """Codings of all layers, with products of codes (True) and without. The logits are the same, bit for bit."""
    tokens = [3 + 7 * index % 300 for index in range(40)]
    logits: dict[bool, list[torch.Tensor]] = {}
    codings: dict[bool, set[Coding | None]] = {}
    for is_coded in (True, False):
        if not is_coded:
            monkeypatch.setattr(ops, "has_coded_products", lambda *_: False)
        ranks = [Ranks(rank, num_ranks) for rank in range(num_ranks)]
        options: dict[str, Any] = {"dtype": torch.bfloat16, "quantization": quantization}
        models = [load_model(model, device=torch.device("cpu"), ranks=each, **options) for each in ranks]
        layers = [layer for each in models for layer in each.modules() if isinstance(layer, Linear | TiedHead)]
        codings[is_coded] = {coding for layer in layers for coding in codings_of(layer)}
        runners = [PagedRunner(each, [tokens], block_size=4) for each in models]
        logits[is_coded] = [runner.step(span) for runner in runners for span in (Span(0, 0, 39), Span(0, 39, 40))]
    assert all(torch.equal(*each) for each in zip(*logits.values(), strict=True))
    assert all(each.isfinite().all() for each in logits[True])
    return codings
