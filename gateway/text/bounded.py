"""Bounds the time and memory of a model's chat template, which is a program from the model's files.

Most chats are rendered on the event loop, because a process for them (`request_template.py`) would cost more than the
rendering. A signal ends a slow rendering in the main thread, an exception from a timer a slow one in another thread,
and the process' own limit one that takes too much memory.
"""

import contextlib
import ctypes
import functools
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator

MAX_PROCESSOR_S = 2
"""Maximum CPU time of a rendering in the main thread; the CPU time of all threads counts."""
MAX_THREAD_S = 30
"""Maximum time of a rendering in another thread, by the clock."""
MAX_MEMORY_BYTES = 512 << 20
_CHECKS = 1000
"""Turns of a loop. In each one Python raises an exception that another thread has set."""

_lock = threading.Lock()
_armed: set[int] = set()
"""The threads that render."""
_usual_limit = resource.RLIM_INFINITY


class TookTooLong(BaseException):
    """Ends a rendering: not an `Exception`, so that nothing within it catches it."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Bounds the time and the memory of its body.

    Raises:
        TookTooLong: the time is over.
        MemoryError: the body needs more memory.
    """
    thread = threading.get_ident()
    stop: Callable[[], object] | None = None
    try:
        _arm(thread)
        stop = _start_signal() if threading.current_thread() is threading.main_thread() else _start_timer(thread)
        yield
    finally:
        try:
            _disarm(thread)
        finally:
            # Again, if the time ended in between.
            _disarm(thread)
            if stop is not None:
                stop()


@functools.cache
def _install_handler() -> None:
    def end(*_: object) -> None:
        if threading.get_ident() in _armed:
            raise TookTooLong

    signal.signal(signal.SIGVTALRM, end)


def _start_signal() -> Callable[[], object]:
    _install_handler()
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_PROCESSOR_S)
    return functools.partial(signal.setitimer, signal.ITIMER_VIRTUAL, 0)


def _start_timer(thread: int) -> Callable[[], object]:
    has_ended = False

    def end() -> None:
        nonlocal has_ended
        with _lock:
            if thread in _armed:
                has_ended = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TookTooLong))

    def stop() -> None:
        timer.cancel()
        if has_ended:
            # An exception that is still pending is raised here. It cannot be withdrawn: CPython 3.11 would clear the
            # exception but not its pending flag, which slows the whole process from then on.
            with contextlib.suppress(TookTooLong):
                for _ in range(_CHECKS):
                    pass

    timer = threading.Timer(MAX_THREAD_S, end)
    timer.daemon = True
    timer.start()
    return stop


@functools.cache
def _memory_file() -> int:
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def own_memory() -> int:
    """The address space of this process, in bytes."""
    return int(os.pread(_memory_file(), 64, 0).split()[0]) * resource.getpagesize()


def _arm(thread: int) -> None:
    """Sets the memory limit, which bodies that run at once share."""
    global _usual_limit
    with _lock:
        if not _armed:
            _usual_limit, hard = resource.getrlimit(resource.RLIMIT_AS)
            limit = own_memory() + MAX_MEMORY_BYTES
            known = [each for each in (limit, _usual_limit, hard) if each != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_AS, (min(known), hard))
        _armed.add(thread)


def _disarm(thread: int) -> None:
    with _lock:
        if thread in _armed:
            _armed.remove(thread)
            if not _armed:
                _, hard = resource.getrlimit(resource.RLIMIT_AS)
                resource.setrlimit(resource.RLIMIT_AS, (_usual_limit, hard))
