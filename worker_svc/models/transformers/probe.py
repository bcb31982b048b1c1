"""Finds out how a transformers model calls attention, by running it on a few tokens before it serves.

In these runs attention returns each token's own value, so each token's results must be independent of other tokens. A
model that lets tokens influence each other (a recurrent state, a convolution, attention of its own) would mix the
sequences of a flat batch. Results must not depend on the place of a token in the batch either.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from quire.runtime.settings import ConfigurationError
from worker_svc.models.transformers.paged import AttentionCall, LayerShape, UnsupportedModelError

PROBED = "quire_probed"
"""Name of the attention function of probed models. Its masks show what the layers see."""
NUM_TOKENS = 4
# Every token has other neighbours in this order, and none keeps its place.
_OTHER_ORDER = (2, 0, 3, 1)
# Options of attention that are read below, or do not change what is attended to.
_HARMLESS = {
    "alibi_slopes",
    "cache_position",
    "deterministic",
    "dropout",
    "is_causal",
    "needs_exact_keys",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "s_aux",
    "scaling",
    "sliding_window",
    "softcap",
    "use_cache",
}

# Kinds of layers in `layer_types` of transformers' configurations that keep other state than the keys and values of all
# tokens.
_KINDS_WITH_STATE = {
    "compressed_sparse_attention",
    "conv",
    "heavily_compressed_attention",
    "hybrid",
    "hybrid_sliding",
    "linear_attention",
    "mamba",
    "recurrent",
    "reference_sliding_attention",
}

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(token ids [T], positions [T]) -> hidden states [T, hidden]."""


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """The calls of attention in the order of the forward pass."""

    modules: tuple[nn.Module, ...]
    shapes: tuple[LayerShape, ...]
    token_ids: torch.Tensor
    """[NUM_TOKENS], at the positions from 0 on."""
    hidden: torch.Tensor
    """[NUM_TOKENS, hidden], the input of the head."""


