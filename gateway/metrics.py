"""The Prometheus metrics of the gateway.

Everything is counted once: a request when its client has the whole answer, a token when it first comes from a
scheduler, and tokens of candidates that best_of or a beam search drops when their request completes. A request that is
resubmitted to another scheduler stays one request. A resumed stream counts as a separate request in `requests`, but
its prompt and its earlier tokens do not count again.
"""

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.gen_ai_metrics import GenAiMetrics
from gateway.replicas.events import FinishReason, Usage
from gateway.replicas.live import Arrivals, LiveRequest
from quire.rpc.errors import QuireError
from quire.runtime import clock
from quire.service.histograms import (
    COUNTS,
    SECONDS,
    SHORT_SECONDS,
    SMALL_COUNTS,
    Distribution,
    TenantLabels,
    histogram_family,
)
from quire.service.metrics import CallCounts

_PREFIX = "quire_gateway_"
# Few buckets, since each tenant, and each HTTP route, has its own series.
_TENANT_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_ANSWER_SECONDS = (0.005, 0.025, 0.1, 0.5, 1, 5, 30, 120, 600)
# Series that exist from the start: alerting rules then see the first request of an outcome as an increase.
_WATCHED_OUTCOMES = (
    *("completed", "abandoned", "resource_exhausted"),
    *("internal", "unavailable", "unknown", "data_loss", "deadline_exceeded"),
)
_seconds = partial(Distribution, SECONDS)
_short_seconds = partial(Distribution, SHORT_SECONDS)
_counts = partial(Distribution, COUNTS)


class RequestStatistics:
    """Sums over all accepted requests that are over, in all front ends: distributions of seconds in one bucket.

    Attributes:
        completed: Completed requests: time from arrival to the end of the call.
        failed: Failed or abandoned requests: time from arrival to the end of the call.
        queued: Completed requests: time until the first step that ran them.
        computed: Completed requests: time from that step to the last token.
        last_completed_at_s: Time of the last completion, in seconds since the Unix epoch; None before the first one.
    """

    def __init__(self) -> None:
        self.completed, self.failed, self.queued, self.computed = (Distribution(()) for _ in range(4))
        self.last_completed_at_s: float | None = None

    def add(self, seconds: float, usage: Usage | None) -> None:
        """`usage` is None for a request that did not complete."""
        if usage is None:
            self.failed.add(seconds)
            return
        self.completed.add(seconds)
        self.queued.add(usage.queue_ms / 1000)
        self.computed.add((usage.prefill_ms + usage.decode_ms) / 1000)
        self.last_completed_at_s = clock.unix_s()


