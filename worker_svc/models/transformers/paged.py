"""Attention of transformers' models over the KV pool, which has one geometry for all layers.

Attention modules call the function that is registered with transformers under one of the names below. It passes the
call on to the hook of the module: `PagedLayers` while requests are served, a recorder while the model is probed.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from quire.runtime.settings import ConfigurationError
from quire_kernels import ops
from quire_kernels.checks import dtype_written_to
from worker_svc.layers.attention import AttentionMetadata
from worker_svc.models.base import ModelInput

# Names of attention functions in transformers' registry. The first has no mask function, so that models make no masks;
# the second is for models that compute with their masks, which are empty.
PAGED = "quire_paged"
PAGED_WITH_MASKS = "quire_paged_with_masks"

# The attribute of attention modules that holds their hook.
HOOK = "quire_attention"


class UnsupportedModelError(Exception):
    """A model cannot be served through transformers' code. The message ends a sentence that names the model."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one call of attention.

    Attributes:
        query: [1, Hq, T, D], rotated.
        key: [1, Hkv, T, D], rotated.
        value: [1, Hkv, T, Dv].
        mask: the result of the model's mask function, or a mask of the model's own.
        options: all keyword arguments: scaling, sliding_window, softcap and more.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: Mapping[str, Any]


AttentionHook = Callable[[AttentionCall], torch.Tensor]
"""Returns [1, T, Hq, Dv]."""


def attend_by_hook(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers that calls the module's hook."""
    hook: AttentionHook | None = getattr(module, HOOK, None)
    if hook is None:
        raise UnsupportedModelError("it makes attention modules while it runs")
    return hook(AttentionCall(module, query, key, value, attention_mask, options)), None


def set_hook(module: nn.Module, hook: AttentionHook) -> None:
    setattr(module, HOOK, hook)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One call of attention in a forward pass, as found by probing. Most layers make one, some make several.

    Attributes:
        head_dim: of queries and keys.
        value_dim: of values, and of the result.
        scale: factor on the scores.
        sliding_window: tokens that a token sees, itself included; None for all before it.
        soft_cap: bound of the scores, see `ops.paged_attention`.
        alibi_slopes: one for each head, see `ops.paged_attention`; None for no ALiBi.
        sinks: one for each head, see `ops.paged_attention`; None for no sinks.
        needs_exact_keys: an int8 pool would lose the small numbers in its keys, since their sizes differ too much.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    alibi_slopes: tuple[float, ...] | None
    sinks: tuple[float, ...] | None
    needs_exact_keys: bool


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Keys and values of a token in one layer of the pool."""

    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, layers: Sequence[LayerShape]) -> "PoolShape":
        """The smallest shape that all layers fit in: narrower heads are padded with zeros, fewer heads are repeated.

        Raises:
            UnsupportedModelError: the heads of one layer cannot be repeated to the number of another layer's heads.
        """
        num_kv_heads = max(layer.num_kv_heads for layer in layers)
        for layer in layers:
            if num_kv_heads % layer.num_kv_heads or layer.num_heads % num_kv_heads:
                raise UnsupportedModelError(
                    f"its layers have keys of {layer.num_kv_heads} and of {num_kv_heads} heads, "
                    f"for {layer.num_heads} heads of queries"
                )
        return cls(num_kv_heads, max(max(layer.head_dim, layer.value_dim) for layer in layers))


class PagedLayers:
    """The hook of all modules while requests are served.

    A call is identified by its place in the order of the forward pass, in which a module may occur more than once.

    Attributes:
        modules: one for each call, in that order.
    """

    def __init__(
        self, modules: Sequence[nn.Module], shapes: Sequence[LayerShape], pool: PoolShape, device: torch.device
    ) -> None:
        self.modules = tuple(modules)
        self._layers = tuple(_PagedLayer(shape, pool, device) for shape in shapes)
        self._inputs: ModelInput | None = None
        self._attention: Sequence[AttentionMetadata] = ()
        self._num_calls = 0

    @contextlib.contextmanager
    def step(self, inputs: ModelInput) -> Iterator[None]:
        """A context in which the model is run once, on these inputs."""
        self._inputs, self._attention, self._num_calls = inputs, inputs.attention, 0
        try:
            yield
            assert self._num_calls == len(self._layers), "a layer did not attend"
        finally:
            self._inputs = None

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        index, inputs = self._num_calls, self._inputs
        assert inputs is not None, "attention outside a step"
        assert self.modules[index] is call.module, "layers attend in another order than when they were probed"
        self._num_calls += 1
        return self._layers[index](call, inputs.kv_caches[index], self._attention[index])


class _PagedLayer:
    """One call in a forward pass."""

    def __init__(self, shape: LayerShape, pool: PoolShape, device: torch.device) -> None:
        self._shape = shape
        self._pool = pool
        self._repeats = pool.num_kv_heads // shape.num_kv_heads
        self._alibi_slopes = _numbers(shape.alibi_slopes, device)
        self._sinks = _numbers(shape.sinks, device)

    def __call__(self, call: AttentionCall, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        if self._shape.needs_exact_keys and kv_cache.dtype == torch.int8:
            raise ConfigurationError("--kv-cache-dtype is int8, which is too coarse for this model's keys; use auto")
        # Models may rotate in float32; the pool takes one dtype, or any if it is int8.
        dtype = dtype_written_to(kv_cache) or call.value.dtype
        query, key, value = (self._lines(tensor, dtype) for tensor in (call.query, call.key, call.value))
        if self._repeats > 1:
            key, value = (tensor.repeat_interleave(self._repeats, dim=1) for tensor in (key, value))
        ops.reshape_and_cache(key, value, kv_cache, metadata.slot_mapping)
        attended = ops.paged_attention(
            query,
            kv_cache,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale=self._shape.scale,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            sliding_window=self._shape.sliding_window,
            soft_cap=self._shape.soft_cap,
            alibi_slopes=self._alibi_slopes,
            sinks=self._sinks,
        )
        # Models may view it in another shape.
        return attended[..., : self._shape.value_dim].to(call.query.dtype).contiguous()[None]

    def _lines(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[1, H, T, D] -> [T, H, head size of the pool]. Zeros change neither scores nor sums of values."""
        lines = tensor[0].transpose(0, 1).to(dtype)
        missing = self._pool.head_dim - lines.shape[-1]
        return functional.pad(lines, (0, missing)) if missing else lines


def _numbers(each: tuple[float, ...] | None, device: torch.device) -> torch.Tensor | None:
    return None if each is None else torch.tensor(each, dtype=torch.float32, device=device)
