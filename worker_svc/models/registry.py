"""Loads a model from its directory."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from quire_kernels import ops
from quire_kernels.packed_weight import CodedWeight, Coding, Quantization
from worker_svc.layers.embedding_norm import TiedHead
from worker_svc.layers.products import check_quantization
from worker_svc.models.base import CausalLM, NativeCausalLM
from worker_svc.models.decoder import DecoderFamily
from worker_svc.models.families import DENSE
from worker_svc.models.families_with_experts import WITH_EXPERTS
from worker_svc.models.families_with_latents import WITH_LATENTS
from worker_svc.models.families_with_shared_keys import WITH_SHARED_KEYS
from worker_svc.models.families_with_states import WITH_STATES
from worker_svc.models.gpt2_opt import GPT2LMHeadModel, OPTForCausalLM
from worker_svc.parallel.ranks import ALONE, Ranks
from worker_svc.quantized_weights import codings_of, with_mxfp4_experts, with_quantized_weights
from worker_svc.weights import Checkpoint, Loadable, Placement, Progress, TensorSpec

Family = type[GPT2LMHeadModel] | type[OPTForCausalLM] | DecoderFamily
"""A family of models that Quire implements itself."""

DECODERS: dict[str, DecoderFamily] = {**DENSE, **WITH_EXPERTS, **WITH_LATENTS, **WITH_SHARED_KEYS, **WITH_STATES}

FAMILIES: dict[str, Family] = {
    GPT2LMHeadModel.architecture: GPT2LMHeadModel,
    OPTForCausalLM.architecture: OPTForCausalLM,
    **DECODERS,
}

HEAD = "lm_head.weight"
_MAX_LAYERS = 10_000

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_model(
    directory: Path | ModelDirectory,
    *,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks = ALONE,
    progress: Progress | None = None,
    model_impl: str = "auto",
    quantization: Quantization = Quantization.NONE,
    max_model_len: int | None = None,
    head: Loadable | None = None,
) -> CausalLM:
    """Reads the weights of `directory`, and its configuration if it is not read yet.

    Args:
        ranks: The ranks that share the model; only the part of this one is read.
        model_impl: whose code runs the model: "native" is Quire's, "transformers" theirs, "auto" Quire's if it has a
            family for the model.
        quantization: how linear layers round their weights; transformers' code takes none only.
        max_model_len: the length of the longest sequence; None for all positions that have the same rotation.
        head: loaded in the place of the output layer, of a model that gives no logits.

    Raises:
        ConfigurationError: the model of the directory cannot be served.
    """
    described = directory if isinstance(directory, ModelDirectory) else ModelDirectory.open(directory)
    _check_depth(described)
    placement = Placement(device, dtype, ranks, quantization, max_model_len)
    family = FAMILIES.get(described.architecture)
    if model_impl == "transformers" or (model_impl == "auto" and family is None):
        _check_for_transformers(described, placement)
        return _load_by_transformers(described, placement, progress)
    if family is None:
        raise ConfigurationError(
            f"architecture {described.architecture} of {described.path} is not one of Quire's own, "
            f"{', '.join(FAMILIES)}; --model-impl is native, use auto or transformers"
        )
    check_quantization(quantization, device, dtype)
    return _load_native(family, described, placement, progress, head)


def _check_depth(described: ModelDirectory) -> None:
    """Before the layers are made, which a damaged configuration could ask for without end."""
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        depth = described.config.get(name)
        if isinstance(depth, int) and depth > _MAX_LAYERS:
            raise ConfigurationError(
                f"{described.path}: {name} is {depth!r:.80}; models of at most {_MAX_LAYERS} layers are served"
            )


def _check_for_transformers(described: ModelDirectory, placement: Placement) -> None:
    """Raises ConfigurationError for settings that transformers' code does not support."""
    if placement.ranks.size > 1:
        raise ConfigurationError(
            f"{described.architecture} runs through transformers' code, which is not split over ranks; "
            "--tensor-parallel-size must be 1"
        )
    if placement.quantization is not Quantization.NONE:
        raise ConfigurationError(
            f"{described.architecture} runs through transformers' code, whose layers are not quantized; "
            f"--quantization is {placement.quantization.value} and must be none"
        )


