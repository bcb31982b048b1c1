"""LoRA adapters as PEFT writes them to a directory: adapter_config.json and adapter_model.safetensors, or the files of
its index, or adapter_model.bin. Read without torch; the worker reads the tensors.

An adapter is identified by the digest of these files everywhere but in a gateway, which gives it a name.
"""

import hashlib
import json
import math
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from quire.model_files.model_directory import name_within, shard_names
from quire.runtime.settings import ConfigurationError

DIGEST_BYTES = 32
MAX_RANK, MAX_RANK_ON_GPU = 256, 64
"""By default; `--max-adapter-rank` is at most the first."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLED = ".bin"
"""The suffix of weights that torch has written, as PEFT did before 0.7."""

_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_MAX_NUMBER = 1e30
"""Maximum alpha: scales are numbers in 32 bits."""
_TENSOR = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<side>[AB])\.weight", re.ASCII)
_PATTERN = re.compile(r"\^?(?:\w|\\?\.)+", re.ASCII)
"""Expressions allowed in alpha_pattern: no repetitions, since a hostile one takes hours to match."""
_OF_IMAGES = "visual."
"""Prefix of the vision modules of Qwen2-VL and Qwen2.5-VL, next to the language model, in transformers before 4.52."""
_EMBEDDINGS = ("lora_embedding_", "embed_tokens", "embed_positions", "wte.", "wpe.", "lm_head")
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element."""
_STORAGES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"}
_Tensor = tuple[str, str, tuple[int, ...]]
"""Name, type and shape."""
_OF_HIDDEN = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_attn", "c_fc"})
"""Layers whose inputs are the hidden state."""
_NEUTRAL_INITS = (None, True, False, "gaussian", "eva", "mica", "orthogonal")
"""Values of init_lora_weights that leave the weights of the model as they are."""
_OF_TRAINING = ".lora_velora_embed"
"""Ends the names of tensors that VeLoRA saves in addition to A and B, which only its gradients read."""
_UNSUPPORTED = {
    "use_dora": "is DoRA",
    "modules_to_save": "brings whole modules",
    "lora_bias": "has biases of its own",
    "layer_replication": "replicates layers",
    "trainable_token_indices": "brings embeddings of tokens",
    "alora_invocation_tokens": "is an activated LoRA",
    "target_parameters": "adapts parameters outside of linear layers",
    "use_qalora": "is QA-LoRA",
    "arrow_config": "is a mixture of adapters",
    "use_bdlora": "is BD-LoRA",
    "kasa_config": "is KaSA",
    "monteclora_config": "is MonteCLoRA",
}
"""Fields of adapter_config.json that must be absent or false, and the kind of adapter that has them."""
_SUPPORTED = "supported are LoRA and rsLoRA of linear layers"


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """An adapter's addend to one linear layer: `scale` * B A x, with A [rank, num_inputs], B [num_outputs, rank]."""

    rank: int
    num_inputs: int
    num_outputs: int
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        digest: SHA-256 over the configuration and `files`, DIGEST_BYTES long.
        files: The files of the weights.
        rank: The maximum rank of its modules.
        alpha: lora_alpha; `modules` have the scales that follow from it.
        target_modules: The last parts of the names of its modules, sorted: "down_proj", "q_proj".
        base_model: base_model_name_or_path, which nothing depends on; empty if it is missing.
        modules: By the name of the linear layer in the model: "model.layers.0.self_attn.q_proj". Tensors have it after
            "base_model.model.".
    """

    digest: bytes
    directory: Path
    files: tuple[Path, ...]
    rank: int
    alpha: float
    uses_rslora: bool
    target_modules: tuple[str, ...]
    base_model: str
    modules: Mapping[str, AdaptedModule] = field(repr=False)


class UnusableAdapterError(ConfigurationError):
    """An adapter that cannot be used: one line with the file, the value and the supported values."""


class NoAdapterError(UnusableAdapterError):
    """There is no directory, or no configuration of an adapter in it."""


def read_adapter(directory: Path | str) -> Adapter:
    """Reads an adapter's configuration, the shapes of its tensors and its digest.

    Raises:
        UnusableAdapterError: a file is missing or damaged, or it is not a LoRA that a worker can run.
    """
    directory = Path(directory)
    try:
        if not directory.is_dir():
            raise NoAdapterError(
                f"{directory!s:.500} is no directory; an adapter is one with {CONFIG_FILE} as PEFT saves it"
            )
        files = _weight_files(directory)
        for each in (directory / CONFIG_FILE, *files):
            # A pipe or a device may have no end.
            if each.exists() and not each.is_file():
                raise UnusableAdapterError(f"{each} is not a regular file")
    except OSError as error:
        raise UnusableAdapterError(f"cannot read {directory!s:.500}: {error.strerror}") from error
    raw = _read_config(directory / CONFIG_FILE)
    config = _Config.of(directory / CONFIG_FILE, raw)
    shapes = _shapes(files)
    modules = {name: config.module(name, *of_module) for name, of_module in sorted(shapes.items())}
    return Adapter(
        digest=_digest(raw, files),
        directory=directory,
        files=files,
        rank=max(each.rank for each in modules.values()),
        alpha=config.alpha,
        uses_rslora=config.uses_rslora,
        target_modules=tuple(sorted({name.rpartition(".")[2] for name in modules})),
        base_model=config.base_model,
        modules=modules,
    )


def check_digest(adapter: Adapter, digest: bytes) -> None:
    """Raises UnusableAdapterError if the files do not have this digest."""
    if adapter.digest != digest:
        raise UnusableAdapterError(
            f"the files of adapter {adapter.directory} have changed since it was loaded: their digest is "
            f"{adapter.digest.hex()[:16]}, that of the request {digest.hex()[:16]}; load it again under its name"
        )


def check_distinct(directory: Path, names: Mapping[str, str]) -> None:
    """Raises UnusableAdapterError where two modules of an adapter are one of the model; `names` has the model's name of
    each."""
    by_name: dict[str, str] = {}
    for module, name in names.items():
        if (other := by_name.setdefault(name, module)) != module:
            raise UnusableAdapterError(f"adapter {directory}: {other} and {module} both name {name}; keep one of them")


def check_fits(adapter: Adapter, config: Mapping[str, Any]) -> None:
    """Raises UnusableAdapterError if the adapter's shape contradicts the model's config.json. The worker checks all
    layers, which this function does not know."""
    num_layers = config.get("num_hidden_layers", config.get("n_layer"))
    hidden_size = config.get("hidden_size", config.get("n_embd"))
    for name, module in adapter.modules.items():
        layer = re.search(r"\.(\d+)\.", name)
        if layer is not None and isinstance(num_layers, int) and int(layer[1]) >= num_layers:
            raise UnusableAdapterError(
                f"adapter {adapter.directory} adapts {name}; the model has {num_layers} layers: it is of another model"
            )
        takes_hidden = name.rpartition(".")[2] in _OF_HIDDEN
        if takes_hidden and isinstance(hidden_size, int) and module.num_inputs != hidden_size:
            raise UnusableAdapterError(
                f"adapter {adapter.directory}: {name} has {module.num_inputs} inputs; the hidden size of the model is "
                f"{hidden_size}: the adapter is of another model"
            )


@dataclass(frozen=True, slots=True)
class _Config:
    file: Path
    alpha: float
    uses_rslora: bool
    base_model: str
    alpha_pattern: Mapping[re.Pattern[str], float]

    @classmethod
    def of(cls, file: Path, raw: bytes) -> Self:
        try:
            config = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise UnusableAdapterError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise UnusableAdapterError(f"{file} is not a JSON object")
        if config.get("peft_type") != "LORA":
            raise _not_supported(file, "peft_type", config.get("peft_type"), "is no LoRA")
        for name, what in _UNSUPPORTED.items():
            if config.get(name):
                raise _not_supported(file, name, config[name], what)
        if config.get("bias", "none") != "none":
            raise _not_supported(file, "bias", config["bias"], "changes biases")
        init = config.get("init_lora_weights")
        if (init.lower() if isinstance(init, str) else init) not in _NEUTRAL_INITS:
            raise _not_supported(file, "init_lora_weights", init, "changes the weights of the model")
        rank = config.get("r")
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
            raise UnusableAdapterError(f"{file}: r is {rank!r:.80}; it must be a number from 1 to {MAX_RANK}")
        patterns = config.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise UnusableAdapterError(f"{file}: alpha_pattern is {patterns!r:.80}; it must be an object of numbers")
        for pattern in patterns:
            if not _PATTERN.fullmatch(pattern):
                raise UnusableAdapterError(
                    f"{file}: alpha_pattern has {pattern!r:.80}; supported are names of modules and ends of names"
                )
        base_model = config.get("base_model_name_or_path")
        return cls(
            file,
            alpha=_number(file, "lora_alpha", config.get("lora_alpha")),
            uses_rslora=bool(config.get("use_rslora")),
            base_model=base_model if isinstance(base_model, str) else "",
            alpha_pattern={
                re.compile(rf"(.*\.)?({pattern})"): _number(file, "alpha_pattern", value)
                for pattern, value in patterns.items()
            },
        )

    def module(self, name: str, a: tuple[int, int], b: tuple[int, int]) -> AdaptedModule:
        """The module whose A and B have these shapes."""
        rank, num_inputs = a
        if b[1] != rank or not 1 <= rank <= MAX_RANK or not num_inputs or not b[0]:
            raise UnusableAdapterError(
                f"{self.file.parent / WEIGHTS_FILE}: lora_A of {name} is {list(a)}, lora_B {list(b)}; they must be "
                f"[rank, inputs] and [outputs, rank], with a rank of at most {MAX_RANK}"
            )
        # The first pattern that is the end of the name, or after ^ the whole name, as in PEFT.
        alpha = next((each for pattern, each in self.alpha_pattern.items() if pattern.fullmatch(name)), self.alpha)
        return AdaptedModule(rank, num_inputs, b[0], alpha / (math.sqrt(rank) if self.uses_rslora else rank))


def _weight_files(directory: Path) -> tuple[Path, ...]:
    """The single file, or else the files of the index, or else the file that torch has written."""
    single = directory / WEIGHTS_FILE
    index, pickled = single.with_name(f"{WEIGHTS_FILE}.index.json"), single.with_suffix(PICKLED)
    if single.exists() or not (index.is_file() or pickled.exists()):
        return (single,)
    if not index.is_file():
        return (pickled,)
    try:
        return tuple(directory / name for name in shard_names(index)) or (single,)
    except ConfigurationError as error:
        raise UnusableAdapterError(str(error)) from error


def _number(file: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_NUMBER:
        raise UnusableAdapterError(f"{file}: {name} is {value!r:.80}; it must be a number of at most {_MAX_NUMBER:g}")
    return float(value)


def _not_supported(file: Path, name: str, value: Any, what: str) -> UnusableAdapterError:
    return UnusableAdapterError(f"{file}: {name} is {value!r:.80}: the adapter {what}; {_SUPPORTED}")


def _read_config(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        kind = NoAdapterError if isinstance(error, FileNotFoundError) else UnusableAdapterError
        raise kind(f"cannot read {file}: {error.strerror}") from error
    if len(raw) > _MAX_CONFIG_BYTES:
        raise UnusableAdapterError(f"{file} has more than {_MAX_CONFIG_BYTES:,} bytes")
    return raw


def _shapes(files: Sequence[Path]) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """The shapes of A and B by the name of the module. Beside modules of a language model within another model, others
    are left out: they read images, and texts do not pass them."""
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    places: dict[str, Path] = {}
    for file in files:
        for name, dtype, shape in _pickled_tensors(file) if file.suffix == PICKLED else _tensors(file):
            if name.endswith(_OF_TRAINING):
                continue
            module, side = _module_of(file, name, dtype)
            if (other := places.setdefault(name, file)) != file:
                raise UnusableAdapterError(f"{other} and {file} both have {name:.200}; one of the files is of another")
            sides.setdefault(module, {})[side] = shape
        if not sides:
            raise UnusableAdapterError(f"{file} has no tensors")
    shapes: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
    within = {module: found for module, found in sides.items() if name_within(module) != module}
    check_distinct(files[0].parent, {module: name_within(module) for module in within})
    of_text = {module: found for module, found in sides.items() if not module.startswith(_OF_IMAGES)}
    for module, found in (within or of_text or sides).items():
        match found:
            case {"A": (rank, inputs), "B": (outputs, columns)}:
                shapes[module] = (rank, inputs), (outputs, columns)
            case _:
                have = ", ".join(f"lora_{side} {list(shape)}" for side, shape in sorted(found.items()))
                raise UnusableAdapterError(
                    f"{files[0].parent} has {have} of {module}; lora_A and lora_B must be matrices"
                )
    return shapes


def _tensors(file: Path) -> list[_Tensor]:
    """Name, type and shape of each tensor, from the header of a safetensors file: its length in 8 bytes, then JSON.
    The tensors must fill the rest of the file."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if length <= _MAX_HEADER_BYTES else None
            num_bytes = file.stat().st_size - 8 - length
    except OSError as error:
        raise UnusableAdapterError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"its header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(file, "it has no header")
    tensors: list[_Tensor] = []
    places: list[tuple[int, int]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]} if all(
                type(size) is int and size >= 0 for size in shape
            ):
                tensors.append((name, dtype, tuple(shape)))
                places.append((start, end))
                if dtype in _DTYPES and end - start != _DTYPES[dtype] * math.prod(shape):
                    raise _damaged(file, f"{name:.200} is {dtype} {shape} in {end - start} bytes")
            case _:
                raise _damaged(file, f"{name:.200} is {entry!r:.80}")
    ends = [0, *(end for _, end in sorted(places))]
    if [start for start, _ in sorted(places)] != ends[:-1] or ends[-1] != num_bytes:
        raise _damaged(file, f"its tensors end at byte {ends[-1]:,} of {num_bytes:,}, or leave gaps")
    return tensors


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str
    num_elements: int


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def rebuilt(
        cls, storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object
    ) -> Self:
        """Replaces torch._utils._rebuild_tensor_v2. ValueError unless the tensor is all of the storage, row by row."""
        strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
        is_plain = (offset, stride) == (0, strides) and all(type(size) is int and size > 0 for size in shape)
        if not is_plain or math.prod(shape) != storage.num_elements:
            raise ValueError(f"a tensor {shape} with strides {stride} of {storage.num_elements} numbers")
        return cls(storage.dtype, shape)


