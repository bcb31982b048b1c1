"""A model of random habits that must call a tool calls it well."""

import json

import jsonschema

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2 as pb
from quire.gateway.v1 import generation_pb2_grpc
from quire.rpc.channel import open_channel
from tests.support.chat_models import write_chat_model
from tests.support.serving import serving

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS = [
    pb.Tool(name="get_weather", description="Tells the weather.", parameters=json.dumps(PARAMETERS)),
    pb.Tool(name="now", description="Tells the time."),
]
SCHEMAS = {"get_weather": PARAMETERS, "now": {"type": "object", "additionalProperties": False}}
# A chat template that writes calls of Hermes.
TEMPLATE = "{% if tools %}{{ tools | length }}{{ '<tool_call>' }}{% endif %}{{ messages[0].content }}"


def asked(seed, **fields):
    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content="Is it warm in Rome?")], tools=TOOLS, **fields
    )
    request.sampling.seed = seed
    request.sampling.temperature = 1
    request.stopping.max_tokens = 400
    return request


async def test_forced_calls_fit_their_schemas(tmp_path):
    model = write_chat_model(tmp_path / "model", TEMPLATE, weights=True)
    async with serving(model=str(model)) as served, open_channel(served.server.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for seed in range(2):
            required = asked(seed, tool_choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED))
            assert_calls(await stub.Chat(required), SCHEMAS)
            named = asked(seed, tool_choice=pb.ToolChoice(name="get_weather"), parallel_tool_calls=False)
            (call,) = assert_calls(await stub.Chat(named), SCHEMAS)
            assert call.name == "get_weather"


def assert_calls(answer, schemas):
    (sequence,) = answer.sequences
    assert sequence.finish_reason in (common_pb2.FINISH_REASON_TOOL_CALLS, common_pb2.FINISH_REASON_LENGTH)
    assert sequence.text == ""
    assert sequence.tool_calls
    complete = sequence.finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS
    for call in sequence.tool_calls if complete else sequence.tool_calls[:-1]:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    return sequence.tool_calls
