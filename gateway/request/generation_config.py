"""The model's generation_config.json: how each key of transformers' GenerationConfig is used."""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, cast

from annotated_types import Predicate
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from gateway.request.validation import check_numbers
from gateway.request.violations import Violations
from gateway.types import RequestOptions, write
from quire.common.v1.common_pb2 import RowSampling, SamplingParameters, SequenceBias, StoppingParameters
from quire.messages.arrays import encode_int32
from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError

_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters, by the names that they have in requests too."""
_ID_IN_TEXT = re.compile(r"\d{1,10}")
_MAX_TOKEN_ID = 2**31 - 1
_MAX_STOP_STRINGS = 64
_MAX_BIAS = 1e30
_logger = logging.getLogger(__name__)


class Use(Enum):
    """How the gateway uses a key."""

    DEFAULT = "the default of a request field"
    APPLIED = "applied to every request"
    IGNORED = "ignored, and named in the log"
    NO_EFFECT = "without effect on the text"


_KEYS = {
    Use.DEFAULT: "do_sample min_new_tokens min_p repetition_penalty stop_strings temperature top_k top_p",
    Use.APPLIED: "bad_words_ids begin_suppress_tokens eos_token_id no_repeat_ngram_size sequence_bias suppress_tokens",
    Use.IGNORED: """
        constraints diversity_penalty dola_layers early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty
        epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids forced_bos_token_id
        forced_eos_token_id guidance_scale length_penalty max_length max_new_tokens max_time min_length num_beam_groups
        num_beams num_return_sequences penalty_alpha token_healing top_h typical_p watermarking_config
    """,
    # Ids that a prompt has already, the origin of the file, and how `generate` computes, drafts and returns.
    Use.NO_EFFECT: """
        _from_model_config assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
        assistant_lookbehind bos_token_id cache_config cache_implementation compile_config continuous_batching_config
        decoder_start_token_id disable_compile is_assistant low_memory max_cache_len max_matching_ngram_size
        num_assistant_tokens num_assistant_tokens_schedule output_attentions output_hidden_states output_logits
        output_scores pad_token_id prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits
        return_dict_in_generate speculation_type target_lookbehind transformers_version use_cache use_mtp
    """,
}
KEYS: Mapping[str, Use] = {key: use for use, keys in _KEYS.items() for key in keys.split()}
"""Each key of GenerationConfig; docs/models.md shows this table."""
_NEUTRAL: Mapping[str, object] = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "length_penalty", "typical_p"), 1),
    **dict.fromkeys(("num_beam_groups", "num_beams", "num_return_sequences"), 1),
    **dict.fromkeys(("diversity_penalty", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("early_stopping", "min_length", "penalty_alpha", "token_healing"), 0),
    # The default of transformers 4.
    "max_length": 20,
}
"""Values of ignored keys that change nothing in transformers either, and need no line in the log."""


_Id = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]
_Sequence = Annotated[list[_Id], Field(min_length=1)]
_Bias = Annotated[float, Predicate(lambda bias: bias == -math.inf or abs(bias) <= _MAX_BIAS)]
_Text = Annotated[str, Field(min_length=1)]
_IDS = Field([], description="a list of token ids")
_COUNT = Field(0, description="a whole number of at least 0")
_NUMBER = Field(1, description="a number")


class _Values(BaseModel):
    """The keys that are used, with a description of their values for errors."""

    model_config = ConfigDict(strict=True)
    suppress_tokens: list[_Id] = _IDS
    begin_suppress_tokens: list[_Id] = _IDS
    bad_words_ids: list[_Sequence] = Field([], description="a list of lists of token ids")
    sequence_bias: list[Annotated[tuple[_Sequence, _Bias], Strict(False)]] = Field(
        [], description="a list of pairs of a list of token ids and a number"
    )
    stop_strings: list[_Text] = Field(
        [], max_length=_MAX_STOP_STRINGS, description=f"a text or a list of up to {_MAX_STOP_STRINGS} texts"
    )
    min_new_tokens: _Id = _COUNT
    no_repeat_ngram_size: _Id = _COUNT
    temperature: float = _NUMBER
    top_k: int = Field(1, description="an integer")
    top_p: float = _NUMBER
    min_p: float = _NUMBER
    repetition_penalty: float = _NUMBER


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Settings of a model for all of its requests.

    Attributes:
        sampling, stopping: values of fields that a request leaves out.
        suppressed, suppressed_first: tokens that are never generated, and tokens that never begin an output.
        biases: token sequences, each with the bias on the logit of its last token.
    """

    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stopping: StoppingParameters = field(default_factory=StoppingParameters)
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    biases: tuple[tuple[tuple[int, ...], float], ...] = ()
    no_repeat_ngram_size: int = 0

    def rules(self, vocab_size: int) -> RowSampling:
        """The rules of each row, without tokens that have no logits and so are never generated."""
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
        """The tokens that no request can generate after any text."""
        return frozenset(
            (*self.suppressed, *(ids[0] for ids, bias in self.biases if (len(ids), bias) == (1, -math.inf)))
        )


