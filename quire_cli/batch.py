"""`quire batch`: answers a file of requests, with a server that serves nobody else and ends with them.

The file and the answers are those of OpenAI's batches. The gateway finds them in its directory of batches, where this
process puts the one and waits for the other.
"""

import asyncio
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from gateway.api.batches.lines import BatchLimits, read_lines
from gateway.api.batches.routes import ENDPOINTS
from gateway.api.batches.store import COMPLETED, BatchRow, BatchStore
from gateway.auth.caller import DEFAULT_TENANT
from quire.progress import ProgressLine
from quire.rpc.process import CONFIGURATION_EXIT_STATUS
from quire.settings import ConfigurationError, load_settings, setting
from quire_cli.supervisor import LocalServer, ServeSettings, ServiceRefused
from quire_cli.supervisor.server import report_on_stderr

PROGRAM = "quire batch"
_WINDOW_S = 365 * 24 * 3600
_LOOK_S = 0.2
_SHOWN_ERRORS = 10


@dataclass(frozen=True)
class BatchSettings(ServeSettings):
    """Answers the requests of a file in the form of OpenAI's batches (custom_id, method, url, body), and ends."""

    file: str | None = setting(None, "the requests, one JSON object per line", positional=True)
    output: str = setting("-", "where the answers go, in the order of the requests; - is stdout", metavar="FILE")


def main(argv: Sequence[str]) -> int:
    """Returns 0 if all requests were answered well, else 1; 2 when the file or the server's flags are wrong."""
    settings = load_settings(BatchSettings, argv, os.environ, program=PROGRAM)
    if settings.file is None:
        raise ConfigurationError("no file of requests; give one as argument")
    source = Path(settings.file)
    if not source.is_file():
        raise ConfigurationError(f"{source} is not a file")
    endpoint = _endpoint_of(source)
    limits = BatchLimits(settings.max_batch_requests, sys.maxsize, settings.max_message_bytes)
    _, errors = read_lines(source, endpoint, limits)
    if errors:
        shown = [f"line {each.line}: {each.message}" for each in errors[:_SHOWN_ERRORS]]
        raise ConfigurationError(f"{source} is not a batch: {'; '.join(shown)}")
    own = tempfile.TemporaryDirectory(prefix="quire-batch-") if settings.batch_dir is None else None
    with own or nullcontext(str(settings.batch_dir)) as directory:
        try:
            return asyncio.run(_run(settings, source, endpoint, Path(directory).absolute()))
        except ServiceRefused as refusal:
            print(refusal, file=sys.stderr, flush=True)
            return CONFIGURATION_EXIT_STATUS


def _endpoint_of(source: Path) -> str:
    """The `url` of the first request, which is that of all."""
    with source.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        url = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{source} is not a batch: its first line has no url") from error
    if url not in ENDPOINTS:
        raise ConfigurationError(f"the first request is for {url!r:.80}; it must be for one of {', '.join(ENDPOINTS)}")
    return url


async def _run(settings: BatchSettings, source: Path, endpoint: str, directory: Path) -> int:
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(ServeSettings)}
    own = {"grpc_port": 0, "http_port": 0, "batch_dir": directory, "keys_files": (), "api_keys": (), "config": None}
    # The file is this user's own.
    own["max_batch_file_bytes"] = own["max_batch_dir_bytes"] = sys.maxsize
    store = BatchStore(directory, PROGRAM, sys.maxsize)
    try:
        file_id, path = store.new_path()
        await asyncio.to_thread(shutil.copyfile, source, path)
        await store.run(store.add_file, DEFAULT_TENANT, file_id, source.name, "batch")
        batch = await store.run(store.add_batch, DEFAULT_TENANT, "", file_id, endpoint, _WINDOW_S, None)
        async with LocalServer(ServeSettings(**values | own), report=report_on_stderr) as server:
            await server.wait_ready()
            batch = await _until_ended(store, batch)
        if batch.status != COMPLETED:
            report_on_stderr(f"the batch ended as {batch.status}: {json.dumps(batch.facts.get('errors'))}")
            return 1
        await asyncio.to_thread(_write, store, batch, path, settings.output)
        counts = batch.shown()["request_counts"]
        report_on_stderr(
            f"{counts['completed']:,} of {counts['total']:,} requests answered, {counts['failed']:,} failed"
        )
        return 1 if counts["failed"] else 0
    finally:
        store.close()


async def _until_ended(store: BatchStore, batch: BatchRow) -> BatchRow:
    line = ProgressLine()
    while True:
        row = await store.run(store.batch, DEFAULT_TENANT, batch.id)
        if row.facts.get("request_counts") or row.facts.get("errors"):
            line.clear()
            return row
        if sys.stderr.isatty():
            line.show(f"quire: {row.num_good + row.num_bad:,} of {row.num_lines:,} requests")
        await asyncio.sleep(_LOOK_S)


def _write(store: BatchStore, batch: BatchRow, requests: Path, output: str) -> None:
    """Writes good and other answers in the order of the requests."""
    results = {
        is_good: _lines_of(store.path_of(file_id))
        for is_good, file_id in ((True, batch.facts["output_file_id"]), (False, batch.facts["error_file_id"]))
        if file_id is not None
    }
    heads = {is_good: next(lines, None) for is_good, lines in results.items()}
    with nullcontext(sys.stdout) if output == "-" else Path(output).open("w", encoding="utf-8") as target:
        for request in _lines_of(requests):
            for is_good, head in heads.items():
                if head is not None and head[0] == request[0]:
                    target.write(head[1])
                    heads[is_good] = next(results[is_good], None)
                    break


def _lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """The custom_id of each line, and the line."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)["custom_id"], line
