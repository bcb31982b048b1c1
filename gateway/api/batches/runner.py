"""Runs batches with the lowest priority, each of their requests once. The input of a batch is a file, with one request
in each line, as JSON.

Schedulers with the first-come-first-served policy ignore priorities. So the gateway also holds a batch request back
while other requests wait in the schedulers' queues: callers wait at most for batch requests that already run. A
request that fails with a retryable error is retried until the batch expires.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json, to_json

from gateway.api.answers import OPENAI, ErrorAnswer, as_json, error_answer
from gateway.api.batches.store import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    VALIDATING,
    BatchRow,
    BatchStore,
    Line,
)
from gateway.api.front import CallReader
from gateway.api.leased_runs import LeasedRun, LeasedRuns
from gateway.api.respond import Call, whole_answer
from gateway.auth.caller import LOWEST_PRIORITY, set_caller
from gateway.auth.keys import Authenticator
from gateway.request.body_memory import BodyMemory, message_memory
from gateway.request.counting import EntryLimits, check_values
from gateway.request.models import Models
from gateway.sqlite import NotOwnerError
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import FieldViolation, InvalidArgument, NotFound, QuireError, Unavailable
from quire.runtime import clock, entropy

_LOOK_S = 0.25
_RETRY_S = 1.0
_TAKEN_AT_ONCE = 4
_LINES_AT_ONCE = 64
_ANSWER_ID = "batch_req_"
ANSWER_BEGIN = f'{{"id":"{_ANSWER_ID}'.encode()
"""The first bytes of each line of results."""
_RETRIED = (429, 503, 504)
WrongModel = Callable[[str], FieldViolation | None]
"""Checks the name of a model; returns None if the caller of the batch may use it, else the violation."""
MAX_CUSTOM_ID = 512
_MAX_ERRORS = 50
_PARAMETERS = ("custom_id", "method", "url", "body")
_NOT_IN_BATCHES = {"stream": "streaming_unsupported", "background": "invalid_body", "durable": "invalid_body"}
_BOM = b"\xef\xbb\xbf"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one input: number of requests, bytes of the file and of a line, and JSON entries in a line."""

    max_requests: int
    max_file_bytes: int
    max_line_bytes: int
    entries: EntryLimits


