"""What a fake scheduler shows to people who watch it: what a test tells it to show."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio

from quire.rpc.errors import invalid_field
from quire.scheduler.v1 import scheduler_pb2


@dataclass
class FakeWatch:
    """Watch and ReadBlock.

    Attributes:
        frames: What Watch shows, and nothing more after these.
        blocks: What ReadBlock answers; there are no others.
        watches: The calls of Watch that came.
    """

    frames: list[scheduler_pb2.WatchResponse] = field(default_factory=list)
    blocks: dict[int, scheduler_pb2.ReadBlockResponse] = field(default_factory=dict)
    watches: list[scheduler_pb2.WatchRequest] = field(default_factory=list)

    async def Watch(
        self, request: scheduler_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[scheduler_pb2.WatchResponse]:
        self.watches.append(request)
        for frame in self.frames:
            yield frame
        await asyncio.get_running_loop().create_future()

    async def ReadBlock(
        self, request: scheduler_pb2.ReadBlockRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.ReadBlockResponse:
        if request.block_id not in self.blocks:
            raise invalid_field("block_id", f"is {request.block_id}, which the pool does not have")
        return self.blocks[request.block_id]
