"""Calls of each real chat template go around: the template renders them, the grammar accepts what it rendered, the
parser reads it whole and cut at every character, and the next turn has what was read."""

import json
from typing import Any

import pytest

from gateway.text.chat import ChatTemplate
from gateway.text.formats.answer import AnswerFormat
from gateway.text.formats.grammars import CallGrammar, ModelText, constrained_calls, format_of_forced_calls
from gateway.text.formats.notations import text_parameters
from gateway.text.formats.output import Output, joined
from gateway.text.formats.parser import OfferedTool
from gateway.text.formats.rendered import ID, INDEX, PROBE_TEXTS, CallShape, Layout, written_calls
from gateway.text.formats.shapes import JSON_LIST, SHAPES
from gateway.types import ChatMessage, ChatPrompt
from quire.gateway.v1.generation_pb2 import Tool, ToolCall
from quire.rpc.errors import InvalidArgument
from tests.real.models import chat_template_files
from tests.real.test_detection import NUM_PARTS, SPECIAL_TOKENS, read_table
from tests.support.constraints import accepts

pytestmark = pytest.mark.real

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "days": {"type": "integer", "description": "how many"},
            "exact": {"type": "boolean", "description": "which kind"},
            "place": {"type": "string", "description": "the place"},
        },
        "required": ["place"],
        "additionalProperties": False,
    },
    "walk": {
        "type": "object",
        "properties": {"to": {"type": "string", "description": "the place"}},
        "required": ["to"],
        "additionalProperties": False,
    },
}
TOOLS = [Tool(name=name, description="d", parameters=json.dumps(schema)) for name, schema in SCHEMAS.items()]
GRAMMARS = [CallGrammar(tool.name, tool.parameters) for tool in TOOLS]
OFFERED = tuple(OfferedTool(tool.name, text_parameters(tool.parameters)) for tool in TOOLS)
CALLS = [("get_weather", {"days": 37, "exact": True, "place": "{x} Rio"}), ("walk", {"to": "<b> Rio"})]
PLACE, RESULTS = "What a weather!", ("Result 0", "Result 1")
# Templates that take only texts as arguments, or only one result.
ONE_CALL = {"microsoft-FrogMini-14B-2510", "nvidia-Llama-3.1-Nemotron-Nano-8B-v1"}
# The ids of its calls have no closing quote.
SPOILED = {"ServiceNow-AI-Apriel-Nemotron-15b-Thinker"}
# They take results only in parts with names, or no results.
NO_RESULTS = {"MiniMaxAI-MiniMax-M1-40k", "MiniMaxAI-MiniMax-M1-80k", "openguardrails-OpenGuardrails-Text-2510"}
NOT_ACCEPTED = {
    # Ids stand only in calls that have results.
    "Motif-Technologies-Motif-3-Beta",
    *("Apriel-1.6-15b-Thinker-fixed", "ServiceNow-AI-Apriel-1.5-15b-Thinker", "ServiceNow-AI-Apriel-1.6-15b-Thinker"),
    "unsloth-Apriel-1.5",
    # Its calls begin like any JSON, and have ids after the arguments, so that they are not constrained under auto.
    "sophosympatheia-StrawberryLemonade-L3-70B-v1.0",
}


def conversation(template: ChatTemplate, calls: list[ToolCall]) -> ChatPrompt:
    messages = [ChatMessage("user", PLACE), ChatMessage("assistant", "", tool_calls=calls)]
    for call, result in zip(calls, RESULTS, strict=False):
        messages.append(ChatMessage("tool", result, tool_call_id=call.id, name=call.name))
    return ChatPrompt(messages, TOOLS if "tools" in template.variables else ())


def read(tool_format: str, *pieces: str) -> Output:
    parser = AnswerFormat(tool_format, tools=OFFERED).parser(lambda index: f"callId00{index + 1}")
    assert parser is not None
    return joined([*map(parser.push, pieces), parser.finish()])


