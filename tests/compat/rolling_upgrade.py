"""Replaces services of the newest release by today's services, one by one, and back: no stream loses a token.

The releases are real: the one before is checked out of this repository's history, and each service of a server is a
process of its own code. `make test-long` names this file; the tiers collect test_*.py.
"""

import dataclasses
import os
import signal
import sys
from pathlib import Path

import pytest

from quire.client import BeamSearch, Constraint, GenerationOptions
from quire.version import VERSION
from quire_cli.supervisor.commands import Programs
from tests.compat.transcript import releases
from tests.support.killing import Outputs, Streams, until_hit
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
SEARCH = GenerationOptions(beam_search=BeamSearch(3), n=2, max_tokens=40)


def options_of(index: int) -> GenerationOptions:
    options = REQUESTS[index % len(REQUESTS)]
    return dataclasses.replace(options, max_tokens=300, ignore_eos=options.constraint is None)


async def replace(served: Served, directory: Path, name: str, release: Release) -> None:
    """Stops a service; its supervisor starts that of the other release."""
    release.write(directory / name)
    stopped = served.server.services[name]
    os.kill(stopped, signal.SIGTERM)

    async def started_again() -> bool:
        pid = served.server.services.get(name, stopped)
        return pid != stopped and release.runs(pid)

    await until(started_again, timeout_s=120)
    await served.wait_ready()


async def test_services_of_two_releases_replace_each_other_one_by_one_and_no_token_is_lost(tmp_path: Path) -> None:
    before = Release.check_out(releases()[-1].name, tmp_path / "release")
    today = Release.of_today()
    starter = str(Path(__file__).parents[1] / "support" / "service_of_release.py")
    for name in MODULES:
        before.write(tmp_path / name)
    programs = Programs(
        *((sys.executable, "-I", "-S", starter, str(tmp_path / name), module) for name, module in MODULES.items())
    )
    # The embedded models of the releases differ.
    settings = {
        "model": str(today.code / "assets" / "quire-tiny"),
        "num_gpu_blocks": 400,
        "dtype": "float32",
        "connect_timeout": 120.0,
        "drain_timeout": 0.0,
    }
    async with serving(programs=programs, **settings) as served:
        undisturbed = await Streams(durable=True, options_of=options_of).read(served.client)
        found = (await served.client.generate("Once upon a time", SEARCH)).sequences
        # Workers first: a newer gateway may send fields that an older worker does not know. The way back is reversed.
        for release, names in ((today, [*MODULES]), (before, [*reversed(MODULES)])):
            for name in names:

                async def under_streams(name: str = name, release: Release = release) -> Outputs:
                    # Durable streams outlive gateways, others do not.
                    streams = Streams(durable=name == "gateway", options_of=options_of)
                    async with streams.reading(served) as reading:
                        await streams.advance()
                        await replace(served, tmp_path, name, release)
                        return await reading

                assert await until_hit(under_streams) == undisturbed
                again = (await served.client.generate("Once upon a time", SEARCH)).sequences
                assert [each.token_ids for each in again] == [each.token_ids for each in found]
                print(f"{name} is of {release.name}")
            if release is today:
                assert (await served.client.server_info()).version == VERSION
