"""Tools, reasoning and options of templates in chats: properties of one API, which tests of all fronts do not show."""

import gc
import json
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
from google.protobuf import json_format
from openai import AsyncOpenAI

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2 as pb
from tests.support.chat_models import write_chat_model
from tests.support.gateway_process import error_of, refusal_of, running_gateway
from tests.support.rig import CALL, REASONED, WEATHER, WEATHER_SCHEMA, constraint_of, prompt_text_of

TOOL = pb.Tool(name="get_weather", description="Tells it.", parameters=json.dumps(WEATHER_SCHEMA))
ASKED = pb.ChatMessage(role="user", content="Is it warm in Rome?")
REQUIRED = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)
NONE = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)
MAX_TOKENS = common_pb2.StoppingParameters(max_tokens=300)


def request(kind: Any = pb.ChatRequest, **fields) -> Any:
    return kind(**{"messages": [ASKED], "tools": [TOOL], "stopping": MAX_TOKENS} | fields)


async def test_tools_constrain_the_answer(rig):
    chat, submits = rig.gateway.generation.Chat, rig.scheduler.submits
    await chat(request())
    begun = constraint_of(submits[-1]).structural_tags
    assert (begun.required, begun.tags[0].begin) == (False, "<tool_call>")
    await chat(request(tool_choice=REQUIRED, parallel_tool_calls=False))
    forced = constraint_of(submits[-1])
    assert "<tool_call>" in forced.lark
    assert forced.begins_after == "</think>"
    assert prompt_text_of(submits[-1]).endswith("<|assistant|><think>\n")
    await chat(request(tool_choice=pb.ToolChoice(name="get_weather")))
    assert "get_weather" in constraint_of(submits[-1]).lark
    wanted = common_pb2.Constraint(json_schema=json.dumps(WEATHER_SCHEMA))
    await chat(request(response_format=wanted))
    assert "get_weather" in constraint_of(submits[-1]).lark
    rig.says(CALL)
    (sequence,) = (await chat(request(tool_choice=NONE))).sequences
    assert "get_weather" not in prompt_text_of(submits[-1])
    assert (sequence.text, sequence.finish_reason) == (CALL, common_pb2.FINISH_REASON_STOP)


# Programs that write schemas use patterns with look-around for e-mail addresses.
LOOK_AROUND = {"type": "object", "properties": {"to": {"type": "string", "pattern": r"^(?!\.)[a-z.]+@[a-z]+$"}}}


@pytest.mark.parametrize("parameters", ["{}", '{"properties": {}}', json.dumps(LOOK_AROUND)])
async def test_arguments_are_an_object_where_the_schema_does_not_say_so_or_cannot_be_enforced(rig, parameters):
    tool = pb.Tool(name="f", parameters=parameters)
    await rig.gateway.generation.Chat(request(tools=[tool]))
    (tag,) = constraint_of(rig.scheduler.submits[-1]).structural_tags.tags
    envelope, _ = json.JSONDecoder().raw_decode(tag.lark.partition("%json ")[2])
    arguments = envelope["properties"]["arguments"]
    assert arguments["type"] == "object"
    if "pattern" in parameters:
        assert arguments == {"type": "object"}
        tool.strict = True
        call = rig.gateway.generation.Chat(request(tools=[tool]))
        await refusal_of(call, "tools[0].parameters", "look-around")


def message(**fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"role": "assistant", "content": ""}
    return {"messages": [pb.ChatMessage(**values | fields)]}


def calls(*changes: dict[str, str], role: str = "assistant") -> dict[str, Any]:
    values = {"id": "a", "name": "get_weather", "arguments": "{}"}
    return message(role=role, tool_calls=[pb.ToolCall(**values | each) for each in changes])


def tools(*changes: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"name": "f"}
    return {"tools": [pb.Tool(**values | each) for each in changes]}


def choice(**fields) -> dict[str, Any]:
    return {"tool_choice": pb.ToolChoice(**fields)}


