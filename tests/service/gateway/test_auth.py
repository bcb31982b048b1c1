"""Keys, limits and tenants over the public fronts. Unit tests of quotas test which requests a limit admits."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
import pytest_asyncio

from gateway.auth.caller import Access
from gateway.auth.keys import KeyRing
from gateway.auth.quota import Limits
from quire.gateway.v1 import generation_pb2, model_pb2
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_scheduler import FakeScheduler
from tests.support.fronts import FRONTS, Answer, Completions, GrpcGenerate, Messages, Responses
from tests.support.gateway_process import RunningGateway, error_of, running_gateway
from tests.support.keys import KeysFile

MODEL = "quire-tiny"
WORDS = "word " * 20


def failure(code: grpc.StatusCode, reason: str) -> scheduler_pb2.RequestFailure:
    return scheduler_pb2.RequestFailure(code=code.value[0], message="no", reason=reason)


FULL = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
IN_USE = failure(grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
# Workers find this fault only after they have computed the prompt.
INVALID = failure(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_SAMPLING")


@dataclass(frozen=True)
class Holder:
    """A caller with one key, over one front."""

    front: GrpcGenerate | Completions
    key: str

    async def ask(self, text="hello", **fields) -> Answer:
        """Sends a request, for 4 tokens by default."""
        fields: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True} | fields
        return await self.front.ask(text, authorizations=[f"Bearer {self.key}"], **fields)

    async def reason(self, text="hello", **fields) -> str | None:
        return (await self.ask(text, **fields)).reason


@dataclass(frozen=True)
class Rig:
    gateway: RunningGateway
    keys: KeysFile
    scheduler: FakeScheduler

    async def holder(self, kind, tenant="acme", **options) -> Holder:
        """A caller with a new key that the gateway knows."""
        key = self.keys.add(tenant, **options)
        ring = self.gateway.gateway.authenticator
        assert isinstance(ring, KeyRing)
        await ring.refresh()
        return Holder(kind(self.gateway), key)

    async def tokenize(self, key: str) -> None:
        request = generation_pb2.TokenizeRequest(text="x")
        await self.gateway.generation.Tokenize(request, metadata=(("authorization", f"Bearer {key}"),))


@pytest_asyncio.fixture(loop_scope="session")
async def rig(scheduler, tmp_path) -> AsyncIterator[Rig]:
    keys = KeysFile(tmp_path / "keys.json")
    async with running_gateway(scheduler, keys_files=(keys.path,), open_metrics=True) as gateway:
        yield Rig(gateway, keys, scheduler)


BOTH = pytest.mark.parametrize("kind", [GrpcGenerate, Completions], ids=["grpc", "http"])


@pytest.mark.parametrize("kind", FRONTS, ids=lambda front: front.name)
async def test_only_a_valid_key_opens_a_front_and_as_often_as_it_may(rig, kind):
    front = kind(rig.gateway)
    expired = rig.keys.add("acme", expires_at=datetime.now(UTC) - timedelta(seconds=1))
    first, second = (rig.keys.add("acme", limits=Limits(requests_per_minute=1)) for _ in range(2))
    await rig.gateway.gateway.authenticator.refresh()
    for shown, reason in (
        ([], "MISSING_API_KEY"),
        (["Bearer quire-wrong"], "INVALID_API_KEY"),
        (["Basic dXNlcjpwYXNz"], "INVALID_API_KEY"),
        (["Bearer a", "Bearer b"], "INVALID_API_KEY"),
        ([f"Bearer {expired}"], "EXPIRED_API_KEY"),
    ):
        refusal = await front.refused(authorizations=shown)
        assert refusal.status == "UNAUTHENTICATED"
        assert refusal.reason == (None if kind is Messages else reason)
    assert not rig.scheduler.submits
    began = time.monotonic()
    assert (await front.ask(authorizations=[f"Bearer {first}"])).text
    refusal = await front.refused(authorizations=[f"Bearer {first}"])
    assert refusal.status == "RESOURCE_EXHAUSTED"
    assert refusal.reason == (None if kind is Messages else "RATE_LIMIT_EXCEEDED")
    assert refusal.retry_after_s is not None
    assert 60 - (time.monotonic() - began) <= refusal.retry_after_s <= 60
    # Each key of a tenant has its own limits.
    assert (await front.ask(authorizations=[f"Bearer {second}"])).text
    assert [submit.tenant for submit in rig.scheduler.submits] == ["acme"] * 2


async def test_an_answer_tells_what_is_left_of_the_rates_of_its_key(rig):
    key = rig.keys.add("acme", limits=Limits(requests_per_minute=60, tokens_per_minute=1000))
    await rig.gateway.gateway.authenticator.refresh()
    headers, body = {"authorization": f"Bearer {key}"}, {"prompt": "hello", "max_tokens": 1}
    answers = [await rig.gateway.http.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
    left = [{name: int(each.headers[f"x-ratelimit-remaining-{name}"]) for name in ("requests", "tokens")}
            for each in answers]  # fmt: skip
    assert [each["requests"] for each in left] == [59, 58]
    assert 900 < left[1]["tokens"] < left[0]["tokens"] < 1000
    assert answers[0].headers["x-ratelimit-limit-requests"] == "60"
    assert 0 < float(answers[0].headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 1


async def test_a_key_that_is_a_flag_allows_everything_and_is_the_only_one(scheduler):
    async with running_gateway(
        scheduler, api_keys=("secret-1", "secret-2"), served_model_aliases=("gpt-4o",)
    ) as gateway:
        for key, status in (("secret-2", 200), ("secret-3", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await gateway.http.get("/metrics", headers=headers)).status_code == status
        headers = {"authorization": "Bearer secret-1"}
        models = (await gateway.http.get("/v1/models", headers=headers)).json()["data"]
        assert [(each["id"], each["parent"]) for each in models] == [("quire-tiny", None), ("gpt-4o", None)]
        listed = await gateway.models.ListModels(model_pb2.ListModelsRequest(), metadata=tuple(headers.items()))
        assert [(each.name, each.HasField("parent")) for each in listed.models] == [
            ("quire-tiny", False), ("gpt-4o", False)]  # fmt: skip
        index = (await gateway.http.post("/v2/repository/index", json={}, headers=headers)).json()
        assert [each["name"] for each in index] == ["quire-tiny", "gpt-4o"]
        asked = {"model": "gpt-4o", "prompt": "hello", "max_tokens": 1}
        answer = await gateway.http.post("/v1/completions", json=asked, headers=headers)
        assert (answer.status_code, answer.json()["model"]) == (200, "gpt-4o")


# Limits; then calls in order: the scheduler's errors, the prompt, the fields, and the reason of the refusal.
ONE, TOO_HOT = ((), "hello", {}), ((), "hello", {"temperature": -1.0})
COSTS = {
    "a refused call costs nothing": (
        Limits(requests_per_minute=2, tokens_per_minute=100),
        [
            *[(*TOO_HOT, "INVALID_ARGUMENT"), ((FULL,), WORDS, {}, "QUEUE_FULL")] * 3,
            *[((IN_USE,), WORDS, {}, "REQUEST_ID_IN_USE")] * 3,
            ((), WORDS, {}, None),
        ],
    ),
    "a prompt that was computed is charged": (
        Limits(tokens_per_minute=100),
        [((INVALID,), WORDS * 3, {}, "INVALID_SAMPLING"), ((), WORDS * 3, {}, "RATE_LIMIT_EXCEEDED")],
    ),
    # 80 tokens and the prompt are used, and one comes back in 0.6 seconds.
    "candidates that are not returned are charged": (
        Limits(tokens_per_minute=100),
        [
            ((), "hello", {"max_tokens": 20, "n": 1, "best_of": 4, "temperature": 1.0}, None),
            ((), "word " * 90, {}, "RATE_LIMIT_EXCEEDED"),
        ],
    ),
}
# Over HTTP a call may have several prompts.
COSTS_OF_BATCHES = {
    "refused for one of its prompts, it costs nothing": (
        Limits(requests_per_minute=4),
        [(*ONE, None), ((), ["hello"] * 4, {}, "RATE_LIMIT_EXCEEDED"), ((), ["hello"] * 3, {}, None),
         (*ONE, "RATE_LIMIT_EXCEEDED")],
    ),

    "a prompt that may have been computed is charged": (
        Limits(tokens_per_minute=100),
        [((None, FULL), [WORDS * 3, WORDS], {"max_tokens": 900}, "QUEUE_FULL"),
         ((), WORDS * 3, {}, "RATE_LIMIT_EXCEEDED"), ((), WORDS, {}, None)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "limits", "calls"),
    [
        *((kind, *COSTS[name]) for kind in (GrpcGenerate, Completions) for name in COSTS),
        *((Completions, *costs) for costs in COSTS_OF_BATCHES.values()),
    ],
)
async def test_what_a_call_costs(rig, kind, limits, calls):
    holder = await rig.holder(kind, limits=limits)
    num_submits = 0
    for refusals, text, fields, reason in calls:
        rig.scheduler.refusal += refusals
        assert await holder.reason(text, **fields) == reason
        if reason is None or refusals:
            num_submits = len(rig.scheduler.submits)
        assert len(rig.scheduler.submits) == num_submits


@BOTH
async def test_requests_run_at_the_keys_priority_and_may_lower_it_but_not_exceed_its_highest(rig, kind):
    holder = await rig.holder(kind, access=Access(priority=2, max_priority=5))
    for asked in ({}, {"priority": 5}, {"priority": -7}):
        assert await holder.reason(**asked) is None
    assert [submit.priority for submit in rig.scheduler.submits] == [2, 5, -7]
    refusal = (await holder.ask(priority=6)).refusal
    assert refusal is not None
    assert (refusal.status, refusal.reason) == ("PERMISSION_DENIED", "PRIORITY_NOT_ALLOWED")
    # Lower runs earlier in vLLM's API.
    allowed = (
        "is 6; this API key allows at most 5" if kind is GrpcGenerate else "is -6; this API key allows at least -5"
    )
    assert refusal.message == f"priority {allowed}"
    assert len(rig.scheduler.submits) == 3


@BOTH
async def test_a_model_that_is_not_allowed_is_as_one_that_is_not_there(rig, kind):
    allowed = await rig.holder(kind, access=Access(models=frozenset({MODEL})))
    other = await rig.holder(kind, access=Access(models=frozenset({"another"})))
    for holder, models in ((allowed, [MODEL]), (other, [])):
        authorization = f"Bearer {holder.key}"
        listed = (await rig.gateway.http.get("/v1/models", headers={"authorization": authorization})).json()["data"]
        request, metadata = model_pb2.ListModelsRequest(), (("authorization", authorization),)
        of_grpc = (await rig.gateway.models.ListModels(request, metadata=metadata)).models
        assert [each["id"] for each in listed] == [each.name for each in of_grpc] == models
    assert (await allowed.ask(model=MODEL)).text
    served, unknown, absent = [(await other.ask(**model)).refusal for model in ({"model": MODEL}, {"model": "m"}, {})]
    assert served is not None
    assert unknown is not None
    assert absent is not None
    assert served.reason == unknown.reason == absent.reason == "MODEL_NOT_FOUND"
    assert served.status == unknown.status
    assert served.message == unknown.message.replace('"m"', f'"{MODEL}"')
    assert MODEL not in absent.message
    assert (await error_of(rig.tokenize(other.key))).reason == "MODEL_NOT_FOUND"
    headers = {"authorization": f"Bearer {other.key}"}
    tokenized = await rig.gateway.http.post("/tokenize", json={"prompt": "x"}, headers=headers)
    assert (tokenized.status_code, tokenized.json()["error"]["code"]) == (404, "model_not_found")
    assert (await rig.gateway.http.get("/tokenizer_info", headers=headers)).status_code == 404


@BOTH
async def test_tenants_may_use_one_request_id_at_the_same_time(rig, kind):
    acme, other = await rig.holder(kind, "acme"), await rig.holder(kind, "other")
    rig.scheduler.emits.clear()
    running = [asyncio.create_task(holder.ask(request_id="mine")) for holder in (acme, other)]
    await rig.scheduler.until(lambda: len(rig.scheduler.live) == 2)
    assert await acme.reason(request_id="mine") == "REQUEST_ID_IN_USE"
    rig.scheduler.emits.set()
    assert all([(await each).text for each in running])


@pytest.mark.parametrize("kind", [GrpcGenerate, Completions, Responses])
async def test_ids_that_the_gateway_makes_are_long_and_random(scheduler, kind):
    async with running_gateway(scheduler) as gateway:
        for shown in ([], ["Bearer whatever"], []):
            assert (await kind(gateway).ask(authorizations=shown)).text
    # Without a file of keys every caller is the default tenant.
    assert {submit.tenant for submit in scheduler.submits} == {"default"}
    ids = [submit.request_id.rpartition("_" if kind is Responses else "-")[2] for submit in scheduler.submits]
    assert all(len(each) == 32 and int(each, 16) for each in ids)
    # Ids from a counter or from the time would begin alike.
    assert len({each[:8] for each in ids}) == 3
