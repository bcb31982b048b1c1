"""The bodies of requests: their fields and types, and the unsupported fields. The validator checks ranges.

A null field is absent. Fields that a body does not declare are in `model_extra`. A field that would change the answer
is refused, unless its value has no effect; a field that labels the request or hints at how to serve it is ignored.
docs/openai.md lists all fields.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from gateway.api.body import max_entries
from gateway.api.fields import Strict
from gateway.api.openai.constraint_fields import ConstraintFields, check_constraints
from gateway.api.openai.conversation import (
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
# Fields that label a request or hint at how to serve it. A chat's reasoning_effort goes to its template.
HINTS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
_STREAM_HINTS = frozenset({"include_obfuscation"})
# Unsupported fields, with the values that have no effect.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "suffix": ("",),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "guided_decoding_disable_fallback": (True, False),
    "guided_decoding_disable_additional_properties": (False,),
    **dict.fromkeys(
        (
            "audio",
            "cache_salt",
            "chat_template",
            "chat_template_kwargs",
            "documents",
            "guided_whitespace_pattern",
            "kv_transfer_params",
            "logits_processors",
            "mm_processor_kwargs",
            "moderation",
            "prediction",
            "prompt_embeds",
            "vllm_xargs",
            "web_search_options",
        ),
        (),
    ),
}
_WAYS_OUT = {"functions": "; use tools", "function_call": "; use tool_choice"}


class Body(Strict):
    model: str | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None
    # vLLM's: with include_usage, every chunk has the usage so far.
    continuous_usage_stats: bool | None = None


class GenerationBody(Body, ConstraintFields):
    """Fields of completions and chat completions; vLLM adds those below the blank line.

    A new parameter of sampling that has the name of its field in SamplingParameters is added here, and nowhere else.
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
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None


class CompletionBody(GenerationBody):
    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(GenerationBody, ConversationFields):
    messages: ListOf[Message]
    tool_choice: str | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None


class TokenizeBody(Body, ConversationFields):
    """Either a prompt or messages."""

    prompt: str | None = None
    messages: ListOf[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class LoadAdapterBody(Strict):
    """As in vLLM's API, whose further fields have no effect."""

    lora_name: str
    lora_path: str


class UnloadAdapterBody(Strict):
    """Likewise."""

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


def check_supported(violations: Violations, body: Body) -> None:
    """Adds violations for unsupported and unknown fields, and for those that contradict each other."""
    extra = body.model_extra or {}
    for name, value in extra.items():
        if violations.are_enough:
            break
        if name != "functions" or extra.get("function_call") != "none":
            _check_field(violations, name, value)
    if isinstance(body, GenerationBody):
        _check_combinations(violations, body)
        check_constraints(violations, body)
    if isinstance(body, ChatBody | TokenizeBody):
        check_conversation(violations, body.messages or [], body)
        if body.messages is not None and body.add_special_tokens:
            violations.add("add_special_tokens", "is true; in a chat only the chat template writes special tokens")


def _check_field(violations: Violations, name: str, value: Any) -> None:
    if value is None or name in HINTS:
        return
    if (harmless := UNSUPPORTED.get(name)) is None:
        violations.add(name[:80], "is not a field of this request")
    # `in` alone would accept 1 as true.
    elif not any(type(value) is type(each) and value == each for each in harmless):
        violations.add(name, f"is not supported by this version{_WAYS_OUT.get(name, '')}")


def _check_combinations(violations: Violations, body: GenerationBody) -> None:
    if body.stream and body.stream_options is not None:
        for name, value in (body.stream_options.model_extra or {}).items():
            if value not in (None, False) and name not in _STREAM_HINTS:
                violations.add(f"stream_options.{name[:80]}", "is not supported by this version")
    if body.stream and body.prompt_logprobs is not None:
        violations.add("prompt_logprobs", "cannot be used with stream")
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            violations.add("length_penalty", "has a meaning only where use_beam_search is true")
        if body.early_stopping not in (None, False):
            violations.add("early_stopping", "has a meaning only where use_beam_search is true")
    # Checked here, because the validator's error would show the opposite sign.
    violations.check_range("priority", body.priority, -HIGHEST_PRIORITY, HIGHEST_PRIORITY)
    if isinstance(body, ChatBody):
        _check_chat(violations, body)


def _check_chat(violations: Violations, body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        violations.add("top_logprobs", "is set; it has a meaning only where logprobs is true")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        violations.add("max_tokens", f"is {both[0]} and max_completion_tokens is {both[1]}; set one of them")
    check_tool_choice(violations, body.tool_choice)