def _load_native(
    family: Family,
    described: ModelDirectory,
    placement: Placement,
    progress: Progress | None,
    head: Loadable | None,
) -> NativeCausalLM:
    """All headers are checked against the configuration before any weight is read."""
    model = family.from_config(described.config, placement)
    checkpoint = Checkpoint.of_model(described, base_prefix=family.base_prefix)
    if isinstance(family, DecoderFamily):
        checkpoint = checkpoint.with_names(family.renamed)
    checkpoint = checkpoint.with_experts_apart(described.config.get("hidden_size"))
    checkpoint = with_mxfp4_experts(checkpoint, described)
    rounds_inputs = ops.has_fp8_products(placement.device, placement.dtype)
    quantized = with_quantized_weights(checkpoint, described, has_fp8_products=rounds_inputs)
    checkpoint = _with_embedding(model, quantized)
    if placement.quantization is Quantization.INT8_DYNAMIC and Coding.FP8.value in codings_of(checkpoint):
        raise ConfigurationError(
            f"{described.path}: weights are in FP8, which have no products with int8; "
            "--quantization is int8-dynamic, use none"
        )
    if head is not None:
        model.head = head
        checkpoint = checkpoint.with_tensors({name: each for name, each in checkpoint.tensors.items() if name != HEAD})
    if _has_head_of_its_own(model, checkpoint):
        model = family.from_config({**described.config, "tie_word_embeddings": False}, placement)
    layers = [module for module in model.modules() if isinstance(module, Loadable)]
    # Checked one by one first: a damaged configuration may need more tensors than memory holds.
    checkpoint.check(spec for layer in layers for spec in layer.tensors())
    specs = [spec for layer in layers for spec in layer.tensors()]
    checkpoint.check_all_used(specs)
    tensors = checkpoint if progress is None else _Watched(checkpoint, specs, progress)
    for layer in layers:
        layer.load(tensors)
    return model.eval()


class _Watched:
    """The tensors of a checkpoint; progress is reported after each that is read."""

    def __init__(self, checkpoint: Checkpoint, specs: Iterable[TensorSpec], progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._left = {spec.name: checkpoint.num_bytes(spec) for spec in specs}
        self._total = sum(self._left.values())
        self._progress = progress

    def read(self, spec: TensorSpec) -> torch.Tensor:
        self._count(spec)
        return self._checkpoint.read(spec)

    def coded(self, spec: TensorSpec) -> CodedWeight | None:
        coded = self._checkpoint.coded(spec)
        if coded is not None:
            self._count(spec)
        return coded

    def _count(self, spec: TensorSpec) -> None:
        """A coded weight that cannot be used as it is, is read once more."""
        if self._left.pop(spec.name, None) is not None:
            self._progress(self._total - sum(self._left.values()), self._total)


def _with_embedding(model: NativeCausalLM, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with the shared matrix of a tied model under the embedding's name. `safetensors.torch.save_model`
    keeps only the first of its names, which is the head's; transformers accepts either."""
    if not isinstance(model.head, TiedHead):
        return checkpoint
    embedding = model.head.embedding_spec.name
    return checkpoint.renamed(HEAD, embedding) if checkpoint.has(HEAD) and not checkpoint.has(embedding) else checkpoint


def _has_head_of_its_own(model: NativeCausalLM, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has an output matrix that differs from the embedding, although the configuration says that
    they are tied. Then the configuration is wrong, as after a training that untied them; transformers agrees."""
    if not isinstance(model.head, TiedHead) or not checkpoint.has(HEAD):
        return False
    embedding = model.head.embedding_spec
    checkpoint.check([embedding])
    return not torch.equal(checkpoint.read(TensorSpec(HEAD, embedding.shape)), checkpoint.read(embedding))


def _load_by_transformers(described: ModelDirectory, placement: Placement, progress: Progress | None) -> CausalLM:
    try:
        # Imported here because the import takes seconds, and Quire's own families do not need it.
        from worker_svc.models.transformers.model import load_transformers_model
    except ImportError as error:
        raise ConfigurationError(
            f"{described.architecture} runs through transformers 5 or later, which cannot be imported: {error}; "
            "pip install 'quire-llm[transformers]'"
        ) from error
    return load_transformers_model(described, placement, progress)


def resolve_dtype(config: Mapping[str, Any], requested: str, device: torch.device) -> torch.dtype:
    """The dtype to run in.

    Args:
        requested: a name of DTYPES, or "auto" for the dtype in config.json (float32 if it has none). "auto" turns
            float16 into bfloat16 on a CPU, where float16 is slow and overflows for numbers that bfloat16 holds.

    Raises:
        ConfigurationError: a dtype that is not served.
    """
    name = requested
    if requested == "auto":
        name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        if name == "float16" and device.type == "cpu":
            name = "bfloat16"
        if name == "float64":
            name = "float32"
    if name not in DTYPES:
        raise ConfigurationError(f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return DTYPES[name]
