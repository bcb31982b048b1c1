"""Chat templates render as transformers renders them, in a sandbox; prefixes are shared by all later turns."""

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.offload import FairExecutor
from gateway.request.served_model import ServedModel
from gateway.text.chat import Chat, ChatTemplate, common_prefix
from gateway.turns import LONG_BYTES
from gateway.types import ChatMessage, ChatPrompt
from quire.gateway.v1.generation_pb2 import TemplateOptions, Tool, ToolCall
from quire.rpc.errors import InvalidArgument
from quire.runtime.settings import ConfigurationError
from tests.support.chat_models import HERMES_TEMPLATE
from tests.support.tokenizers import byte_level, write_model_directory

MESSAGES = [ChatMessage("system", "Be brief."), ChatMessage("user", 'Say "é" <b>', name="Ann")]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source, messages=MESSAGES):
    return ChatTemplate(source, SPECIAL_TOKENS).render(ChatPrompt(messages))


def render_by_transformers(source, conversation, **options):
    from transformers.utils.chat_template_utils import render_jinja_template

    special_tokens = cast(Any, SPECIAL_TOKENS)
    (text,), _ = render_jinja_template([conversation], chat_template=source, **options, **special_tokens)
    return text


@pytest.mark.parametrize(
    "source",
    [
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
        "{% for m in messages %}\n  {% if loop.first %}\n    {{ m.role }}\n  {% endif %}\n{% endfor %}\nend",
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% generation %}\n{{ messages[1].content }}\n{% endgeneration %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% if tools is none %}no tools{% endif %}{{ strftime_now('%Y') | length }}",
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        "{% for m in messages %}{{ m.name | default('nobody') }}{% if 'name' in m %}!{% endif %}{% endfor %}",
    ],
)
def test_renders_as_transformers_does(source):
    conversation = [{"role": message.role, "content": message.content} for message in MESSAGES]
    conversation[1]["name"] = "Ann"
    assert render(source) == render_by_transformers(source, conversation, add_generation_prompt=True)


# Templates like LLaVA's, and like Gemma 3's.
PARTS = (
    "{% for m in messages %}{{ m['role'] | upper }}: "
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }} {% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m['content'] is string %}<{{ m['content'] }}>{% else %}{% for part in m['content'] %}"
    "{{ part['type'] }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [PARTS, EITHER])
def test_templates_that_take_parts_alone_get_the_text_as_one(source):
    texts = [each.content if source is EITHER else [{"type": "text", "text": each.content}] for each in MESSAGES]
    conversation = [{"role": each.role, "content": text} for each, text in zip(MESSAGES, texts, strict=True)]
    assert render(source) == render_by_transformers(source, conversation)
    assert "Be brief." in render(source)


def test_a_template_can_refuse_the_conversation():
    source = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('the first message must be from the user') }}{% endif %}"
    )
    with pytest.raises(InvalidArgument, match="the first message must be from the user") as caught:
        render(source)
    assert caught.value.violations[0].field == "messages"


@pytest.mark.parametrize("source", ["{{ messages[7].content.x }}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}"])
def test_a_template_that_fails_is_an_invalid_request(source):
    with pytest.raises(InvalidArgument, match="refuses the conversation"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source):
    with pytest.raises(InvalidArgument):
        render(source)


@pytest.mark.parametrize("source", ["{% for %}", "{{ a }}\n{% if", "{{ " + "(" * 5000, "{% if a %}" * 3000])
def test_a_broken_template_is_a_configuration_error_of_one_line(source: str):
    with pytest.raises(ConfigurationError, match=r"^the model's chat template is invalid: ") as caught:
        ChatTemplate(source, {})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


SYSTEM_IN_FIRST_TURN = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0].content + '. ' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for m in rest %}[{{ system if loop.first }}{{ m.content }}]{% endfor %}"
)


