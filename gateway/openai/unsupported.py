"""Fields that OpenAI's or vLLM's API has and this version does not support.

A field that would change the answer is refused by name. A field that only labels the request or hints at how to serve
it is accepted and has no effect; README.md lists these. So is a value that changes nothing, null among them.
"""

from collections.abc import Mapping
from typing import Any

from gateway.auth.caller import HIGHEST_PRIORITY
from gateway.openai.schemas import Body, ChatBody, GenerationBody, Message, TokenizeBody
from gateway.request.violations import Violations

_HINTS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
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
# Of a message, and of a part of its content.
_MESSAGE_HINTS = frozenset({"cache_control"})
# Functions that the model may call, and the field that says whether it may.
_FUNCTIONS = {"tools": "tool_choice", "functions": "function_call"}
# Fields with the values that change nothing.
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "echo": (False,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
}
_KNOWN = frozenset(
    {
        "audio",
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "kv_transfer_params",
        "logits_processors",
        "prediction",
        "prompt_embeds",
        "structured_outputs",
        "truncate_prompt_tokens",
        "web_search_options",
    }
)
# What messages may have besides role and content, as long as it says nothing.
_SILENT = (None, [], "", {})


def check_supported(body: Body) -> None:
    """Raises InvalidArgument where a field asks for what is not done here, or is no field at all."""
    violations = Violations()
    extra = body.model_extra or {}
    for name, value in extra.items():
        if name not in _FUNCTIONS or extra.get(_FUNCTIONS[name]) != "none":
            _check_field(violations, name, value)
        if violations.are_enough:
            break
    if isinstance(body, GenerationBody):
        _check_combinations(violations, body)
    if isinstance(body, ChatBody | TokenizeBody):
        _check_messages(violations, body.messages or [])
        if body.messages is not None and body.add_special_tokens:
            violations.add("add_special_tokens", "is true; in a chat the chat template alone writes special tokens")
    violations.raise_if_any()


def _check_field(violations: Violations, name: str, value: Any) -> None:
    if value is None or name in _HINTS:
        return
    harmless = _WITHOUT_EFFECT.get(name)
    if harmless is None and name not in _KNOWN:
        violations.add(name[:80], "is not a field of this request")
    # `in` alone would take 1 for true.
    elif not any(type(value) is type(each) and value == each for each in harmless or ()):
        violations.add(name, "is not supported by this version")


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
    # The validator would show it with the sign that it has there.
    violations.check_range("priority", body.priority, -HIGHEST_PRIORITY, HIGHEST_PRIORITY)
    if isinstance(body, ChatBody):
        _check_chat(violations, body)


def _check_chat(violations: Violations, body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        violations.add("top_logprobs", "is set; it has a meaning only where logprobs is true")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        violations.add("max_tokens", f"is {both[0]} and max_completion_tokens is {both[1]}; set one of them")


def _check_messages(violations: Violations, messages: list[Message]) -> None:
    for position, message in enumerate(messages):
        if violations.are_enough:
            return
        for name, value in (message.model_extra or {}).items():
            if value not in _SILENT and name not in _MESSAGE_HINTS:
                violations.add(f"messages[{position}].{name[:80]}", "is not supported by this version")
        if message.content is None:
            violations.add(f"messages[{position}].content", "is missing; it must be a string or a list of text parts")
        if isinstance(message.content, list):
            _check_parts(violations, position, message)


def _check_parts(violations: Violations, position: int, message: Message) -> None:
    assert isinstance(message.content, list)
    for number, part in enumerate(message.content):
        if violations.are_enough:
            return
        field = f"messages[{position}].content[{number}]"
        for name, value in (part.model_extra or {}).items():
            if part.type == "text" and value not in _SILENT and name not in _MESSAGE_HINTS:
                violations.add(f"{field}.{name[:80]}", "is not supported by this version")
        if part.type != "text":
            violations.add(f"{field}.type", f'is "{part.type[:80]}"; only "text" is supported')
        elif part.text is None:
            violations.add(f"{field}.text", "is missing")
