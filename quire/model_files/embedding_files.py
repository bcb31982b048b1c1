"""How a model turns a text into one vector, by the files that sentence-transformers writes, without torch.

`modules.json` lists the modules in their order; each has a folder with a `config.json`. A directory without it is read
as sentence-transformers does: the mean of all tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from quire.model_files.architectures import ARCHITECTURES, ENCODERS, RANKERS
from quire.model_files.gguf_header import GgufHeader
from quire.model_files.model_directory import EMBEDDING_MODULES, TRANSFORMER_SETTINGS, ModelDirectory, module_kinds
from quire.runtime.settings import ConfigurationError

# In the order in which several are joined.
POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# Older files have a flag for each mode.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
_ACTIVATION = re.compile(r"torch\.nn\.(?:modules\.(?:activation|linear)\.)?(\w+)")
_SETTINGS, _PROMPTS = "config_sentence_transformers.json", "prompts"
_TYPES = "token_type_ids"
# The inputs that tokenizers of transformers give a model, if tokenizer_config.json does not list them.
_INPUTS = {name: [_TYPES] for name in ("BertTokenizer", "BertTokenizerFast")}
_OUTPUT = "sentence_embedding"
# By model_type: names of fields of config.json, and the names that most encoders have for them.
_OTHER_NAMES = {
    "distilbert": {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "activation": "hidden_act",
    },
    "nomic_bert": {
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
        "qkv_proj_bias": "attention_bias",
        "mlp_fc1_bias": "mlp_bias",
        "mlp_fc2_bias": "mlp_down_bias",
    },
    "modernbert": {
        "hidden_activation": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "local_attention": "sliding_window",
        "global_attn_every_n_layers": "sliding_window_pattern",
        "global_rope_theta": "rope_theta",
        "local_rope_theta": "rope_local_base_freq",
    },
    "gemma3_text": {
        "hidden_activation": "hidden_act",
        "rms_norm_eps": "layer_norm_eps",
        "_sliding_window_pattern": "sliding_window_pattern",
    },
}
_GATED = {"swiglu": "silu", "geglu": "gelu"}
# Modes of decoders, by the names of --pooling and by the numbers of GGUF files.
_DECODER_POOLINGS = {"last": "lasttoken", "mean": "mean"}
_GGUF_POOLINGS = {1: "mean", 3: "lasttoken"}
_SUMMED_MODES = frozenset({"mean", "mean_sqrt_len_tokens", "weightedmean"})


@dataclass(frozen=True, slots=True)
class Pooling:
    """Makes one vector of the hidden states of a text: the results of `modes`, one after the other."""

    modes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer with the weights of `folder`, or a tensor of the GGUF file `folder`, and a function of
    `ACTIVATIONS`."""

    folder: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: str
    tensor: str | None = None


