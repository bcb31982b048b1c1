"""Requests that are one to the caller: how their answer is made."""

import threading
from types import SimpleNamespace

import pytest

from gateway.replicas.events import (
    Chunk,
    Completed,
    Finished,
    FinishReason,
    GeneratedSequence,
    Logprob,
    PositionLogprobs,
    Usage,
)
from gateway.request.generator import MAX_PREPARED, Preparations, answer, answer_event
from quire.rpc.errors import ResourceExhausted

POSITION = PositionLogprobs(Logprob(1, -0.5, 1), tuple(Logprob(token, -0.5, token) for token in range(1, 21)))


class FinishedRequest:
    """A request with so many positions that have log probabilities."""

    def __init__(self, *, of_prompt: int = 0, of_output: int = 0) -> None:
        self.request = SimpleNamespace(logprobs=20 if of_output else None, prompt_logprobs=20 if of_prompt else None)
        self.prompt_logprobs = [POSITION] * of_prompt
        finished = Finished(0, of_output, FinishReason.LENGTH)
        self._sequence = GeneratedSequence([1] * of_output, "", [POSITION] * of_output, finished)

    async def result(self):
        return [self._sequence], Usage(1, 1)


@pytest.mark.parametrize(
    ("live", "event", "in_a_thread"),
    [
        (FinishedRequest(of_prompt=600), Chunk(0, 0, [1], "a", []), True),
        (FinishedRequest(of_prompt=400), Chunk(0, 0, [1], "a", []), False),
        (FinishedRequest(of_prompt=600), Chunk(0, 1, [1], "a", []), False),
        (FinishedRequest(of_prompt=600), Finished(0, 1, FinishReason.STOP), False),
        (FinishedRequest(of_prompt=600), Completed(Usage(1, 1)), True),
        (FinishedRequest(of_output=600), Chunk(0, 1, [1] * 600, "a", [POSITION] * 600), True),
        (FinishedRequest(of_output=600), Chunk(0, 1, [1] * 400, "a", [POSITION] * 400), False),
    ],
)
async def test_a_large_event_of_a_stream_is_made_beside_the_event_loop(live, event, in_a_thread):
    assert (await answer_event(live, event, threading.get_ident) != threading.get_ident()) == in_a_thread


@pytest.mark.parametrize(
    ("requests", "in_a_thread"),
    [
        ([FinishedRequest()], False),
        ([FinishedRequest(of_output=400)], False),
        ([FinishedRequest(of_output=600)], True),
        ([FinishedRequest(of_prompt=600)], True),
        ([FinishedRequest(of_prompt=400), FinishedRequest(of_output=400)], True),
    ],
)
async def test_a_large_answer_is_made_beside_the_event_loop(requests, in_a_thread):
    made = await answer(requests, lambda results: (threading.get_ident(), [usage for _, usage in results]))
    assert made == (made[0], [Usage(1, 1)] * len(requests))
    assert (made[0] != threading.get_ident()) == in_a_thread


def refusal(preparations: Preparations, tenant: str) -> str:
    with pytest.raises(ResourceExhausted) as raised, preparations.hold(tenant, 1):
        pass
    assert raised.value.retry_after_ms
    return raised.value.message


def test_a_tenant_prepares_half_of_what_all_may_and_one_call_in_any_case():
    preparations = Preparations()
    with preparations.hold("a", MAX_PREPARED // 2), preparations.hold("b", 1):
        assert "2,048 prompts of this tenant's calls are prepared" in refusal(preparations, "a")
        with preparations.hold("b", MAX_PREPARED // 2 - 1), preparations.hold("c", 1024):
            assert "5,120 of all" in refusal(preparations, "c")
    with preparations.hold("a", 1), preparations.hold("a", 1):
        pass
