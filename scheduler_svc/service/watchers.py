"""Watchers of a replica, such as the /ui page: frames of the state of memory, queues and steps, shared by all watchers.

Without watchers, nothing here runs and nothing is kept. With watchers, a task makes a frame at most ten times a second:
it compares the state of the core with the frame before (`scheduler_svc.core.view`). A frame that takes long delays the
next one, so that all frames together take at most `_MAX_SHARE` of the time. A step only records its plan, which the
next frame processes.

Each watcher has an outbox of a few frames. A watcher that does not read them misses frames and then gets the whole
state again; neither the steps nor other watchers wait for it. The whole state of a large pool takes several frames.
Each of them is made when the watcher has read the one before.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from quire.rpc.errors import ResourceExhausted
from quire.runtime import clock
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import ClientEvents, StepPlan, Usage
from scheduler_svc.core.view import Look, Picture, View
from scheduler_svc.service import watch_messages
from scheduler_svc.service.watch_messages import (
    Fork,
    Frame,
    MemoryChanges,
    ReplicaNow,
    ReplicaNumbers,
    StepAnswer,
    StepNote,
    StepRecord,
)

_logger = logging.getLogger(__name__)

_MIN_INTERVAL_S = 0.1
_MAX_SILENCE_S = 1.0
_MAX_SHARE = 0.01
"""Maximum share of this process's time for frames: processor time of a frame by the time to the next one."""

_MAX_WATCHERS = 32
_MAX_OUTBOX = 4
_MAX_NOTES = 64
_MAX_STEPS, _MAX_EVENTS, _MAX_FORKS, _MAX_ENDED = 1024, 512, 256, 1024
"""Maximum number that is kept between two frames; older ones are dropped."""


@dataclass(slots=True, eq=False)
class _Watcher:
    wants_memory: bool
    needs_all: bool = True
    # Each entry is one frame, or the whole state in several frames that are made as they are read.
    outbox: deque[Iterable[Frame]] = field(default_factory=deque)
    has_mail: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, frames: Iterable[Frame]) -> None:
        """Adds an entry. If the outbox is full, drops all entries, and the next one is the whole state."""
        if len(self.outbox) >= _MAX_OUTBOX:
            self.outbox.clear()
            self.needs_all = True
            return
        self.outbox.append(frames)
        self.has_mail.set()


