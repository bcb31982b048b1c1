"""Configuration and weights of a model directory, as transformers reads them: local files, no code, no pickles."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from quire.model_directory import ModelDirectory
from quire.settings import ConfigurationError
from worker_svc.weights import Checkpoint, Placement, Progress


class UnsupportedModelError(Exception):
    """A model cannot be served through transformers' code. The message ends a sentence that names the model."""


@contextlib.contextmanager
def refusals(described: ModelDirectory) -> Iterator[None]:
    """Converts what transformers' code raises to a ConfigurationError of one line that names the model."""
    try:
        yield
    except (ConfigurationError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, UnsupportedModelError) else one_line(error)
        raise ConfigurationError(
            f"{described.architecture} of {described.path} cannot be served through transformers: {reason}"
        ) from error


def one_line(error: Exception) -> str:
    """The class of an error and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


# In order of precedence: some files name lengths of their training too.
_LENGTH_FIELDS = ("max_position_embeddings", "max_seq_len", "seq_length")

# Lengths of the training of model types with ALiBi alone, whose configuration need not name one.
_TRAINED_LENGTHS = {"bloom": 2048}


def max_model_len_of(config: PreTrainedConfig) -> int:
    """The number of positions up to which a model can be served.

    In transformers, rotary embeddings that change with the length of the sequence change with the longest one of the
    batch: such a model is served up to the length at which they begin to change. Chunked attention is causal within the
    first chunk, attention to the best tokens as long as these are all tokens, and an attention temperature by position
    is 1 up to its first step.

    Raises:
        ConfigurationError: config.json names no length.
    """
    text = config.get_text_config()
    named = [getattr(text, name, None) for name in _LENGTH_FIELDS]
    limits = [*_lengths(*named)[:1], *_lengths(*_rotary_limits(text), getattr(text, "index_topk", None))]
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        limits += _lengths(getattr(text, "attention_chunk_size", None))
    if getattr(text, "attn_temperature_tuning", False):
        # Token number floor_scale, counted from 1, is the first with another temperature.
        limits += _lengths(getattr(text, "floor_scale", 0) - 1)
    if not limits:
        limits = _lengths(_TRAINED_LENGTHS.get(text.model_type))
    if not limits:
        raise ConfigurationError(f"config.json of model type {config.model_type!r} has no max_position_embeddings")
    return min(limits)


def remembered_by_generate(config: PreTrainedConfig, windows: Sequence[int | None]) -> int | None:
    """The length up to which transformers' `generate` sees all that the model's masks show; None for any.

    Its cache keeps a window wherever the configuration names one, even where the masks ignore it.

    Args:
        windows: those of the masks, one for each attention call in the order of the layers.
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


def read_config(described: ModelDirectory) -> PreTrainedConfig:
    """config.json as transformers understands it.

    Raises:
        ConfigurationError: it is not a decoder alone, or needs code from the directory, which is never run.
    """
    with refusals(described):
        config = AutoConfig.from_pretrained(described.path, local_files_only=True, trust_remote_code=False)
    if config.is_encoder_decoder:
        raise ConfigurationError(f"{described.architecture} of {described.path} has an encoder; decoders are served")
    known = _model_class(config)
    if known is None or known.__name__ != described.architecture:
        raise ConfigurationError(
            f"architecture {described.architecture} of {described.path} is no causal language model of transformers: "
            f"its model type {config.model_type!r} is {'none' if known is None else known.__name__}"
        )
    return config


def load_pretrained(
    described: ModelDirectory, config: PreTrainedConfig, placement: Placement, progress: Progress | None
) -> PreTrainedModel:
    """The model with its weights, in memory of its own.

    Raises:
        ConfigurationError: a file that is missing or damaged, a tensor that is missing or misshapen.
    """
    Checkpoint.open(described.path, base_prefix="")
    model_class = _model_class(config)
    assert model_class is not None, "checked by read_config"
    with refusals(described), _quiet():
        # Its signature omits the pair that `output_loading_info` makes it return.
        loaded: Any = model_class.from_pretrained(
            described.path,
            config=config,
            dtype=placement.dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            # Reported below, with the tensor's name, which transformers' error lacks.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model: PreTrainedModel
    model, found = loaded
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise ConfigurationError(
            f"{described.path}: tensor {name} has shape {list(stored)}; config.json asks for {list(expected)}"
        )
    for name in sorted(found["missing_keys"]):
        raise ConfigurationError(f"{described.path}: tensor {name} is missing from the safetensors files")
    _place(model.eval().requires_grad_(False), placement.device)
    if progress is not None:
        total = sum(parameter.nbytes for parameter in model.parameters())
        progress("loading weights", total, total)
    return model


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    # A few model types have several classes.
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return known if isinstance(known, type) else None


def _place(model: PreTrainedModel, device: torch.device) -> None:
    """Copies the weights out of the mapped files, which may change while the model runs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, copy=True)
    nn.Module.to(model, device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses what transformers prints about the weights: it is raised as an error, or does not matter."""
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
