"""Events that are written directly equal the events that the reader would write, whatever the text and the call."""

from functools import partial
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.answers import OPENAI, StreamedResponse
from gateway.api.direct import _PLACE, DirectEvents, writes_directly
from gateway.api.generation_fields import CompletionBody
from gateway.api.openai.schemas import ChatBody
from gateway.api.openai.write_openai import ChatShaper, CompletionShaper, head_of
from gateway.replicas.events import Chunk
from gateway.replicas.ledger import Ledger
from gateway.text.formats.parser import ToolCallDelta
from tests.support.parameters import make_request
from tests.support.tokenizers import byte_level, wrapped

TOKENIZER = wrapped(byte_level())
CHAT = {"messages": [{"role": "user", "content": "Once"}], "stream": True}
CALLS = {
    "chat": CHAT,
    "completion": {"prompt": "Once", "stream": True},
    "usage": CHAT | {"stream_options": {"include_usage": True}},
    "usage so far": CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "token ids": CHAT | {"return_token_ids": True},
}
TEXT = st.text(st.sampled_from('a\n"\\ \u2028\x85é😀\x1f')) | st.sampled_from([_PLACE, "\ud83d", ""])
CHUNKS = st.lists(
    st.builds(
        Chunk,
        sequence_index=st.integers(0, 1),
        offset=st.just(0),
        token_ids=st.just([5, 6]),
        text=TEXT,
        logprobs=st.just(()),
        reasoning=st.sampled_from(["", "", "so"]),
        tool_calls=st.sampled_from([(), (), (ToolCallDelta(0, "id", "f"),)]),
    ),
    max_size=8,
)


def make_shaper(fields, model):
    live = Ledger(max_chunk_tokens=4).open(make_request(num_sequences=2), TOKENIZER)
    head = head_of("cmpl-1", 7, model)
    if "prompt" in fields:
        body = CompletionBody.model_validate(fields)
        return CompletionShaper(head, body, [None], [""], [live], TOKENIZER)
    return ChatShaper(head, ChatBody.model_validate(fields), live, TOKENIZER.token_texts)


class Response:
    """Notes the parts."""

    is_ready = True

    def __init__(self):
        self.parts = []

    def write_now(self, data):
        self.parts.append(data)


def written(shaper, chunk):
    return b"".join(map(OPENAI.event, shaper.event(0, chunk)))


@pytest.mark.parametrize("fields", CALLS.values(), ids=CALLS)
@given(chunks=CHUNKS, model=st.sampled_from(["quire-tiny", f"a {_PLACE} of stories"]))
def test_direct_events_equal_those_of_the_reader(fields, chunks, model):
    expected, shaper = make_shaper(fields, model), make_shaper(fields, model)
    response = Response()
    direct = DirectEvents(cast(StreamedResponse, response), partial(written, shaper), shaper.repeats_form)
    for chunk in chunks:
        direct.write(chunk)
    assert b"".join(response.parts) == b"".join(written(expected, chunk) for chunk in chunks)


@pytest.mark.parametrize(
    "fields", [{"logprobs": 1}, {"is_steady": True}], ids=["log probabilities", "events that a client may resume"]
)
def test_the_reader_writes_what_may_be_long_or_has_ids(fields):
    plain, other = (Ledger(max_chunk_tokens=4).open(make_request(**each), TOKENIZER) for each in ({}, fields))
    assert writes_directly([plain])
    assert not writes_directly([other])
    assert not writes_directly([plain, plain])
