"""Latencies and throughput of a run, from its records."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from quire.load.records import RequestRecord

_LATENCIES = ("ttft", "tpot", "itl", "e2e", "normalized")
_NUMBERS = ("request_rate", "duration_s", "requests", "completed", "requests_per_s", "output_tokens_per_s")
_LIMIT = re.compile(r"(?P<name>\w+)=(?P<number>\d+(?:\.\d+)?)(?P<unit>ms|s)")


@dataclass(frozen=True, slots=True)
class Slo:
    """The limits that a request must meet to count as good, in seconds; None is no limit.

    Attributes:
        itl: On the longest pause between two chunks of a sequence.
    """

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None
    normalized: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """`ttft=500ms,tpot=50ms`. Raises ValueError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            match = _LIMIT.fullmatch(part.strip())
            if match is None or match["name"] not in _LATENCIES:
                expected = f"NAME=NUMBERms or NAME=NUMBERs, with a name among {', '.join(_LATENCIES)}"
                raise ValueError(f'"{part.strip()}" is no limit; expected {expected}')
            if match["name"] in limits:
                raise ValueError(f"{match['name']} has two limits")
            limits[match["name"]] = float(match["number"]) / (1e3 if match["unit"] == "ms" else 1)
        return cls(**limits)

    def is_met(self, record: RequestRecord) -> bool:
        """Whether the request ended well and within all limits; a latency that it does not have breaks none."""
        if record.error is not None:
            return False
        gaps = record.gaps_s() if self.itl is not None else ()
        pairs = (
            (self.ttft, record.ttft_s),
            (self.tpot, record.tpot_s),
            (self.itl, float(max(gaps)) if len(gaps) else None),
            (self.e2e, record.latency_s),
            (self.normalized, record.normalized_latency_s),
        )
        return all(limit is None or value is None or value <= limit for limit, value in pairs)

    def __str__(self) -> str:
        limits = {name: value for name, value in asdict(self).items() if value is not None}
        return ",".join(f"{name}={value * 1e3:g}ms" for name, value in limits.items())


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a latency in seconds over `count` requests, or pauses."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float | None] | np.ndarray) -> Self | None:
        """None if there is no value."""
        known = np.asarray([value for value in values if value is not None], dtype=np.float64)
        if not len(known):
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(known, (50, 90, 99)))
        return cls(len(known), float(known.mean()), p50, p90, p99, float(known.max()))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the fields. Raises KeyError, TypeError or ValueError if they are something else."""
        count, *latencies = (fields[each.name] for each in dataclasses.fields(cls))
        return cls(int(count), *map(float, latencies))


@dataclass(frozen=True, slots=True)
class Report:
    """One run at one rate. Latencies and tokens are of requests that ended well.

    Attributes:
        request_rate: Arrivals a second that were planned; infinite where everything arrived at once.
        duration_s: From the beginning to the last end.
        cached_tokens: Cached tokens of all prompts; None if the server does not say. Likewise `preemptions`.
        send_delay: Delay of sending: waiting for a slot under a limit on concurrency, or for the client.
        goodput: Requests a second that kept the SLO; None without one. `slo_share` is their share of all requests.
        client_cpu_share: Processor time of the load generator by duration: 1.0 is a whole core. None in simulations.
        counters: Further counters of a simulation or a server, by name.
    """

    request_rate: float
    max_concurrency: int | None
    duration_s: float
    requests: int
    completed: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    preemptions: int | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Statistics | None
    tpot: Statistics | None
    itl: Statistics | None
    e2e: Statistics | None
    normalized: Statistics | None
    send_delay: Statistics | None
    slo: Slo | None
    goodput: float | None
    slo_share: float | None
    client_cpu_share: float | None = None
    counters: Mapping[str, float] | None = None

    def as_json(self) -> dict[str, Any]:
        """With an infinite rate as "inf", which JSON has no number for."""
        fields = asdict(self)
        fields["request_rate"] = "inf" if math.isinf(self.request_rate) else self.request_rate
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the result of `as_json`. KeyError, TypeError or ValueError for anything else."""
        values: dict[str, Any] = {**fields, "request_rate": float(fields["request_rate"])}
        for name in _NUMBERS:
            if not isinstance(values[name], int | float):
                raise TypeError(f"{name} is {values[name]!r:.40}")
        if not isinstance(values["max_concurrency"], int | None):
            raise TypeError(f"max_concurrency is {values['max_concurrency']!r:.40}")
        for name in (*_LATENCIES, "send_delay"):
            values[name] = None if fields[name] is None else Statistics.from_json(fields[name])
        values["slo"] = None if fields["slo"] is None else Slo(**fields["slo"])
        return cls(**values)


def make_report(
    records: Sequence[RequestRecord],
    *,
    request_rate: float,
    max_concurrency: int | None = None,
    slo: Slo | None = None,
    client_cpu_s: float | None = None,
    counters: Mapping[str, float] | None = None,
) -> Report:
    """The report of a run that began at time 0. ValueError without any record."""
    if not records:
        raise ValueError("there is no request to report")
    good = [record for record in records if record.error is None]
    duration_s = max(record.end_s for record in records)
    output_tokens = sum(record.output_tokens for record in good)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in good)
    num_met = None if slo is None else sum(map(slo.is_met, records))
    sent = [record for record in records if record.sent_s is not None]
    return Report(
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        duration_s=duration_s,
        requests=len(records),
        completed=len(good),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        prompt_tokens=prompt_tokens,
        cached_tokens=_sum_of_known(record.cached_tokens for record in good),
        output_tokens=output_tokens,
        preemptions=_sum_of_known(record.preemptions for record in good),
        requests_per_s=_rate(len(good), duration_s),
        output_tokens_per_s=_rate(output_tokens, duration_s),
        total_tokens_per_s=_rate(prompt_tokens + output_tokens, duration_s),
        ttft=Statistics.of(record.ttft_s for record in good),
        tpot=Statistics.of(record.tpot_s for record in good),
        itl=Statistics.of(np.concatenate([record.gaps_s() for record in good]) if good else ()),
        e2e=Statistics.of(record.latency_s for record in good),
        normalized=Statistics.of(record.normalized_latency_s for record in good),
        send_delay=Statistics.of((record.sent_s or 0.0) - record.arrival_s for record in sent),
        slo=slo,
        goodput=None if num_met is None else _rate(num_met, duration_s),
        slo_share=None if num_met is None else num_met / len(records),
        client_cpu_share=None if client_cpu_s is None else _rate(client_cpu_s, duration_s),
        counters=counters,
    )


def _sum_of_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0
