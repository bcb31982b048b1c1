"""A gateway that ends a request hears what it has cost, where it asks."""

import pytest

from quire.scheduler.v1 import scheduler_pb2
from tests.support.scheduler_process import (
    GatewayStream,
    make_submit,
    running_scheduler,
    wait_attached,
    wait_nothing_in_use,
)

PROMPT_LEN = 40


async def abort(stream: GatewayStream, handle: int, sequence_index: int | None = None) -> None:
    message = scheduler_pb2.Abort(handle=handle, sequence_index=sequence_index, wants_usage=True)
    await stream.call.write(scheduler_pb2.ConnectRequest(abort=message))


async def started(stream: GatewayStream, submit: scheduler_pb2.Submit) -> None:
    """Submits a request, and again a first time, so that most of its prompt is cached."""
    warm = make_submit(submit.handle, prompt_len=PROMPT_LEN, max_tokens=1, tenant=submit.tenant)
    warm.handle = 99
    await stream.submit(warm)
    await stream.read_until_over(99)
    await stream.submit(submit)
    while len(stream.outputs[submit.handle]) < 3:
        await stream.read()


@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("sequence_index", [None, 0])
async def test_the_usage_of_what_was_aborted_comes(scheduler, worker, is_durable, sequence_index):
    stream, _ = await GatewayStream.open(scheduler)
    durable = is_durable
    await started(stream, make_submit(1, prompt_len=PROMPT_LEN, max_tokens=900, tenant="a", durable=durable))
    worker.hang.set()
    await abort(stream, 1, sequence_index)
    await stream.read_until_over(1)
    usage = stream.completed[1].usage
    assert usage.prompt_tokens == PROMPT_LEN
    assert usage.cached_tokens >= PROMPT_LEN // 2
    assert usage.generated_tokens >= 3
    assert usage.prefill_ms > 0
    assert usage.decode_ms > 0
    await wait_nothing_in_use(scheduler)
    stream.close()


async def test_the_usage_of_a_durable_request_that_was_ended_is_replayed(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
    submit = make_submit(1, prompt_len=PROMPT_LEN, max_tokens=900, tenant="a", durable=True)
    await started(stream, submit)
    await abort(stream, 1)
    await stream.read_until_over(1)
    stream.outputs[2] = []
    resume = scheduler_pb2.Resume(handle=2, tenant="a", request_id="request-1")
    await stream.call.write(scheduler_pb2.ConnectRequest(resume=resume))
    await stream.read_until_over(2)
    assert stream.completed[2].usage == stream.completed[1].usage
    stream.close()


async def test_a_request_that_never_ran_has_waited(worker, tmp_path):
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address, max_num_seqs=1) as scheduler:
        await wait_attached(scheduler)
        stream, _ = await GatewayStream.open(scheduler)
        await stream.submit(make_submit(1, max_tokens=900))
        await stream.read()
        await stream.submit(make_submit(2))
        await stream.read()
        await abort(stream, 2)
        await stream.read_until_over(2)
        usage = stream.completed[2].usage
        assert usage.queue_ms > 0
        assert (usage.generated_tokens, usage.prefill_ms, usage.decode_ms) == (0, 0, 0)
        stream.close()


async def test_a_sequence_that_is_not_the_last_is_not_answered(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(make_submit(1, max_tokens=60, n=2))
    await stream.read()
    await abort(stream, 1, 1)
    await stream.read_until_over(1)
    assert stream.ends[1].num_tokens == 60
    stream.close()


async def test_what_is_not_known_is_answered_without_usage(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
    await abort(stream, 7)
    await stream.read_until_over(7)
    assert not stream.completed[7].HasField("usage")
    await abort(stream, 8, 0)
    await stream.submit(make_submit(1))
    await stream.read_until_over(1)
    assert 8 not in stream.completed
    stream.close()
