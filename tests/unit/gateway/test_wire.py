"""Messages are parsed so that what is wrong with them is the caller's error."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.grpc_api.wire import parse
from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import InvalidArgument


def test_a_good_message_is_parsed():
    request = generation_pb2.GenerateRequest(
        text="hi", priority=-3, sampling=common_pb2.SamplingParameters(seed=2**64 - 1)
    )
    assert parse(generation_pb2.GenerateRequest, request.SerializeToString()) == request


def test_two_alternatives_are_refused_but_a_repeated_one_is_not():
    text = generation_pb2.GenerateRequest(text="a").SerializeToString()
    ids = generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[1])).SerializeToString()
    parse(generation_pb2.GenerateRequest, text + text)
    with pytest.raises(InvalidArgument, match="token_ids is set besides text"):
        parse(generation_pb2.GenerateRequest, text + ids)


def test_optional_fields_do_not_exclude_each_other():
    request = generation_pb2.GenerateRequest(text="hi", model="m", request_id="r", priority=1)
    assert parse(generation_pb2.GenerateRequest, request.SerializeToString()) == request


def with_bad_utf8(request):
    return request.SerializeToString().replace(b"BAD", b"B\xffD")


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (generation_pb2.GenerateRequest(text="BAD"), "text"),
        (generation_pb2.GenerateRequest(stopping={"stop": ["x", "BAD"], "max_tokens": 3}), "stopping.stop[1]"),
        (generation_pb2.ChatRequest(messages=[{"role": "user"}, {"content": "BAD"}]), "messages[1].content"),
        (generation_pb2.GenerateRequest(priority=-1, model="BAD"), "model"),
    ],
)
def test_the_text_that_is_not_utf8_is_named(request_, path):
    with pytest.raises(InvalidArgument, match="is not valid UTF-8") as caught:
        parse(type(request_), with_bad_utf8(request_))
    assert [violation.field for violation in caught.value.violations] == [path]


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x7fshort", b"\x0a" + b"\xff" * 9 + b"\x01", b"\x0b", b"\x09ab"])
def test_bytes_that_are_no_message_are_named_by_it(data):
    with pytest.raises(InvalidArgument, match="cannot be parsed") as caught:
        parse(generation_pb2.GenerateRequest, data)
    assert [violation.field for violation in caught.value.violations] == ["quire.gateway.v1.GenerateRequest"]
    assert caught.value.reason == "MALFORMED_MESSAGE"


def test_unknown_fields_are_passed_over():
    group = bytes([100 << 3 & 0x7F | 0x83, 6, 100 << 3 & 0x7F | 0x84, 6])
    text = generation_pb2.GenerateRequest(text="hi").SerializeToString()
    assert parse(generation_pb2.GenerateRequest, group + text).text == "hi"


@settings(deadline=None)
@given(data=st.binary(max_size=64))
def test_any_bytes_are_parsed_or_refused(data):
    with contextlib.suppress(InvalidArgument):
        assert isinstance(parse(generation_pb2.GenerateRequest, data), generation_pb2.GenerateRequest)
