"""Nonsense at every method of every live process: no crash, no hang, no leaked block, typed errors only.

Each test takes QUIRE_FUZZ_SECONDS, 2 by default; QUIRE_FUZZ_SEED repeats a run.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from quire.client import GenerationOptions
from quire.gateway.v1 import generation_pb2
from quire.worker.v1 import worker_pb2
from tests.support.fuzz import Fuzzer, check_status, input_class, methods_of
from tests.support.scheduler_process import wait_nothing_in_use
from tests.support.serving import Served, serving
from tests.support.worker_client import StepClient, attach_request, make_assign, make_batch, worker_stub
from tests.support.worker_server import running_worker

pytestmark = pytest.mark.extended

SECONDS = float(os.environ.get("QUIRE_FUZZ_SECONDS", "2"))
SEED = int(os.environ.get("QUIRE_FUZZ_SEED", "0"))
NUM_CALLERS = 6
# A call that is not answered in this time hangs.
TIMEOUT_S = 60.0


async def fuzz(attempt: Callable[[Fuzzer], Awaitable[str]], wanted: set[str]) -> None:
    """Several callers make attempts until the time is over and they were answered what is wanted."""
    print(f"QUIRE_FUZZ_SEED={SEED}")
    loop = asyncio.get_running_loop()
    end = loop.time() + SECONDS
    outcomes: set[str] = set()

    async def call(number: int) -> None:
        fuzzer = Fuzzer(random.Random(SEED + number))
        while loop.time() < end or not wanted <= outcomes:
            outcomes.add(await attempt(fuzzer))

    async with asyncio.TaskGroup() as callers:
        for number in range(NUM_CALLERS):
            callers.create_task(call(number))


def call_with(channel: grpc.Channel, method: MethodDescriptor, data: list[bytes], *, patient: bool) -> str:
    """One call with these messages; the name of its status, which is a fair one.

    By the blocking API: grpc.aio hides the server's status when a message is written to a stream that has ended.
    """
    path = f"/{method.containing_service.full_name}/{method.name}"
    timeout_s = TIMEOUT_S if patient else 0.02
    requests: Any = iter(data) if method.client_streaming else data[0]
    try:
        if method.server_streaming:
            kind = channel.stream_stream if method.client_streaming else channel.unary_stream
            for _ in kind(path)(requests, timeout=timeout_s):
                pass
        else:
            kind = channel.stream_unary if method.client_streaming else channel.unary_unary
            answer = kind(path)(requests, timeout=TIMEOUT_S)
            if method.name == "PinPrefix":
                unpin(channel, method, data[0], answer)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        if patient or code != grpc.StatusCode.DEADLINE_EXCEEDED:
            check_status(error, f"{path} {data!r:.400}")
        return code.name
    return "OK"


def unpin(channel: grpc.Channel, method: MethodDescriptor, request: bytes, answer: bytes) -> None:
    """Ends the pin that nonsense has made: it would hold its blocks as it should."""
    service = method.containing_service
    pinned: Any = input_class(method).FromString(request)
    response: Any = GetMessageClass(method.output_type).FromString(answer)
    unpin_method = service.methods_by_name["UnpinPrefix"]
    message: Any = input_class(unpin_method)(pin_id=response.pin_id)
    if "tenant" in message.DESCRIPTOR.fields_by_name:
        message.tenant = pinned.tenant
    with contextlib.suppress(grpc.RpcError):  # the same prefix has the same pin, which another caller may have ended
        channel.unary_unary(f"/{service.full_name}/UnpinPrefix")(message.SerializeToString(), timeout=TIMEOUT_S)


def seeds_of(method: MethodDescriptor, fuzzer: Fuzzer) -> bytes:
    """A message for the method: nonsense, or a good one with something wrong."""
    message = fuzzer.message(input_class(method))
    names = message.DESCRIPTOR.fields_by_name
    if fuzzer.rng.random() < 0.5 and "text" in names and "stopping" in names:
        good = generation_pb2.GenerateRequest(text="hello", stopping={"max_tokens": fuzzer.rng.randint(1, 6)})
        message.MergeFromString(good.SerializeToString())
    return fuzzer.mutated(message)


async def unanimous(served: Served, stop: asyncio.Event) -> int:
    """An honest caller beside the nonsense: every one of its answers is the first one. Returns their number."""
    options = GenerationOptions(temperature=0.0, max_tokens=8, ignore_eos=True)
    texts = []
    while not stop.is_set() or not texts:
        texts.append((await served.client.generate("What is 2+2?", options)).sequences[0].text)
    assert set(texts) == {texts[0]}
    return len(texts)


async def assert_untouched(served: Served) -> None:
    starts = [served.server.process(name).starts for name in ("gateway", "scheduler", "worker")]
    assert starts == [1, 1, 1], "a process died"
    await wait_nothing_in_use(served.scheduler)


def endless(methods: list[MethodDescriptor]) -> set[str]:
    """Methods that do not end by themselves however the call goes."""
    names = {"grpc.health.v1.Health.Watch", "quire.scheduler.v1.SchedulerService.Watch"}
    return {method.full_name for method in methods if method.full_name in names}


async def fuzz_services(served: Served, address: str, *, without: tuple[str, ...] = ()) -> None:
    """Fuzzes all methods of one server while an honest caller goes on."""
    methods = await asyncio.to_thread(lambda: list(methods_of(address)))
    impatient = endless(methods)
    methods = [method for method in methods if method.full_name not in without]
    with grpc.insecure_channel(address) as channel:

        async def attempt(fuzzer: Fuzzer) -> str:
            method = fuzzer.rng.choice(methods)
            data = [seeds_of(method, fuzzer) for _ in range(fuzzer.rng.randint(1, 3))]
            patient = method.full_name not in impatient and fuzzer.rng.random() < 0.8
            return await asyncio.to_thread(call_with, channel, method, data, patient=patient)

        stop = asyncio.Event()
        honest = asyncio.create_task(unanimous(served, stop))
        await fuzz(attempt, {"OK", "INVALID_ARGUMENT"})
        stop.set()
        assert await honest
    await assert_untouched(served)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served() -> AsyncIterator[Served]:
    async with serving(num_gpu_blocks=200) as running:
        yield running


async def test_nonsense_at_the_gateway_s_methods(served: Served) -> None:
    await fuzz_services(served, served.server.grpc_address)


async def test_nonsense_at_the_scheduler_s_methods(served: Served) -> None:
    # A drain that is asked for is a drain.
    without = ("quire.scheduler.v1.SchedulerService.Drain",)
    await fuzz_services(served, served.server.scheduler_address, without=without)


async def test_nonsense_at_the_worker_s_methods(tmp_path: Path) -> None:
    async with running_worker(tmp_path) as address, worker_stub(address) as stub:
        channel = grpc.insecure_channel(address)
        epoch = 0

        async def attempt(fuzzer: Fuzzer) -> str:
            nonlocal epoch
            epoch += 1
            attach = attach_request(epoch).SerializeToString()
            noise = [seeds_of(RUN, fuzzer) for _ in range(fuzzer.rng.randint(1, 3))]
            noise = [data for data in noise if not attaches(data)]
            return await asyncio.to_thread(call_with, channel, RUN, [attach, *noise], patient=True)

        with channel:
            await fuzz(attempt, {"INVALID_ARGUMENT", "FAILED_PRECONDITION"})
        client = StepClient(stub)
        await client.attach(epoch + 1)
        result = await client.run(assign=[make_assign(0, [1, 2, 3], [3])], batch=make_batch([0], [3], [0]))
        assert not result.failures


RUN = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods_by_name["Run"]


def attaches(data: bytes) -> bool:
    """Whether a message attaches, by chance, with an epoch that would lock out all later ones."""
    try:
        return worker_pb2.RunRequest.FromString(data).WhichOneof("message") == "attach"
    except DecodeError:
        return False
