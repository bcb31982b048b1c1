"""The fields and types of request bodies. The validator checks ranges, and `field_rule` has the fields that are not
read. docs/openai.md lists all fields.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from gateway.api import field_rule
from gateway.api.body import max_entries
from gateway.api.durable_streams import ONLY_STREAMS
from gateway.api.field_rule import Part, Unread
from gateway.api.fields import Salt
from gateway.api.openai.constraint_fields import ConstraintFields, check_constraints
from gateway.api.openai.conversation import (
    ContentPart,
    ConversationFields,
    Message,
    ToolChoiceObject,
    check_conversation,
    check_tool_choice,
)
from gateway.auth.caller import HIGHEST_PRIORITY
from gateway.request.limits import MAX_LOGIT_BIAS
from gateway.request.violations import Violations

Element = TypeVar("Element")
# Validation stops at the first invalid element, since a body may have millions.
ListOf = Annotated[list[Element], Field(fail_fast=True)]


class Body(Part):
    api: ClassVar[str] = "tokens"

    model: str | None = None


class StreamOptions(Part):
    unread: ClassVar[Unread] = field_rule.STREAM_OPTIONS

    include_usage: bool | None = None
    # An extension of vLLM: with include_usage, every chunk has the usage so far.
    continuous_usage_stats: bool | None = None


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


class GenerationBody(Body, ConstraintFields):
    """Fields of completions and chat completions. The fields after the blank line are extensions of vLLM.

    A new sampling parameter with the name of its field in SamplingParameters only needs to be added here.
    """

    n: int | None = None
    best_of: int | None = None
    stop: str | ListOf[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Keys of JSON objects are strings.
    logit_bias: Annotated[dict[Annotated[int, Field(strict=False)], float] | None, max_entries(MAX_LOGIT_BIAS)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: ListOf[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: ListOf[int] | None = None
    bad_words: ListOf[str] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: ListOf[int] | None = None
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    include_metrics: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    cache_salt: Salt | None = None
    # The extensions of Dynamo.
    nvext: Nvext | None = None
    # An extension of Quire: the stream outlives its reader, and its events have ids.
    durable: bool | None = None


class CompletionBody(GenerationBody):
    api: ClassVar[str] = "completions"
    unread: ClassVar[Unread] = field_rule.COMPLETION

    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]] | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(GenerationBody, ConversationFields):
    api: ClassVar[str] = "chat"
    unread: ClassVar[Unread] = field_rule.CHAT

    messages: ListOf[Message]
    tool_choice: str | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None

    @property
    def undeclared(self) -> Mapping[str, Any]:
        fields = super().undeclared
        # With function_call none, functions have no effect.
        is_silent = fields.get("function_call") == "none"
        return {name: value for name, value in fields.items() if name != "functions"} if is_silent else fields

    @property
    def requires_call(self) -> bool:
        """Whether the answer must be a call."""
        choice = self.tool_choice
        if isinstance(choice, ToolChoiceObject):
            return choice.allowed_tools is None or choice.allowed_tools.mode == "required"
        return choice == "required"


class TokenizeBody(Body, ConversationFields):
    """Either a prompt or messages."""

    prompt: str | None = None
    messages: ListOf[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class LoadAdapterBody(Part):
    """An adapter to load, as in vLLM's API, whose further fields have no effect."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterBody(Part):
    """An adapter to unload, as in vLLM's API, whose further fields have no effect."""

    lora_name: str


class DetokenizeBody(Body):
    tokens: ListOf[int]


# The types of fields that accept several, as errors show them.
UNION_TYPES: dict[str, str] = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": "a string or a list of text parts",
    "early_stopping": 'true, false or "never"',
    "guided_json": "an object or a string",
    "json": "an object or a string",
    "tool_choice": 'a string, {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}',
}


def check_body(violations: Violations, body: Body) -> None:
    """Adds violations for fields that contradict each other or have unknown values."""
    if isinstance(body, GenerationBody):
        _check_combinations(violations, body)
        check_constraints(violations, body)
    if isinstance(body, ChatBody | TokenizeBody):
        is_forced = isinstance(body, ChatBody) and body.requires_call
        check_conversation(violations, body.messages or [], body, is_forced=is_forced)
        if body.messages is not None and body.add_special_tokens:
            violations.add("add_special_tokens", "is true; in a chat only the chat template writes special tokens")


def _check_combinations(violations: Violations, body: GenerationBody) -> None:
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            violations.add("length_penalty", "has an effect only if use_beam_search is true")
        if body.early_stopping not in (None, False):
            violations.add("early_stopping", "has an effect only if use_beam_search is true")
    if body.stream_options is not None and body.stream_options.model_fields_set and not body.stream:
        violations.add("stream_options", "is set; it has an effect only if stream is true")
    if body.durable and not body.stream:
        violations.add("durable", ONLY_STREAMS)
    if body.logprob_token_ids and isinstance(body, CompletionBody) and body.echo and body.max_tokens == 0:
        violations.add("logprob_token_ids", "is set, but max_tokens is 0; it is only for generated tokens")
    # Checked here, because the validator's error would show the opposite sign.
    violations.check_range("priority", body.priority, -HIGHEST_PRIORITY, HIGHEST_PRIORITY)
    check_prediction(violations, body.prediction)
    if isinstance(body, ChatBody):
        _check_chat(violations, body)


def check_prediction(violations: Violations, prediction: Prediction | None) -> None:
    if prediction is None:
        return
    if prediction.type != "content":
        violations.add("prediction.type", f'is {prediction.type[:40]!r}; it must be "content"')
    if isinstance(prediction.content, list) and any(part.text is None for part in prediction.content):
        violations.add("prediction.content", "has a part without text; a prediction has text parts")


def _check_chat(violations: Violations, body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        violations.add("top_logprobs", "is set; it has an effect only if logprobs is true")
    check_tool_choice(violations, body.tool_choice)
