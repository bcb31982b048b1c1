"""Prometheus metrics of the scheduler."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import ClientEvents, RequestFailure, StepPlan
from scheduler_svc.service.requests import Requests

_PREFIX = "quire_scheduler_"
_FAST = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)


class SchedulerMetrics:
    """Counters that the step loop increases, in a registry of their own."""

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

    def delivered(self, events: ClientEvents) -> None:
        self._generated.inc(len(events.token_ids))
        self._ended.labels("completed").inc(len(events.completed))
        self._ended.labels("failed").inc(len(events.failed))

    def aborted(self, count: int) -> None:
        """`count` requests were ended from outside: by their gateways, or by their ids."""
        self._ended.labels("aborted").inc(count)

    def lost_worker(self) -> None:
        self._losses.inc()

    def found_at_fault(self, failure: RequestFailure) -> None:
        self._at_fault.labels(failure.reason).inc()

    def watch(self, scheduler_of: Callable[[], Scheduler | None], requests: Requests) -> None:
        """Scrapes read the state of the core and of the table of requests, too."""
        self.registry.register(_State(scheduler_of, requests))


class _State(Collector):
    """The state and counters of the core and the table of requests, read at scrape time in another thread."""

    def __init__(self, scheduler_of: Callable[[], Scheduler | None], requests: Requests) -> None:
        self._scheduler_of = scheduler_of
        self._requests = requests

    def collect(self) -> Iterable[Metric]:
        requests = self._requests
        yield _gauge("unread_requests", "Requests that wait for a reader.", requests.num_unread)
        yield _gauge("durable_requests", "Durable requests that are kept.", requests.num_durable)
        help_text = "Tokens of durable requests, those that may still come included."
        yield _gauge("durable_tokens", help_text, requests.num_durable_tokens)
        scheduler = self._scheduler_of()
        if scheduler is None:
            return
        queues = {"waiting": scheduler.waiting, "running": scheduler.running, "swapped": scheduler.swapped}
        lengths = {name: len(queue) for name, queue in queues.items()}
        yield _gauges("live_requests", "Live requests.", "queue", lengths)
        pool, host = scheduler.batch.blocks.pool, scheduler.swap_space.pool
        blocks = {
            "free": pool.num_free - pool.num_cached,
            "cached": pool.num_cached,
            "used": pool.num_used,
            "pinned": scheduler.pins.num_pinned,
        }
        yield _gauges("gpu_blocks", "Blocks of the GPU pool.", "state", blocks)
        yield _gauges(
            "host_blocks", "Blocks of the host pool.", "state", {"free": host.num_free, "used": host.num_used}
        )
        yield CounterMetricFamily(f"{_PREFIX}preemptions", "Preemptions.", scheduler.num_preemptions)
        yield CounterMetricFamily(f"{_PREFIX}swap_outs", "Preemptions by swap.", scheduler.num_swap_outs)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, help_text, value)


def _gauges(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, help_text, labels=[label])
    for state, value in values.items():
        family.add_metric([state], value)
    return family
