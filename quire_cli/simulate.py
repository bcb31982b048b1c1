"""`quire simulate`: simulates the scheduler's core on a modelled device, in virtual time."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Self

from quire.load import LoadRequest, LoadResult, Report, Run
from quire.load.plots import plot
from quire.runtime.settings import ConfigurationError, load_settings, parse_bytes, setting, to_argv
from quire.version import VERSION
from quire_cli.bench.flags import MAX_REQUESTS, MAX_SECONDS, LoadFlags
from quire_cli.bench.plan import Load, PlannedRun, read_file
from quire_cli.bench.progress import Progress
from quire_cli.bench.table import make_errors, make_table
from scheduler_svc.core.config import PolicyKind, PreemptionMode, SchedulerConfig
from simulator.costs import CostModel
from simulator.fleet import Fleet
from simulator.hardware import Hardware
from simulator.load import check_simulated
from simulator.measured import Measured, Trace
from simulator.models import DTYPE_BYTES, MODELS, ModelShape
from simulator.replica import Outcome, Replica
from simulator.roofline import Roofline
from simulator.sweep import GREATEST_RATE, Found, combinations, draw, highest_rate, parse_sweep
from simulator.tokens import SyntheticDrafts, fake_tokens, fixed_tokens

PROGRAM = "quire simulate"
_SWAP_SPACE = 4 << 30
"""Bytes of host memory for swapped blocks, the default of a worker on a GPU."""
_MAX_BLOCKS = 1 << 24
"""Maximum blocks of a pool, as a scheduler accepts it from its workers."""
_LOW_EXPLAINED = 0.5
"""Share of the variance. A lower one means that the times of traced steps depended on other things than their work."""
_INTERRUPTED_EXIT_STATUS = 130
_MIN_REQUESTS = 10
"""Minimum requests at the lowest rate that a sweep tries."""


@dataclass(frozen=True, slots=True)
class BlockCount:
    """A number of blocks, or a share of the blocks that fit."""

    value: float
    is_share: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        try:
            count = cls(float(text[:-1]) / 100, True) if text.endswith("%") else cls(int(text), False)
        except ValueError:
            raise ValueError("expected a whole number of blocks, or a share of them such as 50%") from None
        if not (0 < count.value <= 1 if count.is_share else count.value >= 1):
            raise ValueError("expected at least 1 block, or more than 0% and at most 100%")
        return count

    def of(self, fitting: int) -> int:
        return max(1, int(self.value * fitting)) if self.is_share else int(self.value)

    def __str__(self) -> str:
        return f"{100 * self.value:g}%" if self.is_share else str(self.value)


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(Path(part) for part in text.split(",") if part)


@dataclass(frozen=True)
class DeviceFlags:
    """The device and its model"""

    hardware: str | None = setting(
        None, "device by name: a100-40gb, a100-80gb, h100 or h200, and NAME-xN for N of them", metavar="NAME"
    )
    model: str | None = setting(
        None,
        f"model by name: {', '.join(MODELS)} (the one that goes with the hardware)",
        variable="QUIRE_SIMULATE_MODEL",
        metavar="NAME",
    )
    model_config: Path | None = setting(
        None, "directory whose config.json describes the model, instead of its name", metavar="DIR"
    )
    dtype: str = setting("auto", "type of weights and KV pool; auto is the model's", choices=("auto", *DTYPE_BYTES))
    efficiency: float = setting(1.0, "share of the data sheet's peaks that kernels attain", minimum=0.01, maximum=1.0)
    cost_trace: tuple[Path, ...] = setting(
        (),
        "traces of a live worker's steps (quire scheduler --trace-steps) to fit the costs to, instead of --hardware",
        parse=_paths,
        metavar="FILE,...",
    )
    frontend_latency: float = setting(
        0.0, "time that clients, gateways and the network add to each answer", minimum=0, maximum=60, metavar="SECONDS"
    )


@dataclass(frozen=True)
class CoreFlags:
    """The scheduler and its pool, with the flags of quire scheduler and quire worker"""

    num_gpu_blocks: BlockCount = setting(
        BlockCount(1.0, True),
        "blocks of the KV pool, or a share of the blocks that fit",
        parse=BlockCount.parse,
        metavar="BLOCKS",
    )
    num_host_blocks: int | None = setting(
        None, "blocks of host memory for swapping (4GiB of them)", minimum=0, maximum=_MAX_BLOCKS
    )
    block_size: int | None = setting(None, "tokens of a block (16, or the trace's)", minimum=1, maximum=1024)
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory to use", minimum=0.05, maximum=1.0)
    max_num_seqs: int | None = setting(
        None, "max sequences that run at once (256, or the trace's)", minimum=1, maximum=65536
    )
    max_num_batched_tokens: int | None = setting(
        None, "max tokens of one step (2048, or the trace's)", minimum=1, maximum=1 << 20
    )
    max_waiting_requests: int = setting(1024, "max requests that wait; more are refused", minimum=1)
    watermark: float = setting(0.01, "share of the blocks that admission leaves free", minimum=0, maximum=0.9)
    policy: str = setting("fcfs", "which request goes first", choices=tuple(kind.value for kind in PolicyKind))
    preemption_mode: str = setting(
        "auto", "how preempted requests free their blocks", choices=tuple(mode.value for mode in PreemptionMode)
    )
    max_prefill_share: float = setting(
        0.5,
        "share of a step's tokens that one prompt takes while others with less to compute wait",
        minimum=0.01,
        maximum=1,
    )
    max_mixed_prefill_tokens: int | None = setting(
        None, "maximum number of prompt tokens in a step that also decodes; not given, no limit", minimum=16
    )
    max_steps_in_flight: int = setting(2, "max steps that are planned before the first is over", minimum=1, maximum=4)
    max_drafts: int = setting(
        0, "max drafts of a sequence that a step verifies, each right by --acceptance; 0: none", minimum=0, maximum=64
    )
    acceptance: float = setting(
        0.7, "probability that a draft is right if all before it are, for --max-drafts", minimum=0, maximum=1
    )
    num_tenants: int = setting(1, "tenants that the requests belong to, in turn, for --policy fair", minimum=1)


@dataclass(frozen=True)
class FleetFlags:
    """Replicas behind the router of one gateway"""

    replicas: int = setting(1, "replicas, each with the devices of --hardware", minimum=1, maximum=1024)
    prefill_replicas: int = setting(
        0, "number of --replicas for prefill, with the others for decode; 0: all for both", minimum=0
    )
    transfer_bandwidth: int | None = setting(
        None,
        "bytes a second at which the blocks of one request move between replicas (the devices' links)",
        parse=parse_bytes,
        metavar="BYTES",
    )
    transfer_latency: float = setting(
        0.005, "time of a move without its blocks", minimum=0, maximum=60, metavar="SECONDS"
    )


@dataclass(frozen=True)
class SimulateFlags(DeviceFlags, LoadFlags, CoreFlags, FleetFlags):
    """Simulates the scheduler with a modelled device, and prints the report of `quire bench`."""

    sweep: dict[str, tuple[str, ...]] | None = setting(
        None,
        "look for the highest rate within --slo with each of these settings, for example "
        "num_gpu_blocks=500:1000,policy,max_num_seqs",
        parse=parse_sweep,
        metavar="NAME=VALUE:VALUE,...",
    )
    slo_share: float = setting(0.9, "sweep: share of the requests that must keep --slo", minimum=0.01, maximum=1)
    # Much longer than one request, so that a growing queue is seen.
    sweep_duration: float = setting(
        120.0, "sweep: how long requests come at each rate", minimum=1, maximum=MAX_SECONDS, metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        """Raises ValueError if values do not go together."""
        super().__post_init__()
        if (self.hardware is None) == (not self.cost_trace):
            raise ValueError("give the device by --hardware, for example a100-40gb, or by --cost-trace; one of both")
        if self.cost_trace and (self.model or self.model_config):
            raise ValueError("--model and --model-config are for --hardware; a trace is of the model that it ran")
        for name, default in (("dtype", "auto"), ("efficiency", 1.0), ("gpu_memory_utilization", 0.9)):
            if self.cost_trace and getattr(self, name) != default:
                raise ValueError(f"--{name.replace('_', '-')} is for --hardware; a trace has the costs and the pool")
        if self.model is not None and self.model_config is not None:
            raise ValueError("--model and --model-config are both given; give one of them")
        if self.model is not None and self.model not in MODELS:
            raise ValueError(f'--model: "{self.model}" is not known; there are {", ".join(MODELS)}, or --model-config')
        if self.prefill_replicas and self.cost_trace:
            raise ValueError("--prefill-replicas is for --hardware; a trace does not say how many bytes blocks have")
        if self.prefill_replicas >= self.replicas and self.prefill_replicas:
            raise ValueError(
                f"--prefill-replicas is {self.prefill_replicas} of --replicas {self.replicas}; it must leave one for "
                "decode"
            )
        if self.transfer_bandwidth == 0:
            raise ValueError("--transfer-bandwidth is 0; it must be above")
        if self.sweep is not None and self.slo is None:
            raise ValueError("--sweep looks for the highest rate within --slo, which is not given")
        for name in ("request_rate", "num_requests", "duration"):
            if self.sweep is not None and getattr(self, name):
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is given; a --sweep looks for rates itself, each for --sweep-duration")

    def replica(self) -> Replica:
        """The simulated replica, or fleet of replicas. Raises ConfigurationError."""
        return self._traced() if self.cost_trace else self._modelled(Hardware.named(self.hardware or ""))

    def _modelled(self, hardware: Hardware) -> Replica:
        model, block_size = self._model(hardware).split(hardware.num_devices), self.block_size or 16
        fits = hardware.num_blocks(model, block_size, self.gpu_memory_utilization)
        costs = Roofline(model, hardware, block_size, self.efficiency)
        block_bytes, (_, groups) = model.block_bytes(block_size), model.cut(block_size)
        sizes = {
            "num_blocks": fits,
            "block_size": block_size,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
            "max_model_len": model.max_model_len,
            "num_host_blocks": min(_SWAP_SPACE // block_bytes, _MAX_BLOCKS),
            "vocab_size": model.vocab_size,
            "full_groups": groups.num_full,
            "windowed_groups": groups.num_windowed,
            "window": groups.window,
            "state_blocks": model.state_blocks(block_size),
        }
        facts = {"cost_model": "roofline", "hardware": asdict(hardware), "model": asdict(model)}
        # Each rank sends its part of a block.
        bandwidth = self.transfer_bandwidth or hardware.link_bandwidth * hardware.num_devices
        return self._sized(costs, sizes, facts, block_s=block_bytes / bandwidth)

    def _model(self, hardware: Hardware) -> ModelShape:
        if self.model_config is not None:
            if not (self.model_config / "config.json").is_file():
                raise ConfigurationError(
                    f"--model-config: {self.model_config} has no config.json; expected a directory that has one"
                )
            model = ModelShape.read(self.model_config)
        elif name := self.model or hardware.default_model:
            model = MODELS[name]
        else:
            known = ", ".join(MODELS)
            raise ConfigurationError(f"no model goes with {hardware.name}; give --model ({known}) or --model-config")
        return model if self.dtype == "auto" else model.with_dtype(self.dtype)

    def _traced(self) -> Replica:
        try:
            traces = [Trace.read(path) for path in self.cost_trace]
            costs = Measured.fit(traces)
        except OSError as error:
            raise ConfigurationError(f"--cost-trace: cannot read {error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigurationError(f"--cost-trace: {error}") from error
        fit = {"residual": asdict(costs.residual), "latency_s": costs.latency, "seconds": costs.by_name}
        facts = {"cost_model": "measured", "fit": fit, "replica": dict(traces[-1].replica)}
        return self._sized(costs, traces[-1].replica, facts)

    def _sized(
        self, costs: CostModel, sizes: Mapping[str, int], facts: dict[str, Any], block_s: float = 0.0
    ) -> Replica:
        """The replica with the sizes of the flags, and these sizes as defaults."""
        max_num_batched_tokens = self.max_num_batched_tokens or sizes["max_num_batched_tokens"]
        num_further = 2 if sizes.get("state_blocks") else 0
        max_num_seqs = self.max_num_seqs or min(sizes["max_num_seqs"], max(max_num_batched_tokens - num_further, 1))
        if self.max_num_seqs is not None and self.max_num_batched_tokens is None:
            max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs + num_further)
        longest = sizes["max_model_len"]
        if (self.max_model_len or 0) > longest:
            raise ConfigurationError(f"--max-model-len is {self.max_model_len:,}; the model takes at most {longest:,}")
        max_model_len = self.max_model_len or longest
        num_blocks = self.num_gpu_blocks.of(sizes["num_blocks"])
        if num_blocks > _MAX_BLOCKS:
            raise ConfigurationError(
                f"the KV pool has {num_blocks:,} blocks; a scheduler takes at most {_MAX_BLOCKS:,}: set a smaller "
                "--num-gpu-blocks or a larger --block-size"
            )
        try:
            config = SchedulerConfig(
                num_blocks=num_blocks,
                block_size=self.block_size or sizes["block_size"],
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                max_waiting_requests=self.max_waiting_requests,
                # Only their number limits waiting requests.
                max_waiting_tokens=self.max_waiting_requests * max_model_len,
                watermark=self.watermark,
                num_host_blocks=sizes["num_host_blocks"] if self.num_host_blocks is None else self.num_host_blocks,
                policy=PolicyKind(self.policy),
                preemption_mode=PreemptionMode(self.preemption_mode),
                max_prefill_share=self.max_prefill_share,
                max_mixed_prefill_tokens=self.max_mixed_prefill_tokens,
                max_drafts=self.max_drafts,
                fixed_tokens=fixed_tokens(costs),
                full_groups=sizes.get("full_groups", 1),
                windowed_groups=sizes.get("windowed_groups", 0),
                window=sizes.get("window", 0),
                state_blocks=sizes.get("state_blocks", 0),
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        return Replica(
            config,
            costs,
            sizes["vocab_size"],
            facts,
            self.max_steps_in_flight,
            self.num_tenants,
            self.frontend_latency,
            SyntheticDrafts(costs, self.acceptance) if self.max_drafts else fake_tokens,
            Fleet(self.replicas, self.prefill_replicas, block_s, self.transfer_latency),
        )

    @property
    def shown_name(self) -> str:
        if self.name is not None:
            return self.name
        model = self.model_config.resolve().name if self.model_config is not None else self.model
        return ", ".join(part for part in (self.hardware or "measured", model, "simulated") if part)


def main(argv: Sequence[str]) -> int:
    """Prints the report. Returns 1 if no request ended well, or if nothing keeps the SLO."""
    flags = load_settings(SimulateFlags, argv, os.environ, program=PROGRAM)
    flags.check_output()
    _warn(flags.replica().costs)
    return _sweep(flags, argv) if flags.sweep is not None else _simulate(flags)


def _warn(costs: CostModel) -> None:
    if isinstance(costs, Measured) and costs.residual.explained < _LOW_EXPLAINED:
        print(
            f"{PROGRAM}: warning: the fit explains {costs.residual.explained:.0%} of what the traced steps differ in "
            "time, so do not rely on what follows: trace the worker again, while nothing else runs on its machine",
            file=sys.stderr,
        )


# Runs at given rates


def _simulate(flags: SimulateFlags) -> int:
    replica = flags.replica()
    load = Load(flags, _read_file(flags), replica.vocab_size, replica.config.max_len)
    labels: list[str] = []
    outcomes: list[tuple[Report, Outcome]] = []
    with _interruptible() as interruption:
        for planned in load.runs():
            outcome = _run(replica, planned)
            outcomes.append((outcome.report(planned.rate, flags.slo), outcome))
            labels.append(planned.label)
    if interruption and not outcomes:
        return _interrupted("no run has ended")
    print(_head(replica))
    reports = [report for report, _ in outcomes]
    shown = _SHOWN | (_SHOWN_OF_FLEETS if replica.fleet.num_replicas > 1 else {})
    print(make_table(labels, reports, _counters([outcome for _, outcome in outcomes], shown)))
    print(
        *(f"{label}: limited by {_limits(outcome)}" for label, (_, outcome) in zip(labels, outcomes, strict=True)),
        sep="\n",
    )
    print(*make_errors(reports, {}), sep="\n", end="\n" if any(report.errors for report in reports) else "")
    runs = tuple(Run.of(report, outcome.records) for report, outcome in outcomes)
    facts = _facts(flags, replica) | {"load": load.describe()} | ({"interrupted": True} if interruption else {})
    result = LoadResult("simulate", flags.shown_name, facts, runs)
    is_written = flags.write(result, lambda path: plot([result], path), PROGRAM)
    if interruption:
        return _interrupted(f"the report has the runs that had ended, {', '.join(labels)}")
    return 0 if is_written and any(run.report.completed for run in runs) else 1


@contextmanager
def _interruptible() -> Iterator[list[None]]:
    """Ends the block at Ctrl-C; the list that it yields is not empty then."""
    interruption: list[None] = []
    try:
        yield interruption
    except KeyboardInterrupt:
        interruption.append(None)


def _interrupted(what: str) -> int:
    print(f"{PROGRAM}: interrupted: {what}", file=sys.stderr)
    return _INTERRUPTED_EXIT_STATUS


def _read_file(flags: SimulateFlags) -> list[LoadRequest] | None:
    """The requests of a file, checked so that a simulation can take them all. Raises ConfigurationError."""
    requests = read_file(flags)
    for request in requests or ():
        try:
            check_simulated(request)
        except ValueError as error:
            raise ConfigurationError(f"--dataset {flags.dataset}: {error}") from None
    return requests


def _run(replica: Replica, planned: PlannedRun, settings: str = "") -> Outcome:
    with Progress(f"{settings} {planned.label}".strip(), planned.num_requests, stays=False) as progress:
        return replica.run(
            planned.requests,
            max_concurrency=planned.max_concurrency,
            is_closed=planned.is_closed,
            duration_s=planned.duration_s,
            on_end=progress.update,
        )


def _head(replica: Replica) -> str:
    config = replica.config
    groups = ""
    if config.windowed_groups:
        groups = f" in one of {config.layout.num_groups} groups of layers"
    states = ""
    if config.state_blocks:
        states = f", the state of a sequence in {config.state_blocks} of them"
    lines = [
        f"{config.num_blocks:,} blocks of {config.block_size} tokens{groups}{states}, {config.num_host_blocks:,} in "
        f"host memory; at most {config.max_num_seqs:,} sequences and {config.max_num_batched_tokens:,} tokens a step"
    ]
    if (fleet := replica.fleet).num_replicas > 1:
        apart = f": {fleet.num_prefill} for prefill, the others for decode" if fleet.num_prefill else ""
        lines.append(f"{fleet.num_replicas} such replicas{apart}")
    if isinstance(replica.costs, Measured):
        lines.append(f"{replica.costs.residual}; an idle worker adds {replica.costs.latency * 1e3:.2f} ms")
    return "\n".join(lines)


_SHOWN = {
    "running_mean": ("running, mean", 1.0),
    "waiting_mean": ("waiting, mean", 1.0),
    "device_busy_share": ("device busy, %", 100.0),
    "kv_tokens_share": ("KV pool with tokens, %", 100.0),
    "kv_shared_share": ("KV pool saved by sharing, %", 100.0),
}
_SHOWN_OF_FLEETS = {"moves": ("moves", 1.0), "move_pause_p99_ms": ("pause of a move, p99, ms", 1.0)}


def _counters(outcomes: Sequence[Outcome], shown: Mapping[str, tuple[str, float]]) -> dict[str, list[float | None]]:
    counted = [outcome.counters() for outcome in outcomes]
    return {
        title: [each[name] * factor if each else None for each in counted] for name, (title, factor) in shown.items()
    }


def _limits(outcome: Outcome) -> str:
    return " ".join(f"{limit.value} {share:.0%}" for limit, share in outcome.limits().items() if share >= 0.005) or "-"


# Sweeps


def _sweep(flags: SimulateFlags, argv: Sequence[str]) -> int:
    assert flags.sweep is not None
    assert flags.slo is not None
    file = _read_file(flags)
    settings = combinations(flags.sweep)
    # All settings are checked before the first one runs.
    flags_of = [
        load_settings(SimulateFlags, [*argv, *to_argv(SimulateFlags, each)], os.environ, program=PROGRAM)
        for each in settings
    ]
    replicas = [each.replica() for each in flags_of]
    print(f"the highest rate at which {flags.slo_share:.0%} of the requests keep {flags.slo}", flush=True)
    found: dict[str, Found] = {}
    width = max(len(_label(each)) for each in settings)
    with _interruptible() as interruption:
        for each, its_flags, replica in zip(settings, flags_of, replicas, strict=True):
            label = _label(each)
            run, lowest_rate = _at_rate(its_flags, file, replica, label), _MIN_REQUESTS / flags.sweep_duration
            greatest_rate = min(GREATEST_RATE, MAX_REQUESTS / flags.sweep_duration)
            found[label] = highest_rate(run, flags.slo, flags.slo_share, lowest_rate, greatest_rate)
            print(f"{label:<{width}}  {_found_line(found[label])}", flush=True)
    if interruption and not found:
        return _interrupted("no setting is done")
    points = [
        {"settings": each, "request_rate": found[_label(each)].rate, "limited_by": found[_label(each)].limited_by}
        for each in settings[: len(found)]
    ]
    runs = tuple(Run.of(each.report, each.outcome.records) for each in found.values())
    result = LoadResult("simulate", flags.shown_name, _facts(flags, replicas[0]) | {"sweep": points}, runs)
    title = f"{flags.shown_name}: {flags.dataset}, {flags.slo}"
    is_written = flags.write(result, lambda path: draw(found, path, title), PROGRAM)
    if interruption:
        return _interrupted(f"{len(found)} of {len(settings)} settings are done")
    return 0 if is_written and any(each.rate is not None for each in found.values()) else 1


def _at_rate(
    flags: SimulateFlags, file: list[LoadRequest] | None, replica: Replica, settings: str
) -> Callable[[float], Outcome]:
    def run(rate: float) -> Outcome:
        chosen = replace(flags, request_rate=(rate,), sweep=None, duration=flags.sweep_duration)
        load = Load(chosen, file, replica.vocab_size, replica.config.max_len)
        return _run(replica, next(load.runs()), settings)

    return run


def _label(settings: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _found_line(found: Found) -> str:
    rate = "none" if found.rate is None else f"{found.rate:.3g}/s"
    limited_by = found.limited_by or "nothing up to that rate"
    counters, report = found.outcome.counters(), found.report
    latency = "-" if report.ttft is None else f"{report.ttft.p90 * 1e3:.0f} ms"
    return (
        f"{rate:>7}, limited by {limited_by:<7}  TTFT p90 {latency:>8}, {report.output_tokens_per_s:5.0f} tokens/s, "
        f"{counters.get('running_mean', 0.0):5.1f} running, {counters.get('kv_tokens_share', 0.0):4.0%} of the KV pool"
    )


def _facts(flags: SimulateFlags, replica: Replica) -> dict[str, Any]:
    """Facts without time and place, so that the same simulation gives the same file."""
    config = {name: value.value if isinstance(value, Enum) else value for name, value in asdict(replica.config).items()}
    fleet = {"fleet": asdict(replica.fleet)} if replica.fleet.num_replicas > 1 else {}
    return {"version": VERSION, "flags": flags.given(), "config": config, **fleet, **replica.facts}
