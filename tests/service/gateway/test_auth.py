"""Keys, limits and tenants: one suite for both fronts."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
import pytest_asyncio

from gateway.auth.caller import Access
from gateway.auth.quota import Limits
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fronts import Fronts, fronts_of
from tests.support.gateway_process import running_gateway
from tests.support.keys import KeysFile
from tests.support.metrics import read_metrics
from tests.support.scheduler_process import until

MODEL = "quire-tiny"
# More tokens than the model takes; that is known once they are counted.
TOO_LONG = "a " * 1500
FULL = scheduler_pb2.RequestFailure(
    code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="the queue is full", reason="QUEUE_FULL"
)


@pytest.fixture(params=["grpc", "http"])
def kind(request):
    return request.param


@pytest.fixture
def keys(tmp_path):
    return KeysFile(tmp_path / "keys.json")


@pytest_asyncio.fixture(loop_scope="session")
async def fronts(scheduler, keys, kind):
    settings = {"keys_files": (keys.path,), "open_metrics": True}
    async with running_gateway(scheduler, **settings) as gateway, fronts_of(gateway, kind) as both:
        yield both


def holder(fronts: Fronts, keys: KeysFile, tenant="acme", **options):
    """A front of a new key, which the gateway knows."""
    key = keys.add(tenant, **options)
    fronts.gateway.authenticator.refresh()
    return fronts.of_key(key)


def assert_refused(answer, front, status, reason):
    assert (answer.reason, answer.status) == (reason, front.refusals[status])


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ((), "MISSING_API_KEY"),
        (("Bearer quire-wrong",), "INVALID_API_KEY"),
        (("Basic dXNlcjpwYXNz",), "INVALID_API_KEY"),
        (("Bearer a", "Bearer b"), "INVALID_API_KEY"),
    ],
)
async def test_without_a_valid_key_nothing_is_done(fronts, scheduler, shown, reason):
    front = fronts.showing(*shown)
    assert_refused(await front.generate(), front, "UNAUTHENTICATED", reason)
    assert_refused(await front.tokenize("x"), front, "UNAUTHENTICATED", reason)
    assert not scheduler.submits


async def test_a_valid_key_generates_as_its_tenant(fronts, keys, scheduler):
    acme, other = holder(fronts, keys, "acme"), holder(fronts, keys, "other")
    assert (await acme.generate()).text
    assert (await other.generate()).text
    assert [submit.tenant for submit in scheduler.submits] == ["acme", "other"]


async def test_an_expired_key_is_refused(fronts, keys):
    front = holder(fronts, keys, expires_at=datetime.now(UTC) - timedelta(seconds=1))
    assert_refused(await front.generate(), front, "UNAUTHENTICATED", "EXPIRED_API_KEY")


async def test_a_revoked_key_ends_nothing_that_runs_and_starts_nothing_new(fronts, keys, scheduler):
    key = keys.add("acme")
    fronts.gateway.authenticator.refresh()
    scheduler.emits.clear()
    front = fronts.of_key(key)
    running = asyncio.create_task(front.generate())
    await scheduler.until(lambda: scheduler.live)
    keys.revoke(key)
    fronts.gateway.authenticator.refresh()
    assert_refused(await front.generate(), front, "UNAUTHENTICATED", "INVALID_API_KEY")
    scheduler.emits.set()
    assert (await running).text


async def test_requests_beyond_the_rate_are_told_when_to_come_back(fronts, keys, scheduler):
    began = time.monotonic()
    front = holder(fronts, keys, limits=Limits(requests_per_minute=2))
    assert (await front.generate()).text
    assert (await front.generate()).text
    refused = await front.generate()
    assert_refused(refused, front, "RATE", "RATE_LIMIT_EXCEEDED")
    assert refused.retry_after_s is not None
    assert 30 - (time.monotonic() - began) <= refused.retry_after_s <= 30
    assert_refused(await front.tokenize("x"), front, "RATE", "RATE_LIMIT_EXCEEDED")
    assert len(scheduler.submits) == 2


async def test_limits_of_one_key_do_not_limit_another_of_the_same_tenant(fronts, keys):
    first = holder(fronts, keys, limits=Limits(requests_per_minute=1))
    second = holder(fronts, keys)
    assert (await first.generate()).text
    assert (await first.generate()).reason == "RATE_LIMIT_EXCEEDED"
    assert (await second.generate()).text


async def test_prompt_and_output_are_charged(fronts, keys):
    began = time.monotonic()
    front = holder(fronts, keys, limits=Limits(tokens_per_minute=30))
    assert (await front.generate("hello", max_tokens=40)).text
    refused = await front.generate("hello")
    assert_refused(refused, front, "RATE", "RATE_LIMIT_EXCEEDED")
    # 40 and the prompt were used of 30, and tokens come back one every two seconds.
    assert refused.retry_after_s >= 20 - (time.monotonic() - began)


async def test_output_is_charged_while_it_is_generated(fronts, keys, scheduler):
    front = holder(fronts, keys, limits=Limits(tokens_per_minute=30))
    scheduler.tokens_per_step, scheduler.step_delay_s = 50, 60
    running = asyncio.create_task(front.generate(max_tokens=900))

    async def is_refused():
        return (await front.tokenize("x")).reason == "RATE_LIMIT_EXCEEDED"

    await until(is_refused)
    assert not running.done()
    running.cancel()


async def test_a_prompt_larger_than_a_minutes_tokens_is_refused_for_good(fronts, keys, scheduler):
    front = holder(fronts, keys, limits=Limits(tokens_per_minute=5))
    refused = await front.generate("one two three four five six seven eight nine ten")
    assert_refused(refused, front, "RATE", "RATE_LIMIT_EXCEEDED")
    assert refused.retry_after_s is None
    assert not scheduler.submits


async def test_a_refused_request_costs_nothing(fronts, keys, scheduler):
    front = holder(fronts, keys, limits=Limits(requests_per_minute=2, tokens_per_minute=100))
    for _ in range(3):
        assert (await front.generate(temperature=-1.0)).reason == "INVALID_ARGUMENT"
        full = scheduler_pb2.RequestFailure(
            code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="the queue is full", reason="QUEUE_FULL"
        )
        scheduler.refusal.append(full)
        assert (await front.generate("word " * 20)).reason == "QUEUE_FULL"
    assert (await front.generate("word " * 20)).text


async def test_a_batch_that_is_refused_for_one_of_its_prompts_costs_nothing(scheduler, keys):
    """Over HTTP alone: over gRPC a call has one prompt."""
    async with running_gateway(scheduler, keys_files=(keys.path,)) as gateway, fronts_of(gateway, "http") as fronts:
        front = holder(fronts, keys, limits=Limits(requests_per_minute=4))
        assert (await front.generate()).text
        scheduler.emits.clear()
        refused = await front.generate(["hello"] * 4)
        assert refused.reason == "RATE_LIMIT_EXCEEDED"
        assert refused.retry_after_s
        scheduler.emits.set()
        assert (await front.generate(["hello"] * 3)).text
        assert (await front.generate()).reason == "RATE_LIMIT_EXCEEDED"


async def test_no_prompt_of_a_call_is_submitted_before_all_are_valid(scheduler, keys):
    async with running_gateway(scheduler, keys_files=(keys.path,)) as gateway, fronts_of(gateway, "http") as fronts:
        front = holder(fronts, keys, limits=Limits(tokens_per_minute=100))
        for _ in range(5):
            assert (await front.generate(["word " * 20, TOO_LONG])).reason == "CONTEXT_LENGTH_EXCEEDED"
        assert not scheduler.submits
        assert (await front.generate("word " * 20)).text


async def test_a_prompt_that_may_have_been_computed_is_charged_if_another_one_of_its_call_is_refused(scheduler, keys):
    async with running_gateway(scheduler, keys_files=(keys.path,)) as gateway, fronts_of(gateway, "http") as fronts:
        front = holder(fronts, keys, limits=Limits(tokens_per_minute=100))
        scheduler.emits.clear()
        scheduler.refusal += [None, FULL]
        assert (await front.generate(["word " * 60, "word " * 20])).reason == "QUEUE_FULL"
        scheduler.emits.set()
        assert (await front.generate("word " * 60)).reason == "RATE_LIMIT_EXCEEDED"
        assert (await front.generate("word " * 20)).text


async def test_a_prompt_after_which_nothing_can_be_sampled_is_charged(fronts, keys, scheduler):
    """Workers find that once they have computed the prompt."""
    front = holder(fronts, keys, limits=Limits(tokens_per_minute=100))
    invalid = scheduler_pb2.RequestFailure(
        code=grpc.StatusCode.INVALID_ARGUMENT.value[0], message="no token may follow", reason="INVALID_SAMPLING"
    )
    scheduler.refusal.append(invalid)
    assert (await front.generate("word " * 60)).reason == "INVALID_SAMPLING"
    assert (await front.generate("word " * 60)).reason == "RATE_LIMIT_EXCEEDED"


async def test_a_request_is_counted_before_it_is_tokenized(fronts, keys):
    front = holder(fronts, keys, limits=Limits(requests_per_minute=2))
    for _ in range(2):
        assert (await front.generate(TOO_LONG)).reason == "CONTEXT_LENGTH_EXCEEDED"
    assert (await front.generate(TOO_LONG)).reason == "RATE_LIMIT_EXCEEDED"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(max_concurrent_requests=2), "CONCURRENCY_LIMIT"),
        (Limits(requests_per_minute=2), "RATE_LIMIT_EXCEEDED"),
    ],
)
async def test_a_batch_that_can_never_be_admitted_is_not_told_to_come_back(scheduler, keys, limits, reason):
    async with running_gateway(scheduler, keys_files=(keys.path,)) as gateway, fronts_of(gateway, "http") as fronts:
        front = holder(fronts, keys, limits=limits)
        refused = await front.generate(["hello"] * 3)
        assert (refused.reason, refused.retry_after_s) == (reason, None)
        assert not scheduler.submits
        assert (await front.generate(["hello"] * 2)).text


async def test_requests_at_once_are_limited(fronts, keys, scheduler):
    front = holder(fronts, keys, limits=Limits(max_concurrent_requests=1))
    scheduler.emits.clear()
    running = asyncio.create_task(front.generate())
    await scheduler.until(lambda: scheduler.live)
    refused = await front.generate()
    assert_refused(refused, front, "RATE", "CONCURRENCY_LIMIT")
    assert refused.retry_after_s
    scheduler.emits.set()
    assert (await running).text
    assert (await front.generate()).text


async def test_requests_run_at_the_keys_priority_and_may_lower_it_but_not_exceed_its_highest(
    fronts, keys, scheduler, kind
):
    front = holder(fronts, keys, access=Access(priority=2, max_priority=5))
    asked: dict[str, Any]
    for asked in ({}, {"priority": 5}, {"priority": -7}):
        assert (await front.generate(**asked)).text
    assert [submit.priority for submit in scheduler.submits] == [2, 5, -7]
    refused = await front.generate(priority=6)
    assert_refused(refused, front, "DENIED", "PRIORITY_NOT_ALLOWED")
    # Lower runs earlier in vLLM's API.
    as_sent = {"grpc": "is 6; this API key allows at most 5", "http": "is -6; this API key allows at least -5"}
    assert refused.message == f"priority {as_sent[kind]}"
    assert len(scheduler.submits) == 3


async def refusals_of(fronts: Fronts) -> dict[str, float]:
    """What the gateway has counted, by reason."""
    port = int(fronts.gateway.http_address.rpartition(":")[2])
    name = "quire_gateway_refused_callers_total"
    metrics = await read_metrics(port)
    return {key.split('"')[1]: value for key, value in metrics.items() if key.startswith(name)}


async def test_calls_that_a_valid_key_does_not_allow_are_counted_by_reason(fronts, keys, scheduler):
    front = holder(fronts, keys, access=Access(max_priority=0), limits=Limits(max_concurrent_requests=1))
    slow = holder(fronts, keys, limits=Limits(requests_per_minute=1))
    assert (await front.generate(priority=1)).reason == "PRIORITY_NOT_ALLOWED"
    scheduler.emits.clear()
    running = asyncio.create_task(front.generate())
    await scheduler.until(lambda: scheduler.live)
    assert (await front.generate()).reason == "CONCURRENCY_LIMIT"
    scheduler.emits.set()
    assert (await running).text
    full = scheduler_pb2.RequestFailure(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="the queue is full", reason="QUEUE_FULL"
    )
    scheduler.refusal.append(full)
    assert (await front.generate()).reason == "QUEUE_FULL"
    assert (await slow.generate()).text
    for _ in range(2):
        assert (await slow.generate()).reason == "RATE_LIMIT_EXCEEDED"
    assert await refusals_of(fronts) == {"PRIORITY_NOT_ALLOWED": 1, "CONCURRENCY_LIMIT": 1, "RATE_LIMIT_EXCEEDED": 2}


async def test_a_model_that_is_not_allowed_is_as_one_that_is_not_there(fronts, keys):
    allowed = holder(fronts, keys, access=Access(models=frozenset({MODEL})))
    other = holder(fronts, keys, access=Access(models=frozenset({"another"})))
    assert (await allowed.models(), await other.models()) == ([MODEL], [])
    assert (await allowed.generate(model=MODEL)).text
    served, unknown = await other.generate(model=MODEL), await other.generate(model="quire-huge")
    assert served.reason == unknown.reason == "MODEL_NOT_FOUND"
    assert served.status == unknown.status
    assert served.message == unknown.message.replace("quire-huge", MODEL)
    absent = await other.generate()
    assert absent.reason == "MODEL_NOT_FOUND"
    assert MODEL not in absent.message
    assert (await other.tokenize("x")).reason == "MODEL_NOT_FOUND"


async def test_tenants_may_use_one_request_id_at_the_same_time(fronts, keys, scheduler):
    acme, other = holder(fronts, keys, "acme"), holder(fronts, keys, "other")
    scheduler.emits.clear()
    running = [asyncio.create_task(front.generate(request_id="mine")) for front in (acme, other)]
    await scheduler.until(lambda: len(scheduler.live) == 2)
    assert (await acme.generate(request_id="mine")).reason == "REQUEST_ID_IN_USE"
    scheduler.emits.set()
    assert all([(await each).text for each in running])


async def test_ids_that_the_gateway_makes_are_long_and_random(fronts, keys, scheduler):
    front = holder(fronts, keys)
    for _ in range(3):
        await front.generate()
    ids = [submit.request_id.rpartition("-")[2] for submit in scheduler.submits]
    assert all(len(each) == 32 and int(each, 16) for each in ids)
    # Were they counted up or taken from the time, they would begin alike.
    assert len({each[:8] for each in ids}) == 3


async def test_candidates_that_are_not_returned_are_charged_too(fronts, keys):
    front = holder(fronts, keys, limits=Limits(tokens_per_minute=100))
    await front.generate("hello", max_tokens=20, n=1, best_of=4, temperature=1.0)
    # 80 tokens and the prompt are used, and one comes back in 0.6 seconds.
    assert (await front.generate("word " * 90)).reason == "RATE_LIMIT_EXCEEDED"


async def test_without_a_keys_file_everybody_is_the_default_tenant(scheduler, kind):
    async with running_gateway(scheduler) as gateway, fronts_of(gateway, kind) as fronts:
        assert (await fronts.showing().generate(priority=100)).text
        assert (await fronts.showing("Bearer whatever").generate()).text
    assert {submit.tenant for submit in scheduler.submits} == {"default"}
