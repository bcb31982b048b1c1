"""`quire bench`: runs a load against a server at one rate after the other; `quire bench plot`: draws results."""

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from quire.load import LoadRequest, LoadResult, Report, Run, make_report
from quire.load.plots import check_picture, plot
from quire.rpc.process import loop_factory
from quire.runtime.settings import ConfigurationError, load_settings
from quire.version import VERSION
from quire_cli.bench.driver import CannotMeasureError, Driver, Outcome, Pacing, Server, ServerFacts
from quire_cli.bench.flags import BenchFlags, PlotFlags, check_writable, try_to_write
from quire_cli.bench.grpc_client import GrpcServer
from quire_cli.bench.machine import describe_machine, find_commit
from quire_cli.bench.plan import Load, PlannedRun, read_file
from quire_cli.bench.progress import Progress
from quire_cli.bench.table import make_errors, make_table

PROGRAM = "quire bench"
_INTERRUPTED_EXIT_STATUS = 130
_KEY_FLAG = "--api-key"
_BUSY_SHARE = 0.8
"""Share of a core above which the client itself may determine the latencies."""


def main(argv: Sequence[str]) -> int:
    """Prints the report. Returns 1 if no request ended well, 130 if it was interrupted."""
    if argv and argv[0] == "plot":
        return _plot(argv[1:])
    flags = load_settings(BenchFlags, argv, os.environ, program=PROGRAM)
    flags.check_output()
    bench = _Bench(flags, read_file(flags), command=shown_command(argv))
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(bench.run())
    except CannotMeasureError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    return bench.finish()


def shown_command(argv: Sequence[str]) -> str:
    """The command line for a result file: without an API key."""
    shown: list[str] = []
    for argument in argv:
        if shown and shown[-1] == _KEY_FLAG:
            shown.append("...")
        else:
            shown.append(f"{_KEY_FLAG}=..." if argument.startswith(f"{_KEY_FLAG}=") else argument)
    return shlex.join(["quire", "bench", *shown])


