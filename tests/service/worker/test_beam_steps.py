"""Beam search through the real worker's step stream: forks onto held rows, chosen tokens and copies in one step."""

import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from quire.arrays import encode_int32
from tests.support.beam_rows import BeamRows, Ranked, ranked
from tests.support.logprobs import lines_by_row
from tests.support.tiny_causal_lm import VOCAB_SIZE, TinyCausalLM
from tests.support.worker_client import StepClient, attached_client, ints, make_assign, make_batch
from tests.support.worker_server import running_worker

PROMPT = [3, 14, 15, 9, 26]
WIDTH = 4


@pytest.fixture
def model() -> TinyCausalLM:
    return TinyCausalLM()


@pytest.fixture
async def client(tmp_path: Path, model: TinyCausalLM) -> AsyncIterator[StepClient]:
    async with running_worker(tmp_path, model) as address, attached_client(address, 1) as client:
        yield client


def naive_beams(model: TinyCausalLM, width: int, count: int) -> list[tuple[list[int], float]]:
    """Beam search by its definition: no blocks, no rows, no end."""
    beams = [(PROMPT, 0.0)]
    for _ in range(count):
        joined = [
            ([*tokens, token_id], score + logprob)
            for tokens, score in beams
            for token_id, logprob in enumerate(model.naive_logits(tokens).log_softmax(0).tolist())
        ]
        beams = sorted(joined, key=lambda each: -each[1])[:width]
    return beams


def assert_best_of(reported: Ranked, scores: torch.Tensor) -> None:
    """The report is the top of these log probabilities."""
    expected = scores.topk(len(reported))
    assert [token_id for token_id, _ in reported] == expected.indices.tolist()
    assert [logprob for _, logprob in reported] == pytest.approx(expected.values.tolist(), abs=1e-4)


async def test_the_samples_of_one_prompt_report_the_same_candidates_each_under_its_row(
    client: StepClient, model: TinyCausalLM
) -> None:
    reported = await BeamRows(client, WIDTH, 2 * WIDTH).begin(PROMPT)
    assert_best_of(reported[0], model.naive_logits(PROMPT).log_softmax(0))
    assert all(each == reported[0] for each in reported)


@pytest.mark.parametrize("rotation", [0, 1, 3])
async def test_beams_are_those_of_the_definition_wherever_they_go(
    client: StepClient, model: TinyCausalLM, rotation: int
) -> None:
    """With a rotation nearly every beam moves to a row that another leaves in the same step."""
    rows = BeamRows(client, WIDTH, 2 * WIDTH)
    reported = await rows.begin(PROMPT)
    for _ in range(12):
        best = rows.best(reported)
        reported = await rows.advance(best[rotation:] + best[:rotation])
        for beam, candidates in zip(rows.beams, reported, strict=True):
            assert_best_of(candidates, model.naive_logits(beam.tokens).log_softmax(0))
    found = sorted(rows.beams, key=lambda beam: -beam.score)
    expected = naive_beams(model, WIDTH, 12)
    assert [beam.tokens for beam in found] == [tokens for tokens, _ in expected]
    assert [beam.score for beam in found] == pytest.approx([score for _, score in expected], abs=1e-3)


async def test_two_beams_change_rows_and_a_third_follows_in_one_step(client: StepClient, model: TinyCausalLM) -> None:
    rows = BeamRows(client, 3, 3)
    reported = await rows.begin(PROMPT)
    await rows.advance([(0, token_id, 0.0) for token_id, _ in reported[0]])
    before = [beam.tokens for beam in rows.beams]
    reported = await rows.advance([(1, 7, 0.0), (0, 8, 0.0), (1, 9, 0.0)])
    after = [[*before[1], 7], [*before[0], 8], [*before[1], 9]]
    for tokens, candidates in zip(after, reported, strict=True):
        assert_best_of(candidates, model.naive_logits(tokens).log_softmax(0))


