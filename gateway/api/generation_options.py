"""Converts the fields of a generation to the request of a generator, and the validator's names of fields back."""

import dataclasses
import re
from typing import Any

from gateway.api.constraint_fields import constraint_of, constraint_path
from gateway.api.fields import Names, options_of
from gateway.api.generation_fields import AgentHints, CompletionBody, GenerationBody, is_echo_alone
from gateway.auth.caller import LOWEST_PRIORITY, current_caller
from gateway.request.limits import MAX_TIME_TO_LIVE_MS
from gateway.types import Clamp, Prompt, RequestOptions, write
from quire.common.v1 import common_pb2
from quire.common.v1.common_pb2 import SamplingParameters

# OpenAI's default for completions.
DEFAULT_MAX_TOKENS = 16
_EARLY_STOPPING = {
    None: common_pb2.EARLY_STOPPING_FALSE,
    False: common_pb2.EARLY_STOPPING_FALSE,
    True: common_pb2.EARLY_STOPPING_TRUE,
    "never": common_pb2.EARLY_STOPPING_NEVER,
}
_DEFAULT_RETENTION, _RETENTION = "5m", re.compile(r"([1-9][0-9]{0,6})([smh])")
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000}


def completion_options(body: CompletionBody, prompt: Prompt | None, request_id: str) -> RequestOptions:
    """The request of a checked completion with this prompt."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    # The log probabilities of the prompt arrive with the first generated token.
    if is_echo_alone(body):
        max_tokens = 1
    prompt_logprobs = _prompt_logprobs(body)
    return generation_options(body, prompt, request_id, max_tokens, body.logprobs, prompt_logprobs, Clamp.NEVER)


def generation_options(
    body: GenerationBody,
    prompt: Prompt | None,
    request_id: str,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    clamp: Clamp,
) -> RequestOptions:
    """The request of a checked body, with the parameters that each API names in its own way."""
    options = options_of(
        body,
        prompt,
        request_id,
        max_tokens=max_tokens,
        include_stop_string=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        include_special_tokens=body.skip_special_tokens is False,
        logprobs=logprobs,
        prediction=body.prediction and body.prediction.text,
        prompt_logprobs=prompt_logprobs,
    )
    as_written = dict(options.as_written)
    _add_sampling(body, options.sampling, as_written)
    return dataclasses.replace(
        options,
        as_written=as_written,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        clamp=clamp,
        retain_ms=_hinted_retention_ms(body),
        expected_tokens=_hinted_length(body),
        # In vLLM's API lower values run earlier, in Quire higher values.
        priority=_hinted_priority(body) if body.priority is None else -body.priority,
        priority_sign=-1,
    )


def names_of(body: GenerationBody, prompt: str = "prompt") -> Names:
    """The names of the validator's fields in the body; `prompt` is the prompt's name."""
    begins = {
        "prompt": prompt,
        "text": prompt,
        "token_ids.ids": prompt,
        "stopping.include_stop_string": "include_stop_str_in_output",
        "output.prediction": "prediction.content",
        "sampling.beam_search.beam_width": "n" if body.best_of is None else "best_of",
    }
    path = constraint_path(body)
    whole = {} if path is None else {"sampling.constraint": path, "response_format": path}
    if isinstance(body, CompletionBody) and body.prompt_logprobs != _prompt_logprobs(body):
        begins["output.prompt_logprobs"] = "logprobs"
    return Names(begins, whole)


def _prompt_logprobs(body: CompletionBody) -> int | None:
    """The number of log probabilities per prompt token; with `echo`, at least the number for generated tokens."""
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((count for count in asked if count is not None), default=None)


def _agent_hints(body: GenerationBody) -> AgentHints:
    hints = None if body.nvext is None else body.nvext.agent_hints
    return hints or AgentHints()


def _hinted_length(body: GenerationBody) -> int | None:
    """The expected number of tokens in the answer; None without a valid hint."""
    length = _agent_hints(body).osl
    return length if length is not None and length > 0 else None


def _hinted_priority(body: GenerationBody) -> int | None:
    """The priority in an agent's hint, limited to the maximum of its key: a hint is never rejected."""
    hints = _agent_hints(body)
    if hints.priority is None:
        return None
    return max(LOWEST_PRIORITY, min(hints.priority, current_caller().access.max_priority))


def _hinted_retention_ms(body: GenerationBody) -> int | None:
    """The hinted time to keep the blocks of the conversation, limited to the maximum time of a pin; None if absent."""
    control = None if body.nvext is None else body.nvext.cache_control
    if control is None or (found := _RETENTION.fullmatch(control.ttl or _DEFAULT_RETENTION)) is None:
        return None
    return min(int(found[1]) * _UNIT_MS[found[2]], MAX_TIME_TO_LIVE_MS)


def _add_sampling(body: GenerationBody, sampling: SamplingParameters, as_written: dict[str, Any]) -> None:
    """Adds the parameters that have another form in the body."""
    if isinstance(body, CompletionBody) and (constraint := constraint_of(body)) is not None:
        sampling.constraint.CopyFrom(constraint)
    if body.seed not in (None, -1):
        # As in torch, a negative seed is the unsigned number with the same 64 bits.
        sampling.seed = body.seed % 2**64
    if body.use_beam_search:
        # The beam width is `best_of`, or by default the number of returned sequences.
        width = body.best_of if body.best_of is not None else body.n
        beam_search, path = sampling.beam_search, "sampling.beam_search"
        beam_search.early_stopping = _EARLY_STOPPING[body.early_stopping]
        write(beam_search, f"{path}.beam_width", 1 if width is None else width, as_written)
        write(beam_search, f"{path}.length_penalty", body.length_penalty, as_written)
