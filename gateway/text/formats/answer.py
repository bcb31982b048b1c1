"""The known formats, their detection in a chat template, and the parser of one answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.text.formats.harmony import ANALYSIS, END, HarmonyParser
from gateway.text.formats.parser import (
    CallIds,
    CallParser,
    OfferedTool,
    OutputParser,
    PlainText,
    Thinking,
    ThinkingMarks,
    ThinkingParser,
    joined,
)
from gateway.text.formats.rendered import PROBE_TEXTS, RenderedCalls
from gateway.text.formats.shapes import CALL_PARSERS, HARMONY, JSON_LIST

HARMONY_REASONING = "openai_gptoss"
TOOL_FORMATS = frozenset(CALL_PARSERS.keys() - {JSON_LIST} | {HARMONY})
"""Formats of tool calls, by vLLM's names."""

_THINK = ThinkingMarks("<think>", "</think>")
_COHERE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
THINKING_MARKS: Mapping[str, ThinkingMarks] = {
    "mistral": ThinkingMarks("[THINK]", "[/THINK]"),
    "gemma4": ThinkingMarks("<|channel>", "<channel|>", "thought"),
    "seed_oss": ThinkingMarks("<seed:think>", "</seed:think>"),
    "cohere_command3": ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>", dropped=_COHERE),
    "minimax_m3": ThinkingMarks("<mm:think>", "</mm:think>"),
    "longcat": ThinkingMarks("<longcat_think>", "</longcat_think>"),
    "hy_v3_opensource": ThinkingMarks("<think:opensource>", "</think:opensource>"),
    "apertus": ThinkingMarks("<|inner_prefix|>", "<|inner_suffix|>"),
    "solar_open": ThinkingMarks("<|think|>", "<|end|>", answer="<|begin|>assistant", dropped=("<|content|>",)),
    "solar_open2": ThinkingMarks("<|think:start|>", "<|think:end|>"),
    "hyperclovax": ThinkingMarks("/think", "<|im_end|>", answer="<|im_start|>assistant"),
    "exaone_deep": ThinkingMarks("<thought>", "</thought>"),
    "reka": ThinkingMarks("<reasoning>", "</reasoning>"),
    "granite": ThinkingMarks("Here is my thought process:", "Here is my response:"),
    "apriel": ThinkingMarks(
        "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", dropped=("[END FINAL RESPONSE]", "<|end|>")
    ),
    "qwen3": _THINK,
    "deepseek_r1": _THINK,
    "glm45": _THINK,
}
REASONING_FORMATS = frozenset({*THINKING_MARKS, HARMONY_REASONING})
"""Formats of reasoning, by vLLM's names."""

# Texts by which a template describes a format to the model, for templates that render no calls.
_DESCRIPTIONS = (
    ("granite", "<|tool_call|>"),
    ("phi4_mini_json", "functools["),
    ("hermes", "<tool_call>\n{"),
    ("minimax", "<tool_calls>\n{"),
    # This text only introduces the tools; the models' documents say how they write calls.
    ("lfm2", "List of tools: "),
    ("kimi_k2", "<|im_system|>tool_declare<|im_middle|>"),
    ("llama3_json", '"parameters": dictionary of argument'),
    ("pythonic", "```tool_code"),
    ("pythonic", "[func_name1("),
)
# Texts by which a template is recognised if several formats have the same opening mark.
_REASONING_SIGNS = {
    "solar_open": "assistant<|think|>",
    "hyperclovax": "assistant/think",
    "hy_v3_opensource": "':opensource'",
    "reka": "'</reasoning>'",
    "apriel": "[BEGIN FINAL RESPONSE]",
}


def thinking_marks_of(reasoning_format: str | None) -> ThinkingMarks | None:
    """The marks around the reasoning of an answer; None if it has none."""
    if reasoning_format == HARMONY_REASONING:
        return ThinkingMarks(ANALYSIS, END)
    return THINKING_MARKS.get(reasoning_format or "")


def tool_format_of(calls: RenderedCalls | None, told: str = "") -> str | None:
    """The format in which a model writes calls; None if it is unknown.

    It is the first format of the table whose parser reads all calls that the model's template renders. If the template
    renders none, it is the format that `told` describes: the text that the template writes only for tools.
    """
    if calls is not None:
        return next((name for name in (*CALL_PARSERS, HARMONY) if name != JSON_LIST and _reads(name, calls)), None)
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
    if "<|channel|>" in template and "<|start|>" in template:
        return HARMONY_REASONING
    for name, marks in THINKING_MARKS.items():
        if _REASONING_SIGNS.get(name, marks.begin) in template or (name == "qwen3" and marks.end in template):
            return name
    return None


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
        """A new parser for one sequence; None if all text is content."""
        tools = {tool.name: tool for tool in self.tools}
        if self.reasoning_format == HARMONY_REASONING or self.tool_format == HARMONY:
            in_analysis = self.thinking is Thinking.BEGUN
            return HarmonyParser(tools, call_ids, in_analysis=in_analysis)
        marks = THINKING_MARKS.get(self.reasoning_format or "")
        dropped = () if marks is None else marks.dropped
        parser = CallParser if self.tool_format is None else CALL_PARSERS[self.tool_format]
        if dropped:
            parser = parser.variant(dropped=(*parser.dropped, *dropped))
        content = PlainText() if parser is CallParser else parser(tools, call_ids)
        if marks is not None and self.thinking is not Thinking.NONE:
            return ThinkingParser(marks, self.thinking, content)
        return None if isinstance(content, PlainText) else content

    @property
    def tokens(self) -> frozenset[str]:
        """The special tokens that the parser must see."""
        tokens: set[str] = set()
        if self.reasoning_format == HARMONY_REASONING or self.tool_format == HARMONY:
            tokens.update(HarmonyParser.tokens)
        elif self.tool_format is not None:
            parser = CALL_PARSERS[self.tool_format]
            tokens.update(parser.begins, parser.dropped, parser.tokens)
        if (marks := THINKING_MARKS.get(self.reasoning_format or "")) is not None:
            tokens.update(marks.dropped if self.thinking is Thinking.NONE else marks.tokens)
        return frozenset(tokens)


PLAIN = AnswerFormat()
"""All text is content."""