def rendered(template: ChatTemplate, shape: CallShape, calls: list[ToolCall]) -> str:
    """What the template writes for calls, from their first mark to their last one."""
    prompt = template.render(conversation(template, calls))
    head = f"{shape.section_open}{shape.call_open}".lstrip("\n").replace(ID, calls[0].id).replace(INDEX, "0")
    tail = f"{shape.call_close}{shape.section_close}".rstrip() or "}" * (1 + (shape.layout is Layout.ENVELOPE))
    # After the last argument.
    last = prompt.rindex("Rio", 0, prompt.index(RESULTS[0]))
    begin = prompt.index(head or "{", prompt.rindex(PLACE))
    # In Harmony the space before the recipient belongs to the call.
    begin -= prompt.startswith(" to=", begin - 1)
    return prompt[begin : prompt.index(tail, last + len("Rio")) + len(tail)]


def to_calls(shape: CallShape, calls: list[tuple[str, dict[str, Any]]]) -> list[ToolCall]:
    # Kimi K2 has names in ids, and Mistral takes only nine letters and digits.
    ids = "functions.{}:{}" if shape.call_open.startswith("<|tool_call_begin|>functions") else "callId00{1}"
    return [
        ToolCall(id=ids.format(name, index), name=name, arguments=json.dumps(value, ensure_ascii=False))
        for index, (name, value) in enumerate(calls)
    ]


def check_read(tool_format: str, text: str, made: list[tuple[str, dict[str, Any]]]) -> Output:
    output = read(tool_format, text)
    assert read(tool_format, *text) == output
    assert not output.text.strip()
    assert [(call.name, json.loads(call.arguments)) for call in output.tool_calls] == made
    return output


def check_accepted(tool_format: str, shape: CallShape, text: str) -> None:
    for is_forced in (False, True):
        if not is_forced or format_of_forced_calls(tool_format) == tool_format:
            constraint = constrained_calls(
                tool_format, GRAMMARS, ModelText(shape), is_forced=is_forced, is_single=False
            )
            assert constraint is not None
            assert accepts(constraint, text), f"{is_forced=} {text!r}"
            if "37" in text:
                assert not accepts(constraint, text.replace("37", "many")), f"{is_forced=} {text!r}"


def check_cycle(name: str, tool_format: str) -> None:
    template = ChatTemplate(chat_template_files()[name].read_text(encoding="utf-8"), SPECIAL_TOKENS)
    shape = None if template.calls is None else template.calls.shape
    if template.calls is not None and shape is None:
        # A notation that is no shape: the calls of the probe are read, and have no grammar.
        probed = template.calls
        tools = tuple(OfferedTool(call.name, PROBE_TEXTS) for call in probed.calls)
        parser = AnswerFormat(tool_format, tools=tools).parser(str)
        assert parser is not None
        output = joined([*map(parser.push, probed.text), parser.finish()])
        assert [call.name for call in output.tool_calls] == [call.name for call in probed.calls]
        check_sent_back(template, to_calls(SHAPES[JSON_LIST], CALLS))
        return
    made = CALLS[1:] if name in ONE_CALL else CALLS
    written = shape or SHAPES[tool_format]
    calls = to_calls(written, made if written.is_parallel else made[:1])
    if shape is None:
        # The template renders no calls: they are as the format's documents have them.
        text = written_calls(written, [(call.name, call.arguments, call.id) for call in calls])
    else:
        text = rendered(template, shape, calls)
    output = check_read(tool_format, text, made[: len(calls)])
    if name not in NOT_ACCEPTED:
        check_accepted(tool_format, written, text)
    if name not in NO_RESULTS:
        check_sent_back(template, [ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in output.tool_calls])


def check_sent_back(template: ChatTemplate, calls: list[ToolCall]) -> None:
    """The calls are in the next turn's prompt; their arguments may have other spaces."""
    written = template.render(conversation(template, calls)).partition(RESULTS[0])[0]
    assert all(call.name in written.rpartition(PLACE)[2] for call in calls)
    assert "Rio" in written


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[] if part else pytest.mark.extended) for part in range(NUM_PARTS)]
)
def test_calls_go_around(part: int) -> None:
    """The first part is a sample for the quick tier."""
    named = [(name, calls) for name, (calls, _) in read_table().items() if calls is not None and name not in SPOILED]
    wrong = list[str]()
    for name, tool_format in named[part::NUM_PARTS]:
        try:
            check_cycle(name, tool_format)
        except (AssertionError, ValueError, InvalidArgument) as error:
            wrong.append(f"{tool_format} {name}: {error!s:.400}")
    assert not wrong, "\n".join(wrong)
