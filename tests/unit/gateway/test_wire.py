"""Messages are parsed so that what is wrong with them is the caller's error."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.wire import parse
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


@settings(deadline=None)
@given(data=st.binary(max_size=64))
def test_any_bytes_are_parsed_or_refused(data):
    with contextlib.suppress(InvalidArgument):
        assert isinstance(parse(generation_pb2.GenerateRequest, data), generation_pb2.GenerateRequest)
