"""The fields of a completion, and the parts of them that chats, responses and the parameters of KServe share.

The validator checks ranges, and `field_rule` has the fields that are not read. docs/openai.md lists all fields.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field

from gateway.api import field_rule
from gateway.api.body import max_entries
from gateway.api.constraint_fields import ConstraintFields
from gateway.api.durable_streams import ONLY_STREAMS
from gateway.api.field_rule import Part, Unread
from gateway.api.fields import Salt
from gateway.auth.caller import HIGHEST_PRIORITY
from gateway.request.limits import MAX_LOGIT_BIAS
from gateway.request.violations import Violations

Element = TypeVar("Element")
# Validation stops at the first invalid element, since a body may have millions.
ListOf = Annotated[list[Element], Field(fail_fast=True)]


class Body(Part):
    """A body; `api` is the name of its API in metrics."""

    api: ClassVar[str]

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


class CompletionBody(GenerationBody):
    api: ClassVar[str] = "completions"
    unread: ClassVar[Unread] = field_rule.COMPLETION

    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]] | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None


UNION_TYPES: Mapping[str, str] = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": "a string or a list of text parts",
    "early_stopping": 'true, false or "never"',
    "guided_json": "an object or a string",
    "json": "an object or a string",
}
"""The types of fields that accept several, as errors show them."""


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
