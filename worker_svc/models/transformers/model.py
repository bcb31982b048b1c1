"""Models that Quire does not implement itself: transformers' code, with paged attention in place of its attention.

Configuration and weights are read as transformers reads them, but only from local files: no code, no pickles.
"""

import contextlib
import copy
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from worker_svc.models.base import CacheLayer, CausalLM, ModelInput
from worker_svc.models.transformers.attention_adapters import adapt, served_attention
from worker_svc.models.transformers.paged import (
    HOOK,
    PAGED,
    PAGED_WITH_MASKS,
    PagedLayers,
    PoolShape,
    UnsupportedModelError,
    attend_by_hook,
    set_hook,
)
from worker_svc.models.transformers.probe import (
    PROBED,
    ProbedModel,
    Recorder,
    check_calls,
    check_kinds_of_layers,
    is_close,
    max_model_len_of,
    one_line,
    probe,
    probed_mask,
)
from worker_svc.quantized_weights import with_quantized_weights
from worker_svc.weights import Checkpoint, Placement, Progress, StoredTensor

_logger = logging.getLogger(__name__)


def load_transformers_model(
    described: ModelDirectory, placement: Placement, progress: Progress | None = None
) -> "TransformersCausalLM":
    """Loads a model and checks, by running it on a few tokens, whether it can be served.

    Raises:
        ConfigurationError: it cannot be served, or the directory is damaged.
    """
    config = read_config(described)
    with refusals(described), _quiet(), torch.inference_mode():
        check_kinds_of_layers(config)
        _check_without_weights(config, described.architecture)
    whole = load_pretrained(described, config, placement, progress or (lambda _done, _total: None))
    with refusals(described), _quiet(), torch.inference_mode():
        adapt(whole, described.architecture)
        model = SplitModel(whole)
        probed = _probe(model, placement.device)
        pool = PoolShape.of(probed.shapes)
        remembered = remembered_by_generate(config, [shape.sliding_window for shape in probed.shapes])
        limits = (max_model_len_of(config), remembered)
        vocab_size = model.logits(probed.hidden).shape[-1]
    layers = PagedLayers(probed.modules, probed.shapes, pool, placement.device)
    return TransformersCausalLM(
        described.architecture,
        model,
        layers,
        placement,
        num_layers=len(probed.shapes),
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        cache_layers=[CacheLayer(pool.num_kv_heads, pool.head_dim, shape.sliding_window) for shape in probed.shapes],
        vocab_size=vocab_size,
        max_model_len=min(limit for limit in limits if limit is not None),
    )


