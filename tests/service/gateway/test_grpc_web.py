"""gRPC-Web on the HTTP port has the answers of gRPC, and the limits of HTTP."""

import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

import grpc
import httpx
import pytest
from google.protobuf.message import Message

from quire.gateway.v1.generation_pb2 import (
    DetokenizeRequest,
    GenerateStreamResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.rpc.errors import FieldViolation, QuireError, from_rpc_error
from tests.support.gateway_process import RunningGateway, collect, collected, running_gateway, stream_request
from tests.support.keys import KeysFile

GENERATION = "/quire.gateway.v1.GenerationService"
HELLO = TokenizeRequest(text="hello")
WEB = {"content-type": "application/grpc-web+proto"}
TEXT = {"content-type": "application/grpc-web-text"}
ORIGIN = "https://page.example"


def frame(message: Message | bytes, flags: int = 0) -> bytes:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


def frames(body: bytes) -> list[tuple[int, bytes]]:
    """The flags and the content of each frame."""
    found: list[tuple[int, bytes]] = []
    while body:
        end = 5 + int.from_bytes(body[1:5], "big")
        assert len(body) >= end
        found.append((body[0], body[5:end]))
        body = body[end:]
    return found


def trailers_of(content: bytes) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in content.decode("ascii").splitlines())


def opened(body: bytes) -> list[bytes]:
    """The messages of a call that succeeded."""
    *messages, (flags, trailers) = frames(body)
    assert (flags, trailers_of(trailers)) == (0x80, {"grpc-status": "0"})
    assert {flags for flags, _ in messages} <= {0}
    return [data for _, data in messages]


class _Failed(grpc.RpcError):
    def __init__(self, trailers: Mapping[str, str]) -> None:
        self._trailers = trailers

    def code(self) -> grpc.StatusCode:
        return next(each for each in grpc.StatusCode if each.value[0] == int(self._trailers["grpc-status"]))

    def details(self) -> str:
        return unquote(self._trailers["grpc-message"])

    def trailing_metadata(self) -> Any:
        name = "grpc-status-details-bin"
        return [(name, base64.b64decode(self._trailers[name]))]


def error_of(answer: httpx.Response) -> QuireError:
    """The error that a call ended with."""
    assert answer.status_code == 200
    is_text = "-text" in answer.headers["content-type"]
    ((flags, trailers),) = frames(base64.b64decode(answer.content) if is_text else answer.content)
    assert flags == 0x80
    return from_rpc_error(_Failed(trailers_of(trailers)))


async def call(
    gateway: RunningGateway, method: str, body: Message | bytes, headers: Mapping[str, str] = WEB
) -> httpx.Response:
    content = body if isinstance(body, bytes) else frame(body)
    return await gateway.http.post(f"{GENERATION}/{method}", content=content, headers=headers)


async def test_a_stream_is_that_of_grpc(gateway: RunningGateway) -> None:
    request = stream_request("hello", max_tokens=12)
    request.sampling.seed = 3
    expected = await collect(gateway.generation.GenerateStream(request))
    answer = await call(gateway, "GenerateStream", request)
    assert answer.headers["content-type"] == "application/grpc-web+proto"
    found = collected([GenerateStreamResponse.FromString(data) for data in opened(answer.content)])
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)


async def test_text_is_base64(gateway: RunningGateway) -> None:
    plain = await call(gateway, "Tokenize", HELLO)
    answer = await call(gateway, "Tokenize", base64.b64encode(frame(HELLO)), TEXT)
    assert answer.headers["content-type"] == "application/grpc-web-text+proto"
    # Each frame is padded by itself.
    content = b"".join(map(base64.b64decode, answer.content.replace(b"=", b"= ").replace(b"= =", b"==").split()))
    assert content == plain.content
    (data,) = opened(content)
    assert TokenizeResponse.FromString(data).token_ids


