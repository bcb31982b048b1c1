"""Waits of a stream after its call failed, and when it is given up. Worlds show how it continues."""

from dataclasses import dataclass, field, replace

import pytest

from quire.client import Logprob, PositionLogprobs, RetryPolicy, TokenChunk, ToolCallDelta
from quire.client.retries import Attempts, CallTime, Recovery, Resumption
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import Aborted, AlreadyExists, Cancelled, NotFound, QuireError, ResourceExhausted, Unavailable

FULL = ResourceExhausted("full", retry_after_ms=2000)
LOST = Unavailable("the connection broke")
TAKEN_OVER = Aborted("read by another call", reason="REQUEST_TAKEN_OVER")
UNKNOWN = NotFound("no such request")


@dataclass
class Gateway:
    """Records calls, and is also the clock."""

    calls: list[object] = field(default_factory=list)
    now: float = 0.0

    def start(self, left_s: float | None) -> None:
        self.calls.append("start")

    def resume(self, request: generation_pb2.ResumeStreamRequest, left_s: float | None) -> None:
        self.calls.append([(each.sequence_index, each.offset, each.num_characters) for each in request.offsets])

    def attempts(self, policy: RetryPolicy | None = None) -> Attempts:
        return Attempts(policy, CallTime(None, lambda: self.now), False, lambda: 0.0)

    def resumption(self, policy: RetryPolicy | None = None) -> Resumption:
        resumption = Resumption(self.start, self.attempts(policy), "story", self.resume, None, 1)
        resumption.call()
        return resumption


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def chunk(text: str) -> TokenChunk:
    return TokenChunk(0, 0, (1, 2), text, ())


def go_on(recovery: Recovery, error: QuireError) -> float:
    delay_s = recovery.delay_after(error)
    recovery.call()
    return delay_s


@pytest.mark.parametrize("error", [FULL, UNKNOWN, AlreadyExists("twin")])
def test_a_refused_request_is_the_callers_error(gateway: Gateway, error: QuireError) -> None:
    with pytest.raises(type(error)):
        gateway.resumption().delay_after(error)


def test_what_came_from_another_model_is_not_continued_and_what_did_not_come_is_started_again(gateway: Gateway) -> None:
    """The text would come from two models."""
    changed = Unavailable("the worker came back with another model", reason="MODEL_CHANGED")
    resumption = gateway.resumption()
    go_on(resumption, changed)
    assert resumption.accept(chunk("ab")) == chunk("ab")
    with pytest.raises(Unavailable, match="another model"):
        resumption.delay_after(changed)
    assert gateway.calls == ["start", "start"]


