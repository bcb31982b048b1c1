"""The real worker over loopback gRPC: tokens depend on the sequence, not on how it was computed."""

from pathlib import Path

import pytest

from tests.support.tiny_causal_lm import TinyCausalLM
from tests.support.worker_client import StepClient, attached_client, ints, make_assign, make_batch
from tests.support.worker_server import running_worker

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9]


def greedy(model: TinyCausalLM, prompt: list[int], count: int) -> list[int]:
    """The continuation by the definition of the model."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.naive_logits(tokens).argmax()))
    return tokens[len(prompt) :]


async def generate(
    client: StepClient, row: int, blocks: list[int], count: int, chunk: int, **sampling: object
) -> list[int]:
    """Prefills PROMPT in chunks and decodes `count` tokens, two steps in flight."""
    assign, computed, sent, produced = [make_assign(row, PROMPT, blocks, **sampling)], 0, 0, []
    while len(produced) < count:
        while sent - len(produced) < 2 and sent < count + len(PROMPT):
            new = min(chunk, max(len(PROMPT) - computed, 1))
            ends_prompt = computed + new >= len(PROMPT)
            samples = None if ends_prompt else []
            await client.send(client.step(assign=assign, batch=make_batch([row], [new], [computed], samples)))
            assign, computed = [], computed + new
            if ends_prompt:
                sent += 1
            else:
                assert not ints((await client.result()).rows)
        result = await client.result()
        assert ints(result.rows) == [row]
        produced += ints(result.token_ids)
    while sent > len(produced):
        await client.result()
        sent -= 1
    return produced


@pytest.mark.parametrize("chunk", [1, 2, 4, 9])
async def test_greedy_tokens_are_those_of_the_model_at_any_chunk_size(tmp_path: Path, chunk: int) -> None:
    expected = greedy(TinyCausalLM(), PROMPT, 20)
    async with running_worker(tmp_path) as address, attached_client(address, 1) as client:
        assert await generate(client, 3, [7, 2, 9, 30, 11, 5, 1, 0, 22], 20, chunk) == expected
