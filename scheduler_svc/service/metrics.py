"""Prometheus metrics of the scheduler."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from scheduler_svc.core.events import ClientEvents, RequestFailure
from scheduler_svc.core.request import ClientId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan
from scheduler_svc.service.requests import Requests

_FAST = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)


class SchedulerMetrics:
    """Counters that the step loop feeds, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        make = {"registry": self.registry, "namespace": "quire", "subsystem": "scheduler"}
        self._steps = Counter("steps", "Steps planned.", **make)
        self._batched_tokens = Counter("batched_tokens", "Tokens that were computed, prefill and decode.", **make)
        self._generated = Counter("generated_tokens", "Tokens handed to gateways.", **make)
        self._ended = Counter("requests", "Requests that ended, by outcome.", ["outcome"], **make)
        self._losses = Counter("worker_losses", "Losses of a worker that was attached.", **make)
        self._at_fault = Counter("requests_at_fault", "Requests that the worker was lost for.", ["reason"], **make)
        self._plan_time = Histogram("plan_seconds", "Time to plan a step.", buckets=_FAST, **make)
        self._step_time = Histogram("step_seconds", "From planning a step to its result.", buckets=_STEP, **make)

    def planned(self, plan: StepPlan, seconds: float) -> None:
        self._steps.inc()
        self._batched_tokens.inc(plan.num_tokens)
        self._plan_time.observe(seconds)

    def stepped(self, seconds: float) -> None:
        self._step_time.observe(seconds)

    def delivered(self, events: dict[ClientId, ClientEvents]) -> None:
        for batch in events.values():
            self._generated.inc(len(batch.token_ids))
            self._ended.labels("completed").inc(len(batch.completed))
            self._ended.labels("failed").inc(len(batch.failed))

    def aborted(self, count: int) -> None:
        """`count` requests were ended from outside: by their gateways, or by their ids."""
        self._ended.labels("aborted").inc(count)

    def lost_worker(self) -> None:
        self._losses.inc()

    def found_at_fault(self, failure: RequestFailure) -> None:
        self._at_fault.labels(failure.reason).inc()

    def watch(self, state: Collector) -> None:
        """Scrapes read these gauges, too."""
        self.registry.register(state)


class StateCollector(Collector):
    """What the core holds and has done, read at scrape time."""

    def __init__(self, scheduler_of: Callable[[], Scheduler | None]) -> None:
        self._scheduler_of = scheduler_of

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        scheduler = self._scheduler_of()
        if scheduler is None:
            return
        pool = scheduler.batch.blocks.pool
        requests = GaugeMetricFamily("quire_scheduler_live_requests", "Live requests.", labels=["queue"])
        requests.add_metric(["waiting"], len(scheduler.waiting))
        requests.add_metric(["running"], len(scheduler.running))
        requests.add_metric(["swapped"], len(scheduler.swapped))
        blocks = GaugeMetricFamily("quire_scheduler_gpu_blocks", "Blocks of the GPU pool.", labels=["state"])
        blocks.add_metric(["free"], pool.num_free - pool.num_cached)
        blocks.add_metric(["cached"], pool.num_cached)
        blocks.add_metric(["used"], pool.num_used)
        blocks.add_metric(["pinned"], scheduler.pins.num_pinned)
        host = scheduler.swap_space.pool
        host_blocks = GaugeMetricFamily("quire_scheduler_host_blocks", "Blocks of the host pool.", labels=["state"])
        host_blocks.add_metric(["free"], host.num_free)
        host_blocks.add_metric(["used"], host.num_used)
        preempted = CounterMetricFamily("quire_scheduler_preemptions", "Preemptions.")
        preempted.add_metric([], scheduler.num_preemptions)
        swapped = CounterMetricFamily("quire_scheduler_swap_outs", "Preemptions by swap.")
        swapped.add_metric([], scheduler.num_swap_outs)
        yield from (requests, blocks, host_blocks, preempted, swapped)


class RequestCollector(Collector):
    """Gauges of what is kept of requests, read at scrape time."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def collect(self) -> Iterable[GaugeMetricFamily]:
        unread = GaugeMetricFamily("quire_scheduler_unread_requests", "Requests that wait for a reader.")
        unread.add_metric([], self._requests.num_unread)
        requests = GaugeMetricFamily("quire_scheduler_durable_requests", "Durable requests that are kept.")
        requests.add_metric([], self._requests.num_durable)
        tokens = GaugeMetricFamily(
            "quire_scheduler_durable_tokens", "Tokens of durable requests, those that may still come included."
        )
        tokens.add_metric([], self._requests.num_durable_tokens)
        yield from (unread, requests, tokens)
