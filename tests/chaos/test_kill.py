"""kill -9 of each process under load: clients see a pause, never a lost, repeated or changed token."""

import asyncio

import pytest
import pytest_asyncio

from quire.client import GenerationOptions
from quire.rpc.errors import Unavailable
from tests.support.killing import Streams, TooLateError, until_hit
from tests.support.serving import Served, serving


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(survivor: Served) -> list[tuple[list[int], str]]:
    """What the streams get where no process dies."""
    return await Streams().read(survivor.client)


@pytest.mark.parametrize(
    ("rounds", "durable"),
    [
        ([["worker"]], False),
        ([["scheduler"]], False),
        ([["gateway"]], True),
        pytest.param([["scheduler", "worker"]], False, marks=pytest.mark.extended),
        pytest.param([["worker"], ["worker"]], False, marks=pytest.mark.extended),
    ],
)
async def test_streams_survive_the_loss_of(
    rounds: list[list[str]], durable: bool, served: Served, undisturbed: list[tuple[list[int], str]]
) -> None:
    async def disturbed() -> list[tuple[list[int], str]]:
        streams = Streams(durable=durable)
        async with streams.reading(served) as reading:
            for victims in rounds:
                await streams.advance()
                await streams.kill(served, *victims)
            return await reading

    assert await until_hit(disturbed) == undisturbed


async def test_a_lost_gateway_fails_its_streams_clearly_and_frees_their_blocks() -> None:
    async with serving(num_gpu_blocks=512, reconnect_grace=0.0) as served:

        async def outcomes() -> list[BaseException | None]:
            streams = Streams()
            await served.server.wait_ready()
            reading = [asyncio.create_task(stream.read(served.client)) for stream in streams]
            try:
                await streams.advance()
                async with served.aborting():
                    await streams.kill(served, "gateway")
                    found = await asyncio.gather(*reading, return_exceptions=True)
            except TooLateError:
                await asyncio.gather(*reading)
                raise
            if streams.has_one_ended:
                # Its gateway had sent the end already, which this process had not read.
                raise TooLateError
            return found

        assert all(isinstance(outcome, Unavailable) for outcome in await until_hit(outcomes))
        await served.server.wait_ready()
        answer = await served.client.generate("Once upon a time", GenerationOptions(max_tokens=5))
        assert len(answer.sequences[0].token_ids) == 5
