"""Tools, reasoning, formats of answers and options of templates in chats, from the request to the answer."""

import json
from typing import Any, cast

import pytest
from google.protobuf import json_format
from tokenizers import Tokenizer

from quire.arrays import decode_int32
from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2 as pb
from quire.model_source import resolve_model
from quire.rpc.errors import InvalidArgument
from tests.support.chat_models import write_chat_model
from tests.support.fake_scheduler import scripted
from tests.support.gateway_process import collect, error_of, running_gateway
from tests.support.tokenizers import id_of

TOKENIZER = Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))
EOS = id_of(TOKENIZER, "</s>")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = pb.Tool(name="get_weather", description="Tells the weather.", parameters=json.dumps(SCHEMA))
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>\nI need it.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
ASKED = pb.ChatMessage(role="user", content="Is it warm in Rome?")


@pytest.fixture
async def gateway(scheduler, tmp_path):
    async with running_gateway(scheduler, model=str(write_chat_model(tmp_path / "model"))) as running:
        yield running


def says(scheduler, text):
    scheduler.rule = scripted([*TOKENIZER.encode(text, add_special_tokens=False).ids, EOS])


def request(kind: Any = pb.ChatRequest, **fields):
    fields.setdefault("messages", [ASKED])
    asked = kind(tools=fields.pop("tools", [WEATHER]), **fields)
    asked.stopping.max_tokens = asked.stopping.max_tokens or 200
    asked.sampling.temperature = 0
    return asked


def prompt_of(submit):
    return TOKENIZER.decode(decode_int32(submit.prompt_token_ids, "").tolist(), skip_special_tokens=False)


def constraint_of(submit):
    sampling = common_pb2.RowSampling.FromString(submit.row_sampling).sampling
    return sampling.constraint if sampling.HasField("constraint") else None


async def test_an_answer_comes_in_its_parts(gateway, scheduler):
    says(scheduler, ANSWER)
    (sequence,) = (await gateway.generation.Chat(request())).sequences
    assert (sequence.reasoning, sequence.text) == ("I need it.", "Let me see.")
    assert [(call.name, json.loads(call.arguments)) for call in sequence.tool_calls] == [
        ("get_weather", {"city": "Rome"})
    ] * 2
    assert len({call.id for call in sequence.tool_calls}) == 2
    assert sequence.finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS


@pytest.mark.parametrize("tokens_per_step", [1, 5])
async def test_a_stream_has_typed_parts(gateway, scheduler, tokens_per_step):
    scheduler.tokens_per_step = tokens_per_step
    says(scheduler, ANSWER)
    stream = await collect(gateway.generation.ChatStream(request(pb.ChatStreamRequest)))
    assert stream.text == "Let me see."
    assert "".join(chunk.reasoning for chunk in stream.chunks) == "I need it."
    deltas = [delta for chunk in stream.chunks for delta in chunk.tool_calls]
    for index in (0, 1):
        first, *rest = [delta for delta in deltas if delta.index == index]
        assert (first.name, bool(first.id)) == ("get_weather", True)
        assert not any(delta.name or delta.id for delta in rest)
        assert json.loads("".join(delta.arguments for delta in (first, *rest))) == {"city": "Rome"}
    assert stream.finished.finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS


async def test_a_caller_that_holds_tokens_and_characters_gets_the_rest(gateway, scheduler):
    says(scheduler, ANSWER)
    whole = await collect(gateway.generation.ChatStream(request(pb.ChatStreamRequest)))
    for num_chunks in range(1, len(whole.chunks), 7):
        had = whole.chunks[:num_chunks]
        calls = [call for chunk in had for call in chunk.tool_calls]
        held = pb.HeldSequence(
            token_ids=[token for chunk in had for token in chunk.token_ids],
            num_characters=sum(len(chunk.text) + len(chunk.reasoning) for chunk in had)
            + sum(len(call.name) + len(call.arguments) for call in calls),
        )
        call = gateway.generation.ChatStream(request(pb.ChatStreamRequest, continue_from=[held]))
        responses = [response async for response in call]
        chunks = [*had, *(response.chunk for response in responses if response.HasField("chunk"))]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert "".join(chunk.reasoning for chunk in chunks) == "I need it."
        calls = [call for chunk in chunks for call in chunk.tool_calls]
        assert "".join(call.arguments for call in calls) == '{"city": "Rome"}' * 2
        assert [call.name for call in calls if call.name] == ["get_weather"] * 2
        assert responses[-2].finished.finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS


