"""The process that compiles constraints as a check: `python -m quire.constraints.check_process MODEL_DIRECTORY`.

It reads the vocabulary once, and compiles each constraint in a forked child with limits on processor time, wall clock
time and memory. So untrusted constraints cannot affect each other or the gateway.

Requests arrive on stdin and answers go to stdout, each as a header (length, number) and that many bytes. A request is a
`Constraint`; its answer is empty, or a field and a description as a JSON list, or CUT_SHORT. Answers may come in any
order.
"""

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from quire.common.v1.common_pb2 import Constraint
from quire.constraints.json_schema import ConstraintError
from quire.model_files.model_directory import ModelDirectory

if TYPE_CHECKING:
    from quire.constraints.matcher import Template, Vocabulary

HEADER = struct.Struct("<IQ")
"""The length of the following content and the number of the request."""

CUT_SHORT = b"null"
"""The answer if the trial ended for a reason that says nothing about the constraint."""

CPU_SECONDS = 0.5
"""CPU time limit of a trial; small, since a worker compiles an accepted constraint again while its rows wait."""
WALL_SECONDS = 20
MEMORY_BYTES = 512 << 20
# Small enough for one atomic write to the pipe, so that the answers of several children do not mix.
_MAX_ANSWER_BYTES = 2048
# The check also generates this many tokens, since the cost of a constraint may show only after its beginning.
_TRIED_TOKENS = 16

_TOO_SLOW = f"takes more than {CPU_SECONDS} s of processor time to compile; make it smaller or less ambiguous"
_TOO_LARGE = f"takes more than {MEMORY_BYTES >> 20} MiB to compile; make it smaller or less ambiguous"
# Signals by which a process ends itself, with the fault of the constraint. All other signals come from outside: a wall
# clock limit, for example, also ends a trial on a machine that is busy or stood still.
_FAULTS = {
    signal.SIGSEGV: "recursion that is too deep for the stack has this effect; nest it less",
    signal.SIGABRT: "the library does not accept it; simplify it",
    **dict.fromkeys((signal.SIGBUS, signal.SIGILL, signal.SIGFPE), "the library has a fault; simplify it"),
}
# Rust writes this before it aborts for lack of memory.
_WITHOUT_MEMORY = b"memory allocation of"


def check(vocabulary: "Vocabulary | ConstraintError", content: bytes) -> list[str] | None:
    """The invalid field of a constraint and a description; None if the constraint can be enforced."""
    from quire.constraints.matcher import Template

    try:
        if isinstance(vocabulary, ConstraintError):
            raise vocabulary
        _try_tokens(Template.of(Constraint.FromString(content), vocabulary))
    except ConstraintError as error:
        return [error.field, error.description]
    except DecodeError as error:
        return ["", f"is malformed: {error}"]
    except MemoryError:
        return ["", _TOO_LARGE]
    except RecursionError:
        return ["", "is nested too deeply to be compiled; nest it less"]
    return None


def _try_tokens(template: "Template") -> None:
    """Generates the first tokens of a text. Raises ConstraintError if no token is allowed."""
    from quire.constraints.matcher import MaskMaker

    vocabulary = template.vocabulary
    maker, matcher = MaskMaker(vocabulary, 1), template.matcher(tuple(vocabulary.eos))
    for _ in range(_TRIED_TOKENS):
        mask = maker.make([matcher], [True])[0]
        if matcher.error is not None:
            raise ConstraintError("", matcher.error)
        words = mask.nonzero()[0]
        # The last allowed token is more unusual than single bytes and letters.
        word = int(mask[words[-1]]) & 0xFFFFFFFF
        matcher.consume(int(words[-1]) * 32 + word.bit_length() - 1)


def _run_child(vocabulary: "Vocabulary | ConstraintError", number: int, content: bytes) -> None:
    """Compiles one constraint, writes the answer and exits."""
    status = 1
    try:
        # Steps and streams have priority.
        os.nice(10)
        for each in (signal.SIGALRM, signal.SIGCHLD):
            signal.signal(each, signal.SIG_DFL)
        signal.alarm(WALL_SECONDS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        _answer(number, check(vocabulary, content))
        status = 0
    except BaseException as error:
        # Errors of the library need not be an Exception.
        _answer(number, ["", f"cannot be compiled: {type(error).__name__}: {error}"])
        status = 0
    finally:
        os._exit(status)


def _answer(number: int, problem: list[str] | None) -> None:
    payload = b""
    if problem is not None:
        field, description = problem
        while len(payload := json.dumps([field, description]).encode()) > _MAX_ANSWER_BYTES:
            field, description = field[:200], description[: len(description) // 2] + "..."
    _write(number, payload)


def _write(number: int, payload: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # the next read tells that the gateway is gone
        os.write(1, HEADER.pack(len(payload), number) + payload)


def _reap(children: dict[int, tuple[int, int]]) -> None:
    """Writes the answers for children that ended without one. `children`: number and stderr by process."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        number, said = children.pop(pid)
        if status:
            errors = os.pread(said, _MAX_ANSWER_BYTES, 0)
            os.write(2, errors)
            description = _ended_by(status, errors)
            if description is None:
                _write(number, CUT_SHORT)
            else:
                _answer(number, ["", description])
        os.close(said)


def _ended_by(status: int, errors: bytes) -> str | None:
    """The fault of a constraint that the end of its compilation shows; None if it shows none."""
    if not os.WIFSIGNALED(status):
        return f"ends the process that compiles it with status {os.WEXITSTATUS(status)}; simplify it"
    end = os.WTERMSIG(status)
    if end == signal.SIGPROF:
        return _TOO_SLOW
    if end == signal.SIGABRT and _WITHOUT_MEMORY in errors:
        return _TOO_LARGE
    if end in _FAULTS:
        return f"ends the process that compiles it by {signal.Signals(end).name}: {_FAULTS[signal.Signals(end)]}"
    return None


def serve(vocabulary: "Vocabulary | ConstraintError") -> None:
    """Answers requests until stdin ends."""
    children: dict[int, tuple[int, int]] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _reap(children))
    with contextlib.suppress(ConnectionResetError):  # the gateway is gone, and left answers unread
        while len(header := sys.stdin.buffer.read(HEADER.size)) == HEADER.size:
            length, number = HEADER.unpack(header)
            content = sys.stdin.buffer.read(length)
            if len(content) < length:
                break
            said = os.memfd_create("stderr")
            # A child that ends at once is known before it is reaped.
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
            if (pid := os.fork()) == 0:
                os.dup2(said, 2)
                _run_child(vocabulary, number, content)
            children[pid] = number, said
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    # The gateway imports this module for the protocol, and not what compiles.
    from quire.constraints.matcher import Vocabulary

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        vocabulary = Vocabulary.of_model(ModelDirectory.open(sys.argv[1]), None, for_checks=True)
    except ValueError as error:
        # This becomes the answer to every constraint. The gateway still serves requests without constraints.
        vocabulary = ConstraintError("", f"cannot be enforced with the tokenizer of this model: {error}")
    serve(vocabulary)


if __name__ == "__main__":
    main()