@pytest.mark.parametrize(
    ("method", "body", "headers", "code", "reason"),
    [
        ("Tokenize", frame(HELLO)[:-1], {}, "INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
        ("Tokenize", frame(HELLO) * 2, {}, "INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
        ("Tokenize", b"", {}, "INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
        ("Tokenize", frame(b"\xff\xff"), {}, "INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
        ("Tokenize", b"!", TEXT, "INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
        ("Tokenize", frame(HELLO, 1), {}, "UNIMPLEMENTED", "UNIMPLEMENTED"),
        ("Tokenize", frame(HELLO), {"grpc-timeout": "soon"}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ("Tokenize", frame(HELLO), {"content-encoding": "br"}, "UNIMPLEMENTED", "UNSUPPORTED_ENCODING"),
        ("Tokenize", frame(TokenizeRequest(text="a" * 20_000)), {}, "RESOURCE_EXHAUSTED", "BODY_TOO_LARGE"),
        ("Invented", frame(HELLO), {}, "UNIMPLEMENTED", "UNKNOWN_METHOD"),
        ("../inference.GRPCInferenceService/ModelStreamInfer", b"", {}, "UNIMPLEMENTED", "UNIMPLEMENTED"),
    ],
)
async def test_what_is_no_call_has_a_status_with_its_reason(scheduler, method, body, headers, code, reason) -> None:
    async with running_gateway(scheduler, max_message_bytes=10_000) as gateway:
        error = error_of(await call(gateway, method, body, WEB | headers))
    assert (error.code.name, error.reason) == (code, reason)


async def test_an_error_has_its_details_before_and_after_the_first_message(gateway: RunningGateway, scheduler) -> None:
    refused = stream_request("hello")
    refused.sampling.temperature = -1
    error = error_of(await call(gateway, "GenerateStream", refused))
    assert error.violations == (FieldViolation("sampling.temperature", "is -1; it must be in [0, 100]"),)
    assert "\n" not in error.message
    unknown = error_of(await call(gateway, "Detokenize", DetokenizeRequest(model="ü\n%", token_ids=[5])))
    assert "ü" in unknown.message
    assert unknown.reason == "MODEL_NOT_FOUND"


async def test_a_key_is_needed_except_for_health(scheduler, tmp_path) -> None:
    keys = KeysFile(tmp_path / "keys.json")
    key = keys.add("acme")
    async with running_gateway(scheduler, keys_files=(keys.path,)) as gateway:
        for headers, reason in (({}, "MISSING_API_KEY"), ({"authorization": "Bearer wrong"}, "INVALID_API_KEY")):
            # Before the body is read, and for names that are not there.
            for method in ("Tokenize", "Invented"):
                error = error_of(await call(gateway, method, b"\xff", WEB | headers))
                assert (error.code.name, error.reason) == ("UNAUTHENTICATED", reason)
        assert opened((await call(gateway, "Tokenize", HELLO, WEB | {"authorization": f"Bearer {key}"})).content)
        live = await gateway.http.post("/inference.GRPCInferenceService/ServerLive", content=frame(b""), headers=WEB)
        assert opened(live.content) == [b"\x08\x01"]


async def test_a_deadline_ends_the_request(gateway: RunningGateway, scheduler) -> None:
    scheduler.step_delay_s = 0.05
    request = stream_request("slow", max_tokens=400, request_id="late")
    answer = await call(gateway, "GenerateStream", request, WEB | {"grpc-timeout": "300m"})
    *messages, (_, trailers) = frames(answer.content)
    assert messages
    assert trailers_of(trailers)["grpc-status"] == "4"
    await scheduler.until(lambda: scheduler.aborted == ["late"])


async def test_a_client_that_leaves_ends_the_request(gateway: RunningGateway, scheduler) -> None:
    scheduler.step_delay_s = 0.05
    body = frame(stream_request("slow", max_tokens=400, request_id="left"))
    async with gateway.http.stream("POST", f"{GENERATION}/GenerateStream", content=body, headers=WEB) as answer:
        pieces: AsyncIterator[bytes] = answer.aiter_bytes()
        async with aclosing(pieces):  # pyrefly: ignore
            assert (await anext(pieces))[0] == 0
    await scheduler.until(lambda: scheduler.aborted == ["left"])


async def test_pages_of_allowed_origins_may_call_and_read_the_id_of_a_durable_stream(scheduler) -> None:
    async with running_gateway(scheduler, allowed_origins=(ORIGIN,)) as gateway:
        wanted = {"access-control-request-method": "POST", "access-control-request-headers": "grpc-timeout,x-grpc-web"}
        preflight = await gateway.http.options(f"{GENERATION}/GenerateStream", headers={"origin": ORIGIN} | wanted)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        request = stream_request("hello", max_tokens=2, durable=True)
        answer = await call(gateway, "GenerateStream", request, WEB | {"origin": ORIGIN})
        assert answer.headers["quire-request-id"]
        assert "quire-request-id" in answer.headers["access-control-expose-headers"]
        refused = await gateway.http.options(f"{GENERATION}/GenerateStream", headers={"origin": "https://b"} | wanted)
        assert refused.status_code == 400


async def test_calls_are_counted_by_method_and_status(gateway: RunningGateway) -> None:
    await call(gateway, "Tokenize", HELLO)
    await call(gateway, "Invented", HELLO)
    metrics = (await gateway.http.get("/metrics")).text
    counted = [line for line in metrics.splitlines() if line.startswith("quire_gateway_grpc") and line.endswith(" 1.0")]
    assert any('code="OK"' in line and "Tokenize" in line for line in counted), counted
    assert any('code="UNIMPLEMENTED"' in line and '"other"' in line for line in counted), counted
