"""Models of which Quire has no family: transformers' own code, with paged attention in the place of theirs."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quire.model_directory import ModelDirectory
from worker_svc.layers.loadable import Placement
from worker_svc.model_input import ModelInput
from worker_svc.models.base import CausalLM, ModelShape
from worker_svc.models.transformers_attention import (
    PAGED,
    PROBED,
    CurrentStep,
    PagedLayer,
    choose_attention,
    clear_hook,
    set_hook,
)
from worker_svc.models.transformers_falcon import ADAPTERS
from worker_svc.models.transformers_loading import load_pretrained, max_model_len_of, read_config
from worker_svc.models.transformers_probe import ProbedModel, Recorder, probe
from worker_svc.models.transformers_refusals import UnsupportedModelError, refusals
from worker_svc.weights import Progress


def load_transformers_model(
    described: ModelDirectory, placement: Placement, progress: Progress | None = None
) -> "TransformersCausalLM":
    """Loads a model and finds out, by running it on a few tokens, whether it can be served.

    Raises:
        ConfigurationError: it cannot, or the directory is not as it should be.
    """
    config = read_config(described)
    max_model_len = max_model_len_of(config)
    whole = load_pretrained(described, config, placement, progress)
    with refusals(described), torch.inference_mode():
        if described.architecture in ADAPTERS:
            ADAPTERS[described.architecture](whole)
        model = SplitModel(whole)
        probed = _probe(model, placement.device)
        vocab_size = model.logits(probed.hidden).shape[-1]
    first = probed.shapes[0]
    shape = ModelShape(len(probed.shapes), first.num_kv_heads, first.head_dim, vocab_size, max_model_len)
    return TransformersCausalLM(described.architecture, shape, placement, model, probed)


class TransformersCausalLM(CausalLM):
    """A causal language model of transformers whose attention layers call paged attention."""

    def __init__(
        self, architecture: str, shape: ModelShape, placement: Placement, model: "SplitModel", probed: ProbedModel
    ) -> None:
        super().__init__(shape, placement)
        self.architecture = architecture
        self._model = model
        self._step = CurrentStep()
        for index, (module, layer) in enumerate(zip(probed.modules, probed.shapes, strict=True)):
            set_hook(module, PagedLayer(index, layer, self._step))
        choose_attention(model.whole, PAGED)
        self.eval()

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        self._step.inputs = inputs
        try:
            return self._model.hidden(inputs.token_ids, inputs.positions)
        finally:
            self._step.inputs = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


class SplitModel(nn.Module):
    """The base model, and what follows it: the head, and what some models do to logits.

    They are run apart, since only the lines that are sampled from need logits. In the whole model the place of the base
    model is taken by one that returns what it is given, so that all that follows is the model's own code.

    Raises:
        UnsupportedModelError: a model that is not made of these two, or whose positions cannot be given.
    """

    def __init__(self, whole: PreTrainedModel) -> None:
        super().__init__()
        base = whole.get_decoder()
        if base is whole:
            raise UnsupportedModelError("it has no base model")
        if "position_ids" not in inspect.signature(base.forward).parameters:
            raise UnsupportedModelError("it takes no positions")
        self.base = base
        self.whole = whole
        self._given = _GivenStates()
        name = next(name for name, module in whole.named_modules() if module is base)
        whole.set_submodule(name, self._given)

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """token_ids and positions [T] -> hidden states after the base model, [T, hidden]."""
        output = self.base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        self._given.output_class = type(output)
        return output.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden] -> [S, vocab_size] float32."""
        return self.whole(inputs_embeds=hidden[None], use_cache=False).logits[0].float()


class _GivenStates(nn.Module):
    """Returns its embeddings as the hidden states, in an output of the class that the base model gave last."""

    output_class: type[Any]

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        return self.output_class(last_hidden_state=inputs_embeds)


def _probe(model: SplitModel, device: torch.device) -> ProbedModel:
    recorder = Recorder()
    choose_attention(model.whole, PROBED)
    for module in model.modules():
        set_hook(module, recorder)
    text = model.whole.config.get_text_config()
    try:
        return probe(model.hidden, recorder, text.num_hidden_layers, text.vocab_size, device)
    finally:
        for module in model.modules():
            clear_hook(module)
