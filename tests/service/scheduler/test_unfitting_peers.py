"""A scheduler between workers and gateways of other releases, with other models, or with a worker that comes back with
another pool: gateways are notified, and requests move over."""

import logging
from types import SimpleNamespace

import grpc.aio
import pytest
from google.rpc import code_pb2

from quire.messages.arrays import encode_int32
from quire.rpc.errors import NotFound, QuireError, from_rpc_error
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.service.compatibility import SCHEDULER_PROTOCOL, WORKER_PROTOCOL, ModelFingerprint, ProtocolVersions
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.scheduler_process import (
    GatewayStream,
    attached_scheduler,
    expected_tokens,
    make_submit,
    resubmit,
    running_scheduler,
    state_of,
    until_state,
    wait_attached,
    wait_nothing_in_use,
)
from worker_svc.protocol import step_messages as convert

NEWER = ProtocolVersions(8, 9)
OF_WORKER = ModelFingerprint(config="c1", tokenizer="t1", weights="w1")
FITTING = ModelFingerprint(config="c1", tokenizer="t1")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The scheduler's log."""
    monkeypatch.setattr(logging.getLogger("scheduler_svc"), "handlers", [caplog.handler])
    return caplog


def make_hello(
    gateway_id: str, protocol: ProtocolVersions = SCHEDULER_PROTOCOL, model: ModelFingerprint = FITTING
) -> scheduler_pb2.Hello:
    return scheduler_pb2.Hello(gateway_id=gateway_id, protocol=protocol.message(), model=model.message())


async def answer_to(
    stub: scheduler_pb2_grpc.SchedulerServiceStub, hello: scheduler_pb2.Hello
) -> scheduler_pb2.Welcome | QuireError:
    call = stub.Connect([scheduler_pb2.ConnectRequest(hello=hello)])
    try:
        async for message in call:
            return message.welcome
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    finally:
        call.cancel()
    raise AssertionError("the stream ended without an answer")


@pytest.mark.parametrize(
    ("who_refuses", "versions"),
    [
        ("the scheduler", f"the worker speaks versions 8 to 9 of quire.worker.v1, the scheduler {WORKER_PROTOCOL}: "),
        ("the worker", f"the scheduler speaks {WORKER_PROTOCOL} of quire.worker.v1, the worker versions 8 to 9: "),
    ],
    ids=["scheduler", "worker"],
)
async def test_a_worker_that_speaks_other_versions_is_not_attached_before_it_speaks_one_in_common(
    worker: FakeWorker, tmp_path, monkeypatch, log: pytest.LogCaptureFixture, who_refuses: str, versions: str
) -> None:
    """Also if the worker's release does not check the scheduler's protocol."""

    def speak(versions: ProtocolVersions) -> None:
        monkeypatch.setattr(convert, "compatibility", SimpleNamespace(WORKER_PROTOCOL=versions))

    if who_refuses == "the scheduler":
        monkeypatch.setattr(convert, "check_protocol", lambda *_, **__: None)
    speak(NEWER)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        first_epoch = (await state_of(stub)).scheduler_epoch
        await until_state(stub, lambda state: state.scheduler_epoch > first_epoch + 3)
        assert not (await state_of(stub)).workers[0].attached
        refusal = await answer_to(stub, make_hello("gateway-a"))
        assert isinstance(refusal, QuireError)
        assert refusal.reason == "NO_WORKER"
        speak(ProtocolVersions(1, 9))
        await wait_attached(stub)
        line = f"{versions}they have none in common; upgrade the scheduler"
        assert len([each for each in log.messages if line in each]) == 1


async def test_gateways_that_do_not_fit_are_refused_and_logged_once_each(
    worker: FakeWorker, tmp_path, log: pytest.LogCaptureFixture
) -> None:
    """tests/unit/quire/service/test_compatibility.py has the words, tests/contract the reasons."""
    worker.config = FakeWorkerConfig(fingerprint=OF_WORKER)
    async with attached_scheduler(tmp_path, worker.address) as stub:
        # They come again and again, in turn.
        for name in ("a", "b", "a", "b"):
            refusal = await answer_to(stub, make_hello(name, model=ModelFingerprint("c2", "t1")))
            assert isinstance(refusal, QuireError)
            assert f"the worker of the scheduler and gateway {name} have different models: config" in refusal.message
        refused = [each for each in log.messages if "refused" in each]
        assert [each.split(" have ")[0].rpartition(" ")[2] for each in refused] == ["a", "b"]
        assert isinstance(await answer_to(stub, make_hello("other")), scheduler_pb2.Welcome)


