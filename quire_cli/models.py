"""`quire models`: the models on this machine, and the memory that each needs."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.model_files.architectures import ENCODERS, RANKERS
from quire.model_files.embedding_files import EmbeddingFiles
from quire.model_files.gguf_header import SUFFIX, GgufHeader, part_names
from quire.model_files.model_directory import EMBEDDING_MODULES, ModelDirectory, is_gguf, weight_files
from quire.model_files.model_source import resolve_model
from quire.model_files.progress import of_bytes
from quire.model_files.state_sizes import state_sizes
from quire.runtime.settings import ConfigurationError, load_settings, setting

PROGRAM = "quire models"
_FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_KV_TOKENS = 1000
_GEMMA_2 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
# The defaults of transformers for fields that config.json leaves out, as in the published Gemma 3.
_LEFT_OUT: Mapping[str, Mapping[str, int]] = {
    "GemmaForCausalLM": {"head_dim": 256},
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_2,
    "Gemma3nForCausalLM": {**_GEMMA_2, "num_key_value_heads": 2},
    "Qwen3ForCausalLM": {"head_dim": 128},
}
_DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
# Families whose tokens have one line in the pool, which is key and value, with the defaults of its two parts.
_LATENTS: Mapping[str, Mapping[str, int]] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "MiniCPM3ForCausalLM": {"kv_lora_rank": 256, "qk_rope_head_dim": 32},
    "PLMForCausalLM": _DEEPSEEK,
    "YoutuForCausalLM": _DEEPSEEK,
}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class ModelsFlags:
    """Lists the models on this machine: the embedded one, models in the hub's cache, and models in directories."""

    directories: tuple[Path, ...] = setting((), "look in these directories, too", metavar="DIR", positional=True)
    json: bool = setting(False, "print JSON", variable="QUIRE_MODELS_JSON")


@dataclass(frozen=True, slots=True)
class _Model:
    """One model, or the reason why it cannot be read.

    Attributes:
        model: The value for `--model`.
        format: The dtype of most weights, or a GGUF file's name for its types.
        weight_bytes: Size of the files, and in memory of weights that stay as in the file.
        kv_bytes: Bytes of 1,000 tokens in the KV pool, in the dtype that is served by default.
        state_bytes: Bytes of the state of a sequence, if layers keep one.
    """

    model: str
    path: str
    architecture: str | None = None
    format: str | None = None
    parameters: int | None = None
    weight_bytes: int | None = None
    kv_bytes: int | None = None
    state_bytes: int | None = None
    problem: str | None = None


def main(argv: Sequence[str]) -> int:
    """Prints one line for each model."""
    flags = load_settings(ModelsFlags, argv, os.environ, program=PROGRAM)
    models = [_read(name, path) for name, path in _found(flags.directories)]
    if flags.json:
        print(json.dumps([dataclasses.asdict(model) for model in models], indent=2))
        return 0
    width = max(len(model.model) for model in models)
    print(
        f"{'model':<{width}}  {'format':<8}  {'parameters':>14}  {'weights':>10}  {'KV of 1,000 tokens':>18}  "
        f"{'state':>10}"
    )
    for model in models:
        if model.problem is not None:
            print(f"{model.model:<{width}}  {model.problem}")
            continue
        sizes = [
            "-" if size is None else " ".join(of_bytes(size, size)[1:])
            for size in (model.weight_bytes, model.kv_bytes, model.state_bytes)
        ]
        print(
            f"{model.model:<{width}}  {model.format:<8}  {model.parameters:>14,}  {sizes[0]:>10}  {sizes[1]:>18}  "
            f"{sizes[2]:>10}"
        )
    return 0


