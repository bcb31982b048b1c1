"""Reads a model, as transformers writes it to a directory, or in one GGUF file, without torch."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from quire.model_files.architectures import (
    ARCHITECTURES,
    ENCODERS,
    MISSING_PARTS,
    RANKERS,
    SUPPORTED_ARCHITECTURES,
    TYPES_OF_OTHER_CLASSES,
)
from quire.model_files.gguf_header import LFS_POINTER, GgufHeader, name_of_model, parts_of
from quire.model_files.gguf_header import SUFFIX as GGUF_SUFFIX
from quire.runtime.settings import ConfigurationError

_QWEN_2_VL = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}
_QWEN_3_VL = {"hidden_size": 4096, "max_position_embeddings": 128000, "rope_theta": 5e5}
_QWEN_3_VL_MOE = {
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": True,
}
_GLM_4V = {
    "head_dim": None,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 1.0,
    "attention_bias": True,
}
# Language models within models that also read images: the type that they equal on texts, where their three rotary
# positions are the same number; and the defaults of transformers that differ from the defaults of that type.
_TYPES_WITHIN = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), ("qwen2", _QWEN_2_VL)),
    "qwen3_vl_text": ("qwen3", _QWEN_3_VL),
    "qwen3_vl_moe_text": ("qwen3_moe", _QWEN_3_VL_MOE),
    "glm4v_text": ("glm4", _GLM_4V),
    "glm4v_moe_text": ("glm4_moe", {"max_position_embeddings": 65536, "attention_bias": True}),
}
_WITH_MORE = "ForConditionalGeneration"
_NOT_CAUSAL = "paligemma"
"""A model whose prompts attend in both directions."""
_WITHIN = re.compile(r"\b(?:language_model|text_model)\.")
_OF_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id", "quantization_config")
"""Fields that config.json may have for the whole model instead of its language model."""

# How transformers names language models; the worker says which of them it can run through transformers' code.
_LANGUAGE_MODEL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
# Tasks of models with other names: the first suffix that fits counts.
_OTHER_TASKS = {
    "ForMaskedLM": "fills in masked tokens and generates no text",
    "ForSequenceClassification": "classifies or ranks texts and generates none",
    "ForTokenClassification": "classifies tokens and generates no text",
    "Model": "gives embeddings and generates no text",
}
EMBEDDED_MODEL = "quire-tiny"

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_EXPECTED = (
    "--model takes a directory as transformers saves it (config.json, tokenizer.json, *.safetensors), a GGUF file, a "
    "model of the Hugging Face Hub as ORG/NAME, ORG/NAME@REVISION or ORG/NAME:Q4_K_M, a model of a registry as "
    f"oci://HOST/REPOSITORY:TAG, or {EMBEDDED_MODEL}, the embedded model and the default"
)
_HUB_NAME = re.compile(
    r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)"
    r"(?:/(?P<file>[\w./-]+\.gguf)|:(?P<quantization>[\w.-]+))?(?:@(?P<revision>\w[\w./-]*))?",
    re.ASCII,
)

# How the hub's cache names the folder of a model, before its name with "--" for "/".
_CACHED = "models--"

OLDER_QUANTIZATIONS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files of older tools in place of quantization_config of config.json, each with its quantization method."""

EMBEDDING_MODULES = "modules.json"
"""A file that sentence-transformers writes to directories of models that give embeddings or scores."""
_OWN_MODULES, _TRANSFORMER, _OF_RANKERS = "sentence_transformers.", "Transformer", "ForSequenceClassification"

_SETTINGS_OF = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
TRANSFORMER_SETTINGS = tuple(f"sentence_{each}_config.json" for each in _SETTINGS_OF)
"""The files of one of its modules: the first of them counts. Older releases named them by the encoder."""