@dataclass(slots=True)
class ReplicaRecord:
    """This gateway's statistics about one replica: the tokens that came from it, and the requests that it completed.

    Times of phases come from the scheduler's reports; if a request moved, from the last scheduler.

    Attributes:
        first_token: Seconds from the arrival of a request to its first token.
        inter_token: Seconds between two tokens of a sequence, one observation for each token after the first.
        whole: Seconds from the arrival of a request to the end of its call.
        queue, prefill, decode, inference: Seconds in these phases; inference is prefill and decode.
        output_token: Mean seconds of decode per token of a sequence after the first, one observation per request.
        prompt_tokens, computed_prompt_tokens: Prompt tokens of a request; prompt tokens that were not cached.
        output_tokens, longest_output: Tokens of a sequence; tokens of the longest sequence of a request.
        sequences, max_tokens: Parameters of a request.
        preemptions: Preemptions of a request.
        finished: Number of sequences that ended, by reason.
        num_cached_tokens: Cached prompt tokens of the completed requests.
        num_prompt_tokens: Prompt tokens of all requests that got a token, with any outcome.
        num_generated_tokens: All tokens that came, also for requests that did not complete, and the tokens of
            candidates that completed requests dropped.
    """

    first_token: Distribution = field(default_factory=_seconds)
    inter_token: Distribution = field(default_factory=_short_seconds)
    whole: Distribution = field(default_factory=_seconds)
    queue: Distribution = field(default_factory=_seconds)
    prefill: Distribution = field(default_factory=_seconds)
    decode: Distribution = field(default_factory=_seconds)
    inference: Distribution = field(default_factory=_seconds)
    output_token: Distribution = field(default_factory=_short_seconds)
    prompt_tokens: Distribution = field(default_factory=_counts)
    computed_prompt_tokens: Distribution = field(default_factory=_counts)
    output_tokens: Distribution = field(default_factory=_counts)
    longest_output: Distribution = field(default_factory=_counts)
    sequences: Distribution = field(default_factory=partial(Distribution, SMALL_COUNTS))
    max_tokens: Distribution = field(default_factory=_counts)
    preemptions: Distribution = field(default_factory=partial(Distribution, (0, 1, 2, 5, 10, 20, 50, 100)))
    finished: Tally[FinishReason] = field(default_factory=Tally[FinishReason])
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0

    def add_tokens(self, arrivals: Arrivals) -> None:
        """Adds tokens that came together."""
        self.num_generated_tokens += arrivals.num_tokens
        if arrivals.gaps:
            self.inter_token.add_all(np.divide(arrivals.gaps, arrivals.gap_tokens), arrivals.gap_tokens)

    def add_request(self, live: LiveRequest, outcome: str, usage: Usage | None, seconds: float | None) -> None:
        """Adds a request that is over. `usage` is None if it did not complete; then its running sequences count as
        ended. `seconds` is its whole time; None for a resumed request, whose arrival time is not known here."""
        if usage is None:
            is_left = outcome in ("abandoned", "cancelled", "aborted")
            # A durable request runs on without a reader.
            if not (is_left and live.request.durable):
                reason = FinishReason.CANCELLED if is_left else FinishReason.ERROR
                ends = (stream.finished for stream in live.sequences)
                self.finished.update(reason if end is None else end.reason for end in ends)
            return
        if seconds is not None:
            self.whole.add(seconds)
        lengths = [len(stream.token_ids) for stream in live.sequences]
        prefill_s, decode_s = usage.prefill_ms / 1000, usage.decode_ms / 1000
        self.queue.add(usage.queue_ms / 1000)
        self.prefill.add(prefill_s)
        self.decode.add(decode_s)
        self.inference.add(prefill_s + decode_s)
        if (longest := max(lengths)) > 1:
            self.output_token.add(decode_s / (longest - 1))
        self.prompt_tokens.add(usage.prompt_tokens)
        self.computed_prompt_tokens.add(usage.prompt_tokens - usage.cached_tokens)
        self.output_tokens.add_all(lengths)
        self.longest_output.add(longest)
        self.sequences.add(live.request.sampling.n)
        self.max_tokens.add(live.request.stopping.max_tokens)
        self.preemptions.add(usage.preemptions)
        self.finished.update(stream.finished.reason for stream in live.sequences if stream.finished is not None)
        self.num_generated_tokens += live.num_dropped_tokens
        self.num_cached_tokens += usage.cached_tokens


class HttpAnswer(NamedTuple):
    """The labels of an HTTP answer; `route` is the path pattern of the route, or "other" for unknown paths."""

    route: str
    method: str
    status: int


