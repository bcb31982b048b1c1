"""Configuration and weights of a model directory, as transformers reads them: local files, no code, no pickles."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from quire.model_directory import ModelDirectory
from quire.settings import ConfigurationError
from worker_svc.layers.loadable import Placement
from worker_svc.models.transformers_refusals import refusals
from worker_svc.weights import Checkpoint, Progress


def read_config(described: ModelDirectory) -> PreTrainedConfig:
    """config.json as transformers understands it.

    Raises:
        ConfigurationError: no decoder alone, or one that needs code from the directory, which is never run.
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
    assert model_class is not None, "read_config has seen it"
    with refusals(described), _quiet():
        # Its signature does not tell of the pair that `output_loading_info` makes it return.
        loaded: Any = model_class.from_pretrained(
            described.path,
            config=config,
            dtype=placement.dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            # Reported below: what transformers raises does not name the tensor.
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
    """Copies the weights: transformers leaves them in the mapped files, which may change while the model runs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, copy=True)
    nn.Module.to(model, device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What transformers would print about the weights is raised as an error, or does not matter."""
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
