"""Nonsense at every method of every live process: no crash, no hang, no leaked block, typed errors only.

Each test takes QUIRE_FUZZ_SECONDS, 2 by default; QUIRE_FUZZ_SEED repeats a run.
"""

import asyncio
import contextlib
import os
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal import encoder
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from quire.client import GenerationOptions
from quire.gateway.v1 import generation_pb2
from quire.scheduler.v1 import scheduler_pb2
from quire.worker.v1 import worker_pb2
from tests.support.scheduler_process import wait_nothing_in_use
from tests.support.serving import Served, serving
from tests.support.worker_client import StepClient, attach_request, make_assign, make_batch, worker_stub
from tests.support.worker_server import running_worker

varint: Callable[[int], bytes] = encoder._VarintBytes  # pyrefly: ignore
_WIRE_FORMATS = {FieldDescriptor.CPPTYPE_FLOAT: (5, "<f"), FieldDescriptor.CPPTYPE_DOUBLE: (1, "<d")}
_NUMBERS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "hello", "quire-tiny", "user", "\0", "é" * 40, "\U0001f40d\u202e", " " * 300, "{}", "a" * 5000)
_DEEPEST = 4

# Status codes that a nonsense request may get. Not among them: UNKNOWN and INTERNAL, a defect of the server;
# UNAVAILABLE, a crash; DEADLINE_EXCEEDED, a hang.
_FAIR = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.CANCELLED,
}

# While it is computed, a pin may end by its time to live, or by another caller that made the same pin.
_LOST_TO_A_NEIGHBOUR = {"PIN_LOST"}


@dataclass(frozen=True, slots=True)
class Fuzzer:
    """Makes messages; the same seed makes the same ones."""

    rng: random.Random

    def message(self, kind: Descriptor, depth: int = 0) -> bytes:
        """A message with random fields, most of them set to edge values."""
        data = b""
        for field in kind.fields:
            if self.rng.random() < 0.5:
                for _ in range(self.rng.randrange(5) if field.is_repeated else 1):
                    data += self._field(field, depth)
        return data

    def mutated(self, message: bytes) -> bytes:
        """A message, at times with some of its bytes changed, lost, doubled or appended."""
        data = bytearray(message)
        match self.rng.randrange(6):
            case 0 if data:
                for _ in range(self.rng.randint(1, 4)):
                    data[self.rng.randrange(len(data))] = self.rng.randrange(256)
            case 1:
                del data[self.rng.randrange(len(data) + 1) :]
            case 2:
                data += self.rng.randbytes(self.rng.randint(1, 20))
            case 3 if data:
                start = self.rng.randrange(len(data))
                data[start:start] = data[start : start + self.rng.randint(1, 50)]
        return bytes(data)

    def _field(self, field: FieldDescriptor, depth: int) -> bytes:
        """A tag and a value. Maps are lists of messages."""
        if field.message_type is not None and depth >= _DEEPEST:
            return b""
        if field.cpp_type in _WIRE_FORMATS:
            wire_type, form = _WIRE_FORMATS[field.cpp_type]
            return varint(field.number << 3 | wire_type) + struct.pack(form, self.rng.choice(_NUMBERS))
        if field.message_type is not None:
            value = self.message(field.message_type, depth + 1)
        elif field.type == FieldDescriptor.TYPE_BYTES:
            value = self.rng.choice([b"", b"\0" * 4, self.rng.randbytes(8), b"\1\0\0\0" * 3, self.rng.randbytes(401)])
        elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            value = self.rng.choice(_TEXTS).encode()
        else:
            # Mostly small, at times the largest or smallest of some type; enums have values without a name.
            number = self.rng.choice([0, 1, 2, 3, 4, 7, 100, 999, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1])
            return varint(field.number << 3) + varint(self.rng.choice([number, number, -number, -number - 1]) % 2**64)
        return varint(field.number << 3 | 2) + varint(len(value)) + value


def methods_of(address: str) -> Iterator[MethodDescriptor]:
    """Every method of every service that a server's reflection reports."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        for name in sorted(database.get_services()):
            service: ServiceDescriptor = pool.FindServiceByName(name)
            yield from service.methods


def input_class(method: MethodDescriptor) -> type[Message]:
    return GetMessageClass(method.input_type)


def check_status(error: Any, what: str) -> None:
    """Fails unless the error of a call is one that a nonsense request may get, with the details that all of our errors
    carry."""
    code = error.code()
    status = rpc_status.from_call(error)
    if status is None:
        assert code in _FAIR, f"{what}: {error}"
        # gRPC itself refuses unknown methods and messages above the size limit.
        assert code in {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED}, f"{what}: untyped {error}"
        return
    infos = [
        error_details_pb2.ErrorInfo.FromString(each.value) for each in status.details if "ErrorInfo" in each.type_url
    ]
    (info,) = infos
    assert info.domain == "quire", f"{what}: {error}"
    assert code in _FAIR or info.reason in _LOST_TO_A_NEIGHBOUR, f"{what}: {error}"


pytestmark = pytest.mark.extended

SECONDS = float(os.environ.get("QUIRE_FUZZ_SECONDS", "2"))
SEED = int(os.environ.get("QUIRE_FUZZ_SEED", "0"))
NUM_CALLERS = 6
# A call without an answer in this time hangs.
TIMEOUT_S = 60.0


async def fuzz(attempt: Callable[[Fuzzer], Awaitable[str]], wanted: set[str]) -> None:
    """Several callers make attempts until the time is over and all wanted answers have come."""
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
    """Makes one call with these messages; returns the name of its status, which must be a fair one.

    Uses the blocking API: grpc.aio hides the server's status if a message is written to a stream that has ended.
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
    """Removes a pin that a nonsense request has made, since it would hold its blocks."""
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
    """A message for the method: nonsense, or a valid one with a fault."""
    message = fuzzer.message(method.input_type)
    names = method.input_type.fields_by_name
    if fuzzer.rng.random() < 0.5 and "text" in names and "stopping" in names:
        good = generation_pb2.GenerateRequest(text="hello", stopping={"max_tokens": fuzzer.rng.randint(1, 6)})
        message += good.SerializeToString()
    return fuzzer.mutated(message)


async def unanimous(served: Served, stop: asyncio.Event) -> int:
    """An honest caller during the nonsense: all of its answers equal the first one. Returns their number."""
    options = GenerationOptions(temperature=0.0, max_tokens=8, ignore_eos=True)
    texts = []
    while not stop.is_set() or not texts:
        texts.append((await served.client.generate("What is 2+2?", options)).sequences[0].text)
    assert set(texts) == {texts[0]}
    return len(texts)


async def assert_untouched(served: Served) -> None:
    assert served.server.services == served.started, "a process died"
    await wait_nothing_in_use(served.scheduler)


def endless(methods: list[MethodDescriptor]) -> set[str]:
    """Methods that never end by themselves."""
    names = {"grpc.health.v1.Health.Watch", "quire.scheduler.v1.SchedulerService.Watch"}
    return {method.full_name for method in methods if method.full_name in names}


async def fuzz_services(served: Served, address: str, *, without: tuple[str, ...] = ()) -> None:
    """Fuzzes all methods of one server while an honest caller continues."""
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
        # The last call of Sleep may have come after the last one of WakeUp, and the honest caller waits.
        await served.scheduler.WakeUp(scheduler_pb2.WakeUpRequest())
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
    # A drain would be carried out.
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
