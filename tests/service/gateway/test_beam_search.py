"""Beam search: what the scheduler is asked, and how hypotheses that come all at once reach a client."""

import asyncio
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from quire.model_source import resolve_model
from tests.support.fake_scheduler import Hypothesis
from tests.support.gateway_process import stream_request

TOKENIZER = Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))
EOS = TOKENIZER.get_vocab()["</s>"]
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
    answering = asyncio.ensure_future(events_of(call) if hasattr(call, "__aiter__") else call)
    await scheduler.until(lambda: scheduler.live)
    (handle,) = scheduler.live
    scheduler.deliver(handle, hypotheses)
    async with asyncio.timeout(30):
        return await answering


async def events_of(call):
    return [response async for response in call]


def by_sequence(responses, count):
    """Text, token ids and end of each sequence; checks that there is no gap, and that each ends once."""
    found: list[tuple[str, list[int], Any]] = [("", [], None)] * count
    for response in responses[:-1]:
        if response.WhichOneof("event") == "chunk":
            chunk = response.chunk
            text, ids, finished = found[chunk.sequence_index]
            assert finished is None
            assert chunk.offset == len(ids)
            found[chunk.sequence_index] = (text + chunk.text, [*ids, *chunk.token_ids], None)
        else:
            text, ids, finished = found[response.finished.sequence_index]
            assert finished is None
            found[response.finished.sequence_index] = (text, ids, response.finished)
    assert responses[-1].WhichOneof("event") == "completed"
    return found


@pytest.fixture
def quiet(scheduler):
    """A scheduler that says nothing of its own accord, as during a search."""
    scheduler.emits.clear()
    return scheduler


@pytest.mark.parametrize("early_stopping", ["FALSE", "TRUE", "NEVER"])
async def test_given_values_reach_the_scheduler(gateway, quiet, early_stopping):
    value = common_pb2.EarlyStopping.Value(f"EARLY_STOPPING_{early_stopping}")
    sampling = beam_search(3, n=2, best_of=3, length_penalty=-0.5, early_stopping=value)
    await delivered(gateway.generation.GenerateStream(stream_request(sampling=sampling)), quiet, HYPOTHESES[:2])
    submit = quiet.submits[0].sampling
    assert (submit.n, submit.best_of) == (2, 3)
    assert (submit.beam_search.length_penalty, submit.beam_search.early_stopping) == (-0.5, value)


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


async def test_hypotheses_become_the_sequences_of_a_stream(gateway, quiet):
    request = stream_request(sampling=beam_search(4, n=3))
    responses = await delivered(gateway.generation.GenerateStream(request), quiet, HYPOTHESES)
    sequences = by_sequence(responses, 3)
    assert [text for text, _, _ in sequences] == TEXTS
    assert [ids for _, ids, _ in sequences] == [each.token_ids for each in HYPOTHESES]
    assert [finished.cumulative_logprob for _, _, finished in sequences] == [-1.5, -3.0, -4.5]
    assert responses[-1].completed.usage.generated_tokens == sum(len(each.token_ids) for each in HYPOTHESES)


async def test_logprobs_of_hypotheses_go_to_their_tokens(gateway, quiet):
    hypotheses = [Hypothesis([60, 61], -0.75, logprobs=[-0.5, -0.25]), Hypothesis([62], -1.0, logprobs=[-1.0])]
    request = generation_pb2.GenerateRequest(
        text="hello", sampling=beam_search(2, n=2), output=common_pb2.OutputOptions(logprobs=0)
    )
    answer = await delivered(gateway.generation.Generate(request), quiet, hypotheses)
    reported = [[entry.chosen.logprob for entry in sequence.logprobs] for sequence in answer.sequences]
    assert reported == [[-0.5, -0.25], [-1.0]]
    assert [sequence.cumulative_logprob for sequence in answer.sequences] == [-0.75, -1.0]


async def test_a_search_survives_the_loss_of_its_scheduler(gateway, quiet):
    request = stream_request(sampling=beam_search(4, n=3))
    reading = asyncio.create_task(events_of(gateway.generation.GenerateStream(request)))
    await quiet.until(lambda: quiet.live)
    await quiet.restart()
    await quiet.until(lambda: len(quiet.submits) == 2 and quiet.live)
    (handle,) = quiet.live
    quiet.deliver(handle, HYPOTHESES)
    async with asyncio.timeout(30):
        assert [text for text, _, _ in by_sequence(await reading, 3)] == TEXTS
    first, second = quiet.submits
    assert not second.emitted
    assert second.sampling == first.sampling
