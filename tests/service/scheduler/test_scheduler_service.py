"""One real scheduler service over loopback gRPC, between a fake worker and a gateway's end of the stream."""

import json
from collections import defaultdict
from typing import Any

from google.rpc import code_pb2

from quire.common.v1 import common_pb2
from quire.messages.arrays import encode_int32
from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.service import scheduler_servicer as servicer
from tests.support.fake_worker import FakeWorkerConfig
from tests.support.sampling import make_row_sampling
from tests.support.scheduler_process import (
    GatewayStream,
    attached_scheduler,
    expected_tokens,
    make_submit,
    state_of,
    until_state,
    wait_nothing_in_use,
)


def hostile(shape: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    """Sampling parameters that no gateway would send."""
    return {"prompt_len": 40, "sampling": shape or {}, "row_sampling": make_row_sampling(**sampling)}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt_len": 1020, "max_tokens": 5}, "1025"),
    ({"prompt_len": 0}, "prompt"),
    ({"prompt_token_ids": encode_int32([1, 1000])}, "1000"),
    ({"max_tokens": 0}, "max_tokens"),
    # A list of this length would take 32 GB.
    ({"n": 2**32 - 1, "emitted": [1]}, "4294967295 sequences; at most 256 run"),
    (hostile(temperature=-1.0), "sampling.temperature is -1; it must be at least 0"),
    (hostile({"n": 3}, temperature=-1.0), "sampling.temperature is -1; it must be at least 0"),
    (hostile({"best_of": 3, "beam_search": {"beam_width": 3}}, top_p=7.0), "sampling.top_p is 7; "),
    (hostile(logit_bias={2**32 - 1: 1.0}), "sampling.logit_bias holds token 4294967295; "),
    (hostile(bad_token_sequences=[[]]), "bad_token_sequences[0] is empty; "),
    ({"row_sampling": b"\xff\xff"}, "row_sampling is not a RowSampling message: "),
    ({"output": common_pb2.OutputOptions(logprobs=21)}, "output.logprobs is 21; "),
]


async def test_bad_submissions_are_refused_alone(scheduler, stream):
    epoch = (await state_of(scheduler)).scheduler_epoch
    for handle in (1, 2):
        await stream.submit(make_submit(handle, max_tokens=40))
    await stream.read()
    for number, (fields, _) in enumerate(REFUSED):
        await stream.submit(make_submit(100 + number, **fields))
    greatest = 2**31 - 1
    await stream.submit(make_submit(greatest + 1))
    await stream.say(resume=scheduler_pb2.Resume(handle=2**32 - 1, request_id="x"))
    await stream.submit(make_submit(greatest))
    beyond = (greatest + 1, 2**32 - 1)
    await stream.read_until_over(1, 2, greatest, *range(100, 100 + len(REFUSED)), *beyond)
    for number, (_, words) in enumerate(REFUSED):
        failure = stream.failed[100 + number]
        assert failure.code == code_pb2.INVALID_ARGUMENT
        assert words in failure.message
        if words.endswith("; "):
            assert failure.reason == "INVALID_SAMPLING"
            assert failure.message.startswith(words)
    for handle in beyond:
        assert stream.failed[handle].code == code_pb2.INVALID_ARGUMENT
        assert stream.failed[handle].message == f"handle is {handle}; it must be at most {greatest}"
    assert stream.outputs[greatest] == expected_tokens(greatest)
    for handle in (1, 2):
        assert stream.outputs[handle] == expected_tokens(handle, max_tokens=40)
    # No step was refused, so the worker was not attached again.
    assert (await state_of(scheduler)).scheduler_epoch == epoch


async def test_a_submission_that_cannot_be_taken_or_whose_handle_is_in_use_fails_alone(
    scheduler, stream, worker, monkeypatch
):
    real = servicer.request_from_submit

    def request_from_submit(submit, **limits):
        if submit.handle == 1:
            raise ZeroDivisionError("nobody thought of this")
        return real(submit, **limits)

    monkeypatch.setattr(servicer, "request_from_submit", request_from_submit)
    await stream.submit(make_submit(1))
    await stream.submit(make_submit(2))
    await stream.submit(make_submit(3, max_tokens=900))
    await stream.submit(make_submit(3))
    await stream.read_until_over(1, 2, 3)
    assert (stream.failed[1].code, stream.failed[1].reason) == (code_pb2.INTERNAL, "UNEXPECTED")
    assert "nobody thought" not in stream.failed[1].message
    assert stream.outputs[2] == expected_tokens(2)
    assert stream.failed[3].code == code_pb2.ALREADY_EXISTS
    worker.hang.set()
    await stream.abort(3)
    await wait_nothing_in_use(scheduler)


async def test_a_gateway_that_asks_is_told_what_all_gateways_were_served(scheduler, stream, worker):
    assert not (await state_of(scheduler)).HasField("served")
    assert not (await state_of(scheduler, gateway_id="g")).served.HasField("first_token_ms_p50")
    await stream.submit(make_submit(1, max_tokens=5))
    await stream.read_until_over(1)
    served = (await state_of(scheduler, gateway_id="g")).served
    assert (served.generated_tokens, served.running_sequences) == (5, 0)
    assert 0 < served.first_token_ms_p50 == served.first_token_ms_p95
    # New watchers get the same numbers.
    watching = scheduler.Watch(scheduler_pb2.WatchRequest())
    numbers = (await watching.read()).numbers
    watching.cancel()
    assert (numbers.first_token_ms_p50, numbers.first_token_ms_p95) == (
        served.first_token_ms_p50,
        served.first_token_ms_p95,
    )
    worker.hang.set()
    await stream.submit(make_submit(2, n=3))
    await until_state(scheduler, lambda state: state.running_requests == 1)
    assert (await state_of(scheduler, gateway_id="g")).served.running_sequences == 3


async def test_block_tables_are_shown_with_who_shares_each_block(worker, tmp_path):
    worker.config = FakeWorkerConfig(num_blocks=9, block_size=4)
    async with attached_scheduler(tmp_path, worker.address, max_steps_in_flight=1) as stub:
        worker.hang.set()
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, prompt_len=7, max_tokens=5, n=2))
        await until_state(stub, lambda state: state.last_step_id >= 1)
        (sequence, _) = (await state_of(stub, include_sequences=True)).sequences
        assert (sequence.request_id, sequence.status) == ("request-1", scheduler_pb2.SEQUENCE_STATUS_RUNNING)
        assert sum(block.filled for block in sequence.block_table) == sequence.num_computed_tokens
        answer = await stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest(request_id="request-1"))
        # Tokens that a step in flight computes count as filled.
        assert [
            [(block.block_id, block.filled, block.ref_count) for block in each.block_table] for each in answer.sequences
        ] == [[(0, 4, 2), (1, 3, 2)]] * 2
        assert not (await stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest(request_id="request-2"))).sequences
        block = await stub.ReadBlock(scheduler_pb2.ReadBlockRequest(block_id=0))
        assert (block.ref_count, [each.sequence_index for each in block.owners]) == (2, [0, 1])
        worker.hang.clear()
        await stream.read_until_over(1)
        stream.close()


async def test_every_step_has_all_its_parts_in_order(worker, tmp_path):
    """The parts in the file of `--trace-steps`, which a tracing page opens."""
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