KNOWS_BOTS_ALONE = (
    "{% for m in messages %}{% if m.role != 'bot' %}{{ raise_exception('only bots') }}{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "message", "expected"),
    [
        # Not the space at its end, which is one token with a word that follows.
        (SYSTEM_IN_FIRST_TURN, ChatMessage("system", "Be kind to all foxes."), "[Be kind to all foxes.."),
        # Compared in a thread.
        (SYSTEM_IN_FIRST_TURN, ChatMessage("system", "fox " * 5000 + "."), "[" + "fox " * 5000 + ".."),
        # No role is known that could follow.
        (KNOWS_BOTS_ALONE, ChatMessage("bot", "Beep."), "Beep."),
    ],
)
def test_what_later_turns_begin_with_is_shared(tmp_path, template, message, expected):
    executor = FairExecutor(1)
    directory = write_model_directory(tmp_path / "model", byte_level(), chat_template__jinja=template)
    model = ServedModel.open(directory, None, executor)
    prefix = asyncio.run(model.chat.encode_prefix(ChatPrompt([message])))
    assert model.tokenizer.decode(prefix, include_special_tokens=True) == expected
    executor.shutdown()


class SlowTemplates:
    """Renders when it is closed."""

    def __init__(self) -> None:
        self.began, self.ends = threading.Event(), threading.Event()

    def render(self, source: str, prompt: ChatPrompt) -> str:
        self.began.set()
        assert self.ends.wait(60)
        return source

    def close(self) -> None:
        self.ends.set()


async def test_a_prompt_that_is_much_longer_than_its_conversation_is_refused() -> None:
    """Deep JSON with indentation, as Llama 3 has the tools."""
    template = ChatTemplate("{{ tools | tojson(indent=4) }}{{ messages[0].content }}", SPECIAL_TOKENS)
    chat = Chat("model", template, cast(Any, None), FairExecutor(1), tool_format="hermes")

    def asked(depth: int, length: int) -> ChatPrompt:
        value: Any = [0] * length
        for _ in range(depth):
            value = {"a": value}
        tool = Tool(name="f", parameters=json.dumps({"type": "object", "default": value}))
        return ChatPrompt([ChatMessage("user", "x")], tools=[tool])

    assert len(await chat.render(asked(5, 5000))) > 100_000
    for depth, length in ((180, 500), (180, 5000)):
        with pytest.raises(InvalidArgument, match=r"becomes [\d,]+ characters by the model's chat template") as refused:
            await chat.render(asked(depth, length))
        assert (refused.value.reason, refused.value.violations[0].field) == ("CHAT_TEMPLATE", "tools")


async def test_no_long_work_waits_for_templates_of_requests() -> None:
    executor, templates = FairExecutor(1), SlowTemplates()
    chat = Chat("model", None, cast(Any, None), executor, own_templates=templates)
    rendering = asyncio.create_task(chat.render(ChatPrompt(MESSAGES, template="slow")))
    assert await asyncio.to_thread(templates.began.wait, 60)
    async with asyncio.timeout(60):
        assert await executor.run("other", LONG_BYTES + 1, int, "5") == 5
    assert not rendering.done()
    chat.close()
    assert await rendering == "slow"
    executor.shutdown()


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_prefix_is_the_longest(first, second):
    prefix = common_prefix(first, second)
    length = len(prefix)
    assert first[:length] == second[:length] == prefix
    assert first[length : length + 1] != second[length : length + 1] or not (first[length:] or second[length:])


TOOL = Tool(name="f", description="d", parameters='{"type": "object", "properties": {"a": {"type": "integer"}}}')
CALLED = [
    ChatMessage("user", "Say a"),
    ChatMessage("assistant", "Hm", tool_calls=[ToolCall(id="1", name="f", arguments='{"a": 2}')], reasoning="why"),
    ChatMessage("tool", "3", tool_call_id="1"),
]
AS_MESSAGES = [
    {"role": "user", "content": "Say a"},
    {
        "role": "assistant",
        "content": "Hm",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 2}}}],
        "reasoning_content": "why",
    },
    {"role": "tool", "content": "3", "tool_call_id": "1"},
]
AS_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": json.loads(TOOL.parameters)}}


def test_tools_and_calls_render_as_in_transformers():
    expected = render_by_transformers(HERMES_TEMPLATE, AS_MESSAGES, tools=[AS_TOOL], add_generation_prompt=True)
    assert ChatTemplate(HERMES_TEMPLATE, SPECIAL_TOKENS).render(ChatPrompt(CALLED, tools=[TOOL])) == expected


_WITH_THINKING = """{% for m in messages %}<{{ m.role }}>{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}{% endfor %}"""


