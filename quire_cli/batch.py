"""`quire batch`: answers a file of requests with a private server that ends with them.

The file and the answers have the format of OpenAI's batches. This process puts the file into the gateway's directory of
batches, and waits there for the answers. Answers are written as they come, in the order of the requests, so that an
interrupted run continues after the last whole line of its output.
"""

import asyncio
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from gateway.api.batches.runner import ANSWER_BEGIN, BatchLimits, read_lines
from gateway.api.batches.store import COMPLETED, BatchRow, BatchStore, Line
from gateway.auth.caller import DEFAULT_TENANT
from gateway.request.counting import EntryLimits
from quire.model_files.progress import ProgressLine
from quire.rpc.process import CONFIGURATION_EXIT_STATUS
from quire.runtime.settings import ConfigurationError, load_settings, setting
from quire_cli.supervisor import LocalServer, ServeSettings, ServiceRefused
from quire_cli.supervisor.server import report_on_stderr

PROGRAM = "quire batch"
_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_FRONTS = ("openai", "responses", "batches")
_WINDOW_S = 365 * 24 * 3600
_LOOK_S = 0.2
_SHOWN_ERRORS = 10
_WRITTEN_AT_ONCE = 1000


@dataclass(frozen=True)
class BatchSettings(ServeSettings):
    """Answers the requests of a file in the form of OpenAI's batches (custom_id, method, url, body), and ends."""

    file: str | None = setting(None, "the requests, one JSON object per line", positional=True)
    output: str = setting(
        "-",
        "where the answers go, in the order of the requests; - is stdout. A file that has some of them gets the others",
        metavar="FILE",
    )


def main(argv: Sequence[str]) -> int:
    """Returns 0 if all requests were answered well, else 1; 2 if the file or the server's flags are wrong."""
    settings = load_settings(BatchSettings, argv, os.environ, program=PROGRAM)
    if settings.file is None:
        raise ConfigurationError("no file of requests; give one as argument")
    source = Path(settings.file)
    if not source.is_file():
        raise ConfigurationError(f"{source} is not a file")
    endpoint = _endpoint_of(source)
    entries = EntryLimits(settings.max_chat_messages)
    limits = BatchLimits(settings.max_batch_requests, sys.maxsize, settings.max_message_bytes, entries)
    lines, errors = read_lines(source, endpoint, limits)
    if errors:
        shown = [f"line {each.line}: {each.message}" for each in errors[:_SHOWN_ERRORS]]
        raise ConfigurationError(f"{source} is not a batch: {'; '.join(shown)}")
    output = _Output(settings.output)
    output.resume(source, lines)
    if output.num_written == len(lines):
        report_on_stderr(f"{settings.output} has all {len(lines):,} answers already; remove it to ask again")
        return output.status
    own = tempfile.TemporaryDirectory(prefix="quire-batch-") if settings.batch_dir is None else None
    with own or nullcontext(str(settings.batch_dir)) as directory:
        try:
            with output:
                return asyncio.run(_run(settings, source, lines, endpoint, Path(directory).absolute(), output))
        except ServiceRefused as refusal:
            print(refusal, file=sys.stderr, flush=True)
            return CONFIGURATION_EXIT_STATUS


def _endpoint_of(source: Path) -> str:
    """The `url` of the first request. All requests must have the same."""
    with source.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        url = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{source} is not a batch: its first line has no url") from error
    if url not in _ENDPOINTS:
        raise ConfigurationError(f"the first request is for {url!r:.80}; it must be for one of {', '.join(_ENDPOINTS)}")
    return url


class _Output:
    """The output file, or stdout: whole lines, in the order of the requests. As a context it is open.

    Attributes:
        num_written: Number of answers, including answers of earlier runs.
    """

    def __init__(self, name: str) -> None:
        self.num_written = 0
        self._num_failed = 0
        self._path = None if name == "-" else Path(name)
        self._file: BinaryIO | None = None

    def resume(self, source: Path, lines: Sequence[Line]) -> None:
        """Counts the answers of earlier runs, and cuts off a last line that is incomplete.

        Raises:
            ConfigurationError: the file cannot be written, or has something else than answers to the first of these
                requests, which stays as it is.
        """
        if self._path is None or self._path.is_fifo() or self._path.is_char_device():
            return
        try:
            with self._path.open("ab"):
                pass
            if self._path.samefile(source):
                raise ConfigurationError(f"--output {self._path} is the file of the requests; name another one")
            os.truncate(self._path, self._count_answers(self._path, source, lines))
        except OSError as error:
            raise ConfigurationError(f"--output {self._path} cannot be used: {error.strerror}") from error

    def _count_answers(self, path: Path, source: Path, lines: Sequence[Line]) -> int:
        """The number of bytes of whole answers at the start of the file. Raises as `resume` does."""
        end = 0
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n") and text[: len(ANSWER_BEGIN)] == ANSWER_BEGIN[: len(text)]:
                    break
                expected = lines[number - 1].custom_id if number <= len(lines) else None
                custom_id = _custom_id_of(text)
                if custom_id is None or custom_id != expected:
                    has = "no answer" if custom_id is None else f"the answer to {custom_id!r:.80}"
                    asked = "no further request" if expected is None else f"the request {expected!r:.80}"
                    raise ConfigurationError(
                        f"line {number:,} of {path} is {has}, where {source} has {asked}; the file is of another "
                        "batch: remove it, or name another --output"
                    )
                self._count(text)
                end += len(text)
        return end

    def __enter__(self) -> Self:
        self._file = sys.stdout.buffer if self._path is None else self._path.open("ab")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None and self._path is not None:
            self._file.close()

    def write(self, answers: Iterable[bytes]) -> None:
        """Writes answers to the next requests, one per line."""
        assert self._file is not None, "the output is open"
        for text in answers:
            self._file.write(text)
            self._count(text)
        self._file.flush()

    def _count(self, text: bytes) -> None:
        self.num_written += 1
        self._num_failed += not _is_good(text)

    @property
    def status(self) -> int:
        """0 if all answers are good, else 1."""
        return 1 if self._num_failed else 0

    def __str__(self) -> str:
        num_good = self.num_written - self._num_failed
        return f"{num_good:,} of {self.num_written:,} requests answered, {self._num_failed:,} failed"


