"""A gateway without a model: it answers with the prompt, over real gRPC. For tests of clients and commands.

Also a program: `python -m tests.support.fake_gateway --grpc-port=P --http-port=P ...` behaves towards its supervisor as
`python -m gateway` does.
"""

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc, prefix_pb2, prefix_pb2_grpc
from quire.rpc.errors import FieldViolation, InvalidArgument, NotFound, QuireError
from quire.rpc.listeners import inherited_listener, listen
from quire.rpc.process import CONFIGURATION_EXIT_STATUS, report_configuration_error
from quire.rpc.server import RpcServer
from quire.rpc.tls import ServerTls
from quire.runtime.settings import ConfigurationError

SERVICES = tuple(f"quire.gateway.v1.{name}Service" for name in ("Generation", "Model", "Prefix"))


class FakeGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Answers "<prompt>!", one chunk a word. Special prompts:

    "bad": InvalidArgument. "endless": one chunk, and no end until the caller leaves, which sets `left`.

    The first calls raise `errors` without any answer.
    """

    def __init__(self, *errors: QuireError) -> None:
        self.requests: list[Any] = []
        self.called = asyncio.Event()
        self.left = asyncio.Event()
        self._errors = deque(errors)

    def _take(self, request: object) -> None:
        self.requests.append(request)
        self.called.set()
        if self._errors:
            raise self._errors.popleft()

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: object
    ) -> generation_pb2.GenerateResponse:
        self._take(request)
        if _prompt(request) == "endless":
            await asyncio.Event().wait()
        return generation_pb2.GenerateResponse(**self._whole(_prompt(request), request.request_id))

    async def Chat(self, request: generation_pb2.ChatRequest, context: object) -> generation_pb2.ChatResponse:
        self._take(request)
        return generation_pb2.ChatResponse(**self._whole(_conversation(request), request.request_id))

    async def GenerateStream(
        self, request: generation_pb2.GenerateStreamRequest, context: object
    ) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        self._take(request)
        async for event in self._events(_prompt(request)):
            yield generation_pb2.GenerateStreamResponse(**event)

    async def ChatStream(
        self, request: generation_pb2.ChatStreamRequest, context: object
    ) -> AsyncIterator[generation_pb2.ChatStreamResponse]:
        self._take(request)
        async for event in self._events(_conversation(request)):
            yield generation_pb2.ChatStreamResponse(**event)

    async def Cancel(self, request: generation_pb2.CancelRequest, context: object) -> generation_pb2.CancelResponse:
        if request.request_id != "running":
            raise NotFound(f'no request "{request.request_id}" runs')
        return generation_pb2.CancelResponse()

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: object
    ) -> generation_pb2.TokenizeResponse:
        self._take(request)
        text = request.text or " ".join(message.content for message in request.chat.messages)
        data = text.encode()
        tokens = [chr(byte) for byte in data]
        return generation_pb2.TokenizeResponse(token_ids=data, tokens=tokens, max_model_len=128)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: object
    ) -> generation_pb2.DetokenizeResponse:
        return generation_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def _whole(self, prompt: str, request_id: str) -> dict:
        self._refuse(prompt)
        sequence = generation_pb2.GeneratedSequence(
            index=0,
            text=f"{prompt}!",
            token_ids=[1, 2],
            logprobs=[_logprobs()],
            finish_reason=common_pb2.FINISH_REASON_STOP,
            stop_token_id=2,
        )
        return {"request_id": request_id or "fake", "model": "fake", "sequences": [sequence], "usage": _usage()}

    async def _events(self, prompt: str) -> AsyncIterator[dict]:
        self._refuse(prompt)
        words = f"{prompt}!".split(" ")
        for offset, word in enumerate(words):
            text = word if offset == len(words) - 1 else f"{word} "
            # A client may leave while the chunk is still being written.
            try:
                yield {"chunk": generation_pb2.TokenChunk(offset=offset, token_ids=[offset], text=text)}
                if word.startswith("endless"):
                    await asyncio.Event().wait()
            except (asyncio.CancelledError, GeneratorExit):
                self.left.set()
                raise
        reason = common_pb2.FINISH_REASON_LENGTH
        yield {"finished": generation_pb2.SequenceFinished(num_tokens=len(words), finish_reason=reason)}
        yield {"completed": generation_pb2.RequestCompleted(request_id="fake", model="fake", usage=_usage())}

    def _refuse(self, prompt: str) -> None:
        if prompt == "bad":
            raise InvalidArgument("prompt is bad", violations=[FieldViolation("text", "is bad")])


class FakeModels(model_pb2_grpc.ModelServiceServicer):
    """One model, one replica."""

    def __init__(self, gateway_id: str = "fake") -> None:
        self._gateway_id = gateway_id
        self.model = model_pb2.Model(
            name="fake",
            architecture="LlamaForCausalLM",
            dtype="float32",
            vocab_size=256,
            max_model_len=128,
            eos_token_ids=[2],
            has_chat_template=True,
        )

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: object) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse(models=[self.model])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: object) -> model_pb2.GetModelResponse:
        if request.model != self.model.name:
            raise NotFound(f'model "{request.model}" is not served here', reason="MODEL_NOT_FOUND")
        return model_pb2.GetModelResponse(model=self.model)

    async def GetServerInfo(
        self, request: model_pb2.GetServerInfoRequest, context: object
    ) -> model_pb2.GetServerInfoResponse:
        replica = model_pb2.Replica(
            scheduler_address="unix:s",
            connected=True,
            block_size=16,
            num_gpu_blocks=64,
            max_num_seqs=8,
            device_name="a fake",
        )
        limits = model_pb2.Limits(max_message_bytes=4096, max_n=1)
        return model_pb2.GetServerInfoResponse(
            version="0", gateway_id=self._gateway_id, replicas=[replica], limits=limits
        )


class FakePrefixes(prefix_pb2_grpc.PrefixServiceServicer):
    """Pins everything as "pin", one block; adds requests to the same list as generation."""

    def __init__(self, requests: list[Any]) -> None:
        self._requests = requests

    async def PinPrefix(self, request: prefix_pb2.PinPrefixRequest, context: object) -> prefix_pb2.PinPrefixResponse:
        self._requests.append(request)
        time_to_live_ms = request.time_to_live_ms or 300_000
        return prefix_pb2.PinPrefixResponse(
            pin_id="pin", pinned_tokens=16, pinned_blocks=1, time_to_live_ms=time_to_live_ms
        )

    async def UnpinPrefix(
        self, request: prefix_pb2.UnpinPrefixRequest, context: object
    ) -> prefix_pb2.UnpinPrefixResponse:
        if request.pin_id != "pin":
            raise NotFound(f'no pin "{request.pin_id}"', reason="PIN_NOT_FOUND")
        return prefix_pb2.UnpinPrefixResponse()


@dataclass(frozen=True, slots=True)
class FakeGatewayThread:
    """A fake gateway with an event loop and a thread of its own, so that blocking clients can call it."""

    address: str
    generation: FakeGeneration
    loop: asyncio.AbstractEventLoop

    def wait_left(self, timeout_s: float = 30) -> None:
        """Waits until the caller of an endless stream has left."""
        waiting = asyncio.wait_for(self.generation.left.wait(), timeout_s)
        asyncio.run_coroutine_threadsafe(waiting, self.loop).result()


@contextmanager
def running_fake_gateway(tls: ServerTls | None = None) -> Iterator[FakeGatewayThread]:
    """Serves on a free port until the block ends."""
    started: list[FakeGatewayThread] = []
    is_started, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        generation = FakeGeneration()
        server = await start_fake_gateway("127.0.0.1:0", generation, tls)
        started.append(FakeGatewayThread(server.address, generation, asyncio.get_running_loop()))
        is_started.set()
        await stop.wait()
        await server.stop(0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert is_started.wait(60)
    try:
        yield started[0]
    finally:
        started[0].loop.call_soon_threadsafe(stop.set)
        thread.join(60)
    assert not thread.is_alive()


async def start_fake_gateway(
    address: str, generation: FakeGeneration, tls: ServerTls | None = None, *, gateway_id: str = "fake", **options: Any
) -> RpcServer:
    """Serves, and reports SERVING. `options` go to RpcServer.start."""

    def register(server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(FakeModels(gateway_id), server)
        prefix_pb2_grpc.add_PrefixServiceServicer_to_server(FakePrefixes(generation.requests), server)

    server = await RpcServer.start(address, register, SERVICES, tls=tls, **options)
    server.set_serving(True)
    return server


def _prompt(request: generation_pb2.GenerateRequest | generation_pb2.GenerateStreamRequest) -> str:
    return " ".join(map(str, request.token_ids.ids)) if request.WhichOneof("prompt") == "token_ids" else request.text


def _conversation(request: generation_pb2.ChatRequest | generation_pb2.ChatStreamRequest) -> str:
    return request.messages[-1].content


def _usage() -> common_pb2.Usage:
    return common_pb2.Usage(prompt_tokens=3, generated_tokens=2, decode_ms=1.5)


def _logprobs() -> common_pb2.PositionLogprobs:
    chosen = common_pb2.Logprob(token_id=1, logprob=-0.5, rank=1)
    return common_pb2.PositionLogprobs(chosen=chosen, top=[chosen])


async def _run(flags: argparse.Namespace) -> None:
    host, note = flags.grpc_host, flags.note
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    server = await start_fake_gateway(
        f"{host}:{flags.grpc_port}",
        FakeGeneration(),
        gateway_id=str(os.getpgrp()),
        reuse_port=flags.reuse_port,
        local_socket=flags.local_socket,
    )

    listener = inherited_listener(os.environ) or listen(host, flags.http_port, reuse_port=flags.reuse_port)
    http = await asyncio.start_server(lambda _, writer: writer.close(), sock=listener)
    http_address = f"{host}:{http.sockets[0].getsockname()[1]}"
    print("a line of another kind", flush=True)
    print(f"quire-gateway: listening grpc={server.address} http={http_address}", flush=True)
    await stopped.wait()
    http.close()
    await server.stop(0)
    if note is not None:
        with note.open("a") as file:
            file.write("stopped gateway\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--grpc-host", default="127.0.0.1")
    parser.add_argument("--grpc-port", type=int, default=0)
    parser.add_argument("--http-port", type=int, default=0)
    parser.add_argument("--reuse-port", action="store_true")
    parser.add_argument("--local-socket", type=Path)
    parser.add_argument("--refuse-if", type=Path, help="a file whose presence is a wrong configuration")
    parser.add_argument("--note", type=Path, help="where to note the end")
    flags, _ = parser.parse_known_args()
    if flags.refuse_if is not None and flags.refuse_if.exists():
        report_configuration_error(ConfigurationError(f"{flags.refuse_if} is there"), program="quire gateway")
        sys.exit(CONFIGURATION_EXIT_STATUS)
    asyncio.run(_run(flags))
