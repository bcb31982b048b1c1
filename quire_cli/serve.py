"""`quire serve`: runs all processes of one machine until a signal comes."""

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from quire.model_files.model_source import hub_name
from quire.model_files.progress import ProgressLine
from quire.rpc.process import CONFIGURATION_EXIT_STATUS, stop_signals
from quire.runtime.logs import json_line
from quire.runtime.settings import load_settings, misspelt_variables
from quire.service.model_flag import ModelFlag
from quire_cli.pull import Stopped, fetch
from quire_cli.supervisor import LocalServer, ServeSettings, ServiceRefused
from quire_cli.supervisor.process import print_error
from quire_cli.supervisor.server import report_on_stderr

PROGRAM = "quire serve"
# Signals that are passed on to the services, which handle them.
_LOG_LEVEL_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP; the first lets live requests finish, a second ends everything at once,
    except SIGHUP, which a closing terminal sends more than once.

    Returns:
        0 after the first signal, 128 + its number after a second one, 2 if a service refused its configuration.
    """
    settings = load_settings(ServeSettings, argv, os.environ, program=PROGRAM)
    # Once for all processes, before any starts: they have the same commit, even after a restart.
    try:
        models = tuple(_fetched(model) for model in settings.models)
    except Stopped as stopped:
        report_on_stderr(str(stopped))
        return 0
    settings = dataclasses.replace(settings, models=models)
    try:
        return asyncio.run(_serve(settings))
    except ServiceRefused as refusal:
        # All other services have ended, so this is the last line.
        print(refusal, file=sys.stderr, flush=True)
        return CONFIGURATION_EXIT_STATUS


def _fetched(model: ModelFlag) -> ModelFlag:
    """The model in the cache, if it is of a hub. Raises Stopped, and ConfigurationError."""
    name = hub_name(model.source)
    return model if name is None else dataclasses.replace(model, source=str(fetch(name)))


async def _serve(settings: ServeSettings) -> int:
    line = ProgressLine()
    is_json = settings.log_format == "json"

    def report(text: str) -> None:
        if is_json:
            print_error(json_line("serve", "info", "quire_cli.supervisor", text))
        else:
            line.clear()
            report_on_stderr(text)

    # In a log, `report` prints the progress of the model every few seconds.
    shows_progress = sys.stderr.isatty() and not is_json
    server = LocalServer(
        settings, report=report, progress=(lambda text: line.show(f"quire: {text}")) if shows_progress else None
    )
    serving = asyncio.current_task()
    signals: list[int] = []

    def on_signal(number: int) -> None:
        if signals and number == signal.SIGHUP:
            return
        signals.append(number)
        if len(signals) == 1 and serving is not None:
            serving.cancel()
        else:
            server.kill()

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, on_signal, number)
    for number in _LOG_LEVEL_SIGNALS:
        loop.add_signal_handler(number, server.signal, number)
    for mistake in misspelt_variables(ServeSettings, os.environ, program=PROGRAM):
        report(mistake)
    with suppress(asyncio.CancelledError):
        async with server:
            with suppress(asyncio.CancelledError):
                await server.wait_ready()
                line.clear()
                print(f"quire: ready grpc={server.grpc_address} http={server.http_address}", flush=True)
                await server.wait_failed()
            report("stopping; live requests get time to finish, a second signal ends them")
    return 0 if len(signals) < 2 else 128 + signals[-1]