@dataclass(frozen=True, slots=True)
class Normalize:
    """Scales a vector to the length 1."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """Keeps the first numbers of a vector."""

    size: int


Module = Pooling | Dense | Normalize | Truncate


@dataclass(frozen=True, slots=True)
class EmbeddingFiles:
    """The modules behind the encoder, first `Pooling`.

    Attributes:
        max_tokens: maximum tokens of a text, special tokens included; None: what the encoder has.
        prompts: texts that are put before a text, by the name of the task.
        default_prompt: the name of the prompt of calls that name none.
    """

    modules: tuple[Module, ...]
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None

    @classmethod
    def of(cls, directory: ModelDirectory) -> Self | None:
        """None for a model that generates text. Raises ConfigurationError for a module that is not known."""
        if directory.architecture not in ENCODERS:
            return None
        if directory.gguf is not None:
            return cls(_modules_of_gguf(directory.path, directory.gguf))
        files = cls.read(directory)
        return replace(files, max_tokens=files.max_tokens or _longest(directory))

    @classmethod
    def read(cls, directory: ModelDirectory) -> Self:
        """The files of any model. Raises as `of`."""
        path = directory.path
        kinds = module_kinds(path)
        if not kinds:
            return cls((Pooling(("mean",)),))
        settings = _settings(path, "SentenceTransformer")
        modules: list[Module] = []
        max_tokens = None
        for kind, each in zip(kinds, _read(path / EMBEDDING_MODULES), strict=True):
            folder = _folder(path, each.get("path"))
            match kind:
                case "Transformer":
                    if folder.resolve() != path.resolve():
                        raise ConfigurationError(
                            f"{path / EMBEDDING_MODULES} has the Transformer in the folder {folder.name}; only a "
                            "directory that has its files itself is read"
                        )
                    max_tokens = _max_tokens(folder)
                case "Pooling":
                    modules.append(_pooling(_config(folder)))
                case "Dense":
                    modules.append(_dense(folder, _config(folder)))
                case "Normalize":
                    _check_is_of_vectors(folder, _read(folder / "config.json") or {})
                    modules.append(Normalize())
                case _:
                    raise ConfigurationError(
                        f"{path / EMBEDDING_MODULES} has a module of the type {kind:.80}, which is not supported; "
                        "supported are Transformer, Pooling, Dense and Normalize"
                    )
        if not modules or not isinstance(modules[0], Pooling):
            raise ConfigurationError(f"{path / EMBEDDING_MODULES} has no Pooling directly behind the Transformer")
        if settings.get("truncate_dim") is not None:
            modules.append(Truncate(_size(path / _SETTINGS, settings, "truncate_dim")))
        return cls(tuple(modules), max_tokens, *_prompts(path, settings))

    def size(self, hidden_size: int) -> int:
        """The length of the vectors of an encoder with hidden states of this size."""
        size = hidden_size
        for module in self.modules:
            match module:
                case Pooling(modes):
                    size = hidden_size * len(modes)
                case Dense():
                    if module.in_features != size:
                        raise ConfigurationError(
                            f"{module.folder}: in_features is {module.in_features}, and the module before it gives "
                            f"{size} numbers"
                        )
                    size = module.out_features
                case Truncate(most):
                    size = min(size, most)
                case Normalize():
                    pass
        return size


@dataclass(frozen=True, slots=True)
class RankingFiles:
    """How an encoder with a head makes a score of a query and a document: `activation`, of `ACTIVATIONS`, of the head's
    number.

    Attributes:
        max_tokens: maximum tokens of a pair, special tokens included; None: what the encoder has.
        separator: the token after the query, if the encoder is told which text a token is of; otherwise None.
        answers: of a decoder without a head, the tokens of yes and no: the number is the difference of their logits, or
            the logit of the only one.
        has_template: whether the chat template makes one prompt of a query and a document.
        prompt: comes before each query, or is the system message of the template.
    """

    activation: str
    max_tokens: int | None = None
    separator: int | None = None
    answers: tuple[int, ...] = ()
    has_template: bool = False
    prompt: str = ""

    @classmethod
    def of(cls, directory: ModelDirectory) -> Self | None:
        """None for a model that scores no pairs. Raises ConfigurationError for a function that is not known."""
        if directory.architecture not in RANKERS:
            return None
        if directory.gguf is not None:
            return cls("Sigmoid")
        inputs = directory.tokenizer_config.get("model_input_names")
        if not isinstance(inputs, list):
            inputs = _INPUTS.get(str(directory.tokenizer_config.get("tokenizer_class")), [])
        path = directory.path
        prompts, default = _prompts(path, _settings(path, "CrossEncoder"))
        return cls(
            _activation_of_scores(directory),
            _max_tokens(path) or _longest(directory),
            directory.id_of_named("sep_token") if _TYPES in inputs else None,
            prompt="" if default is None else prompts[default],
        )


def encoder_fields(directory: ModelDirectory) -> dict[str, Any]:
    """config.json of an encoder, with the names of fields that most encoders have."""
    config, names = directory.config, _OTHER_NAMES.get(str(directory.config.get("model_type")), {})
    found = {name: value for name, value in config.items() if name not in names}
    found |= {names[name]: value for name, value in config.items() if name in names and value is not None}
    activation = str(found.get("hidden_act"))
    return found | ({"hidden_act": _GATED[activation]} if activation in _GATED else {})


def vector_files(
    directory: ModelDirectory, pooling: str = "auto", score_tokens: Sequence[str] = ()
) -> EmbeddingFiles | RankingFiles | None:
    """How a model makes vectors or scores; None for a model that generates text.

    Args:
        pooling: "last" or "mean" makes a decoder that generates text a model of embeddings; "auto" is what its files
            say.
        score_tokens: the texts of two tokens make it a model that ranks: the score is the logit of the first, less the
            logit of the second.

    Raises:
        ConfigurationError: the files have a part that is not known, or contradict `pooling` or `score_tokens`.
    """
    found = EmbeddingFiles.of(directory) or RankingFiles.of(directory) or _of_decoder(directory)
    if pooling == "auto" and not score_tokens:
        if found is None and _is_of(directory, "Model"):
            raise ConfigurationError(
                f"{directory.path} has no output layer, as models of embeddings, and no {EMBEDDING_MODULES} that says "
                "how a vector is made; give --pooling last or --pooling mean, as its authors say"
            )
        return found
    flag = f"--pooling is {pooling}"
    if score_tokens:
        if pooling != "auto":
            raise ConfigurationError(f"{flag}, and --score-tokens makes a model that ranks; give one of them")
        flag = f"--score-tokens is {','.join(score_tokens)}"
    if found is not None:
        raise ConfigurationError(
            f"{flag}, and the files of {directory.path} say already how it makes vectors or scores; leave it out"
        )
    _check_is_causal(directory)
    if score_tokens:
        answers = _tokens_of(directory, score_tokens)
        return RankingFiles(_activation_of_scores(directory), _longest(directory), None, answers, has_template=True)
    return EmbeddingFiles((Pooling((_DECODER_POOLINGS[pooling],)), Normalize()))


def _of_decoder(directory: ModelDirectory) -> EmbeddingFiles | RankingFiles | None:
    """The files of a model that attends only to earlier tokens; None if they say nothing of vectors or scores."""
    path, longest = directory.path, _longest(directory)
    if directory.gguf is not None:
        return _of_gguf(path, directory.gguf.metadata)
    kinds = module_kinds(path)
    if not kinds:
        if not _is_of(directory, "ForSequenceClassification"):
            return None
        _check_is_causal(directory)
        return RankingFiles(_activation_of_scores(directory), longest, has_template=directory.chat_template is not None)
    _check_is_causal(directory)
    settings = _transformer_settings(path)
    modalities = settings.get("modality_config") or {}
    has_head = kinds == ("Transformer",) and _is_of(directory, "ForSequenceClassification")
    if has_head or kinds == ("Transformer", "LogitScore"):
        folders = [_folder(path, each.get("path")) for each in _read(path / EMBEDDING_MODULES)]
        answers = _answers(_config(folders[1])) if len(kinds) > 1 else ()
        prompts, default = _prompts(path, _settings(path, "CrossEncoder"))
        prompt = "" if default is None else prompts[default]
        longest = _max_tokens(path) or longest
        return RankingFiles(_activation_of_scores(directory), longest, None, answers, "message" in modalities, prompt)
    files = EmbeddingFiles.read(directory)
    if "message" in modalities:
        raise ConfigurationError(
            f"{path / TRANSFORMER_SETTINGS[0]} puts texts into the chat template, which is not supported for embeddings"
        )
    modes = {mode for module in files.modules if isinstance(module, Pooling) for mode in module.modes}
    if unknown := sorted(modes - _SUMMED_MODES - {"lasttoken"}):
        raise ConfigurationError(
            f"{path}: the pooling mode {unknown[0]} is not supported for {directory.architecture}, which attends only "
            f"to earlier tokens; supported are {', '.join(sorted(_SUMMED_MODES | {'lasttoken'}))}"
        )
    return replace(files, max_tokens=files.max_tokens or longest)


def _of_gguf(path: Path, metadata: Mapping[str, Any]) -> EmbeddingFiles | None:
    """By the field pooling_type; llama.cpp scales all vectors to the length 1."""
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if kind == 0:
        return None
    if kind not in _GGUF_POOLINGS:
        raise ConfigurationError(
            f"{path}: pooling_type is {kind!r:.80}; supported are 1, the mean of all tokens, and 3, the last token"
        )
    return EmbeddingFiles((Pooling((_GGUF_POOLINGS[kind],)), Normalize()))


def _is_of(directory: ModelDirectory, task: str) -> bool:
    """Whether config.json names the class of a decoder for this task."""
    name = ARCHITECTURES.get(str(directory.config.get("model_type")), "").removesuffix("ForCausalLM")
    return bool(name) and f"{name}{task}" in (directory.config.get("architectures") or ())


def _check_is_causal(directory: ModelDirectory) -> None:
    for name, usual in (("is_causal", True), ("use_bidirectional_attention", False)):
        if directory.config.get(name, usual) not in (usual, None):
            raise ConfigurationError(
                f"{directory.path}: {name} of config.json is {directory.config[name]!r:.80}: its tokens attend to "
                "later ones, which is not supported"
            )


def _tokens_of(directory: ModelDirectory, texts: Sequence[str]) -> tuple[int, ...]:
    """The ids of the tokens of --score-tokens."""
    if len(texts) != 2 or texts[0] == texts[1]:
        raise ConfigurationError(f"--score-tokens is {','.join(texts)!r:.80}; it must be two tokens, such as yes,no")
    ids = {text: directory.id_of(text) for text in texts}
    if missing := [text for text, token_id in ids.items() if token_id is None]:
        raise ConfigurationError(
            f'--score-tokens has "{missing[0]:.80}", which is not a token of {directory.path}; give tokens as '
            "tokenizer.json writes them"
        )
    return tuple(token_id for token_id in ids.values() if token_id is not None)


def _answers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens of a `LogitScore`: of yes, and perhaps of no."""
    if (name := config.get("module_input_name", "causal_logits")) != "causal_logits":
        raise ConfigurationError(f"module_input_name of LogitScore is {name!r:.80}, which is not supported")
    ids = [config.get("true_token_id"), config.get("false_token_id")]
    found = tuple(each for each in ids if isinstance(each, int) and not isinstance(each, bool) and each >= 0)
    if len(found) != 2 - (ids[1] is None):
        raise ConfigurationError(f"true_token_id and false_token_id of LogitScore are {ids!r:.80}; expected token ids")
    return found