@dataclass(slots=True)
class Recorder:
    """The hook of all modules while a model is probed."""

    calls: list[AttentionCall] = field(default_factory=list)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        own = call.value.to(call.query.dtype).transpose(1, 2)
        return own.repeat_interleave(call.query.shape[1] // own.shape[2], dim=2)


def check_kinds_of_layers(config: PreTrainedConfig) -> None:
    """Raises UnsupportedModelError if the configuration says that layers keep a state of their own."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    if found := [kind for kind in kinds if kind in _KINDS_WITH_STATE]:
        raise UnsupportedModelError(
            f"{len(found)} of its {len(kinds)} layers ({', '.join(sorted(set(found)))}) keep something else than keys "
            "and values, which Quire does not store"
        )


def check_calls(forward: Forward, recorder: Recorder, num_layers: int, device: torch.device) -> None:
    """Raises UnsupportedModelError for calls of attention that cannot be served, as `probe` does; any other error if
    the model does not run without values."""
    with _WithoutValues():
        run = _run(forward, recorder, *_first_tokens(NUM_TOKENS + 1, device))
    _shapes_of(run, num_layers)


class _WithoutValues(TorchDispatchMode):
    """Makes "meta" tensors give 1, or true, as a number; not endlessly, since a loop may wait for another value."""

    def __init__(self) -> None:
        super().__init__()
        self._num_left = 1000

    def __torch_dispatch__(  # pyrefly: ignore[bad-override-param-name]
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        if operation.overloadpacket in (aten.item, aten.is_nonzero, aten._local_scalar_dense) and args[0].is_meta:
            self._num_left -= 1
            if self._num_left >= 0:
                return torch.ones((), dtype=args[0].dtype).item()
        return operation(*args, **(kwargs or {}))


def probe(forward: Forward, recorder: Recorder, num_layers: int, vocab_size: int, device: torch.device) -> ProbedModel:
    """Runs the model three times.

    Args:
        forward: runs the base model, whose modules all have `recorder` as their hook.
        num_layers: the number of layers; each must attend, all equally often.

    Raises:
        UnsupportedModelError: it cannot be served.
    """
    tokens, positions = _first_tokens(vocab_size, device)
    try:
        first = _run(forward, recorder, tokens, positions)
    except Exception as error:
        if recorder.calls or isinstance(error, UnsupportedModelError | torch.OutOfMemoryError):
            raise
        # Attention of the model's own may fail, for lack of a mask, before it shows that ours was not called.
        reason = f"it fails before it attends through transformers' attention interface ({one_line(error)})"
        raise UnsupportedModelError(reason) from error
    shapes = _shapes_of(first, num_layers)
    other_start = tokens.clone()
    other_start[0] = (tokens[0] + NUM_TOKENS) % vocab_size
    rest = torch.arange(1, NUM_TOKENS, device=device)
    started = _run(forward, recorder, other_start, positions)
    if not _same(started.of_tokens(rest), first.of_tokens(rest)):
        raise UnsupportedModelError("tokens reach each other in it by more than attention (state-space, recurrent)")
    order = torch.tensor(_OTHER_ORDER, device=device)
    reordered = _run(forward, recorder, tokens[order], positions[order])
    if not _same(reordered.tensors, first.of_tokens(order)):
        raise UnsupportedModelError("it ignores the positions that it is given")
    if started.sinks != first.sinks or reordered.sinks != first.sinks:
        raise UnsupportedModelError("its attention sinks (s_aux) are not the same at each call")
    return ProbedModel(tuple(call.module for call in first.calls), shapes, tokens, first.hidden)


def _first_tokens(vocab_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions."""
    return torch.arange(1, NUM_TOKENS + 1, device=device) % vocab_size, torch.arange(NUM_TOKENS, device=device)


def _shapes_of(run: "_Run", num_layers: int) -> tuple[LayerShape, ...]:
    if not run.calls or len(run.calls) % num_layers:
        raise UnsupportedModelError(
            f"{len(run.calls)} of its {num_layers} layers attend through transformers' attention interface"
        )
    return tuple(map(_shape_of, run.calls))


def _run(forward: Forward, recorder: Recorder, tokens: torch.Tensor, positions: torch.Tensor) -> "_Run":
    recorder.calls = []
    hidden = forward(tokens, positions)
    return _Run(hidden, recorder.calls, [_sinks_of(call) for call in recorder.calls])


@dataclass(frozen=True, slots=True)
class _Run:
    """The results of one run of the model.

    Attributes:
        hidden: [T, hidden].
        sinks: copies of each call's sinks, since its tensors may change.
    """

    hidden: torch.Tensor
    calls: list[AttentionCall]
    sinks: list[tuple[float, ...] | None]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Results for each token, [T, ...] each: the arguments of attention, and the hidden states."""
        arguments = (tensor for call in self.calls for tensor in (call.query, call.key, call.value))
        return [self.hidden, *(tensor[0].transpose(0, 1) for tensor in arguments)]

    def of_tokens(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """The `tensors` of some tokens."""
        return [tensor[indices] for tensor in self.tensors]


def _same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(is_close, ours, theirs))


def is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to rounding: the sums of a product may depend on the values of other rows."""
    if a.shape != b.shape:
        return False
    tolerance = max(4 * torch.finfo(b.dtype).eps, 1e-4)
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def _shape_of(call: AttentionCall) -> LayerShape:
    options, head_dim = call.options, call.query.shape[-1]
    if call.key.shape[-1] != head_dim or call.key.shape[:3] != call.value.shape[:3]:
        raise UnsupportedModelError(
            f"its queries, keys and values are of shapes {list(call.query.shape)}, {list(call.key.shape)} and "
            f"{list(call.value.shape)}"
        )
    for name, value in options.items():
        empty = isinstance(value, torch.Tensor) and value.numel() == 0
        if name not in _HARMLESS and value is not None and value is not False and not empty:
            raise UnsupportedModelError(f"its attention takes {name}, which paged attention does not have")
    window = _window_of(call)
    if options.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        raise UnsupportedModelError("its attention is not causal")
    scale, soft_cap, slopes = options.get("scaling"), options.get("softcap"), options.get("alibi_slopes")
    return LayerShape(
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        head_dim=head_dim,
        value_dim=call.value.shape[-1],
        scale=head_dim**-0.5 if scale is None else float(scale),
        sliding_window=window,
        soft_cap=None if soft_cap is None else float(soft_cap),
        alibi_slopes=None if slopes is None else tuple(slopes),
        sinks=_sinks_of(call),
        needs_exact_keys=bool(options.get("needs_exact_keys")),
    )


def _sinks_of(call: AttentionCall) -> tuple[float, ...] | None:
    sinks, num_heads = call.options.get("s_aux"), call.query.shape[1]
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor):
        raise UnsupportedModelError(f"its attention sinks (s_aux) are a {type(sinks).__name__}; expected a tensor")
    if sinks.shape != (num_heads,):
        raise UnsupportedModelError(
            f"its attention sinks (s_aux) have shape {list(sinks.shape)}; expected one for each head, [{num_heads}]"
        )
    return tuple(sinks.float().tolist())


def _window_of(call: AttentionCall) -> int | None:
    """The window of the mask, which transformers' plain attention obeys; the options' window if there is no mask."""
    if call.mask is None:
        return call.options.get("sliding_window")
    if not isinstance(call.mask, ProbedMask) or not hasattr(call.mask, "window"):
        raise UnsupportedModelError("it makes an attention mask of its own")
    return call.mask.window()


