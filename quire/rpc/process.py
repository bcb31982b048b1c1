"""The life of a service process: event loop, signals, exit status."""

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable

from quire.logs import log_as_configured, log_everything
from quire.settings import ConfigurationError

CONFIGURATION_EXIT_STATUS = 2
LOST_PEER_EXIT_STATUS = 75
"""The exit status of a process that lost a process which it cannot run without (EX_TEMPFAIL: try again)."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_OUR_PACKAGES = ("quire", "gateway", "scheduler_svc", "worker_svc", "kernels")
# What only measuring needs, which quire[all] leaves out.
_OF_BENCH = ("httpx", "matplotlib")
_logger = logging.getLogger(__name__)


def run_service(main: Callable[[], Awaitable[None]], *, program: str) -> int:
    """Runs `main` in an event loop until it returns or a signal comes; returns the exit status.

    SIGTERM or SIGINT cancels `main` once, which drains in its `finally`; a second one kills the process. SIGUSR1 lowers
    the log level to debug, SIGUSR2 sets it back.
    `main` may load the settings itself: a ConfigurationError from the call or from the awaitable is printed as
    "PROGRAM: error: LINE".

    Args:
        main: Starts the service and waits, for example `lambda: serve(load_settings(...))`.
        program: What the user called, for example "quire worker".

    Returns:
        0 after a signal or when `main` returned, 2 on ConfigurationError and where a package is not installed, 1 on any
        other error (logged).
    """
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_until_signalled(main))
    except ConfigurationError as error:
        report_configuration_error(error, program=program)
        return CONFIGURATION_EXIT_STATUS
    except ModuleNotFoundError as error:
        report_configuration_error(missing_package(error), program=program)
        return CONFIGURATION_EXIT_STATUS
    except Exception:
        _logger.exception("%s failed", program)
        return 1
    return 0


def report_configuration_error(error: ConfigurationError, *, program: str) -> None:
    """Prints the one line that a user sees when the configuration is at fault."""
    print(f"{program}: error: {error}", file=sys.stderr, flush=True)


def missing_package(error: ModuleNotFoundError) -> ConfigurationError:
    """The error for a user who installed too little; raises `error` again where the missing module is ours."""
    if error.name is None or error.name.partition(".")[0] in _OUR_PACKAGES:
        raise error
    extra = "quire[bench]" if error.name in _OF_BENCH else "quire[all], or the extra of this service"
    return ConfigurationError(f"{error.name} is not installed; install {extra}")


async def _until_signalled(main: Callable[[], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main())
    stopped_by: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        stopped_by.append(number)
        for each in _SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        task.cancel()

    loop.add_signal_handler(signal.SIGUSR1, log_everything)
    loop.add_signal_handler(signal.SIGUSR2, log_as_configured)
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped_by:
            raise


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed, which is not so on every platform; else the standard one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
