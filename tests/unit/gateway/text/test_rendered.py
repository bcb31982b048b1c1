"""The format of a chat template's calls, and their shape, are derived from the calls that it renders."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.text.chat import ChatTemplate
from gateway.text.formats.answer import tool_format_of
from gateway.text.formats.rendered import ID, CallShape, Layout, Slot, TagShape
from gateway.text.formats.shapes import SHAPES

_JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_NAMED = (("name", Slot.NAME), ("arguments", Slot.ARGUMENTS))


def template_of(call: str, *, before: str = "", between: str = "", after: str = "") -> str:
    """A template that writes each call as `call`, with texts around all of them."""
    each = f"{call}{{% if not loop.last %}}{{{{ {between!r} }}}}{{% endif %}}"
    calls = f"{before}{{% for c in m.tool_calls %}}{each}{{% endfor %}}{after}"
    return (
        "{{ tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
        f"{{% if m.tool_calls %}}{calls}{{% endif %}}<|end|>{{% endfor %}}"
    )


def tags(argument: str, value: str = "v if v is string else v | tojson") -> str:
    one = argument.format("{{ k }}", f"{{{{ {value} }}}}")
    return f"{{% for k, v in c.function.arguments | items %}}{one}{{% endfor %}}"


# Lists and objects are JSON, and all else is what Python prints.
AS_PYTHON = "v | tojson if v is mapping or (v is iterable and v is not string) else v"
NAME = "{{ c.function.name }}"
ARGUMENTS = "{{ c.function.arguments | tojson }}"
# The templates of the formats' models, whose calls have the usual shape but for the given fields.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "hermes": (template_of(f"<tool_call>\n{_JSON}\n</tool_call>", between="\n"), {}),
    "mistral": (
        template_of(f'{_JSON[:-1]}, "id": "{{{{ c.id }}}}"}}', before="[TOOL_CALLS] [", between=", ", after="]"),
        {"section_open": "[TOOL_CALLS] [", "fields": (*_NAMED, ("id", Slot.ID))},
    ),
    "deepseek_v31": (
        template_of(
            f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>",
            after="<｜tool▁calls▁end｜>",
        ),
        {},
    ),
    "kimi_k2": (
        template_of(
            f"<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
            before="<|tool_calls_section_begin|>",
            after="<|tool_calls_section_end|>",
        ),
        {},
    ),
    "qwen3_coder": (
        template_of(
            "<tool_call>\n<function="
            + NAME
            + ">\n"
            + tags("<parameter={}>\n{}\n</parameter>\n", AS_PYTHON)
            + "</function>\n</tool_call>",
            between="\n",
        ),
        {"tags": TagShape("<parameter=", ">\n", ">\n", "\n</parameter>\n", constants=("True", "None"))},
    ),
    "glm45": (
        template_of(f"<tool_call>{NAME}{tags('<arg_key>{}</arg_key><arg_value>{}</arg_value>')}</tool_call>"),
        {
            "separator": "",
            "name_close": "",
            "tags": TagShape("<arg_key>", "</arg_key><arg_value>", "</arg_key><arg_value>", "</arg_value>"),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_format_and_its_texts_are_those_of_the_rendered_calls(name):
    source, differs = CASES[name]
    calls = ChatTemplate(source, {}).calls
    assert calls is not None
    assert (tool_format_of(calls), calls.shape) == (name, replace(SHAPES[name], **differs))


def test_an_id_that_every_call_has_before_its_arguments_is_a_place():
    source = template_of(f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{ARGUMENTS}")
    calls = ChatTemplate(source, {}).calls
    assert calls is not None
    assert calls.shape == CallShape(Layout.NAMED, call_open="[TOOL_CALLS]", name_close=f"[CALL_ID]{ID}[ARGS]")
    assert tool_format_of(calls) == "mistral"


# Calls that resemble calls of another format, whose parser would lose or cut them.
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (template_of(f"<tool_call>[{_JSON}]</tool_call>"), "falcon3"),
        (template_of(f"<tool_call>{NAME}\n```json\n{ARGUMENTS}\n```</tool_call>"), "hunyuan_a13b"),
        (
            template_of(
                f"<tool_call>{NAME}<tool_sep>{tags('<arg_key>{}</arg_key><arg_value>{}</arg_value>')}</tool_call>"
            ),
            "hy_v3",
        ),
        (
            template_of(
                f"<seed:tool_call><function={NAME}>{tags('<parameter={}>{}</parameter>')}</function></seed:tool_call>"
            ),
            "seed_oss",
        ),
        (template_of(f"<function={NAME}>{ARGUMENTS}</function>"), "functionary_v31"),
        (template_of(f"<|python_tag|><function={NAME}>{ARGUMENTS}</function>"), None),
    ],
    ids=[
        "a list in a mark",
        "a fenced block",
        "a mark after the name",
        "other marks around",
        "JSON in a tag",
        "unknown",
    ],
)
def test_a_format_is_told_from_those_that_resemble_it(source, expected):
    calls = ChatTemplate(source, {}).calls
    assert calls is not None
    assert tool_format_of(calls) == expected


def test_marks_that_end_the_turn_and_empty_reasoning_belong_to_no_call():
    call = f"<tool_call>{_JSON}</tool_call><|eom|>"
    source = template_of(call, before="<think>\n\n</think>\n\n").replace(
        "<|end|>", "{% if not m.tool_calls %}<|end|>{% endif %}"
    )
    calls = ChatTemplate(source.replace("{% for c in m.tool_calls %}", "{% for c in m.tool_calls[:1] %}"), {}).calls
    assert calls is not None
    assert calls.shape == CallShape(
        Layout.ENVELOPE, call_open="<tool_call>", call_close="</tool_call>", fields=_NAMED, is_parallel=False
    )
