"""A gateway as a model server of the Gateway API inference extension (GIE), version 1.6: see under-other-layers.md."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.adapter_files import write_adapter
from tests.support.rig import running_rig

MODULES = {"model.layers.0.self_attn.q_proj": (4, 256, 256)}
GAUGES = {
    "TotalQueuedRequests": "vllm:num_requests_waiting",
    "TotalRunningRequests": "vllm:num_requests_running",
    "KVCacheUtilization": "vllm:kv_cache_usage_perc",
    "BlockSize, NumGPUBlocks": "vllm:cache_config_info",
    "adapters": "vllm:lora_requests_info",
}
# Headers that the endpoint picker and the proxy leave on a request.
PICKED = {
    "x-gateway-destination-endpoint": "10.0.0.7:8000,10.0.0.8:8000",
    "x-gateway-destination-endpoint-subset": "10.0.0.7:8000",
    "x-gateway-inference-objective": "sheddable",
    "x-gateway-inference-fairness-id": "acme",
    "x-gateway-model-name-rewrite": "two",
    "x-request-id": "picked-1",
}


async def scrape(http: httpx.AsyncClient) -> dict[str, Metric]:
    """As the picker reads the port of the pool: without a key and in Prometheus' text format."""
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def body_of(adapter: str) -> dict[str, Any]:
    return {
        "model": adapter,
        "prompt": "hello",
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_an_endpoint_picker_finds_all_that_a_model_server_owes(tmp_path: Path) -> None:
    adapters = [f"{name}={write_adapter(tmp_path / name, MODULES)}" for name in ("one", "two")]
    settings = {"adapters": tuple(adapters), "vllm_metric_names": True, "open_metrics": True}
    async with running_rig(tmp_path, **settings) as rig:
        rig.reset()
        for path in ("/health", "/ready"):
            assert (await rig.http.get(path)).status_code == 200
        families = await scrape(rig.http)
        assert {what for what, name in GAUGES.items() if families[name].type != "gauge"} == set()
        # The picker reads only the first series of a metric.
        first = {what: families[name].samples[0] for what, name in GAUGES.items()}
        assert {what for what, sample in first.items() if sample.labels.get("engine", "0") != "0"} == set()
        assert first["TotalQueuedRequests"].value == first["TotalRunningRequests"].value == 0
        assert 0 <= first["KVCacheUtilization"].value <= 1
        sizes = first["BlockSize, NumGPUBlocks"].labels
        assert (int(sizes["block_size"]), int(sizes["num_gpu_blocks"]) > 0) == (16, True)
        assert (await adapters_of(rig.http)) == ("2", "", "")

        rig.scheduler.step_delay_s = 0.01
        async with rig.http.stream("POST", "/v1/completions", json=body_of("one"), headers=PICKED) as running:
            assert (running.status_code, running.headers["x-request-id"]) == (200, "picked-1")
            lines = running.aiter_lines()
            assert json.loads((await anext(lines)).removeprefix("data: "))["model"] == "one"
            rig.scheduler.emits.clear()
            async with rig.http.stream("POST", "/v1/completions", json=body_of("two")):
                assert (await adapters_of(rig.http)) == ("2", "one", "two")
                rig.scheduler.emits.set()
                data = [line.removeprefix("data: ") async for line in lines if line]
        assert data[-1] == "[DONE]"
        usage = json.loads(data[-2])["usage"]
        assert usage["completion_tokens"] == 4
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await adapters_of(rig.http)) == ("2", "", "")


async def adapters_of(http: httpx.AsyncClient) -> tuple[str, str, str]:
    """Slots, running adapters and waiting adapters of the only series, whose value is the time."""
    (sample,) = (await scrape(http))[GAUGES["adapters"]].samples
    assert abs(time.time() - sample.value) < 60
    labels = sample.labels
    return labels["max_lora"], labels["running_lora_adapters"], labels["waiting_lora_adapters"]
