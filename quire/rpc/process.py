"""The life of a service process: event loop, signals, exit status."""

import asyncio
import ctypes
import gc
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar

import quire
from quire.runtime.huge_pages import start_moving_heap
from quire.runtime.logs import change_level
from quire.runtime.settings import ConfigurationError, TemporaryError

CONFIGURATION_EXIT_STATUS = 2
TEMPORARY_EXIT_STATUS = LOST_PEER_EXIT_STATUS = 75
"""The exit status of a process that lost a process which it cannot run without, or found something that may be mended
at its next start (EX_TEMPFAIL: try again)."""
STANDBY = "QUIRE_STANDBY"
"""The environment of a process that waits for its turn has this variable (`stand_by`)."""
_STANDBY_NAME, _SERVING_NAME = "quire-standby", "quire"
_STDIN = 0
_OUR_PACKAGES = ("quire", "gateway", "scheduler_svc", "worker_svc", "quire_kernels", "quire_cli")
# Distributions that are not named as their modules are.
_DISTRIBUTIONS = {"yaml": "pyyaml", "zmq": "pyzmq"}
_REQUIREMENT_OF_EXTRA = re.compile(r"(?P<name>[\w.-]+).*extra == ['\"](?P<extra>\w+)['\"]")
# Extras that are made of others, or for developers.
_COLLECTIONS = ("all", "dev")
# gRPC reads it when the first server or channel is made. The thread that waits for completions then also reads sockets.
# Otherwise other threads do, which hand each message over twice more: a tenth of the processor time of a short request.
_GRPC_EXPERIMENTS = "GRPC_EXPERIMENTS", "-event_engine_poller_for_python"
# The first version without this choice, which would log an error about it in each process.
_GRPC_WITHOUT_CHOICE = (1, 83)
_PYDANTIC_WITHOUT_PLUGINS = "PYDANTIC_DISABLE_PLUGINS", "1"
# Options of mallopt(3): blocks from this size on are mapped, and free memory at the top is returned from this size on.
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 1 << 18
_M_TRIM_THRESHOLD, _TRIM_BYTES = -1, 8 << 20
_logger = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def run_service(main: Callable[[], Awaitable[None]], *, program: str) -> int:
    """Runs `main` in an event loop until it returns or a signal comes; returns the exit status.

    One of `stop_signals` cancels `main` once, which drains in its `finally`; a second one kills the process, except
    SIGHUP, which a closing terminal sends more than once. SIGUSR1 lowers the log level to debug, SIGUSR2 sets it back.
    `main` may load the settings itself: a ConfigurationError from the call or from the awaitable is printed as
    "PROGRAM: error: LINE".

    Args:
        main: Starts the service and waits, for example `lambda: serve(load_settings(...))`.
        program: The command that the user called, for example "quire worker".

    Returns:
        0 after a signal or when `main` returned, 2 on ConfigurationError and where a package is not installed, 75 on
        TemporaryError, 1 on any other error (logged).
    """
    _choose_poller()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_until_signalled(main))
    except ConfigurationError as error:
        report_configuration_error(error, program=program)
        return TEMPORARY_EXIT_STATUS if isinstance(error, TemporaryError) else CONFIGURATION_EXIT_STATUS
    except ModuleNotFoundError as error:
        report_configuration_error(missing_package(error), program=program)
        return CONFIGURATION_EXIT_STATUS
    except Exception:
        _logger.exception("%s failed", program)
        return 1
    return 0


def stop_signals() -> list[signal.Signals]:
    """The signals that stop a process in order: SIGHUP, too, of a terminal that closes, unless it is ignored as by
    nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if is_ignored else [signal.SIGHUP])]


async def return_freed_memory(interval_s: float) -> None:
    """Returns freed memory to the operating system: large blocks at once, the rest again and again, until cancelled.

    glibc keeps free memory between used blocks, and once a large block was freed it takes further ones from the kept
    memory. Requests of megabytes leave a process with twice the memory that it uses. `malloc_trim` takes less than a
    millisecond where little is free and up to 30 ms otherwise; it runs in a thread, without the interpreter's lock.
    With a C library that lacks these functions nothing happens.
    """
    libc = ctypes.CDLL(None)
    set_option, trim = getattr(libc, "mallopt", None), getattr(libc, "malloc_trim", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        set_option(_M_TRIM_THRESHOLD, _TRIM_BYTES)
    while True:
        await asyncio.sleep(interval_s)
        if trim is not None:
            await asyncio.to_thread(trim, 0)


def report_configuration_error(error: ConfigurationError, *, program: str) -> None:
    """Prints the one line that a user sees when the configuration is at fault."""
    print(f"{program}: error: {error}", file=sys.stderr, flush=True)


def missing_package(error: ModuleNotFoundError) -> ConfigurationError:
    """The error for a user with missing packages; raises `error` again if the missing module is ours."""
    if error.name is None or error.name.partition(".")[0] in _OUR_PACKAGES:
        raise error
    extras = [f"quire-llm[{extra}]" for extra in _extras_with(error.name)]
    return ConfigurationError(f"{error.name} is not installed; install {' or '.join(extras) or 'quire again'}")


def _extras_with(module: str) -> list[str]:
    """The extras that bring a module, as this installation's metadata has them."""
    from importlib import metadata

    top = module.partition(".")[0]
    name = _DISTRIBUTIONS.get(top, top.replace("_", "-"))
    try:
        requirements = metadata.requires("quire-llm") or []
    except metadata.PackageNotFoundError:
        return ["all"]
    matches = filter(None, map(_REQUIREMENT_OF_EXTRA.match, requirements))
    return [each["extra"] for each in matches if each["name"] == name and each["extra"] not in _COLLECTIONS]


