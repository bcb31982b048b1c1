"""Each item of the model server protocol of the Kubernetes Gateway API inference extension, at a real server.

The items are those of docs/proposals/003-model-server-protocol in kubernetes-sigs/gateway-api-inference-extension and
of docs/plugin-metric-protocol.md in llm-d/llm-d-router, both of August 2026. The server has the commands and variables
of the pod that the chart makes for an InferencePool.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import openai
import pytest
import zmq
import zmq.asyncio
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.containers import Machine, containers_of_pods
from tools.check_kubernetes import RENDERED

pytestmark = pytest.mark.extended

POOL = RENDERED / "inference-pool.yaml"
TIMEOUT_S = 200
LONG = "A quire is a set of pages, and a page has lines. " * 8


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    # One request runs, and others wait.
    containers = containers_of_pods(POOL, tmp_path, tmp_path, {"QUIRE_MAX_NUM_SEQS": "1"})
    machine = Machine(containers, ("50051", "8000", "9400", "9401", "9410", "5557", "5558"))
    async with asyncio.timeout(TIMEOUT_S), machine.running():
        yield machine


class Picker:
    """Reads what the endpoint picker reads, as it does: of the series of a metric the first, where none has a time."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client

    async def families(self) -> dict[str, Metric]:
        response = await self._client.get("../metrics", cast_to=str)
        return {family.name: family for family in text_string_to_metric_families(response)}

    async def gauge(self, name: str) -> float:
        family = (await self.families())[name]
        assert family.type == "gauge"
        assert all(sample.timestamp is None for sample in family.samples)
        return family.samples[0].value

    async def until_above(self, name: str, value: float) -> None:
        while True:
            if await self.gauge(name) > value:
                return
            await asyncio.sleep(0.05)


async def test_every_item_of_the_protocol_is_there(machine: Machine) -> None:
    url = f"http://127.0.0.1:{machine.port('8000')}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        picker = Picker(client)
        (model,) = [each.id async for each in client.models.list()]
        await check_apis(client, model)
        await check_load(client, model, picker, machine)
        await check_cache_configuration(picker)
        await check_adapters(picker)
    await check_kv_events(machine)


async def check_apis(client: openai.AsyncOpenAI, model: str) -> None:
    """OpenAI's Completions and Chat; the same prompt again comes from the prefix cache."""
    chat = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What is 2+2?"}], max_tokens=4
    )
    assert chat.choices[0].message.content is not None
    usages = [(await client.completions.create(model=model, prompt=LONG, max_tokens=1)).usage for _ in range(2)]
    details = [usage.prompt_tokens_details for usage in usages if usage is not None]
    assert [each is not None and (each.cached_tokens or 0) > 0 for each in details] == [False, True]


async def check_load(client: openai.AsyncOpenAI, model: str, picker: Picker, machine: Machine) -> None:
    """TotalQueuedRequests, TotalRunningRequests, KVCacheUtilization: none, then one that runs and one that waits."""
    names = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
    assert [await picker.gauge(name) for name in names] == [0, 0, 0]
    with machine.standing_still("worker-0"):
        # Their headers come after a while without tokens.
        streams = [
            await client.completions.create(
                model=model, prompt=LONG, max_tokens=600, temperature=0, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(2)
        ]
        for name in names:
            await picker.until_above(name, 0)
        assert await picker.gauge("vllm:num_requests_running") == 1
        assert 0 < await picker.gauge("vllm:kv_cache_usage_perc") <= 1
    for stream in streams:
        await stream.close()


async def check_cache_configuration(picker: Picker) -> None:
    """BlockSize and NumGPUBlocks are labels, numbers in decimal digits."""
    family = (await picker.families())["vllm:cache_config_info"]
    labels = family.samples[0].labels
    assert family.type == "gauge"
    assert int(labels["block_size"]) == 16
    assert int(labels["num_gpu_blocks"]) > 0


async def check_adapters(picker: Picker) -> None:
    """There are none. The value is the time, by which the picker finds the newest series."""
    family = (await picker.families())["vllm:lora_requests_info"]
    (sample,) = family.samples
    assert family.type == "gauge"
    assert sample.labels == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert sample.value > 1e9


async def check_kv_events(machine: Machine) -> None:
    """What precise prefix-cache routing subscribes to, at the pod, under the topic that it expects."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.subscribe(b"kv@")
        socket.connect(f"tcp://127.0.0.1:{machine.port('5557')}")
        stored = False
        while not stored:
            topic, _, payload = await socket.recv_multipart()
            assert topic.endswith(b"@quire-tiny")
            stored = any(event[0] == "BlockStored" for event in msgspec.msgpack.decode(payload)[1])
    finally:
        socket.close(linger=0)
        context.term()
