"""A request is cancelled by its id through any gateway: two of them, real schedulers, fake workers."""

import contextlib

import pytest

from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import Cancelled, NotFound
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import error_of, running_gateway, stream_request
from tests.support.keys import KeysFile
from tests.support.processes import until_true
from tests.support.scheduler_process import wait_nothing_in_use
from tests.support.two_gateways import TwoGateways, two_gateways

Metadata = tuple[tuple[str, str], ...]


def long_request(request_id: str) -> generation_pb2.GenerateStreamRequest:
    request = stream_request(max_tokens=900, request_id=request_id)
    request.stopping.ignore_eos = True
    return request


async def started(gateway, request_id: str = "story", metadata: Metadata = ()):
    """A stream whose first tokens came."""
    call = gateway.generation.GenerateStream(long_request(request_id), metadata=metadata)
    await anext(aiter(call))
    return call


def cancel(gateway, request_id: str = "story", metadata: Metadata = ()):
    return gateway.generation.Cancel(generation_pb2.CancelRequest(request_id=request_id), metadata=metadata, timeout=30)


async def assert_nothing_runs(two: TwoGateways) -> None:
    for scheduler in two.schedulers:
        await wait_nothing_in_use(scheduler)


async def test_the_other_gateway_ends_a_stream_and_then_no_longer_finds_it(tmp_path):
    """At whichever replica it is."""
    async with two_gateways(tmp_path, num_replicas=2) as two:
        ids = [f"story-{number}" for number in range(8)]
        calls = [await started(two.first, request_id) for request_id in ids]
        other = await started(two.first, "other")
        two.stand_still()
        for request_id, call in zip(ids, calls, strict=True):
            await cancel(two.second, request_id)
            error = await error_of(call)
            assert isinstance(error, Cancelled)
            assert error.reason == "CANCELLED_BY_ID"
        for gateway in two.both:
            again = await error_of(cancel(gateway, ids[0]))
            assert isinstance(again, NotFound)
            assert again.reason == "REQUEST_NOT_FOUND"
        assert not other.done()
        await cancel(two.first, "other")
        await assert_nothing_runs(two)


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_durable_request_is_cancelled_at_once_while_no_scheduler_can_be_reached(is_read):
    """And ended at its scheduler when that is back, before another request that has its id by then."""
    scheduler = FakeScheduler(durable_grace_ms=60_000)
    await scheduler.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(scheduler.stop)
        gateway = await stack.enter_async_context(running_gateway(scheduler))
        call = gateway.generation.GenerateStream(stream_request(max_tokens=900, request_id="story", durable=True))
        await anext(aiter(call))
        if not is_read:
            call.cancel()
            await until_true(lambda: len(gateway.gateway._generator.durable_reads) == 1)
        scheduler.refuses_connections = True
        scheduler.break_streams()
        await until_true(lambda: not gateway.gateway._generator.replicas.num_connected)
        await cancel(gateway)
        if is_read:
            assert isinstance(await error_of(call), Cancelled)
        another = gateway.generation.GenerateStream(stream_request("hello", max_tokens=5, request_id="story"))
        scheduler.refuses_connections = False
        assert len([response async for response in another]) > 0
        assert scheduler.aborted == ["story"]
        assert [submit.resubmitted for submit in scheduler.submits] == [False, True, False]


async def test_another_tenants_request_is_as_one_that_does_not_exist(tmp_path):
    keys = KeysFile(tmp_path / "keys.json")
    owner, stranger = ((("authorization", f"Bearer {keys.add(tenant)}"),) for tenant in ("acme", "other"))
    async with two_gateways(tmp_path, keys_files=(keys.path,)) as two:
        call = await started(two.first, metadata=owner)
        two.stand_still()
        errors = [await error_of(cancel(two.second, each, stranger)) for each in ("story", "nothing")]
        assert all(isinstance(error, NotFound) for error in errors)
        assert str(errors[0]).replace("story", "nothing") == str(errors[1])
        assert not call.done()
        await cancel(two.second, metadata=owner)
        assert isinstance(await error_of(call), Cancelled)
        await assert_nothing_runs(two)