@dataclass(frozen=True, slots=True)
class LineError:
    """An error in a line, numbered from 1, or in the whole file if `line` is None."""

    line: int | None
    code: str
    message: str
    param: str | None = None

    def shown(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


@dataclass(slots=True)
class _Run(LeasedRun):
    """A batch that runs here. `end_as` is its final status if it is ended early."""

    row: BatchRow
    work: asyncio.Task[None] | None = None
    end_as: str | None = None

    def end(self, status: str) -> None:
        """Ends the batch early, with the answers so far."""
        if self.end_as is None:
            self.end_as = status
            if self.work is not None:
                self.work.cancel()


class Batches(LeasedRuns[BatchRow, _Run]):
    """The batches that run at this gateway."""

    def __init__(
        self,
        models: Models,
        store: BatchStore,
        authenticator: Authenticator,
        call_readers: Mapping[str, CallReader],
        limits: BatchLimits,
        memory: BodyMemory,
        *,
        gateway_id: str,
        concurrency: int,
    ) -> None:
        """`call_readers` read the bodies of requests, by the path of the endpoint. At most `concurrency` requests run
        at once, and only while `memory` has room for their bodies."""
        super().__init__(store, models, "batches")
        self.store = store
        self.limits = limits
        self._authenticator = authenticator
        self._call_readers = call_readers
        self._gateway_id = gateway_id
        self._memory = memory
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency)
        self._looked_at = 0.0
        self._others_wait = False

    def _max_taken(self) -> int:
        return max(0, _TAKEN_AT_ONCE - len(self._runs))

    def _run_taken(self, row: BatchRow) -> None:
        run = _Run(row.id, row, end_as=CANCELLED if row.status == CANCELLING else None)
        self._start(run, self._run(run))

    def _renewed(self, run: _Run, status: str) -> None:
        if status == CANCELLING:
            run.end(CANCELLED)
        elif clock.unix_s() >= run.row.expires_at:
            run.end(EXPIRED)

    async def _run(self, run: _Run) -> None:
        row, store = run.row, self.store
        try:
            if run.end_as is None:
                run.work = asyncio.create_task(self._answer_all(row))
                try:
                    await run.work
                except asyncio.CancelledError:
                    if run.end_as is None:
                        raise
            unanswered = _expired if run.end_as == EXPIRED else None
            await store.finish(row.id, run.end_as or COMPLETED, unanswered)
        except* NotOwnerError:
            # The batch has failed, or another gateway runs it.
            pass
        except* QuireError as errors:
            why = "; ".join(dict.fromkeys(map(str, errors.exceptions)))
            _logger.warning("batch %s stopped, and continues later: %s", row.id, why)
        except* Exception as errors:
            # A gateway takes it again when the lease expires.
            _logger.error("batch %s stopped, and continues later", row.id, exc_info=errors)
        finally:
            if run.work is not None:
                run.work.cancel()

    async def _answer_all(self, row: BatchRow) -> None:
        """Runs all requests that have no answers. Raises NotOwnerError, by itself or in a group, if the batch must not
        continue."""
        store = self.store
        if row.endpoint not in self._call_readers:
            _logger.warning("batch %s waits for a gateway that serves %s (--fronts)", row.id, row.endpoint)
            raise NotOwnerError
        caller = self._authenticator.find(row.key_id, row.tenant)
        if caller is None:
            error = LineError(None, "invalid_api_key", "the API key of the batch is no longer valid")
            await store.run(store.fail, row.id, [error.shown()])
            raise NotOwnerError
        set_caller(caller)
        if row.status == VALIDATING:
            path = store.files.path_of(row.input_file)
            try:
                lines, errors = await asyncio.to_thread(
                    read_lines,
                    *(path, row.endpoint, self.limits),
                    self._models.violation,
                )
            except NotFound as error:
                lines, errors = [], [LineError(None, error.reason.lower(), error.message)]
            if errors:
                await store.run(store.fail, row.id, [error.shown() for error in errors])
                raise NotOwnerError
            await store.run(store.begin, row.id, lines)
        last, underway = 0, asyncio.Semaphore(self._concurrency)
        async with asyncio.TaskGroup() as group:
            while lines := await store.run(store.open_lines, row.id, last, _LINES_AT_ONCE):
                for line in lines:
                    await underway.acquire()
                    # As a callback, since the task may be cancelled before it begins.
                    group.create_task(self._answer(row, line)).add_done_callback(lambda _: underway.release())
                last = lines[-1].line

    async def _answer(self, row: BatchRow, line: Line) -> None:
        answer, is_good = await self._answer_of(row, line)
        await self.store.run(self.store.answer, row.id, line.line, answer, is_good=is_good)

    async def _answer_of(self, row: BatchRow, line: Line) -> tuple[bytes, bool]:
        while True:
            # A request that waits for its next try does not occupy a place.
            async with self._room:
                await self._wait_for_others()
                call_id, whole, failed = await self._try(row, line)
            if failed is None:
                return _answered(line.custom_id, 200, call_id, whole), True
            if not _is_retried(failed):
                return _answered(line.custom_id, failed.status, call_id, OPENAI.error_body(failed)), False
            await asyncio.sleep(float(failed.headers.get("retry-after", _RETRY_S)))

    async def _try(self, row: BatchRow, line: Line) -> tuple[str, bytes, ErrorAnswer | None]:
        """Runs a request once. Returns the id of its call, its answer, and its error, if any."""
        call: Call | None = None
        held = self._memory.begin(lambda: None)
        held.complete()
        try:
            held.add(line.size)
            message_memory.set(held)
            body = await asyncio.to_thread(body_of, self.store.files.path_of(row.input_file), line)
            generator, call = await self._call_readers[row.endpoint](body)
            return call.id, await whole_answer(generator, call, LOWEST_PRIORITY), None
        except Exception as error:
            failed = error_answer(error)
            return "" if call is None else call.id, b"", failed
        finally:
            held.release()

    async def _wait_for_others(self) -> None:
        """Returns when no request of this gateway waits at a scheduler."""
        while True:
            now = clock.monotonic()
            if now - self._looked_at >= _LOOK_S:
                self._looked_at = now
                loads = await self._models.loads(self._gateway_id)
                self._others_wait = any(load.num_waiting for load in loads.values())
            if not self._others_wait:
                return
            await asyncio.sleep(_LOOK_S)


def _is_retried(answer: ErrorAnswer) -> bool:
    return answer.status in _RETRIED and answer.headers.get("x-should-retry") != "false"