class TransformersCausalLM(CausalLM):
    """A causal language model of transformers whose attention layers call paged attention."""

    def __init__(
        self, architecture: str, model: "SplitModel", layers: PagedLayers, placement: Placement, **sizes: Any
    ) -> None:
        """`sizes` are the sizes that `CausalLM` takes."""
        super().__init__(placement, **sizes)
        self.architecture = architecture
        self._model = model
        self._layers = layers
        for module in layers.modules:
            set_hook(module, layers)
        choose_attention(model.whole, served_attention(architecture))
        self.eval()

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        with self._layers.step(inputs):
            return self._model.hidden(inputs.token_ids, inputs.positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


class SplitModel(nn.Module):
    """The base model and the rest: the head, and changes of logits in some models.

    They run separately, since only sampled positions need logits. In the whole model the base model is replaced by a
    module that returns its input, so that all code after it is the model's own.

    Raises:
        UnsupportedModelError: a model that does not consist of these two.
    """

    def __init__(self, whole: PreTrainedModel) -> None:
        super().__init__()
        base = _base_of(whole)
        self.base = base
        self.whole = whole
        self.takes_positions = "position_ids" in inspect.signature(base.forward).parameters
        self._given = _GivenStates()
        name = next(name for name, module in whole.named_modules() if module is base)
        whole.set_submodule(name, self._given)

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """token_ids and positions [T], or None if the model makes them -> hidden states after the base model,
        [T, hidden]."""
        # Models without positions, or with ALiBi, take none. Probing refuses others that depend on a token's index.
        given = {"position_ids": positions[None]} if self.takes_positions and positions is not None else {}
        output = self.base(input_ids=token_ids[None], use_cache=False, **given)
        self._given.output_class = type(output)
        return output.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden] -> [S, vocab_size] float32."""
        return self.whole(inputs_embeds=hidden[None], use_cache=False).logits[0].float()


class _GivenStates(nn.Module):
    """Returns its embeddings as the hidden states, in an output of the class that the base model returned last."""

    output_class: type[Any]

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        return self.output_class(last_hidden_state=inputs_embeds)


def _base_of(whole: PreTrainedModel) -> PreTrainedModel:
    """The base model; `get_decoder` does not find it in every model."""
    found = whole.get_decoder()
    if isinstance(found, PreTrainedModel) and found is not whole:
        return found
    parts = [part for part in whole.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise UnsupportedModelError("it has no base model")
    return parts[0]


def _check_without_weights(config: PreTrainedConfig, architecture: str) -> None:
    """Raises UnsupportedModelError if calls of attention show, before weights are read, that it cannot be served."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    device = torch.device("meta")
    try:
        with device:
            whole = model_class(copy.deepcopy(config)).eval().bfloat16()
        adapt(whole, architecture)
        model = SplitModel(whole)
        with _recorder_of(model) as (recorder, num_layers):
            check_calls(model.hidden, recorder, num_layers, device)
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Some models compute with values, which these tensors lack. The later run with weights reports the fault.
        _logger.debug("%s does not run without weights: %s", architecture, one_line(error))


def _probe(model: SplitModel, device: torch.device) -> ProbedModel:
    with _recorder_of(model) as (recorder, num_layers):
        vocab_size = model.whole.config.get_text_config().vocab_size
        probed = probe(model.hidden, recorder, num_layers, vocab_size, device)
        if model.takes_positions and not is_close(model.hidden(probed.token_ids, None), probed.hidden):
            raise UnsupportedModelError("it does not count positions from 0")
        return probed


@contextlib.contextmanager
def _recorder_of(model: SplitModel) -> Iterator[tuple[Recorder, int]]:
    """The hook of all modules, and the number of layers."""
    text = model.whole.config.get_text_config()
    if not hasattr(text, "num_hidden_layers"):
        raise UnsupportedModelError("its configuration does not say how many layers it has")
    recorder = Recorder()
    choose_attention(model.whole, PROBED)
    modules = list(model.modules())
    for module in modules:
        set_hook(module, recorder)
    try:
        yield recorder, text.num_hidden_layers
    finally:
        for module in modules:
            delattr(module, HOOK)


def choose_attention(model: PreTrainedModel, name: str) -> None:
    """Makes the model's layers call the function of this name: PAGED, PAGED_WITH_MASKS or PROBED."""
    for known in (PAGED, PAGED_WITH_MASKS, PROBED):
        AttentionInterface.register(known, attend_by_hook)
    AttentionMaskInterface.register(PAGED_WITH_MASKS, _empty_mask)
    AttentionMaskInterface.register(PROBED, probed_mask)
    model.config._attn_implementation = name


def _empty_mask(*, device: torch.device, **_: Any) -> torch.Tensor:
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


@contextlib.contextmanager
def refusals(described: ModelDirectory) -> Iterator[None]:
    """Converts errors of transformers' code to a ConfigurationError of one line that names the model."""
    try:
        yield
    except (ConfigurationError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, UnsupportedModelError) else one_line(error)
        raise ConfigurationError(
            f"{described.architecture} of {described.path} cannot be served through transformers: {reason} "
            "(docs/models.md says which models run)"
        ) from error


