"""With --vllm-metric-names a gateway has the series of vLLM's dashboards and autoscalers, over all of its replicas."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import httpx
import pytest

from quire.gateway.v1 import generation_pb2
from tests.support.gateway_process import RunningGateway, stream_request
from tests.support.metrics import read_metrics
from tests.support.scheduler_process import until
from tests.support.two_gateways import TwoGateways, two_gateways

# The series that the dashboards in vLLM's repository (examples/observability) name, and the labels by which they
# select or group them: all of vLLM, performance_statistics and query_statistics; of vllm_overview, vllm_instances,
# vllm_kv_cache, vllm_speculative_decoding and vllm_service_status only the series for features of Quire.
SECONDS = "quire_gateway_http_answer_seconds"
HISTOGRAMS = (
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "time_to_first_token_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_time_per_output_token_seconds",
    "request_prefill_kv_computed_tokens",
)
SERIES = (
    *(f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")),
    *("prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total", "request_success_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"),
    *("engine_sleep_state", "cache_config_info", "prompt_tokens_by_source_total"),
    *("prompt_tokens_cached_by_source_total", "iteration_tokens_total_count", "iteration_tokens_total_sum"),
    "iteration_tokens_total_bucket",
)
# Further series that autoscalers and the gateway API inference extension read.
OTHERS = (
    *("request_inference_time_seconds_bucket", "time_per_output_token_seconds_bucket"),
    *("request_params_n_bucket", "request_params_max_tokens_bucket", "request_num_preemptions_bucket"),
)


@pytest.fixture
async def two(tmp_path) -> AsyncIterator[TwoGateways]:
    async with two_gateways(tmp_path, num_replicas=2, vllm_metric_names=True) as gateways:
        yield gateways


async def series_of(gateway: RunningGateway) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """A gateway's series under vLLM's names, by name and labels."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for key, value in (await read_metrics(int(gateway.http_url.rpartition(":")[2]))).items():
        if key.startswith("vllm:"):
            name, _, labels = key.removeprefix("vllm:").partition("{")
            pairs = [pair.partition("=")[::2] for pair in labels.removesuffix("}").split(",") if pair]
            found[name, frozenset((label, text.strip('"')) for label, text in pairs)] = value
    return found


