"""People who watch: frames of what memory, queues and steps look like, for all of them together.

While nobody watches, nothing here runs and nothing is kept. While somebody does, a task makes a frame at most ten times
a second: it compares what the core looks like with the frame before (`scheduler_svc.core.view`). A frame that takes
long makes the next one wait, so that all frames together take at most `_MAX_SHARE` of the time. A step only notes its
plan, which is looked at with the next frame.

Each watcher has an outbox of a few frames. One that does not read them misses frames and then gets a whole one; neither
the steps nor other watchers wait for it.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field

from quire.rpc.errors import ResourceExhausted
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import ClientEvents, StepPlan, Usage
from scheduler_svc.core.view import Changes, View
from scheduler_svc.service import watch_messages
from scheduler_svc.service.watch_messages import (
    Answer,
    Counts,
    Event,
    Fork,
    Frame,
    ReplicaNow,
    StepAnswer,
    StepNote,
    StepRecord,
)

_logger = logging.getLogger(__name__)

_MIN_INTERVAL_S = 0.1
_MAX_SILENCE_S = 1.0
_MAX_SHARE = 0.01
"""Of the time of this process for frames: processor time of a frame by the time to the next one."""

_MAX_WATCHERS = 32
_MAX_OUTBOX = 4
_MAX_NOTES = 64
_MAX_STEPS, _MAX_EVENTS, _MAX_FORKS, _MAX_ENDED = 1024, 512, 256, 1024
"""Kept from one frame to the next; older ones are dropped."""


@dataclass(slots=True, eq=False)
class _Watcher:
    wants_memory: bool
    needs_whole: bool = True
    outbox: deque[Frame] = field(default_factory=deque)
    has_mail: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, frame: Frame) -> None:
        """Adds a frame; one too many drops all of them, and the next one is whole."""
        if len(self.outbox) >= _MAX_OUTBOX:
            self.outbox.clear()
            self.needs_whole = True
            return
        self.outbox.append(frame)
        self.has_mail.set()


def interval_after(cost_s: float) -> float:
    """Seconds to the next frame, after one that took so many seconds of processor time."""
    return max(_MIN_INTERVAL_S, cost_s / _MAX_SHARE)


class Watchers:
    """All who watch one replica."""

    def __init__(self, now: Callable[[], ReplicaNow], clock: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._clock = clock
        self._watchers: list[_Watcher] = []
        self._task: asyncio.Task[None] | None = None
        self._forget()

    def _forget(self) -> None:
        """Nobody watches: nothing is kept."""
        self._view = View()
        self._counts = Counts()
        self._plans: deque[StepRecord] = deque(maxlen=_MAX_STEPS)
        self._answered: deque[Answer] = deque(maxlen=_MAX_STEPS)
        # When the steps of the last frame that are not answered yet began.
        self._started: dict[int, float] = {}
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._num_lost_events = 0
        self._forks: deque[Fork] = deque(maxlen=_MAX_FORKS)
        self._ended: deque[Usage] = deque(maxlen=_MAX_ENDED)
        self._num_preempted: int | None = None
        self._sent_at = 0.0
        self._last_state: bytes = b""

    @property
    def are_any(self) -> bool:
        """Whether somebody watches. The methods below are to be called only then."""
        return bool(self._watchers)

    # What steps tell

    def planned(self, scheduler: Scheduler, plan: StepPlan, started: float, planned: float) -> None:
        """A step was planned, between these times."""
        # Looked at with the next frame: a step may take less than a millisecond.
        self._plans.append(StepRecord(plan, started, planned, scheduler.num_preemptions))
        self._counts.steps += 1
        if len(plan.forks):
            batch = scheduler.batch
            for parent, child in plan.forks.tolist():
                self._forks.append(Fork(plan.step_id, batch.sequence(parent), batch.sequence(child)))

    def answered(self, step_id: int, now: float) -> None:
        """The workers answered a step."""
        self._answered.append(Answer(step_id, now))

    def delivered(self, events: ClientEvents) -> None:
        """Events of requests were handed to gateways."""
        self._counts.generated_tokens += len(events.token_ids)
        self._counts.completed += len(events.completed)
        self._counts.failed += len(events.failed)
        self._ended.extend(end.usage for end in events.completed)

    # Who watches

    async def frames(self, *, wants_memory: bool) -> AsyncGenerator[Frame, None]:
        """Frames for one watcher, until it stops reading. Raises ResourceExhausted where too many watch."""
        if len(self._watchers) >= _MAX_WATCHERS:
            raise ResourceExhausted(
                f"{len(self._watchers)} watch this scheduler already, and no more may", reason="WATCHERS"
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
                    yield watcher.outbox.popleft()
        finally:
            self._watchers.remove(watcher)
            if not self._watchers:
                self._task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._task
                self._task = None
                self._forget()

    async def _make_frames(self) -> None:
        while True:
            started = time.thread_time()
            try:
                self.look()
            except Exception:
                # A defect of the view must not end all views; what it saw may be half of a look.
                _logger.exception("a frame could not be made; the next one is whole")
                self._view = View()
                self._clear()
                for watcher in self._watchers:
                    watcher.needs_whole = True
            await asyncio.sleep(interval_after(time.thread_time() - started))

    def look(self) -> None:
        """Makes a frame, and puts it into the outboxes; none where nothing happened, unless the last one was long ago
        or somebody waits for the first one."""
        now, replica = self._clock(), self._now()
        wants_memory = any(each.wants_memory for each in self._watchers) and replica.scheduler is not None
        changes = self._view.look(replica.scheduler) if wants_memory and replica.scheduler is not None else None
        self._counts.computed_tokens += sum(record.plan.num_tokens for record in self._plans)
        numbers = watch_messages.numbers(replica, self._counts, len(self._watchers))
        state = numbers.SerializeToString(deterministic=True)
        is_quiet = state == self._last_state and (changes is None or changes.is_empty)
        is_new = any(each.needs_whole for each in self._watchers)
        if is_quiet and not is_new and now - self._sent_at < _MAX_SILENCE_S:
            return
        self._sent_at, self._last_state = now, state
        frame = watch_messages.frame(replica, numbers, self._notes(now), self._answers(), self._ended, now)
        self._note_events(changes)
        for watcher in self._watchers:
            watcher.put(self._frame_for(watcher, frame, changes))
        self._clear()

    def _frame_for(self, watcher: _Watcher, frame: Frame, changes: Changes | None) -> Frame:
        """The frame with what this watcher wants of memory."""
        is_whole, watcher.needs_whole = watcher.needs_whole, False
        own = Frame(is_whole=is_whole)
        own.MergeFrom(frame)
        if watcher.wants_memory and changes is not None:
            seen = self._view.whole() if is_whole else changes
            own.is_whole = seen.is_whole
            own.memory.CopyFrom(watch_messages.memory(seen, self._events, self._num_lost_events))
        return own

    def _notes(self, now: float) -> list[StepNote]:
        """What the new plans decided."""
        notes: list[StepNote] = []
        for record in list(self._plans)[-_MAX_NOTES:]:
            before = record.num_preemptions if self._num_preempted is None else self._num_preempted
            # Negative where another core began to count.
            notes.append(watch_messages.step_note(record, max(0, record.num_preemptions - before), now))
            self._num_preempted = record.num_preemptions
        return notes

    def _answers(self) -> Iterator[StepAnswer]:
        """How long the steps took that were answered."""
        self._started.update((record.plan.step_id, record.started) for record in self._plans)
        for step_id, answered_at in self._answered:
            started = self._started.pop(step_id, None)
            if started is not None:
                yield watch_messages.step_answer(step_id, answered_at - started)
        # Steps that were lost with their worker are never answered.
        for step_id in list(self._started)[:-_MAX_STEPS]:
            del self._started[step_id]

    def _note_events(self, changes: Changes | None) -> None:
        """Takes what happened to blocks in the new steps and since the last frame."""
        for record in self._plans:
            for event in watch_messages.events_of(record.plan):
                self._put_event(event)
        for fork in self._forks:
            parent, child = self._view.number_of(fork.parent), self._view.number_of(fork.child)
            # A child that is gone already held nothing that was seen.
            if parent is not None and child is not None:
                self._put_event(watch_messages.fork_event(fork.step_id, parent, child))
        for each in () if changes is None else changes.preempted:
            self._put_event(watch_messages.preempt_event(each))

    def _put_event(self, event: Event) -> None:
        self._num_lost_events += len(self._events) == self._events.maxlen
        self._events.append(event)

    def _clear(self) -> None:
        for each in (self._plans, self._answered, self._events, self._forks, self._ended):
            each.clear()
        self._num_lost_events = 0
