"""Callers that attack a public server: each function of `KINDS` takes all resources that one caller can take.

They run in a process of their own, `python -m bench.hostile_callers`, so that their own cost is not counted against the
server. The last line on stdout is a JSON object: for each kind, how often each answer came.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

import grpc.aio

from quire.client import AsyncClient, Constraint, GenerationOptions
from quire.gateway.v1.generation_pb2 import ResumeStreamRequest
from quire.rpc.address import TcpAddress, parse_address
from quire.rpc.errors import QuireError

_HELD_S = 20.0
"""Seconds for which a caller holds a connection without traffic, unless the server closes it."""
_LONG_S = 120.0
"""Seconds after which a missing answer counts as none."""
_STREAM = {"prompt": "Once", "max_tokens": 900, "stream": True, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Target:
    """The two fronts of one server."""

    http: TcpAddress
    grpc: str


async def _exchange(target: Target, request: bytes, *, held_s: float = _LONG_S, reads: bool = True) -> str:
    """Sends bytes on a new connection and returns the status of the answer, or what happened instead."""
    try:
        reader, writer = await asyncio.open_connection(target.http.host, target.http.port)
    except OSError:
        return "not connected"
    try:
        writer.write(request)
        await writer.drain()
        if not reads:
            await asyncio.sleep(held_s)
            return "left unread"
        async with asyncio.timeout(held_s):
            line = await reader.readline()
            # The rest may be large and is dropped.
            while await reader.read(1 << 16):
                pass
        return line.decode("latin-1").strip().partition(" ")[2] or "closed"
    except TimeoutError:
        return f"nothing for {held_s:.0f} s"
    except OSError:
        return "reset"
    finally:
        writer.transport.abort()


def _post(path: str, body: bytes, *, length: int | None = None) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def _json(path: str, value: object) -> bytes:
    return _post(path, json.dumps(value).encode())


async def _outcome(call: Awaitable[object]) -> str:
    """The status of a call of Quire's client, or what happened instead."""
    try:
        async with asyncio.timeout(_LONG_S):
            await call
    except QuireError as error:
        return f"{error.code.name} {error.reason}"
    except TimeoutError:
        return f"nothing for {_LONG_S:.0f} s"
    return "answered"


def _long_stops(rng: random.Random) -> list[str]:
    """Stop strings of 1,000 characters."""
    return ["".join(rng.choices("abcdefgh ", k=1000)) for _ in range(4)]


async def many_samples_over_grpc(target: Target, rng: random.Random) -> str:
    """128 samples with stop strings of 1,000 characters."""
    options = GenerationOptions(n=128, stop=_long_stops(rng), max_tokens=16, temperature=1.0)
    async with AsyncClient(target.grpc) as client:
        return await _outcome(client.generate("Once", options))


async def left_stream(target: Target, rng: random.Random) -> str:
    """A stream whose caller leaves after the first line."""
    try:
        reader, writer = await asyncio.open_connection(target.http.host, target.http.port)
        writer.write(_json("/v1/completions", _STREAM | {"n": 4}))
        async with asyncio.timeout(_HELD_S):
            line = await reader.readline()
        writer.transport.abort()
    except OSError:
        return "not served"
    return line.decode("latin-1").strip().partition(" ")[2]


