"""docs/openai.md has every field of OpenAI's bodies: those that the gateway parses, refuses and ignores."""

from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params

from gateway.api.openai.conversation import FunctionDefinition, Message, ToolDefinition
from gateway.api.openai.schemas import HINTS, UNSUPPORTED, ChatBody, CompletionBody, GenerationBody
from gateway.api.responses.read import InputBody, ResponseBody
from tests.support.documents import explained_names

DOCUMENT = Path(__file__).parents[3] / "docs" / "openai.md"
COMMON, COMPLETIONS, CHAT = "Fields of both", "Fields of completions", "Fields of chat completions"
REFUSED, IGNORED = "Refused", "Accepted without effect"


def fields_of(section: str) -> set[str]:
    return explained_names(DOCUMENT.read_text(encoding="utf-8"), section)


def test_every_field_that_is_parsed_is_in_its_list():
    common = set(GenerationBody.model_fields)
    assert fields_of(COMMON) == common
    assert fields_of(COMPLETIONS) == set(CompletionBody.model_fields) - common
    assert fields_of(CHAT) == set(ChatBody.model_fields) - common


def test_messages_and_tools_too():
    assert fields_of("Messages") >= set(Message.model_fields)
    functions = {f"function.{name}" for name in FunctionDefinition.model_fields}
    assert fields_of("Tools") == {"type", *functions}
    assert set(ToolDefinition.model_fields) == {"type", "function"}


def test_what_is_refused_and_what_is_ignored_is_listed():
    assert fields_of(REFUSED) == set(UNSUPPORTED)
    assert fields_of(IGNORED) == set(HINTS)


@pytest.mark.parametrize(
    ("parameters", "section"),
    [
        (completion_create_params.CompletionCreateParamsBase, COMPLETIONS),
        (chat_create_params.CompletionCreateParamsBase, CHAT),
    ],
)
def test_no_parameter_of_openai_s_client_is_missing(parameters, section):
    known = set().union(*map(fields_of, (COMMON, section, REFUSED, IGNORED)))
    assert set(parameters.__annotations__) <= known


def test_responses_have_lists_of_the_same_kind():
    parsed, refused = fields_of("Fields of responses"), fields_of("Refused in responses")
    ignored = fields_of("Accepted without effect in responses")
    assert (parsed, refused, ignored) == (
        set(ResponseBody.model_fields),
        set(ResponseBody.harmless),
        ResponseBody.hints,
    )
    assert set(response_create_params.ResponseCreateParamsBase.__annotations__) <= parsed | refused | ignored


def test_the_count_of_input_tokens_takes_what_openai_s_client_sends():
    known = set(InputBody.model_fields) | set(InputBody.harmless)
    assert set(input_token_count_params.InputTokenCountParams.__annotations__) == known
    (_, _, described) = DOCUMENT.read_text(encoding="utf-8").partition("`POST /v1/responses/input_tokens`")
    assert all(f"`{name}`" in described.partition("###")[0] for name in InputBody.harmless)
