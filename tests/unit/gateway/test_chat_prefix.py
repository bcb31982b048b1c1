"""What later turns begin with, for templates that write messages otherwise once others follow."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.model import ServedModel
from gateway.requests.request import ChatMessage
from gateway.text.chat import common_prefix
from quire.rpc.errors import InvalidArgument
from tests.support.tokenizers import byte_level, write_model_directory

SYSTEM = ChatMessage("system", "Be kind to all foxes.")
USER = ChatMessage("user", "Who are you?")

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEM_IN_FIRST_TURN = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0].content + '. ' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for m in rest %}[{{ system if loop.first }}{{ m.content }}]{% endfor %}"
)
FORGETS_OLD_ANSWERS = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
KNOWS_BOTS_ALONE = (
    "{% for m in messages %}{% if m.role != 'bot' %}{{ raise_exception('only bots') }}{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture
def prefix_of(tmp_path):
    """The text of what is pinned for messages under a template."""
    with ThreadPoolExecutor(1) as executor:

        def call(template, *messages):
            directory = write_model_directory(tmp_path / "model", byte_level(), chat_template__jinja=template)
            model = ServedModel.open(directory, None, executor)
            return model.tokenizer.decode(asyncio.run(model.chat.encode_prefix(messages)), include_special_tokens=True)

        yield call


def test_a_system_message_is_shared_up_to_what_the_user_says(prefix_of):
    assert prefix_of(PLAIN, SYSTEM) == "<system>Be kind to all foxes.;<user>"


def test_a_question_is_shared_up_to_the_answer(prefix_of):
    assert prefix_of(PLAIN, SYSTEM, USER) == "<system>Be kind to all foxes.;<user>Who are you?;<assistant>"


def test_a_system_message_that_is_written_with_the_first_turn_is_shared(prefix_of):
    # Not the space at its end, which is one token with a word that follows.
    assert prefix_of(SYSTEM_IN_FIRST_TURN, SYSTEM) == "[Be kind to all foxes.."


def test_what_a_template_drops_later_is_not_shared(prefix_of):
    answer = ChatMessage("assistant", "A fox.")
    assert prefix_of(FORGETS_OLD_ANSWERS, USER, answer) == "<user>Who are you?<user>"


def test_messages_alone_where_the_template_knows_no_role_that_could_follow(prefix_of):
    assert prefix_of(KNOWS_BOTS_ALONE, ChatMessage("bot", "Beep.")) == "Beep."


def test_messages_that_the_template_refuses_are_refused(prefix_of):
    with pytest.raises(InvalidArgument, match="only bots"):
        prefix_of(KNOWS_BOTS_ALONE, USER)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_prefix_is_the_longest(first, second):
    prefix = common_prefix(first, second)
    length = len(prefix)
    assert first[:length] == second[:length] == prefix
    assert first[length : length + 1] != second[length : length + 1] or not (first[length:] or second[length:])
