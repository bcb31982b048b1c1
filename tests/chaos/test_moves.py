"""A replica is drained while streams run: they continue at the other one, which fetches their blocks, and have the same
output as undisturbed, whatever dies meanwhile."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from quire.client import GenerationOptions
from quire_cli.drain import main as drain
from tests.support.killing import Outputs, Stream
from tests.support.processes import until_true
from tests.support.two_replicas import TwoReplicas, ended, two_replicas

pytestmark = pytest.mark.extended
NUM_STREAMS = 4


def options_of(index: int) -> GenerationOptions:
    return GenerationOptions(
        temperature=float(index % 2), seed=index, n=1 + index % 4 // 3, max_tokens=500, ignore_eos=True
    )


def make_streams(prompt: str = "Once upon a time") -> list[Stream]:
    return [
        Stream(index, options_of(index), durable=index % 3 == 0, prompt=f"{index} {prompt}")
        for index in range(NUM_STREAMS)
    ]


async def read(replicas: TwoReplicas, streams: list[Stream]) -> Outputs:
    await asyncio.gather(*(stream.read(replicas.client) for stream in streams))
    return [(stream.outputs, stream.texts) for stream in streams]


@pytest_asyncio.fixture
async def replicas(tmp_path: Path) -> AsyncIterator[TwoReplicas]:
    async with two_replicas(tmp_path, "--multi-step-ms=0") as running:
        yield running


async def test_streams_of_a_drained_replica_go_on_at_the_other_one(replicas: TwoReplicas) -> None:
    streams = make_streams()
    reading = asyncio.create_task(read(replicas, streams))
    await until_true(lambda: all(len(each.token_ids) >= 20 for each in streams), timeout_s=100)
    assert await asyncio.to_thread(drain, [replicas.socket("scheduler-0")]) == 0
    assert not all(stream.has_ended for stream in streams), "nothing had to move"
    # Only the other replica, which has all of it cached or not.
    assert await reading == await read(replicas, make_streams())
    moved, fetched = await replicas.metrics(0), await replicas.metrics(1)
    assert moved['quire_scheduler_moved_requests_total{direction="out"}'] > 0
    assert fetched['quire_scheduler_moved_blocks_total{outcome="fetched",source="replica"}'] > 0
    assert fetched['quire_scheduler_moved_blocks_total{outcome="failed",source="replica"}'] == 0
    replicas.signal("scheduler-0", signal.SIGTERM)
    assert await ended(replicas.processes["scheduler-0"]) == 0


LONG = " ".join(["Once upon a time there was a little girl who had a red ball"] * 10)


@pytest.mark.parametrize(
    "killed", [pytest.param(each, marks=pytest.mark.long) for each in ("worker-0", None, "worker-1")]
)
async def test_streams_with_long_prompts_move_from_prefill_to_decode_whatever_dies(
    tmp_path: Path, killed: str | None
) -> None:
    # In bfloat16: values that are computed twice are rounded equally.
    flags = ("--multi-step-ms=0", "--dtype=bfloat16")
    async with two_replicas(tmp_path, *flags, roles=("prefill", "decode")) as replicas:
        streams = make_streams(LONG)
        reading = asyncio.create_task(read(replicas, streams))
        await until_true(lambda: any(each.token_ids for each in streams), timeout_s=100)
        if killed is not None:
            replicas.signal(killed, signal.SIGKILL)
            await ended(replicas.processes[killed])
            replicas.start_again(killed)
        outputs = await reading
        fetched = (await replicas.metrics(1)).get(
            'quire_scheduler_moved_blocks_total{outcome="fetched",source="replica"}', 0
        )
        assert fetched > 0 or killed is not None
        # Only one replica, where no request moves.
        assert await asyncio.to_thread(drain, [replicas.socket("scheduler-0")]) == 0
        assert outputs == await read(replicas, make_streams(LONG))
