"""Prefixes that clients pin: the same tokens as in later requests, on every replica, and each replica's answer."""

import pytest

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from quire.gateway.v1.prefix_pb2 import PinPrefixRequest, UnpinPrefixRequest
from quire.messages.arrays import decode_int32
from quire.rpc.errors import Internal, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from tests.support.gateway_process import collect, error_of, refusal_of, running_gateway, stream_request
from tests.support.rig import TOKENIZER

LONG_TEXT = "Once upon a time there was a fox who lived in a wood with many friends and slept in a hollow tree"
SHORT = common_pb2.StoppingParameters(max_tokens=4)


def tokens_of(request):
    """Prompt tokens of a pin or of a submit."""
    data = request.token_ids if hasattr(request, "token_ids") else request.prompt_token_ids
    return decode_int32(data, "token_ids").tolist()


def chat(*turns):
    return [generation_pb2.ChatMessage(role=role, content=content) for role, content in turns]


def pin_chat(*turns):
    return PinPrefixRequest(chat=generation_pb2.ChatMessages(messages=chat(*turns)))


@pytest.fixture
async def replicas(scheduler, other):
    """A gateway, and the two schedulers that it is connected to."""
    async with running_gateway(scheduler, other) as gateway:
        yield gateway, scheduler, other


async def test_a_text_is_pinned_as_generate_tokenizes_it(gateway, scheduler):
    pin = await gateway.prefixes.PinPrefix(PinPrefixRequest(text=LONG_TEXT, time_to_live_ms=1234))
    await collect(gateway.generation.GenerateStream(stream_request(LONG_TEXT)))
    (asked,), (submit,) = scheduler.pin_requests, scheduler.submits
    assert tokens_of(asked) == tokens_of(submit)
    assert (asked.tenant, asked.time_to_live_ms) == (submit.tenant, 1234)
    assert scheduler.pins[pin.pin_id] == tokens_of(submit)[: pin.pinned_tokens]
    assert pin.pinned_tokens == 16 * pin.pinned_blocks >= 16
    assert pin.time_to_live_ms == 1234


@pytest.mark.parametrize(
    "turns",
    [
        [("system", LONG_TEXT)],
        [("system", "Be kind."), ("user", LONG_TEXT)],
        [("user", LONG_TEXT), ("assistant", "It was so.")],
    ],
    ids=["system", "user", "assistant"],
)
async def test_a_conversation_is_pinned_as_later_turns_begin(gateway, scheduler, turns):
    await gateway.prefixes.PinPrefix(pin_chat(*turns))
    (pinned,) = map(tokens_of, scheduler.pin_requests)
    assert len(pinned) > 16
    answer = [] if turns[-1][0] != "user" else [("assistant", "Then it slept.")]
    for question in ("And then?", "\nWhy?", "7"):
        messages = chat(*turns, *answer, ("user", question))
        await gateway.generation.Chat(generation_pb2.ChatRequest(messages=messages, stopping=SHORT))
    if turns[-1][0] == "user":
        await gateway.generation.Chat(generation_pb2.ChatRequest(messages=chat(*turns), stopping=SHORT))
    for submit in scheduler.submits:
        assert tokens_of(submit)[: len(pinned)] == pinned
    text = TOKENIZER.decode(pinned, skip_special_tokens=False)
    assert turns[-1][1] + "<|end|>" in text


async def test_a_pin_that_one_replica_has_can_be_ended(replicas):
    gateway, first, second = replicas
    pin = await gateway.prefixes.PinPrefix(PinPrefixRequest(text=LONG_TEXT))
    first.pins.clear()
    await gateway.prefixes.UnpinPrefix(UnpinPrefixRequest(pin_id=pin.pin_id))
    error = await error_of(gateway.prefixes.UnpinPrefix(UnpinPrefixRequest(pin_id=pin.pin_id)))
    assert isinstance(error, NotFound)
    assert error.reason == "PIN_NOT_FOUND"
    assert not second.pins


async def test_an_error_of_one_replica_is_the_answer_as_it_is(replicas):
    gateway, first, second = replicas
    pin, unpin = gateway.prefixes.PinPrefix, gateway.prefixes.UnpinPrefix
    short = await error_of(pin(PinPrefixRequest(text="hello")))
    assert isinstance(short, InvalidArgument)
    assert "a block has 16" in short.message
    second.pin_error = ResourceExhausted("the tenant's pins hold 16 of 16 blocks", reason="PIN_QUOTA")
    error = await error_of(pin(PinPrefixRequest(text=LONG_TEXT)))
    assert isinstance(error, ResourceExhausted)
    assert error.reason == "PIN_QUOTA"
    second.pin_error = Internal("worse", reason="UNEXPECTED")
    (pin_id,) = first.pins
    assert isinstance(await error_of(unpin(UnpinPrefixRequest(pin_id=pin_id))), Internal)
    assert not first.pins
    # This replica may have the pin that the other one does not know.
    second.pin_error = Unavailable("no worker is attached", reason="NO_WORKER", retry_after_ms=500)
    error = await error_of(unpin(UnpinPrefixRequest(pin_id="nothing")))
    assert isinstance(error, Unavailable)
    assert (error.reason, error.retry_after_ms, error.message) == ("NO_WORKER", 500, "no worker is attached")


@pytest.mark.parametrize(
    ("request_", "field", "says"),
    [
        (PinPrefixRequest(), "prefix", "set text, token_ids or chat"),
        (PinPrefixRequest(text=""), "text", "empty"),
        (PinPrefixRequest(text="a " * 3000), "text", "at most 1,023"),
        (PinPrefixRequest(token_ids=common_pb2.TokenIds(ids=[1, 2080])), "token_ids.ids[1]", "2080"),
        (pin_chat(("", "x")), "chat.messages[0].role", "empty"),
        (PinPrefixRequest(text="x", time_to_live_ms=0), "time_to_live_ms", "is 0"),
        (PinPrefixRequest(text="x", time_to_live_ms=86_400_001), "time_to_live_ms", "[1, 86,400,000]"),
        (PinPrefixRequest(text="x", model="other"), "model", '"other"'),
    ],
)
async def test_bad_pins_are_named_with_value_and_limit(gateway, scheduler, request_, field, says):
    await refusal_of(gateway.prefixes.PinPrefix(request_), field, says)
    assert not scheduler.pin_requests


async def test_an_empty_pin_id_is_refused(gateway):
    await refusal_of(gateway.prefixes.UnpinPrefix(UnpinPrefixRequest()), "pin_id")
