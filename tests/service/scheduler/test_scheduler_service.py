"""One real scheduler service over loopback gRPC, between a fake worker and a gateway's end of the stream."""

import json
from collections import defaultdict
from concurrent.futures import Future
from typing import Any

import pytest
from google.rpc import code_pb2

from quire.arrays import encode_int32
from quire.common.v1 import common_pb2
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.scheduler_process import (
    GatewayStream,
    attached_scheduler,
    expected_tokens,
    make_submit,
    running_scheduler,
    state_of,
    until,
    wait_attached,
    wait_nothing_in_use,
)


async def test_events_of_one_step_come_as_one_message(stream, worker):
    for handle in range(1, 33):
        await stream.submit(make_submit(handle, max_tokens=20))
    await stream.read_until_over(*range(1, 33))
    assert stream.num_messages <= worker.num_steps


async def test_a_constraint_that_is_compiled_for_long_holds_up_no_other_request(stream, worker):
    compiled = Future[None]()
    worker.prepare = lambda row_sampling: compiled
    await stream.submit(make_submit(1, has_constraint=True))
    await stream.submit(make_submit(2, max_tokens=100))
    await stream.read_until_over(2)
    assert not stream.outputs.get(1)
    compiled.set_result(None)
    await stream.read_until_over(1)
    assert stream.outputs[1] == expected_tokens(1)
    assert stream.outputs[2] == expected_tokens(2, max_tokens=100)


async def test_abort_frees_blocks_and_nothing_follows(scheduler, stream, worker):
    await stream.submit(make_submit(1, max_tokens=1000))
    await stream.submit(make_submit(2, max_tokens=100))
    await stream.read()
    worker.hang.set()
    await stream.abort(1)

    async def second_is_left() -> bool:
        state = await state_of(scheduler, include_sequences=True)
        held = [sequence for sequence in state.sequences if sequence.request_id != "request-2"]
        return not held and state.gpu_pool.used_blocks == sum(len(each.block_table) for each in state.sequences)

    await until(second_is_left)
    worker.hang.clear()
    await stream.read_until_over(2)
    assert stream.outputs[2] == expected_tokens(2, max_tokens=100)
    assert 1 not in stream.completed
    assert len(stream.outputs[1]) < 100


@pytest.mark.parametrize(
    ("submit", "code", "words"),
    [
        (make_submit(1, prompt_len=1020, max_tokens=5), code_pb2.INVALID_ARGUMENT, "1025"),
        (make_submit(1, prompt_len=0), code_pb2.INVALID_ARGUMENT, "prompt"),
        (make_submit(1, prompt_token_ids=encode_int32([1, 1000])), code_pb2.INVALID_ARGUMENT, "1000"),
        (make_submit(1, max_tokens=0), code_pb2.INVALID_ARGUMENT, "max_tokens"),
        # A list of that many would take 32 GB.
        (make_submit(1, n=2**32 - 1, emitted=[1]), code_pb2.INVALID_ARGUMENT, "4294967295 sequences; at most 256 run"),
    ],
)
async def test_a_bad_submission_is_refused_alone(stream, submit, code, words):
    await stream.submit(submit)
    await stream.submit(make_submit(2))
    await stream.read_until_over(1, 2)
    assert stream.failed[1].code == code
    assert words in stream.failed[1].message
    assert stream.outputs[2] == expected_tokens(2)


async def test_the_greatest_handle_serves_and_one_more_is_refused_alone(stream):
    await stream.submit(make_submit(2**31))
    await stream.say(resume=scheduler_pb2.Resume(handle=2**32 - 1, request_id="x"))
    await stream.submit(make_submit(2**31 - 1))
    await stream.read_until_over(2**31, 2**31 - 1, 2**32 - 1)
    for handle in (2**31, 2**32 - 1):
        assert stream.failed[handle].code == code_pb2.INVALID_ARGUMENT
        assert stream.failed[handle].message == f"handle is {handle}; it must be at most 2147483647"
    assert stream.outputs[2**31 - 1] == expected_tokens(2**31 - 1)


async def test_a_handle_in_use_is_refused_with_already_exists(scheduler, stream, worker):
    await stream.submit(make_submit(1, max_tokens=900))
    await stream.submit(make_submit(1))
    await stream.read_until_over(1)
    assert stream.failed[1].code == code_pb2.ALREADY_EXISTS
    worker.hang.set()
    await stream.abort(1)
    await wait_nothing_in_use(scheduler)


async def test_a_full_queue_is_resource_exhausted_with_a_time_to_come_back(worker, tmp_path):
    worker.config = FakeWorkerConfig(step_seconds=0.01, max_num_rows=1)
    async with attached_scheduler(tmp_path, worker.address, max_waiting_requests=2) as stub:
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, max_tokens=20))
        await stream.read()
        # No place in the queue comes free by itself.
        worker.hang.set()
        for handle in (2, 3, 4):
            await stream.submit(make_submit(handle))
        await stream.read_until_over(4)
        worker.hang.clear()
        await stream.read_until_over(1, 2, 3)
        assert list(stream.failed) == [4]
        assert stream.failed[4].code == code_pb2.RESOURCE_EXHAUSTED
        assert stream.failed[4].reason == "QUEUE_FULL"
        assert 50 <= stream.failed[4].retry_after_ms <= 30_000
        stream.close()


