"""Whatever a body holds, it becomes options that the validator takes, or a typed error."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.body import BodyLimits, load_json
from gateway.api.openai.schemas import ChatBody, CompletionBody
from gateway.request.counting import EntryLimits
from quire.rpc.errors import QuireError
from tests.support.openai_bodies import parse


def test_too_many_messages_are_refused_before_they_are_looked_at():
    with pytest.raises(QuireError) as caught:
        parse(ChatBody, json.dumps({"messages": [{"role": 5}] * 11}).encode(), BodyLimits(1 << 22, EntryLimits(10)))
    assert caught.value.message == "messages has 11 entries; the max is 10"


class _Limits(EntryLimits):
    """`max_messages` is the maximum number of all strings, lists and objects."""

    @property
    def max_values(self) -> int:
        return self.max_messages


def num_values(value: Any) -> int:
    """Strings, names among them, lists and objects."""
    match value:
        case str():
            return 1
        case list():
            return 1 + sum(map(num_values, value))
        case dict():
            return 1 + sum(1 + num_values(each) for each in value.values())
    return 0


TEXTS = st.text(st.sampled_from('ab"\\[{]},\u00e9'), max_size=8)
NESTED = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


@settings(deadline=None)
@given(value=NESTED, ensure_ascii=st.booleans())
async def test_strings_lists_and_objects_of_a_body_are_counted_before_they_are_made(value, ensure_ascii):
    data = json.dumps(value, ensure_ascii=ensure_ascii).encode()
    number = num_values(value)
    assert await load_json(data, BodyLimits(1 << 22, _Limits(number))) == value
    if number:
        with pytest.raises(QuireError, match=f"has more than {number - 1:,} strings, lists and objects"):
            await load_json(data, BodyLimits(1 << 22, _Limits(number - 1)))


def test_a_body_of_very_many_fields_is_refused_for_their_number():
    data = json.dumps({f"k{number}": None for number in range(2000)}).encode()
    with pytest.raises(QuireError) as caught:
        parse(CompletionBody, data)
    assert "2,000 fields; the max is 1,024" in caught.value.message