def _custom_id_of(text: bytes) -> str | None:
    """The custom_id of an answer; None if the line is no answer."""
    try:
        answer = json.loads(text)
        return answer["custom_id"] if text.startswith(ANSWER_BEGIN) and "response" in answer else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _is_good(text: bytes) -> bool:
    response = json.loads(text).get("response")
    return response is not None and response["status_code"] == 200


async def _run(
    settings: BatchSettings, source: Path, lines: Sequence[Line], endpoint: str, directory: Path, output: _Output
) -> int:
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(ServeSettings)}
    own: dict[str, Any] = {
        "grpc_port": 0,
        "http_port": 0,
        "batch_dir": directory,
        "keys_files": (),
        "api_keys": (),
        "config": None,
    }
    own |= {"fronts": _FRONTS, "demo": False}
    # The file is this user's own.
    own["max_batch_file_bytes"] = own["max_batch_dir_bytes"] = sys.maxsize
    store = BatchStore(directory, PROGRAM, sys.maxsize)
    try:
        file_id, path = store.files.new_path()
        await asyncio.to_thread(_copy, source, lines[output.num_written :], path)
        await store.run(store.files.add, DEFAULT_TENANT, file_id, source.name, "batch")
        batch = await store.run(store.add_batch, DEFAULT_TENANT, "", file_id, endpoint, _WINDOW_S, None)
        async with LocalServer(ServeSettings(**values | own), report=report_on_stderr) as server:
            await server.wait_ready()
            batch = await _until_ended(store, batch, output)
        if batch.status != COMPLETED:
            report_on_stderr(f"the batch ended as {batch.status}: {json.dumps(batch.facts.get('errors'))}")
            return 1
        rest = {line.custom_id for line in lines[output.num_written :]}
        await asyncio.to_thread(output.write, _results(store, batch, path, rest))
        report_on_stderr(str(output))
        return output.status
    finally:
        store.close()


def _copy(source: Path, lines: Sequence[Line], target: Path) -> None:
    with source.open("rb") as file, target.open("wb") as copy:
        for line in lines:
            file.seek(line.first)
            copy.write(file.read(line.size).rstrip(b"\r\n") + b"\n")


async def _until_ended(store: BatchStore, batch: BatchRow, output: _Output) -> BatchRow:
    """Writes answers as they come. Answers that are left when the batch has ended are in its results."""
    line, last = ProgressLine(), 0
    while True:
        while answers := await store.run(store.answers_behind, batch.id, last, _WRITTEN_AT_ONCE):
            last = answers[-1][0]
            await asyncio.to_thread(output.write, [text + b"\n" for _, text in answers])
        row = await store.run(store.batch, DEFAULT_TENANT, batch.id)
        if row.facts.get("request_counts") or row.facts.get("errors"):
            line.clear()
            return row
        if sys.stderr.isatty():
            line.show(f"quire: {row.num_good + row.num_bad:,} of {row.num_lines:,} requests")
        await asyncio.sleep(_LOOK_S)


def _results(store: BatchStore, batch: BatchRow, requests: Path, wanted: Set[str]) -> Iterator[bytes]:
    """Good and other answers in the order of the requests, only for the wanted ids."""
    results = {
        is_good: _lines_of(store.files.path_of(file_id))
        for is_good, file_id in ((True, batch.facts["output_file_id"]), (False, batch.facts["error_file_id"]))
        if file_id is not None
    }
    heads = {is_good: next(lines, None) for is_good, lines in results.items()}
    for custom_id, _ in _lines_of(requests):
        for is_good, head in heads.items():
            if head is not None and head[0] == custom_id:
                if custom_id in wanted:
                    yield head[1].encode()
                heads[is_good] = next(results[is_good], None)
                break


def _lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """The custom_id of each line, and the line."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)["custom_id"], line
