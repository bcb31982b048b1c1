"""Runs batches with the lowest priority, each of their requests once.

Schedulers with the first-come-first-served policy ignore priorities. So the gateway also holds a batch request back
while other requests wait in the schedulers' queues: callers wait at most for batch requests that already run. A
request that fails with a retryable error is retried until the batch expires.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.api.answers import OPENAI, ErrorAnswer, as_json, error_answer
from gateway.api.batches.lines import BatchLimits, LineError, body_of, read_lines
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
from gateway.request.generator import Generator
from gateway.request.validation import wrong_model
from gateway.sqlite import NotOwnerError
from quire.rpc.errors import NotFound, QuireError
from quire.runtime import clock, entropy

_LOOK_S = 0.25
_RETRY_S = 1.0
_TAKEN_AT_ONCE = 4
_LINES_AT_ONCE = 64
_ANSWER_ID = "batch_req_"
ANSWER_BEGIN = f'{{"id":"{_ANSWER_ID}'.encode()
"""The first bytes of each line of results."""
_RETRIED = (429, 503, 504)
_logger = logging.getLogger(__name__)


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
        generator: Generator,
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
        super().__init__(store, generator, "batches")
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
                    lambda model: wrong_model(model, self._generator.adapters.visible(caller, model)),
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
            call = await self._call_readers[row.endpoint](body)
            return call.id, await whole_answer(self._generator, call, LOWEST_PRIORITY), None
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
                loads = await self._generator.replicas.calls.loads(self._gateway_id)
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
