"""Tools, reasoning and formats of answers in OpenAI's responses and Anthropic's messages."""

import json

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from quire.arrays import decode_int32
from quire.common.v1 import common_pb2
from quire.model_source import resolve_model
from tests.support.chat_models import write_chat_model
from tests.support.fake_scheduler import scripted
from tests.support.gateway_process import running_gateway
from tests.support.tokenizers import id_of

TOKENIZER = Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))
EOS = id_of(TOKENIZER, "</s>")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "get_weather", "description": "Tells the weather.", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>\nI need it.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
ASKED = "Is it warm in Rome?"
ANTHROPIC_BODY = {
    "max_tokens": 200,
    "messages": [{"role": "user", "content": ASKED}],
    "tools": [{"name": "get_weather", "description": "Tells the weather.", "input_schema": SCHEMA}],
}


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(scheduler, tmp_path):
    scheduler.rule = scripted([*TOKENIZER.encode(ANSWER, add_special_tokens=False).ids, EOS])
    model = write_chat_model(tmp_path / "model")
    async with running_gateway(scheduler, model=str(model), max_stored_response_bytes=1 << 20) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def openai(gateway):
    async with AsyncOpenAI(base_url=f"{gateway.http_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def http(gateway):
    async with httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as client:
        yield client


def prompt_of(submit):
    return TOKENIZER.decode(decode_int32(submit.prompt_token_ids, "").tolist(), skip_special_tokens=False)


def constraint_of(submit):
    sampling = common_pb2.RowSampling.FromString(submit.row_sampling).sampling
    return sampling.constraint if sampling.HasField("constraint") else None


def said(item):
    """An item of a response as what it says."""
    match item.type:
        case "function_call":
            return item.type, item.name, json.loads(item.arguments)
        case _:
            return item.type, item.content[0].text


SAID = [
    ("reasoning", "I need it."),
    ("message", "Let me see."),
    ("function_call", "get_weather", {"city": "Rome"}),
    ("function_call", "get_weather", {"city": "Rome"}),
]


async def test_a_response_has_reasoning_text_and_calls_whole_and_streamed(openai):
    response = await openai.responses.create(model="", input=ASKED, tools=[TOOL])
    assert list(map(said, response.output)) == SAID
    async with openai.responses.stream(model="", input=ASKED, tools=[TOOL]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert list(map(said, final.output)) == SAID
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} <= set(kinds)


async def test_results_of_calls_go_back_by_items_or_by_the_id_of_the_response(openai, scheduler):
    response = await openai.responses.create(model="", input=ASKED, tools=[TOOL])
    calls = [item for item in response.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "It is hot."} for call in calls]
    items = [{"role": "user", "content": ASKED}, *response.output, *results]
    await openai.responses.create(model="", input=items, tools=[TOOL])
    await openai.responses.create(model="", input=results, tools=[TOOL], previous_response_id=response.id)
    by_items, by_id = map(prompt_of, scheduler.submits[-2:])
    assert by_items == by_id
    for part in (ASKED, "I need it.", "Let me see.", '"city": "Rome"', "It is hot."):
        assert part in by_id


async def test_a_message_has_thinking_text_and_calls_and_takes_results(http, scheduler):
    message = (await http.post("/v1/messages", json=ANTHROPIC_BODY)).json()
    thinking, text, *uses = message["content"]
    assert (thinking["thinking"], text["text"], message["stop_reason"]) == ("I need it.", "Let me see.", "tool_use")
    assert [(use["name"], use["input"]) for use in uses] == [("get_weather", {"city": "Rome"})] * 2
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "It is hot."} for use in uses]
    messages = [
        *ANTHROPIC_BODY["messages"],
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]},
    ]
    answer = await http.post("/v1/messages", json=ANTHROPIC_BODY | {"messages": messages})
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(scheduler.submits[-1])
    for part in (ASKED, "I need it.", "Let me see.", "Rome", "It is hot.", "And now?"):
        assert part in prompt
    counted = await http.post(
        "/v1/messages/count_tokens", json={"messages": messages, "tools": ANTHROPIC_BODY["tools"]}
    )
    usage = answer.json()["usage"]
    assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


async def test_a_stream_of_a_message_has_a_block_for_each_part(http):
    async with http.stream("POST", "/v1/messages", json=ANTHROPIC_BODY | {"stream": True}) as response:
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    started = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert started == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == 2]
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {"city": "Rome"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_forced_calls_and_formats_are_constraints(openai, http, scheduler):
    await openai.responses.create(model="", input=ASKED, tools=[TOOL], tool_choice="required")
    await http.post("/v1/messages", json=ANTHROPIC_BODY | {"tool_choice": {"type": "any"}})
    by_responses, by_messages = map(constraint_of, scheduler.submits[-2:])
    assert by_responses is not None
    assert by_responses == by_messages
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    await openai.responses.create(model="", input=ASKED, text=text)
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    untooled = {name: ANTHROPIC_BODY[name] for name in ("max_tokens", "messages")}
    await http.post("/v1/messages", json=untooled | {"output_config": output})
    by_responses, by_messages = map(constraint_of, scheduler.submits[-2:])
    assert json.loads(by_responses.json_schema) == json.loads(by_messages.json_schema) == SCHEMA


async def test_an_effort_is_a_hint_where_the_template_knows_none(http):
    for path, body in (
        ("/v1/responses", {"input": ASKED, "reasoning": {"effort": "low"}}),
        ("/v1/messages", ANTHROPIC_BODY | {"output_config": {"effort": "low"}}),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "x" * 129, "name": "f", "arguments": "{}"}]}, "input[0]"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "text.format"),
    ],
)
async def test_what_is_wrong_with_a_response_is_named_as_its_body_has_it(http, body, expected):
    answer = await http.post("/v1/responses", json={"input": ASKED} | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == expected, answer.text


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}, "tools": []},
         "output_config.format"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x" * 129, "name": "f",
          "input": {}}]}]}, "the max is 128"),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_a_message_is_named_as_its_body_has_it(http, body, expected):
    answer = await http.post("/v1/messages", json=ANTHROPIC_BODY | body)
    assert answer.status_code == 400
    assert expected in answer.json()["error"]["message"]
