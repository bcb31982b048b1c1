"""How calls are written in formats that differ by their marks and tags alone, and the parsers of these formats."""

import dataclasses
import re
from collections.abc import Mapping

from gateway.text.formats.json_calls import HermesParser, JsonCallParser, JsonListParser
from gateway.text.formats.other_calls import PythonicParser, TagCallParser
from gateway.text.formats.parser import CallParser
from gateway.text.formats.rendered import ID, INDEX, CallShape, Layout, Slot, TagShape
from gateway.text.formats.scanning import Part, Pattern

HARMONY = "openai"
JSON_LIST = "json_list"
"""The format of forced calls if the model's own format has no grammar."""

_NAMED = (("name", Slot.NAME), ("arguments", Slot.ARGUMENTS))
_PARAMETERS = (("name", Slot.NAME), ("parameters", Slot.ARGUMENTS))


def _list(section_open: str, section_close: str, fields: tuple[tuple[str, Slot | str], ...] = _NAMED) -> CallShape:
    return CallShape(Layout.ENVELOPE, section_open, separator=", ", section_close=section_close, fields=fields)


def _tags(
    section: tuple[str, str], call: tuple[str, str, str], argument: tuple[str, str, str], separator: str = ""
) -> CallShape:
    """Each text up to a place: those of all calls, of a call up to its name, its arguments and its end, and of an
    argument up to its name, its value and the next one. Between the name and a value that is no string, `true` is
    `false`."""
    opened, key_close, close = argument
    return CallShape(
        Layout.TAGS,
        section[0],
        *(call[0], call[2]),
        separator,
        section[1],
        name_close=call[1],
        tags=TagShape(opened, key_close, key_close.replace("true", "false"), close),
    )


def _keys(prefix: str = "", suffix: str = "") -> tuple[str, str, str]:
    key, value = f"{prefix}arg_key{suffix}>", f"{prefix}arg_value{suffix}>"
    return f"<{key}", f"</{key}\n<{value}", f"</{value}\n"


def _hunyuan(suffix: str = "") -> CallShape:
    call = f"tool_call{suffix}>"
    section = (f"<tool_calls{suffix}>", f"\n</tool_calls{suffix}>")
    return _tags(section, (f"\n<{call}", f"<tool_sep{suffix}>\n", f"</{call}"), _keys(suffix=suffix))


def _dsml(calls: str) -> CallShape:
    mark = "｜DSML｜"
    return _tags(
        (f"<{mark}{calls}>", f"\n</{mark}{calls}>"),
        (f'\n<{mark}invoke name="', '">\n', f"</{mark}invoke>"),
        (f'<{mark}parameter name="', '" string="true">', f"</{mark}parameter>\n"),
    )


