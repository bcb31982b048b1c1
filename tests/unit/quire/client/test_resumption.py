"""How a stream goes on after its call failed: what is called next, and when it is given up."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from quire.client import FinishReason, Logprob, PositionLogprobs, RetryPolicy, SequenceFinished, TokenChunk
from quire.client.retries import Attempts, CallTime, Restart, Resumption
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import AlreadyExists, NotFound, QuireError, ResourceExhausted, Unavailable

FULL = ResourceExhausted("full", retry_after_ms=2000)
LOST = Unavailable("the connection broke")
UNKNOWN = NotFound("no such request")
FINISHED = SequenceFinished(0, 2, FinishReason.LENGTH, None, None, None)


@dataclass
class Gateway:
    """Notes what is called, and is the clock too."""

    calls: list[object] = field(default_factory=list)
    now: float = 0.0

    def start(self, left_s: float | None) -> None:
        self.calls.append("start")

    def go_on(self, held: Sequence[generation_pb2.HeldSequence], left_s: float | None) -> None:
        self.calls.append([(list(each.token_ids), each.num_characters, each.cumulative_logprob) for each in held])

    def resume(self, request: generation_pb2.ResumeStreamRequest, left_s: float | None) -> None:
        self.calls.append([(each.sequence_index, each.offset, each.num_characters) for each in request.offsets])

    def attempts(self, policy: RetryPolicy | None = None, *, end: float | None = None) -> Attempts:
        return Attempts(policy, CallTime(end, lambda: self.now), False, lambda: 0.0)

    def resumption(
        self,
        policy: RetryPolicy | None = None,
        *,
        end: float | None = None,
        num_sequences: int = 1,
        chooses: bool = False,
    ) -> Resumption:
        go_on = None if chooses else self.go_on
        attempts = self.attempts(policy, end=end)
        resumption = Resumption("story", self.start, self.resume, go_on, num_sequences, attempts)
        resumption.call()
        return resumption


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def chunk(text: str, *, index: int = 0) -> TokenChunk:
    return TokenChunk(index, 0, (1, 2), text, ())


def go_on(recovery: Resumption | Restart, error: QuireError) -> float:
    delay_s = recovery.delay_after(error)
    recovery.call()
    return delay_s


def test_a_lost_stream_is_resumed_behind_what_came(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    assert resumption.accept(chunk("añ"))
    assert resumption.accept(chunk("b", index=1))
    go_on(resumption, LOST)
    assert gateway.calls == ["start", [(0, 2, 2), (1, 2, 1)]]


def test_the_end_of_a_sequence_is_told_once(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    assert resumption.accept(FINISHED)
    assert not resumption.accept(FINISHED)


def test_a_request_that_broke_on_its_way_in_is_submitted_again(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    go_on(resumption, LOST)
    go_on(resumption, UNKNOWN)
    go_on(resumption, LOST)
    assert gateway.calls == ["start", [], "start", []]


def test_a_request_that_is_known_no_more_is_submitted_anew_with_what_came(gateway: Gateway) -> None:
    resumption = gateway.resumption(num_sequences=2)
    resumption.accept(chunk("añ", index=1))
    resumption.accept(chunk("b", index=1))
    go_on(resumption, LOST)
    go_on(resumption, UNKNOWN)
    assert gateway.calls == ["start", [(1, 4, 3)], [([], 0, 0.0), ([1, 2, 1, 2], 3, 0.0)]]


def test_what_came_has_the_sum_of_its_log_probabilities(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    positions = tuple(PositionLogprobs(Logprob(token_id, -0.5 * token_id, 1), ()) for token_id in (1, 2))
    resumption.accept(TokenChunk(0, 0, (1, 2), "ab", positions))
    go_on(resumption, LOST)
    go_on(resumption, UNKNOWN)
    assert gateway.calls[-1] == [([1, 2], 2, -1.5)]


def test_a_request_that_was_submitted_anew_is_resumed_when_it_is_lost_again(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    resumption.accept(chunk("ab"))
    for error in (LOST, UNKNOWN, LOST, UNKNOWN):
        go_on(resumption, error)
    held, offsets = [([1, 2], 2, 0.0)], [(0, 2, 2)]
    assert gateway.calls == ["start", offsets, held, offsets, held]


def test_a_gateway_that_still_has_the_request_is_asked_to_resume_it(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    resumption.accept(chunk("ab"))
    for error in (LOST, UNKNOWN, AlreadyExists("runs")):
        go_on(resumption, error)
    assert gateway.calls[-1] == [(0, 2, 2)]


def test_a_choice_among_sequences_that_is_known_no_more_is_the_callers_error(gateway: Gateway) -> None:
    resumption = gateway.resumption(chooses=True)
    resumption.accept(chunk("a"))
    go_on(resumption, LOST)
    with pytest.raises(NotFound):
        resumption.delay_after(UNKNOWN)


def test_a_policy_says_how_long_a_lost_stream_tries_to_go_on(gateway: Gateway) -> None:
    resumption = gateway.resumption(RetryPolicy(resume_for_s=90.0))
    go_on(resumption, LOST)
    gateway.now = 89.0
    go_on(resumption, LOST)
    gateway.now = 90.0
    with pytest.raises(Unavailable):
        resumption.delay_after(LOST)
    with pytest.raises(ValueError, match="resume_for_s is -1"):
        RetryPolicy(resume_for_s=-1)


@pytest.mark.parametrize("error", [FULL, UNKNOWN, AlreadyExists("twin")])
def test_a_refused_request_is_the_callers_error(gateway: Gateway, error: QuireError) -> None:
    with pytest.raises(type(error)):
        gateway.resumption().delay_after(error)


def test_with_a_policy_a_refused_request_is_submitted_again_and_a_refused_resumption_resumed(gateway: Gateway) -> None:
    resumption = gateway.resumption(RetryPolicy())
    assert go_on(resumption, FULL) == 2.0
    resumption.accept(chunk("ab"))
    go_on(resumption, LOST)
    assert go_on(resumption, FULL) == 2.0
    assert gateway.calls == ["start", "start", [(0, 2, 2)], [(0, 2, 2)]]


def test_a_lost_stream_that_is_refused_waits_as_the_gateway_says_and_is_resumed(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    resumption.accept(chunk("ab"))
    go_on(resumption, LOST)
    assert [go_on(resumption, FULL) for _ in range(8)] == [2.0] * 8
    assert gateway.calls == ["start"] + [[(0, 2, 2)]] * 9
    resumption.accept(chunk("c"))
    with pytest.raises(ResourceExhausted):
        resumption.delay_after(FULL)


def test_a_request_that_broke_on_its_way_in_and_is_refused_is_submitted_again(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    for error in (LOST, UNKNOWN, FULL):
        go_on(resumption, error)
    assert gateway.calls == ["start", [], "start", "start"]


def test_a_refusal_that_says_a_moment_does_not_hasten_a_lost_stream(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    at_once = ResourceExhausted("full", retry_after_ms=0)
    assert [go_on(resumption, error) for error in (LOST, at_once, at_once)] == [0.05, 0.1, 0.2]


def test_a_lost_stream_that_is_refused_without_a_time_is_the_callers_error(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    go_on(resumption, LOST)
    with pytest.raises(ResourceExhausted):
        resumption.delay_after(ResourceExhausted("too large"))


def test_after_long_refusals_of_a_lost_stream_its_policy_decides(gateway: Gateway) -> None:
    patient, plain = gateway.resumption(RetryPolicy(attempts=None)), gateway.resumption()
    for resumption in (patient, plain):
        gateway.now = 0.0
        go_on(resumption, LOST)
        gateway.now = 28.0
        assert go_on(resumption, FULL) == 2.0
        gateway.now = 28.5
    with pytest.raises(ResourceExhausted):
        plain.delay_after(FULL)
    assert go_on(patient, FULL) == 2.0


def test_waits_grow_and_what_comes_forgives_them(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    assert [go_on(resumption, LOST) for _ in range(7)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    resumption.accept(chunk("a"))
    assert go_on(resumption, LOST) == 0.05


def test_it_is_given_up_when_nobody_answers_for_long(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    go_on(resumption, LOST)
    gateway.now = 29.0
    go_on(resumption, LOST)
    gateway.now = 30.0
    with pytest.raises(Unavailable):
        resumption.delay_after(LOST)


def test_it_is_given_up_when_the_time_of_the_call_is_over(gateway: Gateway) -> None:
    resumption = gateway.resumption(end=1.0)
    go_on(resumption, LOST)
    gateway.now = 0.95
    with pytest.raises(Unavailable):
        resumption.delay_after(LOST)


def test_a_plain_stream_is_started_again_only_while_nothing_came(gateway: Gateway) -> None:
    restart = Restart(gateway.start, gateway.attempts(RetryPolicy(lost_generations=True)))
    go_on(restart, FULL)
    go_on(restart, LOST)
    assert gateway.calls == ["start", "start"]
    restart.accept(chunk("a"))
    for error in (FULL, LOST):
        with pytest.raises(type(error)):
            restart.delay_after(error)
