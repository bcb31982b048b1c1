"""The gateway's metrics under vLLM's names, for dashboards and autoscalers made for vLLM (`--vllm-metric-names`).

An engine is a replica; its label is its position in `--schedulers`, or for a replica from a DNS name the first free
number when it was found. The queue gauges count only this gateway's requests, so that sums over several gateways are
correct; the KV cache usage covers the whole replica. docs/metrics.md has the table of names.
"""

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.metrics import HttpAnswers, ReplicaRecord, ReplicaRecords
from gateway.replicas.events import FinishReason
from gateway.replicas.replica_set import Replicas
from gateway.replicas.scheduler_calls import ReplicaLoad
from quire.model_files.progress import ASLEEP, ASLEEP_WITHOUT_WEIGHTS
from quire.runtime import clock
from quire.service.histograms import Distribution, histogram_family

_Labels = TypeVar("_Labels", bound=tuple[str, ...])
_LABELS = ("model_name", "engine")
# The engine label of requests that have no replica.
_NO_ENGINE = "none"
_SLEEP_STATES = {"awake": None, "weights_offloaded": ASLEEP, "discard_all": ASLEEP_WITHOUT_WEIGHTS}
"""The phases of a replica's workers by vLLM's names. vLLM's level 1 offloads the weights, which stay loaded here."""
_REASONS = {
    "stop": (FinishReason.STOP, FinishReason.TOOL_CALLS),
    "length": (FinishReason.LENGTH,),
    "abort": (FinishReason.CANCELLED,),
    "error": (FinishReason.ERROR,),
}
# vLLM's name, the attribute of a `ReplicaRecord`, and the help text.
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "first_token", "Time to the first token."),
    ("inter_token_latency_seconds", "inter_token", "Time between two tokens."),
    (
        "time_per_output_token_seconds",
        "inter_token",
        "Time between two tokens, under the former name of vllm:inter_token_latency_seconds.",
    ),
    ("request_time_per_output_token_seconds", "output_token", "Mean time between two tokens of a request."),
    ("e2e_request_latency_seconds", "whole", "Time of a whole request."),
    ("request_queue_time_seconds", "queue", "Time in the queue."),
    ("request_prefill_time_seconds", "prefill", "Time of prefill."),
    ("request_decode_time_seconds", "decode", "Time of decode."),
    ("request_inference_time_seconds", "inference", "Time of prefill and decode."),
    ("request_prompt_tokens", "prompt_tokens", "Tokens of the prompt."),
    ("request_generation_tokens", "output_tokens", "Tokens of a sequence."),
    ("request_max_num_generation_tokens", "longest_output", "Tokens of the longest sequence of a request."),
    ("request_prefill_kv_computed_tokens", "computed_prompt_tokens", "Tokens of the prompt that were not cached."),
    ("request_params_n", "sequences", "The parameter n."),
    ("request_params_max_tokens", "max_tokens", "The parameter max_tokens."),
    ("request_num_preemptions", "preemptions", "Preemptions of a request."),
)
_COUNTERS = (
    ("prompt_tokens", "num_prompt_tokens", "Prompt tokens of requests that got a token."),
    ("prompt_tokens_cached", "num_cached_tokens", "Cached prompt tokens of completed requests."),
    ("generation_tokens", "num_generated_tokens", "Generated tokens."),
    (
        "prefix_cache_queries",
        "prompt_tokens.sum",
        "Prompt tokens of completed requests that were looked up in the prefix cache.",
    ),
    ("prefix_cache_hits", "num_cached_tokens", "Prompt tokens found in the prefix cache."),
    ("num_preemptions", "preemptions.sum", "Preemptions of completed requests."),
)
_DRAFT_COUNTERS: Sequence[tuple[str, str, Callable[[ReplicaLoad], int]]] = (
    ("spec_decode_num_drafts", "Samples with draft tokens.", lambda load: load.num_drafted[0]),
    ("spec_decode_num_draft_tokens", "Draft tokens that were verified.", lambda load: load.num_drafted[1]),
    ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", lambda load: sum(load.num_accepted_at)),
)


