"""`python -m scheduler_svc`: one scheduler process."""

import os
import sys
from collections.abc import Sequence

from quire.rpc.process import imports_that_stay, run_service, settle_objects, stand_by
from quire.runtime import failpoint
from quire.runtime.logs import begin_logging
from quire.runtime.settings import load_settings
from scheduler_svc.settings import SchedulerSettings

PROGRAM = "quire scheduler"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until a signal comes; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv

    async def run() -> None:
        failpoint.arm(os.environ)
        settings = load_settings(SchedulerSettings, arguments, os.environ, program=PROGRAM)
        level, form = settings.log_level, settings.log_format
        begin_logging("scheduler", level, form, SchedulerSettings, os.environ, program=PROGRAM)
        with imports_that_stay():
            from scheduler_svc.service.app import serve
        await stand_by(os.environ)
        await serve(settings, on_attached=settle_objects)

    return run_service(run, program=PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