async def test_stop_strings_are_those_of_the_content(gateway, scheduler):
    says(scheduler, "<think>\nDone here.\n</think>\n\nAll is Done here.")
    asked = request(stopping=common_pb2.StoppingParameters(stop=["Done"], max_tokens=200))
    (sequence,) = (await gateway.generation.Chat(asked)).sequences
    assert (sequence.reasoning, sequence.text, sequence.stop_string) == ("Done here.", "All is ", "Done")


async def test_the_template_gets_tools_calls_results_names_and_reasoning(gateway, scheduler):
    says(scheduler, "Yes.")
    called = pb.ToolCall(id="call_1", name="get_weather", arguments='{"city": "Rome", "days": 2}')
    messages = [
        pb.ChatMessage(role="user", content="Is it warm?", name="Ann"),
        pb.ChatMessage(role="assistant", reasoning="Hm.", tool_calls=[called]),
        pb.ChatMessage(role="tool", content="30 degrees", tool_call_id="call_1"),
    ]
    await gateway.generation.Chat(request(messages=messages))
    prompt = prompt_of(scheduler.submits[-1])
    described = {"name": "get_weather", "description": "Tells the weather.", "parameters": SCHEMA}
    assert json.dumps({"type": "function", "function": described}) in prompt
    assert "Ann: Is it warm?" in prompt
    assert "<think>Hm.</think>" in prompt
    assert '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}' in prompt
    assert "30 degrees" in prompt


async def test_arguments_of_the_template_and_the_last_message_continued(gateway, scheduler):
    says(scheduler, " warm.")
    options = pb.TemplateOptions()
    options.arguments.update({"enable_thinking": False})
    await gateway.generation.Chat(request(template_options=options))
    assert prompt_of(scheduler.submits[-1]).endswith("<|assistant|><think></think>")
    begun = [ASKED, pb.ChatMessage(role="assistant", content="It is")]
    continued = pb.TemplateOptions(continue_final_message=True)
    answer = await gateway.generation.Chat(request(messages=begun, template_options=continued))
    assert prompt_of(scheduler.submits[-1]).endswith("<|assistant|>It is")
    assert answer.sequences[0].text == " warm."
    tokenized = await gateway.generation.Tokenize(
        pb.TokenizeRequest(chat=pb.ChatMessages(messages=begun, tools=[WEATHER], template_options=continued))
    )
    assert tokenized.token_ids == decode_int32(scheduler.submits[-1].prompt_token_ids, "").tolist()


REQUIRED = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)
NONE = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)


async def test_tools_constrain_the_answer(gateway, scheduler):
    says(scheduler, CALL)
    await gateway.generation.Chat(request())
    begun = constraint_of(scheduler.submits[-1])
    assert not begun.structural_tags.required
    assert begun.structural_tags.tags[0].begin == "<tool_call>\n"
    await gateway.generation.Chat(request(tool_choice=REQUIRED, parallel_tool_calls=False))
    forced = constraint_of(scheduler.submits[-1])
    assert forced.structural_tags.required
    assert forced.structural_tags.single
    assert forced.begins_after == "</think>"
    assert prompt_of(scheduler.submits[-1]).endswith("<|assistant|><think>\n")
    await gateway.generation.Chat(request(tool_choice=pb.ToolChoice(name="get_weather")))
    assert constraint_of(scheduler.submits[-1]).structural_tags.single


@pytest.mark.parametrize("parameters", ["{}", '{"properties": {}}'])
async def test_arguments_are_an_object_where_the_schema_does_not_say_so(gateway, scheduler, parameters):
    says(scheduler, CALL)
    await gateway.generation.Chat(request(tools=[pb.Tool(name="f", parameters=parameters)]))
    (tag,) = constraint_of(scheduler.submits[-1]).structural_tags.tags
    assert json.loads(tag.json_schema)["properties"]["arguments"]["type"] == "object"


