"""Schedulers of other versions, or with another model, beside and before those that fit."""

import asyncio
import shutil
from pathlib import Path

import pytest
from google.rpc import code_pb2

from quire.compatibility import SCHEDULER_PROTOCOL, ModelFingerprint, ProtocolVersions
from quire.model_source import resolve_model
from quire.rpc.errors import Unavailable
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import collect, error_of, running_gateway, stream_request
from tests.support.rig import expected_ids
from tests.support.scheduler_process import until


async def test_a_scheduler_of_other_versions_or_another_model_is_not_used_and_ready_says_why(caplog):
    """Both are refused by what their welcome says, as of a scheduler that does not check what a gateway says."""
    async with (
        FakeScheduler(protocol=ProtocolVersions(8, 9), checks_hello=False) as newer,
        FakeScheduler(model=ModelFingerprint(tokenizer="0123456789abcdef"), checks_hello=False) as other,
        FakeScheduler(architecture="GPT2LMHeadModel") as third,
        running_gateway(newer, other, third, connect_timeout=0.5) as gateway,
    ):
        assert isinstance(await error_of(gateway.generation.GenerateStream(stream_request("hello"))), Unavailable)

        async def reason_of_all() -> str | None:
            said = (await gateway.http.get("/ready")).json()["reason"]
            parts = ("speaks versions", "different models", "GPT2LMHeadModel")
            return said if all(each in said for each in parts) else None

        reason = await until(reason_of_all)
        ours = f"this gateway {SCHEDULER_PROTOCOL}"
        assert f"the scheduler speaks versions 8 to 9 of quire.scheduler.v1, {ours}" in reason
        assert "have different models: tokenizer" in reason
        assert reason.count("give both the same one by --model") == 1
        # However often it tries, and it does, it says so once.
        connections = newer.connections
        await newer.until(lambda: newer.connections > connections + 2)
    lines = [record.getMessage() for record in caplog.records if "quire.scheduler.v1" in record.getMessage()]
    assert len(lines) == 1


OLD_MODEL, NEW_MODEL = ModelFingerprint(weights="w1"), ModelFingerprint(weights="w2")


@pytest.fixture
def without_weights(tmp_path: Path) -> str:
    """A model directory that fits schedulers whatever weights their workers have."""
    ignored = shutil.ignore_patterns("*.safetensors")
    return str(shutil.copytree(resolve_model(None), tmp_path / "model", ignore=ignored))


def fail_for_model(scheduler: FakeScheduler, **failure: int) -> None:
    """Says what a scheduler does whose worker came back with another model."""
    for handle in list(scheduler.live):
        scheduler.fail(handle, code=code_pb2.UNAVAILABLE, reason="MODEL_CHANGED", message="send it again", **failure)


async def test_a_change_of_model_that_the_stream_knows_already_keeps_nobody_from_its_scheduler(without_weights):
    """The end of a request that was resumed after it ended. The stream goes on, so nothing is to be waited for."""
    scheduler = FakeScheduler(model=NEW_MODEL)
    await scheduler.start()
    async with running_gateway(scheduler, model=without_weights) as gateway:
        await scheduler.until(lambda: scheduler.is_heard)
        scheduler.emits.clear()
        reading = asyncio.create_task(error_of(gateway.generation.GenerateStream(stream_request("hello"))))
        await scheduler.until(lambda: scheduler.live)
        fail_for_model(scheduler, scheduler_epoch=scheduler.epoch)
        assert (await reading).reason == "MODEL_CHANGED"
        scheduler.emits.set()
        async with asyncio.timeout(10):
            answer = await collect(gateway.generation.GenerateStream(stream_request("next")))
        assert answer.token_ids == expected_ids("next", 8)
    await scheduler.stop()


async def test_a_scheduler_that_comes_back_with_another_model_gets_requests_without_tokens_alone(without_weights):
    """Scheduler and worker were replaced together, so that this scheduler knows of no request."""
    async with (
        FakeScheduler(model=OLD_MODEL, tokens_per_step=1, step_delay_s=60) as scheduler,
        running_gateway(scheduler, model=without_weights) as gateway,
    ):
        await scheduler.until(lambda: scheduler.is_heard)
        begun = asyncio.create_task(error_of(gateway.generation.GenerateStream(stream_request("begun"))))
        await scheduler.until(lambda: any(each.num_emitted for each in scheduler.live.values()))
        scheduler.emits.clear()
        waiting = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request("waiting"))))
        await scheduler.until(lambda: len(scheduler.live) == 2)
        await scheduler.stop()
        scheduler.model, scheduler.step_delay_s = NEW_MODEL, 0.001
        scheduler.emits.set()
        await scheduler.start()
        error = await begun
        assert isinstance(error, Unavailable)
        assert error.reason == "MODEL_CHANGED"
        assert "(before and now: weights w1 and w2); it cannot go on: send it again" in error.message
        assert (await waiting).token_ids == expected_ids("waiting", 8)
        assert len(scheduler.submits) == 3


async def test_a_request_whose_worker_came_back_with_another_model_goes_on_where_its_model_is(without_weights):
    """Its scheduler says so after the gateway has learnt of the new model, as to one whose stream broke in between."""
    async with (
        FakeScheduler(model=OLD_MODEL) as first,
        FakeScheduler(model=OLD_MODEL) as second,
        running_gateway(first, second, model=without_weights) as gateway,
    ):
        for scheduler in (first, second):
            scheduler.emits.clear()
            await scheduler.until(lambda scheduler=scheduler: scheduler.is_heard)
        answer = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request("moved"))))

        async def chosen() -> FakeScheduler | None:
            return next((each for each in (first, second) if each.live), None)

        one = await until(chosen)
        other = second if one is first else first
        change = {"code": code_pb2.UNAVAILABLE, "reason": "MODEL_CHANGED", "scheduler_epoch": 1}
        one.fail(*one.live, message="the worker came back with another model", **change)
        other.emits.set()
        assert (await answer).token_ids == expected_ids("moved", 8)
        assert [len(each.submits) for each in (one, other)] == [1, 1]