_PARAMETER = ("<parameter=", ">", "</parameter>\n")
_NO_SECTION = ("", "")
MARKED: Mapping[str, CallShape] = {
    "longcat": CallShape(
        Layout.ENVELOPE, call_open="<longcat_tool_call>\n", call_close="\n</longcat_tool_call>", fields=_NAMED
    ),
    "internlm": CallShape(
        Layout.ENVELOPE,
        call_open="<|action_start|><|plugin|>\n",
        call_close="\n<|action_end|>",
        separator="\n",
        fields=_PARAMETERS,
    ),
    "step3_vl": CallShape(
        Layout.ENVELOPE,
        section_open="<tool_calls>",
        call_open="\n<tool_call>\n",
        call_close="\n</tool_call>",
        section_close="\n</tool_calls>",
        fields=_NAMED,
    ),
    "minimax": CallShape(
        Layout.ENVELOPE,
        section_open="<tool_calls>\n",
        separator="\n",
        section_close="\n</tool_calls>",
        fields=_NAMED,
    ),
    "functionary_v31": CallShape(Layout.NAMED, call_open="<function=", name_close=">", call_close="</function>"),
    "step_audio_2": CallShape(
        Layout.NAMED, call_open="<|CALL_START|>function\n", name_close="\n", call_close="<|CALL_END|>"
    ),
    "jamba": _list("<tool_calls>[", "]</tool_calls>"),
    "nemotron_json": _list("<TOOLCALL>[", "]</TOOLCALL>"),
    "falcon3": _list("<tool_call>\n[", "]\n</tool_call>"),
    "xlam": _list("[", "]"),
    # The text before the list is a part of the name of the role, after which the prompt ends.
    "hyperclovax": _list("-> tool/function_call\n[", "]"),
    "apertus": _list("<|tools_prefix|>[", "]<|tools_suffix|>", (("", Slot.ARGUMENTS),)),
    "olmo3": CallShape(
        Layout.PYTHON,
        section_open="<function_calls>",
        call_close=")",
        separator="\n",
        section_close="</function_calls>",
        name_close="(",
        tags=TagShape("", "=", "=", "", ", ", '"'),
    ),
    "lfm2": CallShape(
        Layout.PYTHON,
        section_open="<|tool_call_start|>[",
        call_close=")",
        separator=", ",
        section_close="]<|tool_call_end|>",
        name_close="(",
        tags=TagShape("", "=", "=", "", ", ", '"', ("True", "None")),
    ),
    "qwen3_coder": _tags(
        _NO_SECTION,
        ("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
        ("<parameter=", ">\n", "\n</parameter>\n"),
        "\n",
    ),
    "seed_oss": _tags(
        _NO_SECTION, ("<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>"), _PARAMETER, "\n"
    ),
    "glm45": _tags(_NO_SECTION, ("<tool_call>", "\n", "</tool_call>"), _keys(), "\n"),
    "hy_v3": _hunyuan(),
    "hy_v3_opensource": _hunyuan(":opensource"),
    "longcat_xml": _tags(_NO_SECTION, ("<longcat_tool_call>", "\n", "</longcat_tool_call>"), _keys("longcat_"), "\n"),
    "solar_open2": _tags(
        _NO_SECTION,
        ("<|tool_call:start|>", "\n", "<|tool_call:end|>"),
        ("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>\n"),
        "\n",
    ),
    "minimax_m2": _tags(
        ("<minimax:tool_call>", "\n</minimax:tool_call>"),
        ('\n<invoke name="', '">\n', "</invoke>"),
        ('<parameter name="', '">', "</parameter>\n"),
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
}
"""Formats whose parsers are made of their shapes."""

_BRACED = TagShape("", ":", ":", "", ",", '<|"|>')
_COHERE = _list(
    "<|START_ACTION|>[", "]<|END_ACTION|>", (("tool_call_id", Slot.INDEX), ("tool_name", Slot.NAME), _PARAMETERS[1])
)
SHAPES: Mapping[str, CallShape] = MARKED | {
    "hermes": CallShape(
        Layout.ENVELOPE, call_open="<tool_call>\n", call_close="\n</tool_call>", separator="\n", fields=_NAMED
    ),
    "llama3_json": CallShape(
        Layout.ENVELOPE, separator="; ", fields=(("name", Slot.NAME), ("parameters", Slot.ARGUMENTS))
    ),
    "mistral": CallShape(
        Layout.ENVELOPE, section_open="[TOOL_CALLS][", separator=", ", section_close="]", fields=_NAMED
    ),
    "deepseek_v3": CallShape(
        Layout.NAMED,
        section_open="<｜tool▁calls▁begin｜>",
        call_open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        call_close="\n```<｜tool▁call▁end｜>",
        separator="\n",
        section_close="<｜tool▁calls▁end｜>",
        name_close="\n```json\n",
    ),
    "deepseek_v31": CallShape(
        Layout.NAMED,
        section_open="<｜tool▁calls▁begin｜>",
        call_open="<｜tool▁call▁begin｜>",
        call_close="<｜tool▁call▁end｜>",
        section_close="<｜tool▁calls▁end｜>",
        name_close="<｜tool▁sep｜>",
    ),
    "kimi_k2": CallShape(
        Layout.NAMED,
        section_open="<|tool_calls_section_begin|>",
        call_open="<|tool_call_begin|>functions.",
        call_close="<|tool_call_end|>",
        section_close="<|tool_calls_section_end|>",
        name_close=f":{INDEX}<|tool_call_argument_begin|>",
    ),
    "granite": CallShape(
        Layout.ENVELOPE, section_open="<|tool_call|>[", separator=", ", section_close="]", fields=_NAMED
    ),
    "phi4_mini_json": CallShape(
        Layout.ENVELOPE, section_open="functools[", separator=", ", section_close="]", fields=_NAMED
    ),
    "gemma4": CallShape(
        Layout.BRACED, call_open="<|tool_call>call:", call_close="}<tool_call|>", name_close="{", tags=_BRACED
    ),
    "functiongemma": CallShape(
        Layout.BRACED,
        call_open="<start_function_call>call:",
        call_close="}<end_function_call>",
        name_close="{",
        tags=dataclasses.replace(_BRACED, quote="<escape>"),
    ),
    "pythonic": CallShape(
        Layout.PYTHON,
        section_open="[",
        call_close=")",
        separator=", ",
        section_close="]",
        name_close="(",
        tags=TagShape("", "=", "=", "", ", ", '"', ("True", "None")),
    ),
    HARMONY: CallShape(
        Layout.NAMED, call_open=" to=functions.", name_close="<|channel|>commentary json<|message|>", is_parallel=False
    ),
    JSON_LIST: CallShape(Layout.ENVELOPE, section_open="[", separator=", ", section_close="]", fields=_NAMED),
    "gigachat3": CallShape(Layout.ENVELOPE, call_open="<|function_call|>", fields=_NAMED, is_parallel=False),
    "solar_open": CallShape(
        Layout.NAMED,
        section_open="<|tool_calls|>",
        call_open=f"<|tool_call:begin|>{ID}<|tool_call:name|>",
        call_close="<|tool_call:end|>",
        section_close="<|calls|>",
        name_close="<|tool_call:args|>",
    ),
    "hunyuan_a13b": CallShape(
        Layout.NAMED,
        section_open="<tool_calls>",
        call_open="<tool_call>",
        call_close="\n```</tool_call>",
        separator="\n",
        section_close="</tool_calls>",
        name_close="\n```json\n",
    ),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "command_r": _list("Action:\n```json\n[", "]\n```", (("tool_name", Slot.NAME), _PARAMETERS[1])),
    "step3": _tags(
        ("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
        (
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
            '">',
            "</steptml:invoke><｜tool_call_end｜>\n",
        ),
        ('<steptml:parameter name="', '">', "</steptml:parameter>"),
    ),
    "minicpm5": _tags(
        _NO_SECTION, ('<function name="', '">', "</function>"), ('<param name="', '">', "</param>"), "\n"
    ),
}
"""How calls of each format are usually written: where a template renders none, or writes another format."""


def parser_of(shape: CallShape) -> type[CallParser]:
    """A parser of calls of a shape, which may have any spaces between its marks."""
    section = shape.section_open.strip(), shape.section_close.strip()
    match shape.layout:
        case Layout.TAGS if shape.tags is not None:
            parser = _tag_parser(shape, shape.tags)
        case Layout.PYTHON:
            parser = PythonicParser.between(section[0].removesuffix("["), section[1].removeprefix("]"))
        case Layout.NAMED:
            begin, *further = shape.call_open.split("\n")
            header = Pattern.of("\n".join((*further, "")) + "{}" + shape.name_close + "\n", Part.NAME, before="{")
            parser = JsonCallParser.between(begin, shape.call_close.strip(), header=header, is_envelope=False)
        case _ if section[0].endswith("["):
            begin, end = section[0].removesuffix("[").strip(), section[1].removeprefix("]").strip()
            key_is_name = {} if shape.fields[0][0] else {"header": Pattern.of('{\n"{}"\n:\n', Part.NAME, before="{")}
            parser = JsonListParser.between(begin, end, **key_is_name) if begin else JsonListParser
        case _ if shape.call_open:
            parser = HermesParser.between(
                shape.call_open.strip(), shape.call_close.strip(), dropped=tuple(filter(None, section))
            )
        case _:
            parser = HermesParser.between(*section, separator=Pattern(Part.SPACES, before="{"))
    texts = dataclasses.astuple(shape) + dataclasses.astuple(shape.tags or TagShape("", "", "", ""))
    tokens = [token for text in texts if isinstance(text, str) for token in _TOKEN.findall(text)]
    return parser.with_marks(*parser.begins, tokens=tokens)


_TOKEN = re.compile(r"<[^<>\s]+>|｜[^｜<>\s]+｜")


def _tag_parser(shape: CallShape, tags: TagShape) -> type[TagCallParser]:
    *around, begin = f"{shape.section_open}{shape.call_open}".split("\n")
    end, *after = f"{shape.call_close}{shape.section_close}".split("\n")
    # Where the tag says whether a value is a string, it has a place for that.
    says_kind = tags.key_close != tags.other_close
    key_close = tags.key_close.replace("true", "{}") if says_kind else tags.key_close
    has_lines = key_close.endswith("\n")
    return TagCallParser.of_tags(
        f"{begin}{{}}{shape.name_close.rstrip()}",
        f"{tags.open}{{}}{key_close.rstrip()}",
        tags.close.strip(),
        end,
        around=(around[0], after[-1]) if around else (),
        padding=("\n", "\n") if has_lines else ("", ""),
    )