class ProbedMask(torch.Tensor):
    """A mask that only knows its sliding window. `window` is missing if the model changed the mask.

    The window is computed when it is asked for: some models make masks for kinds of layers that they do not have.
    """

    window: Callable[[], int | None]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A slice of everything keeps the window."""
        part: Any = super().__getitem__(index)
        slices = index if isinstance(index, tuple) else (index,)
        if all(isinstance(each, slice) for each in slices) and part.shape == self.shape and hasattr(self, "window"):
            part.window = self.window
        return part


def probed_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    config: PreTrainedConfig,
    device: torch.device,
    **_: Any,
) -> torch.Tensor:
    """A mask function for transformers' registry."""
    mask: Any = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=device).as_subclass(ProbedMask)
    mask.window = lambda: window_of(mask_function, max_model_len_of(config))
    return mask


def window_of(mask_function: Callable[..., Any], num_positions: int) -> int | None:
    """The sliding window of a mask function of transformers: how many tokens a token sees, itself included.

    Args:
        mask_function: (batch index, head index, query positions, key positions) -> what is seen, by broadcasting.
        num_positions: the number of the model's positions.

    Returns:
        None if a token sees all tokens before it.

    Raises:
        UnsupportedModelError: any other pattern: both directions, chunks, masks that depend on the tokens.
    """
    keys = torch.arange(num_positions)

    def row(position: int) -> torch.Tensor:
        return torch.as_tensor(mask_function(0, 0, torch.tensor(position), keys)).expand(num_positions)

    # At least 1, so that a mask that hides everything differs from the expected first row below.
    width = max(int(row(num_positions - 1).sum()), 1)
    middle = num_positions // 2
    for position in {0, 1, width - 1, width, width + 1, middle, middle + 1, num_positions - 2, num_positions - 1}:
        if not 0 <= position < num_positions:
            continue
        expected = (keys <= position) & (keys > position - width)
        if not torch.equal(row(position).bool(), expected):
            raise UnsupportedModelError("its attention is neither causal nor a sliding window")
    return None if width == num_positions else width


# In order of precedence: some files name lengths of their training too.
_LENGTH_FIELDS = ("max_position_embeddings", "max_seq_len", "seq_length")

# Training lengths of model types with only ALiBi positions, whose configuration need not name one.
_TRAINED_LENGTHS = {"bloom": 2048}


def max_model_len_of(config: PreTrainedConfig) -> int:
    """The number of positions up to which a model can be served.

    In transformers, rotary embeddings that change with the length of the sequence change with the longest one of the
    batch: such a model is served up to the length at which they begin to change. Chunked attention is causal within the
    first chunk, attention to the best tokens as long as these are all tokens, and an attention temperature by position
    is 1 up to its first step.

    Raises:
        ConfigurationError: config.json names no length, or a length with which tokens see nothing or all differ.
    """
    text = config.get_text_config()
    is_chunked = "chunked_attention" in (getattr(text, "layer_types", None) or ())
    tunes = bool(getattr(text, "attn_temperature_tuning", False))
    _check_least(text, "index_topk", 1)
    _check_least(text, "attention_chunk_size", 1 if is_chunked else None)
    _check_least(text, "floor_scale", 2 if tunes else None)
    _check_least(text, "window_size", 1 if text.model_type == "gpt_neo" else None)
    rope = getattr(text, "rope_parameters", None) or {}
    sections = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    of_rope = [each.get("original_max_position_embeddings") for each in sections if each.get("rope_type") == "longrope"]
    named = [getattr(text, name, None) for name in _LENGTH_FIELDS]
    limits = [*_lengths(*named)[:1], *_lengths(*of_rope, getattr(text, "index_topk", None))]
    if is_chunked:
        limits += _lengths(getattr(text, "attention_chunk_size", None))
    if tunes:
        # Token number floor_scale, counted from 1, is the first with another temperature.
        limits += _lengths(getattr(text, "floor_scale", 0) - 1)
    if not limits:
        limits = _lengths(_TRAINED_LENGTHS.get(text.model_type))
    if not limits:
        raise ConfigurationError(f"config.json of model type {config.model_type!r} has no max_position_embeddings")
    return min(limits)


def _check_least(text: PreTrainedConfig, name: str, least: int | None) -> None:
    """Raises ConfigurationError for a number below `least`, which None leaves out."""
    value = getattr(text, name, None)
    if least is not None and isinstance(value, int) and value < least:
        raise ConfigurationError(f"config.json: {name} is {value}; expected an integer of at least {least}")


def _lengths(*values: object) -> list[int]:
    return [value for value in values if isinstance(value, int) and value > 0]


def one_line(error: Exception) -> str:
    """The class of an error and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
