"""Checks constraints before their requests are accepted: a separate process (`check_process`) compiles them, so that a
constraint cannot harm the gateway.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import socket
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from gateway.turns import TenantQueue
from quire.common.v1.common_pb2 import Constraint
from quire.constraints.check_process import CUT_SHORT, HEADER
from quire.constraints.program import MAX_CONSTRAINT_BYTES
from quire.rpc.errors import InvalidArgument, ResourceExhausted, Unavailable, invalid_field
from quire.rpc.process import command_of, environ_of

MAX_RUNNING = 2
"""Maximum constraints that are compiled at once; at most one per tenant while other tenants wait."""
MAX_WAITING = 64
MAX_WAITING_OF_TENANT = 16
# Limit of the cached verdicts. Each is smaller than 3 KiB.
MAX_KEPT = 4096
_RETRY_AFTER_MS = 1000
_FIELD = "sampling.constraint"
_ENDED = "the process that compiles constraints ended; try again"
_logger = logging.getLogger(__name__)

Verdict = tuple[str, str] | None
"""The invalid field, relative to the constraint, and a description; None if the constraint is valid."""


class Trial(Protocol):
    """Compiles constraints in isolation: `TrialProcess`, or a simulated one."""

    async def verdict(self, content: bytes) -> Verdict: ...
    def close(self) -> None: ...


class ConstraintChecker:
    """Checks whether constraints can be enforced. Verdicts are cached by content; a tenant's verdicts never evict the
    verdicts of a tenant that has fewer.

    Attributes:
        is_starting: The trial was started before its first use, and its tables are not made yet.
    """

    def __init__(self, trial: Trial, *, is_starting: bool = False) -> None:
        """`trial` compiles constraints, and is closed with this."""
        self._trial = trial
        self.is_starting = is_starting
        self._kept: dict[str, OrderedDict[bytes, Verdict]] = {}
        self._places = TenantQueue(MAX_RUNNING)
        self._underway: dict[bytes, asyncio.Task[Verdict]] = {}

    async def wait_until_started(self) -> None:
        """Waits for the tables of a trial that was started before; not for a trial that cannot be used."""
        with contextlib.suppress(Unavailable):
            # An empty constraint, whose verdict comes as soon as the tables are made.
            await self._trial.verdict(b"")

    async def check(self, constraint: Constraint, tenant: str) -> None:
        """Checks one constraint.

        Raises:
            InvalidArgument: it is malformed, not enforced, or takes too much time or memory.
            ResourceExhausted: too many constraints wait already.
            Unavailable: it could not be tried; no verdict is kept.
        """
        size = constraint.ByteSize()
        if size > MAX_CONSTRAINT_BYTES:
            raise _refusal(("", f"has {size:,} bytes; the max is {MAX_CONSTRAINT_BYTES:,}"))
        content = constraint.SerializeToString(deterministic=True)
        key = hashlib.blake2b(content, digest_size=32).digest()
        kept = self._kept.get(tenant)
        if kept is not None and key in kept:
            kept.move_to_end(key)
            verdict = kept[key]
        else:
            verdict = await self._compile(key, content, tenant)
            self._cache(key, verdict, tenant)
        if verdict is not None:
            raise _refusal(verdict)

    async def _compile(self, key: bytes, content: bytes, tenant: str) -> Verdict:
        if (task := self._underway.get(key)) is None:
            task = asyncio.create_task(self._try(content, tenant))
            self._underway[key] = task
            task.add_done_callback(lambda ended: self._forget(key, ended))
        # A cancelled caller does not cancel the check, for which others may wait.
        return await asyncio.shield(task)

    async def _try(self, content: bytes, tenant: str) -> Verdict:
        num_waiting = self._places.num_waiting
        if num_waiting[tenant] >= MAX_WAITING_OF_TENANT or num_waiting.total() >= MAX_WAITING:
            raise ResourceExhausted(
                f"{num_waiting[tenant]} constraints of this tenant wait to be compiled; try again",
                reason="CONSTRAINTS_QUEUE_FULL",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        async with self._places.place(tenant):
            return await self._trial.verdict(content)

    def _forget(self, key: bytes, ended: asyncio.Task[Verdict]) -> None:
        self._underway.pop(key, None)
        if not ended.cancelled():
            # Marks the error as retrieved: asyncio logs it otherwise if no caller waits any more.
            ended.exception()

    def _cache(self, key: bytes, verdict: Verdict, tenant: str) -> None:
        self._kept.setdefault(tenant, OrderedDict())[key] = verdict
        if sum(map(len, self._kept.values())) > MAX_KEPT:
            greatest = max(self._kept, key=lambda each: len(self._kept[each]))
            self._kept[greatest].popitem(last=False)
            if not self._kept[greatest]:
                del self._kept[greatest]

    def close(self) -> None:
        """Ends the process."""
        self._trial.close()


def _refusal(verdict: tuple[str, str]) -> InvalidArgument:
    field, description = verdict
    return invalid_field(f"{_FIELD}.{field}" if field else _FIELD, description)


class TrialProcess:
    """The process that compiles constraints. It starts at the first use, and again if it ended."""

    def __init__(self, model_directory: Path) -> None:
        self._model_directory = model_directory
        self._started: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._answers: dict[int, asyncio.Future[Verdict]] = {}
        self._next_number = 0

    def start(self) -> None:
        """Starts the process before its first use, so that no request waits for the tables of the vocabulary."""
        with contextlib.suppress(OSError):  # then the first use tries again, and says so
            self._started = self._connected_process()

    async def verdict(self, content: bytes) -> Verdict:
        """The verdict on a serialized constraint.

        Raises:
            Unavailable: the process ended before it answered, or cannot be started, or the trial was cut short for a
                reason that says nothing about the constraint.
        """
        writer = await self._connection()
        self._next_number += 1
        number = self._next_number
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            writer.write(HEADER.pack(len(content), number) + content)
            await writer.drain()
            return await answer
        except ConnectionError as error:
            raise _unavailable(_ENDED) from error
        finally:
            self._answers.pop(number, None)

    async def _connection(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._writer is None or self._reading is None or self._writer.is_closing():
                ours, self._started = self._started, None
                try:
                    if ours is None:
                        self.close()
                        ours = await asyncio.to_thread(self._connected_process)
                except OSError as error:  # no more open files, processes or memory
                    raise _unavailable(_ENDED) from error
                reader, self._writer = await asyncio.open_unix_connection(sock=ours)
                self._reading = asyncio.create_task(self._read(reader), name="constraints")
            return self._writer

    def _connected_process(self) -> socket.socket:
        """Uses subprocess, because asyncio's way runs the fork handlers of gRPC, which may abort the new process."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command_of("quire.constraints.check_process"), str(self._model_directory)],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    # It forks, so it must have no threads.
                    env=environ_of(os.environ, OPENBLAS_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"),
                )
            except BaseException:
                ours.close()
                raise
        return ours

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                length, number = HEADER.unpack(await reader.readexactly(HEADER.size))
                payload = await reader.readexactly(length)
                answer = self._answers.get(number)
                if answer is None or answer.done():
                    continue
                if payload == CUT_SHORT:
                    answer.set_exception(_unavailable("the trial of a constraint was cut short; try again"))
                else:
                    answer.set_result(tuple(json.loads(payload)) if payload else None)
        except (asyncio.IncompleteReadError, ConnectionError):
            _logger.warning("the process that compiles constraints ended; the next constraint starts it again")
            self._reading = None
            self.close()
        finally:
            self._reading = None
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(_unavailable(_ENDED))

    def close(self) -> None:
        """Ends the process."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._started is not None:
            self._started.close()
            self._started = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _unavailable(message: str) -> Unavailable:
    return Unavailable(message, reason="CONSTRAINTS_UNAVAILABLE", retry_after_ms=_RETRY_AFTER_MS)
