"""The sampling parameters of all rows, as columns on the host, read from the messages of gateway and scheduler.

A new parameter is checked in `SamplingReader.read` and gets a column here, or a field of `LogitRules`.
"""

import math
from array import array as packed_array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, get_type_hints

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from quire.common.v1.common_pb2 import RowSampling as RowSamplingMessage
from quire.common.v1.common_pb2 import SamplingParameters
from quire.common.v1.common_pb2 import ThinkingLimit as ThinkingLimitMessage
from quire.constraints.thinking import ThinkingLimit
from quire.messages.arrays import decode_int32
from quire.rpc.errors import InvalidArgument, invalid_field
from quire.service.compatibility import unknown_field
from quire.worker.v1 import worker_pb2
from worker_svc.sampling.drafters import FollowedPrediction, PredictedTokens
from worker_svc.step import Int32Array, LogitRules, ModelGeometry, RowConstraint, RowSampling, WorkerLimits

_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)
_NO_TOKENS = np.zeros(0, np.int32)
_NUMBERS = [each.name for each in SamplingParameters.DESCRIPTOR.fields if each.type == FieldDescriptor.TYPE_FLOAT]


class SamplingReader:
    """Reads how a row samples, for one worker.

    The gateway has checked all values for its caller. This checks again the values that could harm other rows or the
    worker: a value out of range fails its row, never the step.
    """

    def __init__(self, model: ModelGeometry, limits: WorkerLimits) -> None:
        self._vocab_size = model.vocab_size
        self._max_logprobs = limits.max_logprobs
        # The last message's fields, and how its row samples: most requests use the same parameters.
        self._last: tuple[Sequence[object], RowSampling] | None = None

    def read(self, message: worker_pb2.AssignRow) -> RowSampling:
        """The row's sampling; with a `refusal` that names field, value and limit if it cannot be drawn by."""
        counts = [
            getattr(message, name) if message.HasField(name) else None
            for name in ("logprobs", "num_candidates", "prompt_logprobs")
        ]
        asked = [message.row_sampling, *counts]
        if self._last is not None and self._last[0] == asked:
            return replace(self._last[1], seed=message.seed)
        try:
            sampling = self._read(message)
            self._last = asked, sampling
            return sampling
        except InvalidArgument as error:
            return RowSampling(_filled(SamplingParameters()), refusal=str(error))

    def _read(self, message: worker_pb2.AssignRow) -> RowSampling:
        try:
            asked = RowSamplingMessage.FromString(message.row_sampling)
        except DecodeError as error:
            raise invalid_field("row_sampling", f"is not a RowSampling message: {error}") from error
        if (field := unknown_field(asked)) is not None:
            # Ignored, it would give other tokens than the caller asked for, in silence.
            raise invalid_field(
                "row_sampling", f"has {field}, which this worker's release lacks: upgrade workers first"
            )
        sampling = _filled(asked.sampling)
        for name in _NUMBERS:
            if not math.isfinite(getattr(sampling, name)):
                raise invalid_field(f"sampling.{name}", f"is {getattr(sampling, name)}; it must be finite")
        if sampling.temperature < 0:
            raise invalid_field("sampling.temperature", f"is {sampling.temperature:g}; it must be at least 0")
        if not 0 < sampling.top_p <= 1:
            raise invalid_field("sampling.top_p", f"is {sampling.top_p:g}; it must be above 0 and at most 1")
        if not 0 <= sampling.min_p <= 1:
            raise invalid_field("sampling.min_p", f"is {sampling.min_p:g}; it must be from 0 to 1")
        if sampling.repetition_penalty <= 0:
            raise invalid_field(
                "sampling.repetition_penalty", f"is {sampling.repetition_penalty:g}; it must be above 0"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(message, name) > self._max_logprobs:
                raise invalid_field(f"output.{name}", f"is {getattr(message, name)}; the limit is {self._max_logprobs}")
        rules = self._rules(asked)
        return RowSampling(
            parameters=sampling,
            seed=message.seed,
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            # More than the vocabulary means all of it: a search with many stop tokens may ask for that.
            num_candidates=min(message.num_candidates, self._vocab_size) or None,
            prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
            rules=None if rules.is_neutral else rules,
            constraint=self._constraint(asked),
            predicted=self._predicted(asked.predicted_token_ids),
            logprob_token_ids=self._logprob_token_ids(asked.logprob_token_ids, message.logprobs),
            ending_token_ids=frozenset(asked.stopping.stop_token_ids),
        )

    def _predicted(self, data: bytes) -> Int32Array | None:
        return decode_int32(data, "predicted_token_ids", minimum=0, below=self._vocab_size) if data else None

    def _logprob_token_ids(self, data: bytes, num_reported: int) -> Int32Array | None:
        if not data:
            return None
        token_ids = decode_int32(data, "logprob_token_ids", minimum=0, below=self._vocab_size)
        if len(token_ids) != num_reported:
            raise invalid_field("logprob_token_ids", f"has {len(token_ids)} tokens; output.logprobs is {num_reported}")
        return token_ids

    def _constraint(self, asked: RowSamplingMessage) -> RowConstraint | None:
        message = asked.sampling.constraint if asked.sampling.HasField("constraint") else None
        thinking = self._thinking(asked.thinking) if asked.HasField("thinking") else None
        if message is None and thinking is None:
            return None
        endings = tuple(each for each in asked.stopping.stop_token_ids if each < self._vocab_size)
        return RowConstraint(message, endings, asked.stopping.min_tokens, thinking)

    def _thinking(self, asked: ThinkingLimitMessage) -> ThinkingLimit:
        end_token_ids = self._token_ids("thinking.end_token_ids", asked.end_token_ids[:])
        for name, value in (("begin", asked.begin), ("end", asked.end), ("end_token_ids", end_token_ids)):
            if not len(value):
                raise invalid_field(f"thinking.{name}", "is empty; the reasoning begins and ends with a mark")
        return ThinkingLimit(asked.begin.encode(), asked.end.encode(), tuple(end_token_ids.tolist()), asked.max_tokens)

    def _rules(self, asked: RowSamplingMessage) -> LogitRules:
        sampling, stopping = asked.sampling, asked.stopping
        bias = sampling.logit_bias
        values = np.fromiter(bias.values(), np.float32, len(bias))
        if not np.isfinite(values).all():
            raise invalid_field("sampling.logit_bias", f"holds {values[~np.isfinite(values)][0]}; it must be finite")
        suppressed, first = (
            decode_int32(getattr(asked, name), name, minimum=0, below=self._vocab_size)
            for name in ("suppress_token_ids", "begin_suppress_token_ids")
        )
        biased = [
            (self._sequence(f"sequence_biases[{index}]", each.ids), each.bias)
            for index, each in enumerate(asked.sequence_biases)
        ]
        for index, (_, each) in enumerate(biased):
            if math.isnan(each) or each == math.inf:
                raise invalid_field(f"sequence_biases[{index}]", f"has the bias {each}; it must be finite or -infinity")
        return LogitRules(
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            bias_token_ids=np.concatenate((self._token_ids("sampling.logit_bias", list(bias)), suppressed)),
            bias_values=np.concatenate((values, np.full(len(suppressed), -np.inf, np.float32))),
            allowed_token_ids=self._token_ids("sampling.allowed_token_ids", sampling.allowed_token_ids[:]),
            bad_sequences=tuple(
                self._sequence(f"bad_token_sequences[{index}]", each.ids)
                for index, each in enumerate(asked.bad_token_sequences)
            ),
            # A constraint ends a row before min_tokens if nothing else may follow.
            min_tokens=0 if sampling.HasField("constraint") else stopping.min_tokens,
            # An eos id beyond the logits is never drawn.
            stop_token_ids=np.array([each for each in stopping.stop_token_ids if each < self._vocab_size], np.int32),
            first_excluded=first,
            sequence_biases=tuple(biased),
            no_repeat_ngram_size=asked.no_repeat_ngram_size,
        )

    def _sequence(self, field: str, ids: Sequence[int]) -> Int32Array:
        token_ids = self._token_ids(field, list(ids))
        if not len(token_ids):
            raise invalid_field(field, "is empty; a sequence has at least 1 token")
        return token_ids

    def _token_ids(self, field: str, ids: list[int]) -> Int32Array:
        if not ids:
            return _NO_TOKENS
        if (greatest := max(ids)) >= self._vocab_size:
            raise invalid_field(field, f"holds token {greatest}; token ids of this model are below {self._vocab_size}")
        return np.frombuffer(packed_array("i", ids), np.int32)


def _filled(sampling: SamplingParameters) -> SamplingParameters:
    """The message, with neutral values in place of absent ones."""
    for name in ("top_p", "repetition_penalty"):
        if not sampling.HasField(name):
            setattr(sampling, name, 1.0)
    return sampling


# The dtype of a column is written twice: numpy's alias of arrays has another form in each version.
Floats = Annotated[NDArray[np.float32], np.float32]
Numbers = Annotated[NDArray[np.int64], np.int64]
Flags = Annotated[NDArray[np.bool_], np.bool_]
Objects = Annotated[NDArray[np.object_], np.object_]


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Parameters of several rows: parallel arrays of shape [n]. The proto messages document each."""

    temperature: Floats
    top_k: Numbers
    top_p: Floats
    min_score: Floats
    """The logarithm of min_p: a token needs at least min_p times the probability of the most likely one, whose score is
    0."""
    seed: Annotated[NDArray[np.uint64], np.uint64]
    wants_logprobs: Flags
    num_logprobs: Numbers
    logprob_token_ids: Objects
    """For each row an array of the tokens that it reports, or None."""
    num_candidates: Numbers
    """0 if the row draws a token."""
    has_rules: Flags
    rules: Objects
    """`LogitRules`, or None if nothing is done to the logits."""
    has_constraint: Flags
    num_prompt_tokens: Numbers
    wants_prompt_logprobs: Flags
    num_prompt_logprobs: Numbers
    followed: Objects
    """`FollowedPrediction`, the output that the caller expects; None if there is none."""
    endings: Objects
    """A frozenset of the tokens that end it, of a row that has a sequence."""
    is_refused: Flags
    refusal: Objects
    """Why the row fails when it samples; None if it does not."""

    @property
    def changes_logits(self) -> NDArray[np.bool_]:
        """Whether rules or a constraint change the logits of the row."""
        return self.has_rules | self.has_constraint

    @property
    def reports_more(self) -> NDArray[np.bool_]:
        """Whether the row reports more than tokens."""
        return self.wants_logprobs | (self.num_candidates > 0)

    @classmethod
    def empty(cls, num_rows: int) -> "SamplingColumns":
        """Columns of zeros and None, each of the dtype in its annotation."""
        hints = get_type_hints(cls, include_extras=True)
        dtypes = {name: hint.__metadata__[0] for name, hint in hints.items()}
        initial: dict[str, Any] = {name: None if dtype is np.object_ else 0 for name, dtype in dtypes.items()}
        initial["min_score"] = -np.inf
        return cls(*(np.full(num_rows, initial[name], dtype) for name, dtype in dtypes.items()))

    def take(self, indices: NDArray[np.integer]) -> "SamplingColumns":
        """The columns of some rows, copied."""
        return SamplingColumns(*(getattr(self, name)[indices] for name in _COLUMNS))

    def put(self, row: int, sampling: RowSampling, num_prompt_tokens: int) -> None:
        """Sets the parameters of one row."""
        parameters = sampling.parameters
        # Devices may flush smaller numbers to zero, which would mean greedy.
        temperature = parameters.temperature
        self.temperature[row] = max(temperature, _LEAST_TEMPERATURE) if temperature > 0 else 0
        self.top_k[row] = parameters.top_k
        self.top_p[row] = parameters.top_p
        self.min_score[row] = math.log(parameters.min_p) if parameters.min_p > 0 else -math.inf
        self.seed[row] = sampling.seed
        self.wants_logprobs[row] = sampling.logprobs is not None
        self.num_logprobs[row] = sampling.logprobs or 0
        self.logprob_token_ids[row] = sampling.logprob_token_ids
        self.num_candidates[row] = sampling.num_candidates or 0
        self.has_rules[row] = sampling.rules is not None
        self.rules[row] = sampling.rules
        self.has_constraint[row] = sampling.constraint is not None
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.wants_prompt_logprobs[row] = sampling.prompt_logprobs is not None
        self.num_prompt_logprobs[row] = sampling.prompt_logprobs or 0
        predicted = sampling.predicted
        self.followed[row] = (
            None if predicted is None else FollowedPrediction(PredictedTokens(predicted), num_prompt_tokens)
        )
        self.endings[row] = sampling.ending_token_ids
        self.is_refused[row] = sampling.refusal is not None
        self.refusal[row] = sampling.refusal

    def clear(self, rows: Int32Array) -> None:
        """Frees the objects of rows without a sequence; their numbers stay until `put` replaces them."""
        self.rules[rows] = self.refusal[rows] = self.followed[rows] = self.logprob_token_ids[rows] = None
        self.has_rules[rows] = self.has_constraint[rows] = self.is_refused[rows] = False

    def refuse(self, rows: NDArray[np.integer] | NDArray[np.bool_], reason: str) -> None:
        """Lets rows fail when they sample."""
        self.is_refused[rows] = True
        self.refusal[rows] = reason

    def copy_rows(self, parents: Int32Array, children: Int32Array) -> None:
        """The children get the parents' parameters."""
        for name in _COLUMNS:
            column = getattr(self, name)
            column[children] = column[parents]


_COLUMNS = tuple(column.name for column in fields(SamplingColumns))
