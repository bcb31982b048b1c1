"""Metrics with OpenTelemetry's names: a collector gets them by OTLP, and /metrics has them if its variable asks."""

import asyncio
from typing import Any

import grpc.aio
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from prometheus_client.parser import text_string_to_metric_families

from tests.support.gateway_process import running_gateway

METRICS = {
    gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION: "s",
    gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: "s",
    gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN: "s",
    gen_ai_metrics.GEN_AI_CLIENT_TOKEN_USAGE: "{token}",
}


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the newest points of each metric, as (attributes, count, sum)."""

    def __init__(self) -> None:
        self.units: dict[str, str] = {}
        self.points: dict[str, list[tuple[dict[str, str], int, float]]] = {}
        self.resource: dict[str, str] = {}
        self.has_all = asyncio.Event()

    async def Export(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        for of_resource in request.resource_metrics:
            self.resource = {each.key: each.value.string_value for each in of_resource.resource.attributes}
            for metric in (metric for scope in of_resource.scope_metrics for metric in scope.metrics):
                self.units[metric.name] = metric.unit
                self.points[metric.name] = [
                    ({each.key: each.value.string_value for each in point.attributes}, point.count, point.sum)
                    for point in metric.histogram.data_points
                ]
        operations = {point[0].get(names.GEN_AI_OPERATION_NAME) for each in self.points.values() for point in each}
        if self.points.keys() >= METRICS.keys() and len(operations) == 2:
            self.has_all.set()
        return metrics_service_pb2.ExportMetricsServiceResponse()


async def test_a_collector_and_a_scrape_get_the_metrics_of_the_conventions(scheduler, monkeypatch):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "http, gen_ai_latest_experimental")
    collector, server = Collector(), grpc.aio.server()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with running_gateway(scheduler, otlp_metrics_endpoint=f"http://127.0.0.1:{port}") as gateway:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        usage = (await gateway.http.post("/v1/chat/completions", json=body)).json()["usage"]
        assert (await gateway.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3})).is_success
        async with asyncio.timeout(10):
            await collector.has_all.wait()
        assert collector.units == METRICS
        assert collector.resource["service.name"] == "quire-gateway"
        model = gateway.gateway._models.default.model.name
        of_chat = {
            names.GEN_AI_OPERATION_NAME: "chat",
            names.GEN_AI_PROVIDER_NAME: "quire",
            names.GEN_AI_REQUEST_MODEL: model,
            names.GEN_AI_RESPONSE_MODEL: model,
        }
        operations = {point[0][names.GEN_AI_OPERATION_NAME] for point in collector.points[next(iter(METRICS))]}
        assert operations == {"chat", "text_completion"}
        for name in list(METRICS)[:3]:
            (count, seconds), *others = [point[1:] for point in collector.points[name] if point[0] == of_chat]
            assert (count, others) == (1, [])
            assert 0 < seconds < 10
        tokens = {
            point[0][names.GEN_AI_TOKEN_TYPE]: point[2]
            for point in collector.points[gen_ai_metrics.GEN_AI_CLIENT_TOKEN_USAGE]
            if point[0][names.GEN_AI_OPERATION_NAME] == "chat"
        }
        assert tokens == {
            "input": usage["prompt_tokens"],
            "output": usage["completion_tokens"],
            "input.cache_read": usage["prompt_tokens_details"]["cached_tokens"],
            "output.reasoning": usage["completion_tokens_details"]["reasoning_tokens"],
        }
        text = (await gateway.http.get("/metrics")).text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        for name, unit in METRICS.items():
            shown = name.replace(".", "_") + ("_seconds" if unit == "s" else "")
            counts = {
                sample.labels["gen_ai_operation_name"]: sample.value
                for sample in families[shown].samples
                if sample.name.endswith("_count")
            }
            assert counts == {"chat": 1, "text_completion": 1}
    await server.stop(0)


async def test_a_collector_that_is_not_there_delays_no_start_and_is_one_line(scheduler, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    nowhere = "http://127.0.0.1:1"
    async with running_gateway(scheduler, otlp_metrics_endpoint=nowhere, otlp_traces_endpoint=nowhere) as gateway:
        for _ in range(2):
            async with asyncio.timeout(5):
                assert (await gateway.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3})).is_success
            await asyncio.sleep(0.4)
    warnings = [record.getMessage() for record in caplog.records if "be sent" in record.getMessage()]
    what = [
        f"{each} cannot be sent to {nowhere}; they are dropped until it accepts them" for each in ("metrics", "traces")
    ]
    assert sorted(warnings) == what


@pytest.mark.parametrize("asked", ["", "http"])
async def test_without_the_variable_a_scrape_has_only_quires_names(scheduler, monkeypatch, asked):
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", asked)
    async with running_gateway(scheduler) as gateway:
        assert (await gateway.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3})).is_success
        assert "gen_ai_" not in (await gateway.http.get("/metrics")).text