async def test_a_pattern_with_look_around_leaves_the_arguments_to_the_model(gateway, scheduler):
    """Programs that write schemas have it for e-mail addresses."""
    says(scheduler, CALL)
    schema = {"type": "object", "properties": {"to": {"type": "string", "pattern": r"^(?!\.)[a-z.]+@[a-z]+$"}}}
    tool = pb.Tool(name="send", parameters=json.dumps(schema))
    await gateway.generation.Chat(request(tools=[tool]))
    (tag,) = constraint_of(scheduler.submits[-1]).structural_tags.tags
    assert json.loads(tag.json_schema)["properties"]["arguments"] == {"type": "object"}
    tool.strict = True
    error = await error_of(gateway.generation.Chat(request(tools=[tool])))
    assert [each.field for each in error.violations] == ["tools[0].parameters"]
    assert "look-around" in error.message


@pytest.mark.parametrize("mode", [pb.TOOL_CHOICE_MODE_AUTO, pb.TOOL_CHOICE_MODE_REQUIRED])
async def test_only_allowed_tools_are_called_and_the_prompt_has_all(gateway, scheduler, mode):
    forbidden = CALL.replace("get_weather", "now")
    says(scheduler, f"<think>Hm.</think>{CALL}{forbidden}")
    choice = pb.ToolChoice(mode=mode, allowed=["get_weather"])
    answer = await gateway.generation.Chat(request(tools=[WEATHER, pb.Tool(name="now")], tool_choice=choice))
    assert '"now"' in prompt_of(scheduler.submits[-1])
    assert "now" not in str(constraint_of(scheduler.submits[-1]))
    (sequence,) = answer.sequences
    assert [call.name for call in sequence.tool_calls] == ["get_weather"]


async def test_without_a_choice_the_model_knows_no_tools(gateway, scheduler):
    says(scheduler, CALL)
    answer = await gateway.generation.Chat(request(tool_choice=NONE))
    assert "get_weather" not in prompt_of(scheduler.submits[-1])
    assert constraint_of(scheduler.submits[-1]) is None
    assert (answer.sequences[0].text, answer.sequences[0].finish_reason) == (CALL, common_pb2.FINISH_REASON_STOP)


async def test_a_format_of_the_answer_constrains_what_follows_the_reasoning(gateway, scheduler):
    says(scheduler, '{"city": "Rome"}')
    wanted = common_pb2.Constraint(json_schema=json.dumps(SCHEMA))
    await gateway.generation.Chat(request(response_format=wanted, tool_choice=NONE))
    assert constraint_of(scheduler.submits[-1]).json_schema == wanted.json_schema
    assert constraint_of(scheduler.submits[-1]).begins_after == "</think>"
    options = pb.TemplateOptions()
    options.arguments.update({"enable_thinking": False})
    await gateway.generation.Chat(request(response_format=wanted, tool_choice=NONE, template_options=options))
    assert not constraint_of(scheduler.submits[-1]).HasField("begins_after")
    await gateway.generation.Chat(request(response_format=wanted))
    assert "get_weather" in constraint_of(scheduler.submits[-1]).lark


def message(**fields):
    values: dict[str, Any] = {"role": "assistant", "content": ""}
    return pb.ChatMessage(**values | fields)


def call(**fields):
    return pb.ToolCall(**{"id": "a", "name": "get_weather", "arguments": "{}"} | fields)


