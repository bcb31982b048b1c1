"""The Prometheus metrics of a worker."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quire.service.metrics import CallCounts
from worker_svc.step import StepOutput, WorkerInfo

_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class WorkerMetrics:
    """Metrics of one worker process, in a registry of its own.

    Attributes:
        grpc_calls: Finished gRPC calls, without health checks.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.grpc_calls = CallCounts("worker", self.registry)
        self._steps = Counter("quire_worker_steps", "Steps that finished.", registry=self.registry)
        self._tokens = Counter("quire_worker_tokens", "Tokens that steps computed.", registry=self.registry)
        self._sampled = Counter("quire_worker_sampled_tokens", "Tokens that were sampled.", registry=self.registry)
        self._row_failures = Counter(
            "quire_worker_row_failures", "Rows whose logits are not finite.", registry=self.registry
        )
        self._step_failures = Counter(
            "quire_worker_step_failures", "Steps that failed on the device.", registry=self.registry
        )
        self._sessions = Counter("quire_worker_sessions", "Schedulers that attached.", registry=self.registry)
        self._blocks = Gauge(
            "quire_worker_kv_blocks", "Blocks of the KV pool, by where they are.", ("where",), registry=self.registry
        )
        self._adapters = Gauge(
            "quire_worker_adapter_bytes", "Memory of the LoRA adapters that are loaded.", registry=self.registry
        )
        self._moved = Counter(
            "quire_worker_moved_bytes",
            "Bytes of KV blocks that went to and came from workers of other replicas; failed ones did not come whole.",
            ("what",),
            registry=self.registry,
        )
        for what in ("sent", "received", "failed"):
            self._moved.labels(what)
        self._on_disk = Counter(
            "quire_worker_kv_disk_bytes",
            "Bytes of KV blocks that went to --kv-disk and came back from it; a failed write is the last one.",
            ("what",),
            registry=self.registry,
        )
        for what in ("written", "read", "failed"):
            self._on_disk.labels(what)
        self._busy = Gauge(
            "quire_worker_device_busy_seconds", "How long the device is in its current step.", registry=self.registry
        )
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

    def attached(self) -> None:
        """A scheduler has attached."""
        self._sessions.inc()

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

    def step_failed(self) -> None:
        """A step failed on the device."""
        self._step_failures.inc()