def _found(directories: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Names and paths of directories and files that look like models."""
    yield "quire-tiny", resolve_model(None)
    for directory in directories:
        if not directory.is_dir():
            raise ConfigurationError(f"{directory} is not a directory")
        yield from ((str(path), path) for path in _models_below(directory))
    try:
        from huggingface_hub import constants
    except ModuleNotFoundError:
        return
    for repository in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        revisions = {ref.read_text(): f"@{ref.name}" for ref in (repository / "refs").glob("*")}
        for snapshot in sorted((repository / "snapshots").glob("*")):
            revision = revisions.get(snapshot.name, f"@{snapshot.name}").replace("@main", "")
            for path in _models_below(snapshot):
                file = "" if path == snapshot else f"/{path.relative_to(snapshot)}"
                yield f"{name}{file}{revision}", path


def _models_below(directory: Path) -> Iterator[Path]:
    for path in sorted(path for path in directory.rglob("*") if path.name == "config.json" or path.suffix == SUFFIX):
        if path.name == "config.json":
            is_module = (path.parent.parent / EMBEDDING_MODULES).is_file()
            if any(path.parent.glob("*.safetensors")) and not is_module:
                yield path.parent
        elif part_names(path.name)[0] == path.name:
            yield path


def _read(name: str, path: Path) -> _Model:
    try:
        described, files = ModelDirectory.open(path), weight_files(path)
        EmbeddingFiles.of(described)  # refuses modules that are not supported
        format, parameters = _of_gguf(path) if is_gguf(path) else _of_safetensors(files)
        size = sum(file.stat().st_size for file in files)
        kv_bytes = None if described.architecture in ENCODERS | RANKERS else _kv_bytes(described)
        of_states = state_sizes(described.architecture, described.config)
        state_bytes = None if of_states is None else of_states.num_bytes
        return _Model(name, str(path), described.architecture, format, parameters, size, kv_bytes, state_bytes)
    except (ConfigurationError, OSError) as error:
        return _Model(name, str(path), problem=str(error))


def _of_gguf(path: Path) -> tuple[str, int]:
    """The file's name for its types, and the number of elements of all tensors."""
    header = GgufHeader.read(path)
    try:
        from gguf import LlamaFileType

        format = (
            LlamaFileType(header.metadata.get("general.file_type")).name.removeprefix("MOSTLY_").removeprefix("ALL_")
        )
    except (ModuleNotFoundError, ValueError):
        format = "GGUF"
    return format, sum(math.prod(tensor.shape) for tensor in header.tensors.values())


def _of_safetensors(files: Sequence[Path]) -> tuple[str, int]:
    """The dtype of most elements, and the number of all elements."""
    elements: dict[str, int] = {}
    for file in files:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            try:
                header: Any = json.loads(opened.read(min(length, _MAX_HEADER_BYTES)))
                for tensor in (each for name, each in header.items() if name != "__metadata__"):
                    elements[tensor["dtype"]] = elements.get(tensor["dtype"], 0) + math.prod(tensor["shape"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise ConfigurationError(f"{file}: damaged or truncated safetensors file") from None
    return max(elements, key=elements.__getitem__, default="-"), sum(elements.values())


def _kv_bytes(described: ModelDirectory) -> int | None:
    """Bytes of 1,000 tokens; None if the configuration has no one size of heads, as of Gemma 4, or does not determine
    it, as with the latent attention of a model that runs through transformers' code."""
    latents = _LATENTS.get(described.architecture)
    config = {**(latents or _LEFT_OUT.get(described.architecture, {})), **described.config}

    def first(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name)), None)

    heads, layers, width = (
        first("num_attention_heads", "n_head"),
        first("num_hidden_layers", "n_layer"),
        first("hidden_size", "n_embd"),
    )
    size, kv_heads = first("head_dim", "attention_head_dim"), first("num_key_value_heads") or heads
    if size is None and isinstance(width, int) and isinstance(heads, int):
        size = width // heads
    lines, shared = 2, first("num_kv_shared_layers") or 0
    if first("global_head_dim", "per_layer_config") is not None:
        size = None
    if isinstance(layers, int) and isinstance(shared, int):
        layers -= shared
    if (of_states := state_sizes(described.architecture, described.config)) is not None:
        layers = of_states.num_attending
    if "kv_lora_rank" in config:
        rank, rotated = first("kv_lora_rank"), first("qk_rope_head_dim")
        size = rank + rotated if latents and isinstance(rank, int) and isinstance(rotated, int) else None
        lines = kv_heads = 1
    # The file may have any values.
    if not (isinstance(layers, int) and isinstance(kv_heads, int) and isinstance(size, int)):
        return None
    if min(layers, kv_heads, size) <= 0:
        return None
    return lines * layers * kv_heads * size * _FLOAT_BYTES.get(str(first("dtype", "torch_dtype")), 2) * _KV_TOKENS