def test_reasoning_before_a_call_with_a_text_is_shown_unless_the_template_refuses_it():
    expected = render_by_transformers(_WITH_THINKING, AS_MESSAGES, add_generation_prompt=True)
    assert "(why)Hm<tool_call>" in expected
    assert render(_WITH_THINKING, CALLED) == expected
    # As gpt-oss's.
    check = "{% if m.thinking and m.content and m.tool_calls %}{{ raise_exception('both') }}{% endif %}<{{ m.role }}>"
    assert render(_WITH_THINKING.replace("<{{ m.role }}>", check), CALLED) == expected.replace("(why)", "")


@pytest.mark.parametrize("content", ["It is", "It is ", " {}"])
@pytest.mark.parametrize("source", [HERMES_TEMPLATE, "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"])
def test_a_message_is_continued_as_in_transformers(source, content):
    messages = [ChatMessage("user", "Say a"), ChatMessage("assistant", content)]
    conversation = [{"role": each.role, "content": each.content} for each in messages]
    prompt = ChatPrompt(messages, template_options=TemplateOptions(continue_final_message=True))
    expected = render_by_transformers(source, conversation, continue_final_message=True)
    assert ChatTemplate(source, SPECIAL_TOKENS).render(prompt) == expected


def test_a_developer_is_the_system_for_templates_without_developers():
    known = "{% for m in messages if m.role in ('system', 'user') %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    prompt = ChatPrompt([ChatMessage("developer", "Be kind."), ChatMessage("user", "a")])
    assert ChatTemplate(known, {}).render(prompt) == "<system>Be kind.<user>a"
    source = known.replace("'system'", "'system', 'developer'")
    assert ChatTemplate(source, {}).render(prompt) == "<developer>Be kind.<user>a"


def test_a_schema_nested_too_deeply_for_a_template_is_refused():
    schema = '{"items": ' * 500 + "{}" + "}" * 500
    source = "{% macro kind(s) %}{% if s.items %}{{ kind(s['items']) }}{% endif %}{% endmacro %}"
    template = ChatTemplate(source + "{{ kind(tools[0].function.parameters) }}", {})
    with pytest.raises(InvalidArgument, match="recursion"):
        template.render(ChatPrompt(MESSAGES, tools=[Tool(name="f", parameters=schema)]))


def test_a_template_that_takes_arguments_as_text_gets_text():
    calls = "{% for call in m.tool_calls or [] %}{{ call.function.arguments + '!' }}{% endfor %}"
    source = f"{{% for m in messages %}}{calls}{{% endfor %}}"
    assert ChatTemplate(source, {}).render(ChatPrompt(CALLED)) == '{"a": 2}!'


# One message for each line; calls as `name(arguments)`.
_CALLS = "{% for c in m.tool_calls %}|{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
_LINES = "{{ tools }}{% for m in messages %}{{ m.role }}:{{ m.content or '' }}CALLS{{ '\\n' }}{% endfor %}"
TWO_CALLED = [
    ChatMessage("user", "Say a"),
    ChatMessage("assistant", "Hm", tool_calls=[ToolCall(id=i, name=i, arguments='{"b": 1}') for i in ("f", "g")]),
    ChatMessage("tool", "3", tool_call_id="f"),
    ChatMessage("tool", "4", tool_call_id="g"),
]


def lines_of(source: str, messages) -> list[str]:
    return ChatTemplate(source, {}).render(ChatPrompt(messages)).splitlines()[1 - len(messages) :]


def test_calls_that_a_template_shows_only_without_content_are_shown():
    source = _LINES.replace("CALLS", f"{{% if m.tool_calls and m.content is none %}}{_CALLS}{{% endif %}}")
    without_text = replace(TWO_CALLED[1], content="")
    assert lines_of(source, [TWO_CALLED[0], without_text])[-1] == 'assistant:|f({"b": 1})|g({"b": 1})'
    # The text of the message has them if there is a text.
    rendered = ChatTemplate(source, {}).render(ChatPrompt(TWO_CALLED))
    assert 'assistant:Hm\n|f({"b": 1})|g({"b": 1})\n' in rendered


