"""A durable request counts against its key's limits also while nobody reads it: two gateways, a real scheduler."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from gateway.auth.quota import Limits
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import QuireError
from tests.support.gateway_process import RunningGateway, error_of, stream_request
from tests.support.keys import KeysFile
from tests.support.scheduler_process import until
from tests.support.two_gateways import TwoGateways, two_gateways


@dataclass(frozen=True)
class Holder:
    """Who calls with one key."""

    two: TwoGateways
    key: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.key}"),)

    def begin(self, request_id: str, max_tokens: int):
        """A durable stream through the first gateway."""
        request = stream_request(request_id=request_id, max_tokens=max_tokens, durable=True)
        request.stopping.ignore_eos = True
        return self.two.first.generation.GenerateStream(request, metadata=self.metadata)

    async def begin_and_leave(self, request_id: str, max_tokens: int) -> None:
        call = self.begin(request_id, max_tokens)
        await anext(aiter(call))
        reads = self.two.first.gateway._generator.durable_reads
        num_kept = len(reads)
        call.cancel()

        async def is_kept() -> bool:
            return len(reads) == num_kept + 1

        await until(is_kept)

    def resume(self, request_id: str, gateway: RunningGateway):
        request = generation_pb2.ResumeStreamRequest(request_id=request_id)
        return gateway.generation.ResumeStream(request, metadata=self.metadata)

    async def read(self, request_id: str, gateway: RunningGateway) -> int:
        """Resumes a request and reads it to its end; the number of its tokens."""
        async with asyncio.timeout(30):
            return sum([len(response.chunk.token_ids) async for response in self.resume(request_id, gateway)])

    async def refusal(self, gateway: RunningGateway | None = None) -> QuireError | None:
        """Why the least of all requests is refused (by the first gateway), None where it is admitted."""
        gateway = gateway or self.two.first
        request = generation_pb2.TokenizeRequest(text="x")
        try:
            return await error_of(gateway.generation.Tokenize(request, metadata=self.metadata))
        except AssertionError:
            return None

    async def wait_until_admitted(self) -> None:
        async def is_admitted() -> bool:
            return await self.refusal() is None

        await until(is_admitted)


@contextlib.asynccontextmanager
async def holding(tmp_path, **limits) -> AsyncIterator[Holder]:
    keys = KeysFile(tmp_path / "keys.json")
    key = keys.add("acme", limits=Limits(**limits))
    async with two_gateways(tmp_path, keys_files=(keys.path,)) as two:
        yield Holder(two, key)


async def test_what_was_left_keeps_its_place_until_its_end(tmp_path):
    async with holding(tmp_path, max_concurrent_requests=2) as holder:
        for request_id in ("one", "two"):
            await holder.begin_and_leave(request_id, 250)
        error = await holder.refusal()
        assert error is not None
        assert error.reason == "CONCURRENCY_LIMIT"
        assert await holder.refusal(holder.two.second) is None
        await holder.wait_until_admitted()


async def test_whoever_resumes_goes_on_with_place_and_charge(tmp_path):
    async with holding(tmp_path, tokens_per_minute=180, max_concurrent_requests=1) as holder:
        await holder.begin_and_leave("story", 150)
        assert await holder.read("story", holder.two.first) == 150
        # The prompt, 150 tokens and no more.
        assert await holder.refusal() is None


async def test_what_is_generated_for_a_reader_at_another_gateway_is_charged_there(tmp_path):
    async with holding(tmp_path, tokens_per_minute=120) as holder:
        await holder.begin_and_leave("story", 250)
        assert await holder.read("story", holder.two.second) == 250
        error = await holder.refusal(holder.two.second)
        assert error is not None
        assert error.metadata["limit"] == "tokens_per_minute"