REGEX = common_pb2.Constraint(regex="a")
IN_SAMPLING = common_pb2.SamplingParameters(constraint=REGEX)
BAD = [
    (tools(*({"name": f"t{number}"} for number in range(129))), "tools", "has more than 128 entries"),
    (tools({"parameters": "[1]"}), "tools[0].parameters", "must be a JSON schema"),
    (tools({"parameters": '{"type": "array"}'}), "tools[0].parameters.type", '"array"'),
    (choice(allowed=["other"]), "tool_choice.allowed[0]", "the tools are: get_weather"),
    (choice(allowed=["get_weather"] * 129), "tool_choice.allowed", "the max is 128"),
    (choice(name="get_weather", allowed=["get_weather"]), "tool_choice.allowed", "only with the modes auto and"),
    (choice(mode=cast(Any, 9)), "tool_choice.mode", "is 9"),
    (calls({}, role="user"), "messages[0].tool_calls", "only assistant calls"),
    (calls({"id": ""}), "messages[0].tool_calls[0].id", "is empty"),
    (calls({"id": "x" * 129}), "messages[0].tool_calls[0].id", "the max is 128"),
    (calls({"name": "?"}), "messages[0].tool_calls[0].name", '"?"'),
    (calls({}, {}), "messages[0].tool_calls", "must be unique"),
    (message(role="tool", tool_call_id="b"), "messages[0].tool_call_id", "no message before it"),
    ({"template_options": {"continue_final_message": True, "add_generation_prompt": True}},
     "template_options.continue_final_message", "add_generation_prompt too"),
    ({"template_options": {"arguments": {"messages": []}}}, "template_options.arguments.messages", "set by the server"),
    ({"template_options": {"arguments": {"style": 1}}}, "template_options.arguments.style", "reads: enable_thinking"),
    ({"template_options": {"arguments": {"enable_thinking": [float("nan")]}}}, "template_options.arguments", "NaN or"),
    ({"template_options": {"arguments_json": '{"a": 1e999}'}}, "template_options.arguments_json", "a JSON object"),
    ({"template_options": {"arguments_json": "[1]"}}, "template_options.arguments_json", "must be a JSON object"),
    ({"template_options": {"arguments_json": '{"style": NaN}'}}, "template_options.arguments_json", "a JSON object"),
    ({"template_options": {"arguments_json": "{}", "arguments": {"enable_thinking": True}}},
     "template_options.arguments_json", "arguments too"),
    ({"template_options": {"arguments_json": f'{{"enable_thinking": {[1] * 5000}}}'}},
     "template_options.arguments_json", "the max is 4,096"),
    ({"template_options": {"arguments_json": '{"style": 1}'}}, "template_options.arguments.style", "reads: enable"),
    ({"response_format": REGEX, "sampling": IN_SAMPLING}, "response_format", "sampling.constraint too"),
    ({"response_format": common_pb2.Constraint(json_schema="{")}, "response_format.json_schema", "not valid JSON"),
    ({"response_format": common_pb2.Constraint(lark='start: "a"')}, "response_format", "combined with tools"),
]  # fmt: skip


@pytest.mark.parametrize("depth", [300, 900, 10_000])
async def test_however_deep_a_schema_is_it_is_no_failure(rig, depth):
    tool = pb.Tool(name="f", parameters='{"type": "object", "minimum": ' + "[" * depth + "]" * depth + "}")
    # If garbage of other tests were collected while such a value is read, its finalizers would have no stack left.
    gc.collect()
    code = await rig.gateway.generation.Chat(request(tools=[tool])).code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)


@pytest.mark.parametrize(("fields", "field", "says"), BAD, ids=lambda value: value if isinstance(value, str) else "")
async def test_bad_fields_are_refused_by_name(rig, fields, field, says):
    options = pb.TemplateOptions()
    arguments = fields.get("template_options", {}).get("arguments", {})
    flags = {name: value for name, value in fields.get("template_options", {}).items() if name != "arguments"}
    json_format.ParseDict(flags, options)
    if arguments:
        options.arguments.update(arguments)
    more = {"template_options": options} if "template_options" in fields else {}
    await refusal_of(rig.gateway.generation.Chat(request(**fields | more)), field, says)
    assert not rig.scheduler.submits


