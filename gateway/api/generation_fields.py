"""The fields of a completion, and the parts of them that chats, responses and the parameters of KServe share: types,
checks, conversion to requests of the generator, and names in errors.

The validator checks ranges, and `field_rule` has the fields that are not read. docs/openai.md lists all fields.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field

from gateway.api import field_rule
from gateway.api.body import max_entries
from gateway.api.constraint_fields import ConstraintFields, check_constraints, constraint_of, constraint_path
from gateway.api.field_rule import FieldRule, Part, Unread
from gateway.api.fields import ONLY_STREAMS, Names, ParsedBody, Salt, options_of
from gateway.auth.caller import HIGHEST_PRIORITY, LOWEST_PRIORITY, current_caller
from gateway.request.limits import MAX_LOGIT_BIAS, MAX_TIME_TO_LIVE_MS
from gateway.request.violations import Violations
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
Element = TypeVar("Element")
# Validation stops at the first invalid element, since a body may have millions.
ListOf = Annotated[list[Element], Field(fail_fast=True)]


class Body(ParsedBody):
    """A body of an API of OpenAI or vLLM."""

    union_types: ClassVar[Mapping[str, str]] = {
        "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
        "input": "a string, a list of strings, a list of token ids or a list of lists of token ids",
        "stop": "a string or a list of strings",
        "content": "a string or a list of text parts",
        "early_stopping": 'true, false or "never"',
        "guided_json": "an object or a string",
        "json": "an object or a string",
    }

    model: str | None = None


class StreamOptions(Part):
    unread: ClassVar[Unread] = field_rule.STREAM_OPTIONS

    include_usage: bool | None = None
    # An extension of vLLM: with include_usage, every chunk has the usage so far.
    continuous_usage_stats: bool | None = None


class ContentPart(Part):
    """A part of the content. `type` is text, or refusal in an assistant's message, with the field of that name."""

    unread: ClassVar[Unread] = field_rule.CHAT_PART

    type: str
    text: str | None = None
    refusal: str | None = None


class Prediction(Part):
    """A text that the answer is likely to repeat, or a list of its parts. `type` is always content."""

    type: str
    content: str | ListOf[ContentPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


class AgentHints(Part):
    """Hints of an agent. A higher `priority` is more urgent; `osl` is the expected number of tokens in the answer.
    Other hints are ignored and counted."""

    priority: int | None = None
    osl: int | None = None


class CacheControl(Part):
    """The time to keep the conversation's blocks after the answer: `ttl` is 5m by default, or for example 30s or 1h."""

    type: str | None = None
    ttl: str | None = None


class Nvext(Part):
    """Dynamo's extensions. They are hints, so unknown ones are ignored and counted."""

    unread: ClassVar[Unread] = field_rule.NVEXT

    agent_hints: AgentHints | None = None
    cache_control: CacheControl | None = None


class SharedFields(BaseModel):
    """The fields of completions, chats and responses. The fields after the blank line are extensions."""

    stop: str | ListOf[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Keys of JSON objects are strings.
    logit_bias: Annotated[dict[Annotated[int, Field(strict=False)], float] | None, max_entries(MAX_LOGIT_BIAS)] = None
    stream: bool | None = None
    prediction: Prediction | None = None

    top_k: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    thinking_token_budget: int | None = None
    cache_salt: Salt | None = None
    # Quire's own: the stream outlives its reader, and its events have ids.
    durable: bool | None = None


class GenerationBody(Body, ConstraintFields, SharedFields):
    """Fields of completions and chat completions. The fields after the blank line are extensions of vLLM.

    A new sampling parameter with the name of its field in SamplingParameters only needs to be added here.
    """

    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None

    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: ListOf[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: ListOf[int] | None = None
    bad_words: ListOf[str] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: ListOf[int] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    include_metrics: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    # The extensions of Dynamo.
    nvext: Nvext | None = None

    def check(self, violations: Violations, rule: FieldRule) -> None:
        check_generation(violations, self)
        check_constraints(violations, self)


class CompletionBody(GenerationBody):
    api: ClassVar[str] = "completions"
    unread: ClassVar[Unread] = field_rule.COMPLETION

    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]] | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None


def check_generation(violations: Violations, body: GenerationBody) -> None:
    """Adds violations for fields that contradict each other, except constraints."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            violations.add("length_penalty", "has an effect only if use_beam_search is true")
        if body.early_stopping not in (None, False):
            violations.add("early_stopping", "has an effect only if use_beam_search is true")
    if body.stream_options is not None and body.stream_options.model_fields_set and not body.stream:
        violations.add("stream_options", "is set; it has an effect only if stream is true")
    if body.durable and not body.stream:
        violations.add("durable", ONLY_STREAMS)
    if body.logprob_token_ids and isinstance(body, CompletionBody) and is_echo_alone(body):
        violations.add("logprob_token_ids", "is set, but max_tokens is 0; it is only for generated tokens")
    # Checked here, because the validator's error would show the opposite sign.
    violations.check_range("priority", body.priority, -HIGHEST_PRIORITY, HIGHEST_PRIORITY)
    check_prediction(violations, body.prediction)


def check_prediction(violations: Violations, prediction: Prediction | None) -> None:
    if prediction is None:
        return
    if prediction.type != "content":
        violations.add("prediction.type", f'is {prediction.type[:40]!r}; it must be "content"')
    if isinstance(prediction.content, list) and any(part.text is None for part in prediction.content):
        violations.add("prediction.content", "has a part without text; a prediction has text parts")


def is_echo_alone(body: CompletionBody) -> bool:
    """Whether the answer has only the prompt and no generated text."""
    return bool(body.echo) and body.max_tokens == 0


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
    hints = (body.nvext and body.nvext.agent_hints) or AgentHints()
    as_written = dict(options.as_written)
    _add_sampling(body, options.sampling, as_written)
    return dataclasses.replace(
        options,
        as_written=as_written,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        clamp=clamp,
        retain_ms=_hinted_retention_ms(body),
        expected_tokens=hints.osl if hints.osl is not None and hints.osl > 0 else None,
        # In vLLM's API lower values run earlier, in Quire higher values.
        priority=_hinted_priority(hints) if body.priority is None else -body.priority,
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


def _hinted_priority(hints: AgentHints) -> int | None:
    """The priority in an agent's hint, limited to the maximum of its key: a hint is never rejected."""
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
