"""How long a sequence may be for a model to be served as transformers would run it."""

from collections.abc import Sequence

from transformers import DynamicCache, PreTrainedConfig

from quire.settings import ConfigurationError

# In the order in which they count: some files carry lengths of their training besides.
_LENGTH_FIELDS = ("max_position_embeddings", "max_seq_len", "seq_length")

# Model types with ALiBi alone whose configuration need not name a length: that of their training.
_TRAINED_LENGTHS = {"bloom": 2048}


def max_model_len_of(config: PreTrainedConfig) -> int:
    """Positions that the model knows.

    Rotary embeddings that change with the length of the sequence change in transformers with the longest of the batch:
    such a model is served up to the length at which they begin to. Attention in chunks is causal within the first one,
    attention to the best tokens while these are all; a temperature of attention by position is 1 up to its first step.

    Raises:
        ConfigurationError: config.json does not say.
    """
    text = config.get_text_config()
    named = [getattr(text, name, None) for name in _LENGTH_FIELDS]
    limits = [*_lengths(*named)[:1], *_lengths(*_rotary_limits(text), getattr(text, "index_topk", None))]
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        limits += _lengths(getattr(text, "attention_chunk_size", None))
    if getattr(text, "attn_temperature_tuning", False):
        # Token number floor_scale, counted from 1, is the first with another one.
        limits += _lengths(getattr(text, "floor_scale", 0) - 1)
    if not limits:
        limits = _lengths(_TRAINED_LENGTHS.get(text.model_type))
    if not limits:
        raise ConfigurationError(f"config.json of model type {config.model_type!r} has no max_position_embeddings")
    return min(limits)


def remembered_by_generate(config: PreTrainedConfig, windows: Sequence[int | None]) -> int | None:
    """The length up to which `generate` of transformers sees all that the model's masks let it see; None for any.

    Its cache keeps a window wherever the configuration names one, also where the masks do not heed it.

    Args:
        windows: what the masks show, by attention call in the order of the layers.
    """
    caches = DynamicCache(config=config).layers
    per_layer = max(len(windows) // max(len(caches), 1), 1)
    forgotten: list[int] = []
    for index, window in enumerate(windows[: per_layer * len(caches)]):
        kept = getattr(caches[index // per_layer], "sliding_window", None)
        if kept is not None and (window is None or window > kept):
            forgotten.append(kept)
    return min(forgotten, default=None)


def _rotary_limits(text: PreTrainedConfig) -> list[object]:
    rope = getattr(text, "rope_parameters", None) or {}
    sections = (rope, *(each for each in rope.values() if isinstance(each, dict)))
    return [
        section.get("original_max_position_embeddings")
        for section in sections
        if section.get("rope_type") == "longrope"
    ]


def _lengths(*values: object) -> list[int]:
    return [value for value in values if isinstance(value, int) and value > 0]
