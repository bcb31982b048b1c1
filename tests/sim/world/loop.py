"""The event loop of one simulated process. It never waits: the world calls `turn`, and has the timers."""

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
    """The process that a loop belongs to, as the loop uses it."""

    context: Context

    def monotonic(self) -> float: ...

    def wake_at(self, when: float, handle: asyncio.TimerHandle) -> None:
        """Calls `loop.put(handle)` at this time of the process's clock."""
        ...

    def run_job(self, job: Callable[[], None]) -> None:
        """Runs the work of a thread later."""
        ...

    def failed(self, context: dict[str, Any]) -> None:
        """Receives an uncaught error."""
        ...


class _NodeTask(asyncio.Task[Any]):
    """A task with the same hash in every process, since asyncio puts tasks into sets, for example in a TaskGroup."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class NodeLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in order, as asyncio's own loops do: another order would invent impossible faults.

    After `cut` it does nothing any more, as the loop of a killed process. Its suspended tasks stay as they are, and are
    referenced, so that no `finally` of them runs.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self.ready: deque[asyncio.Handle] = deque()
        """Callbacks of the next turn."""
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._num_tasks = 0
        self._is_cut = False
        self._on_wait_ended: dict[int, tuple[asyncio.Task[Any], Callable[[], bool]]] = {}

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Tasks that are not done, in the order of their start; `asyncio.all_tasks` has them in order of addresses."""
        return [task for task in self._tasks.values() if not task.done()]

    def turn(self) -> int:
        """Calls the callbacks that are ready now; callbacks that become ready meanwhile run in the next turn. Returns
        the number of calls. Leaves the finalizer of asynchronous generators at its own."""
        outer, num_calls = events._get_running_loop(), 0
        sys.set_asyncgen_hooks(None, self._finish_agen)
        events._set_running_loop(self)
        try:
            for _ in range(len(self.ready)):
                if self._is_cut:
                    break
                handle = self.ready.popleft()
                if not handle._cancelled:
                    num_calls += 1
                    try:
                        # As `Handle._run`, which would cost a call more.
                        handle._context.run(handle._callback, *handle._args)
                    except BaseException as error:
                        self._catch(error, handle)
            else:
                if self._on_wait_ended:
                    self._look_at_waits()
        finally:
            events._set_running_loop(outer)
        return num_calls

    def _catch(self, error: BaseException, handle: asyncio.Handle) -> None:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise error
        self.call_exception_handler({"message": "a callback failed", "exception": error, "handle": handle})

    def watch_waits(self, task: asyncio.Task[Any], ended: Callable[[], bool]) -> None:
        """Calls `ended` at the end of each turn in which a wait of the task ended, before the task continues in the
        next turn. Stops when `ended` returns True."""
        self._on_wait_ended[id(task)] = task, ended
        task.add_done_callback(lambda _: self._on_wait_ended.pop(id(task), None))

    def _look_at_waits(self) -> None:
        for handle in list(self.ready):
            # A task's step is a bound method of the task.
            number = id(getattr(handle._callback, "__self__", None))
            if number in self._on_wait_ended and self._on_wait_ended[number][1]():
                del self._on_wait_ended[number]

    def put(self, handle: asyncio.Handle) -> None:
        """Makes a handle ready."""
        if not self._is_cut:
            self.ready.append(handle)

    def cut(self) -> list[Any]:
        """Stops for good, in the middle of running code. Returns the objects that must stay referenced."""
        self._is_cut = True
        kept: list[Any] = [*self.ready, *self._tasks.values()]
        for task in self._tasks.values():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.ready = deque()
        return kept

    def _finish_agen(self, agen: Any) -> None:
        if not self._is_cut:
            self.call_soon(self.create_task, agen.aclose())

    # Calls from asyncio

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
        """The world drops the timer when its time comes."""

    def _default_context(self) -> Context | None:
        """The process's context for callbacks that are added outside of the loop's own turns."""
        return None if events._get_running_loop() is self else self._process.context

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        if self._is_cut:
            # Only coroutines that are closed at the end of a world come here: they must not start anything.
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
        """Starts a task whose first part runs at once, not in a later turn."""
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

        # A thread starts the work at once, so it cannot be cancelled.
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