NO_NUMBER = pb.TemplateOptions()
NO_NUMBER.arguments.update({"enable_thinking": [float("nan")]})
BAD = [
    ({"tools": [pb.Tool(name=f"t{number}") for number in range(129)]}, "tools", "has more than 128 entries"),
    ({"tools": [pb.Tool(name="no spaces")]}, "tools[0].name", '"no spaces"'),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "must be unique"),
    ({"tools": [pb.Tool(name="f", parameters="[1]")]}, "tools[0].parameters", "must be a JSON schema"),
    ({"tools": [pb.Tool(name="f", parameters='{"type": "array"}')]}, "tools[0].parameters.type", '"array"'),
    (
        {"tools": [pb.Tool(name="f", parameters='{"not": {}}', strict=True)]},
        "tools[0].parameters",
        '"not"',
    ),
    ({"tool_choice": pb.ToolChoice(name="other")}, "tool_choice.name", "the tools are: get_weather"),
    ({"tools": [], "tool_choice": REQUIRED}, "tool_choice.mode", "there are no tools"),
    ({"tool_choice": pb.ToolChoice(allowed=["other"])}, "tool_choice.allowed[0]", "the tools are: get_weather"),
    ({"tool_choice": pb.ToolChoice(allowed=["get_weather"] * 129)}, "tool_choice.allowed", "the max is 128"),
    (
        {"tool_choice": pb.ToolChoice(name="get_weather", allowed=["get_weather"])},
        "tool_choice.allowed",
        "only with the modes auto and required",
    ),
    ({"tool_choice": pb.ToolChoice(mode=cast(Any, 9))}, "tool_choice.mode", "is 9"),
    ({"messages": [message(role="user", tool_calls=[call()])]}, "messages[0].tool_calls", "only assistant calls"),
    ({"messages": [message(tool_calls=[call(id="")])]}, "messages[0].tool_calls[0].id", "is empty"),
    ({"messages": [message(tool_calls=[call(id="x" * 129)])]}, "messages[0].tool_calls[0].id", "the max is 128"),
    ({"messages": [message(tool_calls=[call(name="?")])]}, "messages[0].tool_calls[0].name", '"?"'),
    ({"messages": [message(tool_calls=[call(arguments="1")])]}, "messages[0].tool_calls[0].arguments", "JSON object"),
    ({"messages": [message(tool_calls=[call(), call()])]}, "messages[0].tool_calls", "must be unique"),
    ({"messages": [message(role="tool", tool_call_id="b")]}, "messages[0].tool_call_id", "no message before it"),
    (
        {"template_options": pb.TemplateOptions(continue_final_message=True, add_generation_prompt=True)},
        "template_options.continue_final_message",
        "add_generation_prompt too",
    ),
    ({"template_options": {"arguments": {"messages": []}}}, "template_options.arguments.messages", "set by the server"),
    ({"template_options": {"arguments": {"style": 1}}}, "template_options.arguments.style", "reads: enable_thinking"),
    ({"template_options": NO_NUMBER}, "template_options.arguments", "NaN or infinity"),
    (
        {
            "response_format": common_pb2.Constraint(regex="a"),
            "sampling": common_pb2.SamplingParameters(constraint=common_pb2.Constraint(regex="a")),
        },
        "response_format",
        "sampling.constraint too",
    ),
    (
        {"response_format": common_pb2.Constraint(json_schema='{"not": {}}'), "tool_choice": NONE},
        "response_format.json_schema",
        '"not"',
    ),
    ({"response_format": common_pb2.Constraint(json_schema="{")}, "response_format.json_schema", "not valid JSON"),
    ({"response_format": common_pb2.Constraint(lark='start: "a"')}, "response_format", "combined with tools"),
]


@pytest.mark.parametrize(("fields", "field", "says"), BAD, ids=lambda value: value if isinstance(value, str) else "")
async def test_bad_fields_are_refused_by_name(gateway, scheduler, fields, field, says):
    asked = pb.ChatRequest()
    json_format.ParseDict(
        {name: value for name, value in fields.items() if name == "template_options" and isinstance(value, dict)},
        asked,
    )
    values = {name: value for name, value in fields.items() if not isinstance(value, dict)}
    asked.MergeFrom(pb.ChatRequest(**{"messages": [ASKED], "tools": [WEATHER]} | values))
    error = await error_of(gateway.generation.Chat(asked))
    assert isinstance(error, InvalidArgument)
    assert [each.field for each in error.violations] == [field]
    assert says in error.violations[0].description
    assert not scheduler.submits


async def test_a_template_that_knows_no_tools_says_so(scheduler, tmp_path):
    model = write_chat_model(tmp_path / "model", "{{ messages[0].content }}")
    async with running_gateway(scheduler, model=str(model)) as running:
        error = await error_of(running.generation.Chat(request()))
    assert (error.reason, error.violations[0].field) == ("NO_TOOLS", "tools")