class _TensorsAlone(pickle._Unpickler):  # Python's version, whose memory use is bounded by the pickle's size.
    """Unpickles a dictionary of tensors, and calls nothing: it knows only the names with which tensors are written."""

    def __init__(self, file: IO[bytes], sizes: Mapping[str, int]) -> None:
        super().__init__(file)
        self._sizes = sizes

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _StoredTensor.rebuilt,
        }
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (found := known.get((module, name))) is None:
            raise ValueError(f"it names {module}.{name}".replace("\n", " ")[:200])
        return found

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, count = pid
        if kind != "storage" or dtype not in _DTYPES or self._sizes.get(key) != _DTYPES[dtype] * count:
            raise ValueError(f"it has a storage {pid!r:.100}")
        return _Storage(dtype, key, count)


def _pickled_tensors(file: Path) -> list[_Tensor]:
    """The tensors of a file of torch.save: a zip archive with a pickle of the names and shapes, and a file for each
    storage. No class and no function that the pickle names is called."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = {each.filename.partition("/")[2]: each for each in archive.infolist()}
            if any(each.compress_type != zipfile.ZIP_STORED for each in entries.values()):
                raise ValueError("it is compressed")
            if entries["data.pkl"].file_size > _MAX_HEADER_BYTES:
                raise ValueError("its pickle is too long")
            sizes = {name.removeprefix("data/"): each.file_size for name, each in entries.items()}
            with archive.open(entries["data.pkl"]) as pickled:
                found = _TensorsAlone(pickled, sizes).load()
        tensors = [(name, tensor.dtype, tensor.shape) for name, tensor in found.items() if name.isprintable()]
    except Exception as error:  # A pickle may do anything wrong.
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnusableAdapterError(
            f"{file} is no dictionary of only tensors, as torch.save writes it: {said:.300}"
        ) from error
    return tensors


def _damaged(file: Path, why: str) -> UnusableAdapterError:
    return UnusableAdapterError(f"{file}: damaged or truncated safetensors file: {why}")


def _module_of(file: Path, name: str, dtype: str) -> tuple[str, str]:
    if any(part in name for part in _EMBEDDINGS):
        raise UnusableAdapterError(f"{file}: {name:.200} adapts an embedding or the output head; {_SUPPORTED}")
    found = _TENSOR.fullmatch(name)
    if found is None:
        raise UnusableAdapterError(
            f"{file}: {name:.200} is no lora_A or lora_B of a linear layer as PEFT names them; {_SUPPORTED}"
        )
    if dtype not in _DTYPES:
        raise UnusableAdapterError(
            f"{file}: {name:.200} has the type {dtype}; supported are {', '.join(sorted(_DTYPES))}"
        )
    return found["module"], found["side"]


def _digest(config: bytes, files: Iterable[Path]) -> bytes:
    """The digest of the configuration and the files, each with its length first."""
    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    for file in files:
        try:
            with file.open("rb") as opened:
                digest.update(file.stat().st_size.to_bytes(8, "little"))
                while chunk := opened.read(_CHUNK_BYTES):
                    digest.update(chunk)
        except OSError as error:
            raise UnusableAdapterError(f"cannot read {file}: {error.strerror}") from error
    return digest.digest()