class Watchers:
    """All watchers of one replica."""

    def __init__(self, now: Callable[[], ReplicaNow], clock: Callable[[], float] = clock.monotonic) -> None:
        self._now = now
        self._clock = clock
        self._watchers: list[_Watcher] = []
        self._task: asyncio.Task[None] | None = None
        self._forget()

    def _forget(self) -> None:
        """Drops all state: there are no watchers."""
        self._view = View()
        # Sums since the first of the present watchers came.
        self._counts = ReplicaNumbers()
        self._plans: deque[StepRecord] = deque(maxlen=_MAX_STEPS)
        self._answers: deque[StepAnswer] = deque(maxlen=_MAX_STEPS)
        self._forks: deque[Fork] = deque(maxlen=_MAX_FORKS)
        self._ended: deque[Usage] = deque(maxlen=_MAX_ENDED)
        self._num_preempted: int | None = None
        self._sent_at = 0.0
        self._last_state: bytes = b""
        # Processor time that parts of pictures took since the last frame.
        self._parts_s = 0.0

    @property
    def are_any(self) -> bool:
        """Whether there are watchers. The methods below are called only then."""
        return bool(self._watchers)

    # Reports of steps

    def planned(self, scheduler: Scheduler, plan: StepPlan, started: float, planned: float) -> None:
        """A step was planned, between these times."""
        # The next frame processes it: a step may take less than a millisecond.
        if len(self._plans) == _MAX_STEPS:
            self._counts.computed_tokens += self._plans[0].plan.num_tokens
        self._plans.append(StepRecord(plan, started, planned, scheduler.num_preemptions))
        self._counts.steps += 1
        if len(plan.fork):
            batch = scheduler.batch
            for parent, child in plan.fork.tolist():
                self._forks.append(Fork(plan.step_id, batch.sequence(parent), batch.sequence(child)))

    def answered(self, step_id: int, seconds: float) -> None:
        """The workers answered a step, `seconds` after it was planned."""
        self._answers.append(StepAnswer(step_id=step_id, total_us=round(seconds * 1e6)))

    def delivered(self, events: ClientEvents) -> None:
        """Events of requests were handed to gateways."""
        self._counts.generated_tokens += len(events.token_ids)
        self._counts.completed_requests += len(events.completed)
        self._counts.failed_requests += len(events.failed)
        self._ended.extend(end.usage for end in events.completed)

    # Watchers

    async def frames(self, *, wants_memory: bool) -> AsyncGenerator[Frame, None]:
        """Frames for one watcher, until it stops reading. Raises ResourceExhausted if there are too many watchers."""
        if len(self._watchers) >= _MAX_WATCHERS:
            raise ResourceExhausted(
                f"{_MAX_WATCHERS} clients watch this scheduler already, which is the maximum; close a page of /ui or a "
                "`quire top`",
                reason="WATCHERS",
            )
        watcher = _Watcher(wants_memory)
        self._watchers.append(watcher)
        if self._task is None:
            self._task = asyncio.create_task(self._make_frames())
        try:
            while True:
                await watcher.has_mail.wait()
                watcher.has_mail.clear()
                while watcher.outbox:
                    for frame in watcher.outbox.popleft():
                        yield frame
        finally:
            self._watchers.remove(watcher)
            if not self._watchers:
                # Nothing is awaited here: another watcher may come at once, and needs a task that lives.
                self._task.cancel()
                self._task = None
                self._forget()

    async def _make_frames(self) -> None:
        has_failed = False
        while True:
            started = clock.thread_time()
            try:
                self.look()
                has_failed = False
            except Exception:
                # A defect of the view must not end all views; its state may be inconsistent now.
                if not has_failed:
                    _logger.exception("a frame could not be made; the next one that can be has everything")
                has_failed = True
                self._view = View()
                self._clear()
                for watcher in self._watchers:
                    watcher.needs_all = True
            cost_s, self._parts_s = clock.thread_time() - started + self._parts_s, 0.0
            await asyncio.sleep(max(_MIN_INTERVAL_S, cost_s / _MAX_SHARE))

    def look(self) -> None:
        """Makes a frame, and puts it into the outboxes. Makes none if nothing happened, unless the last one was long
        ago or a watcher waits for its first one."""
        now, replica = self._clock(), self._now()
        wants_memory = any(each.wants_memory for each in self._watchers)
        seen: Look | None = None
        if wants_memory and replica.scheduler is not None:
            seen = self._view.look(replica.scheduler)
        else:
            self._view = View()
        self._counts.computed_tokens += sum(record.plan.num_tokens for record in self._plans)
        numbers = watch_messages.numbers(replica, self._counts, len(self._watchers))
        state = numbers.SerializeToString(deterministic=True)
        is_quiet = state == self._last_state and (seen is None or seen.is_empty)
        is_new = any(each.needs_all for each in self._watchers)
        if is_quiet and not is_new and now - self._sent_at < _MAX_SILENCE_S:
            return
        self._sent_at, self._last_state = now, state
        frame = watch_messages.frame(replica, numbers, self._notes(now), self._answers, self._ended, now)
        self._put(frame, seen)
        self._clear()

    def _put(self, frame: Frame, seen: Look | None) -> None:
        """Puts the frame into the outboxes, with the memory that each watcher wants. Watchers share the messages."""
        whole = Frame(is_whole=True)
        whole.MergeFrom(frame)
        changed: Frame | None = None
        events = MemoryChanges()
        if seen is not None:
            plans = (record.plan for record in self._plans)
            events = watch_messages.block_events(plans, self._forks, seen.preempted, self._view.number_of, _MAX_EVENTS)
        picture = self._view.picture()
        for watcher in self._watchers:
            needs_all, watcher.needs_all = watcher.needs_all, False
            if not watcher.wants_memory or seen is None:
                watcher.put((whole if needs_all else frame,))
            elif needs_all or seen.changes is None:
                watcher.put(self._parts(picture, frame, events))
            else:
                changed = changed or watch_messages.with_memory(frame, seen.changes, events)
                watcher.put((changed,))

    def _parts(self, picture: Picture, frame: Frame, events: MemoryChanges) -> Iterator[Frame]:
        """The whole state, as frames that are made one by one. Events are in the first one."""
        started = clock.thread_time()
        parts = picture.parts()
        part = next(parts)
        while True:
            following = next(parts, None)
            made = watch_messages.with_memory(frame, part, events)
            made.is_whole, made.more_follows = part.is_whole, following is not None
            self._parts_s += clock.thread_time() - started
            yield made
            if following is None:
                return
            started = clock.thread_time()
            # The steps and requests of the past are in the first part.
            frame = Frame(unix_seconds=frame.unix_seconds, numbers=frame.numbers, waiting=frame.waiting)
            part, events = following, MemoryChanges()

    def _notes(self, now: float) -> list[StepNote]:
        """The decisions of the new plans."""
        notes: list[StepNote] = []
        for record in list(self._plans)[-_MAX_NOTES:]:
            before = record.num_preemptions if self._num_preempted is None else self._num_preempted
            # Negative if another core began to count.
            notes.append(watch_messages.step_note(record, max(0, record.num_preemptions - before), now))
            self._num_preempted = record.num_preemptions
        return notes

    def _clear(self) -> None:
        for each in (self._plans, self._answers, self._forks, self._ended):
            each.clear()
