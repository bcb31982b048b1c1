"""The cost of watching (/ui, `quire top`), and of gateways that follow the prefix cache: processor time of a scheduler.

A batch of `--sequences` that decodes in a pool of 16,384 blocks, most of them in use. Between frames a step tells its
plan and its answer; a frame compares the pool with the frame before and is written as the message that is sent. Frames
come as the scheduler makes them: ten a second, or later where one took long. How many steps there are between two
frames follows from how long a step takes, so the share is reported for several times of a step. `core alone` is a step
of the core without a model, back to back: the least that a step can take.

In a pool of `--blocks`, what counts is how long one turn of the event loop takes, since steps wait meanwhile: when
somebody begins to watch, and when the first gateway connects.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.core_load import Load, constant_tokens
from bench.report import Series, write_results
from bench.rule_source import key_of
from quire.rpc.process import leave_out_of_collections
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.cache_digest import CacheDigest
from scheduler_svc.service.cache_feed import CacheFeed
from scheduler_svc.service.outbox import Outbox
from scheduler_svc.service.watch_messages import Frame, ReplicaNow
from scheduler_svc.service.watchers import Watchers, interval_after

_NUM_BLOCKS, _BLOCK_SIZE = 16_384, 16
_MIN_USED = 0.75
"""Of a pool, what sequences hold from the first frame on."""

_MAX_SHARE = 0.02
"""Of a step, what a watcher may add."""

_STEP_MS = (2.0, 5.0, 10.0, 20.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, default=256, help="running sequences, which all decode")
    parser.add_argument("--steps", type=int, default=200, help="steps to time")
    parser.add_argument("--blocks", type=int, default=500_000, help="of the large pool")
    parser.add_argument("--runs", type=int, default=5, help="runs with and without a watcher, in turn")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


@dataclass(frozen=True, slots=True)
class WatchCost:
    """Seconds of processor time: of a step of the core without a watcher, of what a step tells watchers, of each frame
    with its message; and the bytes of a frame, and of the first ones, which have everything."""

    step_s: float
    note_s: float
    frames_s: np.ndarray
    frame_bytes: float
    whole_bytes: int

    def share(self, step_s: float) -> float:
        """What a watcher adds to a step that takes so long, as a share of it."""
        frame_s = float(self.frames_s.mean())
        return (self.note_s + frame_s * step_s / interval_after(frame_s)) / step_s


@dataclass(frozen=True, slots=True)
class LargePoolCost:
    """Milliseconds of single turns of the event loop: of the first frame of a watcher, the slowest further part of it,
    a later frame; of the first gateway's connection, and the slowest further turn of it. And how many turns the parts
    and the digest take."""

    first_frame_ms: float
    part_ms: float
    later_frame_ms: float
    first_digest_ms: float
    digest_ms: float
    num_parts: int
    num_digest_turns: int


def main(arguments: argparse.Namespace) -> None:
    costs = [asyncio.run(measure(arguments.sequences, arguments.steps)) for _ in range(arguments.runs)]
    large = [asyncio.run(measure_large(arguments.sequences, arguments.blocks)) for _ in range(arguments.runs)]
    series = [
        Series("a step of the core", "ms", tuple(each.step_s * 1e3 for each in costs)),
        Series("a step tells its plan and answer", "us", tuple(each.note_s * 1e6 for each in costs)),
        Series("a frame, mean", "ms", tuple(float(each.frames_s.mean()) * 1e3 for each in costs)),
        Series("a frame, slowest", "ms", tuple(float(each.frames_s.max()) * 1e3 for each in costs)),
        Series("a frame", "kB", tuple(each.frame_bytes / 1e3 for each in costs)),
        Series("everything", "kB", tuple(each.whole_bytes / 1e3 for each in costs)),
        Series("added to a step, core alone", "%", tuple(each.share(each.step_s) * 100 for each in costs)),
        *(
            Series(f"added to a step of {ms:g} ms", "%", tuple(each.share(ms / 1e3) * 100 for each in costs))
            for ms in _STEP_MS
        ),
    ]
    pool = f"{arguments.blocks:,} blocks"
    series += [
        Series(f"{pool}, first frame", "ms", tuple(each.first_frame_ms for each in large)),
        Series(f"{pool}, slowest part", "ms", tuple(each.part_ms for each in large)),
        Series(f"{pool}, parts", "", tuple(float(each.num_parts) for each in large)),
        Series(f"{pool}, later frame", "ms", tuple(each.later_frame_ms for each in large)),
        Series(f"{pool}, first gateway", "ms", tuple(each.first_digest_ms for each in large)),
        Series(f"{pool}, its slowest turn", "ms", tuple(each.digest_ms for each in large)),
        Series(f"{pool}, its turns", "", tuple(float(each.num_digest_turns) for each in large)),
    ]
    for each in series:
        print(each)
    is_within = all(each.median <= _MAX_SHARE * 100 for each in series if each.unit == "%")
    print(f"{'within' if is_within else 'NOT within'} {_MAX_SHARE:.0%} of a step of {arguments.sequences} rows")
    if arguments.out is not None:
        write_results(arguments.out, "the cost of one watcher", series, sequences=arguments.sequences)


async def measure(num_sequences: int, num_steps: int) -> WatchCost:
    """Steps without a watcher, and then with one who gets a frame after every twentieth."""
    load = _full_pool(num_sequences, 2 * num_steps + 40, _NUM_BLOCKS)
    results = _steps(load)
    for _ in range(20):
        next(results)
    started = time.process_time()
    for _ in range(num_steps):
        next(results)
    step_s = (time.process_time() - started) / num_steps
    scheduler = load.scheduler
    _check_full(scheduler)
    watchers = _watchers_of(scheduler)
    note_s, frames, sizes = 0.0, [], []
    async with aclosing(watchers.frames(wants_memory=True)) as received:
        whole = [await anext(received)]
        while whole[-1].more_follows:
            whole.append(await anext(received))
        for step in range(num_steps):
            plan = next(results)
            # The clock takes as long as what it measures: once without anything between.
            started = time.process_time()
            asked = time.process_time()
            watchers.planned(scheduler, plan, 0.0, 0.0)
            watchers.answered(plan.step_id, 0.001)
            note_s += (time.process_time() - asked) - (asked - started)
            if step % 20 == 19:
                started = time.process_time()
                watchers.look()
                # The task that makes frames is not due: nothing is awaited here but frames that are there.
                sizes.append(len((await anext(received)).SerializeToString()))
                frames.append(time.process_time() - started)
    return WatchCost(step_s, note_s / num_steps, np.array(frames), float(np.mean(sizes)), sum(map(_size, whole)))


async def measure_large(num_sequences: int, num_blocks: int) -> LargePoolCost:
    """A large pool that sequences fill, and which nobody has looked at yet."""
    load = _full_pool(num_sequences, 200, num_blocks)
    results = _steps(load)
    for _ in range(20):
        next(results)
    _check_full(load.scheduler)
    watchers = _watchers_of(load.scheduler)
    # As the service does when workers are attached.
    leave_out_of_collections()
    times: list[float] = []
    async with aclosing(watchers.frames(wants_memory=True)) as received:
        more_follows = True
        while more_follows:
            started = time.process_time()
            more_follows = (await anext(received)).more_follows
            times.append(_ms_since(started))
        next(results)
        started = time.process_time()
        watchers.look()
        await anext(received)
        later_ms = _ms_since(started)
    digest_ms = _digest_turns_ms(load.scheduler)
    return LargePoolCost(
        times[0],
        max(times[1:]),
        later_ms,
        digest_ms[0],
        max(digest_ms[1:]),
        len(times),
        len(digest_ms),
    )


def _digest_turns_ms(scheduler: Scheduler) -> list[float]:
    """Milliseconds of each turn of the event loop that the first gateway's wish to follow the cache takes."""
    due: list[Callable[[], None]] = []
    feed, outbox = CacheFeed(), Outbox()
    feed.follow(scheduler)
    digest = CacheDigest(feed, lambda _, call: due.append(call))
    times = [_ms_of(lambda: digest.add(outbox))]
    while due:
        times.append(_ms_of(due.pop(0)))
    digest.remove(outbox)
    return times