def _choose_poller() -> None:
    # Not at the top: commands that start no service import this module, too.
    import grpc

    if tuple(map(int, grpc.__version__.split(".")[:2])) < _GRPC_WITHOUT_CHOICE:
        os.environ.setdefault(*_GRPC_EXPERIMENTS)


def command_of(module: str) -> list[str]:
    """The command line that runs a module of ours in a process of its own, with `environ_of`: files in the working
    directory do not stand in for modules, as a user's resource.py would."""
    return [sys.executable, "-P", "-m", module]


def environ_of(environ: Mapping[str, str], **own: str) -> dict[str, str]:
    """The environment of such a process: it finds this code wherever it is. `own` are further variables."""
    paths = [str(Path(quire.__file__).resolve().parent.parent), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, dict.fromkeys(paths))), **own}


def leave_process(why: str, status: int = 1) -> NoReturn:
    """Ends this process at once, for its supervisor to start another. An orderly exit could wait for a thread whose
    operation never returns."""
    _logger.critical("%s; this process exits", why)
    logging.shutdown()
    os._exit(status)


@contextmanager
def imports_that_stay() -> Iterator[None]:
    """For a block that imports: no garbage collection looks for garbage among the modules, which takes a tenth of the
    time of their import, or visits them later. pydantic does not read the metadata of all installed packages for
    plugins, which takes a fortieth, unless the environment says so."""
    os.environ.setdefault(*_PYDANTIC_WITHOUT_PLUGINS)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


async def stand_by(environ: MutableMapping[str, str], imports: Callable[[], Awaitable[None]] | None = None) -> None:
    """For a service that has made its imports: a standby process waits here until its supervisor needs it, with a byte
    on stdin, and ends if its supervisor has ended. Other processes return at once.

    Args:
        environ: Has the variable STANDBY in a standby process only; it is removed.
        imports: Imports what the service imports later otherwise.
    """
    if environ.pop(STANDBY, None) is None:
        return
    if imports is not None:
        await imports()
    needed = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(_STDIN, needed.set)
    try:
        await needed.wait()
    finally:
        loop.remove_reader(_STDIN)
    if not os.read(_STDIN, 1):
        sys.exit()
    _name_process(_SERVING_NAME)


def _name_process(name: str) -> None:
    """Gives this process its name in `ps` and `top`, on Linux."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def settle_objects() -> None:
    """For the end of a start: the present objects stay, such as modules and the arrays of a pool. No garbage collection
    visits them, which would hold up a process for tens of milliseconds, and they move to huge pages."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    start_moving_heap()


class DaemonThreads(Executor):
    """Runs each call in a thread of its own, which does not keep the process from ending, unlike a pool's threads."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        outcome: Future[_T] = Future()
        # From now on it cannot be cancelled, so that there is always somewhere to put the result.
        outcome.set_running_or_notify_cancel()

        def run() -> None:
            try:
                outcome.set_result(fn(*args, **kwargs))
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return outcome


async def _until_signalled(main: Callable[[], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main())
    stopped_by: list[signal.Signals] = []
    signals = stop_signals()

    def stop(number: signal.Signals) -> None:
        stopped_by.append(number)
        for each in signals:
            loop.remove_signal_handler(each)
            if each is signal.SIGHUP:
                signal.signal(each, signal.SIG_IGN)
            else:
                # The kernel gives the first process of a container no signal that it does not handle.
                signal.signal(each, _end_at_once if os.getpid() == 1 else signal.SIG_DFL)
        task.cancel()

    loop.add_signal_handler(signal.SIGUSR1, change_level, "debug")
    loop.add_signal_handler(signal.SIGUSR2, change_level, None)
    for number in signals:
        loop.add_signal_handler(number, stop, number)
    if STANDBY in os.environ:
        _name_process(_STANDBY_NAME)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped_by:
            raise


def _end_at_once(number: int, _: object) -> NoReturn:
    os._exit(128 + number)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop if it is installed, which not every platform allows; else the standard one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
