"""Probes whether a gateway serves: sends it a request of one token until that succeeds."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.client import AsyncClient, GenerationOptions
from quire.model_files.progress import STARTING, LoadProgress
from quire.rpc.channel import open_channel
from quire.rpc.errors import QuireError, ResourceExhausted, Unavailable, Unimplemented

_ONE_TOKEN = GenerationOptions(max_tokens=1, temperature=0.0)
_CANARY_RETRY_S = 0.05
_PROGRESS_EVERY_S = 5.0
_DRAW_EVERY_S = 0.25


async def wait_until_served(
    address: str,
    models: Sequence[str | None],
    api_key: str | None,
    report: Callable[[str], None],
    progress: Callable[[str], None] | None,
) -> None:
    """Sends a request of one token to each model until it succeeds; reports the wait meanwhile. The name None is of the
    only model.

    Raises:
        QuireError: the request failed although a process serves and is not busy.
    """
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    async with AsyncClient(address, api_key=api_key) as client:
        found: list[LoadProgress] = []
        every_s = _PROGRESS_EVERY_S if progress is None else _DRAW_EVERY_S
        tasks = [
            asyncio.create_task(_send_until_they_succeed(client, address, models)),
            asyncio.create_task(_follow(client, found, every_s)),
        ]
        sending = tasks[0]
        try:
            while not (await asyncio.wait([sending], timeout=every_s))[0]:
                what = found[-1] if found else STARTING
                (progress or report)(f"loading the model: {what} ({loop.time() - started_at:.0f} s)")
            await sending
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _follow(client: AsyncClient, found: list[LoadProgress], every_s: float) -> None:
    """Polls the gateway for the progress of its replica, which comes with the refusal of a call. Polls no more often
    than the display needs: each call takes time of the processors that load the model."""
    while True:
        await asyncio.sleep(every_s / 2)
        try:
            await client.server_info()
        except QuireError as error:
            if (loading := LoadProgress.of_metadata(error.metadata)) is not None:
                found[:] = [loading]


async def _send_until_they_succeed(client: AsyncClient, address: str, models: Sequence[str | None]) -> None:
    for model in models:
        await _send_until_it_succeeds(client, address, model)


async def _send_until_it_succeeds(client: AsyncClient, address: str, model: str | None) -> None:
    while True:
        try:
            await _wait_until_healthy(address)
            if model is not None:
                # Known from the time when its workers were first loaded.
                await client.get_model(model)
            await client.generate([0], _ONE_TOKEN, model=model)
            return
        except (Unavailable, ResourceExhausted):
            await asyncio.sleep(_CANARY_RETRY_S)
        except Unimplemented as error:
            # The model gives vectors of texts. A gateway says so once it knows a scheduler whose workers are loaded.
            if error.reason != "WRONG_KIND_OF_MODEL":
                raise
            return


async def _wait_until_healthy(address: str) -> None:
    """Returns when the gateway reports that it serves, or breaks the call off."""
    async with open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with suppress(grpc.aio.AioRpcError):
            async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                if answer.status == answer.SERVING:
                    return