def _ms_of(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return _ms_since(started)


def _ms_since(started: float) -> float:
    return (time.process_time() - started) * 1e3


def _watchers_of(scheduler: Scheduler) -> Watchers:
    now = ReplicaNow(scheduler, 1, is_ready=True, is_attached=True, is_draining=False, num_gateways=1)
    return Watchers(lambda: now)


def _check_full(scheduler: Scheduler) -> None:
    pool = scheduler.batch.blocks.pool
    assert pool.num_used >= _MIN_USED * pool.num_blocks, f"{pool.num_used} of {pool.num_blocks} blocks are in use"


def _size(frame: Frame) -> int:
    return frame.ByteSize()


def _steps(load: Load) -> Iterator:
    """Plans steps and applies their results, one in flight; yields each plan."""
    while (plan := load.scheduler.schedule(0.0)) is not None:
        yield plan
        load.scheduler.apply(constant_tokens(plan), 0.0)


def _full_pool(num_sequences: int, num_steps: int, num_blocks: int) -> Load:
    """All sequences decode, and hold most of the blocks; no two have tokens in common."""
    blocks_each = num_blocks // num_sequences
    prompt_len = max(1, (blocks_each - 2) * _BLOCK_SIZE - num_steps)
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=num_sequences * prompt_len,
        max_model_len=prompt_len + num_steps,
        max_waiting_requests=num_sequences,
        max_waiting_tokens=num_sequences * (prompt_len + num_steps),
        watermark=0.0,
    )
    scheduler = Scheduler(config)
    for index in range(num_sequences):
        prompt = [index] * (prompt_len - index % _BLOCK_SIZE)
        scheduler.submit(Request(key_of(index), str(index), prompt, RowSampling(index), num_steps), 0.0)
    return Load(scheduler, iter(()))
