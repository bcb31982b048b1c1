"""Beam search: what the scheduler is asked, and how hypotheses that come all at once reach a client."""

import asyncio
from typing import Any

import pytest

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from tests.support.fake_scheduler import Hypothesis
from tests.support.gateway_process import stream_request
from tests.support.rig import EOS, TOKENIZER
from tests.support.stream_parts import parts_of

TEXTS = ["The fox ran home.", "The fox slept.", "A fox."]


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


HYPOTHESES = [
    Hypothesis([*ids_of(text), EOS] if number else ids_of(text), -1.5 * (number + 1), EOS if number else None)
    for number, text in enumerate(TEXTS)
]


def beam_search(beam_width=4, *, n=None, best_of=None, **fields):
    beam = common_pb2.BeamSearchParameters(beam_width=beam_width, **fields)
    return common_pb2.SamplingParameters(beam_search=beam, n=n, best_of=best_of)


async def delivered(call, scheduler, hypotheses) -> Any:
    """What the call answers once the scheduler has these hypotheses."""
    answering = asyncio.ensure_future(parts_of(call) if hasattr(call, "__aiter__") else call)
    await scheduler.until(lambda: scheduler.live)
    (handle,) = scheduler.live
    scheduler.deliver(handle, hypotheses)
    async with asyncio.timeout(30):
        return await answering


@pytest.fixture
def quiet(scheduler):
    """A scheduler that says nothing of its own accord, as during a search."""
    scheduler.emits.clear()
    return scheduler


async def test_given_values_reach_the_scheduler(gateway, quiet):
    sampling = beam_search(3, n=2, best_of=3, length_penalty=-0.5, early_stopping=common_pb2.EARLY_STOPPING_NEVER)
    await delivered(gateway.generation.GenerateStream(stream_request(sampling=sampling)), quiet, HYPOTHESES[:2])
    submit = quiet.submits[0].sampling
    assert (submit.n, submit.best_of) == (2, 3)
    assert submit.beam_search == sampling.beam_search


async def test_hypotheses_become_the_sequences_of_a_whole_answer(gateway, quiet):
    request = generation_pb2.GenerateRequest(text="hello", sampling=beam_search(4, n=3))
    answer = await delivered(gateway.generation.Generate(request), quiet, HYPOTHESES)
    assert [sequence.index for sequence in answer.sequences] == [0, 1, 2]
    assert [sequence.text for sequence in answer.sequences] == TEXTS
    assert [list(sequence.token_ids) for sequence in answer.sequences] == [each.token_ids for each in HYPOTHESES]
    assert [sequence.cumulative_logprob for sequence in answer.sequences] == [-1.5, -3.0, -4.5]
    reasons = [sequence.finish_reason for sequence in answer.sequences]
    assert reasons == [common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_STOP]
    assert [sequence.stop_token_id for sequence in answer.sequences[1:]] == [EOS, EOS]
    assert answer.usage.generated_tokens == sum(len(each.token_ids) for each in HYPOTHESES)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_hypotheses_become_the_sequences_of_a_stream_also_if_their_scheduler_was_lost(gateway, quiet, is_lost):
    call = gateway.generation.GenerateStream(stream_request(sampling=beam_search(4, n=3)))
    if is_lost:
        await quiet.until(lambda: quiet.live)
        await quiet.restart()
        await quiet.until(lambda: len(quiet.submits) == 2)
        first, second = quiet.submits
        assert (list(second.emitted), second.sampling) == ([], first.sampling)
    parts = await delivered(call, quiet, HYPOTHESES)
    assert [parts[index].text for index in range(3)] == TEXTS
    assert [parts[index].token_ids for index in range(3)] == [each.token_ids for each in HYPOTHESES]
    assert [parts[index].finished.cumulative_logprob for index in range(3)] == [-1.5, -3.0, -4.5]


async def test_logprobs_of_hypotheses_go_to_their_tokens(gateway, quiet):
    hypotheses = [Hypothesis([60, 61], -0.75, logprobs=[-0.5, -0.25]), Hypothesis([62], -1.0, logprobs=[-1.0])]
    request = generation_pb2.GenerateRequest(
        text="hello", sampling=beam_search(2, n=2), output=common_pb2.OutputOptions(logprobs=0)
    )
    answer = await delivered(gateway.generation.Generate(request), quiet, hypotheses)
    reported = [[entry.chosen.logprob for entry in sequence.logprobs] for sequence in answer.sequences]
    assert reported == [[-0.5, -0.25], [-1.0]]
    assert [sequence.cumulative_logprob for sequence in answer.sequences] == [-0.75, -1.0]
