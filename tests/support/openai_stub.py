"""A small server with OpenAI's API, whose answers are a function of the request, with defects that can be planted."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Defects:
    """The defects of the server.

    Attributes:
        drops_every: Each token whose number, of all answers, is a multiple of it is not sent.
        mixes_at: The first stream from this number on gets the text of another one that runs.
        hangs_at: The first stream from this number on never ends.
        dies_at: No answer from this number on comes.
        cuts_at: The first stream from this number on ends without an end, as if nothing had happened.
        drifts_after: Number of the answer after which all log probabilities are others.
    """

    drops_every: int | None = None
    mixes_at: int | None = None
    hangs_at: int | None = None
    dies_at: int | None = None
    cuts_at: int | None = None
    drifts_after: int | None = None


@dataclass(slots=True)
class Stub:
    defects: Defects = field(default_factory=Defects)
    url: str = ""
    num_answers: int = 0
    _num_tokens: int = 0
    _writers: list[asyncio.StreamWriter] = field(default_factory=list[asyncio.StreamWriter])
    _running: dict[int, list[str]] = field(default_factory=dict[int, list[str]])

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator["Stub"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for writer in self._writers:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with (
            contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError),
            contextlib.closing(writer),
        ):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
                length = int(head.partition("content-length:")[2].partition("\r\n")[0] or 0)
                body = json.loads(await reader.readexactly(length) or b"{}")
                if " /v1/models " in head:
                    _write(writer, {"data": [{"id": "stub"}]})
                elif "response_format" in body or "tools" in body:
                    _write(writer, {"error": {"message": "not supported"}}, "400 Bad Request")
                else:
                    await self._answer(writer, body)
                await writer.drain()

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.num_answers += 1
        if self.defects.dies_at is not None and self.num_answers >= self.defects.dies_at:
            await asyncio.Event().wait()
        number, prompt = self.num_answers, json.dumps(body.get("prompt") or body["messages"])
        choices = [_words(prompt, index, body) for index in range(body.get("n", 1))]
        self._running[number] = choices[0]
        others = [words for other, words in self._running.items() if other != number and words[0] != choices[0][0]]
        if self.defects.mixes_at is not None and number >= self.defects.mixes_at and body.get("stream") and others:
            self.defects.mixes_at = None
            choices[0] = [*choices[0][:1], *others[0]][: len(choices[0])]
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": sum(map(len, choices))}
        usage |= {"total_tokens": sum(usage.values())}
        drift = 0.5 if self.defects.drifts_after is not None and number > self.defects.drifts_after else 0.0
        is_chat = "messages" in body
        try:
            if not body.get("stream"):
                parts = [
                    {"index": index, "finish_reason": "stop", **_part("".join(words), is_chat, "message", drift)}
                    for index, words in enumerate(choices)
                ]
                _write(writer, {"choices": parts, "usage": usage})
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for index, words in enumerate(choices):
                for word in words:
                    self._num_tokens += 1
                    if self.defects.drops_every and not self._num_tokens % self.defects.drops_every:
                        continue
                    if self.defects.hangs_at is not None and number >= self.defects.hangs_at:
                        self.defects.hangs_at = None
                        await asyncio.Event().wait()
                    if self.defects.cuts_at is not None and number >= self.defects.cuts_at:
                        self.defects.cuts_at = None
                        _chunk(writer, b"")
                        return
                    _event(writer, {"choices": [{"index": index, **_part(word, is_chat, "delta", drift)}]})
                    await asyncio.sleep(0)
                ended = {"index": index, "finish_reason": "stop", **_part("", is_chat, "delta", drift)}
                _event(writer, {"choices": [ended | {"logprobs": None}]})
            _event(writer, {"choices": [], "usage": usage})
            _chunk(writer, b"data: [DONE]\n\n")
            _chunk(writer, b"")
        finally:
            del self._running[number]


def _words(prompt: str, index: int, body: dict[str, Any]) -> list[str]:
    """The answer, which begins with the first word of the prompt, as models repeat what they were told."""
    digest = hashlib.sha256(f"{prompt} {index} {body.get('seed')}".encode()).hexdigest()
    words = [prompt.replace('"', " ").split(":")[-2].split()[-1], *(digest[at : at + 3] for at in range(0, 60, 3))]
    return [f" {word}" for word in words[: body["max_tokens"]]]


def _part(text: str, is_chat: bool, name: str, drift: float) -> dict[str, Any]:
    logprobs = {"content": [{"logprob": drift - len(text)}]}
    return {name: {"content": text}, "logprobs": logprobs} if is_chat else {"text": text, "logprobs": logprobs}


def _write(writer: asyncio.StreamWriter, value: object, status: str = "200 OK") -> None:
    data = json.dumps(value).encode()
    writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(data), data))


def _event(writer: asyncio.StreamWriter, value: object) -> None:
    _chunk(writer, b"data: %s\n\n" % json.dumps(value).encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    if writer.is_closing():
        raise ConnectionResetError
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
