"""Chat templates render as transformers renders them, inside a sandbox."""

import pytest

from gateway.requests.request import ChatMessage
from gateway.text.chat import ChatTemplate
from quire.rpc.errors import InvalidArgument
from quire.settings import ConfigurationError

MESSAGES = [ChatMessage("system", "Be brief."), ChatMessage("user", 'Say "é" <b>', name="Ann")]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source, messages=MESSAGES):
    return ChatTemplate(source, SPECIAL_TOKENS).render(messages)


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
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [{"role": message.role, "content": message.content} for message in MESSAGES]
    conversation[1]["name"] = "Ann"
    (expected,), _ = render_jinja_template(
        [conversation], chat_template=source, add_generation_prompt=True, **SPECIAL_TOKENS
    )
    assert render(source) == expected


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


def test_text_of_a_message_is_never_a_template():
    assert render("{{ messages[0].content }}", [ChatMessage("user", "{{ 7 * 7 }}")]) == "{{ 7 * 7 }}"


def test_a_broken_template_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match="invalid"):
        ChatTemplate("{% for %}", {})