class HttpAnswers(Collector):
    """HTTP answers. Other threads read a copy of a table, since its size may change meanwhile.

    Attributes:
        counts: The number of answers that began, by their labels.
        durations: The durations of finished answers, including streams, by route and method.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counts: Tally[HttpAnswer] = Tally()
        self.durations: dict[tuple[str, str], Distribution] = defaultdict(partial(Distribution, _ANSWER_SECONDS))
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        help_text = "HTTP answers, including errors."
        counts = CounterMetricFamily(f"{_PREFIX}http_answers", help_text, labels=HttpAnswer._fields)
        for (route, method, status), count in list(self.counts.items()):
            counts.add_metric([route, method, str(status)], count)
        yield counts
        help_text = "Seconds from an HTTP request to the end of its answer."
        name, labels = f"{_PREFIX}http_answer_seconds", ("route", "method")
        yield histogram_family(name, help_text, labels, list(self.durations.items()))


class ReplicaRecords:
    """The records of all replicas, each at a numbered place, starting from 0.

    A new replica reuses the place and the counters of a removed one. So the number of places never exceeds the maximum
    number of replicas at one time, and no counter ever decreases.
    """

    def __init__(self) -> None:
        self._records: list[ReplicaRecord] = []
        self._places: dict[str, int] = {}
        self._present: frozenset[str] = frozenset()

    def keep(self, addresses: Collection[str]) -> None:
        """Sets the present replicas."""
        self._present = frozenset(addresses)
        for address in addresses:
            self.of(address)

    def of(self, address: str) -> ReplicaRecord:
        """The record of a replica, present or removed."""
        place = self._places.get(address)
        if place is None:
            place = self._places[address] = self._free_place()
        return self._records[place]

    def _free_place(self) -> int:
        gone = {place: address for address, place in self._places.items() if address not in self._present}
        if gone:
            place = min(gone)
            del self._places[gone[place]]
            return place
        self._records.append(ReplicaRecord())
        return len(self._records) - 1

    def __iter__(self) -> Iterator[ReplicaRecord]:
        """All records, in the order of their places."""
        return iter(self._records)

    def places(self) -> dict[str, int]:
        """The place numbers of the present replicas. May be called in any thread."""
        return {address: place for address, place in list(self._places.items()) if address in self._present}


# The histograms over all replicas: name, attribute of a record, and help text.
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "first_token", "Seconds from a request's arrival to its first token."),
    ("inter_token_seconds", "inter_token", "Seconds between two tokens of a sequence, for each token after the first."),
    ("request_seconds", "whole", "Seconds from the arrival of a completed request to its end."),
    ("request_prompt_tokens", "prompt_tokens", "Prompt tokens of a completed request."),
    ("sequence_tokens", "output_tokens", "Generated tokens of a sequence of a completed request."),
)


class GatewayMetrics:
    """The gateway's metrics, in their own registry. Metrics of one model have the label `model`: see `of_model`.

    Attributes:
        http_answers: HTTP answers, except answers to probes and to Prometheus.
        grpc_calls: Finished gRPC calls, except calls of the health service.
        keys_reload_failures: Changes of the key files that could not be loaded.
        refused_connections: HTTP connections beyond the maximum.
    """

    def __init__(self, max_tenants: int = 0) -> None:
        """`max_tenants` is the maximum number of tenants that have their own series."""
        self.registry = CollectorRegistry()
        self._refresh: Callable[[], Awaitable[None]] | None = None
        self._gen_ai: GenAiMetrics | None = None
        self._models: dict[str, ModelMetrics] = {}
        self._families = _Families(
            self._counter("requests", "Accepted requests that ended, by outcome.", labels=["model", "outcome"]),
            self._counter("prompt_tokens", "Prompt tokens of accepted requests.", labels=["model"]),
            self._gauge("live_requests", "Live requests with a reader, including queued ones."),
            self._counter("resubmissions", "Requests resubmitted after a scheduler was lost.", labels=["model"]),
            self._counter(
                "moves_from_prefill",
                "Requests that left a prefill replica to continue on another one.",
                labels=["model"],
            ),
            self._gauge("connected_schedulers", "Schedulers with an open stream."),
        )
        self.grpc_calls = CallCounts("gateway", self.registry)
        self.http_answers = HttpAnswers(self.registry)
        self.registry.register(_Records(self._models))
        self._tenants = _TenantMetrics(self.registry, max_tenants) if max_tenants else None

        self._refusals = self._counter(
            "refused_callers",
            "Calls rejected because of their API key: it is missing, invalid, or does not allow the call at present.",
            labels=["reason"],
        )
        self._ignored_fields = self._counter(
            "ignored_fields", "Ignored fields in bodies of HTTP and KServe requests, by API.", labels=["api"]
        )
        self.keys_reload_failures = self._counter(
            "keys_reload_failures", "Failures to load a changed file of API keys."
        )
        self.refused_connections = self._counter(
            "refused_http_connections", "HTTP connections closed because there were too many."
        )

    def _counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"quire_gateway_{name}", help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"quire_gateway_{name}", help, ["model"], registry=self.registry)

    def of_model(self, name: str) -> "ModelMetrics":
        """The metrics of a model."""
        return self._models.setdefault(name, ModelMetrics(name, self._families, self._tenants, self._gen_ai))

    def count_gen_ai(self, metrics: GenAiMetrics, *, shows: bool) -> None:
        """Counts the requests of models that come later also under OpenTelemetry's names, which are on /metrics if
        `shows` is set."""
        self._gen_ai = metrics
        if shows:
            self.registry.register(metrics)

    def close(self) -> None:
        """Sends the last values to a collector, if there is one."""
        if self._gen_ai is not None:
            self._gen_ai.close()

    def count_refused_caller(self, reason: str) -> None:
        """Counts a call that was rejected because of its API key, or because it had none."""
        self._refusals.labels(reason).inc()

    def count_ignored_fields(self, api: str, count: int) -> None:
        """Counts the ignored fields of one body. Their names come from callers, so they are not labels."""
        self._ignored_fields.labels(api).inc(count)

    def show(self, collector: Collector, refresh: Callable[[], Awaitable[None]]) -> None:
        """Also serves the metrics of `collector`; `refresh` updates them before each scrape."""
        self.registry.register(collector)
        self._refresh = refresh

    async def refresh(self) -> None:
        """Updates metrics that come from other services. Must be called before the registry is read."""
        if self._refresh is not None:
            await self._refresh()


@dataclass(frozen=True, slots=True)
class _Families:
    """The metrics that each model has, by their names in `GatewayMetrics`."""

    requests: Counter
    prompt_tokens: Counter
    live: Gauge
    resubmissions: Counter
    moves_from_prefill: Counter
    connected: Gauge


class ModelMetrics:
    """The metrics of one model at a gateway.

    Attributes:
        statistics: Sums over the requests that are over, for APIs that report statistics.
        records: Statistics of each replica.
        moves_from_prefill: Requests that left a prefill replica after their prompts were computed there.
    """

    def __init__(
        self, model: str, families: _Families, tenants: "_TenantMetrics | None", gen_ai: GenAiMetrics | None
    ) -> None:
        self.statistics = RequestStatistics()
        self.records = ReplicaRecords()
        self._model = model
        self._requests = families.requests
        for outcome in _WATCHED_OUTCOMES:
            self._requests.labels(model, outcome)
        self._prompt_tokens = families.prompt_tokens.labels(model)
        self._live = families.live.labels(model)
        self._resubmissions = families.resubmissions.labels(model)
        self.moves_from_prefill = families.moves_from_prefill.labels(model)
        self._connected = families.connected
        self._tenants = tenants
        self._gen_ai = gen_ai

    def watch_schedulers(self, addresses: Collection[str], count_connected: Callable[[], int]) -> None:
        """Reports the number of connected schedulers, which `count_connected` returns at each scrape."""
        self.records.keep(addresses)
        self._connected.labels(self._model).set_function(count_connected)

    def count_tokens(self, address: str, arrivals: Arrivals) -> None:
        """Counts the new tokens in a batch of events from a replica."""
        self.records.of(address).add_tokens(arrivals)

    @contextmanager
    def track(self, live: LiveRequest, operation: str) -> Iterator[None]:
        """Counts a request as live while the context runs, and its outcome at the end. `operation` is its name in
        OpenTelemetry's conventions."""
        self._prompt_tokens.inc(len(live.request.prompt_token_ids))
        try:
            with self._tracked(live, operation, is_resumed=False):
                yield
        finally:
            if live.seconds_to_first_token is not None and live.last_replica is not None:
                record = self.records.of(live.last_replica)
                record.first_token.add(live.seconds_to_first_token)
                record.num_prompt_tokens += len(live.request.prompt_token_ids)

    @contextmanager
    def track_resumed(self, live: LiveRequest, num_known_tokens: int) -> Iterator[None]:
        """Counts a resumed stream as a separate request, without its prompt and its earlier output."""
        live.num_repeated = max(num_known_tokens - live.num_generated_tokens, 0)
        with self._tracked(live, "resume", is_resumed=True, num_known_tokens=num_known_tokens):
            yield

    @contextmanager
    def _tracked(
        self, live: LiveRequest, operation: str, *, is_resumed: bool, num_known_tokens: int = 0
    ) -> Iterator[None]:
        started_at = clock.monotonic()
        outcome = "abandoned"
        try:
            with self._live.track_inprogress():
                yield
            outcome = "completed"
        except QuireError as error:
            outcome = error.code.name.lower()
            raise
        finally:
            self._requests.labels(self._model, outcome).inc()
            seconds, usage = clock.monotonic() - started_at, live.usage if outcome == "completed" else None
            self.statistics.add(seconds, usage)
            self._resubmissions.inc(max(live.submissions - 1, 0))
            num_new = live.num_generated_tokens - (num_known_tokens if is_resumed else live.num_brought_tokens)
            whole_s = None if is_resumed else seconds
            if live.last_replica is not None and (num_new or not is_resumed):
                self.records.of(live.last_replica).add_request(live, outcome, usage, whole_s)
            if self._gen_ai is not None and not is_resumed:
                self._gen_ai.add(self._model, operation, live, outcome, usage, seconds)
            if self._tenants is not None:
                num_dropped = live.num_dropped_tokens if usage is not None and (num_new or not is_resumed) else 0
                self._tenants.add(live, outcome, num_new + num_dropped, whole_s)