async def test_requests_fail_where_the_worker_comes_back_with_another_model_and_the_scheduler_goes_on(
    worker: FakeWorker, tmp_path, log: pytest.LogCaptureFixture
) -> None:
    worker.config = FakeWorkerConfig(fingerprint=OF_WORKER, step_seconds=0.005)
    async with attached_scheduler(tmp_path, worker.address) as stub:
        assert isinstance(await answer_to(stub, make_hello("gateway-a")), scheduler_pb2.Welcome)
        pin = scheduler_pb2.PinPrefixRequest(token_ids=encode_int32(range(32)), time_to_live_ms=60_000)
        await stub.PinPrefix(pin)
        stream, _ = await GatewayStream.open(stub, "gateway-b", grace_period_ms=60_000, credit=10_000)
        await stream.submit(make_submit(4, durable=True))
        await stream.read_until_over(4)
        await stream.submit(make_submit(1, max_tokens=500))
        await stream.submit(make_submit(2, max_tokens=500, durable=True))
        while not stream.outputs[2]:
            await stream.read()
        changed = ModelFingerprint(config="c1", weights="w2", tokenizer="t2")
        await worker.restart(FakeWorkerConfig(fingerprint=changed))
        await stream.read_to_end()
        line = "the worker came back with another model (before and now: tokenizer t1 and t2, weights w1 and w2)"
        for handle in (1, 2):
            failure = stream.failed[handle]
            assert (failure.code, failure.reason) == (code_pb2.UNAVAILABLE, "MODEL_CHANGED")
            assert failure.message == f"{line}; this request began with the one before and cannot go on: send it again"
        assert [each for each in log.messages if line in each] == [f"{line}; 2 live requests fail"]
        assert (await state_of(stub)).gpu_pool.pinned_blocks == 0
        # The tokenizer of the new model cannot read requests that are over.
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await stub.FindDurable(scheduler_pb2.FindDurableRequest(request_id="request-4"))
        assert isinstance(from_rpc_error(lost.value), NotFound)
        # A gateway with the earlier tokenizer is refused, one that fits is served.
        refusal = await answer_to(stub, make_hello("gateway-a"))
        assert isinstance(refusal, QuireError)
        assert "have different models: tokenizer t2 and t1; give" in refusal.message
        again, welcome = await GatewayStream.open(stub, "gateway-b", grace_period_ms=60_000)
        assert ModelFingerprint.of(welcome.model) == changed
        # Events of the earlier stream that it did not acknowledge are sent again.
        await again.submit(resubmit(stream, 1, max_tokens=500))
        await again.submit(make_submit(3))
        await again.read_until_over(1, 3)
        assert again.failed[1].reason == "MODEL_CHANGED"
        assert again.outputs[3] == expected_tokens(3)
        again.close()
        await wait_nothing_in_use(stub)


async def test_requests_go_on_where_the_worker_comes_back_with_other_groups_of_layers(
    worker: FakeWorker, tmp_path, log: pytest.LogCaptureFixture
) -> None:
    """A pool that no scheduler can use is refused until the worker comes back with another one."""
    worker.config = FakeWorkerConfig(fingerprint=OF_WORKER, step_seconds=0.005)
    async with attached_scheduler(tmp_path, worker.address) as stub:
        stream, welcome = await GatewayStream.open(stub, "gateway-a", grace_period_ms=60_000, credit=10_000)
        assert (welcome.full_groups, welcome.windowed_groups) == (1, 0)
        await stream.submit(make_submit(1, max_tokens=100))
        while not stream.outputs[1]:
            await stream.read()
        epoch = (await state_of(stub)).scheduler_epoch
        await worker.restart(FakeWorkerConfig(fingerprint=OF_WORKER, windowed_groups=1, window=1))
        await until_state(stub, lambda state: state.scheduler_epoch > epoch + 3)
        await worker.restart(FakeWorkerConfig(fingerprint=OF_WORKER, windowed_groups=2, window=20))
        await stream.read_to_end()
        assert [each for each in log.messages if "another geometry" in each and "windowed_groups=2" in each]
        (refused,) = [each for each in log.messages if "no scheduler can use" in each]
        assert "window is 1, must be at least 2" in refused
        again, welcome = await GatewayStream.open(stub, "gateway-a", grace_period_ms=60_000, credit=10_000)
        assert (welcome.full_groups, welcome.windowed_groups) == (1, 2)
        await again.submit(resubmit(stream, 1, max_tokens=100))
        await again.read_until_over(1)
        assert again.outputs[1] == expected_tokens(1, max_tokens=100)
        again.close()
        await wait_nothing_in_use(stub)


async def test_a_worker_that_measures_steps_anew_has_no_other_pool(
    worker: FakeWorker, tmp_path, log: pytest.LogCaptureFixture
) -> None:
    worker.config = FakeWorkerConfig(fingerprint=OF_WORKER, step_seconds=0.005, max_drafts=7, fixed_tokens=16)
    async with attached_scheduler(tmp_path, worker.address) as stub:
        stream, _ = await GatewayStream.open(stub, "gateway-a", grace_period_ms=60_000, credit=10_000)
        await stream.submit(make_submit(1, max_tokens=100))
        while not stream.outputs[1]:
            await stream.read()
        await worker.restart(FakeWorkerConfig(fingerprint=OF_WORKER, max_drafts=7, fixed_tokens=17))
        await stream.read_until_over(1)
        assert stream.outputs[1] == expected_tokens(1, max_tokens=100)
        assert not [each for each in log.messages if "another geometry" in each]