def _activation_of_scores(directory: ModelDirectory) -> str:
    """The function of a cross-encoder's scores, by the files of its newer and older releases."""
    newest = _read(directory.path / _SETTINGS)
    for settings in (newest, directory.config.get("sentence_transformers")):
        if isinstance(settings, dict) and settings.get("activation_fn"):
            return _activation(directory.path / "config.json", settings["activation_fn"])
    named = directory.config.get("sbert_ce_default_activation_function") or "torch.nn.Sigmoid"
    return _activation(directory.path / "config.json", named)


def _longest(directory: ModelDirectory) -> int | None:
    """The maximum number of tokens of a text that the tokenizer's files say."""
    longest = directory.tokenizer_config.get("model_max_length")
    is_length = isinstance(longest, int) and not isinstance(longest, bool) and 0 < longest < 1 << 20
    return longest if is_length else None


def hidden_size_of(directory: ModelDirectory) -> int:
    """The size of a model's hidden states."""
    value = encoder_fields(directory).get("hidden_size", directory.config.get("n_embd"))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{directory.path}: hidden_size is {value!r:.80}; expected an integer of at least 1")
    return value


def _modules_of_gguf(path: Path, header: GgufHeader) -> tuple[Module, ...]:
    """Files do not say whether vectors are scaled to the length 1; llama.cpp always does that."""
    from quire.model_files.gguf_encoders import dense_of, pooling_of

    layers = [Dense(path, shape[1], shape[0], False, "Identity", name) for name, shape in dense_of(header)]
    return (Pooling((pooling_of(header),)), *layers, Normalize())


