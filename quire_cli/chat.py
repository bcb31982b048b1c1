"""`quire chat`: a conversation in the terminal, or with piped lines."""

import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from quire.client import ChatMessage, Client, QuireError, Stream
from quire.runtime.settings import load_settings, setting
from quire_cli.flags import GenerationFlags, not_utf8
from quire_cli.main import explain

PROGRAM = "quire chat"
_HELP = "/exit leaves, /reset forgets the conversation, Ctrl-C stops an answer"
# One word and nothing else: a message may begin with a path.
_COMMAND = re.compile(r"/\w*")
_WAIT_S = 0.2


@dataclass(frozen=True, slots=True)
class ChatFlags(GenerationFlags):
    """Talks with a model: each line is a message. Commands: /exit, /reset, /help."""

    system: str | None = setting(None, "system message at the start of the conversation", metavar="TEXT")


@dataclass(slots=True)
class Conversation:
    """The messages so far."""

    system: str | None
    messages: list[ChatMessage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all but the system message."""
        self.messages = [] if self.system is None else [ChatMessage("system", self.system)]


def main(argv: Sequence[str]) -> int:
    """Talks until the input ends; 1 when an answer failed and the input is not a terminal."""
    flags = load_settings(ChatFlags, argv, os.environ, program=PROGRAM)
    interactive = sys.stdin.isatty()
    conversation = Conversation(flags.system)
    failed = False
    if interactive:
        with suppress(ImportError):
            importlib.import_module("readline")  # line editing and history
        # Scripts start background commands with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(_HELP)
    with Client(flags.address, api_key=flags.api_key, tls=flags.client_tls()) as client:
        for line in _lines(interactive):
            match line.strip():
                case "":
                    continue
                case "/exit":
                    break
                case "/reset":
                    conversation.reset()
                case "/help":
                    print(_HELP)
                case command if _COMMAND.fullmatch(command):
                    print(f"{PROGRAM}: there is no command {command}; {_HELP}", file=sys.stderr, flush=True)
                case _:
                    failed |= not _answer(client, conversation, line, flags)
    return 1 if failed and not interactive else 0


def _lines(interactive: bool) -> Iterator[str]:
    """The lines that the user types, until the end of input. Ctrl-C at the prompt discards the line."""
    while interactive:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\n(/exit leaves)")
        except EOFError:
            print()
            return
    try:
        for line in sys.stdin:
            yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise not_utf8("stdin", error) from error


def _answer(client: Client, conversation: Conversation, line: str, flags: ChatFlags) -> bool:
    """Streams the answer to one message; returns False if the call failed, and the message is forgotten then.

    Ctrl-C ends the answer and keeps its text so far.
    """
    said = ""
    messages = [*conversation.messages, ChatMessage("user", line)]
    try:
        with client.chat_stream(messages, flags.options(), model=flags.model) as stream:
            for piece in _pieces(stream):
                said += piece
                print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" (stopped)")
    except QuireError as error:
        print(f"{PROGRAM}: error: {explain(error)}", file=sys.stderr, flush=True)
        return False
    if said:
        conversation.messages = [*messages, ChatMessage("assistant", said)]
    return True


def _pieces(stream: Stream) -> Iterator[str]:
    """The text of an answer as it comes; raises QuireError when the call fails.

    A thread reads the call. Ctrl-C interrupts the main thread anywhere: inside gRPC it could leave a lock taken, for
    which the next call would wait.
    """
    pieces: SimpleQueue[str | Exception | None] = SimpleQueue()

    def read() -> None:
        try:
            for piece in stream.text:
                pieces.put(piece)
            pieces.put(None)
        except Exception as error:  # the main thread raises it
            pieces.put(error)

    threading.Thread(target=read, name="answer", daemon=True).start()
    while (piece := _next_of(pieces)) is not None:
        if isinstance(piece, Exception):
            raise piece
        yield piece


def _next_of(pieces: SimpleQueue[str | Exception | None]) -> str | Exception | None:
    """Waits in short parts: a signal that comes just before one is only looked at after it."""
    while True:
        with suppress(Empty):
            return pieces.get(timeout=_WAIT_S)
