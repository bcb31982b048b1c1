"""How calls are usually written in each format, and the parsers of the formats that differ only by marks and tags."""

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
_PARAMETERS = ("parameters", Slot.ARGUMENTS)
_TOKEN = re.compile(r"<[^<>\s]+>|｜[^｜<>\s]+｜")


def _object(opened: str, closed: str, separator: str = "", fields: tuple[tuple[str, Slot], ...] = _NAMED) -> CallShape:
    """One JSON object for each call."""
    return CallShape(Layout.ENVELOPE, call_open=opened, call_close=closed, separator=separator, fields=fields)


def _list(opened: str, closed: str, fields: tuple[tuple[str, Slot], ...] = _NAMED, separator: str = ", ") -> CallShape:
    """One JSON object for each call, between marks around all of them."""
    return CallShape(Layout.ENVELOPE, opened, separator=separator, section_close=closed, fields=fields)


def _name(
    opened: str, name_close: str, closed: str, section: tuple[str, str] = ("", ""), between: str = ""
) -> CallShape:
    """The name and JSON."""
    return CallShape(Layout.NAMED, section[0], opened, closed, between, section[1], name_close=name_close)


def _tags(
    opened: str, name_close: str, argument: tuple[str, str, str], closed: str, section: tuple[str, str] | None = None
) -> CallShape:
    """`argument` has the texts before the name of an argument, before its value and after it. Before a value that is no
    string, `true` is `false`. Without texts around all calls, each is on a line of its own."""
    before, key_close, close = argument
    tags = TagShape(before, key_close, key_close.replace("true", "false"), close)
    around, separator = section or ("", ""), "" if section else "\n"
    return CallShape(Layout.TAGS, around[0], opened, closed, separator, around[1], name_close=name_close, tags=tags)


def _keys(prefix: str = "", suffix: str = "") -> tuple[str, str, str]:
    key, value = f"{prefix}arg_key{suffix}>", f"{prefix}arg_value{suffix}>"
    return f"<{key}", f"</{key}\n<{value}", f"</{value}\n"


def _hunyuan(suffix: str = "") -> CallShape:
    call, section = f"tool_call{suffix}>", (f"<tool_calls{suffix}>", f"\n</tool_calls{suffix}>")
    return _tags(f"\n<{call}", f"<tool_sep{suffix}>\n", _keys(suffix=suffix), f"</{call}", section)


def _dsml(calls: str) -> CallShape:
    mark = "｜DSML｜"
    argument = (f'<{mark}parameter name="', '" string="true">', f"</{mark}parameter>\n")
    section = (f"<{mark}{calls}>", f"\n</{mark}{calls}>")
    return _tags(f'\n<{mark}invoke name="', '">\n', argument, f"</{mark}invoke>", section)


def _python(section: tuple[str, str], separator: str, quote: str, constants: tuple[str, str]) -> CallShape:
    tags = TagShape("", "=", "=", "", ", ", quote, constants)
    return CallShape(Layout.PYTHON, section[0], "", ")", separator, section[1], name_close="(", tags=tags)


def _braced(opened: str, closed: str, quote: str) -> CallShape:
    tags = TagShape("", ":", ":", "", ",", quote)
    return CallShape(Layout.BRACED, call_open=f"{opened}call:", call_close=f"}}{closed}", name_close="{", tags=tags)


