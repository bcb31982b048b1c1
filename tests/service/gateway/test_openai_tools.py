"""Tools and reasoning over OpenAI's API, by OpenAI's own client, in front of a fake scheduler that writes what a model
would."""

import asyncio
import json
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError

from tests.support.fake_scheduler import FakeScheduler, Hypothesis, scripted
from tests.support.gateway_process import running_gateway
from tests.support.tokenizers import byte_level, id_of, write_model_directory

TEMPLATE = """\
{%- if tools %}tools: {{ tools | tojson }}<tool_call></tool_call>{% endif -%}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}{# <think></think> #}"""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
UNENFORCED = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"if": {}}}}
HELLO: Any = [{"role": "user", "content": "hello"}]
ARGUMENTS = '{"city": "Paris"}'
CALL = '<tool_call>\n{"name": "weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def scheduler():
    fake = FakeScheduler()
    await fake.start()
    yield fake
    await fake.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(scheduler, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    directory = write_model_directory(path, byte_level(), chat_template__jinja=TEMPLATE)
    async with (
        running_gateway(scheduler, model=str(directory)) as gateway,
        AsyncOpenAI(base_url=f"{gateway.http_url}/v1", api_key="none", max_retries=0, timeout=60) as openai,
    ):
        yield openai


@pytest.fixture
def says(scheduler):
    """Makes the model say a text."""

    def say(text: str) -> None:
        scheduler.rule = scripted(
            [*byte_level().encode(text, add_special_tokens=False).ids, id_of(byte_level(), "</s>")]
        )

    return say


async def chat(client, **fields) -> Any:
    return await client.chat.completions.create(
        **{"model": "model", "messages": HELLO, "tools": [TOOL], "max_tokens": 300} | fields
    )


async def test_a_call_of_a_tool(client, says):
    says(f"I ask. {CALL}")
    (choice,) = (await chat(client)).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I ask.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", ARGUMENTS)
    assert call.id


async def test_a_call_alone_has_no_content(client, says):
    says(CALL)
    (choice,) = (await chat(client)).choices
    assert choice.message.content is None
    assert len(choice.message.tool_calls) == 1


async def test_the_deltas_of_calls_are_openai_s(client, says):
    says(f"Two. {CALL}\n{CALL}")
    chunks = [chunk async for chunk in await chat(client, stream=True)]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert [delta.role for delta in deltas[1:]] == [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == "Two."
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    firsts = [part for part in parts if part.id]
    assert [(part.index, part.type, part.function.name, part.function.arguments) for part in firsts] == [
        (0, "function", "weather", ""),
        (1, "function", "weather", ""),
    ]
    assert len({part.id for part in firsts}) == 2
    for index in (0, 1):
        own = [part for part in parts if part.index == index]
        assert own[0].id
        assert all(part.id is None and part.type is None and part.function.name is None for part in own[1:])
        assert "".join(part.function.arguments for part in own) == ARGUMENTS
    assert [choice.finish_reason for choice in chunks[-1].choices] == ["tool_calls"]


async def test_the_stream_helper_puts_calls_together(client, says):
    says(CALL)
    async with client.chat.completions.stream(model="model", messages=HELLO, tools=[TOOL], max_tokens=300) as stream:
        answer = await stream.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


async def test_messages_that_were_put_together_of_a_stream_are_taken_back(client, says):
    """The helper leaves their calls the index of deltas."""
    says(f"<think>Hm.</think>{CALL}")
    asked = {"model": "model", "messages": HELLO, "tools": [TOOL], "max_tokens": 300}
    async with client.chat.completions.stream(**asked) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "warm"}
    says("It is warm.")
    again = await chat(client, messages=[*HELLO, message, result])
    assert again.choices[0].message.content == "It is warm."


async def test_reasoning_stands_apart(client, says):
    says("<think>\nHm.\n</think>\n\nYes.")
    for stream in (False, True):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await chat(client, stream=stream, tools=[], **options)
        chunks = [chunk async for chunk in answer] if stream else []
        if stream:
            found = [choice.delta for chunk in chunks for choice in chunk.choices]
        else:
            found = [choice.message for choice in answer.choices]
        fields = [each.model_dump() for each in found]
        for name, text in (("content", "Yes."), ("reasoning_content", "Hm."), ("reasoning", "Hm.")):
            assert "".join(each.get(name) or "" for each in fields).strip() == text
        usage = chunks[-1].usage if stream else answer.usage
        assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    (hidden,) = (await chat(client, tools=[], extra_body={"include_reasoning": False})).choices
    assert "reasoning_content" not in hidden.message.model_dump()


async def test_log_probabilities_have_all_tokens(client, says):
    says(CALL)
    (choice,) = (await chat(client, logprobs=True)).choices
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(CALL)
    chunks = [chunk async for chunk in await chat(client, logprobs=True, stream=True)]
    entries = [e for chunk in chunks for c in chunk.choices if c.logprobs for e in c.logprobs.content]
    assert len(entries) == len(choice.logprobs.content)


async def test_several_answers_have_calls_of_their_own(client, scheduler):
    tokenizer = byte_level()
    token_ids = tokenizer.encode(CALL, add_special_tokens=False).ids
    with scheduler.standing_still():
        answering = asyncio.create_task(chat(client, n=3))
        await scheduler.until(lambda: scheduler.live)
        (handle,) = scheduler.live
        scheduler.deliver(handle, [Hypothesis(token_ids, -1.0, id_of(tokenizer, "</s>"))] * 3)
        choices = (await answering).choices
    assert [choice.finish_reason for choice in choices] == ["tool_calls"] * 3
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 3


async def test_an_echo_begins_with_the_last_message(client, says):
    says("you")
    messages = [*HELLO, {"role": "assistant", "content": "how are "}]
    more = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    (choice,) = (await chat(client, tools=[], messages=messages, extra_body=more)).choices
    assert choice.message.content == "how are you"
    stream = await chat(client, tools=[], messages=messages, extra_body=more, stream=True)
    assert "".join([c.delta.content or "" async for chunk in stream for c in chunk.choices]) == "how are you"


async def test_a_conversation_with_calls_goes_on(client, says):
    says("Sunny.")
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sun"},
    ]
    answer = await chat(client, messages=messages)
    assert answer.choices[0].message.content == "Sunny."


async def test_an_effort_that_the_template_does_not_know_is_a_hint(client, says):
    says("Yes.")
    answer = await chat(client, tools=[], reasoning_effort="low")
    assert answer.choices[0].message.content == "Yes."


CALL_OF_A_LONG_ID = {"id": "x" * 129, "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tools": [], "extra_body": {"chat_template_kwargs": {"colour": 1}}}, "chat_template_kwargs.colour"),
        ({"messages": [*HELLO, {"role": "tool", "tool_call_id": "x", "content": "y"}]}, "messages[1].tool_call_id"),
        (
            {"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL_OF_A_LONG_ID]}]},
            "messages[1].tool_calls[0].id",
        ),
        (
            {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
            "continue_final_message",
        ),
        (
            {
                "tools": [],
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"if": {}}}},
            },
            "response_format.json_schema.schema",
        ),
    ],
)
async def test_what_is_wrong_is_named_as_the_client_wrote_it(client, fields, param):
    with pytest.raises(BadRequestError) as caught:
        await chat(client, **fields)
    assert caught.value.param == param
