"""Calls of each real chat template go around: the template renders them, the grammar accepts what it rendered, the
parser reads it whole and cut at every character, and the next turn's prompt has it again."""

import json
from typing import Any

import pytest

from gateway.text.chat import ChatTemplate
from gateway.text.formats.answer import AnswerFormat, tool_format_of
from gateway.text.formats.grammars import CallGrammar, ModelText, constrained_calls, format_of_forced_calls
from gateway.text.formats.notations import text_parameters
from gateway.text.formats.output import Output, joined
from gateway.text.formats.parser import OfferedTool
from gateway.text.formats.rendered import ID, INDEX, CallShape, Layout
from gateway.types import ChatMessage, ChatPrompt
from quire.gateway.v1.generation_pb2 import Tool, ToolCall
from tests.real.models import chat_template_files
from tests.real.test_detection import SPECIAL_TOKENS, read_table
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
SPOILED = {
    # Its ids have no closing quote.
    "ServiceNow-AI-Apriel-Nemotron-15b-Thinker",
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
    return prompt[prompt.index(head or "{", prompt.rindex(PLACE)) : prompt.index(tail, last + len("Rio")) + len(tail)]


def to_calls(shape: CallShape, calls: list[tuple[str, dict[str, Any]]]) -> list[ToolCall]:
    # Kimi K2 has names in ids, and Mistral takes only nine letters and digits.
    ids = "functions.{}:{}" if shape.call_open.startswith("<|tool_call_begin|>functions") else "callId00{1}"
    return [
        ToolCall(id=ids.format(name, index), name=name, arguments=json.dumps(value, ensure_ascii=False))
        for index, (name, value) in enumerate(calls)
    ]


def check_cycle(name: str, tool_format: str, made: list[tuple[str, dict[str, Any]]]) -> None:
    template = ChatTemplate(chat_template_files()[name].read_text(encoding="utf-8"), SPECIAL_TOKENS)
    shape = None if template.calls is None else template.calls.shape
    assert shape is not None
    calls = to_calls(shape, made if shape.is_parallel else made[:1])
    text = rendered(template, shape, calls)
    output = read(tool_format, text)
    assert read(tool_format, *text) == output
    assert not output.text.strip()
    assert [(call.name, json.loads(call.arguments)) for call in output.tool_calls] == made[: len(calls)]
    for is_forced in (False, True):
        if not is_forced or format_of_forced_calls(tool_format) == tool_format:
            model = ModelText(shape)
            constraint = constrained_calls(tool_format, GRAMMARS, model, is_forced=is_forced, is_single=False)
            assert constraint is not None
            assert accepts(constraint, text), is_forced
    again = [ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in output.tool_calls]
    assert rendered(template, shape, again)


def test_x():
    wrong = []
    for name, (tool_format, _) in read_table().items():
        if tool_format is None: continue
        try:
            check_cycle(name, tool_format, CALLS)
        except BaseException as e:
            wrong.append((tool_format, name, repr(e)[:300]))
    print(len(wrong))
    for w in sorted(wrong): print(*w)