def test_a_lost_stream_that_is_refused_waits_as_the_gateway_says_and_is_resumed(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    assert resumption.accept(chunk("ab")) == chunk("ab")
    go_on(resumption, LOST)
    assert [go_on(resumption, FULL) for _ in range(8)] == [2.0] * 8
    # Also if a gateway has not noticed yet that this client is gone.
    go_on(resumption, AlreadyExists("runs"))
    # And if its earlier call reached the gateway after this one.
    go_on(resumption, TAKEN_OVER)
    assert gateway.calls == ["start"] + [[(0, 2, 2)]] * 11
    resumption.accept(chunk("c"))
    for error in (FULL, TAKEN_OVER):
        with pytest.raises(type(error)):
            resumption.delay_after(error)
    # A delay of zero does not hasten it, and a missing one does not end it.
    at_once = ResourceExhausted("full", retry_after_ms=0)
    assert [go_on(resumption, error) for error in (LOST, at_once, at_once)] == [0.05, 0.1, 0.2]
    with pytest.raises(ResourceExhausted):
        resumption.delay_after(ResourceExhausted("too large"))


def test_a_stream_that_a_gateway_or_a_proxy_resets_is_resumed_and_one_that_a_caller_cancelled_is_not(
    gateway: Gateway,
) -> None:
    """If the gateway's connection ends, HTTP/2's RST_STREAM with CANCEL is CANCELLED without a reason."""
    resumption = gateway.resumption()
    assert resumption.accept(chunk("ab")) == chunk("ab")
    assert go_on(resumption, Cancelled("CANCELLED")) == 0.05
    assert gateway.calls == ["start", [(0, 2, 2)]]
    with pytest.raises(Cancelled):
        resumption.delay_after(Cancelled("was cancelled", reason="CANCELLED_BY_ID"))


def test_after_long_refusals_of_a_lost_stream_its_policy_decides(gateway: Gateway) -> None:
    patient, plain = gateway.resumption(RetryPolicy(attempts=None)), gateway.resumption()
    assert go_on(patient, FULL) == 2.0
    assert gateway.calls == ["start"] * 3
    for resumption in (patient, plain):
        gateway.now = 0.0
        go_on(resumption, LOST)
        gateway.now = 28.0
        assert go_on(resumption, FULL) == 2.0
        gateway.now = 29.9
    with pytest.raises(ResourceExhausted):
        plain.delay_after(FULL)
    # That it still runs does not explain why the caller has no answer.
    with pytest.raises(Unavailable, match="the connection broke"):
        plain.delay_after(AlreadyExists("runs"))
    assert go_on(patient, FULL) == 2.0


@pytest.mark.parametrize(
    ("policy", "end", "last_s", "over_s"),
    [
        (None, None, 29.0, 30.0),
        (RetryPolicy(resume_for_s=90.0), None, 89.0, 90.0),
        # The time limit of the call.
        (None, 1.0, 0.5, 0.95),
    ],
)
def test_waits_grow_until_it_is_given_up_and_what_comes_forgives_them(
    gateway: Gateway, policy: RetryPolicy | None, end: float | None, last_s: float, over_s: float
) -> None:
    resumption = gateway.resumption(policy)
    assert [go_on(resumption, LOST) for _ in range(7)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    resumption.attempts.time = CallTime(end, lambda: gateway.now)
    resumption.accept(chunk("a"))
    assert go_on(resumption, LOST) == 0.05
    gateway.now = last_s
    go_on(resumption, LOST)
    gateway.now = over_s
    with pytest.raises(Unavailable):
        resumption.delay_after(LOST)


def test_a_stream_that_is_lost_again_before_its_first_token_has_its_whole_time_again(gateway: Gateway) -> None:
    """A long prompt may take longer than processes live."""
    resumption = gateway.resumption()
    for _ in range(5):
        go_on(resumption, LOST)
        gateway.now += 25
        resumption.record_accepted()
    go_on(resumption, LOST)
    gateway.now += 25
    go_on(resumption, UNKNOWN)
    gateway.now += 10
    with pytest.raises(Unavailable):
        resumption.delay_after(LOST)


def test_an_answer_that_was_chosen_at_the_end_comes_again_and_must_be_the_same(gateway: Gateway) -> None:
    """No process knows the request any more."""
    resumption = gateway.resumption()
    assert resumption.accept(chunk("ab")) == chunk("ab")
    go_on(resumption, LOST)
    go_on(resumption, UNKNOWN)
    assert gateway.calls == ["start", [(0, 2, 2)], "start"]
    assert not resumption.accept(chunk("ab"))
    assert resumption.accept(TokenChunk(0, 2, (3,), "c", ()))
    for other in (TokenChunk(0, 0, (1, 7), "ax", ()), TokenChunk(0, 2, (4, 4), "cd", ())):
        with pytest.raises(NotFound):
            resumption.accept(other)


def make_logprobs(number: int) -> tuple[PositionLogprobs, ...]:
    return tuple(PositionLogprobs(Logprob(each, -1.0, 1), ()) for each in range(number))


def test_of_a_chunk_that_came_in_part_the_rest_is_new(gateway: Gateway) -> None:
    """Chunks have the tokens that the gateway has when it writes them."""
    resumption = gateway.resumption()
    call = ToolCallDelta(0, "call_1", "look", '{"at"')
    first = TokenChunk(0, 0, (1, 2), "a", make_logprobs(2), reasoning="hm", tool_calls=(call,))
    assert resumption.accept(first) == first
    for _ in range(2):
        go_on(resumption, LOST)
        go_on(resumption, UNKNOWN)
        assert resumption.accept(TokenChunk(0, 0, (1,), "", make_logprobs(1), reasoning="h")) is None
    whole = replace(call, arguments='{"at": 1}')
    again = TokenChunk(
        0, 1, (2, 3), "a", make_logprobs(2), reasoning="m", tool_calls=(whole, ToolCallDelta(1, "b", "c", ""))
    )
    rest = (ToolCallDelta(0, "", "", ": 1}"), ToolCallDelta(1, "b", "c", ""))
    assert resumption.accept(again) == TokenChunk(0, 2, (3,), "", make_logprobs(2)[1:], tool_calls=rest)
    with pytest.raises(NotFound):
        resumption.accept(TokenChunk(0, 2, (4, 5), "cd", ()))
    assert resumption.accept(TokenChunk(0, 3, (4,), "d", ())) == TokenChunk(0, 3, (4,), "d", ())


def test_a_plain_stream_is_started_again_only_while_nothing_came(gateway: Gateway) -> None:
    restart = Recovery(gateway.start, gateway.attempts(RetryPolicy(lost_generations=True)))
    go_on(restart, FULL)
    go_on(restart, LOST)
    assert gateway.calls == ["start", "start"]
    restart.accept(chunk("a"))
    for error in (FULL, LOST):
        with pytest.raises(type(error)):
            restart.delay_after(error)
