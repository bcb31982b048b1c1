"""Records the messages between gateway, scheduler, worker and a client, with real processes and a script of all verbs.

`python -m tests.compat.record` writes the folder of this release, tests/compat/VERSION: a step of a release, before its
commit (CONTRIBUTING.md). The tests record the messages of today's code in the same way.

Between every two services is a `Tap`, which passes messages on as bytes and stores them.
"""

import asyncio
import contextlib
import gzip
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from quire.common.v1.common_pb2 import (
    BeamSearchParameters,
    Choice,
    Constraint,
    OutputOptions,
    SamplingParameters,
    StoppingParameters,
    TokenIds,
)
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc, prefix_pb2, prefix_pb2_grpc
from quire.gateway.v1.generation_pb2 import (
    ChatMessage,
    ChatRequest,
    ChatStreamRequest,
    GenerateRequest,
    GenerateStreamRequest,
    HeldSequence,
    ResumeStreamRequest,
    SequenceOffset,
    Tool,
    ToolChoice,
)
from quire.rpc.server import UNLIMITED_MESSAGE_BYTES
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.version import VERSION
from quire.worker.v1 import worker_pb2
from quire_cli.supervisor.commands import child_environ
from tests.compat.transcript import CONTRACTS, MESSAGES, RECORDING, ROOT, Call, write_calls
from tests.support.grpc_types import health_stub
from tests.support.scheduler_process import until, wait_attached, wait_nothing_in_use
from tests.support.serving import forked_programs
from tools.proto_descriptors import read_descriptors

