"""The entry point of `python -m gateway` and of `quire gateway`."""

import os
import sys
from collections.abc import Sequence

from gateway.settings import GatewaySettings
from quire.rpc.listeners import inherited_listener
from quire.rpc.process import imports_that_stay, run_service, stand_by
from quire.runtime import failpoint
from quire.runtime.logs import begin_logging
from quire.runtime.settings import load_settings

_PROGRAM = "quire gateway"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a gateway with the given flags, by default from the command line; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv

    async def start() -> None:
        failpoint.arm(os.environ)
        settings = load_settings(GatewaySettings, arguments, os.environ, program=_PROGRAM)
        # The gateway yields CPU time to schedulers, since a step that is planned late leaves the device idle, and
        # before its imports also to the imports of workers.
        os.nice(settings.niceness)
        with imports_that_stay():
            from gateway.app import import_fronts, serve

            import_fronts(settings.served_fronts)
        level, form = settings.log_level, settings.log_format
        begin_logging("gateway", level, form, GatewaySettings, os.environ, program=_PROGRAM)
        await stand_by(os.environ)
        await serve(settings, inherited_listener(os.environ))

    return run_service(start, program=_PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