def total(series: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    """The sum of a metric's series with these labels."""
    return sum(value for (of, has), value in series.items() if of == name and labels.items() <= has)


def generate_request(text: str, **fields) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(text=text, **fields)
    request.stopping.max_tokens = 8
    request.stopping.ignore_eos = True
    return request


async def test_every_series_of_vllms_dashboards_is_there_before_the_first_request(two):
    series = await series_of(two.first)
    for name in (*SERIES, *OTHERS):
        for engine in ("0", "1"):
            of_engine = {("model_name", "quire-tiny"), ("engine", engine)}
            assert any(of == name and of_engine <= has for of, has in series), (name, engine)
    reasons = {dict(has).get("finished_reason") for name, has in series if name == "request_success_total"}
    assert reasons == {"stop", "length", "abort", "error"}
    assert total(series, "lora_requests_info", max_lora="0") > 0


async def test_what_requests_took_is_counted_at_the_replica_that_ran_them(two):
    for text in ("one", "two", "three"):
        await two.first.generation.Generate(generate_request(text))
    series = await series_of(two.first)
    for name in HISTOGRAMS:
        assert total(series, f"{name}_count") == (21 if name == "inter_token_latency_seconds" else 3), name
    assert total(series, "generation_tokens_total") == 24
    assert total(series, "request_generation_tokens_sum") == 24
    assert total(series, "request_success_total", finished_reason="length") == 3
    assert total(series, "prompt_tokens_total") == total(series, "request_prompt_tokens_sum")
    sources = [
        total(series, "prompt_tokens_by_source_total", source=each) for each in ("local_compute", "local_cache_hit")
    ]
    assert sum(sources) == total(series, "prompt_tokens_total")
    assert total(series, "prompt_tokens_cached_by_source_total", source="device") == sources[1]
    assert total(series, "request_num_preemptions_bucket", le="0.0") == 3
    other = await series_of(two.second)
    assert not total(other, "generation_tokens_total")
    # Steps count for all gateways.
    computed = total(series, "prompt_tokens_total") - sources[1] + 24 - 3
    assert total(series, "iteration_tokens_total_sum") == total(other, "iteration_tokens_total_sum") >= computed
    assert total(series, "iteration_tokens_total_count") >= 8


async def test_each_gateway_reports_what_runs_and_waits_of_its_own_requests(two):
    """So the sum over gateways is right, as it is over vLLM's servers. Steps in flight without an answer keep later
    requests in the queue."""
    two.stand_still()
    calls = [gateway.generation.GenerateStream(stream_request()) for gateway in (two.first, two.first, two.second)]
    readers = [asyncio.create_task(call.read()) for call in calls]

    async def arrived() -> bool:
        live = [
            total(series, "num_requests_running") + total(series, "num_requests_waiting")
            for series in [await series_of(gateway) for gateway in two.both]
        ]
        return live == [2, 1]

    await until(arrived)
    seen = [await series_of(gateway) for gateway in two.both]
    assert sum(total(series, "num_requests_running") for series in seen) >= 1
    assert total(seen[0], "kv_cache_usage_perc") == total(seen[1], "kv_cache_usage_perc") > 0
    for series in seen:
        assert total(series, "num_requests_waiting", engine="none") == 0
        assert total(series, "num_requests_waiting_by_reason") == total(series, "num_requests_waiting")
    for call, reader in zip(calls, readers, strict=True):
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await reader


async def test_every_answer_over_http_counts_by_route_and_by_class_of_its_status(two):
    url = two.first.http_url
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await client.get("/v1/models")
        await client.get("/v1/models/none")
        await client.post("/v1/completions", content=b"{")
        await client.request("BREW", "/v1/models")
        await client.get("/made/up")
        await client.get("/health")
    shown = await read_metrics(int(url.rpartition(":")[2]))
    name = "quire_gateway_http_answers_total"
    assert {key.removeprefix(name): value for key, value in shown.items() if key.startswith(name)} == {
        '{method="GET",route="/v1/models",status="200"}': 1,
        '{method="GET",route="/v1/models/{model}",status="404"}': 1,
        '{method="POST",route="/v1/completions",status="400"}': 1,
        '{method="other",route="/v1/models",status="405"}': 1,
        '{method="GET",route="other",status="404"}': 1,
    }
    assert shown['http_requests_total{handler="/v1/models",method="GET",status="2xx"}'] == 1
    assert shown['http_requests_total{handler="/v1/completions",method="POST",status="4xx"}'] == 1
    took = {key.partition("{")[2]: value for key, value in shown.items() if key.startswith(f"{SECONDS}_count")}
    assert took['method="GET",route="/v1/models"}'] == took['method="GET",route="other"}'] == 1
    assert sum(took.values()) == 5
    assert sum(value for key, value in shown.items() if key.startswith("http_request_duration_seconds_count")) == 5


async def test_every_grpc_call_counts_by_method_and_status(two):
    gateway = two.first
    await gateway.generation.Generate(generate_request("one"))
    async for _ in gateway.generation.GenerateStream(generate_request("two")):
        pass
    for path in ("/quire.gateway.v1.GenerationService/Generate", "/made.Up/Method", "/made.Up/Other"):
        with pytest.raises(grpc.aio.AioRpcError):
            await gateway.channel.unary_unary(path)(b"\x0a\x7fshort")
    shown = await read_metrics(int(gateway.http_url.rpartition(":")[2]))
    name = "quire_gateway_grpc_calls_total"
    counted = {key.removeprefix(name): value for key, value in shown.items() if key.startswith(name)}
    service = "quire.gateway.v1.GenerationService"
    assert counted == {
        f'{{code="OK",method="{service}/Generate"}}': 1,
        f'{{code="OK",method="{service}/GenerateStream"}}': 1,
        f'{{code="INVALID_ARGUMENT",method="{service}/Generate"}}': 1,
        '{code="UNIMPLEMENTED",method="other"}': 2,
    }


async def test_outcomes_that_rules_read_are_there_before_the_first_request(two):
    shown = await read_metrics(int(two.first.http_url.rpartition(":")[2]))
    for outcome in ("completed", "abandoned", "internal", "unavailable", "resource_exhausted", "deadline_exceeded"):
        assert shown[f'quire_gateway_requests_total{{model="quire-tiny",outcome="{outcome}"}}'] == 0
