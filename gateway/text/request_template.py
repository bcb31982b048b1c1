"""Chat templates that requests bring, rendered in a process of their own.

Such a template is a program of the caller: it may loop without end, or make a text of gigabytes. The process has
bounded processor time and memory, and starts again when it ended.
"""

import functools
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO

from gateway.text.bounded import own_memory
from gateway.text.chat import ChatTemplate
from gateway.types import ChatPrompt
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import FieldViolation, InvalidArgument, Unavailable, invalid_field
from quire.rpc.process import command_of, environ_of
from quire.runtime.settings import ConfigurationError

MAX_PROCESSOR_S = 2
MAX_MEMORY_BYTES = 256 << 20
"""The maximum memory of a rendering, in addition to the memory of the process itself."""
MAX_TEXT_BYTES = 4 << 20
_KEPT_TEMPLATES = 16
_LENGTH = struct.Struct("<I")
_FIELD = "chat_template"


class TemplateProcess:
    """Renders conversations by templates of requests, one after the other. Thread-safe."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the texts of bos_token, eos_token and the like."""
        self._special_tokens = dict(special_tokens)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, source: str, prompt: ChatPrompt) -> str:
        """The prompt of a conversation. Takes at most MAX_PROCESSOR_S of CPU time plus the start of a process.

        Raises:
            InvalidArgument: the template is invalid, refuses the conversation, or takes too much.
            Unavailable: the process cannot be started.
        """
        job = pickle.dumps((source, prompt, self._special_tokens))
        with self._lock:
            try:
                answer = self._asked(job)
            except OSError as error:
                self._end()
                raise Unavailable("the process that renders templates of requests cannot be used; try again") from error
        if answer is None:
            raise _refusal(f"takes more than {MAX_PROCESSOR_S} s of processor time to render")
        if (text := answer.get("text")) is not None:
            return text
        violations = [FieldViolation(*each) for each in answer["violations"]]
        raise InvalidArgument(answer["message"], reason=answer["reason"], violations=violations)

    def _asked(self, job: bytes) -> dict[str, Any] | None:
        """The answer to a job; None if the process ended in it."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                command_of(__name__), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ_of(os.environ)
            )
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        _write(to, job)
        if (data := _read(back)) is None:
            self._end()
            return None
        return json.loads(data)

    def close(self) -> None:
        """Ends the process, also in the middle of a rendering."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _write(file: BinaryIO | Any, data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def _read(file: BinaryIO | Any) -> bytes | None:
    """Reads one message; None at the end of the file."""
    head = file.read(_LENGTH.size)
    data = file.read(*_LENGTH.unpack(head)) if len(head) == _LENGTH.size else b""
    return data if len(head) == _LENGTH.size and len(data) == _LENGTH.unpack(head)[0] else None


def _refusal(description: str) -> InvalidArgument:
    return InvalidArgument.of_field(_FIELD, f"{description}; make it simpler", reason="CHAT_TEMPLATE")


@functools.lru_cache(_KEPT_TEMPLATES)
def _template_of(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    try:
        return ChatTemplate(source, dict(special_tokens))
    except ConfigurationError as error:
        raise invalid_field(_FIELD, str(error).removeprefix("the model's chat template ")) from error


def _rendered(source: str, prompt: ChatPrompt, special_tokens: dict[str, str]) -> str:
    text = _template_of(source, tuple(special_tokens.items())).render(prompt)
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise invalid_field(_FIELD, "writes a lone surrogate, which is not valid Unicode") from error
    if num_bytes > MAX_TEXT_BYTES:
        raise _refusal(f"writes {shown_bytes(num_bytes)}; the max is {shown_bytes(MAX_TEXT_BYTES)}")
    return text


def _answer_to(job: bytes) -> dict[str, Any]:
    try:
        return {"text": _rendered(*pickle.loads(job))}
    except InvalidArgument as error:
        refusal = error
    except (MemoryError, OverflowError):
        refusal = _refusal(f"takes more than {shown_bytes(MAX_MEMORY_BYTES)} of memory to render")
    return {
        "message": refusal.message.replace("the model's chat template", "the request's chat template"),
        "reason": refusal.reason,
        "violations": [
            (each.field, each.description.replace("the model's chat template", "the request's chat template"))
            for each in refusal.violations
        ],
    }


def _limit(kind: int, value: int) -> None:
    """Sets the soft limit of the process; it may be raised again."""
    _, highest = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if highest == resource.RLIM_INFINITY else min(value, highest), highest))


def main() -> None:
    """Answers the jobs of standard input until it ends."""
    _template_of("", ()).render(ChatPrompt([]))
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, own_memory() + MAX_MEMORY_BYTES)
    while (job := _read(sys.stdin.buffer)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # In whole seconds. The system ends a process that exceeds it.
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + 1) + MAX_PROCESSOR_S)
        _write(sys.stdout.buffer, json.dumps(_answer_to(job)).encode())


if __name__ == "__main__":
    main()