_SPECIAL_TOKEN_NAMES = ("_token", "additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True)
class ModelDirectory:
    """The contents of the JSON files of a model directory, or their equivalents in a GGUF file.

    Attributes:
        path: The directory, or the GGUF file; any part of a GGUF file in several parts.
        config: config.json, with the quantization_config that older tools wrote elsewhere; or its part about the
            language model of `whole`.
        generation_config: generation_config.json, or the GGUF file's values in its place; empty if there are none.
        tokenizer_config: tokenizer_config.json, empty if there is none, with the tokens that transformers takes from
            special_tokens_map.json and added_tokens.json.
        chat_template: The Jinja source that turns messages into a prompt, if the model has one.
        tool_chat_template: A different source for conversations with tools, if the model has one.
        architecture: One of SUPPORTED_ARCHITECTURES, or another language model's name, which only transformers knows.
        whole: The kind of a model that also reads images or sound and whose language model is served; otherwise None.
        gguf: The header of a GGUF file, which is read once; None for a directory.
    """

    path: Path
    architecture: str
    config: dict[str, Any] = field(repr=False)
    generation_config: dict[str, Any] = field(repr=False)
    tokenizer_config: dict[str, Any] = field(repr=False)
    chat_template: str | None = field(repr=False)
    tool_chat_template: str | None = field(repr=False)
    configured_eos: tuple[int, ...]
    """The ids that end a text by generation_config.json, or else config.json."""
    whole: str | None = None
    gguf: GgufHeader | None = field(default=None, repr=False)
    _own_tokenizer: Mapping[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Reads the directory. Raises ConfigurationError, in one line, if a part is missing, broken or unsupported."""
        path = Path(path)
        if is_gguf(path):
            return cls._of_gguf(path)
        if not path.is_dir():
            raise not_a_directory(path)
        config = _read_json(path / "config.json")
        modules = module_kinds(path)
        if modules and modules[0] != _TRANSFORMER and not (config or {}).get("architectures"):
            raise ConfigurationError(
                f"{path / EMBEDDING_MODULES} begins with a module of the type {modules[0]:.80}, which is not "
                f"supported; it must begin with {_TRANSFORMER}, whose files are in the directory itself"
            )
        if config is None:
            raise ConfigurationError(f"model directory {path} has no config.json; {_EXPECTED}")
        # MLX writes its own form under both names.
        is_usual = config.get("quantization_config") not in (None, config.get("quantization"))
        if not is_usual and (quantization := _older_quantization(path, config)):
            config["quantization_config"] = quantization
        generation_config = _read_json(path / "generation_config.json") or {}
        tokenizer_config = _tokenizer_config(path)
        templates = _chat_templates(path, tokenizer_config)
        architecture, whole = _architecture(path, config)
        if whole is not None:
            config = _language_model(path, config, architecture)
        return cls(
            path=path,
            architecture=architecture,
            whole=whole,
            config=config,
            generation_config=generation_config,
            tokenizer_config=tokenizer_config,
            chat_template=templates.get("default"),
            tool_chat_template=templates.get("tool_use"),
            configured_eos=_configured_eos(path, config, generation_config),
        )

    @classmethod
    def _of_gguf(cls, path: Path) -> Self:
        from quire.model_files.gguf_model import describe

        described = describe(GgufHeader.read(path))
        return cls(
            path=path,
            architecture=described.config["architectures"][0],
            config=described.config,
            generation_config=described.generation_config,
            tokenizer_config=described.tokenizer_config,
            chat_template=described.chat_templates.get("default"),
            tool_chat_template=described.chat_templates.get("tool_use"),
            configured_eos=described.eos_token_ids,
            gguf=described.header,
            _own_tokenizer=described.tokenizer,
        )

    @property
    def name(self) -> str:
        """The name under which the model is served by default."""
        return name_of_path(self.path)

    # Kept, since it may take a look into tokenizer.json, which has megabytes.
    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text: the configuration's, and the eos token of the tokenizer, which chat fine-tunes
        change only in the tokenizer's files."""
        own = self.id_of_named("eos_token") if self.gguf is None else None
        return tuple(dict.fromkeys((*self.configured_eos, *(() if own is None else (own,)))))

    def id_of_named(self, name: str) -> int | None:
        """The id of a token that tokenizer_config.json names, such as "eos_token"; None if the tokenizer has none."""
        named = self.tokenizer_config.get(name)
        text = named.get("content") if isinstance(named, dict) else named
        return self.id_of(text) if isinstance(text, str) else None

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """The values of generation_config.json that are set (not null)."""
        return {key: value for key, value in self.generation_config.items() if value is not None}

    def tokenizer_json(self) -> bytes:
        """The content of tokenizer.json. Raises ConfigurationError if there is none."""
        if self._own_tokenizer is not None:
            return json.dumps(self._own_tokenizer, ensure_ascii=False).encode()
        file = self.path / "tokenizer.json"
        try:
            content = file.read_bytes()
            check_no_pointer(file)
            return content
        except FileNotFoundError:
            raise ConfigurationError(
                f"model directory {self.path} has no {file.name}, the one form of tokenizer that is read; transformers "
                "writes it: AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error

    def tokenizer(self) -> Mapping[str, Any]:
        """The parsed tokenizer.json. Raises ConfigurationError as `tokenizer_json`, and ValueError for invalid JSON."""
        return json.loads(self.tokenizer_json()) if self._own_tokenizer is None else self._own_tokenizer

    def id_of(self, text: str) -> int | None:
        """The id of a token; None if the tokenizer has no such token, or is missing or damaged, which its readers
        report."""
        listed = self.tokenizer_config.get("added_tokens_decoder")
        for token_id, entry in listed.items() if isinstance(listed, dict) else ():
            if isinstance(entry, dict) and entry.get("content") == text and token_id.isdecimal():
                return int(token_id)
        try:
            tokenizer = self.tokenizer()
            added = {each["content"]: each["id"] for each in tokenizer.get("added_tokens") or ()}
            vocabulary = tokenizer["model"]["vocab"]
            if isinstance(vocabulary, list):
                vocabulary = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
            return {**vocabulary, **added}.get(text)
        except (ConfigurationError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            return None


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of a hub: ORG/NAME, ORG/NAME@REVISION, or a GGUF file of it as ORG/NAME/FILE.gguf or as ORG/NAME:Q4_K_M,
    with a revision too.

    Attributes:
        revision: A branch, a tag or a commit; without one it is the main branch.
        quantization: The part of the names of GGUF files before the ending, in capitals or not.
    """

    repository: str
    revision: str | None = None
    file: str | None = None
    quantization: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        chosen = f":{self.quantization}" if self.quantization else f"/{self.file}" if self.file else ""
        return f"{self.repository}{chosen}{revision}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parses a name; None if the text has another form. ORG/NAME.gguf is a file, not a repository."""
        match = _HUB_NAME.fullmatch(text)
        if match is None or match["repository"].endswith(GGUF_SUFFIX):
            return None
        return cls(**match.groupdict())


def is_gguf(path: Path) -> bool:
    """Whether the model is a GGUF file."""
    return path.suffix == GGUF_SUFFIX and path.is_file()


def not_a_directory(path: Path) -> ConfigurationError:
    """The error for a path without a model."""
    problem = "is a file" if path.exists() else "does not exist"
    return ConfigurationError(f"model directory {path} {problem}; {_EXPECTED}")


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The files with the weights of a model: the GGUF file or its parts; otherwise the single safetensors file, or if
    it is absent the files of the index, sorted by name.

    Raises:
        ConfigurationError: there is neither, the index is malformed, or names a file that is missing or elsewhere; a
            part is missing; a file is a pointer of Git LFS.
    """
    if is_gguf(directory):
        return parts_of(directory)
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file() or index.is_file():
        files = (single,) if single.is_file() else tuple(index.parent / name for name in shard_names(index))
        for file in files:
            if not file.is_file():
                raise ConfigurationError(f"{index}: shard {file.name} is missing")
            check_no_pointer(file)
        return files
    pickled = sorted(directory.glob("pytorch_model*.bin"))
    if pickled:
        raise ConfigurationError(
            f"{directory}: {pickled[0].name} is a pickle, which is never loaded; convert the model with transformers: "
            f"AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(NEW_DIRECTORY)"
        )
    raise ConfigurationError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def name_of_path(path: Path) -> str:
    """The name under which a model is served by default: the directory's or the file's name, or ORG/NAME for a snapshot
    in the cache of the hub, models--ORG--NAME/snapshots/COMMIT."""
    path = path.absolute()
    if is_gguf(path):
        return name_of_model(path)
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith(_CACHED):
        return path.parent.parent.name.removeprefix(_CACHED).replace("--", "/", 1)
    return path.resolve().name


def name_within(name: str) -> str:
    """The name of a tensor or module of a language model, without the prefix that a model for images gives it."""
    return _WITHIN.sub("", name, count=1)


def check_no_pointer(file: Path) -> None:
    """Raises ConfigurationError if Git LFS has left a pointer in place of a file."""
    try:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    if is_pointer:
        raise ConfigurationError(f"{file} is a pointer of Git LFS; `git lfs pull` fetches the file")


def shard_names(index: Path) -> list[str]:
    """The sorted names of the files that an index lists. Raises ConfigurationError if it is malformed."""
    weight_map = (_read_json(index) or {}).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigurationError(f"{index}: weight_map is {weight_map!r:.80}; it must be an object of file names")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ConfigurationError(f"{index}: shard {name!r} is not a plain file name")
    return names


def module_kinds(path: Path) -> tuple[str, ...]:
    """The classes of the modules in modules.json, with their package unless that is sentence-transformers; empty if
    there is no such file. Raises ConfigurationError if it is malformed."""
    try:
        listed = _parsed(path / EMBEDDING_MODULES)
    except FileNotFoundError:
        return ()
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise ConfigurationError(f"{path / EMBEDDING_MODULES} is no list of modules")
    named = [str(each.get("type")) for each in listed]
    return tuple(each.rpartition(".")[2] if each.startswith(_OWN_MODULES) else each for each in named)


def _read_json(file: Path) -> dict[str, Any] | None:
    """The object in the file; None if there is no file."""
    try:
        content = _parsed(file)
    except FileNotFoundError:
        return None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} is not a JSON object")
    return content


def _parsed(file: Path) -> Any:
    """The content of the file. Raises FileNotFoundError, and ConfigurationError if it cannot be read otherwise."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigurationError(f"{file} is nested too deep") from error
    except ValueError as error:
        check_no_pointer(file)
        raise ConfigurationError(f"{file} is not valid JSON: {error}") from error


def _older_quantization(path: Path, config: Mapping[str, Any]) -> Any:
    """The older form of an absent quantization_config; None if there is no such form."""
    for name, method in OLDER_QUANTIZATIONS.items():
        if fields := _read_json(path / name):
            return {"quant_method": method} | fields
    if isinstance(of_mlx := config.get("quantization"), dict):
        return {"quant_method": "mlx"} | of_mlx
    return config.get("compression_config")


def _tokenizer_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json, which is complete if it lists its added tokens. In older models special_tokens_map.json
    overrides it, and added_tokens.json maps texts of added tokens to their ids, which become "added_tokens" here."""
    config = _read_json(path / "tokenizer_config.json") or {}
    config.pop("added_tokens", None)
    if "added_tokens_decoder" in config:
        return config
    special_tokens = _read_json(path / "special_tokens_map.json") or {}
    special = {name: value for name, value in special_tokens.items() if name.endswith(_SPECIAL_TOKEN_NAMES)}
    added_tokens = _read_json(path / "added_tokens.json") or {}
    for text, token_id in added_tokens.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            file = path / "added_tokens.json"
            raise ConfigurationError(
                f"{file} gives {text!r:.80} the token id {token_id!r:.80}; expected a whole number from 0 on"
            )
    return config | special | ({"added_tokens": added_tokens} if added_tokens else {})


def _architecture(path: Path, config: Mapping[str, Any]) -> tuple[str, str | None]:
    """The architecture of the language model, and the whole model's name if it reads more than text. Raises
    ConfigurationError."""
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    given = config.get("architectures")
    names = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    text = _text_config(config)
    kind = str(text.get("model_type"))
    if kind in MISSING_PARTS:
        raise ConfigurationError(
            f"architecture {(names or [kind])[0]} of {path} is not supported: it needs {MISSING_PARTS[kind]}, which "
            "Quire does not have (docs/models.md says which models run)"
        )
    if kind in TYPES_OF_OTHER_CLASSES:
        return ARCHITECTURES[kind], None
    # Directories of sentence-transformers may name the class of a pretrained encoder, such as BertForMaskedLM.
    is_decoder = not set(names).isdisjoint(SUPPORTED_ARCHITECTURES)
    modules = module_kinds(path)
    # A cross-encoder has no further module.
    is_ranker = modules == (_TRANSFORMER,) and all(name.endswith(_OF_RANKERS) for name in names)
    has_modules = bool(modules) and not is_decoder and not is_ranker
    for encoder, of_type in ENCODERS.items():
        if kind == of_type and (encoder in names or has_modules):
            return encoder, None
    for ranker, of_type in RANKERS.items():
        if kind == of_type and ranker in names and _num_labels(config) == 1:
            return ranker, None
    for known in (SUPPORTED_ARCHITECTURES.__contains__, lambda name: name.endswith(_LANGUAGE_MODEL_SUFFIXES)):
        if (found := next(filter(known, names), None)) is not None:
            return found, None
    is_within = text is not config or config.get("model_type") in _TYPES_WITHIN
    usual, _ = _TYPES_WITHIN.get(kind, (kind, {}))
    architecture = ARCHITECTURES.get(usual)
    if architecture is not None and not is_within and (not names or _gives_vectors(architecture, names, config)):
        return architecture, None
    is_causal = not config.get("is_encoder_decoder") and config.get("model_type") != _NOT_CAUSAL
    if architecture is not None and is_within and is_causal and all(name.endswith(_WITH_MORE) for name in names):
        return architecture, (names or [str(config.get("model_type"))])[0]
    if not names:
        raise ConfigurationError(
            f"{path / 'config.json'} names no architecture, and its model_type is {kind:.80}; supported are {supported}"
        )
    if config.get("is_encoder_decoder"):
        reason = "has an encoder"
    elif config.get("model_type") == _NOT_CAUSAL:
        reason = "attends to its prompts in both directions"
    elif is_within:
        reason = f"has a language model of the type {kind:.80}, which is not supported within another model"
    else:
        others = (reason for suffix, reason in _OTHER_TASKS.items() if names[0].endswith(suffix))
        reason = next(others, "is not supported")
        if reason in _OTHER_TASKS.values():
            kinds = (f"gives vectors: {', '.join(ENCODERS)}", f"ranks documents, with one label: {', '.join(RANKERS)}")
            reason = f"{reason} (an encoder that {' or '.join(kinds)} is served; docs/embeddings.md)"
    raise ConfigurationError(
        f"architecture {names[0]} of {path} {reason}; supported are {supported}, the language models of these kinds "
        f"within others (...{_WITH_MORE}), and decoder-only models that transformers implements (...ForCausalLM)"
    )


def _gives_vectors(architecture: str, names: Sequence[str], config: Mapping[str, Any]) -> bool:
    """Whether the classes of a decoder are the one without an output layer, or the one with one score of a text."""
    name = architecture.removesuffix("ForCausalLM")
    return f"{name}Model" in names or (f"{name}ForSequenceClassification" in names and _num_labels(config) == 1)


def _num_labels(config: Mapping[str, Any]) -> object:
    return config.get("num_labels", len(config.get("id2label") or (0, 1)))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of the language model; older configurations have none."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _language_model(path: Path, config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The part of config.json about the language model within a model that reads more than text. Raises
    ConfigurationError."""
    text = _text_config(config)
    cap = "final_logit_softcapping"
    if architecture == "Gemma3ForCausalLM" and text.get(cap) is not None:
        raise ConfigurationError(
            f"{path / 'config.json'}: {cap} of text_config is {text[cap]!r}; expected null: other servers cap the "
            "logits of a Gemma 3 that reads images by it, and transformers does not; set it to null"
        )
    usual = next(kind for kind, name in ARCHITECTURES.items() if name == architecture)
    _, defaults = _TYPES_WITHIN.get(str(text.get("model_type")), (usual, {}))
    of_whole = [*_OF_WHOLE] if text.get("tie_word_embeddings") else [*_OF_WHOLE, "tie_word_embeddings"]
    further = {name: config[name] for name in of_whole if config.get(name) is not None}
    found = {**defaults, **text, **further, "architectures": [architecture], "model_type": usual}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := found.get(name), dict):
            plain = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
            found[name] = {key: "default" if value == "mrope" else value for key, value in plain.items()}
    return found


def _configured_eos(path: Path, config: dict[str, Any], generation_config: dict[str, Any]) -> tuple[int, ...]:
    value = generation_config.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigurationError(f"eos_token_id of {path} is {token_id!r:.80}; expected whole numbers from 0 on")
    return tuple(dict.fromkeys(ids))


def _chat_templates(path: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: from chat_template.jinja and the further files next to it, else from
    tokenizer_config.json: one template, which is "default", or several with their names.

    Models with a processor may have chat_template.json instead.
    """
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    found: dict[str, str] = {}
    for name, file in files.items():
        try:
            found[name] = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot read {file}: {error}") from error
    if found:
        return found
    source, template = path / "tokenizer_config.json", tokenizer_config.get("chat_template")
    if template is None:
        source = path / "chat_template.json"
        template = (_read_json(source) or {}).get("chat_template")
    named = {"default": template}
    if isinstance(template, list):
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
    for text in named.values():
        if text is not None and not isinstance(text, str):
            raise ConfigurationError(f"chat_template in {source} is {text!r:.80}; expected a text")
    return {name: text for name, text in named.items() if text is not None}
