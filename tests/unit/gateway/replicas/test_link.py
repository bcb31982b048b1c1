"""The stream to a scheduler: submission of requests. Tests with fake schedulers cover the rest."""

import dataclasses
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.replicas.link import SchedulerLink
from gateway.replicas.live import LiveRequest
from gateway.replicas.request_messages import request_from_submit, submit_message
from gateway.request.generation_config import ModelDefaults
from gateway.request.parameters import resolve
from gateway.text.formats.answer import AnswerFormat
from gateway.text.formats.parser import OfferedTool, Thinking
from quire.rpc.errors import Unavailable
from quire.scheduler.v1 import scheduler_pb2
from quire.service.compatibility import UNKNOWN_MODEL
from tests.support.parameters import make_options, make_request


@pytest.mark.parametrize("searches", [False, True])
def test_a_durable_request_is_found_again_as_it_was_submitted(searches):
    sampling = {"temperature": 0.5, "logit_bias": {7: 1.5}, "n": 2, "bad_words": ["x"]}
    if searches:
        sampling = {"n": 2, "beam_search": {"beam_width": 3}}
    options = make_options(sampling=sampling, stopping={"stop": ["end"], "max_tokens": 9}, output={"logprobs": 1})
    parameters = resolve(options, ModelDefaults(), (1, 2), [(5, 6)])
    parameters = dataclasses.replace(parameters, predicted=(8, 9))
    asked = {
        name: getattr(parameters, name) for name in ("sampling", "stopping", "output", "row_sampling", "predicted")
    }
    answer_format = AnswerFormat("qwen3_coder", "qwen3", Thinking.BEGUN, (OfferedTool("f", frozenset({"a"})),))
    request = make_request(durable=True, nonce=2**63, priority=-3)
    request = dataclasses.replace(request, answer_format=answer_format, **asked)
    live = LiveRequest(request, 7, (), max_chunk_tokens=1, clock=lambda: 0.0)
    found = request_from_submit(submit_message(live).submit)
    # Bad words are known only as tokens, inside the worker's part.
    parameters.sampling.ClearField("bad_words")
    for field in dataclasses.fields(request):
        expected, value = getattr(request, field.name), getattr(found, field.name)
        assert (list(value) == list(expected)) if field.name.endswith("_ids") else value == expected, field.name


def test_a_durable_request_of_a_newer_gateway_is_left_to_one():
    live = LiveRequest(make_request(durable=True), 7, (), max_chunk_tokens=1, clock=lambda: 0.0)
    submit = submit_message(live).submit
    submit.answer_format.MergeFrom(scheduler_pb2.AnswerFormat(tool_format="of-2031", thinking="none"))
    with pytest.raises(Unavailable, match='"of-2031" is no format of tool calls, which this gateway') as raised:
        request_from_submit(submit)
    assert raised.value.reason == "NEWER_REQUEST"
    submit = submit_message(live).submit
    # A field with number 100, a varint, in the options of the output.
    submit.output.MergeFromString(b"\xa0\x06\x01")
    with pytest.raises(
        Unavailable, match=r"has quire\.common\.v1\.OutputOptions\.100, which this gateway's release lacks"
    ):
        request_from_submit(submit)


def test_the_scheduler_gets_the_stop_strings_of_durable_requests_alone():
    for durable, stop in ((False, []), (True, ["end"])):
        live = LiveRequest(make_request(stop=["end"], durable=durable), 7, (), max_chunk_tokens=1, clock=lambda: 0.0)
        assert list(submit_message(live).submit.stopping.stop) == stop
        assert list(live.request.stopping.stop) == ["end"]


def test_a_request_that_is_cancelled_before_it_was_sent_is_not_submitted():
    listener: Any = Mock()
    link = SchedulerLink("s:1", gateway_id="g", grace_period_ms=1, model=UNKNOWN_MODEL, listener=listener)
    link.is_connected = True
    lives = [LiveRequest(make_request(), handle, (), max_chunk_tokens=1, clock=lambda: 0.0) for handle in (1, 2, 3)]
    # A scheduler may already have the last one.
    for live, live.submissions in zip(lives, (1, 1, 2), strict=True):
        link.submit(live)
    link.withdraw(lives[0])
    assert list(link._outbox) == lives[1:]
    link.withdraw(lives[2])
    abort = link._outbox[-1]
    assert isinstance(abort, scheduler_pb2.ConnectRequest)
    assert (list(link._outbox)[:2], abort.abort.handle) == (lives[1:], 3)
    assert [live.submissions for live in lives] == [0, 1, 2]


@pytest.mark.parametrize("takes_batches", [False, True])
def test_small_messages_are_sent_as_one_if_the_scheduler_takes_that(takes_batches: bool):
    link = SchedulerLink("s:1", gateway_id="g", grace_period_ms=1, model=UNKNOWN_MODEL, listener=Mock())
    link.is_connected, link.welcome = True, Mock(takes_batches=takes_batches, max_drafts=0)
    for handle in range(1, 71):
        request = make_request(prompt=[5] * (10_000 if handle == 40 else 3))
        link.submit(LiveRequest(request, handle, (), max_chunk_tokens=1, clock=lambda: 0.0))
    written: list[list[int]] = []
    while link._outbox:
        for message in map(scheduler_pb2.ConnectRequest.FromString, link._next_messages()):
            parts = message.batch.messages if message.HasField("batch") else [message.SerializeToString()]
            written.append([scheduler_pb2.ConnectRequest.FromString(each).submit.handle for each in parts])
    if takes_batches:
        assert [(each[0], each[-1]) for each in written] == [(1, 32), (33, 39), (40, 40), (41, 70)]
    assert [handle for each in written for handle in each] == list(range(1, 71))
    assert takes_batches or all(len(each) == 1 for each in written)