class VllmMetrics(Collector):
    """Makes series under vLLM's names, of all models of a gateway."""

    def __init__(
        self, models: Iterable[tuple[str, ReplicaRecords, Replicas]], answers: HttpAnswers, gateway_id: str
    ) -> None:
        """`models` has the name, the records and the replicas of each model."""
        self._models = [_ModelMetrics(name, records, replicas, gateway_id) for name, records, replicas in models]
        self._answers = answers

    async def refresh(self) -> None:
        """Gets the present state of the queues from the schedulers."""
        await asyncio.gather(*(each.refresh() for each in self._models))

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for family in (family for each in self._models for family in each.collect()):
            # A scrape has each name once.
            if (known := merged.setdefault(family.name, family)) is not family:
                known.samples += family.samples
        yield from merged.values()
        yield self._adapters()
        yield from self._http()

    def _adapters(self) -> Metric:
        """Lists of adapters. The Gateway API Inference Extension reads the series with the latest time."""
        names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters; the value is the present time.", labels=names)
        replicas = [each.replicas for each in self._models]
        in_use = [each.adapters_in_use() for each in replicas]
        running, waiting = (",".join(chain.from_iterable(pair[which] for pair in in_use)) for which in (0, 1))
        slots = max((welcome.max_adapters for each in replicas for welcome in each.welcomes), default=0)
        family.add_metric([str(slots), waiting, running], clock.unix_s())
        return family

    def _http(self) -> Iterable[Metric]:
        """Counts of HTTP answers, as by the middleware of vLLM's HTTP server."""
        name, labels = "http_requests", ("handler", "method", "status")
        family = CounterMetricFamily(name, "HTTP answers, by the first digit of the status.", labels=labels)
        by_class: Tally[tuple[str, str, str]] = Tally()
        for answer, count in list(self._answers.counts.items()):
            by_class[answer.route, answer.method, f"{answer.status // 100}xx"] += count
        for key, count in by_class.items():
            family.add_metric(key, count)
        yield family
        name, help_text = "http_request_duration_seconds", "Seconds from an HTTP request to the end of its answer."
        yield histogram_family(name, help_text, ("handler", "method"), list(self._answers.durations.items()))