def _read(path: Path) -> Any:
    """The parsed file; None if it does not exist. Raises ConfigurationError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot read {path}: {error!s:.200}") from error


def _folder(path: Path, name: object) -> Path:
    folder = path / str(name or "")
    if not folder.resolve().is_relative_to(path.resolve()):
        raise ConfigurationError(f"{path / EMBEDDING_MODULES}: path {name!r:.80} is outside of the directory")
    return folder


def _config(folder: Path) -> Mapping[str, Any]:
    config = _read(folder / "config.json")
    if not isinstance(config, dict):
        raise ConfigurationError(f"{folder / 'config.json'} is missing, or no object")
    return config


def _settings(path: Path, kind: str) -> Mapping[str, Any]:
    """config_sentence_transformers.json of a model of the class `kind`; empty if there is none. Raises
    ConfigurationError if it is of another class: its modules have another meaning."""
    settings = _read(path / _SETTINGS) or {}
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{path / _SETTINGS} is no object")
    if (given := settings.get("model_type") or kind) != kind:
        raise ConfigurationError(
            f"{path / _SETTINGS}: model_type is {given!r:.80}, and modules as in {EMBEDDING_MODULES} are supported for "
            f"{kind} only"
        )
    return settings


def _prompts(path: Path, settings: Mapping[str, Any]) -> tuple[Mapping[str, str], str | None]:
    """The prompts by their names, and the name of the default. Raises ConfigurationError."""
    prompts, default = settings.get(_PROMPTS) or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigurationError(f"{path / _SETTINGS}: {_PROMPTS} must be texts by their names")
    if default is not None and default not in prompts:
        raise ConfigurationError(f"{path / _SETTINGS}: default_prompt_name is {default!r:.80}, which is no prompt")
    return prompts, default


def _transformer_settings(folder: Path) -> Mapping[str, Any]:
    """The first file of `TRANSFORMER_SETTINGS` with content; empty if there is none."""
    found = (_read(folder / name) for name in TRANSFORMER_SETTINGS)
    settings = next(filter(None, found), {})
    return settings if isinstance(settings, dict) else {}


def lowers_texts(directory: ModelDirectory) -> bool:
    """Whether the module `Transformer` changes texts to lower case before its tokenizer reads them."""
    has_modules = directory.gguf is None and (directory.path / EMBEDDING_MODULES).is_file()
    return has_modules and bool(_transformer_settings(directory.path).get("do_lower_case"))


def _max_tokens(folder: Path) -> int | None:
    settings = _transformer_settings(folder)
    of_tokenizer = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}
    if not isinstance(of_tokenizer, dict):
        raise ConfigurationError(
            f"{folder / TRANSFORMER_SETTINGS[0]}: the arguments of the tokenizer are {of_tokenizer!r:.80}; expected an "
            "object"
        )
    name = "model_max_length" if "model_max_length" in of_tokenizer else "max_seq_length"
    value = of_tokenizer.get(name, settings.get("max_seq_length"))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{folder / TRANSFORMER_SETTINGS[0]}: {name} is {value!r:.80}; expected above 0")
    return value


def _pooling(config: Mapping[str, Any]) -> Pooling:
    named = config.get("pooling_mode")
    if named is None:
        modes: Sequence[object] = [mode for flag, mode in _FLAGS.items() if config.get(flag)] or ["mean"]
    else:
        modes = named if isinstance(named, list) else [named]
    unknown = [mode for mode in modes if mode not in POOLING_MODES]
    if unknown or not modes:
        raise ConfigurationError(
            f"the pooling mode {unknown[:1] or modes!r:.80} is not supported; supported are {', '.join(POOLING_MODES)}"
        )
    if config.get("include_prompt") is False:
        raise ConfigurationError(
            "include_prompt of Pooling is false, which is not supported: tokens of a text's prompt are pooled, too"
        )
    return Pooling(tuple(str(mode) for mode in modes))


def _check_is_of_vectors(folder: Path, config: Mapping[str, Any]) -> None:
    for name, usual in (("module_input_name", _OUTPUT), ("module_output_name", _OUTPUT), ("use_residual", False)):
        if config.get(name, usual) not in (usual, None):
            raise ConfigurationError(
                f"{folder / 'config.json'}: {name} is {config[name]!r:.80}, which is not supported"
            )


def _dense(folder: Path, config: Mapping[str, Any]) -> Dense:
    file = folder / "config.json"
    in_features, out_features = (_size(file, config, name) for name in ("in_features", "out_features"))
    _check_is_of_vectors(folder, config)
    activation = _activation(file, config.get("activation_function", "torch.nn.Tanh"))
    return Dense(folder, in_features, out_features, config.get("bias") is not False, activation)


def _size(file: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 20:
        raise ConfigurationError(f"{file}: {name} is {value!r:.80}; expected 1 to {(1 << 20) - 1:,}")
    return value


def _activation(file: Path, value: object) -> str:
    """The function of `ACTIVATIONS` with this name in torch."""
    named = _ACTIVATION.fullmatch(str(value))
    if named is None or named[1] not in ACTIVATIONS:
        raise ConfigurationError(
            f"{file}: the activation function is {value!r:.80}; supported are {', '.join(ACTIVATIONS)} of torch.nn"
        )
    return named[1]
