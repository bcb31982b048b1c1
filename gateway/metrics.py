"""The metrics of the gateway."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.replicas.events import Usage
from gateway.replicas.live import LiveRequest
from quire.rpc.errors import QuireError

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


@dataclass(slots=True)
class Durations:
    """A number of durations and their sum."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


class RequestStatistics:
    """Sums over all accepted requests that are over, of any front end.

    Attributes:
        completed: Requests that completed, from their arrival to the end of their call.
        failed: Requests that failed or were abandoned, likewise.
        queued: Of the completed ones, the time until the first step that ran them.
        computed: Of the completed ones, the time from there to their last token.
        last_completed_at_s: When the last one completed, in seconds since the Unix epoch; None before the first one.
    """

    def __init__(self) -> None:
        self.completed = Durations()
        self.failed = Durations()
        self.queued = Durations()
        self.computed = Durations()
        self.last_completed_at_s: float | None = None

    def add(self, seconds: float, usage: Usage | None) -> None:
        """`usage` is None for a request that did not complete."""
        if usage is None:
            self.failed.add(seconds)
            return
        self.completed.add(seconds)
        self.queued.add(usage.queue_ms / 1000)
        self.computed.add((usage.prefill_ms + usage.decode_ms) / 1000)
        self.last_completed_at_s = time.time()


class GatewayMetrics:
    """The gateway's metrics, in a registry of their own.

    Attributes:
        statistics: Sums over the requests that are over, for those who ask for them otherwise.
    """

    def __init__(self) -> None:
        self.statistics = RequestStatistics()
        self.registry = CollectorRegistry()
        self._requests = self._counter(
            "requests", "Requests that were accepted, by how they ended.", labels=["outcome"]
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generated_tokens = self._counter("generated_tokens", "Tokens generated for requests that are over.")
        self._live = Gauge("quire_gateway_live_requests", "Requests that run now.", registry=self.registry)
        self._first_token = Histogram(
            "quire_gateway_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._resubmissions = self._counter("resubmissions", "Requests sent again after a scheduler was lost.")

        self._refusals = self._counter(
            "refused_callers",
            "Calls that were refused for their API key: there is none, or it does not allow them, or not now.",
            labels=["reason"],
        )
        self._keys_reload_failures = self._counter(
            "keys_reload_failures", "Times that a changed file of API keys could not be used."
        )
        self._refused_connections = self._counter(
            "refused_http_connections", "HTTP connections that were closed because there were too many."
        )

    def _counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"quire_gateway_{name}", help, labels, registry=self.registry)

    def count_refused_connection(self) -> None:
        """Counts an HTTP connection that was one too many."""
        self._refused_connections.inc()

    def count_refused_caller(self, reason: str) -> None:
        """Counts a call that was refused for the API key that it showed, or for showing none."""
        self._refusals.labels(reason).inc()

    def count_keys_reload_failure(self) -> None:
        """Counts a change of the files of keys that was not taken over."""
        self._keys_reload_failures.inc()

    def watch_schedulers(self, count_connected: Callable[[], int]) -> None:
        """Reports the number of connected schedulers, which `count_connected` tells when it is asked."""
        gauge = Gauge("quire_gateway_connected_schedulers", "Schedulers with an open stream.", registry=self.registry)
        gauge.set_function(count_connected)

    @contextmanager
    def track(self, live: LiveRequest) -> Iterator[None]:
        """Counts a request while the context runs, and how it ended when it is left."""
        self._prompt_tokens.inc(len(live.request.prompt_token_ids))
        try:
            with self._tracked(live):
                yield
        finally:
            if live.seconds_to_first_token is not None:
                self._first_token.observe(live.seconds_to_first_token)

    @contextmanager
    def track_resumed(self, live: LiveRequest, num_known_tokens: int) -> Iterator[None]:
        """Counts a resumed stream as a request of its own, without its prompt and the output that was there before."""
        with self._tracked(live, num_known_tokens):
            yield

    @contextmanager
    def _tracked(self, live: LiveRequest, num_known_tokens: int = 0) -> Iterator[None]:
        started_at = time.monotonic()
        outcome = "abandoned"
        try:
            with self._live.track_inprogress():
                yield
            outcome = "completed"
        except QuireError as error:
            outcome = error.code.name.lower()
            raise
        finally:
            self._requests.labels(outcome).inc()
            self.statistics.add(time.monotonic() - started_at, live.usage if outcome == "completed" else None)
            self._generated_tokens.inc(max(live.num_generated_tokens - num_known_tokens, 0))
            self._resubmissions.inc(max(live.submissions - 1, 0))