_OPTIONS = [
    ("grpc.max_receive_message_length", UNLIMITED_MESSAGE_BYTES),
    ("grpc.max_send_message_length", UNLIMITED_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
]
PROTOS = Path(__file__).parents[2] / "protos"
_PROMPT = "Once upon a time, there was a little fox"
_NUM_BLOCKS = 28
"""Too few blocks for `_crowd`, but enough for every other request."""


class Tap:
    """A proxy between a gRPC client and a server, which stores all messages."""

    def __init__(self, calls: list[Call], upstream: str) -> None:
        self._calls = calls
        self._channel = grpc.aio.insecure_channel(upstream, options=_OPTIONS)

    @classmethod
    @contextlib.asynccontextmanager
    async def between(cls, calls: list[Call], listen: str, upstream: str) -> AsyncIterator[None]:
        tap = cls(calls, upstream)
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((_AnyMethod(tap.pass_on),))
        server.add_insecure_port(listen)
        await server.start()
        try:
            yield
        finally:
            await server.stop(None)
            await tap._channel.close()

    async def pass_on(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Passes on one call of any kind: on the wire all are streams in both directions."""
        recorded = Call(method)
        self._calls.append(recorded)
        metadata = tuple((key, value) for key, value in context.invocation_metadata() if not key.startswith("user-"))
        call = self._channel.stream_stream(method)(metadata=metadata)

        async def forward() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                async for data in requests:
                    recorded.messages.append((True, data))
                    await call.write(data)
                await call.done_writing()

        forwarding = asyncio.create_task(forward())
        try:
            has_headers = False
            async for data in call:
                if not has_headers:
                    await context.send_initial_metadata(await call.initial_metadata())
                    has_headers = True
                recorded.messages.append((False, data))
                yield data
            recorded.status = 0
        except grpc.aio.AioRpcError as error:
            recorded.status = error.code().value[0]
            context.set_trailing_metadata(error.trailing_metadata())
            await context.abort(error.code(), error.details() or "")
        finally:
            if recorded.status is None:
                recorded.status = grpc.StatusCode.CANCELLED.value[0]
            forwarding.cancel()
            call.cancel()


class _AnyMethod(grpc.GenericRpcHandler):
    def __init__(self, pass_on: Callable[[str, AsyncIterator[bytes], Any], AsyncIterator[bytes]]) -> None:
        self._pass_on = pass_on

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        # A partial of an async generator function counts as one.
        return grpc.stream_stream_rpc_method_handler(partial(self._pass_on, handler_call_details.method))


@dataclass(frozen=True, slots=True)
class Services:
    """Stubs of two gateways and of the scheduler, whose calls are recorded; calls of `scheduler` are not."""

    generation: generation_pb2_grpc.GenerationServiceStub
    other: generation_pb2_grpc.GenerationServiceStub
    prefixes: prefix_pb2_grpc.PrefixServiceStub
    models: model_pb2_grpc.ModelServiceStub
    watched: scheduler_pb2_grpc.SchedulerServiceStub
    scheduler: scheduler_pb2_grpc.SchedulerServiceStub


@dataclass(slots=True)
class Recorded:
    """The result of `record`: all calls, and the bytes of the scheduler's recording."""

    calls: list[Call] = field(default_factory=list[Call])
    recording: bytes = b""


async def record() -> Recorded:
    """Starts the three services with taps between them and runs the script."""
    recorded, calls = Recorded(), list[Call]()
    with tempfile.TemporaryDirectory(prefix="quire-record-") as name:
        directory = Path(name)
        worker, scheduler = (f"unix:{directory}/{each}.sock" for each in ("worker", "scheduler"))
        tapped = [f"unix:{directory}/tap-{number}.sock" for number in range(4)]
        programs = forked_programs()
        async with contextlib.AsyncExitStack() as stack:
            # Each service is ready before the next one gets its address, so that no call is refused and retried.
            flags = f"--num-gpu-blocks {_NUM_BLOCKS} --swap-space 16MiB --dtype float32 --num-threads 1"
            stack.enter_context(_running(*programs.worker, "--listen", worker, *flags.split()))
            await _until_serving(worker)
            await stack.enter_async_context(Tap.between(calls, tapped[0], worker))
            path = directory / "recording"
            flags = f"--preemption-mode swap --record {path} --record-tokens --durable-grace 30"
            process = stack.enter_context(
                _running(*programs.scheduler, "--listen", scheduler, "--workers", tapped[0], *flags.split())
            )
            await _until_serving(scheduler)
            await stack.enter_async_context(Tap.between(calls, tapped[1], scheduler))
            # The second gateway requests updates of the cache, since it has two schedulers; one of them never comes.
            for number, others in enumerate(("", f",unix:{directory}/absent.sock")):
                socket = f"{directory}/gateway-{number}.sock"
                flags = f"--schedulers {tapped[1]}{others} --grpc-port 0 --http-port 0 --no-ui --local-socket {socket}"
                stack.enter_context(_running(*programs.gateway, *flags.split()))
                await _until_serving(f"unix:{socket}")
                await stack.enter_async_context(Tap.between(calls, tapped[2 + number], f"unix:{socket}"))
            channels = [
                await stack.enter_async_context(grpc.aio.insecure_channel(address, options=_OPTIONS))
                for address in (*tapped[1:], scheduler)
            ]
            services = Services(
                generation_pb2_grpc.GenerationServiceStub(channels[1]),
                generation_pb2_grpc.GenerationServiceStub(channels[2]),
                prefix_pb2_grpc.PrefixServiceStub(channels[1]),
                model_pb2_grpc.ModelServiceStub(channels[1]),
                scheduler_pb2_grpc.SchedulerServiceStub(channels[0]),
                scheduler_pb2_grpc.SchedulerServiceStub(channels[3]),
            )
            await wait_attached(services.scheduler)
            for step in SCRIPT:
                await step(services)
                await wait_nothing_in_use(services.scheduler)
            recorded.calls = [_without_heartbeats(call) for call in calls]
            process.send_signal(signal.SIGTERM)
            await until(lambda: _has_ended(process))
            recorded.recording = path.read_bytes()
    return recorded


# The script: no step leaves state that affects the next one.


async def _texts(services: Services) -> None:
    await services.models.ListModels(model_pb2.ListModelsRequest())
    await services.models.GetModel(model_pb2.GetModelRequest(model="quire-tiny"))
    await services.models.GetServerInfo(model_pb2.GetServerInfoRequest())
    await services.generation.Tokenize(generation_pb2.TokenizeRequest(text=_PROMPT))
    chat = generation_pb2.ChatMessages(messages=[ChatMessage(role="user", content="Hello")])
    tokenized = await services.generation.Tokenize(generation_pb2.TokenizeRequest(chat=chat))
    await services.generation.Detokenize(generation_pb2.DetokenizeRequest(token_ids=tokenized.token_ids))


async def _greedy(services: Services) -> None:
    request = GenerateRequest(text=_PROMPT, sampling=_GREEDY, stopping=_tokens(12), request_id="greedy", priority=3)
    await services.generation.Generate(request)


async def _sampled(services: Services) -> None:
    sampling = SamplingParameters(
        temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=7, presence_penalty=0.5, frequency_penalty=0.25,
        repetition_penalty=1.1, logit_bias={5: 1.5, 6: -2.0}, bad_words=["wolf"],
    )  # fmt: skip
    stopping = StoppingParameters(max_tokens=16, min_tokens=4, stop=["."], stop_token_ids=[9], include_stop_string=True)
    request = GenerateStreamRequest(text=_PROMPT, sampling=sampling, stopping=stopping, request_id="sampled")
    await _read(services.generation.GenerateStream(request))
    allowed = SamplingParameters(temperature=1.0, seed=8, allowed_token_ids=range(100, 200))
    prompt = TokenIds(ids=range(300, 320))
    request = GenerateStreamRequest(
        token_ids=prompt, sampling=allowed, stopping=StoppingParameters(max_tokens=8, ignore_eos=True), request_id="ids"
    )
    await _read(services.generation.GenerateStream(request))


async def _samples(services: Services) -> None:
    """Copy-on-write: samples of one prompt that ends in the middle of a block."""
    output = OutputOptions(logprobs=2, prompt_logprobs=1)
    sampling = SamplingParameters(temperature=1.0, seed=11, n=2)
    stopping = StoppingParameters(max_tokens=20, stop=[" the"], ignore_eos=True)
    request = GenerateRequest(text=_PROMPT, sampling=sampling, stopping=stopping, output=output, request_id="samples")
    await services.generation.Generate(request)
    sampling = SamplingParameters(temperature=1.0, seed=12, n=2, best_of=3)
    output = OutputOptions(logprobs=0, prompt_logprobs=2, prompt_logprobs_start=4)
    request = GenerateRequest(
        text=_PROMPT, sampling=sampling, stopping=_tokens(12), output=output, request_id="best-of"
    )
    await services.generation.Generate(request)


async def _beams(services: Services) -> None:
    beam_search = BeamSearchParameters(beam_width=3, length_penalty=0.8)
    sampling = SamplingParameters(beam_search=beam_search, n=2)
    request = GenerateRequest(
        text=_PROMPT, sampling=sampling, stopping=_tokens(14), output=OutputOptions(logprobs=1), request_id="beams"
    )
    await services.generation.Generate(request)


async def _constraints(services: Services) -> None:
    schema = '{"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}'
    constraints = {
        "schema": Constraint(json_schema=schema, no_white_space=True),
        "regex": Constraint(regex="[a-c]{3,5}[0-9]"),
        "choice": Constraint(choice=Choice(texts=["red", "green"])),
    }
    for name, constraint in constraints.items():
        sampling = SamplingParameters(temperature=1.0, seed=13, constraint=constraint)
        request = GenerateRequest(text=_PROMPT, sampling=sampling, stopping=_tokens(24), request_id=name)
        await services.generation.Generate(request)


async def _chats(services: Services) -> None:
    messages = [ChatMessage(role="user", content="What is the weather in Oslo?")]
    schema = '{"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}'
    tools = [Tool(name="get_weather", description="The weather of a city", parameters=schema)]
    request = ChatRequest(
        messages=messages, tools=tools, tool_choice=ToolChoice(name="get_weather"), sampling=_GREEDY,
        stopping=_tokens(60), request_id="tools",
    )  # fmt: skip
    await services.generation.Chat(request)
    stream = ChatStreamRequest(
        messages=messages, response_format=Constraint(choice=Choice(texts=["fine", "bad"])), sampling=_GREEDY,
        stopping=_tokens(12), request_id="format",
    )  # fmt: skip
    await _read(services.generation.ChatStream(stream))


async def _pins(services: Services) -> None:
    text = _PROMPT + " who lived in a deep forest with her mother and her four small brothers"
    pin = await services.prefixes.PinPrefix(prefix_pb2.PinPrefixRequest(text=text, time_to_live_ms=60_000))
    request = GenerateRequest(text=f"{text}. They", sampling=_GREEDY, stopping=_tokens(8), request_id="pinned")
    await services.generation.Generate(request)
    await services.prefixes.UnpinPrefix(prefix_pb2.UnpinPrefixRequest(pin_id=pin.pin_id))


async def _durable(services: Services) -> None:
    """Broken after its first tokens, resumed through another gateway, broken there, and resumed through the first."""
    request = GenerateStreamRequest(
        text=_PROMPT, sampling=SamplingParameters(temperature=1.0, seed=17), request_id="durable", durable=True,
        stopping=StoppingParameters(max_tokens=48, stop=["zebra"], ignore_eos=True), output=OutputOptions(logprobs=1),
    )  # fmt: skip
    num_tokens = await _read(services.generation.GenerateStream(request), num_tokens=10)
    for generation, further in ((services.other, 10), (services.generation, None)):
        resume = ResumeStreamRequest(request_id="durable", offsets=[SequenceOffset(offset=num_tokens)])
        num_tokens += await _read(generation.ResumeStream(resume), further)


async def _continued(services: Services) -> None:
    request = GenerateRequest(text=_PROMPT, sampling=_GREEDY, stopping=_tokens(6), request_id="held")
    (held,) = (await services.generation.Generate(request)).sequences
    request = GenerateRequest(
        text=_PROMPT, sampling=_GREEDY, stopping=_tokens(12), request_id="continued",
        continue_from=[HeldSequence(token_ids=held.token_ids)],
    )  # fmt: skip
    await services.generation.Generate(request)


async def _ended(services: Services) -> None:
    """A request that its client ends, and one that is ended by its id."""
    for name in ("left", "cancelled"):
        request = GenerateStreamRequest(
            text=_PROMPT, sampling=SamplingParameters(seed=19), request_id=name,
            stopping=StoppingParameters(max_tokens=400, ignore_eos=True),
        )  # fmt: skip
        call = services.generation.GenerateStream(request)
        if name == "left":
            await _read(call, num_tokens=1)
            continue
        reading = asyncio.create_task(_read(call))
        await call.initial_metadata()
        await services.generation.Cancel(generation_pb2.CancelRequest(request_id=name))
        await reading


async def _refused(services: Services) -> None:
    request = GenerateRequest(text=_PROMPT, sampling=SamplingParameters(temperature=-1), request_id="refused")
    await _fails(services.generation.Generate(request))
    await _fails(services.generation.Cancel(generation_pb2.CancelRequest(request_id="unknown")))
    await _fails(services.generation.ResumeStream(ResumeStreamRequest(request_id="unknown")).read())


async def _crowd(services: Services) -> None:
    """Requests that exceed the pool: some are swapped out and come back."""
    watching = services.watched.Watch(scheduler_pb2.WatchRequest(include_memory=True))
    await watching.read()
    requests = [
        GenerateStreamRequest(
            text=f"{_PROMPT} number {index}", sampling=SamplingParameters(temperature=1.0, seed=index),
            stopping=StoppingParameters(max_tokens=110, ignore_eos=True), request_id=f"crowd-{index}",
        )
        for index in range(5)
    ]  # fmt: skip
    reading = asyncio.gather(*(_read(services.generation.GenerateStream(request)) for request in requests))
    await watching.read()
    await services.watched.GetState(scheduler_pb2.GetStateRequest(include_sequences=True))
    await services.watched.InspectBlocks(scheduler_pb2.InspectBlocksRequest())
    await reading
    watching.cancel()


_GREEDY = SamplingParameters(temperature=0.0)
SCRIPT: Sequence[Callable[[Services], Awaitable[None]]] = (
    _texts, _greedy, _sampled, _samples, _beams, _constraints, _chats, _pins, _durable, _continued, _ended, _refused,
    _crowd,
)  # fmt: skip


def _tokens(number: int) -> StoppingParameters:
    return StoppingParameters(max_tokens=number)


async def _read(call: Any, num_tokens: int | None = None) -> int:
    """Reads to the end, or leaves the call once it has `num_tokens` tokens; returns how many it has."""
    read = 0
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for message in call:
            read += len(message.chunk.token_ids)
            if num_tokens is not None and read >= num_tokens:
                call.cancel()
                break
    return read


async def _fails(call: Awaitable[Any]) -> None:
    try:
        await call
    except grpc.aio.AioRpcError:
        return
    raise AssertionError("the call was answered")


@contextlib.contextmanager
def _running(*command: str):
    # A worker that can run the model several times in a step, or drafts, gets more fields than in any earlier release.
    environ = child_environ(os.environ) | {"QUIRE_MULTI_STEP_MS": "0", "QUIRE_SPECULATE": "off"}
    process = subprocess.Popen([*command, "--log-level", "warning"], env=environ, process_group=0)
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _has_ended(process: subprocess.Popen) -> bool:
    return process.poll() is not None


async def _until_serving(address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:

        async def serves() -> bool:
            try:
                answer = await health_stub(channel).Check(health_pb2.HealthCheckRequest())
            except grpc.aio.AioRpcError:
                return False
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        await until(serves, timeout_s=120)


def _without_heartbeats(call: Call) -> Call:
    """The call with only its first heartbeat: their number depends on the load of the machine."""
    if call.method != "/quire.worker.v1.WorkerService/Run":
        return call
    kept = Call(call.method, status=call.status)
    num_heartbeats = 0
    for is_request, data in call.messages:
        if not is_request and worker_pb2.RunResponse.FromString(data).HasField("heartbeat"):
            num_heartbeats += 1
            if num_heartbeats > 1:
                continue
        kept.messages.append((is_request, data))
    return kept


def main() -> int:
    """Writes the folder; returns 1 for a version in development, whose messages no release has to read."""
    if ".dev" in VERSION:
        print(f"{VERSION} is no release; set its version first: python -m tools.set_version", file=sys.stderr)
        return 1
    directory = ROOT / VERSION
    recorded = asyncio.run(record())
    directory.mkdir(exist_ok=True)
    write_calls(directory / MESSAGES, recorded.calls)
    contracts = read_descriptors(PROTOS, "--include_imports").SerializeToString(deterministic=True)
    for name, content in ((RECORDING, recorded.recording), (CONTRACTS, contracts)):
        (directory / name).write_bytes(gzip.compress(content, mtime=0))
    for path in sorted(directory.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
