"""Services of the newest release are replaced by those of today, one by one, and back, under load: no token is lost.

The releases are real: the one before is checked out of this repository's history, and each service of a server is a
process of its own code. `make test-long` names this file; the tiers collect test_*.py.
"""

import asyncio
import dataclasses
import os
import signal
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from quire.client import (
    AsyncClient,
    BeamSearch,
    Constraint,
    GenerationOptions,
    RetryPolicy,
    SequenceFinished,
    TokenChunk,
)
from quire.version import VERSION
from quire_cli.supervisor.commands import Programs
from tests.compat.transcript import releases
from tests.support.releases import Release
from tests.support.scheduler_process import until
from tests.support.serving import Served, serving

pytestmark = pytest.mark.timeout(1800)

MODULES = {"worker": "worker_svc", "scheduler": "scheduler_svc", "gateway": "gateway"}
REQUESTS = [
    GenerationOptions(temperature=0.0),
    GenerationOptions(temperature=1.0, seed=1, presence_penalty=0.5),
    GenerationOptions(temperature=1.0, seed=2, n=3),
    GenerationOptions(temperature=0.0, logprobs=2),
    GenerationOptions(temperature=1.0, seed=3, constraint=Constraint(regex="[a-z ]{300,400}")),
    GenerationOptions(temperature=1.0, seed=4, top_k=20, repetition_penalty=1.1),
]
SEARCH = GenerationOptions(beam_search=BeamSearch(3), n=2)
PROMPT = "Once upon a time, there was a little fox. Story"

Output = dict[int, list[int]]


@dataclass(slots=True)
class Load:
    """Clients that send the same request again and again, and compare each answer with the undisturbed one.

    Durable streams outlive gateways, others do not: these are sent only while `gateway_stays`.
    """

    client: AsyncClient
    undisturbed: dict[str, Output] = field(default_factory=dict[str, Output])
    live: dict[str, int] = field(default_factory=dict[str, int])
    """The tokens that the streams which run have so far."""
    gateway_stays: asyncio.Event = field(default_factory=asyncio.Event)
    num_streams: int = 0
    num_tokens: int = 0
    num_replaced: int = 0
    """How many streams were in their middle when a process was replaced, in all."""

    async def learn(self) -> None:
        """The answers of an undisturbed server."""
        for name in self._names():
            self.undisturbed[name] = await self._read(name)

    async def run(self) -> None:
        """Never ends by itself, but for a stream that lost a token."""
        async with asyncio.TaskGroup() as tasks:
            for name in self._names():
                tasks.create_task(self._repeat(name))

    async def until_in_the_middle(self) -> None:
        """Streams of half of the clients that may run have tokens, and will have more."""
        names = [name for name in self._names() if self.gateway_stays.is_set() or name.startswith("durable")]

        async def are() -> bool:
            return sum(self.live.get(name, 0) > 5 for name in names) * 2 > len(names)

        await until(are, timeout_s=180)
        self.num_replaced += sum(self.live.get(name, 0) > 5 for name in names)

    async def until_only_durable(self) -> None:
        async def are() -> bool:
            return all(name.startswith("durable") for name in self.live)

        await until(are, timeout_s=180)

    def _names(self) -> list[str]:
        return [f"{kind}-{index}" for kind in ("durable", "plain") for index in range(len(REQUESTS))] + ["plain-search"]

    async def _repeat(self, name: str) -> None:
        while True:
            if name.startswith("plain"):
                await self.gateway_stays.wait()
            output = await self._read(name)
            assert output == self.undisturbed[name], name
            self.num_streams += 1
            self.num_tokens += sum(map(len, output.values()))

    async def _read(self, name: str) -> Output:
        kind, _, which = name.partition("-")
        output: Output = defaultdict(list)
        ends: dict[int, int] = {}
        options = SEARCH if which == "search" else REQUESTS[int(which)]
        if which != "search":
            options = dataclasses.replace(options, max_tokens=300, ignore_eos=options.constraint is None)
        self.live[name] = 0
        async with self.client.generate_stream(f"{PROMPT} {which}", options, durable=kind == "durable") as stream:
            async for event in stream:
                if isinstance(event, TokenChunk):
                    assert event.offset == len(output[event.sequence_index]), name
                    output[event.sequence_index] += event.token_ids
                    self.live[name] += len(event.token_ids)
                elif isinstance(event, SequenceFinished):
                    ends[event.sequence_index] = event.num_tokens
        del self.live[name]
        assert ends == {index: len(token_ids) for index, token_ids in output.items()}, name
        return dict(output)


async def replace(served: Served, files: Path, name: str, release: Release, load: Load) -> None:
    """Stops a service in the middle of streams; its supervisor starts that of the other release. Returns once a stream
    has got tokens that the new process had a part in."""
    if name == "gateway":
        load.gateway_stays.clear()
        await load.until_only_durable()
    await load.until_in_the_middle()
    release.write(files / name)
    process = served.server.process(name)
    starts = process.starts
    os.kill(process.pid, signal.SIGTERM)

    async def started_again() -> bool:
        return process.starts > starts and release.runs(process.pid)

    await until(started_again, timeout_s=120)
    await served.server.wait_ready()
    load.gateway_stays.set()
    before = load.num_streams

    async def went_on() -> bool:
        return load.num_streams > before + len(REQUESTS)

    await until(went_on, timeout_s=180)
    print(f"{name} is of {release.name}: {load.num_streams} streams, {load.num_tokens} tokens so far")


async def test_services_of_two_releases_replace_each_other_one_by_one_and_no_token_is_lost(tmp_path: Path) -> None:
    before = Release.check_out(releases()[-1].name, tmp_path / "release")
    today = Release.of_today()
    starter = str(Path(__file__).parents[1] / "support" / "service_of_release.py")
    for name in MODULES:
        before.write(tmp_path / name)
    programs = Programs(
        *((sys.executable, "-I", "-S", starter, str(tmp_path / name), module) for name, module in MODULES.items())
    )
    settings = {"num_gpu_blocks": 400, "dtype": "float32", "connect_timeout": 120.0, "drain_timeout": 0.0}
    # A call that meets no gateway is sent again until there is one.
    policy = RetryPolicy(attempts=None, last_delay_s=0.5)
    async with (
        serving(programs=programs, **settings) as served,
        AsyncClient(served.server.grpc_address, retry=policy) as client,
    ):
        load = Load(client)
        await load.learn()
        load.gateway_stays.set()
        running = asyncio.create_task(load.run())

        async def roll() -> None:
            # Workers first: a newer gateway may send what an older worker does not know. The way back is the reverse.
            for name in MODULES:
                await replace(served, tmp_path, name, today, load)
            assert (await served.client.server_info()).version == VERSION
            for name in reversed(MODULES):
                await replace(served, tmp_path, name, before, load)

        rolling = asyncio.create_task(roll())
        # A stream that lost something ends the test at once.
        await asyncio.wait([running, rolling], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            rolling.cancel()
            await running
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await rolling
    assert load.num_replaced > 20
    print(f"{load.num_streams} streams, {load.num_tokens} tokens, {load.num_replaced} in the middle, none lost")
