"""A scheduler's end of the step protocol, in raw messages."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from quire.messages.arrays import decode_int32, encode_int32
from quire.rpc.channel import open_channel
from quire.rpc.errors import QuireError, from_rpc_error
from quire.service.compatibility import WORKER_PROTOCOL
from quire.worker.v1 import worker_pb2 as pb
from quire.worker.v1 import worker_pb2_grpc
from tests.support.sampling import make_row_sampling

TIMEOUT_S = 60.0


def attach_request(epoch: int) -> pb.RunRequest:
    return pb.RunRequest(attach=pb.Attach(scheduler_epoch=epoch, protocol=WORKER_PROTOCOL.message()))


class StepClient:
    """One Run stream. Answers that are not waited for are kept: results in order, heartbeats counted."""

    def __init__(self, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
        self._call: grpc.aio.StreamStreamCall = stub.Run()
        self.attached = pb.Attached()
        self.heartbeats: list[pb.Heartbeat] = []
        self._next_step_id = 1

    @property
    def info(self) -> pb.WorkerInfo:
        return self.attached.info

    async def attach(self, epoch: int) -> pb.Attached:
        """Attaches and waits for the answer."""
        await self.write(attach_request(epoch))
        response = await self._read()
        assert response.WhichOneof("message") == "attached"
        self.attached = response.attached
        return response.attached

    def step(self, **fields: Any) -> pb.StepRequest:
        """The next step of this session, with these fields."""
        with_id: dict[str, Any] = {"step_id": self._next_step_id, **fields}
        step = pb.StepRequest(**with_id)
        step.scheduler_epoch = step.scheduler_epoch or self.attached.scheduler_epoch
        step.worker_generation = step.worker_generation or self.info.worker_generation
        self._next_step_id = step.step_id + 1
        return step

    async def send(self, step: pb.StepRequest) -> None:
        await self.write(pb.RunRequest(step=step))

    async def write(self, request: pb.RunRequest) -> None:
        await self._call.write(request)

    async def result(self) -> pb.StepResult:
        """The next result; heartbeats on the way are kept."""
        return (await self._after_heartbeats("result")).result

    async def heartbeat(self) -> pb.Heartbeat:
        """The next answer, which must be a heartbeat."""
        response = await self._read()
        assert response.WhichOneof("message") == "heartbeat"
        return response.heartbeat

    async def prepared(self) -> int:
        """The number of the next constraint that is prepared; heartbeats on the way are kept."""
        return (await self._after_heartbeats("prepared")).prepared.number

    async def run(self, **fields: object) -> pb.StepResult:
        """Sends the next step and waits for its result."""
        await self.send(self.step(**fields))
        return await self.result()

    async def error(self) -> QuireError:
        """The error with which the worker ends the stream; heartbeats before it are kept, results are not expected."""
        try:
            await self.result()
        except grpc.RpcError as error:
            return from_rpc_error(error)
        raise AssertionError("a result came where an error was expected")

    def cancel(self) -> None:
        self._call.cancel()

    async def _after_heartbeats(self, kind: str) -> pb.RunResponse:
        while (response := await self._read()).WhichOneof("message") == "heartbeat":
            self.heartbeats.append(response.heartbeat)
        assert response.WhichOneof("message") == kind
        return response

    async def _read(self) -> pb.RunResponse:
        async with asyncio.timeout(TIMEOUT_S):
            response = await self._call.read()
        if isinstance(response, pb.RunResponse):
            return response
        raise AssertionError(f"the stream ended with {await self._call.code()}")


@asynccontextmanager
async def worker_stub(address: str) -> AsyncIterator[worker_pb2_grpc.WorkerServiceStub]:
    """A stub on a channel of its own."""
    async with open_channel(address) as channel:
        yield worker_pb2_grpc.WorkerServiceStub(channel)


@asynccontextmanager
async def attached_client(address: str, epoch: int) -> AsyncIterator[StepClient]:
    """An attached stream on a channel of its own."""
    async with worker_stub(address) as stub:
        client = StepClient(stub)
        await client.attach(epoch)
        yield client
        client.cancel()


_OF_ROWS = ("seed", "logprobs", "prompt_logprobs", "num_candidates")


def make_assign(row: int, token_ids: Sequence[int], block_table: Sequence[int], **sampling: Any) -> pb.AssignRow:
    """A row with a sequence; greedy unless `sampling` says otherwise."""
    own = {name: sampling.pop(name) for name in _OF_ROWS if name in sampling}
    return pb.AssignRow(
        row=row,
        token_ids=encode_int32(token_ids),
        block_table=encode_int32(block_table),
        row_sampling=make_row_sampling(**sampling),
        num_prompt_tokens=len(token_ids),
        **own,
    )


def make_batch(
    rows: Sequence[int],
    num_new_tokens: Sequence[int],
    num_computed_tokens: Sequence[int],
    samples: Sequence[tuple[int, int]] | None = None,
) -> pb.Batch:
    """A batch; every row samples from itself unless `samples` says otherwise."""
    pairs = [(row, row) for row in rows] if samples is None else samples
    return pb.Batch(
        rows=encode_int32(rows),
        num_new_tokens=encode_int32(num_new_tokens),
        num_computed_tokens=encode_int32(num_computed_tokens),
        samples=encode_int32([number for pair in pairs for number in pair]),
    )


def ints(data: bytes) -> list[int]:
    return decode_int32(data, "array").tolist()
