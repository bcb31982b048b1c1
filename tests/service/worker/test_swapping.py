"""Swapping through the real worker's step stream: a sequence goes on, bit for bit, as if it had never left."""

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from quire.arrays import encode_int32
from quire.worker.v1 import worker_pb2
from tests.support.logprobs import Line, lines_by_row
from tests.support.worker_client import StepClient, attached_client, ints, make_assign, make_batch
from tests.support.worker_server import running_worker

PROMPT = [3, 1, 4, 1, 5, 9]
OTHER = [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]
# A log probability is a whole float32, so that equal ones mean equal keys and values.
SAMPLING = {"logprobs": 5, "temperature": 1.0, "seed": 11}
Answers = list[tuple[int, Line]]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[StepClient]:
    async with running_worker(tmp_path) as address, attached_client(address, 1) as client:
        yield client


def operations(**pairs: Iterable[tuple[int, int]]) -> worker_pb2.CacheOperations:
    return worker_pb2.CacheOperations(
        **{name: encode_int32([number for pair in values for number in pair]) for name, values in pairs.items()}
    )


def answers(result: worker_pb2.StepResult, *rows: int) -> Answers:
    """The token and log probabilities of each row, without the row's number."""
    lines = lines_by_row(result)
    tokens = zip(ints(result.rows), ints(result.token_ids), strict=True)
    found = {row: (token_id, lines[row]) for row, token_id in tokens}
    return [found[row] for row in rows]


async def begin(client: StepClient, row: int, blocks: list[int], prompt: list[int] = PROMPT) -> Answers:
    assign = make_assign(row, prompt, blocks, **SAMPLING)
    return answers(await client.run(assign=[assign], batch=make_batch([row], [len(prompt)], [0])), row)


async def go_on(client: StepClient, row: int, start: int, count: int) -> Answers:
    found: Answers = []
    for position in range(start, start + count):
        found += answers(await client.run(batch=make_batch([row], [1], [position])), row)
    return found


async def undisturbed(client: StepClient, count: int, prompt: list[int] = PROMPT) -> Answers:
    """The first `count` answers of a sequence that nothing happens to; its row and blocks are free afterwards."""
    found = await begin(client, 7, [30, 31, 32, 33], prompt)
    found += await go_on(client, 7, len(prompt), count - 1)
    await client.run(release=encode_int32([7]))
    return found


def resumed(row: int, prompt: list[int], found: Answers, blocks: list[int]) -> worker_pb2.AssignRow:
    """The assignment that puts a sequence back with all tokens it has."""
    assign = make_assign(row, [*prompt, *(token_id for token_id, _ in found)], blocks, **SAMPLING)
    assign.num_prompt_tokens = len(prompt)
    return assign


@pytest.mark.parametrize("kept", [1, 2, 3, 6])
async def test_a_swapped_sequence_goes_on_in_other_blocks_bit_for_bit(client: StepClient, kept: int) -> None:
    expected = await undisturbed(client, 10)
    found = await begin(client, 0, [2, 9, 4])
    found += await go_on(client, 0, len(PROMPT), kept - 1)
    num_tokens = len(PROMPT) + kept
    # The last token's keys and values are not computed yet, so its block may not exist.
    held = [2, 9, 4][: -(-(num_tokens - 1) // 4)]
    host = [5, 0, 11][: len(held)]
    new = [17, 3, 20, 21]
    # Out, and the same blocks are overwritten by another sequence in the very step.
    await client.run(
        cache_operations=operations(swap_out=zip(held, host, strict=True)),
        release=encode_int32([0]),
        assign=[make_assign(0, OTHER, [2, 9, 4])],
        batch=make_batch([0], [len(OTHER)], [0]),
    )
    result = await client.run(
        cache_operations=operations(swap_in=zip(host, new[: len(held)], strict=True)),
        assign=[resumed(3, PROMPT, found, new)],
        batch=make_batch([3], [1], [num_tokens - 1]),
    )
    found += answers(result, 3)
    found += await go_on(client, 3, num_tokens, 10 - len(found))
    assert found == expected


async def run_pair(client: StepClient, tables: list[list[int]], *, swapped: bool) -> list[Answers]:
    """Six answers of each of two sequences that share a block, at rows 0 and 1; swapped after the first, or not.

    The steps are alike either way, since a batch of two may round otherwise than two batches of one.
    """
    prompts = [PROMPT, [*PROMPT[:4], 7, 7, 7]]
    (shared, own, further), (_, other_own, other_further) = tables
    found = [await begin(client, 0, [shared, own], prompts[0]), []]
    sharing = make_assign(1, prompts[1], [shared, other_own], **SAMPLING)
    found[1] += answers(await client.run(assign=[sharing], batch=make_batch([1], [3], [4])), 1)
    changes = {}
    if swapped:
        await client.run(
            cache_operations=operations(swap_out=[(shared, 4), (own, 5), (other_own, 6)]),
            release=encode_int32([0, 1]),
            assign=[make_assign(4, OTHER, [other_own, shared, own])],
            batch=make_batch([4], [len(OTHER)], [0]),
        )
        changes = {
            "cache_operations": operations(swap_in=[(4, 14), (5, 15), (6, 16)]),
            "assign": [resumed(0, prompts[0], found[0], [14, 15]), resumed(1, prompts[1], found[1], [14, 16])],
        }
    deltas = encode_int32([0, 2, further, 1, 2, other_further])
    for step in range(5):
        batch = make_batch([0, 1], [1, 1], [6 + step, 7 + step])
        result = await client.run(**changes, batch=batch)
        changes = {"block_table_deltas": deltas} if step == 0 else {}
        for row, answer in enumerate(answers(result, 0, 1)):
            found[row].append(answer)
    await client.run(release=encode_int32([0, 1]))
    return found


async def test_a_shared_block_is_swapped_once_and_both_sequences_go_on(client: StepClient) -> None:
    expected = await run_pair(client, [[30, 31, 32], [30, 33, 34]], swapped=False)
    assert await run_pair(client, [[2, 9, 18], [2, 10, 19]], swapped=True) == expected
