"""Prometheus metrics of the scheduler.

All of them count since this process began. A request that a gateway submits again, since an earlier scheduler was lost,
is a new one here: its time in the queue begins with its submission, and its earlier tokens do not count as generated.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.runtime import clock
from quire.service.histograms import COUNTS, SECONDS, SMALL_COUNTS, Histograms, TenantLabels
from quire.service.metrics import CallCounts
from scheduler_svc.core.moves import Arriving
from scheduler_svc.core.prefix_index import PrefixIndex
from scheduler_svc.core.reservations import Kind
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step import ClientEvents, RequestEnd, RequestFailure, StepPlan
from scheduler_svc.service.requests import Requests

_Labels = TypeVar("_Labels", bound=tuple[str, ...])
_PREFIX = "quire_scheduler_"
# Each tenant has these series, so there are few buckets.
_TENANT_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_FAST = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)
# Time to the first token is kept of requests that ended within this time, and of at most this many.
_RECENT_S, _MAX_RECENT = 60.0, 1000
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)


class Served:
    """Tokens and latencies that gateways were served, for samples of the load.

    Attributes:
        num_tokens: Tokens handed to gateways since this process began.
    """

    def __init__(self, clock: Callable[[], float] = clock.monotonic) -> None:
        self.num_tokens = 0
        self._clock = clock
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=_MAX_RECENT)

    def add(self, events: ClientEvents) -> None:
        """Counts events that are handed to gateways."""
        self.num_tokens += len(events.token_ids)
        now = self._clock()
        self._first_tokens.extend((now, (end.usage.queue_s + end.usage.prefill_s) * 1e3) for end in events.completed)

    def first_token_ms(self) -> tuple[float, float] | None:
        """The median and the 95th percentile over the requests that ended in the last minute; None if none did."""
        since = self._clock() - _RECENT_S
        recent = sorted(ms for at, ms in self._first_tokens if at >= since)
        return (recent[len(recent) // 2], recent[len(recent) * 95 // 100]) if recent else None


class SchedulerMetrics:
    """Counters that the step loop increases, in a separate registry.

    Attributes:
        grpc_calls: Ended gRPC calls, without health checks.
        step_tokens: Tokens that a step computes.
        served: Tokens and latencies that gateways were served.
    """

    def __init__(self, max_tenants: int = 0) -> None:
        """`max_tenants` is the maximum number of tenants with separate metrics."""
        self.registry = CollectorRegistry()
        self.grpc_calls = CallCounts("scheduler", self.registry)
        make = {"registry": self.registry, "namespace": "quire", "subsystem": "scheduler"}
        self._steps = Counter("steps", "Steps planned.", **make)
        self._batched_tokens = Counter("batched_tokens", "Tokens that were computed, prefill and decode.", **make)
        self._generated = Counter("generated_tokens", "Tokens handed to gateways.", **make)
        self._ended = Counter("requests", "Requests that ended, by outcome.", ["outcome"], **make)
        self._losses = Counter("worker_losses", "Losses of a worker that was attached.", **make)
        self._at_fault = Counter("requests_at_fault", "Requests that caused worker losses.", ["reason"], **make)
        help_text = "Seconds from sending the workers an order to fetch a request's blocks to their answer."
        self._move_time = Histogram("move_seconds", help_text, ["source"], buckets=_STEP, **make)
        # Created at the start, so that even the first event is an increase.
        for outcome in ("completed", "failed", "aborted"):
            self._ended.labels(outcome)
        for source in ("replica", "disk"):
            self._move_time.labels(source)
        for reason in ("STEP_REFUSED", "WORKER_LOST"):
            self._at_fault.labels(reason)
        self._plan_time = Histogram("plan_seconds", "Time to plan a step.", buckets=_FAST, **make)
        self._step_time = Histogram("step_seconds", "From planning a step to its result.", buckets=_STEP, **make)
        histograms = Histograms(_PREFIX, self.registry)
        self.step_tokens = histograms.add("step_tokens", "Tokens that a step computes.", COUNTS)
        self._step_rows = histograms.add("step_sequences", "Sequences that a step computes tokens of.", SMALL_COUNTS)
        self._queue = histograms.add("queue_seconds", "Seconds from a request's arrival to its first step.", SECONDS)
        self._prefill = histograms.add("prefill_seconds", "Seconds from the first step to the first token.", SECONDS)
        self._decode = histograms.add("decode_seconds", "Seconds from a request's first to its last token.", SECONDS)
        self._tenants = _TenantMetrics(self.registry, max_tenants) if max_tenants else None
        self.served = Served()

    def planned(self, plan: StepPlan, seconds: float) -> None:
        num_tokens = plan.num_tokens
        self._steps.inc()
        self._batched_tokens.inc(num_tokens)
        self.step_tokens.add(num_tokens)
        self._step_rows.add(len(plan.rows))
        self._plan_time.observe(seconds)

    def stepped(self, seconds: float) -> None:
        self._step_time.observe(seconds)

    def delivered(self, events: ClientEvents) -> None:
        self.served.add(events)
        self._generated.inc(len(events.token_ids))
        self._ended.labels("completed").inc(len(events.completed))
        self._ended.labels("failed").inc(len(events.failed))
        if events.completed:
            # All at once, since all rows may end in one step.
            usages = [end.usage for end in events.completed]
            self._queue.add_all([usage.queue_s for usage in usages])
            self._prefill.add_all([usage.prefill_s for usage in usages])
            self._decode.add_all([usage.decode_s for usage in usages])
            if self._tenants is not None:
                self._tenants.completed(events.completed)

    def aborted(self, group: SequenceGroup, now: float) -> None:
        """A request was ended from outside: by its gateway, also for a stop string, or by its id."""
        self._ended.labels("aborted").inc()
        line = group.timeline
        if line.started is None:
            return
        self._queue.add(line.started - line.arrived)
        if line.first_token is not None:
            self._prefill.add(line.first_token - line.started)
            self._decode.add(now - line.first_token)
        if self._tenants is not None:
            num_prompt = len(group.request.prompt)
            self._tenants.ended(group.request.tenant, line.started - line.arrived, num_prompt, group.cached_tokens or 0)

    def fetched(self, arriving: Arriving, seconds: float) -> None:
        """The workers fetched blocks of a request."""
        self._move_time.labels("disk" if arriving.source is None else "replica").observe(seconds)

    def lost_worker(self) -> None:
        self._losses.inc()

    def found_at_fault(self, failure: RequestFailure) -> None:
        self._at_fault.labels(failure.reason).inc()

    def watch(
        self,
        scheduler_of: Callable[[], Scheduler | None],
        requests: Requests,
        block_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """Adds the state of the core and of the table of requests to scrapes. `block_bytes` returns the bytes of a
        block of the attached workers, 0 if they are not known."""
        self.registry.register(_State(scheduler_of, requests, block_bytes))
        if self._tenants is not None:
            self._tenants.watch(scheduler_of, requests)


class _State(Collector):
    """The state and counters of the core and the table of requests, read at scrape time in another thread."""

    def __init__(
        self, scheduler_of: Callable[[], Scheduler | None], requests: Requests, block_bytes: Callable[[], int]
    ) -> None:
        self._scheduler_of = scheduler_of
        self._requests = requests
        self._block_bytes = block_bytes

    def collect(self) -> Iterable[Metric]:
        requests = self._requests
        yield _gauge("unread_requests", "Requests that wait for a reader.", requests.num_unread)
        yield _gauge("durable_requests", "Durable requests that are kept.", len(requests.durable.requests))
        help_text = "Tokens of durable requests, including tokens that may still come."
        yield _gauge("durable_tokens", help_text, requests.durable.num_tokens)
        scheduler = self._scheduler_of()
        if scheduler is None:
            return
        queues = {"waiting": scheduler.waiting, "running": scheduler.running, "swapped": scheduler.swapped}
        lengths = {name: len(queue) for name, queue in queues.items()}
        yield _gauges("live_requests", "Live requests.", "queue", lengths)
        pool, host = scheduler.batch.blocks.pool, scheduler.batch.blocks.host.pool
        blocks, block_bytes = _blocks_of(pool) | {"pinned": scheduler.pins.num_pinned}, self._block_bytes()
        yield _gauges("gpu_blocks", "Blocks of the GPU pool.", "state", blocks)
        sizes = {state: number * block_bytes for state, number in blocks.items()}
        yield _gauges("gpu_bytes", "Bytes of these blocks, in all ranks together.", "state", sizes)
        help_text = "Bytes of blocks of running sequences, by kind of layers; shared ones count for each."
        kinds = zip(("full", "windowed", "states"), scheduler.batch.blocks_by_kind(), strict=True)
        by_kind = {kind: number * block_bytes for kind, number in kinds}
        yield _gauges("running_bytes", help_text, "layers", by_kind)
        yield _gauge(
            "kv_cache_usage", "Share of the GPU pool that is in use, 1 is all.", pool.num_used / pool.num_blocks
        )
        arrivals = [group.timeline.arrived for group in scheduler.waiting.all() if group.timeline.started is None]
        oldest_s = clock.monotonic() - min(arrivals) if arrivals else 0.0
        yield _gauge("oldest_waiting_seconds", "Waiting time of the oldest request that no step had yet.", oldest_s)
        yield _gauges("host_blocks", "Blocks of the host pool.", "state", _blocks_of(host))
        yield _gauge("disk_blocks", "Blocks that the workers keep on disk.", len(scheduler.tier))
        reserved = scheduler.reservations.num_blocks
        yield _gauge("arriving_blocks", "Blocks that workers fetch now.", reserved(Kind.FETCH))
        yield _gauge("offered_blocks", "Blocks kept for other replicas to fetch.", reserved(Kind.LEASE))
        moves = scheduler.move_counts
        help_text = "Requests that moved to another replica, and requests that came with blocks to fetch."
        requests_moved = {("in",): moves.requests_in, ("out",): moves.requests_out}
        yield _counters("moved_requests", help_text, ("direction",), requests_moved)
        help_text = "Blocks that came from another replica, disk or host memory, or failed to come and were computed."
        fetched = {
            ("replica", "fetched"): moves.from_replicas,
            ("replica", "failed"): moves.failed_from_replicas,
            ("disk", "fetched"): moves.from_disk,
            ("disk", "failed"): moves.failed_from_disk,
            ("host", "fetched"): moves.from_host,
        }
        yield _counters("moved_blocks", help_text, ("source", "outcome"), fetched)
        yield _counter(
            "blocks_to_host", "Blocks that the pool evicted and that were copied to host memory.", moves.to_host
        )
        yield _counter("preemptions", "Preemptions.", scheduler.num_preemptions)
        yield _counter("swap_outs", "Preemptions by swap.", scheduler.num_swap_outs)
        help_text = "Prompt tokens that were looked up in the prefix cache, once for each request."
        yield _counter("prefix_cache_queries", help_text, scheduler.num_prompt_tokens)
        yield _counter(
            "prefix_cache_hits", "Prompt tokens that were found in the prefix cache.", scheduler.num_cached_tokens
        )
        drafts = scheduler.draft_counts
        yield _counter("draft_samples", "Samples that had drafts.", drafts.num_samples)
        yield _counter("drafts", "Drafted tokens that were verified.", drafts.num_drafts)
        yield _counter("drafts_accepted", "Drafted tokens that were right.", sum(drafts.right_at))


class _TenantMetrics(Collector):
    """Metrics by tenant, for a bounded number of tenants."""

    def __init__(self, registry: CollectorRegistry, max_tenants: int) -> None:
        self._labels = TenantLabels(max_tenants)
        self._scheduler_of: Callable[[], Scheduler | None] = lambda: None
        self._requests: Requests | None = None
        make = {"registry": registry, "namespace": "quire", "subsystem": "scheduler_tenant"}
        help_text = "Seconds from the arrival of a tenant's request to its first step."
        self._queue = Histogram("queue_seconds", help_text, ["tenant"], buckets=_TENANT_SECONDS, **make)
        help_text = "Prompt tokens of a tenant's requests that have ended."
        self._queries = Counter("prefix_cache_queries", help_text, ["tenant"], **make)
        self._hits = Counter("prefix_cache_hits", "Cached prompt tokens of these requests.", ["tenant"], **make)
        registry.register(self)

    def watch(self, scheduler_of: Callable[[], Scheduler | None], requests: Requests) -> None:
        """Sets the objects that scrapes read and that map requests to tenants."""
        self._scheduler_of, self._requests = scheduler_of, requests

    def completed(self, ends: Sequence[RequestEnd]) -> None:
        assert self._requests is not None
        for end in ends:
            if (owned := self._requests.get(end.handle)) is not None:
                self.ended(owned.tenant, end.usage.queue_s, end.usage.prompt_tokens, end.usage.cached_tokens)

    def ended(self, tenant: str, queue_s: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request that was in a step has ended."""
        label = self._labels.of(tenant)
        self._queue.labels(label).observe(queue_s)
        self._queries.labels(label).inc(num_prompt_tokens)
        self._hits.labels(label).inc(num_cached_tokens)

    def collect(self) -> Iterable[Metric]:
        live = GaugeMetricFamily(f"{_PREFIX}tenant_live_requests", "Live requests.", labels=["tenant", "queue"])
        blocks = GaugeMetricFamily(
            f"{_PREFIX}tenant_blocks",
            "Blocks of a tenant's running sequences, in their tables and of their states; shared ones count for each.",
            labels=["tenant"],
        )
        scheduler = self._scheduler_of()
        if scheduler is not None:
            for name in ("waiting", "running", "swapped"):
                queue = getattr(scheduler, name)
                numbers = self._by_label((tenant, queue.num_of(tenant)) for tenant in list(queue.tenants()))
                for label, number in numbers.items():
                    live.add_metric([label, name], number)
            for label, number in self._by_label(scheduler.batch.blocks_by_tenant().items()).items():
                blocks.add_metric([label], number)
        yield live
        yield blocks

    def _by_label(self, numbers: Iterable[tuple[str, int]]) -> dict[str, int]:
        totals: dict[str, int] = {}
        for tenant, number in numbers:
            label = self._labels.of(tenant)
            totals[label] = totals.get(label, 0) + number
        return totals


def _blocks_of(pool: PrefixIndex) -> dict[str, int]:
    return {"free": pool.num_free - pool.num_cached, "cached": pool.num_cached, "used": pool.num_used}


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, help_text, value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, help_text, value)


def _counters(name: str, help_text: str, labels: Sequence[str], values: Mapping[_Labels, float]) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, help_text, labels=labels)
    for each, value in values.items():
        family.add_metric(each, value)
    return family


def _gauges(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, help_text, labels=[label])
    for state, value in values.items():
        family.add_metric([state], value)
    return family
