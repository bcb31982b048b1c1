"""The known formats, their detection in a chat template, and the parser of one answer."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.text.formats.harmony import ANALYSIS, END, HarmonyParser
from gateway.text.formats.json_calls import (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    GraniteParser,
    HermesParser,
    JsonListParser,
    KimiK2Parser,
    Llama3Parser,
    MistralParser,
    Phi4MiniParser,
)
from gateway.text.formats.other_calls import (
    FunctionGemmaParser,
    GemmaParser,
    GlmParser,
    PythonicParser,
    Qwen3CoderParser,
)
from gateway.text.formats.output import joined
from gateway.text.formats.parser import CallIds, CallParser, OfferedTool, OutputParser, PlainText
from gateway.text.formats.rendered import INDEX, PROBE_TEXTS, CallShape, Layout, RenderedCalls, Slot, TagShape
from gateway.text.formats.thinking import Thinking, ThinkingMarks, ThinkingParser

HARMONY = "openai"
HARMONY_REASONING = "openai_gptoss"
JSON_LIST = "json_list"
"""The format of forced calls if the model's own format has no grammar."""

CALL_PARSERS: Mapping[str, type[CallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "qwen3_coder": Qwen3CoderParser,
    "glm45": GlmParser,
    "gemma4": GemmaParser,
    "functiongemma": FunctionGemmaParser,
    "pythonic": PythonicParser,
    "kimi_k2": KimiK2Parser,
    "granite": GraniteParser,
    "phi4_mini_json": Phi4MiniParser,
    JSON_LIST: JsonListParser,
}
TOOL_FORMATS = frozenset(CALL_PARSERS.keys() - {JSON_LIST} | {HARMONY})
"""Formats of tool calls, by vLLM's names."""

_NAMED = (("name", Slot.NAME), ("arguments", Slot.ARGUMENTS))
_BRACED = TagShape("", ":", ":", "", ",", '<|"|>')
SHAPES: Mapping[str, CallShape] = {
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
    "qwen3_coder": CallShape(
        Layout.TAGS,
        call_open="<tool_call>\n<function=",
        call_close="</function>\n</tool_call>",
        separator="\n",
        name_close=">\n",
        tags=TagShape("<parameter=", ">\n", ">\n", "\n</parameter>\n"),
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
    "glm45": CallShape(
        Layout.TAGS,
        call_open="<tool_call>",
        call_close="</tool_call>",
        separator="\n",
        name_close="\n",
        tags=TagShape("<arg_key>", "</arg_key>\n<arg_value>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "gemma4": CallShape(
        Layout.BRACED, call_open="<|tool_call>call:", call_close="}<tool_call|>", name_close="{", tags=_BRACED
    ),
    "functiongemma": CallShape(
        Layout.BRACED,
        call_open="<start_function_call>call:",
        call_close="}<end_function_call>",
        name_close="{",
        tags=replace(_BRACED, quote="<escape>"),
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
}
"""How calls of each format are usually written: where a template renders none, or writes another format."""

_THINK = ThinkingMarks("<think>", "</think>")
THINKING_MARKS: Mapping[str, ThinkingMarks] = {
    "qwen3": _THINK,
    "deepseek_r1": _THINK,
    "glm45": _THINK,
    "mistral": ThinkingMarks("[THINK]", "[/THINK]"),
    "gemma4": ThinkingMarks("<|channel>", "<channel|>", "thought"),
    "seed_oss": ThinkingMarks("<seed:think>", "</seed:think>"),
}
REASONING_FORMATS = frozenset({*THINKING_MARKS, HARMONY_REASONING})
"""Formats of reasoning, by vLLM's names."""

# Texts by which a template tells the model a format, where it renders no calls.
_DESCRIPTIONS = (
    ("granite", "<|tool_call|>"),
    ("phi4_mini_json", "functools["),
    ("hermes", "<tool_call>\n{"),
    ("llama3_json", '"parameters": dictionary of argument'),
    ("pythonic", "```tool_code"),
    ("pythonic", "[func_name1("),
)
_REASONING_SIGNS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    (HARMONY_REASONING, lambda source: "<|channel|>" in source and "<|start|>" in source),
    ("mistral", lambda source: "[THINK]" in source),
    ("gemma4", lambda source: "<|channel>" in source),
    ("seed_oss", lambda source: "<seed:think>" in source),
    ("qwen3", lambda source: "<think>" in source or "</think>" in source),
)


def thinking_marks_of(reasoning_format: str | None) -> ThinkingMarks | None:
    """The marks around the reasoning of an answer; None if it has none."""
    if reasoning_format == HARMONY_REASONING:
        return ThinkingMarks(ANALYSIS, END)
    return THINKING_MARKS.get(reasoning_format or "")


def tool_format_of(calls: RenderedCalls | None, told: str = "") -> str | None:
    """The format in which a model writes calls; None if it is unknown.

    It is the first format whose parser reads all that the model's template renders for calls. Where the template
    renders none, it is the one that the template describes in `told`, the text that it writes only for tools.
    """
    if calls is not None:
        return next((name for name in sorted(TOOL_FORMATS) if _reads(name, calls)), None)
    return next((name for name, sign in _DESCRIPTIONS if sign in told), None)


def _reads(tool_format: str, calls: RenderedCalls) -> bool:
    tools = tuple(OfferedTool(call.name, PROBE_TEXTS) for call in calls.calls)
    parser = AnswerFormat(tool_format, tools=tools).parser(str)
    assert parser is not None
    output = joined([parser.push(calls.text), parser.finish()])
    if output.text.strip() or output.reasoning or len(output.tool_calls) != len(calls.calls):
        return False
    for read, call in zip(output.tool_calls, calls.calls, strict=True):
        try:
            arguments: Any = json.loads(read.arguments)
        except ValueError:
            return False
        # Some templates leave out nulls.
        without_null = {name: value for name, value in call.arguments.items() if value is not None}
        if read.name != call.name or arguments not in (call.arguments, without_null):
            return False
    return True


def reasoning_format_of(template: str) -> str | None:
    """The format of reasoning that a chat template supports; None if it supports none."""
    return next((name for name, has in _REASONING_SIGNS if has(template)), None)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the text of an answer is parsed. It is stored with durable requests, so it consists of plain values.

    Attributes:
        tool_format: None if no tools are offered, so that all text is content.
        reasoning_format: None if the answer has no separate reasoning.
        thinking: Whether the answer begins before, in or after the reasoning.
    """

    tool_format: str | None = None
    reasoning_format: str | None = None
    thinking: Thinking = Thinking.MAY_BEGIN
    tools: tuple[OfferedTool, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown format."""
        if self.tool_format is not None and self.tool_format not in TOOL_FORMATS | {JSON_LIST}:
            raise ValueError(f'"{self.tool_format:.64}" is no format of tool calls')
        if self.reasoning_format is not None and self.reasoning_format not in REASONING_FORMATS:
            raise ValueError(f'"{self.reasoning_format:.64}" is no format of reasoning')

    def call_id(self, unique: str) -> str:
        """A unique id of a call, of 24 hexadecimal digits."""
        # Mistral's chat templates accept only ids of nine letters and digits.
        return unique[:9] if self.tool_format == "mistral" else f"call_{unique}"

    def parser(self, call_ids: CallIds) -> OutputParser | None:
        """A new parser for one sequence; None where all text is content."""
        tools = {tool.name: tool for tool in self.tools}
        if self.reasoning_format == HARMONY_REASONING or self.tool_format == HARMONY:
            in_analysis = self.thinking is Thinking.BEGUN
            return HarmonyParser(tools, call_ids, in_analysis=in_analysis)
        marks = self._marks
        if self.tool_format is None and marks is None:
            return None
        content = PlainText() if self.tool_format is None else CALL_PARSERS[self.tool_format](tools, call_ids)
        return content if marks is None else ThinkingParser(marks, self.thinking, content)

    @property
    def tokens(self) -> frozenset[str]:
        """The special tokens that the parser must see."""
        tokens: set[str] = set()
        if self.reasoning_format == HARMONY_REASONING or self.tool_format == HARMONY:
            tokens.update(HarmonyParser.tokens)
        elif self.tool_format is not None:
            parser = CALL_PARSERS[self.tool_format]
            tokens.update(parser.begins, parser.dropped, parser.tokens)
        if (marks := self._marks) is not None:
            tokens.update((marks.begin, marks.end))
        return frozenset(tokens)

    @property
    def _marks(self) -> ThinkingMarks | None:
        if self.reasoning_format is None or self.thinking is Thinking.NONE:
            return None
        return THINKING_MARKS.get(self.reasoning_format)


PLAIN = AnswerFormat()
"""All text is content."""
