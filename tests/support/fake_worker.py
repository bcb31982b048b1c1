"""A worker without a model: real gRPC, real step protocol, tokens by a rule.

The token at position p of a sequence with seed s is `token_at(s, p)`, so tests know every output, whatever the batch.
Each step takes `step_seconds`. Besides, it checks what the scheduler sends: that steps come without gaps, that every
computed token has a slot in a block, and that no two rows write to one slot.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio

from quire.arrays import decode_int32, encode_float32, encode_int32
from quire.rpc.errors import FailedPrecondition, InvalidArgument
from quire.rpc.server import RpcServer
from quire.worker.v1 import worker_pb2, worker_pb2_grpc

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


def token_at(seed: int, position: int, vocab_size: int = 1000) -> int:
    """The token that a sequence with this seed has at this position."""
    return (seed * 7919 + position * 104_729 + 13) % vocab_size


@dataclass(frozen=True, slots=True)
class FakeWorkerConfig:
    """Geometry and behaviour."""

    num_blocks: int = 256
    block_size: int = 16
    vocab_size: int = 1000
    max_model_len: int = 1024
    max_num_rows: int = 256
    max_num_batched_tokens: int = 2048
    max_steps_in_flight: int = 2
    step_seconds: float = 0.0
    failing_seeds: frozenset[int] = frozenset()
    """Rows with these seeds fail when they sample."""


@dataclass(slots=True)
class _Row:
    num_tokens: int
    blocks: list[int]
    seed: int
    logprobs: int | None


@dataclass(slots=True)
class _Session:
    epoch: int
    rows: dict[int, _Row] = field(default_factory=dict)
    last_step_id: int = 0


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Serves WorkerService. `steps` keeps the requests that were run; `hang` stops answering while it is set."""

    def __init__(self, config: FakeWorkerConfig | None = None) -> None:
        self.config = config or FakeWorkerConfig()
        self.generation = time.time_ns()
        self.steps: list[worker_pb2.StepRequest] = []
        self.keep_steps = True
        self.num_steps = 0
        self.hang = asyncio.Event()
        self._epoch = 0
        self._server: RpcServer | None = None

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Listens and returns the address."""
        self._server = await RpcServer.start(
            address, lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server), [SERVICE_NAME]
        )
        self._server.set_serving(True)
        return self._server.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace_s=0)

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(info=self._info())

    async def Run(
        self, request_iterator: AsyncIterator[worker_pb2.RunRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.RunResponse]:
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("attach"):
            raise FailedPrecondition("the first message must be attach")
        session = self._attach(first.attach)
        yield worker_pb2.RunResponse(attached=worker_pb2.Attached(scheduler_epoch=session.epoch, info=self._info()))
        async for request in request_iterator:
            self._check(session, request.step)
            while self.hang.is_set():
                yield worker_pb2.RunResponse(heartbeat=worker_pb2.Heartbeat(last_step_id=session.last_step_id))
                await asyncio.sleep(0.02)
            if self.config.step_seconds:
                await asyncio.sleep(self.config.step_seconds)
            yield worker_pb2.RunResponse(result=self._run(session, request.step))

    def _attach(self, attach: worker_pb2.Attach) -> _Session:
        if attach.scheduler_epoch < self._epoch:
            raise FailedPrecondition(f"epoch {attach.scheduler_epoch} is stale, {self._epoch} was seen")
        self._epoch = attach.scheduler_epoch
        return _Session(attach.scheduler_epoch)

    def _info(self) -> worker_pb2.WorkerInfo:
        config = self.config
        return worker_pb2.WorkerInfo(
            worker_generation=self.generation,
            world_size=1,
            pool=worker_pb2.KvPoolGeometry(
                block_size=config.block_size,
                num_gpu_blocks=config.num_blocks,
                num_layers=1,
                num_kv_heads=1,
                head_dim=1,
                dtype="float32",
                block_bytes=8 * config.block_size,
            ),
            model=worker_pb2.ModelGeometry(
                architecture="FakeForCausalLM",
                dtype="float32",
                vocab_size=config.vocab_size,
                max_model_len=config.max_model_len,
                device="cpu",
            ),
            limits=worker_pb2.WorkerLimits(
                max_num_rows=config.max_num_rows,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_steps_in_flight=config.max_steps_in_flight,
                max_logprobs=20,
            ),
        )

    def _check(self, session: _Session, step: worker_pb2.StepRequest) -> None:
        if step.scheduler_epoch != self._epoch or step.worker_generation != self.generation:
            raise FailedPrecondition("stale epoch or generation")
        if step.step_id != session.last_step_id + 1:
            raise FailedPrecondition(f"step {step.step_id} after {session.last_step_id}")

    def _run(self, session: _Session, step: worker_pb2.StepRequest) -> worker_pb2.StepResult:
        session.last_step_id = step.step_id
        self.num_steps += 1
        if self.keep_steps:
            self.steps.append(step)
        self._change_rows(session.rows, step)
        self._check_batch(session.rows, step.batch)
        result = worker_pb2.StepResult(step_id=step.step_id)
        sampled = [self._sample(session.rows[row], row, result) for row in _ints(step.batch.samples)[::2]]
        result.rows = encode_int32(_ints(step.batch.samples)[::2])
        result.token_ids = encode_int32(sampled)
        return result

    def _change_rows(self, rows: dict[int, _Row], step: worker_pb2.StepRequest) -> None:
        for row in _ints(step.release):
            del rows[row]
        for assign in step.assign:
            if assign.row in rows:
                raise InvalidArgument(f"row {assign.row} is assigned already")
            rows[assign.row] = _Row(
                num_tokens=len(assign.token_ids) // 4,
                blocks=_ints(assign.block_table),
                seed=assign.sampling.seed,
                logprobs=assign.sampling.logprobs if assign.sampling.HasField("logprobs") else None,
            )
        for row, index, block in decode_int32(step.block_table_deltas, "deltas", columns=3).tolist():
            if index != len(rows[row].blocks):
                raise InvalidArgument(f"row {row} has {len(rows[row].blocks)} blocks, a delta names index {index}")
            rows[row].blocks.append(block)

    def _check_batch(self, rows: dict[int, _Row], batch: worker_pb2.Batch) -> None:
        held: set[int] = set()
        columns = zip(_ints(batch.rows), _ints(batch.num_new_tokens), _ints(batch.num_computed_tokens), strict=True)
        for index, num_new, num_computed in columns:
            row = rows[index]
            if num_computed + num_new > min(row.num_tokens, len(row.blocks) * self.config.block_size):
                raise InvalidArgument(f"row {index} computes tokens that it does not have, or has no slots for")
            if held.intersection(row.blocks):
                raise InvalidArgument(f"row {index} shares a block with another row")
            held.update(row.blocks)

    def _sample(self, row: _Row, index: int, result: worker_pb2.StepResult) -> int:
        if row.seed in self.config.failing_seeds:
            reason = worker_pb2.ROW_FAILURE_REASON_NON_FINITE_LOGITS
            result.failures.add(row=index, reason=reason, detail="the logits hold NaN")
            return 0
        token_id = token_at(row.seed, row.num_tokens, self.config.vocab_size)
        row.num_tokens += 1
        if row.logprobs is not None:
            top = list(range(row.logprobs))
            result.logprobs.add(
                row=index,
                chosen_logprob=-0.5,
                chosen_rank=1,
                top_token_ids=encode_int32(top),
                top_logprobs=encode_float32([-0.5 - rank for rank in top]),
            )
        return token_id


def _ints(data: bytes) -> list[int]:
    return decode_int32(data, "array").tolist()
