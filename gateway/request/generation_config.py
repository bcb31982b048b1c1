"""The model's generation_config.json: what becomes of each key that transformers' GenerationConfig has."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast

from gateway.request.validation import check_numbers
from gateway.request.violations import Violations
from gateway.types import RequestOptions, write
from quire.arrays import encode_int32
from quire.common.v1.common_pb2 import RowSampling, SamplingParameters, SequenceBias, StoppingParameters
from quire.model_directory import ModelDirectory
from quire.settings import ConfigurationError

_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters, by the names that they have in requests too."""
_NUMBER = re.compile(r"\d{1,10}")
_MAX_TOKEN_ID = 2**31 - 1
_MAX_STOP_STRINGS = 64
_MAX_BIAS = 1e30
_logger = logging.getLogger(__name__)


class Use(Enum):
    """What becomes of a key."""

    DEFAULT = "the default of a request field"
    APPLIED = "applied to every request"
    IGNORED = "ignored, and named in the log"
    NO_EFFECT = "without effect on the text"


_IGNORED: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("num_beam_groups", "num_beams", "num_return_sequences"), (1,)),
    **dict.fromkeys(("diversity_penalty", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("min_length", "penalty_alpha"), (0,)),
    **dict.fromkeys(("early_stopping", "token_healing"), (False,)),
    **dict.fromkeys(("constraints", "dola_layers", "exponential_decay_length_penalty", "force_words_ids"), ()),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "max_new_tokens", "max_time", "top_h"), ()),
    # 20 is what transformers 4 has where a model says nothing.
    "max_length": (20,),
    "watermarking_config": (),
}
"""Keys that change what transformers generates, with the values that do not, which need no line in the log."""