class _ModelMetrics:
    """The series of one model, from its records and from its schedulers' answers at the last `refresh`."""

    def __init__(self, model_name: str, records: ReplicaRecords, replicas: Replicas, gateway_id: str) -> None:
        self._model_name = model_name
        self._records = records
        self.replicas = replicas
        self._gateway_id = gateway_id
        self._loads: Mapping[str, ReplicaLoad] = {}
        self._refreshing: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Gets the present state of the queues from the schedulers. Concurrent scrapes share the answers."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._ask())
        await asyncio.shield(self._refreshing)

    async def _ask(self) -> None:
        try:
            self._loads = await self.replicas.calls.loads(self._gateway_id)
        finally:
            self._refreshing = None

    def collect(self) -> Iterable[Metric]:
        # Only present replicas. Records outlive their replicas.
        engines = {address: str(place) for address, place in self._records.places().items()}
        records = {str(place): record for place, record in enumerate(self._records)}
        loads = {engines[address]: load for address, load in self._loads.items() if address in engines}
        yield from self._queues(loads)
        yield self._family(
            "gauge",
            "kv_cache_usage_perc",
            "Share of the KV cache that is in use, from 0 to 1.",
            {(engine,): load.kv_cache_usage for engine, load in loads.items()},
        )
        yield from self._counters(records)
        for name, attribute, help_text in _HISTOGRAMS:
            yield self._histogram(name, help_text, {each: getattr(records[each], attribute) for each in records})
        # Whole replicas: a step has requests of all gateways.
        step_tokens = {engine: load.step_tokens for engine, load in loads.items() if load.step_tokens is not None}
        yield self._histogram("iteration_tokens_total", "Computed tokens per step.", step_tokens)
        yield from self._drafts(loads)
        yield self._cache_config(engines)
        yield self._sleep({engines[address]: address for address in self._loads if address in engines})

    def _histogram(self, name: str, help_text: str, of: Mapping[str, Distribution]) -> Metric:
        """A family with the distribution of each engine."""
        series = (([self._model_name, engine], each) for engine, each in of.items())
        return histogram_family(f"vllm:{name}", help_text, _LABELS, series)

    def _drafts(self, loads: Mapping[str, ReplicaLoad]) -> Iterable[Metric]:
        """Speculative decoding of whole replicas that use it."""
        drafting = {engine: load for engine, load in loads.items() if load.num_drafted[0]}
        for name, help_text, value_of in _DRAFT_COUNTERS:
            yield self._family("counter", name, help_text, {(each,): value_of(drafting[each]) for each in drafting})
        by_place = {
            (engine, str(place)): count
            for engine, load in drafting.items()
            for place, count in enumerate(load.num_accepted_at)
        }
        help_text = "Accepted draft tokens, by position."
        name = "spec_decode_num_accepted_tokens_per_pos"
        yield self._family("counter", name, help_text, by_place, ["position"])

    def _sleep(self, engines: Mapping[str, str]) -> Metric:
        """Sleep states of the replicas. vLLM's dashboards show a model without this series as down."""
        links, states = self.replicas.links, dict[tuple[str, str], int]()
        for engine, address in engines.items():
            loading = links[address].loading if address in links else None
            phase = None if loading is None or loading.phase not in _SLEEP_STATES.values() else loading.phase
            states |= {(engine, state): int(phase == own) for state, own in _SLEEP_STATES.items()}
        return self._family("gauge", "engine_sleep_state", "1 if a replica is in a state.", states, ["sleep_state"])

    def _queues(self, loads: Mapping[str, ReplicaLoad]) -> Iterable[Metric]:
        running = {(engine,): load.num_running for engine, load in loads.items()}
        yield self._family("gauge", "num_requests_running", "Requests that run.", running)
        waiting = {(engine,): load.num_waiting + load.num_held for engine, load in loads.items()}
        waiting[_NO_ENGINE,] = self.replicas.num_unplaced
        yield self._family("gauge", "num_requests_waiting", "Requests that wait.", waiting)
        by_reason = {(engine, "capacity"): load.num_waiting for engine, load in loads.items()}
        by_reason |= {(engine, "deferred"): load.num_held for engine, load in loads.items()}
        by_reason[_NO_ENGINE, "capacity"] = self.replicas.num_unplaced
        help_text = "Waiting requests: for capacity, or for data that another request or a worker prepares."
        yield self._family("gauge", "num_requests_waiting_by_reason", help_text, by_reason, ["reason"])

    def _counters(self, records: Mapping[str, ReplicaRecord]) -> Iterable[Metric]:
        for name, attribute, help_text in _COUNTERS:
            values = {(engine,): attrgetter(attribute)(record) for engine, record in records.items()}
            yield self._family("counter", name, help_text, values)
        by_source: dict[tuple[str, ...], int] = {}
        for engine, record in records.items():
            by_source[engine, "local_compute"] = record.num_prompt_tokens - record.num_cached_tokens
            by_source[engine, "local_cache_hit"] = record.num_cached_tokens
            by_source[engine, "external_kv_transfer"] = 0
        yield self._family("counter", "prompt_tokens_by_source", "Prompt tokens by source.", by_source, ["source"])
        of_device = {(engine, "device"): record.num_cached_tokens for engine, record in records.items()}
        help_text = "Cached prompt tokens, by location."
        yield self._family("counter", "prompt_tokens_cached_by_source", help_text, of_device, ["source"])
        finished = {
            (engine, name): sum(record.finished[reason] for reason in reasons)
            for engine, record in records.items()
            for name, reasons in _REASONS.items()
        }
        help_text = "Finished sequences, by reason."
        yield self._family("counter", "request_success", help_text, finished, ["finished_reason"])

    def _cache_config(self, engines: Mapping[str, str]) -> Metric:
        names = ("block_size", "num_gpu_blocks", "num_cpu_blocks", "enable_prefix_caching", "engine", "model_name")
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's sizes; the value is 1.", labels=names)
        for address, engine in engines.items():
            link = self.replicas.links.get(address)
            if link is not None and (welcome := link.welcome) is not None:
                sizes = map(str, (welcome.block_size, welcome.num_gpu_blocks, welcome.num_host_blocks))
                family.add_metric([*sizes, "True", engine, self._model_name], 1)
        return family

    def _family(
        self, kind: str, name: str, help_text: str, values: Mapping[_Labels, float], labels: Sequence[str] = ()
    ) -> Metric:
        """A family with a series for each engine and each value of `labels`."""
        make = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}[kind]
        family = make(f"vllm:{name}", help_text, labels=[*_LABELS, *labels])
        for of, value in values.items():
            family.add_metric([self._model_name, *of], value)
        return family
