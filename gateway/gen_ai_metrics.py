"""The gateway's metrics under the names of OpenTelemetry's conventions for generative AI: on /metrics, and by OTLP.

A request is counted once, when it is over; a resumed stream is not counted again. docs/metrics.md has the table of
names.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.replicas.events import Usage
from gateway.replicas.live import LiveRequest
from quire.service.histograms import Distribution, histogram_family

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter


@dataclass(frozen=True, slots=True)
class _Histogram:
    """A histogram of the conventions, with the bounds that they advise."""

    name: str
    unit: str
    help: str
    bounds: tuple[float, ...]

    @property
    def prometheus_name(self) -> str:
        name = self.name.replace(".", "_")
        return f"{name}_seconds" if self.unit == "s" else name


_DURATION = _Histogram(
    "gen_ai.server.request.duration",
    "s",
    "Seconds from the arrival of a request to its end.",
    tuple(0.01 * 2**power for power in range(14)),
)
_FIRST_TOKEN = _Histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "Seconds from the arrival of a completed request to its first token.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_OUTPUT_TOKEN = _Histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean seconds per output token after the first one, of a completed request.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_TOKENS = _Histogram(
    "gen_ai.client.token.usage",
    "{token}",
    "Tokens of a completed request, by type; cached and reasoning tokens are parts of input and output tokens.",
    tuple(4.0**power for power in range(14)),
)
_ALL = (_DURATION, _FIRST_TOKEN, _OUTPUT_TOKEN, _TOKENS)
_OF_REQUEST = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model")
_OWN = {_DURATION: "error.type", _TOKENS: "gen_ai.token.type"}


class GenAiMetrics(Collector):
    """The histograms of all models. They are on /metrics if they are registered there."""

    def __init__(self, sink: tuple["Meter", Callable[[], None]] | None) -> None:
        """Each observation is also given to the meter of `sink`, if there is one; `close` calls its function."""
        meter, self.close = sink or (None, lambda: None)
        self._series: dict[tuple[_Histogram, tuple[str, ...]], Distribution] = {}
        self._sent = {
            each: meter.create_histogram(
                each.name, each.unit, each.help, explicit_bucket_boundaries_advisory=each.bounds
            )
            for each in _ALL
            if meter is not None
        }

    def add(
        self, model: str, operation: str, live: LiveRequest, outcome: str, usage: Usage | None, seconds: float
    ) -> None:
        """Counts a request that is over; `usage` is None if it did not complete, and `outcome` says why."""
        adapter = live.request.adapter
        names = operation, "quire", model if adapter is None else adapter.name, model
        self._observe(_DURATION, names, seconds, "" if usage is not None else outcome)
        if usage is None:
            return
        if live.seconds_to_first_token is not None:
            self._observe(_FIRST_TOKEN, names, live.seconds_to_first_token)
        if (longest := max(len(stream.token_ids) for stream in live.sequences)) > 1:
            self._observe(_OUTPUT_TOKEN, names, usage.decode_ms / 1000 / (longest - 1))
        tokens = {
            "input": usage.prompt_tokens,
            "output": usage.generated_tokens,
            "input.cache_read": usage.cached_tokens,
            "output.reasoning": usage.reasoning_tokens,
        }
        for kind, count in tokens.items():
            self._observe(_TOKENS, names, count, kind)

    def _observe(self, histogram: _Histogram, names: tuple[str, ...], value: float, own: str | None = None) -> None:
        """Adds a value; `own` is the value of the histogram's own attribute, empty if it is absent."""
        labels = names if own is None else (*names, own)
        series = self._series.get((histogram, labels))
        if series is None:
            series = self._series[histogram, labels] = Distribution(histogram.bounds)
        series.add(value)
        if (sent := self._sent.get(histogram)) is not None:
            attributes: Mapping[str, str] = dict(zip(_attributes_of(histogram), labels, strict=True))
            sent.record(value, {name: each for name, each in attributes.items() if each})

    def collect(self) -> Iterable[Metric]:
        series = list(self._series.items())
        for histogram in _ALL:
            names = [name.replace(".", "_") for name in _attributes_of(histogram)]
            own = [(labels, distribution) for (of, labels), distribution in series if of is histogram]
            yield histogram_family(histogram.prometheus_name, histogram.help, names, own)


def _attributes_of(histogram: _Histogram) -> tuple[str, ...]:
    return (*_OF_REQUEST, _OWN[histogram]) if histogram in _OWN else _OF_REQUEST