KEYS: Mapping[str, Use] = {
    **dict.fromkeys((*_NUMBERS, "do_sample", "min_new_tokens", "stop_strings"), Use.DEFAULT),
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "eos_token_id", "no_repeat_ngram_size"), Use.APPLIED),
    **dict.fromkeys(("sequence_bias", "suppress_tokens"), Use.APPLIED),
    **dict.fromkeys(_IGNORED, Use.IGNORED),
    **dict.fromkeys(
        (
            # Ids that a request's prompt has or that only batches with padding and encoders need.
            *("bos_token_id", "decoder_start_token_id", "pad_token_id"),
            # How the file came about.
            *("_from_model_config", "transformers_version"),
            # How `generate` computes and what it returns.
            *("cache_config", "cache_implementation", "compile_config", "continuous_batching_config"),
            *("disable_compile", "low_memory", "max_cache_len", "prefill_chunk_size", "use_cache"),
            *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
            *("remove_invalid_values", "renormalize_logits", "return_dict_in_generate"),
            # How it drafts.
            *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight"),
            *("assistant_lookbehind", "is_assistant", "max_matching_ngram_size", "num_assistant_tokens"),
            *("num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "speculation_type", "target_lookbehind"),
            "use_mtp",
        ),
        Use.NO_EFFECT,
    ),
}
"""Each key of GenerationConfig; docs/models.md shows this table."""


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What a model sets for all of its requests.

    Attributes:
        sampling, stopping: values of fields that a request leaves out.
        suppressed, suppressed_first: tokens that are never generated, and that are not the first of an output.
        biases: by sequence, of the logit of its last token.
    """

    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stopping: StoppingParameters = field(default_factory=StoppingParameters)
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    biases: tuple[tuple[tuple[int, ...], float], ...] = ()
    no_repeat_ngram_size: int = 0

    def rules(self, vocab_size: int) -> RowSampling:
        """The rules that each row gets, without tokens that the model has no logits for, which it never generates."""
        lists = (self.suppressed, self.suppressed_first)
        suppressed, first = ([each for each in ids if each < vocab_size] for ids in lists)
        return RowSampling(
            suppress_token_ids=encode_int32(suppressed),
            begin_suppress_token_ids=encode_int32(first),
            sequence_biases=[SequenceBias(ids=ids, bias=bias) for ids, bias in self.biases if max(ids) < vocab_size],
            no_repeat_ngram_size=self.no_repeat_ngram_size,
        )

    @property
    def never_generated(self) -> frozenset[int]:
        """The tokens that no request can generate, whatever comes before."""
        return frozenset(
            (*self.suppressed, *(ids[0] for ids, bias in self.biases if (len(ids), bias) == (1, -math.inf)))
        )


NO_DEFAULTS = ModelDefaults()


def model_defaults(directory: ModelDirectory) -> ModelDefaults:
    """What generation_config.json sets; `do_sample: false` is greedy. Logs a line of what is ignored.

    Raises:
        ConfigurationError: a value of another type, or out of the range of the request field.
    """
    given, file = directory.generation_defaults, directory.path
    file = file / "generation_config.json" if file.is_dir() else file
    _log_ignored(given, file)
    reader = _Reader(given, file)
    eos = {(token_id,) for token_id in directory.eos_token_ids}
    # As transformers, which takes the eos token out of them.
    bad = [ids for ids in reader.sequences("bad_words_ids") if ids not in eos]
    return ModelDefaults(
        sampling=_sampling(given, file),
        stopping=StoppingParameters(
            stop=reader.texts("stop_strings"), min_tokens=reader.count("min_new_tokens") or None
        ),
        suppressed=reader.token_ids("suppress_tokens"),
        suppressed_first=reader.token_ids("begin_suppress_tokens"),
        biases=(*((ids, -math.inf) for ids in bad), *reader.biases("sequence_bias").items()),
        no_repeat_ngram_size=reader.count("no_repeat_ngram_size"),
    )


def _log_ignored(given: Mapping[str, Any], file: Path) -> None:
    ignored = [
        f"{key} ({value!r:.80})"
        for key, value in given.items()
        if KEYS.get(key, Use.IGNORED) is Use.IGNORED and value not in _IGNORED.get(key, ())
    ]
    if ignored:
        _logger.warning("%s: these keys are ignored: %s", file, ", ".join(ignored))


def _sampling(given: Mapping[str, Any], file: Path) -> SamplingParameters:
    if given.get("top_k") == -1:
        # All tokens, as vLLM writes it, in requests too.
        given = {**given, "top_k": 0}
    for name in _NUMBERS:
        value = given.get(name, 1)
        kind, expected = (int, "an integer") if name == "top_k" else (int | float, "a number")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ConfigurationError(f"{name} in {file} is {value!r}, not {expected}")
    defaults = SamplingParameters()
    as_written: dict[str, Any] = {}
    for name in _NUMBERS:
        write(defaults, f"sampling.{name}", given.get(name), as_written)
    if given.get("do_sample") is False:
        write(defaults, "sampling.temperature", 0.0, as_written)
    violations = Violations()
    check_numbers(violations, RequestOptions(None, sampling=defaults, as_written=as_written))
    for violation in violations.found:
        raise ConfigurationError(f"{violation.field.removeprefix('sampling.')} in {file} {violation.description}")
    return defaults


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads values by key; an absent one is empty. Raises ConfigurationError for a value of another type."""

    given: Mapping[str, Any]
    file: Path

    def count(self, key: str) -> int:
        return self._checked(key, self.given.get(key, 0), _is_id, "a whole number of at least 0")

    def token_ids(self, key: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._checked(key, self.given.get(key, []), _are_ids, "a list of token ids")))

    def sequences(self, key: str) -> Iterable[tuple[int, ...]]:
        value = self.given.get(key, [])
        return dict.fromkeys(map(tuple, self._checked(key, value, _are_sequences, "a list of lists of token ids")))

    def biases(self, key: str) -> Mapping[tuple[int, ...], float]:
        value = self.given.get(key, [])
        if isinstance(value, dict):
            # As transformers saves an object whose keys are tuples: "(45, 7)".
            named = cast(dict[str, Any], value).items()
            value = [[list(map(int, _NUMBER.findall(name))), bias] for name, bias in named]
        expected = "a list of pairs of a list of token ids and a number"
        return {tuple(ids): float(bias) for ids, bias in self._checked(key, value, _are_biases, expected)}

    def texts(self, key: str) -> list[str]:
        value = self.given.get(key, [])
        value = [value] if isinstance(value, str) else value
        return self._checked(key, value, _are_texts, f"a text or a list of up to {_MAX_STOP_STRINGS} texts")

    def _checked(self, key: str, value: Any, fits: Callable[[Any], bool], expected: str) -> Any:
        if not fits(value):
            raise ConfigurationError(f"{key} in {self.file} is {value!r:.80}, not {expected}")
        return value


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, cast(list[Any], value)))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_TOKEN_ID


def _are_ids(value: Any) -> bool:
    return _is_list(value, _is_id)


def _is_sequence(value: Any) -> bool:
    return _are_ids(value) and value != []


def _are_sequences(value: Any) -> bool:
    return _is_list(value, _is_sequence)


def _is_pair(value: Any) -> bool:
    match value:
        case [ids, int(bias) | float(bias)] if not isinstance(bias, bool):
            return _is_sequence(ids) and (bias == -math.inf or abs(bias) <= _MAX_BIAS)
        case _:
            return False


def _are_biases(value: Any) -> bool:
    return _is_list(value, _is_pair)


def _are_texts(value: Any) -> bool:
    return _is_list(value, lambda each: isinstance(each, str) and each != "") and len(value) <= _MAX_STOP_STRINGS
