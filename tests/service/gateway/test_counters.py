"""Counters of requests and tokens agree, however requests end."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import RunningGateway, running_gateway
from tests.support.metrics import read_metrics

PROMPT = "hello"
FAILURE = {"code": 13, "reason": "NON_FINITE_LOGITS", "message": "row 3"}


@pytest.fixture
async def watched(scheduler: FakeScheduler) -> AsyncIterator[RunningGateway]:
    async with running_gateway(scheduler, vllm_metric_names=True, tenant_metrics=4) as gateway:
        yield gateway


class Shown:
    """Counters of a gateway."""

    def __init__(self, values: dict[str, float]) -> None:
        self._values = values

    def total(self, name: str, label: str = "") -> float:
        """The sum of all series of a name with this label."""
        return sum(value for key, value in self._values.items() if key.partition("{")[0] == name and label in key)


async def counted(gateway: RunningGateway) -> Shown:
    return Shown(await read_metrics(int(gateway.http_url.rpartition(":")[2])))


async def test_counters_agree_however_requests_end(scheduler: FakeScheduler, watched: RunningGateway) -> None:
    usages: list[dict[str, int]] = []

    async def run(**more: object) -> None:
        answer = await watched.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 9} | more)
        if answer.status_code == 200:
            usages.append(answer.json()["usage"])

    async def stream(ending: str) -> None:
        body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True, "request_id": ending}
        async with watched.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            if ending == "cancelled":
                assert (await watched.http.post(f"/v1/requests/{ending}/cancel")).status_code == 200
            elif ending == "failed":
                scheduler.fail(next(iter(scheduler.live)), **FAILURE)
            if ending != "left":
                assert [line async for line in lines]

    await run()
    await run(stop=["\x12"])
    await watched.generation.Generate(
        generation_pb2.GenerateRequest(
            text=PROMPT,
            sampling=common_pb2.SamplingParameters(temperature=0),
            stopping=common_pb2.StoppingParameters(max_tokens=5),
            continue_from=[generation_pb2.HeldSequence(token_ids=[50, 51, 52])],
        )
    )
    scheduler.refusal.append(scheduler_pb2.RequestFailure(**FAILURE))
    await run()
    for ending in ("left", "cancelled", "failed"):
        await stream(ending)
    async with asyncio.timeout(30):
        while (shown := await counted(watched)).total("quire_gateway_live_requests"):
            pass
    outcomes = {"completed": 3, "abandoned": 1, "cancelled": 1, "internal": 2}
    for outcome, count in outcomes.items():
        for name in ("requests", "tenant_requests"):
            assert shown.total(f"quire_gateway_{name}_total", f'outcome="{outcome}"') == count
    prompt = usages[0]["prompt_tokens"]
    assert shown.total("quire_gateway_prompt_tokens_total") == 7 * prompt
    assert shown.total("quire_gateway_tenant_prompt_tokens_total") == 7 * prompt
    # One was refused before its first token.
    assert shown.total("vllm:prompt_tokens_total") == 6 * prompt
    assert shown.total("vllm:prompt_tokens_by_source_total") == 6 * prompt
    assert shown.total("vllm:prefix_cache_queries_total") == 3 * prompt
    assert shown.total("quire_gateway_finished_sequences_total") == shown.total("vllm:request_success_total") == 7
    generated = shown.total("quire_gateway_generated_tokens_total")
    assert generated == shown.total("quire_gateway_tenant_generated_tokens_total")
    assert generated == shown.total("vllm:generation_tokens_total")
    # Each of the others has at least one token.
    assert generated >= sum(each["completion_tokens"] for each in usages) + 2 + 3
