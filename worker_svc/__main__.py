"""`python -m worker_svc`, and the function that `quire worker` calls."""

import os
import signal
import sys
from collections.abc import Sequence

from quire.rpc.process import command_of, environ_of, imports_that_stay, run_service
from quire.runtime import failpoint
from quire.runtime.logs import begin_logging
from quire.runtime.settings import load_settings
from worker_svc.settings import WorkerSettings

PROGRAM = "quire worker"
_LOADED_LATER = "--load=when-attached"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker until a signal comes; the exit status. Where a sleep discards the weights, this process becomes
    another one that loads them when it is attached: no other way gives all memory back."""
    flags = list(sys.argv[1:] if argv is None else argv)
    is_discarded = False

    async def run() -> None:
        nonlocal is_discarded
        failpoint.arm(os.environ)
        settings = load_settings(WorkerSettings, flags, os.environ, program=PROGRAM)
        level, form = settings.log_level, settings.log_format
        begin_logging("worker", level, form, WorkerSettings, os.environ, program=PROGRAM)
        # OpenMP reads it when torch is imported. Threads that spin at the end of each operation wait for a partner that
        # has lost its core to another process, which costs a time slice, again and again (ADR 0005).
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # The server takes a while to import: --help and errors in the flags must not wait for it.
        with imports_that_stay():
            from worker_svc.app import serve

        await serve(settings)
        is_discarded = True

    status = run_service(run, program=PROGRAM)
    if is_discarded:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        # The last one of a kind holds; each sleep adds none.
        own = [flag for flag in flags if flag != _LOADED_LATER]
        os.execve(sys.executable, [*command_of("worker_svc"), *own, _LOADED_LATER], environ_of(os.environ))
    return status


if __name__ == "__main__":
    sys.exit(main())
