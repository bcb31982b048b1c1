"""Templates of requests are programs that may do anything; the gateway survives, and the error names the fault."""

from collections.abc import Iterator

import pytest

from gateway.text.request_template import TemplateProcess
from gateway.types import ChatMessage, ChatPrompt
from quire.rpc.errors import InvalidArgument

PROMPT = ChatPrompt([ChatMessage("user", "hello")])


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess({"bos_token": "<s>"})
    yield process
    process.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "2 s of processor time",
            marks=pytest.mark.extended,
        ),
        ("{{ 'a' * 10 ** 10 }}", "256.0 MiB of memory"),
        ("{{ '%1000000000d' % 1 }}", "256.0 MiB of memory"),
        ("{{ 'a' | center(10 ** 9) }}", "256.0 MiB of memory"),
        ("{{ 'a' * 5000000 }}", "the max is 4.0 MiB"),
        ("{{ '\\ud800' }}", "lone surrogate"),
        ("{% if", "is invalid"),
        ("{{ raise_exception('no' * 10000) }}", "the request's chat template refuses"),
    ],
)
def test_a_template_that_takes_too_much_is_refused_and_the_next_one_renders(process, source, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        process.render(source, PROMPT)
    assert len(caught.value.message) < 2000
    assert caught.value.violations
    assert process.render("{{ bos_token }}{{ messages[0].content }}", PROMPT) == "<s>hello"


def test_files_of_the_working_directory_do_not_stand_in_for_modules(tmp_path, monkeypatch):
    (tmp_path / "pickle.py").write_text("raise SystemExit('a file of the user')")
    monkeypatch.chdir(tmp_path)
    process = TemplateProcess({})
    assert process.render("{{ messages[0].content }}", PROMPT) == "hello"
    process.close()
