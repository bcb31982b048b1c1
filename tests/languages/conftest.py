"""A server of two gateways for clients in other languages. `make test-languages` sets the variable; without it no test
here is collected, since compilers are no part of the tiers."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest_asyncio

from gateway.auth.keys import make_key
from quire.client import AsyncClient
from tests.support.serving import Served, serving

collect_ignore_glob = [] if os.environ.get("QUIRE_LANGUAGES") else ["test_*.py"]
_STEP_S = 0.02


@dataclass(frozen=True, slots=True)
class KeyedServer:
    """A server that needs `key`. Its steps are slow, so that a gateway is killed in the middle of a stream."""

    served: Served
    client: AsyncClient
    key: str


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def keyed() -> AsyncIterator[KeyedServer]:
    key = make_key()
    # float32, so that recomputed values are the same; a token a step, so that the text comes slowly.
    async with (
        serving(
            gateways=2,
            api_keys=(key,),
            dtype="float32",
            multi_step_ms=0.0,
            speculate=("off",),
            allowed_origins=("https://page.example",),
        ) as served,
        AsyncClient(served.server.grpc_address, api_key=key) as client,
    ):
        served.server.delay_at("scheduler.step.before_send", _STEP_S)
        yield KeyedServer(served, client, key)
