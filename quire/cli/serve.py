"""`quire serve`: all processes of one machine, until a signal comes."""

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from quire.cli.pull import fetch
from quire.local import LocalServer, ServeSettings, ServiceRefused
from quire.local.server import report_on_stderr
from quire.model_directory import hub_name
from quire.progress import ProgressLine
from quire.rpc.process import CONFIGURATION_EXIT_STATUS
from quire.settings import load_settings

PROGRAM = "quire serve"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM or SIGINT; the first lets live requests finish, a second ends everything at once.

    Returns:
        0 after the first signal, 128 + its number after a second one, 2 when a service refused its configuration.
    """
    settings = load_settings(ServeSettings, argv, os.environ, program=PROGRAM)
    if (name := hub_name(settings.model)) is not None:
        # Once for all processes, before any starts: they have the same commit, now and when they start again.
        settings = dataclasses.replace(settings, model=str(fetch(name)))
    try:
        return asyncio.run(_serve(settings))
    except ServiceRefused as refusal:
        # All other services have ended, so this is the last line.
        print(refusal, file=sys.stderr, flush=True)
        return CONFIGURATION_EXIT_STATUS


async def _serve(settings: ServeSettings) -> int:
    line = ProgressLine()

    def report(text: str) -> None:
        line.clear()
        report_on_stderr(text)

    # In a log, `report` says every few seconds how far the model is.
    server = LocalServer(
        settings, report=report, progress=(lambda text: line.show(f"quire: {text}")) if sys.stderr.isatty() else None
    )
    serving = asyncio.current_task()
    signals: list[int] = []

    def on_signal(number: int) -> None:
        signals.append(number)
        if len(signals) == 1 and serving is not None:
            serving.cancel()
        else:
            server.kill()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    with suppress(asyncio.CancelledError):
        async with server:
            with suppress(asyncio.CancelledError):
                await server.wait_ready()
                line.clear()
                print(f"quire: ready grpc={server.grpc_address} http={server.http_address}", flush=True)
                await server.wait_failed()
            report("stopping; live requests get time to finish, a second signal ends them")
    return 0 if len(signals) < 2 else 128 + signals[-1]
