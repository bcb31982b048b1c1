"""Faults: what users write for them, how each happens, and how it proves that it has happened."""

import asyncio
import contextlib
import errno
import os
import re
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from quire_torture.link import Link
from quire_torture.processes import Process, listener_of, named, own_processes, root_of

_PLACE = re.compile(r"\{pid:([^{}]+)\}")
_ENDS_S, _STOPS_S, _COMMAND_S, _MARK_S = 30.0, 5.0, 120.0, 1.0
_LINK_S = 5.0
"""How long a link is held, delayed or slow, a disk full, and memory taken."""
_DELAY_S, _SLOW_BYTES_PER_S = 0.3, 20_000.0
_MAX_FILL = 8 << 30
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
SYNTAX = """\
kill -9 {pid:NAME}   any command with the pid of a process of the server that has NAME in its command
                     line before the first flag
kill NAME, term NAME SIGKILL or SIGTERM; proven when the process has ended
stop NAME            SIGSTOP for 5 s, then SIGCONT; proven by the state of the process
cut, half-open       resets all connections; or lets no byte pass for 5 s, then resets them
delay, slow          for 5 s: 0.3 s for each piece of data; or 20 kB/s
leave                a client goes away in the middle of its stream
fill DIR             fills the file system of DIR (at most 8 GiB) for 5 s; proven by ENOSPC
memory SIZE          takes that much memory (such as 2GiB) for 5 s; proven by MemAvailable"""


class NothingHappenedError(Exception):
    """A fault that did not happen; the message says why. It is not counted."""