def remembered_by_generate(config: PreTrainedConfig, windows: Sequence[int | None]) -> int | None:
    """The length up to which transformers' `generate` sees all tokens that the model's masks show; None if unlimited.

    Its cache keeps only a window if the configuration names one, even if the masks ignore it.

    Args:
        windows: the masks' windows, one for each attention call in the order of the layers.
    """
    caches = DynamicCache(config=config).layers
    per_layer = max(len(windows) // max(len(caches), 1), 1)
    forgotten: list[int] = []
    for index, window in enumerate(windows[: per_layer * len(caches)]):
        kept = getattr(caches[index // per_layer], "sliding_window", None)
        if kept is not None and (window is None or window > kept):
            forgotten.append(kept)
    return min(forgotten, default=None)


def read_config(described: ModelDirectory) -> PreTrainedConfig:
    """config.json as transformers understands it.

    Raises:
        ConfigurationError: it is not a decoder-only model, or needs code from the directory, which is never run.
    """
    with refusals(described):
        if described.path.is_file() or described.whole is not None:
            config = AutoConfig.for_model(**described.config)
        else:
            config = AutoConfig.from_pretrained(described.path, local_files_only=True, trust_remote_code=False)
    if config.is_encoder_decoder:
        raise ConfigurationError(f"{described.architecture} of {described.path} has an encoder; decoders are served")
    # A few model types have several classes.
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    known = known if isinstance(known, type) else None
    if known is None or known.__name__ != described.architecture:
        raise ConfigurationError(
            f"architecture {described.architecture} of {described.path} is no causal language model of transformers: "
            f"its model type {config.model_type!r} is {'none' if known is None else known.__name__}"
        )
    return config


def load_pretrained(
    described: ModelDirectory, config: PreTrainedConfig, placement: Placement, progress: Progress
) -> PreTrainedModel:
    """The model with its weights, in memory of its own.

    Raises:
        ConfigurationError: a file that is missing or damaged, a tensor that is missing or misshapen, or would be
            ignored in a GGUF file.
    """
    checkpoint = with_quantized_weights(Checkpoint.of_model(described), described)
    # Quantized tensors are read as floating-point numbers, so transformers must not quantize.
    vars(config).pop("quantization_config", None)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with refusals(described), _quiet():
        model, found = model_class.from_pretrained(
            None,
            state_dict=_lazy_tensors(checkpoint.tensors, progress),
            config=config,
            dtype=placement.dtype,
            attn_implementation="eager",
            # Code of the Hugging Face Hub, which transformers 5.25 loads by default.
            use_kernels=False,
            # Reported below, with the tensor's name, which transformers' error lacks.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise ConfigurationError(
            f"{described.path}: tensor {name} has shape {list(stored)}; config.json asks for {list(expected)}"
        )
    for name in sorted(found["missing_keys"]):
        raise checkpoint.missing(name)
    if described.path.is_file():
        for name in sorted(found["unexpected_keys"]):
            raise checkpoint.unused(name)
    _place(model.eval().requires_grad_(False), placement.device)
    # Tensors that the model does not have are never read.
    num_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    progress(num_bytes, num_bytes)
    return model


def _lazy_tensors(tensors: Mapping[str, StoredTensor], progress: Progress) -> dict[str, "_LazyTensor"]:
    """The tensors of a checkpoint. Each is read, in several threads, and counted when it is needed."""
    done, total = 0, sum(tensor.num_bytes for tensor in tensors.values())
    counting = threading.Lock()
    progress(done, total)

    def count(num_bytes: int) -> None:
        nonlocal done
        with counting:
            done += num_bytes
            progress(done, total)

    return {name: _LazyTensor(tensor, count) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class _LazyTensor:
    """A tensor in the form in which transformers reads safetensors: it is indexed by `...` to read it."""

    stored: StoredTensor
    count: Callable[[int], None]

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        tensor = self.stored.read()[index]
        self.count(self.stored.num_bytes)
        return tensor


def _place(model: PreTrainedModel, device: torch.device) -> None:
    """Copies the weights out of the mapped files, which may change while the model runs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, copy=True)
    nn.Module.to(model, device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses transformers' messages about the weights, which are raised as errors or do not matter, and its advice
    to install packages that Quire would not use."""
    verbosity = transformers_logging.get_verbosity()
    has_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bar:
            transformers_logging.enable_progress_bar()
