"""The event loop of one simulated process. It never waits: the world calls `turn`, and keeps the timers."""

import asyncio
import sys
import threading
from asyncio import events
from asyncio.tasks import _enter_task, _leave_task
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import Context
from typing import Any, Protocol


class Process(Protocol):
    """What a loop needs of the process that it belongs to."""

    context: Context

    def monotonic(self) -> float: ...

    def wake_at(self, when: float, handle: asyncio.TimerHandle) -> None:
        """Calls `loop.put(handle)` at this time of the process's clock."""
        ...

    def run_job(self, job: Callable[[], None]) -> None:
        """Runs what a thread would run, later."""
        ...

    def failed(self, context: dict[str, Any]) -> None:
        """Takes an error that nobody caught."""
        ...


class _NodeTask(asyncio.Task[Any]):
    """A task whose place in a set is the same in every process. asyncio has sets of tasks, as in a TaskGroup."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class NodeLoop(asyncio.AbstractEventLoop):
    """First come, first served, as asyncio's own loops are: another order would invent impossible faults.

    After `cut` it does nothing any more, as a process does that was killed. Its tasks stay suspended where they are,
    and are kept, so that no `finally` of them runs.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self.ready: deque[asyncio.Handle] = deque()
        """What the next turn calls."""
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._num_tasks = 0
        self._is_cut = False
        self.num_handles = 0
        self._on_wait_ended: dict[int, tuple[asyncio.Task[Any], Callable[[], bool]]] = {}

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those that are not done, in the order of their start; `asyncio.all_tasks` has them in order of addresses."""
        return [task for task in self._tasks.values() if not task.done()]

    def turn(self) -> None:
        """Calls what is ready now; what that makes ready waits for the next turn."""
        outer, hooks = events._get_running_loop(), sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._finish_agen)
        events._set_running_loop(self)
        try:
            for _ in range(len(self.ready)):
                if self._is_cut:
                    return
                handle = self.ready.popleft()
                if not handle.cancelled():
                    self.num_handles += 1
                    handle._run()
            if self._on_wait_ended:
                self._look_at_waits()
        finally:
            events._set_running_loop(outer)
            sys.set_asyncgen_hooks(*hooks)

    def watch_waits(self, task: asyncio.Task[Any], ended: Callable[[], bool]) -> None:
        """Calls `ended` at the end of each turn in which something happened that the task waited for, before it goes on
        in the next one; until that returns True."""
        self._on_wait_ended[id(task)] = task, ended
        task.add_done_callback(lambda _: self._on_wait_ended.pop(id(task), None))

    def _look_at_waits(self) -> None:
        for handle in list(self.ready):
            # The step of a task is a method of it.
            number = id(getattr(handle._callback, "__self__", None))
            if number in self._on_wait_ended and self._on_wait_ended[number][1]():
                del self._on_wait_ended[number]

    def put(self, handle: asyncio.Handle) -> None:
        """Makes a handle ready."""
        if not self._is_cut:
            self.ready.append(handle)

    def cut(self) -> list[Any]:
        """Stops for good, in the middle of whatever runs. Returns what must be kept as it is."""
        self._is_cut = True
        kept: list[Any] = [*self.ready, *self._tasks.values()]
        for task in self._tasks.values():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.ready = deque()
        return kept

    def _finish_agen(self, agen: Any) -> None:
        if not self._is_cut:
            self.call_soon(self.create_task, agen.aclose())

    # What asyncio calls

    def time(self) -> float:
        return self._process.monotonic()

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context or self._default_context())
        self.put(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context or self._default_context())
        if not self._is_cut:
            self._process.wake_at(when, handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """The world drops it when its time comes."""

    def _default_context(self) -> Context | None:
        """Outside of the loop's own turns, callbacks belong to the process all the same."""
        return None if events._get_running_loop() is self else self._process.context

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        if self._is_cut:
            # Only what is closed at the end of a world comes here: it must not begin anything.
            coro.close()
            return self.create_future()  # type: ignore[return-value]
        self._num_tasks += 1
        number = self._num_tasks
        context = context or self._default_context()
        task = _NodeTask(number, coro, loop=self, name=name or f"task {number}", context=context)
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))
        return task

    def begin_task(self, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task whose first part runs at once, and not in a turn of its own."""
        task, outer = self.create_task(coro), asyncio.current_task(self)
        if not self._is_cut and outer is not None:
            first = self.ready.pop()
            _leave_task(self, outer)
            try:
                first._run()
            finally:
                _enter_task(self, outer)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        outcome: Future[Any] = Future()

        # A thread has it at once: nobody cancels it any more.
        outcome.set_running_or_notify_cancel()

        def run() -> None:
            try:
                outcome.set_result(func(*args))
            except BaseException as error:
                outcome.set_exception(error)

        self._process.run_job(run)
        return asyncio.wrap_future(outcome, loop=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_cut:
            self._process.failed(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return events._get_running_loop() is self

    def is_closed(self) -> bool:
        return self._is_cut

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        assert threading.current_thread() is threading.main_thread()

    def remove_signal_handler(self, sig: int) -> bool:
        return True