class _Records(Collector):
    """The records of each model's replicas together."""

    def __init__(self, models: Mapping[str, ModelMetrics]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        records = {model: list(metrics.records) for model, metrics in list(self._models.items())}
        generated = CounterMetricFamily(
            f"{_PREFIX}generated_tokens", "Tokens generated for requests.", labels=["model"]
        )
        finished = CounterMetricFamily(
            f"{_PREFIX}finished_sequences", "Finished sequences, by reason.", labels=["model", "reason"]
        )
        for model, own in records.items():
            generated.add_metric([model], sum(record.num_generated_tokens for record in own))
            for reason in FinishReason:
                finished.add_metric([model, reason.value], sum(record.finished[reason] for record in own))
        yield generated
        yield finished
        for name, attribute, help_text in _HISTOGRAMS:
            parts = {model: [getattr(record, attribute) for record in own] for model, own in records.items() if own}
            totals = [([model], Distribution.total(own[0].bounds, own)) for model, own in parts.items()]
            yield histogram_family(_PREFIX + name, help_text, ["model"], totals)


class _TenantMetrics:
    """Metrics by tenant, for a bounded number of tenants."""

    def __init__(self, registry: CollectorRegistry, max_tenants: int) -> None:
        self._labels = TenantLabels(max_tenants)
        make = {"registry": registry, "namespace": "quire", "subsystem": "gateway_tenant"}
        self._requests = Counter("requests", "Requests of a tenant, by outcome.", ["tenant", "outcome"], **make)
        self._prompt = Counter("prompt_tokens", "Prompt tokens of a tenant's requests.", ["tenant"], **make)
        self._generated = Counter("generated_tokens", "Tokens generated for a tenant.", ["tenant"], **make)
        seconds = partial(Histogram, labelnames=["tenant"], buckets=_TENANT_SECONDS, **make)
        self._first_token = seconds(
            "time_to_first_token_seconds", "Seconds from the arrival of a tenant's request to its first token."
        )
        self._whole = seconds(
            "request_seconds", "Seconds from the arrival of a tenant's completed request to the end of its call."
        )

    def add(self, live: LiveRequest, outcome: str, num_new_tokens: int, seconds: float | None) -> None:
        """Records the end of a request; `seconds` is None for a resumed one."""
        tenant = self._labels.of(live.request.tenant)
        self._requests.labels(tenant, outcome).inc()
        self._generated.labels(tenant).inc(max(num_new_tokens, 0))
        if seconds is None:
            return
        self._prompt.labels(tenant).inc(len(live.request.prompt_token_ids))
        if live.seconds_to_first_token is not None:
            self._first_token.labels(tenant).observe(live.seconds_to_first_token)
        if outcome == "completed":
            self._whole.labels(tenant).observe(seconds)
