"""Models without a family of Quire's own: transformers' code, with paged attention instead of theirs."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from quire.model_directory import ModelDirectory
from worker_svc.models.base import CausalLM, ModelInput, ModelShape
from worker_svc.models.transformers.adapters import adapt, served_attention
from worker_svc.models.transformers.load import (
    UnsupportedModelError,
    load_pretrained,
    max_model_len_of,
    read_config,
    refusals,
    remembered_by_generate,
)
from worker_svc.models.transformers.paged import (
    PAGED,
    PAGED_WITH_MASKS,
    PagedLayers,
    PoolShape,
    attend_by_hook,
    clear_hook,
    set_hook,
)
from worker_svc.models.transformers.probe import PROBED, ProbedModel, Recorder, probe, probed_mask
from worker_svc.weights import Placement, Progress


def load_transformers_model(
    described: ModelDirectory, placement: Placement, progress: Progress | None = None
) -> "TransformersCausalLM":
    """Loads a model and checks, by running it on a few tokens, whether it can be served.

    Raises:
        ConfigurationError: it cannot be served, or the directory is damaged.
    """
    config = read_config(described)
    whole = load_pretrained(described, config, placement, progress)
    with refusals(described), torch.inference_mode():
        adapt(whole, described.architecture)
        model = SplitModel(whole)
        probed = _probe(model, placement.device)
        pool = PoolShape.of(probed.shapes)
        max_model_len = _max_model_len(config, probed)
        vocab_size = model.logits(probed.hidden).shape[-1]
    shape = ModelShape(len(probed.shapes), pool.num_kv_heads, pool.head_dim, vocab_size, max_model_len)
    layers = PagedLayers(probed.modules, probed.shapes, pool, placement.device)
    return TransformersCausalLM(described.architecture, shape, placement, model, layers)


class TransformersCausalLM(CausalLM):
    """A causal language model of transformers whose attention layers call paged attention."""

    def __init__(
        self, architecture: str, shape: ModelShape, placement: Placement, model: "SplitModel", layers: PagedLayers
    ) -> None:
        super().__init__(shape, placement)
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
    """The base model and the rest: the head, and what some models do to logits.

    They run separately, since only tokens that are sampled from need logits. In the whole model the base model is
    replaced by a module that returns its input, so that all that follows is the model's own code.

    Raises:
        UnsupportedModelError: a model that does not consist of these two.
    """

    def __init__(self, whole: PreTrainedModel) -> None:
        super().__init__()
        base = _base_of(whole)
        self.base = base
        self.whole = whole
        self._takes_positions = "position_ids" in inspect.signature(base.forward).parameters
        self._given = _GivenStates()
        name = next(name for name, module in whole.named_modules() if module is base)
        whole.set_submodule(name, self._given)

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """token_ids and positions [T] -> hidden states after the base model, [T, hidden]."""
        # Models without positions, or with ALiBi, take none. Probing refuses others that go by a token's index.
        given = {"position_ids": positions[None]} if self._takes_positions else {}
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
    """The base model; `get_decoder` does not find that of every model."""
    found = whole.get_decoder()
    if isinstance(found, PreTrainedModel) and found is not whole:
        return found
    parts = [part for part in whole.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise UnsupportedModelError("it has no base model")
    return parts[0]


def _max_model_len(config: PreTrainedConfig, probed: ProbedModel) -> int:
    named = max_model_len_of(config)
    remembered = remembered_by_generate(config, [shape.sliding_window for shape in probed.shapes])
    return named if remembered is None else min(named, remembered)


def _probe(model: SplitModel, device: torch.device) -> ProbedModel:
    text = model.whole.config.get_text_config()
    if not hasattr(text, "num_hidden_layers"):
        raise UnsupportedModelError("its configuration does not say how many layers it has")
    recorder = Recorder()
    choose_attention(model.whole, PROBED)
    modules = list(model.modules())
    for module in modules:
        set_hook(module, recorder)
    try:
        return probe(model.hidden, recorder, text.num_hidden_layers, text.vocab_size, device)
    finally:
        for module in modules:
            clear_hook(module)


def choose_attention(model: PreTrainedModel, name: str) -> None:
    """Makes the model's layers call the function of this name: PAGED, PAGED_WITH_MASKS or PROBED."""
    for known in (PAGED, PAGED_WITH_MASKS, PROBED):
        AttentionInterface.register(known, attend_by_hook)
    AttentionMaskInterface.register(PAGED_WITH_MASKS, _empty_mask)
    AttentionMaskInterface.register(PROBED, probed_mask)
    model.config._attn_implementation = name


def _empty_mask(*, device: torch.device, **_: Any) -> torch.Tensor:
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)
