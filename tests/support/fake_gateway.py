"""A gateway without a model: it answers with the prompt, over real gRPC. For tests of clients and commands.

Also a program: `python -m tests.support.fake_gateway --grpc-port=P --http-port=P ...` behaves towards its supervisor as
`python -m gateway` does.
"""

import argparse
import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2 as pb
from quire.gateway.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc, prefix_pb2, prefix_pb2_grpc
from quire.rpc.errors import FieldViolation, InvalidArgument, NotFound, QuireError
from quire.rpc.listeners import inherited_listener, listen
from quire.rpc.process import CONFIGURATION_EXIT_STATUS, report_configuration_error
from quire.rpc.server import RpcServer
from quire.rpc.tls import ServerTls
from quire.runtime.settings import ConfigurationError

SERVICES = tuple(f"quire.gateway.v1.{name}Service" for name in ("Generation", "Model", "Prefix"))
USAGE = common_pb2.Usage(prompt_tokens=3, generated_tokens=2, decode_ms=1.5)


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

    async def Generate(self, request: pb.GenerateRequest, context: object) -> pb.GenerateResponse:
        return pb.GenerateResponse(**await self._whole(request))

    async def Chat(self, request: pb.ChatRequest, context: object) -> pb.ChatResponse:
        return pb.ChatResponse(**await self._whole(request))

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: object) -> AsyncIterator[Any]:
        async for event in self._events(request):
            yield pb.GenerateStreamResponse(**event)

    async def ChatStream(self, request: pb.ChatStreamRequest, context: object) -> AsyncIterator[Any]:
        async for event in self._events(request):
            yield pb.ChatStreamResponse(**event)

    async def Cancel(self, request: pb.CancelRequest, context: object) -> pb.CancelResponse:
        if request.request_id != "running":
            raise NotFound(f'no request "{request.request_id}" runs')
        return pb.CancelResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: object) -> pb.TokenizeResponse:
        self._take(request)
        data = (request.text or " ".join(message.content for message in request.chat.messages)).encode()
        return pb.TokenizeResponse(token_ids=data, tokens=[chr(byte) for byte in data], max_model_len=128)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: object) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    async def _whole(self, request: Any) -> dict[str, Any]:
        prompt = self._prompt(request)
        if prompt == "endless":
            await asyncio.Event().wait()
        chosen = common_pb2.Logprob(token_id=1, logprob=-0.5, rank=1)
        sequence = pb.GeneratedSequence(
            text=f"{prompt}!",
            token_ids=[1, 2],
            logprobs=[common_pb2.PositionLogprobs(chosen=chosen, top=[chosen])],
            finish_reason=common_pb2.FINISH_REASON_STOP,
            stop_token_id=2,
        )
        return {"request_id": request.request_id or "fake", "model": "fake", "sequences": [sequence], "usage": USAGE}

    async def _events(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        words = re.findall(r"[^ ]* ?", f"{self._prompt(request)}!")[:-1]
        for offset, word in enumerate(words):
            # A client may leave while the chunk is still being written.
            try:
                yield {"chunk": pb.TokenChunk(offset=offset, token_ids=[offset], text=word)}
                if word.startswith("endless"):
                    await asyncio.Event().wait()
            except (asyncio.CancelledError, GeneratorExit):
                self.left.set()
                raise
        reason = common_pb2.FINISH_REASON_LENGTH
        yield {"finished": pb.SequenceFinished(num_tokens=len(words), finish_reason=reason)}
        yield {"completed": pb.RequestCompleted(request_id="fake", model="fake", usage=USAGE)}

    def _prompt(self, request: Any) -> str:
        """The prompt of a request that came, or the last message of a chat."""
        self._take(request)
        if isinstance(request, pb.ChatRequest | pb.ChatStreamRequest):
            prompt = request.messages[-1].content
        else:
            prompt = request.text or " ".join(map(str, request.token_ids.ids))
        if prompt == "bad":
            raise InvalidArgument("prompt is bad", violations=[FieldViolation("text", "is bad")])
        return prompt


class FakeModels(model_pb2_grpc.ModelServiceServicer):
    """One model, one replica."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        sizes = {"vocab_size": 256, "max_model_len": 128, "eos_token_ids": [2]}
        described = {"architecture": "LlamaForCausalLM", "dtype": "float32", "has_chat_template": True}
        self.model = model_pb2.Model(name="fake", **described, **sizes)

    async def ListModels(self, request: object, context: object) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse(models=[self.model])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: object) -> model_pb2.GetModelResponse:
        if request.model != self.model.name:
            raise NotFound(f'model "{request.model}" is not served here', reason="MODEL_NOT_FOUND")
        return model_pb2.GetModelResponse(model=self.model)

    async def GetServerInfo(self, request: object, context: object) -> model_pb2.GetServerInfoResponse:
        sizes = {"block_size": 16, "num_gpu_blocks": 64, "max_num_seqs": 8}
        replica = model_pb2.Replica(scheduler_address="unix:s", connected=True, device_name="a fake", **sizes)
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
        lives_ms = request.time_to_live_ms or 300_000
        return prefix_pb2.PinPrefixResponse(pin_id="pin", pinned_tokens=16, pinned_blocks=1, time_to_live_ms=lives_ms)

    async def UnpinPrefix(self, request: prefix_pb2.UnpinPrefixRequest, context: object) -> Any:
        if request.pin_id != "pin":
            raise NotFound(f'no pin "{request.pin_id}"', reason="PIN_NOT_FOUND")
        return prefix_pb2.UnpinPrefixResponse()


@dataclass(frozen=True, slots=True)
class FakeGatewayThread:
    """A fake gateway with an event loop and a thread of its own, so that blocking clients can call it."""

    address: str
    generation: FakeGeneration
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    """Runs a coroutine in its loop."""

    def wait_left(self) -> None:
        """Waits until the caller of an endless stream has left."""
        self.run(asyncio.wait_for(self.generation.left.wait(), 30))


@contextmanager
def running_fake_gateway(tls: ServerTls | None = None) -> Iterator[FakeGatewayThread]:
    """Serves on a free port until the block ends."""
    with asyncio.Runner() as runner, ThreadPoolExecutor(1) as thread:
        loop, generation = runner.get_loop(), FakeGeneration()
        thread.submit(loop.run_forever)

        def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

        try:
            server = run(start_fake_gateway("127.0.0.1:0", generation, tls))
            try:
                yield FakeGatewayThread(server.address, generation, run)
            finally:
                run(server.stop(0))
        finally:
            loop.call_soon_threadsafe(loop.stop)


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


async def _run(flags: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    server = await start_fake_gateway(
        f"{flags.grpc_host}:{flags.grpc_port}",
        FakeGeneration(),
        gateway_id=str(os.getpgrp()),
        reuse_port=flags.reuse_port,
        local_socket=flags.local_socket,
    )
    own = inherited_listener(os.environ) or listen(flags.grpc_host, flags.http_port, reuse_port=flags.reuse_port)
    http = await asyncio.start_server(lambda _, writer: writer.close(), sock=own)
    http_address = f"{flags.grpc_host}:{http.sockets[0].getsockname()[1]}"
    print("a line of another kind", flush=True)
    print(f"quire-gateway: listening grpc={server.address} http={http_address}", flush=True)
    await stopped.wait()
    http.close()
    await server.stop(0)
    if flags.note is not None:
        with flags.note.open("a") as file:
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