async def test_a_template_that_knows_no_tools_says_so(scheduler, tmp_path):
    model = write_chat_model(tmp_path / "model", "{{ messages[0].content }}")
    async with running_gateway(scheduler, model=str(model)) as running:
        error = await error_of(running.generation.Chat(request()))
    assert (error.reason, error.violations[0].field) == ("NO_TOOLS", "tools")


# OpenAI's chats, by OpenAI's own client.


@pytest_asyncio.fixture(loop_scope="session")
async def openai(rig):
    async with AsyncOpenAI(base_url=f"{rig.gateway.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


USER: Any = [{"role": "user", "content": "Is it warm?"}]
TOOLS: Any = [{"type": "function", "function": WEATHER}]


async def chat(client: AsyncOpenAI, **fields) -> Any:
    asked: dict[str, Any] = {"model": "quire-tiny", "messages": USER, "tools": TOOLS, "max_tokens": 300} | fields
    return await client.chat.completions.create(**asked)


@pytest.mark.parametrize("streams", [False, True])
async def test_reasoning_has_both_names_its_share_of_the_usage_and_may_be_left_out(rig, openai, streams):
    rig.says("<think>\nHm.\n</think>\n\nYes.")
    options = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    answer = await chat(openai, tools=[], **options)
    chunks = [chunk async for chunk in answer] if streams else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    fields = [(choice.delta if streams else choice.message).model_dump() for choice in choices]
    for name, text in (("content", "Yes."), ("reasoning_content", "Hm."), ("reasoning", "Hm.")):
        assert "".join(each.get(name) or "" for each in fields).strip() == text
    usage = chunks[-1].usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    (hidden,) = (await chat(openai, tools=[], extra_body={"include_reasoning": False})).choices
    assert "reasoning_content" not in hidden.message.model_dump()


CUSTOM: Any = {"type": "custom", "custom": {"name": "shell", "description": "Runs it."}}
CUSTOM_CALL = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("said", "fields"),
    [("<think>\nHm.\n</think>\n\nYes.", {"tools": []}), (CUSTOM_CALL, {"tools": [CUSTOM]})],
    ids=["hidden reasoning", "a custom tool"],
)
async def test_a_stream_tells_of_tokens_of_which_it_shows_no_text(rig, openai, said, fields):
    rig.says(said)
    more = {"include_reasoning": False, "return_token_ids": True}
    (whole,) = (await chat(openai, **fields, logprobs=True, extra_body=more)).choices
    stream = await chat(openai, **fields, logprobs=True, extra_body=more, stream=True)
    choices = [choice async for chunk in stream for choice in chunk.choices]
    assert [token_id for each in choices for token_id in getattr(each, "token_ids", [])] == whole.token_ids
    entries = [entry for each in choices if each.logprobs for entry in each.logprobs.content]
    assert [entry.token for entry in entries] == [entry.token for entry in whole.logprobs.content]


async def test_an_echo_begins_with_the_last_message(rig, openai):
    rig.says("you")
    messages = [*USER, {"role": "assistant", "content": "how are "}]
    more = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    (choice,) = (await chat(openai, tools=[], messages=messages, extra_body=more)).choices
    assert choice.message.content == "how are you"
    stream = await chat(openai, tools=[], messages=messages, extra_body=more, stream=True)
    assert "".join([c.delta.content or "" async for chunk in stream for c in chunk.choices]) == "how are you"


