"""The sync client against a fake gateway over real gRPC."""

import queue
import threading
from typing import Any

import pytest

from quire.client import (
    BeamSearch,
    ChatMessage,
    Client,
    EarlyStopping,
    FinishReason,
    GenerationOptions,
    Logprob,
    PinnedPrefix,
    PositionLogprobs,
    RequestCompleted,
    SequenceFinished,
    TokenChunk,
)
from quire.common.v1 import common_pb2
from quire.rpc.errors import Cancelled, DeadlineExceeded, InvalidArgument, NotFound, QuireError, Unavailable
from tests.support.fake_gateway import FakeGatewayThread


@pytest.fixture
def client(gateway: FakeGatewayThread):
    with Client(gateway.address) as client:
        yield client


def test_generate_answers_with_all_fields(client: Client) -> None:
    answer = client.generate("two words", request_id="mine")
    assert answer.text == "two words!"
    assert (answer.request_id, answer.model) == ("mine", "fake")
    (sequence,) = answer.sequences
    assert sequence.token_ids == (1, 2)
    assert sequence.finish_reason is FinishReason.STOP
    assert (sequence.stop_token_id, sequence.stop_string, sequence.cumulative_logprob) == (2, None, None)
    assert sequence.logprobs == (PositionLogprobs(Logprob(1, -0.5, 1), (Logprob(1, -0.5, 1),)),)
    assert (answer.usage.prompt_tokens, answer.usage.decode_ms) == (3, 1.5)


def test_token_ids_are_a_prompt_too(client: Client) -> None:
    assert client.generate([7, 8]).text == "7 8!"


@pytest.mark.parametrize("prompt", [5, None, b"text"])
def test_what_is_no_prompt_is_a_type_error(client: Client, prompt: Any) -> None:
    with pytest.raises(TypeError, match=f"^prompt is {prompt!r}; it must be a str or a sequence of token ids$"):
        client.generate(prompt)


def test_options_reach_the_gateway_and_absent_ones_stay_absent(client: Client, gateway: FakeGatewayThread) -> None:
    client.generate("x", GenerationOptions(temperature=0.0, logit_bias={5: -1.0}, stop=["a", "b"], logprobs=0))
    (request,) = gateway.generation.requests
    assert request.sampling.HasField("temperature")
    assert dict(request.sampling.logit_bias) == {5: -1.0}
    assert list(request.stopping.stop) == ["a", "b"]
    assert request.output.HasField("logprobs")
    assert not request.sampling.HasField("seed")
    assert not request.stopping.HasField("max_tokens")
    assert not request.HasField("model")


@pytest.mark.parametrize("early_stopping", EarlyStopping)
def test_beam_search_reaches_the_gateway(
    client: Client, gateway: FakeGatewayThread, early_stopping: EarlyStopping
) -> None:
    client.generate("x", GenerationOptions(n=2, beam_search=BeamSearch(4, 0.5, early_stopping)))
    client.chat([ChatMessage("user", "x")], GenerationOptions(beam_search=BeamSearch(3)))
    given, plain = (request.sampling for request in gateway.generation.requests)
    assert (given.n, given.beam_search.beam_width, given.beam_search.length_penalty) == (2, 4, 0.5)
    expected = common_pb2.EarlyStopping.Value(f"EARLY_STOPPING_{early_stopping.name}")
    assert given.beam_search.early_stopping == expected
    assert plain == common_pb2.SamplingParameters(beam_search=common_pb2.BeamSearchParameters(beam_width=3))


def test_a_stream_gives_chunks_then_finished_then_completed(client: Client) -> None:
    with client.generate_stream("one two") as stream:
        first, second, finished, completed = stream
    assert isinstance(first, TokenChunk)
    assert isinstance(second, TokenChunk)
    assert (first.text, second.text, second.offset, second.token_ids) == ("one ", "two!", 1, (1,))
    assert finished == SequenceFinished(0, 2, FinishReason.LENGTH, None, None, None)
    assert isinstance(completed, RequestCompleted)
    assert stream.completed == completed


def test_the_text_of_a_stream_comes_in_pieces(client: Client) -> None:
    with client.generate_stream("a b c") as stream:
        assert list(stream.text) == ["a ", "b ", "c!"]


def test_leaving_a_stream_early_cancels_the_call(client: Client, gateway: FakeGatewayThread) -> None:
    with client.generate_stream("endless") as stream:
        assert next(stream.text) == "endless!"
    gateway.wait_left()
    assert list(stream) == []


def test_closing_a_stream_ends_the_iteration_of_another_thread(client: Client, gateway: FakeGatewayThread) -> None:
    with client.generate_stream("endless") as stream:
        closer = threading.Thread(target=stream.close)
        pieces = []
        for piece in stream.text:
            pieces.append(piece)
            closer.start()
        closer.join()
    assert pieces == ["endless!"]
    gateway.wait_left()


