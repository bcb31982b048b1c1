"""Which layers see a window of the context only, as configurations of transformers say it."""

from worker_svc.models.config_fields import ConfigFields

FULL, SLIDING = "full_attention", "sliding_attention"


def uniform_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """`sliding_window` in all layers; null is the whole context."""
    return (_window(fields),) * num_layers


def mixed_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """`sliding_window` in the layers that `layer_types` names, or from layer `max_window_layers` on without it.

    Raises:
        ConfigurationError: a type of layer that is not known, or a sliding layer without a window.
    """
    window = _window(fields) if fields.flag("use_sliding_window", False) else None
    types = fields.values.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if index >= first else None for index in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or not all(each in (FULL, SLIDING) for each in types):
        raise fields.error("layer_types", types, f"{num_layers} of {FULL} and {SLIDING}")
    if window is None and SLIDING in types:
        raise fields.error("layer_types", types, f"{FULL} alone where no sliding window is used")
    return tuple(window if each == SLIDING else None for each in types)


def _window(fields: ConfigFields) -> int | None:
    return None if fields.values.get("sliding_window") is None else fields.integer("sliding_window")