NO_DEFAULTS = ModelDefaults()


def model_defaults(directory: ModelDirectory) -> ModelDefaults:
    """The settings in generation_config.json; `do_sample: false` is greedy. Logs the ignored keys in one line.

    Raises:
        ConfigurationError: a value of another type, or out of the range of the request field.
    """
    given, file = directory.generation_defaults, directory.path
    if not given:
        return NO_DEFAULTS
    file = file / "generation_config.json" if file.is_dir() else file
    _log_ignored(given, file)

    given = {key: _as_list(key, value) for key, value in given.items()}
    try:
        read = _Values.model_validate(given)
    except ValidationError as error:
        key = error.errors(include_url=False)[0]["loc"][0]
        expected = _Values.model_fields[str(key)].description
        raise ConfigurationError(f"{key} in {file} is {given[str(key)]!r:.80}, not {expected}") from error
    # As in transformers, no bad word is the eos token.
    eos = {(token_id,) for token_id in directory.eos_token_ids}
    return ModelDefaults(
        sampling=_sampling(given, file),
        stopping=StoppingParameters(stop=read.stop_strings, min_tokens=read.min_new_tokens or None),
        suppressed=tuple(dict.fromkeys(read.suppress_tokens)),
        suppressed_first=tuple(dict.fromkeys(read.begin_suppress_tokens)),
        biases=(
            *((ids, -math.inf) for ids in dict.fromkeys(map(tuple, read.bad_words_ids)) if ids not in eos),
            *{tuple(ids): bias for ids, bias in read.sequence_bias}.items(),
        ),
        no_repeat_ngram_size=read.no_repeat_ngram_size,
    )


_OWN_LENGTH = "max_new_tokens"


def _log_ignored(given: Mapping[str, Any], file: Path) -> None:
    ignored = [
        f"{key} ({value!r:.80})"
        for key, value in given.items()
        if KEYS.get(key, Use.IGNORED) is Use.IGNORED and value != _NEUTRAL.get(key) and key != _OWN_LENGTH
    ]
    if _OWN_LENGTH in given:
        # Many files have this key, and each request limits its own answer.
        _logger.info("%s: max_new_tokens (%r) is ignored; max_tokens of a request decides", file, given[_OWN_LENGTH])
    if ignored:
        _logger.warning("%s: these keys are ignored: %s", file, ", ".join(ignored))


def _sampling(given: Mapping[str, Any], file: Path) -> SamplingParameters:
    if given.get("top_k") == -1:
        # All tokens, as vLLM writes it, in requests too.
        given = {**given, "top_k": 0}
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


def _as_list(key: str, value: Any) -> Any:
    """Converts the other form of two keys: a single text; an object with keys that transformers saves as "(45, 7)"."""
    if key == "stop_strings" and isinstance(value, str):
        return [value]
    if key == "sequence_bias" and isinstance(value, dict):
        return [[list(map(int, _ID_IN_TEXT.findall(name))), bias] for name, bias in cast(dict[str, Any], value).items()]
    return value
