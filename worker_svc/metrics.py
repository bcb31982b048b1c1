"""The Prometheus metrics of a worker."""

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quire.service.metrics import CallCounts
from worker_svc.step import StepOutput, WorkerInfo

_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class WorkerMetrics:
    """Metrics of one worker process, in a registry of its own.

    Attributes:
        grpc_calls: Finished gRPC calls, without health checks.
        sessions, step_failures: Counters, which the step stream increments.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.grpc_calls = CallCounts("worker", self.registry)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self._steps = counter("quire_worker_steps", "Steps that finished.")
        self._tokens = counter("quire_worker_tokens", "Tokens that steps computed.")
        self._sampled = counter("quire_worker_sampled_tokens", "Tokens that were sampled.")
        self._row_failures = counter("quire_worker_row_failures", "Rows whose logits are not finite.")
        self.step_failures = counter("quire_worker_step_failures", "Steps that failed on the device.")
        self.sessions = counter("quire_worker_sessions", "Schedulers that attached.")
        self._blocks = gauge("quire_worker_kv_blocks", "Blocks of the KV pool, by where they are.", ("where",))
        self._adapters = gauge("quire_worker_adapter_bytes", "Memory of the LoRA adapters that are loaded.")
        self._moved = counter(
            "quire_worker_moved_bytes",
            "Bytes of KV blocks that went to and came from workers of other replicas; failed ones did not come whole.",
            ("what",),
        )
        for what in ("sent", "received", "failed"):
            self._moved.labels(what)
        self._on_disk = counter(
            "quire_worker_kv_disk_bytes",
            "Bytes of KV blocks that went to --kv-disk and came back from it; a failed write is the last one.",
            ("what",),
        )
        for what in ("written", "read", "failed"):
            self._on_disk.labels(what)
        self._busy = gauge("quire_worker_device_busy_seconds", "How long the device is in its current step.")
        stages = Histogram(
            "quire_worker_step_seconds",
            "Time of a step, by stage.",
            ("stage",),
            buckets=_STEP_SECONDS,
            registry=self.registry,
        )
        self._queue, self._cache_operations = stages.labels("queue"), stages.labels("cache_operations")
        self._model, self._sample = stages.labels("model"), stages.labels("sample")

    def describe(self, info: WorkerInfo, busy_ms: Callable[[], int], adapter_bytes: Callable[[], int]) -> None:
        """Sets the metrics that no step reports."""
        self._blocks.labels("device").set(info.pool.num_gpu_blocks)
        self._blocks.labels("host").set(info.pool.num_host_blocks)
        self._busy.set_function(lambda: busy_ms() / 1000)
        self._adapters.set_function(adapter_bytes)

    def step_finished(self, output: StepOutput) -> None:
        """A step has its output."""
        timings = output.timings
        self._steps.inc()
        self._tokens.inc(output.num_computed_tokens)
        self._sampled.inc(output.num_sampled_tokens)
        # Rows that a matcher refused to sample have finite logits.
        self._row_failures.inc(len(output.failed_rows) - len(output.refusals) + len(output.non_finite_chunks))
        self._queue.observe(timings.queue_us / 1e6)
        self._cache_operations.observe(timings.cache_operations_us / 1e6)
        self._model.observe(timings.model_us / 1e6)
        self._sample.observe(timings.sample_us / 1e6)

    def moved(self, what: str, num_bytes: int) -> None:
        """Blocks went to another worker ("sent"), came from one ("received"), or did not come ("failed")."""
        self._moved.labels(what).inc(num_bytes)

    def on_disk(self, what: str, num_bytes: int) -> None:
        """Blocks went to disk ("written"), came from there ("read"), or could not be written ("failed")."""
        self._on_disk.labels(what).inc(num_bytes)
