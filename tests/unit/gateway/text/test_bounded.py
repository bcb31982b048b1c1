"""A chat template of a model's files is a program that may do anything; its gateway continues."""

import resource
import subprocess
import sys
import threading
import time

import pytest

from gateway.offload import FairExecutor
from gateway.text import bounded as module
from gateway.text.bounded import TookTooLong, bounded
from gateway.text.chat import Chat, model_template
from gateway.types import ChatMessage, ChatPrompt
from quire.rpc.errors import InvalidArgument
from quire.runtime.settings import ConfigurationError

_LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loop": (_LOOP, "s of processor time"),
    "memory": ("{{ 'a' * 10 ** 10 }}", "512.0 MiB of memory"),
    "doubled": (
        "{% set n = namespace(t='aa') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "memory|time",
    ),
    "power": ("{{ 10 ** (10 ** 10) }}", "an integer of"),
    "recursion": ("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}", "recursion"),
}


@pytest.fixture
def short_time(monkeypatch):
    monkeypatch.setattr(module, "MAX_PROCESSOR_S", 0.05)


def chat_of(source: str) -> Chat:
    return Chat("m", model_template(source, {}), None, FairExecutor(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_template_that_takes_too_much_for_a_chat_refuses_it_and_the_next_one_renders(kind, short_time):
    source, reason = HOSTILE[kind]
    chat = chat_of(f"{{% if messages[0].content == 'now' %}}{source}{{% endif %}}hello")
    limit = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(InvalidArgument, match=reason):
        await chat.render(ChatPrompt([ChatMessage("user", "now")]))
    assert await chat.render(ChatPrompt([ChatMessage("user", "later")])) == "hello"
    assert resource.getrlimit(resource.RLIMIT_AS) == limit


def test_a_template_that_takes_too_long_for_every_chat_is_a_configuration_error(short_time):
    with pytest.raises(ConfigurationError, match="the model's chat template takes more than") as caught:
        model_template("{% if messages[1].tool_calls %}" + _LOOP + "{% endif %}{{ tools }}{{ m.tool_calls }}", {})
    assert "\n" not in str(caught.value)


def test_a_body_in_another_thread_ends_too(monkeypatch):
    monkeypatch.setattr(module, "MAX_THREAD_S", 0.05)
    ended = list[type[BaseException]]()

    def loop() -> None:
        try:
            with bounded():
                while True:
                    time.monotonic()
        except TookTooLong as error:
            ended.append(type(error))

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join(60)
    assert ended == [TookTooLong]


def test_the_interpreter_waits_for_no_exception_after_a_body_in_another_thread():
    # While it waits for one, it never comes to the end of a function that is traced.
    program = (
        "import sys, threading\n"
        "from gateway.text.bounded import bounded\n"
        "def use():\n"
        "    with bounded():\n"
        "        pass\n"
        "thread = threading.Thread(target=use)\n"
        "thread.start()\n"
        "thread.join()\n"
        "sys.settrace(lambda *_: None)\n"
        "use()\n"
        "sys.settrace(None)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