# Invalid values of fields that only one of the APIs has.
NO_TOOL = {"type": "function", "function": {"name": "g"}}
LONG_ID = "x" * 129


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": USER, "chat_template_kwargs": {"colour": 1}},
         "chat_template_kwargs.colour"),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]},
         "messages[0].tool_call_id"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [NO_TOOL | {"id": LONG_ID}
         | {"function": {"name": "f", "arguments": "{}"}}]}]}, "messages[0].tool_calls[0].id"),
        ("/v1/chat/completions",
         {"messages": USER, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input[0]"),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": LONG_ID, "name": "f", "arguments": "{}"}]},
         "input[0]"),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [
         {"type": "tool_result", "tool_use_id": "x"}]}]}, "messages[0]"),
        # Tools that are left out count too.
        ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "web_search"}, {"type": "function",
         "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools[1].function.parameters.type"),
        ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "custom", "custom": {"name": "f f"}}]},
         "tools[0].custom.name"),
        ("/tokenize", {"messages": USER, "tools": [{"type": "web_search"}, {"type": "function",
         "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools[1].function.parameters.type"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}, {"type": "function", "name": "f",
         "parameters": {"type": "array"}}]}, "tools[1].parameters.type"),
        ("/v1/messages", {"max_tokens": 9, "messages": USER, "tools": [{"type": "web_search_1", "name": "w"},
         {"name": "f", "input_schema": {"type": "array"}}]}, "tools[1].input_schema.type"),
        ("/v1/messages", {"max_tokens": 9, "messages": [*USER, {"role": "system", "content": [{"type": "tool_addition",
         "tool": {"type": "tool_definition", "definition": {"name": "f", "input_schema": {"type": "array"}}}}]}]},
         "messages[1].content[0].tool.definition.input_schema.type"),
        ("/v1/messages", {"max_tokens": 9, "messages": [*USER, {"role": "assistant", "content": [
         {"type": "text", "text": "a"}, {"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]},
         'messages[1].content[1].type is "tool_use" in the last message'),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "assistant", "content": [
         {"type": "tool_use", "id": LONG_ID, "name": "f", "input": {}}]}, *USER]}, "the max is 128"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named_as_the_client_wrote_it(rig, path, body, field):
    answer = await rig.http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert field in error["message"] if path == "/v1/messages" else error["param"] == field


RESPONSE_TOOL = {"type": "function"} | WEATHER


async def test_results_of_calls_go_back_by_items_or_by_the_id_of_the_response(rig, openai):
    rig.says(REASONED)
    response = await openai.responses.create(model="", input="Is it warm?", tools=[RESPONSE_TOOL])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    outputs = [item for item in response.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "It is hot."} for call in outputs]
    items = [{"role": "user", "content": "Is it warm?"}, *response.output, *results]
    await openai.responses.create(model="", input=items, tools=[RESPONSE_TOOL])
    await openai.responses.create(model="", input=results, tools=[RESPONSE_TOOL], previous_response_id=response.id)
    by_items, by_id = map(prompt_text_of, rig.scheduler.submits[-2:])
    assert by_items == by_id
    for part in ("Is it warm?", "I need it.", "Let me see.", '"city": "Rome"', "It is hot."):
        assert part in by_id
    # The client's own stream assembles the same items.
    async with openai.responses.stream(model="", input="Is it warm?", tools=[RESPONSE_TOOL]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in response.output]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4


async def test_a_message_of_anthropic_s_takes_results_and_is_counted(rig):
    rig.says(REASONED)
    tool = {"name": "get_weather", "input_schema": WEATHER_SCHEMA}
    body = {"max_tokens": 300, "messages": USER, "tools": [tool]}
    message = (await rig.http.post("/v1/messages", json=body)).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    uses = message["content"][2:]
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "It is hot."} for use in uses]
    asked = {"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]}
    messages = [*USER, {"role": "assistant", "content": message["content"]}, asked]
    answer = await rig.http.post("/v1/messages", json=body | {"messages": messages})
    assert answer.status_code == 200, answer.text
    prompt = prompt_text_of(rig.scheduler.submits[-1])
    for part in ("Is it warm?", "I need it.", "Let me see.", "Rome", "It is hot.", "And now?"):
        assert part in prompt
    counted = await rig.http.post("/v1/messages/count_tokens", json={"messages": messages, "tools": [tool]})
    usage = answer.json()["usage"]
    assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


async def test_a_message_that_the_stream_helper_puts_together_goes_back_with_a_result(rig, openai):
    rig.says(f"<think>Hm.</think>{CALL}")
    asked = {"model": "quire-tiny", "messages": USER, "tools": TOOLS, "max_tokens": 300}
    async with openai.chat.completions.stream(**asked) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert message.content is None
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    rig.says("It is warm.")
    result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
    again = await chat(openai, messages=[*USER, message, result])
    assert again.choices[0].message.content == "It is warm."
    assert "<think>Hm.</think>" in prompt_text_of(rig.scheduler.submits[-1])