async def come_and_go(target: Target, rng: random.Random) -> str:
    """A hundred connections that are opened and closed."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(target.http.host, target.http.port)
            writer.transport.abort()
    return "gone"


async def exploding_constraint(target: Target, rng: random.Random) -> str:
    """A small schema, expression or grammar that takes long to compile; a new one each time."""
    number = rng.randrange(1 << 30)
    names = {f"name_{number}_{index}": {"type": "string"} for index in range(6000)}
    constraint = rng.choice(
        (
            Constraint(json_schema={"type": "object", "properties": names}),
            Constraint(json_schema={"enum": [f"{number}-{index * 7919}" for index in range(40_000)]}),
            Constraint(json_schema='{"items":' * 10_000 + "true" + "}" * 10_000),
            Constraint(regex=f"x{number}" + "(" * 5 + "a" + "{1,100})" * 5 + "b"),
            Constraint(lark=f'start: a a a a a "{number}"\na: a a | "x" | a a a |'),
        )
    )
    async with AsyncClient(target.grpc) as client:
        return await _outcome(client.generate("Once", GenerationOptions(constraint=constraint, max_tokens=4)))


async def many_empty_entries(target: Target, rng: random.Random) -> str:
    """Two million empty messages in one list of a gRPC call."""
    method, field = rng.choice(
        (
            ("/quire.gateway.v1.GenerationService/ResumeStream", 2),
            ("/quire.gateway.v1.GenerationService/Chat", 1),
            ("/quire.gateway.v1.GenerationService/Chat", 11),
            ("/inference.GRPCInferenceService/ModelInfer", 6),
        )
    )
    return await _call(target, method, bytes((field << 3 | 2, 0)) * ((2 << 20) - 64))


async def many_resumptions(target: Target, rng: random.Random) -> str:
    """Fifty calls at once that resume one durable stream of eight samples."""
    request_id = f"storm-{rng.randrange(1 << 60)}"
    options = GenerationOptions(n=8, max_tokens=900, ignore_eos=True)

    async def begin() -> None:
        async with (
            AsyncClient(target.grpc) as client,
            client.generate_stream("Once", options, request_id=request_id, durable=True) as stream,
        ):
            async for _ in stream:
                break

    begun = await _outcome(begin())
    if begun != "answered":
        return begun
    resume = ResumeStreamRequest(request_id=request_id).SerializeToString()
    method = "/quire.gateway.v1.GenerationService/ResumeStream"
    answers = await asyncio.gather(*(_call(target, method, resume) for _ in range(50)))
    return " ".join(sorted(set(answers)))


async def _call(target: Target, method: str, data: bytes) -> str:
    """Calls a method with bytes and reads all answers. Returns the status."""
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        try:
            async for _ in channel.unary_stream(method)(data, timeout=_LONG_S):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "answered"


# HTTP/2 as bytes: types of frames, and the beginning of a connection.
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 8, 9
_END_STREAM, _END_HEADERS = 1, 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WATCH = b"/grpc.health.v1.Health/Watch"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def headers(stream: int, path: bytes, others: Mapping[bytes, bytes] | None = None) -> bytes:
    """The headers of a call, whose names and values are below 16 kB in all: literals without Huffman coding."""
    fields = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"localhost"}
    fields |= {b"content-type": b"application/grpc", b"te": b"trailers", **(others or {})}
    return frame(
        _HEADERS, _END_HEADERS, stream, b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
    )


def _text(data: bytes) -> bytes:
    """A literal of HPACK."""
    size = len(data)
    if size < 127:
        return bytes((size,)) + data
    size, head = size - 127, bytearray(b"\x7f")
    while size >= 128:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes((*head, size)) + data


async def _speak(target: Target, pieces: Iterable[bytes], *, held_s: float) -> str:
    """Sends pieces on a new HTTP/2 connection while the server accepts them, and reads the answers."""
    host, _, port = target.grpc.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return "not connected"

    async def read() -> None:
        while await reader.read(1 << 16):
            pass

    reading = asyncio.create_task(read())
    try:
        async with asyncio.timeout(held_s):
            writer.write(_PREFACE + frame(_SETTINGS, 0, 0) + frame(_SETTINGS, 1, 0))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            await reading
    except TimeoutError:
        return f"held for {held_s:.0f} s"
    except OSError:
        return "reset"
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        writer.transport.abort()
    return "closed"


async def many_watches(target: Target, rng: random.Random) -> str:
    """Open watches of health, up to a connection's maximum, with 15 kB of metadata each; no key is needed."""
    metadata = {b"x-a": rng.randbytes(7500).hex().encode()}
    pieces = (
        headers(stream, _WATCH, metadata) + frame(_DATA, _END_STREAM, stream, bytes(5)) for stream in range(1, 8000, 2)
    )
    return await _speak(target, pieces, held_s=_HELD_S)


async def flood_of_frames(target: Target, rng: random.Random) -> str:
    """Frames of one kind, as fast as the server accepts them: settings, empty data, windows, calls that are reset."""
    frames = {
        "settings": itertools.repeat(frame(_SETTINGS, 0, 0) * 1000),
        "data": itertools.chain([headers(1, _WATCH)], itertools.repeat(frame(_DATA, 0, 1) * 1000)),
        "windows": itertools.repeat(frame(_WINDOW_UPDATE, 0, 0, (1).to_bytes(4)) * 1000),
        "continuation": itertools.chain([frame(_HEADERS, 0, 1)], itertools.repeat(frame(_CONTINUATION, 0, 1) * 1000)),
        "resets": (
            headers(stream, _WATCH) + frame(_RST_STREAM, 0, stream, (8).to_bytes(4)) for stream in range(1, 1 << 31, 2)
        ),
    }
    return await _speak(target, frames[rng.choice(sorted(frames))], held_s=_HELD_S / 4)


async def odd_texts_over_grpc(target: Target, rng: random.Random) -> str:
    """Names of methods and metadata that are not UTF-8, which gRPC would log whole."""
    noise = rng.randbytes(5000).replace(b"\0", b"\xff")
    paths = (headers(1, b"/" + noise), headers(1, _WATCH, {b"x-a": noise}))
    return await _speak(target, [rng.choice(paths) + frame(_DATA, _END_STREAM, 1, bytes(5))], held_s=1.0)


Kind = Callable[[Target, random.Random], Awaitable[str]]


def _sends(make: Callable[[random.Random], bytes], *, held_s: float = _LONG_S, reads: bool = True) -> Kind:
    """Sends bytes as `_exchange` does."""
    return lambda target, rng: _exchange(target, make(rng), held_s=held_s, reads=reads)


def _calls(path: str, make: Callable[[random.Random], object]) -> Kind:
    """Sends one JSON value and reads the answer."""
    return _sends(lambda rng: _json(path, make(rng)))


def _nonsense(rng: random.Random) -> bytes:
    kinds = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
        rng.randbytes(2000),
        _post("/v1/completions", b"[" * 100_000),
        _post("/v1/completions", b'{"prompt": ' + b"1" * 100_000 + b"}"),
    )
    return rng.choice(kinds)