def test_closing_the_client_ends_the_streams_of_other_threads(gateway: FakeGatewayThread) -> None:
    client, first_came, raised = Client(gateway.address), threading.Event(), queue.SimpleQueue[Exception]()

    def read() -> None:
        try:
            for _ in client.generate_stream("endless"):
                first_came.set()
        except QuireError as error:
            raised.put(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert first_came.wait(60)
    client.close()
    reader.join(60)
    error = raised.get(timeout=30)
    assert (type(error), str(error)) == (Cancelled, "the client was closed")


def test_what_was_completed_is_no_error_though_the_client_is_closed(gateway: FakeGatewayThread) -> None:
    client = Client(gateway.address)
    stream = client.generate_stream("one")
    while stream.completed is None:
        next(stream)
    client.close()
    assert list(stream) == []


def test_chat_sends_the_messages(client: Client, gateway: FakeGatewayThread) -> None:
    messages = [ChatMessage("system", "be kind"), ChatMessage("user", "hello")]
    assert client.chat(messages).text == "hello!"
    with client.chat_stream(messages) as stream:
        assert "".join(stream.text) == "hello!"
    for request in gateway.generation.requests:
        assert [(m.role, m.content) for m in request.messages] == [("system", "be kind"), ("user", "hello")]


def test_messages_may_be_mappings(client: Client, gateway: FakeGatewayThread) -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert client.chat(messages).text == "hello!"
    client.pin_prefix(messages)
    chat, pin = gateway.generation.requests
    for request in (chat, pin.chat):
        assert [(m.role, m.content) for m in request.messages] == [("system", "be kind"), ("user", "hello")]
    assert client.tokenize([ChatMessage("user", "x"), {"role": "user", "content": "hi"}]).token_ids == tuple(b"x hi")


def test_tokenize_and_detokenize_are_inverse(client: Client) -> None:
    tokenization = client.tokenize("hi")
    assert tokenization.token_ids == (104, 105)
    assert tokenization.tokens == ("h", "i")
    assert client.detokenize(tokenization.token_ids) == "hi"
    assert client.tokenize([ChatMessage("user", "hi")]).token_ids == (104, 105)


def test_a_prefix_is_text_token_ids_or_messages(client: Client, gateway: FakeGatewayThread) -> None:
    pin = client.pin_prefix("be kind", time_to_live_ms=1000, model="fake")
    assert pin == PinnedPrefix("pin", pinned_tokens=16, pinned_blocks=1, time_to_live_ms=1000)
    assert client.pin_prefix([7, 8]).time_to_live_ms == 300_000
    client.pin_prefix([])
    client.pin_prefix([ChatMessage("system", "be kind")])
    text, ids, none, chat = gateway.generation.requests
    assert (text.text, text.time_to_live_ms, text.model) == ("be kind", 1000, "fake")
    assert list(ids.token_ids.ids) == [7, 8]
    assert not ids.HasField("time_to_live_ms")
    assert none.WhichOneof("prefix") == "token_ids"
    assert [(m.role, m.content) for m in chat.chat.messages] == [("system", "be kind")]
    client.unpin_prefix(pin.pin_id)
    with pytest.raises(NotFound):
        client.unpin_prefix("other")


@pytest.mark.parametrize("prefix", [5, None, b"text"])
def test_what_is_no_prefix_is_a_type_error(client: Client, prefix: Any) -> None:
    with pytest.raises(TypeError, match=f"^prefix is {prefix!r}; it must be a str, a sequence of token ids or"):
        client.pin_prefix(prefix)


def test_models_and_server_info(client: Client) -> None:
    (model,) = client.list_models()
    assert client.get_model("fake") == model
    assert (model.vocab_size, model.eos_token_ids, model.has_chat_template) == (256, (2,), True)
    info = client.server_info()
    assert info.replicas[0].num_gpu_blocks == 64
    assert info.limits.max_message_bytes == 4096


def test_errors_are_typed(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="prompt is bad") as caught:
        client.generate("bad")
    assert caught.value.violations[0].field == "text"
    with pytest.raises(NotFound):
        client.get_model("other")
    with pytest.raises(NotFound):
        client.cancel("other")
    client.cancel("running")
    with client.generate_stream("bad") as stream, pytest.raises(InvalidArgument):
        next(iter(stream))


def test_a_timeout_is_deadline_exceeded(client: Client) -> None:
    with client.generate_stream("endless", timeout_s=0.2) as stream, pytest.raises(DeadlineExceeded):
        list(stream)


def test_nobody_there_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable):
        client.list_models(timeout_s=60)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (GenerationOptions(top_k=-1), "top_k"),
        (GenerationOptions(max_tokens=2**32), "max_tokens"),
        (GenerationOptions(stop=["\ud800"]), "stop"),
        (GenerationOptions(logit_bias={-1: 1.0}), "logit_bias"),
        (GenerationOptions(beam_search=BeamSearch(-1)), "beam_width"),
    ],
)
def test_a_value_that_no_message_can_hold_is_refused_by_name(
    client: Client, options: GenerationOptions, field: str
) -> None:
    with pytest.raises(InvalidArgument, match=field) as caught:
        client.generate("x", options)
    assert caught.value.violations[0].field == field


def test_a_prompt_that_no_message_can_hold_is_refused(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="text"):
        client.generate("\ud800")
    with pytest.raises(InvalidArgument, match="ids"):
        client.generate([-1])
    mixed: Any = [1, ChatMessage("user", "x")]
    with pytest.raises(InvalidArgument, match="ids"):
        client.pin_prefix(mixed)
    with pytest.raises(InvalidArgument, match="time_to_live_ms"):
        client.pin_prefix("x", time_to_live_ms=-1)
