"""The client's tools, answer formats and template options, against a gateway."""

import json
from typing import Any, cast

import pytest
from pydantic import BaseModel

from quire.client import AsyncClient, ChatMessage, FinishReason, TokenChunk, Tool
from quire.rpc.errors import InvalidArgument
from tests.support.rig import CALL, running_rig


class Place(BaseModel):
    city: str


WEATHER = Tool("get_weather", "Tells the weather.", Place)


@pytest.fixture
async def rig(tmp_path):
    async with running_rig(tmp_path) as running:
        yield running


@pytest.fixture
async def client(rig):
    async with AsyncClient(rig.gateway.gateway.grpc_address) as client:
        yield client


async def test_a_call_and_its_result(client, rig):
    rig.says(f"<think>Hm.</think>{CALL}")
    messages = [ChatMessage("user", "Is it warm in Rome?")]
    answer = await client.chat(messages, tools=[WEATHER], tool_choice="auto")
    (call,) = answer.tool_calls
    assert (call.name, call.input) == ("get_weather", {"city": "Rome"})
    assert answer.sequences[0].finish_reason is FinishReason.TOOL_CALLS
    assert answer.message == ChatMessage("assistant", "", tool_calls=(call,), reasoning="Hm.")
    rig.says("Yes.")
    messages += [answer.message, ChatMessage("tool", "30 degrees", tool_call_id=call.id)]
    assert (await client.chat(messages, tools=[WEATHER])).text == "Yes."


async def test_only_allowed_tools_are_called(client, rig):
    rig.says(f"<think>Hm.</think>{CALL}")
    tools, asked = [WEATHER, Tool("now")], [ChatMessage("user", "Is it warm in Rome?")]
    answer = await client.chat(asked, tools=tools, allowed_tools=["get_weather"])
    assert [call.name for call in answer.tool_calls] == ["get_weather"]
    assert answer.usage.reasoning_tokens > 0
    assert not (await client.chat(asked, tools=tools, allowed_tools=["now"])).tool_calls
    with pytest.raises(InvalidArgument, match=r"tool_choice\.allowed\[0\]"):
        await client.chat(asked, tools=tools, allowed_tools=["other"])


async def test_a_stream_has_calls_in_parts(client, rig):
    rig.says(f"<think>Hm.</think>Wait.{CALL}")
    chunks = []
    async with client.chat_stream([{"role": "user", "content": "Is it warm?"}], tools=[WEATHER]) as stream:
        async for event in stream:
            if isinstance(event, TokenChunk):
                chunks.append(event)
    assert "".join(chunk.reasoning for chunk in chunks) == "Hm."
    assert "".join(chunk.text for chunk in chunks) == "Wait."
    calls = [call for chunk in chunks for call in chunk.tool_calls]
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Rome"}


async def test_an_answer_in_a_format_is_parsed(client, rig):
    rig.says('{"city": "Rome"}')
    thinks_not = {"template_arguments": {"enable_thinking": False}}
    asked = [ChatMessage("user", "Where?")]
    assert (await client.chat(asked, response_format=Place, **thinks_not)).parsed == Place(city="Rome")
    schema = Place.model_json_schema()
    assert (await client.chat(asked, response_format=schema, **thinks_not)).parsed == {"city": "Rome"}
    rig.says('{"city": ')
    assert (await client.chat(asked, response_format=Place, **thinks_not)).parsed is None


async def test_what_does_not_fit_is_refused_by_name(client):
    asked = [ChatMessage("user", "Where?")]
    with pytest.raises(TypeError, match="a chat has no functions"):
        await client.chat(asked, functions=[])
    with pytest.raises(TypeError, match=r"tools\[0\] is 'f'; it must be a Tool"):
        await client.chat(asked, tools=["f"])
    with pytest.raises(InvalidArgument, match=r"tools\[0\]\.name"):
        await client.chat(asked, tools=[Tool(cast(Any, 5))])
    with pytest.raises(InvalidArgument, match=r"tool_choice\.name"):
        await client.chat(asked, tools=[WEATHER], tool_choice="other")
    with pytest.raises(TypeError, match=r"tool_calls\[0\] is 1"):
        await client.chat([ChatMessage("assistant", tool_calls=cast(Any, [1]))])
    for arguments in ([1], {"a": float("nan")}, {"a": object()}):
        with pytest.raises(InvalidArgument, match="template_arguments"):
            await client.chat(asked, template_arguments=arguments)
