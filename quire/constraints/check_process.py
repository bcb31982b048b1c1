"""The process that compiles constraints on trial: `python -m quire.constraints.check_process MODEL_DIRECTORY`.

It reads the vocabulary once, and compiles each constraint in a child of its own, which a limit of processor time, time
or memory may end. So no constraint can harm the next one, and none needs to be trusted.

Requests come on stdin and answers go to stdout, each a header (length, number) and that many bytes. A request is a
`Constraint`; its answer is empty, or a field and a description as a JSON list. Answers come in any order.
"""

import json
import os
import resource
import selectors
import signal
import struct
import sys
from pathlib import Path

from google.protobuf.message import DecodeError

from quire.common.v1.common_pb2 import Constraint
from quire.constraints.json_schema import ConstraintError
from quire.constraints.matcher import MaskMaker, Template, Vocabulary
from quire.constraints.program import program_of
from quire.model_directory import ModelDirectory

HEADER = struct.Struct("<IQ")
"""The length of what follows and the number of the request."""

CPU_SECONDS = 0.5
"""Workers compile what is accepted, too, and rows wait for it."""
WALL_SECONDS = 20
MEMORY_BYTES = 512 << 20
# An answer must be written at once, so that those of several children do not mix.
_MAX_ANSWER_BYTES = 2048
# Tokens that are tried after the beginning: a constraint may begin harmlessly.
_TRIED_TOKENS = 16

_TOO_SLOW = f"takes more than {CPU_SECONDS} s of processor time to compile; make it smaller or less ambiguous"
_TOO_LARGE = f"takes more than {MEMORY_BYTES >> 20} MiB to compile; make it smaller or less ambiguous"
_CAUSES = {
    signal.SIGPROF: _TOO_SLOW,
    signal.SIGALRM: f"did not compile within {WALL_SECONDS} s",
}


def check(vocabulary: Vocabulary | ConstraintError, content: bytes) -> list[str] | None:
    """Field and description of what is wrong with a constraint; None where it can be enforced."""
    try:
        if isinstance(vocabulary, ConstraintError):
            raise vocabulary
        template = Template(program_of(Constraint.FromString(content), vocabulary.special_tokens), vocabulary)
        _try_tokens(template)
    except ConstraintError as error:
        return [error.field, error.description]
    except DecodeError as error:
        return ["", f"is malformed: {error}"]
    except (MemoryError, RecursionError):
        return ["", _TOO_LARGE]
    return None


def _try_tokens(template: Template) -> None:
    """Writes the first tokens of a text. Raises ConstraintError where no token may follow."""
    vocabulary = template.vocabulary
    maker, matcher = MaskMaker(vocabulary, 1), template.matcher(tuple(vocabulary.eos))
    for _ in range(_TRIED_TOKENS):
        mask = maker.make([matcher], [True])[0]
        if matcher.error is not None:
            raise ConstraintError("", matcher.error)
        words = mask.nonzero()[0]
        # The last possible token: of bytes and letters, the more unusual one.
        word = int(mask[words[-1]]) & 0xFFFFFFFF
        matcher.consume(int(words[-1]) * 32 + word.bit_length() - 1)


def _run_child(vocabulary: Vocabulary | ConstraintError, number: int, content: bytes) -> None:
    """Compiles one constraint, answers and ends this process."""
    status = 1
    try:
        # Steps and streams come first.
        os.nice(10)
        for each in (signal.SIGALRM, signal.SIGCHLD):
            signal.signal(each, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.alarm(WALL_SECONDS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        limit = _address_space() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        _answer(number, check(vocabulary, content))
        status = 0
    finally:
        os._exit(status)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _answer(number: int, problem: list[str] | None) -> None:
    payload = b""
    if problem is not None:
        field, description = problem
        while len(payload := json.dumps([field, description]).encode()) > _MAX_ANSWER_BYTES:
            field, description = field[:200], description[: len(description) // 2] + "..."
    os.write(1, HEADER.pack(len(payload), number) + payload)


def _reap(numbers: dict[int, int]) -> None:
    """Answers for the children that ended without an answer."""
    while numbers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        number = numbers.pop(pid)
        if os.WIFSIGNALED(status):
            # What runs out of memory aborts, or is ended by the guard of its stack.
            _answer(number, ["", _CAUSES.get(signal.Signals(os.WTERMSIG(status)), _TOO_LARGE)])
        elif os.WEXITSTATUS(status):
            _answer(number, ["", _TOO_LARGE])


def serve(vocabulary: Vocabulary | ConstraintError) -> None:
    """Answers requests until stdin ends."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    buffer = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == woken:
                    os.read(woken, 4096)
                    _reap(children)
                    continue
                if not (data := os.read(0, 1 << 16)):
                    for pid in children:
                        os.kill(pid, signal.SIGKILL)
                    return
                buffer += data
                while len(buffer) >= HEADER.size:
                    length, number = HEADER.unpack_from(buffer)
                    if len(buffer) < HEADER.size + length:
                        break
                    content = bytes(buffer[HEADER.size : HEADER.size + length])
                    del buffer[: HEADER.size + length]
                    if (pid := os.fork()) == 0:
                        _run_child(vocabulary, number, content)
                    children[pid] = number


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        vocabulary = Vocabulary.of_model(ModelDirectory.open(sys.argv[1]), None)
    except ValueError as error:
        # The answer to every constraint, since the gateway serves requests without one all the same.
        vocabulary = ConstraintError("", f"cannot be enforced with the tokenizer of this model: {error}")
    serve(vocabulary)


if __name__ == "__main__":
    main()