async def test_a_beam_takes_the_row_of_a_sequence_of_another_kind_and_length(
    client: StepClient, model: TinyCausalLM
) -> None:
    await client.run(
        assign=[
            make_assign(0, PROMPT, [0, 1], num_candidates=3),
            make_assign(1, [*PROMPT, *PROMPT], [2, 3, 4], temperature=1.0, seed=5, repetition_penalty=3.0),
        ],
        batch=make_batch([0, 1], [5, 10], [0, 0]),
    )
    result = await client.run(
        cache_operations={"copy": encode_int32([1, 8])},
        fork=encode_int32([0, 1]),
        set_tokens=[{"row": 1, "position": 5, "token_ids": encode_int32([7])}],
        block_table_deltas=encode_int32([1, 1, 8]),
        batch=make_batch([1], [1], [5]),
    )
    (candidates,) = result.candidates
    assert candidates.row == 1
    assert_best_of(ranked(candidates), model.naive_logits([*PROMPT, 7]).log_softmax(0))


async def test_a_beam_and_a_drawing_row_share_a_step(client: StepClient, model: TinyCausalLM) -> None:
    result = await client.run(
        assign=[
            make_assign(0, PROMPT, [0, 1], num_candidates=2),
            make_assign(1, PROMPT[:3], [2], logprobs=1),
            make_assign(2, PROMPT[:4], [3], num_candidates=5),
        ],
        batch=make_batch([1, 0, 2], [3, 5, 4], [0, 0, 0]),
    )
    token_id = int(model.naive_logits(PROMPT[:3]).argmax())
    assert ints(result.token_ids) == [token_id, 0, 0]
    assert {row: line.top_token_ids for row, line in lines_by_row(result).items()} == {1: [token_id]}
    assert [(each.row, len(ints(each.token_ids))) for each in result.candidates] == [(0, 2), (2, 5)]
    assert_best_of(ranked(result.candidates[1]), model.naive_logits(PROMPT[:4]).log_softmax(0))


@pytest.mark.parametrize("asked", [VOCAB_SIZE - 1, VOCAB_SIZE, 1000])
async def test_candidates_may_be_the_whole_vocabulary(client: StepClient, asked: int) -> None:
    (reported, _) = await BeamRows(client, 2, asked).begin(PROMPT)
    assert len(reported) == min(asked, VOCAB_SIZE)
    assert len({token_id for token_id, _ in reported}) == len(reported)
    logprobs = [logprob for _, logprob in reported]
    assert logprobs == sorted(logprobs, reverse=True)
    assert sum(map(math.exp, logprobs)) == pytest.approx(1.0, abs=0.05)


async def test_banned_tokens_are_reported_last_with_minus_infinity(client: StepClient, model: TinyCausalLM) -> None:
    """Stop tokens before min_tokens, counted from the end of the prompt along each beam."""
    stop = model.naive_logits(PROMPT).topk(3).indices.tolist()
    rows = BeamRows(client, 2, VOCAB_SIZE)
    first = await rows.begin(PROMPT, min_tokens=1, stop_token_ids=stop)
    for reported in first:
        assert reported[-3:] == [(token_id, -math.inf) for token_id in sorted(stop)]
        assert all(math.isfinite(logprob) for _, logprob in reported[:-3])
        assert_best_of(reported[:4], model.naive_logits(PROMPT).log_softmax(0).index_fill(0, torch.tensor(stop), -100))
    second = await rows.advance(rows.best(first))
    for beam, reported in zip(rows.beams, second, strict=True):
        assert_best_of(reported, model.naive_logits(beam.tokens).log_softmax(0))


async def test_each_beam_is_penalised_by_its_own_tokens(client: StepClient, model: TinyCausalLM) -> None:
    rows = BeamRows(client, 3, 6)
    reported = await rows.begin(PROMPT, repetition_penalty=1.8)
    for _ in range(6):
        reported = await rows.advance(rows.best(reported))
        for beam, candidates in zip(rows.beams, reported, strict=True):
            scores = model.naive_logits(beam.tokens).log_softmax(0)
            seen = torch.tensor(sorted(set(beam.tokens)))
            scores[seen] = scores[seen] * 1.8
            assert_best_of(candidates, scores)
