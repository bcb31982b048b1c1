"""One modelled replica: the configuration of its core, and the cost of its steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.load import LoadRequest, Report, RequestRecord, Slo, make_report
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from simulator.costs import CostModel
from simulator.engine import MAX_STEPS_IN_FLIGHT, Device, Simulation, simulate
from simulator.fleet import Fleet, FleetRun
from simulator.load import LoadArrivals, records
from simulator.memory import Limit
from simulator.tokens import TokenSource, fake_tokens


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica, or a fleet of equal ones, to simulate.

    Attributes:
        facts: The settings that the results depend on, by name.
        num_tenants: Number of tenants that requests are assigned to, in turn.
        tokens: Makes the device's samples.
        frontend_latency_s: Time that clients, gateways and the network add to each answer.
        fleet: The number of replicas, and how requests move between them.
    """

    config: SchedulerConfig
    costs: CostModel
    vocab_size: int
    facts: Mapping[str, object] = field(default_factory=dict[str, object])
    max_steps_in_flight: int = MAX_STEPS_IN_FLIGHT
    num_tenants: int = 1
    frontend_latency_s: float = 0.0
    tokens: TokenSource = fake_tokens
    fleet: Fleet = field(default_factory=Fleet)

    def run(
        self,
        load: Iterable[LoadRequest],
        *,
        max_concurrency: int | None = None,
        is_closed: bool = False,
        duration_s: float | None = None,
        on_end: Callable[[int, int], None] | None = None,
    ) -> "Outcome":
        """Serves a load with the pacing of `LoadArrivals`, which reports progress to `on_end`. Raises ValueError if
        lengths are not known in tokens."""
        arrivals = LoadArrivals(
            load,
            max_concurrency=max_concurrency,
            is_closed=is_closed,
            duration_s=duration_s,
            num_tenants=self.num_tenants,
            on_end=on_end,
        )
        options: dict[str, Any] = {"tokens": self.tokens, "max_steps_in_flight": self.max_steps_in_flight}
        if self.fleet.num_replicas == 1:
            simulation = simulate(arrivals, self.config, self.costs, **options)
        else:
            devices = [Device(Scheduler(self.config), self.costs, **options) for _ in self.fleet.roles]
            simulation = FleetRun(arrivals, devices, self.fleet).to_end()
        return Outcome(simulation, records(simulation, arrivals, self.frontend_latency_s), max_concurrency)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated run."""

    simulation: Simulation
    records: Sequence[RequestRecord]
    max_concurrency: int | None = None

    def report(self, request_rate: float, slo: Slo | None = None) -> Report:
        """The report of a real run, and in addition counters of memory and steps."""
        return make_report(
            self.records,
            request_rate=request_rate,
            max_concurrency=self.max_concurrency,
            slo=slo,
            counters=self.counters(),
        )

    def limits(self) -> dict[Limit, float]:
        """The share of the time in steps for which each limit kept other requests out, greatest first."""
        seconds: dict[Limit, float] = {}
        for step in self.simulation.steps:
            seconds[step.limit] = seconds.get(step.limit, 0.0) + step.over - step.began
        total = sum(seconds.values()) or 1.0
        greatest_first = sorted(seconds.items(), key=lambda item: -item[1])
        return {limit: share / total for limit, share in greatest_first}

    def counters(self) -> dict[str, float]:
        """Means over the time in steps, and totals."""
        simulation = self.simulation
        if not simulation.steps:
            return {}
        column = simulation.column
        seconds = column("device_seconds")
        weights = seconds if seconds.sum() > 0 else np.ones_like(seconds)

        def mean(values: np.ndarray) -> float:
            return float(np.average(values, weights=weights))

        total = column("total")
        shares = {name: mean(column(name) / total) for name in ("tokens", "reserved", "wasted", "shared", "cached")}
        limits = self.limits()
        figures = {
            "steps": len(simulation.steps),
            "step_ms": float(seconds.mean()) * 1e3,
            "device_busy_share": float(seconds.sum() / (simulation.seconds * simulation.num_devices or 1.0)),
            "running_mean": mean(column("num_running")),
            "running_max": float(column("num_running").max()),
            "waiting_mean": mean(column("num_waiting") + column("num_swapped")),
            "computed_tokens": float(column("num_tokens").sum()),
            "preemptions": simulation.num_preemptions,
            "swap_outs": simulation.num_swap_outs,
            "draft_tokens": simulation.num_drafts,
            "accepted_draft_tokens": simulation.num_right_drafts,
            **{f"kv_{name}_share": share for name, share in shares.items()},
            **{f"limited_by_{limit.value}_share": limits.get(limit, 0.0) for limit in Limit},
        }
        if simulation.num_devices > 1:
            pauses = simulation.pauses or [0.0]
            figures |= {"moves": len(simulation.pauses), "move_pause_p99_ms": 1e3 * np.percentile(pauses, 99)}
        return {name: round(float(value), 6) for name, value in figures.items()}
