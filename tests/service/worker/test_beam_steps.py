"""Beam search through the real worker's step stream: forks onto held rows, chosen tokens and copies in one step."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from quire.arrays import encode_int32
from tests.support.beam_rows import BeamRows, Ranked, ranked
from tests.support.tiny_causal_lm import TinyCausalLM
from tests.support.worker_client import StepClient, attached_client, make_assign, make_batch
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
