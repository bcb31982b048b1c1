"""docs/openai.md and docs/anthropic.md have every field that the gateway parses, refuses or ignores."""

from collections.abc import Collection
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params

from gateway.api.anthropic import read_message as anthropic
from gateway.api.field_rule import CHAT, CHAT_MESSAGE, COMPLETION, RESPONSE
from gateway.api.generation_fields import CompletionBody, GenerationBody
from gateway.api.openai.schemas import ChatBody, FunctionDefinition, Message, ToolDefinition
from gateway.api.other_servers import UNREAD
from gateway.api.responses.read_response import InputBody, ResponseBody
from tests.support.documents import explained_names

DOCS = Path(__file__).parents[3] / "docs"
COMMON = "Fields of completions and chats"
COMPLETIONS, CHATS = "Fields of completions", "Fields of chat completions"
OF_RESPONSES = ("Fields of responses", "Refused in responses", "Accepted without effect in responses")


def fields_of(document: str, *sections: str) -> set[str]:
    text = (DOCS / document).read_text(encoding="utf-8")
    return set().union(*(explained_names(text, section) for section in sections))


@pytest.mark.parametrize(
    ("document", "section", "fields"),
    [
        ("openai.md", COMMON, GenerationBody.model_fields),
        ("openai.md", COMPLETIONS, CompletionBody.model_fields.keys() - GenerationBody.model_fields),
        ("openai.md", CHATS, ChatBody.model_fields.keys() - GenerationBody.model_fields),
        ("openai.md", "Tools", ["type", *(f"function.{name}" for name in FunctionDefinition.model_fields)]),
        ("openai.md", "Refused", {**CHAT.refused, **COMPLETION.refused}),
        ("openai.md", "Fields of other servers", UNREAD),
        ("openai.md", "Accepted without effect", CHAT.silent | COMPLETION.silent),
        ("openai.md", OF_RESPONSES[0], ResponseBody.model_fields),
        ("openai.md", OF_RESPONSES[1], RESPONSE.refused),
        ("openai.md", OF_RESPONSES[2], RESPONSE.silent),
        ("anthropic.md", "Fields", anthropic.MessageBody.model_fields),
        ("anthropic.md", "Tools", anthropic.ToolDefinition.model_fields),
        ("anthropic.md", "Refused", anthropic.MessageBody.unread.refused),
        ("anthropic.md", "Accepted without effect", anthropic.MessageBody.unread.silent),
    ],
)
def test_every_field_is_in_its_list_and_no_other(document: str, section: str, fields: Collection[str]) -> None:
    assert fields_of(document, section) == set(fields)


def test_fields_of_messages_are_listed_and_tools_have_no_others() -> None:
    assert fields_of("openai.md", "Messages") >= {*Message.model_fields, *CHAT_MESSAGE.refused, *CHAT_MESSAGE.silent}
    assert set(ToolDefinition.model_fields) == {"type", "function", "custom"}


@pytest.mark.parametrize(
    ("parameters", "sections"),
    [
        (
            completion_create_params.CompletionCreateParamsBase,
            (COMMON, COMPLETIONS, "Refused", "Accepted without effect"),
        ),
        (chat_create_params.CompletionCreateParamsBase, (COMMON, CHATS, "Refused", "Accepted without effect")),
        (response_create_params.ResponseCreateParamsBase, OF_RESPONSES),
    ],
)
def test_no_parameter_of_openai_s_client_is_missing(parameters: type, sections: tuple[str, ...]) -> None:
    assert set(parameters.__annotations__) <= fields_of("openai.md", *sections)


def test_the_count_of_input_tokens_takes_what_openai_s_client_sends() -> None:
    known = set(InputBody.model_fields) | set(InputBody.unread.refused)
    assert set(input_token_count_params.InputTokenCountParams.__annotations__) == known
    text = (DOCS / "openai.md").read_text(encoding="utf-8")
    (_, _, described) = text.partition("`POST /v1/responses/input_tokens`")
    assert all(f"`{name}`" in described.partition("###")[0] for name in InputBody.unread.refused)
