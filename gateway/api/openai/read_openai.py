"""Converts the body of a request to protobuf messages, and maps the names of their fields back to names in the body."""

import dataclasses
from collections.abc import Sequence
from typing import cast

from gateway.api.constraint_fields import constraint_of
from gateway.api.fields import Names, numbered
from gateway.api.generation_fields import CompletionBody, generation_options, names_of
from gateway.api.openai.conversation import (
    ConversationFields,
    Message,
    chat_message,
    kept_tools,
    template_options,
    tool_choice_of,
    tools_of,
)
from gateway.api.openai.schemas import ChatBody
from gateway.types import ChatPrompt, Clamp, Prompt, RequestOptions, TextPrompt, TokenPrompt


def completion_prompts(body: CompletionBody) -> list[Prompt]:
    """The prompts of a completion; a list of numbers is one prompt."""
    prompt = body.prompt
    if prompt is None:
        return []
    add_special_tokens = body.add_special_tokens is not False
    if isinstance(prompt, str):
        return [TextPrompt(prompt, add_special_tokens)]
    if not prompt or isinstance(prompt[0], int):
        return [TokenPrompt(cast(list[int], prompt))]
    prompts = cast(list[str] | list[list[int]], prompt)
    return [TextPrompt(each, add_special_tokens) if isinstance(each, str) else TokenPrompt(each) for each in prompts]


def chat_options(body: ChatBody, request_id: str) -> RequestOptions:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prompt = dataclasses.replace(
        chat_prompt(body.messages, body),
        tool_choice=tool_choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=constraint_of(body),
    )
    return generation_options(body, prompt, request_id, max_tokens, logprobs, body.prompt_logprobs, Clamp.AS_SET)


def chat_prompt(messages: Sequence[Message], fields: ConversationFields) -> ChatPrompt:
    return ChatPrompt(
        [chat_message(each) for each in messages],
        tools=tools_of(fields),
        template_options=template_options(fields),
        template=fields.chat_template,
    )


def chat_names(body: ChatBody) -> Names:
    """The names of the validator's fields in the body of a chat."""
    names = names_of(body)
    begins = {
        **names.begins,
        **numbered("tools", kept_tools(body)),
        **_names_of_calls(body.messages),
        "output.logprobs": "top_logprobs",
        "tool_choice.name": "tool_choice.function.name",
        "tool_choice.mode": "tool_choice",
        "tool_choice.allowed": "tool_choice.allowed_tools.tools",
        "template_options.arguments": "chat_template_kwargs",
    }
    if body.max_completion_tokens is not None:
        begins["stopping.max_tokens"] = "max_completion_tokens"
    own = (name for name in ("documents", "enable_thinking") if getattr(body, name) is not None)
    return Names(begins, {**names.whole, **{f"template_options.arguments.{name}": name for name in own}})


def _names_of_calls(messages: Sequence[Message]) -> dict[str, str]:
    """Names of the fields of earlier calls, which OpenAI's bodies nest one level deeper."""
    places = (
        f"messages[{position}].tool_calls[{number}]"
        for position, message in enumerate(messages)
        for number in range(len(message.tool_calls or ()))
    )
    return {f"{place}.{name}": f"{place}.function.{name}" for place in places for name in ("name", "arguments")}