MARKED: Mapping[str, CallShape] = {
    "longcat": _object("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    "internlm": _object("<|action_start|><|plugin|>\n", "\n<|action_end|>", "\n", (("name", Slot.NAME), _PARAMETERS)),
    "step3_vl": dataclasses.replace(
        _object("\n<tool_call>\n", "\n</tool_call>"), section_open="<tool_calls>", section_close="\n</tool_calls>"
    ),
    "minimax": _list("<tool_calls>\n", "\n</tool_calls>", separator="\n"),
    "functionary_v31": _name("<function=", ">", "</function>"),
    "step_audio_2": _name("<|CALL_START|>function\n", "\n", "<|CALL_END|>"),
    "jamba": _list("<tool_calls>[", "]</tool_calls>"),
    "nemotron_json": _list("<TOOLCALL>[", "]</TOOLCALL>"),
    "falcon3": _list("<tool_call>\n[", "]\n</tool_call>"),
    "xlam": _list("[", "]"),
    # The text before the list is a part of the name of the role, after which the prompt ends.
    "hyperclovax": _list("-> tool/function_call\n[", "]"),
    # The name is the key of the arguments.
    "apertus": _list("<|tools_prefix|>[", "]<|tools_suffix|>", (("", Slot.ARGUMENTS),)),
    "olmo3": _python(("<function_calls>", "</function_calls>"), "\n", '"', ("true", "null")),
    "lfm2": _python(("<|tool_call_start|>[", "]<|tool_call_end|>"), ", ", '"', ("True", "None")),
    "qwen3_coder": _tags(
        "<tool_call>\n<function=", ">\n", ("<parameter=", ">\n", "\n</parameter>\n"), "</function>\n</tool_call>"
    ),
    "seed_oss": _tags(
        *("<seed:tool_call>\n<function=", ">\n", ("<parameter=", ">", "</parameter>\n")),
        "</function>\n</seed:tool_call>",
    ),
    "glm45": _tags("<tool_call>", "\n", _keys(), "</tool_call>"),
    "hy_v3": _hunyuan(),
    "hy_v3_opensource": _hunyuan(":opensource"),
    "longcat_xml": _tags("<longcat_tool_call>", "\n", _keys("longcat_"), "</longcat_tool_call>"),
    "solar_open2": _tags(
        *("<|tool_call:start|>", "\n", ("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>\n")),
        "<|tool_call:end|>",
    ),
    "minimax_m2": _tags(
        *('\n<invoke name="', '">\n', ('<parameter name="', '">', "</parameter>\n"), "</invoke>"),
        ("<minimax:tool_call>", "\n</minimax:tool_call>"),
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
}
"""Formats whose parsers are made of their shapes."""

_COHERE = _list(
    "<|START_ACTION|>[", "]<|END_ACTION|>", (("tool_call_id", Slot.INDEX), ("tool_name", Slot.NAME), _PARAMETERS)
)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
SHAPES: Mapping[str, CallShape] = MARKED | {
    "hermes": _object("<tool_call>\n", "\n</tool_call>", "\n"),
    "llama3_json": _object("", "", "; ", (("name", Slot.NAME), _PARAMETERS)),
    "mistral": _list("[TOOL_CALLS][", "]"),
    "granite": _list("<|tool_call|>[", "]"),
    "phi4_mini_json": _list("functools[", "]"),
    "gigachat3": dataclasses.replace(_object("<|function_call|>", ""), is_parallel=False),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "command_r": _list("Action:\n```json\n[", "]\n```", (("tool_name", Slot.NAME), _PARAMETERS)),
    "deepseek_v3": _name(
        *("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", _DEEPSEEK, "\n")
    ),
    "deepseek_v31": _name("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", _DEEPSEEK),
    "kimi_k2": _name(
        *("<|tool_call_begin|>functions.", f":{INDEX}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "solar_open": _name(
        *(f"<|tool_call:begin|>{ID}<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
        ("<|tool_calls|>", "<|calls|>"),
    ),
    "hunyuan_a13b": _name("<tool_call>", "\n```json\n", "\n```</tool_call>", ("<tool_calls>", "</tool_calls>"), "\n"),
    "step3": _tags(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        *('">', ('<steptml:parameter name="', '">', "</steptml:parameter>")),
        "</steptml:invoke><｜tool_call_end｜>\n",
        ("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
    ),
    "minicpm5": _tags('<function name="', '">', ('<param name="', '">', "</param>"), "</function>"),
    "gemma4": _braced("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _braced("<start_function_call>", "<end_function_call>", "<escape>"),
    "pythonic": _python(("[", "]"), ", ", '"', ("True", "None")),
    HARMONY: dataclasses.replace(
        _name(" to=functions.", "<|channel|>commentary json<|message|>", ""), is_parallel=False
    ),
    JSON_LIST: _list("[", "]"),
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
            dropped = tuple(filter(None, section))
            parser = HermesParser.between(shape.call_open.strip(), shape.call_close.strip(), dropped=dropped)
        case _:
            parser = HermesParser.between(*section, separator=Pattern(Part.SPACES, before="{"))
    texts = (*dataclasses.astuple(shape), *(dataclasses.astuple(shape.tags) if shape.tags else ()))
    tokens = [token for text in texts if isinstance(text, str) for token in _TOKEN.findall(text)]
    return parser.with_marks(*parser.begins, tokens=tokens)


def _tag_parser(shape: CallShape, tags: TagShape) -> type[TagCallParser]:
    *around, begin = f"{shape.section_open}{shape.call_open}".split("\n")
    end, *after = f"{shape.call_close}{shape.section_close}".split("\n")
    # Where the tag says whether a value is a string, it has a place for that.
    says_kind = tags.key_close != tags.other_close
    key_close = tags.key_close.replace("true", "{}") if says_kind else tags.key_close
    return TagCallParser.of_tags(
        f"{begin}{{}}{shape.name_close.rstrip()}",
        f"{tags.open}{{}}{key_close.rstrip()}",
        tags.close.strip(),
        end,
        around=(around[0], after[-1]) if around else (),
        padding=("\n", "\n") if key_close.endswith("\n") else ("", ""),
    )