@dataclass(slots=True)
class Place:
    """The server that faults strike.

    Attributes:
        port: Its port.
        link: The proxy in front of the server.
        leave: Makes a client with an open stream go away; False if there is none.
        root: The process whose tree is the server, if the user has named it.
    """

    port: int
    link: Link
    leave: Callable[[], bool]
    root: int | None = None

    def tree(self) -> int | None:
        """The process whose tree is the server now: another one after a restart. None if none of this user listens."""
        if (self.root is None or self.root not in own_processes()) and (pid := listener_of(self.port)) is not None:
            self.root = root_of(pid)
        return self.root


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault.

    Attributes:
        text: As the user wrote it.
        happen: Raises NothingHappenedError; returns the proof.
        needs_process: Whether it strikes a process of this machine.
    """

    text: str
    happen: Callable[[Place, Random], Awaitable[str]]
    needs_process: bool = False

    @property
    def needs_link(self) -> bool:
        return self.text in ("cut", "half-open", "delay", "slow")


async def _nothing(place: Place, rng: Random) -> str:
    return "nothing was done"


NOTHING = Fault("nothing", _nothing)
"""Stands in for each fault in the run without faults, so that pauses are counted equally."""


def parse_fault(text: str) -> Fault:
    """A fault from its text. Raises ValueError if there is no such fault."""
    word, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    if _PLACE.search(text):
        return Fault(text, _command_on(text), needs_process=True)
    match word:
        case "kill" | "term" if rest and not rest.startswith("-"):
            return Fault(text, _signal(signal.SIGKILL if word == "kill" else signal.SIGTERM, rest), True)
        case "stop" if rest:
            return Fault(text, _stop(rest), True)
        case "fill" if rest:
            return Fault(text, _fill(Path(rest)))
        case "memory" if rest[-3:] in _UNITS and rest[:-3].isdigit():
            return Fault(text, _memory(int(rest[:-3]) * _UNITS[rest[-3:]]))
        case "cut" | "half-open" | "delay" | "slow" | "leave" if not rest:
            return Fault(text, {"cut": _cut, "leave": _leave}.get(word) or _link(word))
    raise ValueError(f'"{text}" is no fault; there are:\n{SYNTAX}')


def command_fault(text: str) -> Fault:
    """A command of the shell; exit status 0 proves that it happened."""

    async def happen(place: Place, rng: Random) -> str:
        return await _run("sh", "-c", text)

    return Fault(text, happen)


async def _run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(_COMMAND_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise NothingHappenedError(f"{shlex.join(command)} did not end within {_COMMAND_S:.0f} s") from None
    if process.returncode:
        said = output.decode(errors="replace").strip()[-200:]
        raise NothingHappenedError(f"{shlex.join(command)} ended with status {process.returncode}: {said}")
    return "status 0"


def _pick(place: Place, name: str, rng: Random) -> Process:
    root = place.tree()
    found = [] if root is None else named(root, name)
    if not found:
        raise NothingHappenedError(f"no process of the server is named {name}")
    return rng.choice(found)


def _command_on(text: str) -> Callable[[Place, Random], Awaitable[str]]:
    async def happen(place: Place, rng: Random) -> str:
        picked = [_pick(place, name, rng) for name in _PLACE.findall(text)]
        pids = iter(picked)
        command = _PLACE.sub(lambda _: str(next(pids).pid), text)
        said = await _run(*shlex.split(command))
        for _ in range(round(_MARK_S / 0.05)):
            if all(each.state in _STATES for each in picked):
                break
            await asyncio.sleep(0.05)
        states = [f"{each.pid} is {_STATES.get(each.state, 'still there')}" for each in picked]
        return f"{command}: {said}, {', '.join(states)}"

    return happen


_STATES = {None: "gone", "T": "stopped"}


def _signal(number: signal.Signals, name: str) -> Callable[[Place, Random], Awaitable[str]]:
    async def happen(place: Place, rng: Random) -> str:
        process = _pick(place, name, rng)
        _send(process, number)
        for _ in range(round(_ENDS_S / 0.05)):
            if process.state is None:
                return f"{process.pid} is gone"
            await asyncio.sleep(0.05)
        raise NothingHappenedError(f"process {process.pid} is there {_ENDS_S:.0f} s after {number.name}")

    return happen


def _send(process: Process, number: signal.Signals) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        raise NothingHappenedError(f"process {process.pid} had ended before") from None


def _stop(name: str) -> Callable[[Place, Random], Awaitable[str]]:
    async def happen(place: Place, rng: Random) -> str:
        process = _pick(place, name, rng)
        _send(process, signal.SIGSTOP)
        try:
            await asyncio.sleep(_STOPS_S)
            if process.state != "T":
                raise NothingHappenedError(f"process {process.pid} is not stopped: {process.state}")
            return f"{process.pid} was stopped for {_STOPS_S:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)

    return happen


async def _cut(place: Place, rng: Random) -> str:
    if not (count := place.link.reset()):
        raise NothingHappenedError("no connection was open")
    return f"{count // 2} connections were reset"


async def _leave(place: Place, rng: Random) -> str:
    if not place.leave():
        raise NothingHappenedError("no stream was open")
    return "a client went away in the middle of its stream"


def _link(word: str) -> Callable[[Place, Random], Awaitable[str]]:
    async def happen(place: Place, rng: Random) -> str:
        link, before = place.link, place.link.num_touched
        if word == "half-open":
            link.hold()
        link.delay_s = _DELAY_S if word == "delay" else 0.0
        link.bytes_per_s = _SLOW_BYTES_PER_S if word == "slow" else None
        await asyncio.sleep(_LINK_S)
        if word == "half-open":
            link.reset()
        link.let_pass()
        if not (count := link.num_touched - before):
            raise NothingHappenedError("no data came in this time")
        return f"{count} pieces of data"

    return happen


def _fill(directory: Path) -> Callable[[Place, Random], Awaitable[str]]:
    async def happen(place: Place, rng: Random) -> str:
        filler = directory / f".torture-{os.getpid()}"
        try:
            written = await asyncio.to_thread(_write_all, filler)
            await asyncio.sleep(_LINK_S)
            return f"no space left after {written >> 20} MiB"
        finally:
            filler.unlink(missing_ok=True)

    return happen


def _write_all(filler: Path) -> int:
    written, piece = 0, bytes(1 << 20)
    with filler.open("wb", buffering=0) as file:
        while written < _MAX_FILL:
            try:
                written += file.write(piece)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    return written
                raise
    raise NothingHappenedError(f"{filler.parent} has more than {_MAX_FILL >> 30} GiB; give a small file system")


def _memory(size: int) -> Callable[[Place, Random], Awaitable[str]]:
    async def happen(place: Place, rng: Random) -> str:
        before = _available()
        if size > before - (512 << 20):
            raise NothingHappenedError(f"only {before >> 20} MiB are available; 512 MiB must stay")
        taking = f"import time; taken = bytearray(b'x') * {size}; print(flush=True); time.sleep({_LINK_S})"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", taking, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.readline()
        fell = before - _available()
        await process.wait()
        if fell < size // 2:
            raise NothingHappenedError(f"available memory fell by only {fell >> 20} MiB")
        return f"available memory fell by {fell >> 20} MiB"

    return happen


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