def _many_numbers(rng: random.Random) -> bytes:
    paths = {"/v1/messages": "system", "/v1/messages/count_tokens": "system", "/v1/chat/completions": "tools"}
    path = rng.choice(sorted(paths))
    body = json.dumps({**_CHAT, paths[path]: [1] * 2_000_000}, separators=(",", ":"))
    return _post(path, body.encode())


_SAMPLES = {"max_tokens": 100, "logprobs": 20, "temperature": 1.0}
_CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
KINDS: Mapping[str, Kind] = {
    # 1,024 prompts of 128 samples with stop strings of 1,000 characters: 131,072 sequences in 20 kB.
    "wide_completion": _calls(
        "/v1/completions", lambda rng: {"prompt": ["a"] * 1024, "n": 128, "stop": _long_stops(rng), "max_tokens": 16}
    ),
    # 64 prompts of 128 samples of 400 tokens with 20 log probabilities each, not streamed.
    "many_logprobs": _calls(
        "/v1/completions",
        lambda _: _SAMPLES | {"prompt": ["Once upon a time"] * 64, "n": 128, "max_tokens": 400, "ignore_eos": True},
    ),
    # A large request that may be accepted: 16 samples of 100 tokens with 20 log probabilities each.
    "some_logprobs": _calls("/v1/completions", lambda _: _SAMPLES | {"prompt": "Once upon a time", "n": 16}),
    # A million token ids to detokenize.
    "many_ids": _calls("/detokenize", lambda rng: {"tokens": [rng.randrange(256)] * 1_000_000}),
    # A conversation of 20,000 messages.
    "many_messages": _calls("/v1/chat/completions", lambda _: {"messages": _CHAT["messages"] * 20_000}),
    # The maximum number of arguments for the chat template, and many more.
    "many_arguments": _calls(
        "/v1/chat/completions",
        lambda rng: _CHAT | {"chat_template_kwargs": {"enable_thinking": [1] * rng.choice((4_000, 1_000_000))}},
    ),
    # The maximum number of choices of a constraint.
    "many_choices": _calls(
        "/v1/completions",
        lambda rng: {"prompt": "Once", "guided_choice": [f"{rng.randrange(1000)} {each}" for each in range(99_000)]},
    ),
    # Two million numbers where a few texts, or tools, are expected.
    "many_numbers": _sends(_many_numbers),
    # Three megabytes of text to tokenize.
    "long_text": _sends(
        lambda rng: _json(rng.choice(["/tokenize", "/v1/completions"]), {"prompt": "lorem ipsum " * 250_000})
    ),
    # A request whose body never ends; the answer is read.
    "half_a_body": _sends(
        lambda rng: b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n" + b"x" * rng.randrange(2),
        held_s=_HELD_S,
    ),
    # A body with four megabytes announced and one sent.
    "half_a_post": _sends(lambda _: _post("/v1/completions", b" " * (1 << 20), length=4 << 20), held_s=_HELD_S),
    # Headers that never end.
    "half_a_head": _sends(lambda _: b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-", held_s=_HELD_S),
    # Bytes that are no HTTP: a TLS handshake, noise, deep JSON.
    "nonsense": _sends(_nonsense, held_s=_HELD_S),
    # A stream, and a stream of 128 samples, that their callers do not read.
    "unread_stream": _sends(lambda _: _json("/v1/completions", _STREAM), held_s=_HELD_S, reads=False),
    "wide_unread_stream": _sends(lambda _: _json("/v1/completions", _STREAM | {"n": 128}), held_s=_HELD_S, reads=False),
    "many_samples_over_grpc": many_samples_over_grpc,
    "left_stream": left_stream,
    "come_and_go": come_and_go,
    "exploding_constraint": exploding_constraint,
    "many_empty_entries": many_empty_entries,
    "many_resumptions": many_resumptions,
    "many_watches": many_watches,
    "flood_of_frames": flood_of_frames,
    "odd_texts_over_grpc": odd_texts_over_grpc,
}


async def attack(target: Target, arguments: argparse.Namespace) -> dict[str, Counter[str]]:
    """Runs `--callers` callers for `--seconds`. Each goes through `--kinds` in turn; calls in progress at the end are
    cut off. Returns how often each kind got each answer."""
    names: list[str] = arguments.kinds
    answers: dict[str, Counter[str]] = {name: Counter() for name in names}

    async def call(number: int) -> None:
        rng = random.Random(f"{arguments.seed} {number}")
        turn = number
        while True:
            name = names[turn % len(names)]
            answers[name][await KINDS[name](target, rng)] += 1
            turn += 1

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(arguments.seconds), asyncio.TaskGroup() as group:
            for number in range(arguments.callers):
                group.create_task(call(number))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", required=True)
    parser.add_argument("--grpc", required=True)
    parser.add_argument("--callers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    arguments = parser.parse_args()
    http = parse_address(arguments.http)
    assert isinstance(http, TcpAddress)
    print(json.dumps(asyncio.run(attack(Target(http, arguments.grpc), arguments))))


if __name__ == "__main__":
    main()