def test_calls_that_a_template_leaves_out_are_written_as_the_model_writes_them():
    told = "{{ '<tool_call>\\n{' if tools }}"
    messages = [TWO_CALLED[0], replace(TWO_CALLED[1], content=""), *TWO_CALLED[2:]]
    expected = '<tool_call>\n{"name": "f", "arguments": {"b": 1}}\n</tool_call>\n<tool_call>\n{"name": "g"'
    assert expected in ChatTemplate(told + _LINES.replace("CALLS", ""), {}).render(ChatPrompt(messages))
    # A template without tools takes no calls.
    with pytest.raises(InvalidArgument, match="has no tool calls"):
        ChatTemplate("{{ messages[0].content }}", {}).render(ChatPrompt(messages))


@pytest.mark.parametrize(
    "call",
    [
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}" + _CALLS,
        _CALLS.replace("m.tool_calls", "m.tool_calls[:1]"),
    ],
    ids=["refused", "left out"],
)
def test_calls_are_apart_for_a_template_that_writes_one_for_a_message(call):
    source = _LINES.replace("CALLS", f"{{% if m.tool_calls %}}{call}{{% endif %}}")
    assert ChatTemplate(source, {}).render(ChatPrompt(TWO_CALLED)).splitlines()[-4:] == [
        'assistant:Hm|f({"b": 1})',
        "tool:3",
        'assistant:|g({"b": 1})',
        "tool:4",
    ]


def test_arguments_that_were_cut_go_to_the_template_as_text():
    cut = replace(TWO_CALLED[1], tool_calls=[ToolCall(id="f", name="f", arguments='{"b": "P')])
    source = _LINES.replace("CALLS", f"{{% if m.tool_calls %}}{_CALLS}{{% endif %}}")
    messages = [TWO_CALLED[0], cut, TWO_CALLED[2]]
    assert r'assistant:Hm|f("{\"b\": \"P")' in ChatTemplate(source, {}).render(ChatPrompt(messages))
    # One that takes only objects gets them in the text of the message.
    only_objects = source.replace("c.function.arguments | tojson", "c.function.arguments | items | list | tojson")
    assert '{"b": "P' in ChatTemplate(only_objects, {}).render(ChatPrompt(messages))


def test_a_template_that_takes_no_result_without_the_name_of_its_tool_gets_it():
    source = _LINES.replace(
        "CALLS",
        f"{{% if m.tool_calls %}}{_CALLS}{{% endif %}}{{% if m.role == 'tool' %}}"
        "{{ m.name or raise_exception('no name') }}{% endif %}",
    )
    assert ChatTemplate(source, {}).render(ChatPrompt(TWO_CALLED)).splitlines()[-2:] == ["tool:3f", "tool:4g"]


def test_whole_numbers_among_the_arguments_of_a_template_are_integers():
    options = TemplateOptions()
    options.arguments.update({"budget": 5, "share": 0.5, "list": [1]})
    template = ChatTemplate("{{ budget }} {{ share }} {{ list }}", {})
    assert template.render(ChatPrompt(MESSAGES, template_options=options)) == "5 0.5 [1]"
    assert template.arguments == {"budget", "share", "list"}
    options.arguments.update({"x" * 100_000: 1})
    with pytest.raises(InvalidArgument, match="is not read by the model's chat template") as refused:
        template.render(ChatPrompt(MESSAGES, template_options=options))
    assert len(str(refused.value)) < 1000


def test_arguments_of_a_template_as_json_keep_their_order_and_their_digits():
    options = TemplateOptions(arguments_json='{"tool": {"b": 9007199254740993, "a": 1.0}}')
    template = ChatTemplate("{{ tool | tojson }}", {})
    assert template.render(ChatPrompt(MESSAGES, template_options=options)) == '{"b": 9007199254740993, "a": 1.0}'


def test_a_template_that_drops_the_last_message_cannot_continue_it():
    prompt = ChatPrompt(MESSAGES, template_options=TemplateOptions(continue_final_message=True))
    with pytest.raises(InvalidArgument, match="continue_final_message"):
        ChatTemplate("{{ messages[0].content }}", {}).render(prompt)


def test_text_of_a_message_is_never_a_template():
    assert render("{{ messages[0].content }}", [ChatMessage("user", "{{ 7 * 7 }}")]) == "{{ 7 * 7 }}"
