"""The real worker over loopback gRPC: tokens depend on the sequence, not on how it was computed."""

from pathlib import Path

import numpy as np
import pytest
import torch

from quire.messages.arrays import decode_logprobs, encode_int32
from quire.worker.v1 import worker_pb2
from tests.support.logprobs import lines_by_row
from tests.support.tiny_causal_lm import TinyCausalLM
from tests.support.worker_client import StepClient, attached_client, ints, make_assign, make_batch
from tests.support.worker_server import running_worker

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9]


BLOCKS = [7, 2, 9, 30, 11, 5, 1, 0, 22]


@pytest.mark.parametrize(("chunk", "count"), [(2, 2), (9, 2), (9, 0)])
async def test_prompt_logprobs_are_those_of_the_model_and_never_take_all_logits_at_once(
    tmp_path: Path, chunk: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_svc.sampling.logprobs.PIECE", 3)
    model, reports, widths = TinyCausalLM(), [], []

    def watch(logits: torch.Tensor) -> torch.Tensor:
        widths.append(len(logits))
        return logits

    async with running_worker(tmp_path, model) as address, attached_client(address, 1) as client:
        model.change_logits = watch
        assign = [make_assign(3, PROMPT, BLOCKS, prompt_logprobs=count, repetition_penalty=2.0, temperature=2.0)]
        other = make_assign(2, PROMPT, [12, 13, 14])
        for start in range(0, len(PROMPT), chunk):
            new = min(chunk, len(PROMPT) - start)
            batch = make_batch([2, 3], [new, new], [start, start], [])
            result = await client.run(assign=[*assign, other] if start == 0 else [], batch=batch)
            reports += result.prompt_logprobs
    assert (sum(widths), max(widths)) == (len(PROMPT) - 1, min(chunk, 3))
    columns = [decode_logprobs(report) for report in reports]
    chosen, ranks, top_ids, top_values = (
        np.concatenate([getattr(each, name) for each in columns])
        for name in ("chosen_logprobs", "chosen_ranks", "top_token_ids", "top_logprobs")
    )
    assert {report.row for report in reports} == {3}
    assert [report.first_position for report in reports] == list(range(1, len(PROMPT), chunk))[: len(reports)]
    assert [each for column in columns for each in column.top_counts] == [count] * (len(PROMPT) - 1)
    for place, position in enumerate(range(1, len(PROMPT))):
        expected = model.naive_logits(PROMPT[:position]).log_softmax(0)
        top, of_place = expected.topk(count), slice(place * count, (place + 1) * count)
        assert chosen[place] == pytest.approx(float(expected[PROMPT[position]]), abs=1e-4)
        assert ranks[place] == int((expected > expected[PROMPT[position]]).sum()) + 1
        assert top_ids[of_place].tolist() == top.indices.tolist()
        np.testing.assert_allclose(top_values[of_place], top.values, atol=1e-4)


@pytest.mark.parametrize("chunk", [2, 9])
async def test_a_row_whose_prompt_has_bad_logits_fails_when_it_samples(tmp_path: Path, chunk: int) -> None:
    """In whichever chunk the position is, and until another sequence gets the row."""
    model = TinyCausalLM()
    healthy = int(model.naive_logits(PROMPT).argmax())
    spoilt = model.naive_logits(PROMPT[:3])

    def spoil(logits: torch.Tensor) -> torch.Tensor:
        logits[(logits - spoilt).abs().amax(dim=1) < 1e-3] = torch.inf
        return logits

    async def prefill(client: StepClient) -> worker_pb2.StepResult:
        """Rows 2 and 3 have the same prompt; row 3 requests its log probabilities, and row 4 samples from it too."""
        assign = [make_assign(2, PROMPT, [12, 13, 14]), make_assign(3, PROMPT, BLOCKS, prompt_logprobs=2, logprobs=1)]
        result = worker_pb2.StepResult()
        for start in range(0, len(PROMPT), chunk):
            new = min(chunk, len(PROMPT) - start)
            is_last = start + new == len(PROMPT)
            batch = make_batch([2, 3], [new, new], [start, start], [(2, 2), (3, 3), (4, 3)] if is_last else [])
            fork = encode_int32([3, 4]) if is_last else b""
            result = await client.run(assign=assign if start == 0 else [], fork=fork, batch=batch)
            assert is_last or not result.failures
        return result

    async with running_worker(tmp_path, model) as address, attached_client(address, 1) as client:
        model.change_logits = spoil
        bad = await prefill(client)
        assert [failure.row for failure in bad.failures] == [3, 4]
        assert bad.failures[0].reason == worker_pb2.ROW_FAILURE_REASON_NON_FINITE_LOGITS
        assert (ints(bad.rows), ints(bad.token_ids), lines_by_row(bad)) == ([2, 3, 4], [healthy, 0, 0], {})
        model.change_logits = lambda logits: logits
        await client.run(release=encode_int32([2, 3, 4]), batch=make_batch([], [], []))
        good = await prefill(client)
        assert not good.failures
        assert ints(good.token_ids) == [healthy] * 3