@dataclass(slots=True)
class _Bench:
    """All runs of one command, and their results so far."""

    flags: BenchFlags
    file: list[LoadRequest] | None
    command: str
    runs: list[Run] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    messages: dict[str, str] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)
    model: str = ""
    is_interrupted: bool = False
    num_unfinished: int = 0

    async def run(self) -> None:
        """Raises CannotMeasureError and ConfigurationError if nothing can be measured."""
        server = _make_server(self.flags)
        loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(self._measure(server))

        def interrupt() -> None:
            self.is_interrupted = True
            loop.remove_signal_handler(signal.SIGINT)
            work.cancel()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            with suppress(asyncio.CancelledError):
                await work
        finally:
            await server.close()

    async def _measure(self, server: Server) -> None:
        known = await server.connect()
        load = Load(self.flags, self.file, known.vocab_size, known.max_model_len)
        self.model = known.model
        self.facts = _facts(self.flags, known, load, self.command)
        await self._warm_up(server, load)
        for planned in load.runs():
            await self._run(server, planned)

    async def _warm_up(self, server: Server, load: Load) -> None:
        """Raises CannotMeasureError if all its requests fail, since the measured ones would fail too."""
        requests = load.warm_up(self.flags.warm_up_requests)
        if not requests:
            return
        driver = Driver(server, Pacing(None, False, None, self.flags.request_timeout), lambda *_: None)
        await driver.run(requests)
        if all(record.error is not None for record in driver.outcome.records):
            reason, message = next(iter(driver.outcome.messages.items()))
            raise CannotMeasureError(f"every request of the warm-up fails, {reason}: {message}")

    async def _run(self, server: Server, planned: PlannedRun) -> None:
        """Reports the ended requests even if it is cancelled."""
        pacing = Pacing(planned.max_concurrency, planned.is_closed, planned.duration_s, self.flags.request_timeout)
        with Progress(planned.label, planned.num_requests) as progress:
            driver = Driver(server, pacing, progress.update)
            try:
                await driver.run(planned.requests)
            finally:
                self._add(planned, driver.outcome)

    def _add(self, planned: PlannedRun, outcome: Outcome) -> None:
        self.num_unfinished = outcome.num_sent - sum(record.sent_s is not None for record in outcome.records)
        for reason, message in outcome.messages.items():
            self.messages.setdefault(reason, message)
        if not outcome.records:
            return
        records = sorted(outcome.records, key=lambda record: record.index)
        report = make_report(
            records,
            request_rate=planned.rate,
            max_concurrency=planned.max_concurrency,
            slo=self.flags.slo,
            client_cpu_s=outcome.cpu_s,
            counters=dict(outcome.counters) or None,
        )
        self.labels.append(planned.label)
        self.runs.append(Run.of(report, records))

    def finish(self) -> int:
        """Prints and writes the results; returns the exit status."""
        reports = [run.report for run in self.runs]
        if reports:
            print(make_table(self.labels, reports))
            print(*make_errors(reports, self.messages), sep="\n", end="\n" if any(r.errors for r in reports) else "")
            self._warn(reports)
        is_written = not reports or self._write()
        if self.is_interrupted:
            done = sum(report.requests for report in reports)
            print(
                f"{PROGRAM}: interrupted: the report has {done:,} requests; {self.num_unfinished:,} more were running",
                file=sys.stderr,
            )
            return _INTERRUPTED_EXIT_STATUS
        return 0 if is_written and any(report.completed for report in reports) else 1

    def _warn(self, reports: Sequence[Report]) -> None:
        shares = [report.client_cpu_share or 0.0 for report in reports]
        if max(shares) > _BUSY_SHARE:
            print(
                f"{PROGRAM}: warning: the client took {max(shares):.2f} of a core, above {_BUSY_SHARE}: the latencies "
                "may be its own; run several clients at lower rates",
                file=sys.stderr,
            )

    def _write(self) -> bool:
        facts = {**self.facts, "interrupted": self.is_interrupted}
        name = self.flags.name or f"{self.flags.backend}, {self.model}"
        result = LoadResult("bench", name, facts, tuple(self.runs))
        return self.flags.write(result, lambda path: plot([result], path), PROGRAM)


def _make_server(flags: BenchFlags) -> Server:
    common = {
        "model": flags.model,
        "api_key": flags.api_key,
        "sampling": flags.sampling,
        "ignore_eos": flags.ignore_eos,
    }
    if flags.backend == "grpc":
        if (flags.address or "").startswith(("http://", "https://")):
            raise ConfigurationError(f'--address: "{flags.address}" is for --backend openai; gRPC takes HOST:PORT')
        return GrpcServer(flags.address or "127.0.0.1:50051", tls=flags.client_tls(), **common)
    if flags.client_tls() is not None:
        raise ConfigurationError("the flags of TLS are for --backend grpc; give --address https://HOST:PORT")
    from quire_cli.bench.openai_client import OpenAiServer

    return OpenAiServer(flags.address or "http://127.0.0.1:8000", endpoint=flags.endpoint, **common)


def _facts(flags: BenchFlags, known: ServerFacts, load: Load, command: str) -> dict[str, object]:
    return {
        "version": VERSION,
        "commit": find_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "client_machine": describe_machine(),
        "backend": flags.backend,
        "model": known.model,
        "server": known.details,
        "flags": flags.given(),
        "load": load.describe(),
    }


def _plot(argv: Sequence[str]) -> int:
    flags = load_settings(PlotFlags, argv, os.environ, program=f"{PROGRAM} plot")
    if not flags.files:
        raise ConfigurationError("plot takes one or several results: quire bench plot A.json B.json --plot FILE.svg")
    results = []
    for path in flags.files:
        try:
            results.append(LoadResult.read(path))
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
    check_picture(flags.plot)
    check_writable(flags.plot)
    if not try_to_write(flags.plot, lambda path: plot(results, path), f"{PROGRAM} plot"):
        return 1
    print(flags.plot)
    return 0
