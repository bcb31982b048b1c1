"""The usual shape of calls in each format, and the parser of each."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from gateway.text.formats.calls import (
    ENVELOPE_WITH_ID,
    LIST_BEGIN,
    BracedParser,
    JsonCallParser,
    MiniMaxM3Parser,
    PythonicParser,
    TagCallParser,
)
from gateway.text.formats.parser import CallParser
from gateway.text.formats.rendered import ID, INDEX, CallShape, Layout, Slot, TagShape
from gateway.text.formats.scanning import MARK, Part, Pattern

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
    """The name, then the arguments as JSON."""
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


_COHERE = _list(
    "<|START_ACTION|>[", "]<|END_ACTION|>", (("tool_call_id", Slot.INDEX), ("tool_name", Slot.NAME), _PARAMETERS)
)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
SHAPES: Mapping[str, CallShape] = {
    "hermes": _object("<tool_call>\n", "\n</tool_call>", "\n"),
    "llama3_json": _object("", "", "; ", (("name", Slot.NAME), _PARAMETERS)),
    "mistral": _list("[TOOL_CALLS][", "]"),
    "deepseek_v3": _name(
        *("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", _DEEPSEEK, "\n")
    ),
    "deepseek_v31": _name("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", _DEEPSEEK),
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
    "gigachat3": dataclasses.replace(_object("<|function_call|>", ""), is_parallel=False),
    "solar_open": _name(
        *(f"<|tool_call:begin|>{ID}<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
        ("<|tool_calls|>", "<|calls|>"),
    ),
    "hunyuan_a13b": _name("<tool_call>", "\n```json\n", "\n```</tool_call>", ("<tool_calls>", "</tool_calls>"), "\n"),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "command_r": _list("Action:\n```json\n[", "]\n```", (("tool_name", Slot.NAME), _PARAMETERS)),
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
    "kimi_k2": _name(
        *("<|tool_call_begin|>functions.", f":{INDEX}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "granite": _list("<|tool_call|>[", "]"),
    "phi4_mini_json": _list("functools[", "]"),
    HARMONY: dataclasses.replace(
        _name(" to=functions.", "<|channel|>commentary json<|message|>", ""), is_parallel=False
    ),
    JSON_LIST: _list("[", "]"),
}
"""The usual shape of calls in each format, for templates that render no calls or calls of another format."""

_COHERE_MARKS = tuple(f"<|{edge}_{part}|>" for part in ("RESPONSE", "TEXT") for edge in ("START", "END"))
_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    # Llama 4 writes <|python_start|><|python_end|> before calls.
    "llama3_json": {"begins": ("<|python_tag|>", "<|python_end|>"), "dropped": ("<|python_start|>",)},
    "mistral": {
        "headers": (
            LIST_BEGIN,
            Pattern("\n{}([ARGS] or )\n", Part.NAME, before="{"),
            Pattern("\n{}[CALL_ID]{}[ARGS]\n", Part.NAME, Part.NAME, before="{"),
        ),
        "tokens": ("[ARGS]", "[CALL_ID]"),
    },
    "gigachat3": {
        "begins": ("<|function_call|>", "function call<|role_sep|>"),
        "dropped": ("<|message_sep|>",),
        "tokens": ("<|role_sep|>",),
    },
    "hunyuan_a13b": {
        "begins": ("<tool_calls>", "<tool_call>"),
        "headers": (LIST_BEGIN, Pattern("\n(<tool_call> or ){}\n```json\n", Part.NAME, before="{")),
        "dropped": (),
        "trailer": Pattern("\n(``` or )\n(</tool_call> or )\n(</tool_calls> or )"),
        "list_end": Pattern("\n]\n(</tool_calls> or )"),
    },
    "cohere_command3": {"item": ENVELOPE_WITH_ID, "dropped": _COHERE_MARKS},
    "cohere_command4": {"item": ENVELOPE_WITH_ID, "dropped": _COHERE_MARKS},
    "apertus": {"item": Pattern('\n{\n"{}"\n:\n', Part.NAME, before="{")},
    "step3": {
        "begins": ('function<｜tool_sep｜><steptml:invoke name="',),
        "headers": (Pattern('\n{}">\n', Part.NAME, before=('<steptml:parameter name="', "</steptml:invoke>")),),
        "end": Pattern("\n</steptml:invoke>"),
        "trailer": Pattern(""),
        "dropped": tuple(f"<｜tool_{part}｜>" for part in ("calls_begin", "call_begin", "call_end", "calls_end")),
    },
    "minicpm5": {
        "argument": Pattern('\n<param name="{}">(<![CDATA[ or )', Part.QUOTED),
        "padding": "]]>",
    },
    "kimi_k2": {
        "headers": (
            Pattern("\n(functions. or ){}:{}\n<|tool_call_argument_begin|>\n", Part.NAME, Part.NAME, before="{"),
        ),
    },
    "granite": {"begins": ("<|tool_call|>", "<tool_call>")},
    "phi4_mini_json": {
        "begins": ("functools", "<|tool_call|>"),
        "list_end": Pattern("\n]\n(<|/tool_call|> or )"),
        "tokens": ("<|/tool_call|>",),
    },
}
"""Attributes of parsers of calls that models also write in other ways than in the shape of their format."""


def _parser_of(name: str, shape: CallShape) -> type[CallParser]:
    """The parser of a format. There may be any spaces between the marks of its shape."""
    tags = shape.tags or TagShape("", "", "", "")
    parser: type[CallParser] = JsonCallParser
    attributes: dict[str, Any]
    match shape.layout:
        case Layout.TAGS:
            parser, attributes = TagCallParser, _between_tags(shape, tags)
        case Layout.PYTHON:
            parser, attributes = PythonicParser, {}
            if begin := shape.section_open.removesuffix("["):
                header = Pattern("\n([ or )\n{}", Part.NAME, before="(")
                end = shape.section_close.removeprefix("]")
                attributes = {"begins": (begin,), "call_end": end, "header": header, "is_bare": False}
        case Layout.BRACED:
            begin, end = shape.call_open.removesuffix("call:"), shape.call_close.removeprefix("}")
            parser, attributes = BracedParser, {"begins": (begin,), "call_end": end, "quote": tags.quote}
        case _:
            attributes = _around_json(shape)
    variant = _VARIANTS.get(name, {})
    texts = (*dataclasses.astuple(shape), *dataclasses.astuple(tags))
    tokens = [token for text in texts if isinstance(text, str) for token in _TOKEN.findall(text)]
    return parser.variant(**{**attributes, **variant, "tokens": (*tokens, *variant.get("tokens", ()))})


def _around_json(shape: CallShape) -> dict[str, Any]:
    """The attributes of a `JsonCallParser`."""
    section = shape.section_open.strip(), shape.section_close.strip()
    attributes: dict[str, Any] = {"dropped": tuple(filter(None, section))}
    begin, close = shape.call_open.strip(), shape.call_close
    if shape.layout is Layout.NAMED:
        mark = MARK.match(shape.call_open)
        begin = mark[0] if mark else shape.call_open
        texts = shape.call_open.removeprefix(begin), shape.name_close
        before, after = (re.sub(f"[{ID}{INDEX}]", "{}", text) for text in texts)
        words = [Part.DETAIL] * before.count("{}") + [Part.NAME] + [Part.DETAIL] * after.count("{}")
        attributes["headers"] = (Pattern(f"{before}{{}}{after}\n", *words, before="{"),)
        attributes["has_ids"] = len(words) > 1
    elif section[0].endswith("["):
        begin, *fence = section[0].removesuffix("[").strip().split("\n")
        opening = "".join(f"\n({text} or )" for text in fence)
        closing = "".join(f"\n({text} or )" for text in section[1].removeprefix("]").split())
        attributes = {"headers": (Pattern(f"{opening}\n[\n"),), "list_end": Pattern(f"\n]{closing}")}
    elif not begin:
        begin, close = section
        attributes = {"separator": Pattern(f"\n({shape.separator.strip()} or )\n", before="{")}
    *further, last = re.findall(r"```|[^\s`]+", close) or [""]
    trailer = "".join(f"\n({text} or )" for text in further) + (f"\n{last}" if last else "")
    return {"begins": (begin,) if begin else (), "is_bare": not begin, "trailer": Pattern(trailer)} | attributes


def _between_tags(shape: CallShape, tags: TagShape) -> dict[str, Any]:
    """The attributes of a `TagCallParser`."""
    *around, begin = f"{shape.section_open}{shape.call_open}".split("\n")
    end, *after = f"{shape.call_close}{shape.section_close}".split("\n")
    # Other formats begin in the same way, so that only an argument or the end may follow a name.
    named, follows = f"\n{{}}{shape.name_close.rstrip()}\n", (tags.open, end, *(after[-1:] if around else ()))
    begins = {around[0]: f"\n{begin}{named}", begin: named} if around else {begin: named}
    key_close, breaks = tags.key_close.rstrip(), tags.key_close.endswith("\n")
    if tags.key_close != tags.other_close:
        # The tag says whether a value is a string.
        key_close = key_close.replace("true", "{}")
    key = Part.QUOTED if key_close.startswith('"') else Part.KEY
    padding = "(\n or )" if breaks else ""
    return {
        "begins": tuple(begins),
        "headers": [Pattern(header, Part.NAME, before=follows) for header in begins.values()],
        "argument": Pattern(f"\n{tags.open}{{}}{key_close}{padding}", key, Part.DETAIL),
        "value_end": tags.close.strip(),
        "padding": "\n" if breaks else "",
        "end": Pattern(f"\n{end}"),
        "trailer": Pattern(f"\n{after[-1]}" if around else ""),
    }


CALL_PARSERS: Mapping[str, type[CallParser]] = {
    **{name: _parser_of(name, shape) for name, shape in SHAPES.items() if name != HARMONY},
    "minimax_m3": MiniMaxM3Parser,
}