def _answered(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line of the results. `body` is JSON without line ends. As in all answers, characters that some readers parse as
    line ends are escaped."""
    head: dict[str, Any] = {"id": f"{_ANSWER_ID}{entropy.random_hex(12)}", "custom_id": custom_id}
    response = as_json({"status_code": status, "request_id": request_id})
    return as_json(head)[:-1] + b',"response":' + response[:-1] + b',"body":' + body + b'},"error":null}'


def _expired(custom_id: str) -> bytes:
    error = {"code": "batch_expired", "message": "the batch expired before this request was answered"}
    return as_json(
        {"id": f"{_ANSWER_ID}{entropy.random_hex(12)}", "custom_id": custom_id, "response": None, "error": error}
    )


def read_lines(
    path: Path, endpoint: str, limits: BatchLimits, wrong_model: WrongModel = lambda _: None
) -> tuple[list[Line], list[LineError]]:
    """The requests and the errors of a file. In bodies it checks only the model, and fields that batches do not allow.
    Blank lines are skipped. Must run in a thread, since large files take long. Raises the errors of `opened`."""
    lines: list[Line] = []
    errors: list[LineError] = []
    seen: dict[str, int] = {}
    num_blank = 0
    with opened(path) as file:
        for number, first, data in _pieces(file, limits.max_line_bytes):
            if len(data) > limits.max_line_bytes:
                message = f"the line has more than {shown_bytes(limits.max_line_bytes)} (--max-message-bytes)"
                errors.append(LineError(number, "line_too_long", message))
                break
            if not data.strip():
                if (num_blank := num_blank + 1) > limits.max_requests:
                    # Skipping lines also takes time.
                    message = f"the file has more than {limits.max_requests:,} blank lines (--max-batch-requests)"
                    errors.append(LineError(number, "too_many_lines", message))
                    break
                continue
            if len(lines) >= limits.max_requests:
                message = f"the file has more than {limits.max_requests:,} requests (--max-batch-requests)"
                errors.append(LineError(number, "too_many_requests", message))
                break
            found = _read(number, data, endpoint, limits.entries, wrong_model)
            if isinstance(found, LineError):
                errors.append(found)
            elif found in seen:
                message = f"is {found!r:.100}, as in line {seen[found]:,}; it must be unique"
                errors.append(LineError(number, "duplicate_custom_id", f"custom_id {message}", "custom_id"))
            else:
                seen[found] = number
                lines.append(Line(number, found, first, len(data)))
            if len(errors) >= _MAX_ERRORS:
                break
    if not lines and not errors:
        errors.append(LineError(None, "empty_file", "the file has no request"))
    return lines, errors


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens the content of a file. Raises NotFound if it was removed from the directory, and Unavailable if the disk
    fails."""
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError as error:
        raise NotFound(
            f'the content of file "{path.name}" is gone from the directory of batches; upload it again',
            reason="FILE_NOT_FOUND",
        ) from error
    except OSError as error:
        raise Unavailable(f'file "{path.name}" cannot be read: {error.strerror}') from error


def body_of(path: Path, line: Line) -> bytes:
    """The body of a request in a file that was checked before, as JSON. Raises the errors of `opened`."""
    with opened(path) as file:
        file.seek(line.first)
        return to_json(from_json(file.read(line.size).removeprefix(_BOM), allow_inf_nan=False)["body"])


def _pieces(file: BinaryIO, max_bytes: int) -> Any:
    """Yields number, offset and bytes of each line; a line that is too long is cut off and is the last one."""
    number = first = 0
    while data := file.readline(max_bytes + 2):
        number += 1
        size = len(data)
        yield number, first, data.removesuffix(b"\n").removesuffix(b"\r")
        if size > max_bytes + 1 and not data.endswith(b"\n"):
            return
        first += size


def _read(number: int, data: bytes, endpoint: str, limits: EntryLimits, wrong_model: WrongModel) -> str | LineError:
    """The custom_id of a line, or the line's error."""

    def wrong(code: str, message: str, param: str | None = None) -> LineError:
        return LineError(number, code, message, param)

    try:
        check_values(data, limits, "the line")
        fields = from_json(data.removeprefix(_BOM) if number == 1 else data, allow_inf_nan=False)
    except InvalidArgument as error:
        return wrong("too_many_values", error.message)
    except ValueError as error:
        return wrong("invalid_json_line", f"the line is not valid JSON: {error!s:.200}")
    if not isinstance(fields, dict):
        return wrong("invalid_json_line", "the line is not an object")
    custom_id, method, url, body = (fields.get(name) for name in _PARAMETERS)
    for name in _PARAMETERS:
        if fields.get(name) is None:
            return wrong("missing_required_parameter", f"{name} is missing", name)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        return wrong("invalid_custom_id", f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters", "custom_id")
    if method != "POST":
        return wrong("invalid_method", f"method is {method!r:.40}; it must be POST", "method")
    if url != endpoint:
        return wrong("invalid_url", f"url is {url!r:.80}; the batch is for {endpoint}", "url")
    if not isinstance(body, dict):
        return wrong("invalid_body", "body must be an object", "body")
    for name, code in _NOT_IN_BATCHES.items():
        if body.get(name):
            return wrong(code, f"body.{name} is set; answers of a batch are whole", f"body.{name}")
    model = body.get("model")
    if isinstance(model, str) and model and (violation := wrong_model(model)) is not None:
        return wrong("model_not_found", f"body.model {violation.description}", "body.model")
    return custom_id
