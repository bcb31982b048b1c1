"""What a fake scheduler shows to people who watch it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio

from quire.arrays import encode_int32
from quire.common.v1 import common_pb2
from quire.rpc.errors import invalid_field
from quire.scheduler.v1 import scheduler_pb2

_NUM_BLOCKS = 64
_BLOCK_SIZE = 16
_RUNNING = 2
_INTERVAL_S = 0.02
_SILENT_TURNS = 20


@dataclass(frozen=True)
class Shown:
    """A live request as it is shown: one sequence, with blocks for all its tokens."""

    submit: scheduler_pb2.Submit
    token_ids: list[int]
    num_prompt: int

    @property
    def table(self) -> list[int]:
        """Blocks of its own, as long as few requests are live."""
        count = -(-len(self.token_ids) // _BLOCK_SIZE)
        return [(self.submit.handle * 8 + index) % _NUM_BLOCKS for index in range(count)]


@dataclass
class FakeWatch:
    """Watch and ReadBlock.

    Attributes:
        frames: What Watch shows instead of what there is, and nothing more after these.
        blocks: What ReadBlock answers instead.
        watches: The calls of Watch that came.
        usages: What the requests that completed have cost, in order.
    """

    frames: list[scheduler_pb2.WatchResponse] = field(default_factory=list)
    blocks: dict[int, scheduler_pb2.ReadBlockResponse] = field(default_factory=dict)
    watches: list[scheduler_pb2.WatchRequest] = field(default_factory=list)
    usages: list[common_pb2.Usage] = field(default_factory=list)

    def shown(self) -> list[Shown]:
        """All live requests."""
        raise NotImplementedError

    @property
    def is_draining(self) -> bool:
        raise NotImplementedError

    async def Watch(
        self, request: scheduler_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[scheduler_pb2.WatchResponse]:
        self.watches.append(request)
        for frame in self.frames:
            yield frame
        if self.frames:
            await asyncio.get_running_loop().create_future()
        first, told, before, silent = len(self.usages), len(self.usages), None, 0
        known: set[int] = set()
        while True:
            shown = self.shown()
            state = (shown, len(self.usages), self.is_draining)
            silent += 1
            if state != before or silent > _SILENT_TURNS:
                frame = self._frame(self.usages[first:], self.usages[told:], len(shown))
                frame.is_whole = before is None
                if request.include_memory:
                    frame.memory.CopyFrom(_memory(shown, known))
                known = {each.submit.handle for each in shown}
                before, told, silent = state, len(self.usages), 0
                yield frame
            await asyncio.sleep(_INTERVAL_S)

    async def ReadBlock(
        self, request: scheduler_pb2.ReadBlockRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.ReadBlockResponse:
        if request.block_id in self.blocks:
            return self.blocks[request.block_id]
        if request.block_id >= _NUM_BLOCKS:
            raise invalid_field("block_id", f"is {request.block_id}; the pool has {_NUM_BLOCKS} blocks")
        answer = scheduler_pb2.ReadBlockResponse()
        for each in self.shown():
            if request.block_id in each.table:
                index = each.table.index(request.block_id)
                token_ids = encode_int32(each.token_ids[index * _BLOCK_SIZE : (index + 1) * _BLOCK_SIZE])
                answer.ref_count += 1
                answer.owners.add(
                    request_id=each.submit.request_id,
                    tenant=each.submit.tenant,
                    logical_index=index,
                    token_ids=token_ids,
                )
        return answer

    def _frame(
        self, usages: list[common_pb2.Usage], new: list[common_pb2.Usage], num_running: int
    ) -> scheduler_pb2.WatchResponse:
        numbers = scheduler_pb2.ReplicaNumbers(
            ready=not self.is_draining,
            draining=self.is_draining,
            num_blocks=_NUM_BLOCKS,
            block_size=_BLOCK_SIZE,
            max_num_seqs=256,
            running_requests=num_running,
            completed_requests=len(usages),
            generated_tokens=sum(each.generated_tokens for each in usages),
        )
        ended = [
            scheduler_pb2.EndedRequest(prompt_tokens=each.prompt_tokens, generated_tokens=each.generated_tokens)
            for each in new
        ]
        return scheduler_pb2.WatchResponse(unix_seconds=1.0, numbers=numbers, ended=ended)


def _memory(shown: list[Shown], known: set[int]) -> scheduler_pb2.MemoryChanges:
    """Tables and progress of all live requests, and which of them are new and gone. Handles are their numbers."""
    progress: list[int] = []
    lengths: list[int] = []
    tables: list[int] = []
    for each in shown:
        handle, num_tokens = each.submit.handle, len(each.token_ids)
        progress += (handle, _RUNNING, num_tokens, num_tokens)
        lengths += (handle, len(each.table))
        for index, block in enumerate(each.table):
            tables += (handle, index, block)
    return scheduler_pb2.MemoryChanges(
        sequences=[
            scheduler_pb2.WatchedSequence(
                number=each.submit.handle,
                request_id=each.submit.request_id,
                tenant=each.submit.tenant,
                num_sequences=1,
                prompt_tokens=each.num_prompt,
                max_tokens=each.num_prompt + each.submit.stopping.max_tokens,
            )
            for each in shown
            if each.submit.handle not in known
        ],
        gone=encode_int32(sorted(known - {each.submit.handle for each in shown})),
        progress=encode_int32(progress),
        lengths=encode_int32(lengths),
        tables=encode_int32(tables),
    )
