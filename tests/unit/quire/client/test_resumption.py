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
WITH_LOGPROBS = TokenChunk(
    0, 0, (1, 2), "ab", tuple(PositionLogprobs(Logprob(token_id, -0.5 * token_id, 1), ()) for token_id in (1, 2))
)


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

    def attempts(self, policy: RetryPolicy | None = None) -> Attempts:
        return Attempts(policy, CallTime(None, lambda: self.now), False, lambda: 0.0)

    def resumption(
        self, policy: RetryPolicy | None = None, *, num_sequences: int = 1, chooses: bool = False
    ) -> Resumption:
        go_on = None if chooses else self.go_on
        attempts = self.attempts(policy)
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


def play(resumption: Resumption, *steps: TokenChunk | QuireError) -> None:
    """Chunks that come and errors that the stream goes on after."""
    for step in steps:
        if isinstance(step, QuireError):
            go_on(resumption, step)
        else:
            assert resumption.accept(step)


OFFSETS, HELD = [(0, 2, 2)], [([1, 2], 2, 0.0)]


@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        ((chunk("añ"), chunk("b", index=1), LOST), [[(0, 2, 2), (1, 2, 1)]]),
        # The request broke on its way in.
        ((LOST, UNKNOWN, LOST), [[], "start", []]),
        ((LOST, UNKNOWN, FULL), [[], "start", "start"]),
        # No gateway knows the request any more: it is submitted anew with what came.
        (
            (chunk("añ", index=1), chunk("b", index=1), LOST, UNKNOWN),
            [[(1, 4, 3)], [([], 0, 0.0), ([1, 2, 1, 2], 3, 0.0)]],
        ),
        ((WITH_LOGPROBS, LOST, UNKNOWN), [OFFSETS, [([1, 2], 2, -1.5)]]),
        ((chunk("ab"), LOST, UNKNOWN, LOST, UNKNOWN), [OFFSETS, HELD, OFFSETS, HELD]),
        # A gateway still has it.
        ((chunk("ab"), LOST, UNKNOWN, AlreadyExists("runs")), [OFFSETS, HELD, OFFSETS]),
    ],
)
def test_a_lost_stream_goes_on_behind_what_came(
    gateway: Gateway, steps: tuple[TokenChunk | QuireError, ...], calls: list[object]
) -> None:
    two = any(isinstance(step, TokenChunk) and step.sequence_index for step in steps)
    play(gateway.resumption(num_sequences=2 if two else 1), *steps)
    assert gateway.calls == ["start", *calls]


def test_the_end_of_a_sequence_is_told_once_and_a_choice_that_is_known_no_more_is_the_callers_error(
    gateway: Gateway,
) -> None:
    resumption = gateway.resumption(chooses=True)
    assert resumption.accept(FINISHED)
    assert not resumption.accept(FINISHED)
    play(resumption, chunk("a"), LOST)
    with pytest.raises(NotFound):
        resumption.delay_after(UNKNOWN)


@pytest.mark.parametrize("error", [FULL, UNKNOWN, AlreadyExists("twin")])
def test_a_refused_request_is_the_callers_error(gateway: Gateway, error: QuireError) -> None:
    with pytest.raises(type(error)):
        gateway.resumption().delay_after(error)


def test_a_lost_stream_that_is_refused_waits_as_the_gateway_says_and_is_resumed(gateway: Gateway) -> None:
    resumption = gateway.resumption()
    play(resumption, chunk("ab"), LOST)
    assert [go_on(resumption, FULL) for _ in range(8)] == [2.0] * 8
    assert gateway.calls == ["start"] + [OFFSETS] * 9
    resumption.accept(chunk("c"))
    with pytest.raises(ResourceExhausted):
        resumption.delay_after(FULL)
    # No time at all does not hasten it, and none that is said ends it.
    at_once = ResourceExhausted("full", retry_after_ms=0)
    assert [go_on(resumption, error) for error in (LOST, at_once, at_once)] == [0.05, 0.1, 0.2]
    with pytest.raises(ResourceExhausted):
        resumption.delay_after(ResourceExhausted("too large"))


def test_after_long_refusals_of_a_lost_stream_its_policy_decides(gateway: Gateway) -> None:
    patient, plain = gateway.resumption(RetryPolicy(attempts=None)), gateway.resumption()
    assert go_on(patient, FULL) == 2.0
    assert gateway.calls == ["start"] * 3
    for resumption in (patient, plain):
        gateway.now = 0.0
        go_on(resumption, LOST)
        gateway.now = 28.0
        assert go_on(resumption, FULL) == 2.0
        gateway.now = 28.5
    with pytest.raises(ResourceExhausted):
        plain.delay_after(FULL)
    assert go_on(patient, FULL) == 2.0


@pytest.mark.parametrize(
    ("policy", "end", "last_s", "over_s"),
    [
        (None, None, 29.0, 30.0),
        (RetryPolicy(resume_for_s=90.0), None, 89.0, 90.0),
        # The time of the call.
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


def test_a_plain_stream_is_started_again_only_while_nothing_came(gateway: Gateway) -> None:
    restart = Restart(gateway.start, gateway.attempts(RetryPolicy(lost_generations=True)))
    go_on(restart, FULL)
    go_on(restart, LOST)
    assert gateway.calls == ["start", "start"]
    restart.accept(chunk("a"))
    for error in (FULL, LOST):
        with pytest.raises(type(error)):
            restart.delay_after(error)
