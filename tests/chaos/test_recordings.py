"""Recordings of a scheduler whose worker is killed, and of one that is killed itself, run again without either."""

import asyncio
from pathlib import Path

import pytest

from quire.client import BeamSearch, GenerationOptions
from scheduler_svc.recording.replay import replay
from tests.support.killing import TooLateError, kill, until_hit
from tests.support.scheduler_process import until
from tests.support.serving import Served, serving

pytestmark = pytest.mark.extended


async def ask(served: Served, index: int) -> None:
    """Samples, samples of one prompt and beam searches, with a prefix that all share."""
    if index % 4 == 3:
        options = GenerationOptions(max_tokens=100, ignore_eos=True, beam_search=BeamSearch(4), n=2)
    else:
        options = GenerationOptions(max_tokens=100, ignore_eos=True, n=1 + index % 3, seed=index)
    await served.client.generate(f"Once upon a time, there was a very small fox. Its number was {index}", options)


async def test_a_replay_plans_each_step_of_schedulers_whose_processes_were_killed(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    pool = {"num_gpu_blocks": 80, "max_num_seqs": 32, "preemption_mode": "swap"}
    async with serving(record=str(path), **pool) as served:

        async def has_swapped(asked: asyncio.Task) -> bool:
            return asked.done() or (await served.state()).swapped_requests > 0

        async def disturb() -> None:
            await served.server.wait_ready()
            asked = asyncio.create_task(served.together(ask(served, each) for each in range(12)))
            for victim in ("worker", "scheduler"):
                await until(lambda: has_swapped(asked))
                if asked.done():
                    raise TooLateError
                await kill(served, victim)
            await asked

        await until_hit(disturb)
    for name in ("recording.old", "recording"):
        report = replay(tmp_path / name)
        assert report.is_equal, (name, report.differences, report.ended_early)
        assert report.num_steps > 20
    # Whole to its end, since that scheduler was stopped in order.
    assert report.damage is None