async def test_get_state_shows_block_tables(worker, tmp_path):
    worker.config = FakeWorkerConfig(step_seconds=0.02, block_size=4)
    async with attached_scheduler(tmp_path, worker.address) as stub:
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, prompt_len=7, max_tokens=50))
        await stream.read()
        (sequence,) = (await state_of(stub, include_sequences=True)).sequences
        assert sequence.request_id == "request-1"
        assert sequence.status == scheduler_pb2.SEQUENCE_STATUS_RUNNING
        assert sum(block.filled for block in sequence.block_table) == sequence.num_computed_tokens
        assert all(block.ref_count == 1 for block in sequence.block_table)
        stream.close()


async def test_a_cached_prefix_is_reported_and_survives_a_restart_of_the_scheduler(worker, tmp_path):
    long: dict[str, Any] = {"prompt_len": 100, "max_tokens": 4}
    async with running_scheduler(str(tmp_path / "a.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, **long))
        await stream.read_until_over(1)
        assert stream.completed[1].usage.cached_tokens == 0
        again = make_submit(1, **long)
        again.handle = 2
        await stream.submit(again)
        await stream.read_until_over(2)
        assert stream.completed[2].usage.cached_tokens == 96
        assert stream.outputs[2] == stream.outputs[1]
        await wait_nothing_in_use(stub)
        assert (await state_of(stub)).gpu_pool.cached_blocks == 6
        stream.close()
    async with running_scheduler(str(tmp_path / "b.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, **long))
        await stream.read_until_over(1)
        assert stream.completed[1].usage.cached_tokens > 0
        assert stream.outputs[1] == expected_tokens(1, **long)
        stream.close()


ASKED = common_pb2.OutputOptions(prompt_logprobs=1)


@pytest.fixture
async def small_scheduler(worker: FakeWorker, tmp_path):
    worker.config = FakeWorkerConfig(num_blocks=10, max_num_batched_tokens=16, max_num_rows=8)
    async with attached_scheduler(tmp_path, worker.address, watermark=0.0) as stub:
        yield stub


async def run(stub, *submits) -> GatewayStream:
    """Its end checks that no position is lost or comes twice."""
    stream, _ = await GatewayStream.open(stub)
    for submit in submits:
        await stream.submit(submit)
    await stream.read_until_over(*(submit.handle for submit in submits))
    assert not stream.failed
    stream.close()
    return stream


def expected_positions(handle: int, prompt_len: int) -> list[tuple[int, float, int, int]]:
    return [((handle + position) % 100, -position, position, 1) for position in range(1, prompt_len)]


async def test_each_position_is_reported_once_over_chunks_and_only_where_asked(small_scheduler):
    stream = await run(
        small_scheduler,
        make_submit(1, prompt_len=50, max_tokens=5, output=ASKED),
        make_submit(2, prompt_len=20, max_tokens=5),
        make_submit(3, prompt_len=1, max_tokens=5, output=ASKED),
    )
    assert stream.prompt_logprobs == {1: expected_positions(1, 50), 2: [], 3: []}


async def test_the_same_prompt_again_is_not_taken_from_the_cache(small_scheduler):
    await run(small_scheduler, make_submit(1, prompt_len=50, max_tokens=5))
    stream = await run(small_scheduler, make_submit(1, prompt_len=50, max_tokens=5, output=ASKED))
    assert stream.prompt_logprobs[1] == expected_positions(1, 50)


async def test_preemption_neither_loses_nor_repeats_what_was_delivered(small_scheduler):
    handles = range(1, 6)
    stream = await run(
        small_scheduler, *(make_submit(handle, prompt_len=30, max_tokens=60, output=ASKED) for handle in handles)
    )
    assert (await state_of(small_scheduler)).preemptions > 0
    assert stream.prompt_logprobs == {handle: expected_positions(handle, 30) for handle in handles}


async def test_every_step_has_all_its_parts_in_order(worker, tmp_path):
    """In the file of `--trace-steps`, which a tracing page opens."""
    path = tmp_path / "steps.json"
    async with attached_scheduler(tmp_path, worker.address, trace_steps=str(path)) as scheduler:
        stream, _ = await GatewayStream.open(scheduler)
        for handle in range(4):
            await stream.submit(make_submit(handle, max_tokens=6))
        await stream.read_until_over(*range(4))
        stream.close()
    steps: dict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
    planned: dict[int, dict[str, int]] = {}
    replica: dict[str, int] = {}
    for event in json.loads(path.read_text()):
        if event["ph"] == "X":
            steps[event["args"]["step"]][event["name"]] = (event["ts"], event["ts"] + event["dur"])
        if event["name"] == "plan":
            planned[event["args"]["step"]] = event["args"]
        if event["name"] == "replica":
            replica = event["args"]
    assert len(steps) >= 6
    assert sum(work["num_samples"] for work in planned.values()) == 4 * 6
    assert all(work["context_tokens"] >= work["num_tokens"] > 0 for work in planned.values())
    assert replica.keys() >= {"num_blocks", "block_size", "max_num_seqs", "max_model_len", "vocab_size"}
    for step in steps.values():
        assert step.keys() >= {"plan", "send", "queue", "cache operations", "model", "sample", "apply"}
        # The file has tenths of microseconds.
        assert step["plan"][1] - 0.2 <= step["send"][0] <= step["apply"][0]
    assert sum("emit" in step for step in steps.values()) >= 6
