"""How a row samples, from messages to values."""

import math

import numpy as np

from quire.arrays import decode_float32, decode_int32
from quire.rpc.errors import invalid_field
from quire.worker.v1 import worker_pb2
from worker_svc.info import ModelGeometry, WorkerLimits
from worker_svc.steps import Int32Array, LogitRules, RowSampling


class SamplingDecoder:
    """Reads RowSampling for one worker."""

    def __init__(self, model: ModelGeometry, limits: WorkerLimits) -> None:
        self._vocab_size = model.vocab_size
        self._max_logprobs = limits.max_logprobs

    def decode(self, message: worker_pb2.RowSampling, field: str) -> RowSampling:
        """The parameters as values; `field` is where they stand in the step.

        Raises:
            InvalidArgument: one is misshapen or out of range; it names field, value and limit.
        """
        if not (math.isfinite(message.temperature) and message.temperature >= 0):
            raise invalid_field(f"{field}.temperature", f"is {message.temperature}; it must be finite and at least 0")
        if not 0 < message.top_p <= 1:
            raise invalid_field(f"{field}.top_p", f"is {message.top_p}; it must be above 0 and at most 1")
        if not 0 <= message.min_p <= 1:
            raise invalid_field(f"{field}.min_p", f"is {message.min_p}; it must be from 0 to 1")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(message, name) > self._max_logprobs:
                raise invalid_field(
                    f"{field}.{name}", f"is {getattr(message, name)}; the limit is {self._max_logprobs}"
                )
        if message.HasField("num_candidates") and not message.num_candidates:
            raise invalid_field(f"{field}.num_candidates", "is 0; it must be at least 1 where it is set")
        rules = self._rules(message, field)
        return RowSampling(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            seed=message.seed,
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            # More than the vocabulary means all of it: a search with many stop tokens may ask for that.
            num_candidates=min(message.num_candidates, self._vocab_size) or None,
            prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
            rules=None if rules.is_neutral else rules,
        )

    def _rules(self, message: worker_pb2.RowSampling, field: str) -> LogitRules:
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            if not math.isfinite(getattr(message, name)):
                raise invalid_field(f"{field}.{name}", f"is {getattr(message, name)}; it must be finite")
        if message.repetition_penalty < 0:
            raise invalid_field(
                f"{field}.repetition_penalty", f"is {message.repetition_penalty}; it must be at least 0"
            )
        bias_token_ids, bias_values = self._logit_bias(message, field)
        return LogitRules(
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=message.repetition_penalty or 1.0,
            bias_token_ids=bias_token_ids,
            bias_values=bias_values,
            allowed_token_ids=self._token_ids(message.allowed_token_ids, f"{field}.allowed_token_ids"),
            bad_sequences=tuple(
                self._bad_sequence(each, f"{field}.bad_token_sequences[{i}]")
                for i, each in enumerate(message.bad_token_sequences)
            ),
            min_tokens=message.min_tokens,
            stop_token_ids=self._token_ids(message.stop_token_ids, f"{field}.stop_token_ids"),
        )

    def _logit_bias(self, message: worker_pb2.RowSampling, field: str) -> tuple[Int32Array, np.ndarray]:
        token_ids = self._token_ids(message.logit_bias_token_ids, f"{field}.logit_bias_token_ids")
        values = decode_float32(message.logit_bias_values, f"{field}.logit_bias_values")
        if len(values) != len(token_ids):
            raise invalid_field(
                f"{field}.logit_bias_values", f"has {len(values)} entries; logit_bias_token_ids has {len(token_ids)}"
            )
        if not np.isfinite(values).all():
            worst = values[~np.isfinite(values)][0]
            raise invalid_field(f"{field}.logit_bias_values", f"holds {worst}; values must be finite")
        ordered = np.sort(token_ids)
        if len(repeated := ordered[1:][ordered[1:] == ordered[:-1]]):
            raise invalid_field(f"{field}.logit_bias_token_ids", f"holds token {repeated[0]} twice")
        return token_ids, values

    def _bad_sequence(self, data: bytes, field: str) -> Int32Array:
        token_ids = self._token_ids(data, field)
        if not len(token_ids):
            raise invalid_field(field, "is empty; a sequence has at least 1 token")
        return token_ids

    def _token_ids(self, data: bytes, field: str) -> Int32Array:
        return decode_int32(data, field, minimum=0, below=self._vocab_size)
