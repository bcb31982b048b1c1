"""One point of a figure: a system serves a load at one rate.

All systems are the same scheduler with the same cost model. They differ only in the block manager.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from quire.load import Dataset, LoadRequest, alpaca, arriving_at, make_arrivals, sharegpt, take, with_decoding
from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.kv_cache import BlockManager
from simulator.baselines.contiguous import (
    ContiguousBlocks,
    OrcaMax,
    OrcaOracle,
    OrcaPow2,
    RequestLevelBatches,
    contiguous_memory,
)
from simulator.costs import CostModel, StepSeconds, StepWork
from simulator.engine import Simulation, simulate
from simulator.hardware import Hardware
from simulator.load import LoadArrivals
from simulator.memory import paged_memory
from simulator.models import MODELS, ModelShape
from simulator.roofline import Roofline

MakeBlocks = Callable[[SchedulerConfig], BlockManager]

QUIRE, ORACLE, POW2, MAX, FASTER_TRANSFORMER = (
    "Quire",
    "Orca (Oracle)",
    "Orca (Pow2)",
    "Orca (Max)",
    "FasterTransformer",
)
SYSTEMS: dict[str, MakeBlocks] = {
    QUIRE: BlockManager.of,
    ORACLE: OrcaOracle.of,
    POW2: OrcaPow2.of,
    MAX: OrcaMax.of,
    FASTER_TRANSFORMER: RequestLevelBatches.of,
}
ORCAS = (ORACLE, POW2, MAX)

_MIN_REQUESTS = 40
_MIN_SATURATING, _FILLS = 150, 10

_MAX_NUM_SEQS, _MAX_BATCHED_TOKENS = 1024, 2560
"""Rows never limit. The token budget is the one of the vLLM that the paper measured."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on the hardware of the paper's table 1, with the paper's number of slots. `efficiency` is as in
    `Roofline`."""

    model: str
    hardware: str
    num_slots: int
    efficiency: float = 1.0

    @property
    def shape(self) -> ModelShape:
        return MODELS[self.model]

    def costs(self, block_size: int) -> Roofline:
        return Roofline(self.shape, Hardware.named(self.hardware), block_size, self.efficiency)


OPT_13B = Setup("opt-13b", "a100-40gb", 15_700)
OPT_66B = Setup("opt-66b", "a100-40gb-x4", 9_700)
OPT_175B = Setup("opt-175b", "a100-80gb-x8", 60_100)
LLAMA_13B = Setup("llama-13b", "a100-40gb", 15_700)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind.

    Attributes:
        duration_s: Seconds for which requests arrive at a rate.
        num_saturating: Number of sequences that fill Quire's pool several times; see `Job.num_saturating`.
        n: Parallel samples of each request.
        beam_width: Beams of each request; None samples instead.
        shares_prefixes: Whether a request may take blocks that another one computed.
    """

    dataset: Dataset
    duration_s: float
    num_saturating: int
    n: int = 1
    beam_width: int | None = None
    shares_prefixes: bool = False
    seed: int = 0

    @property
    def width(self) -> int:
        """Sequences of a request."""
        return self.beam_width or self.n

    def requests(self, count: int, rate: float) -> list[LoadRequest]:
        """Requests with Poisson arrivals. Each turn of a conversation arrives by itself, as in the paper."""
        load = with_decoding(take(self.dataset, count, self.seed), n=self.n, beam_width=self.beam_width)
        return arriving_at(load, make_arrivals(rate).times(count, self.seed))

    def scaled(self, scale: float) -> Self:
        """The load shortened to the share `scale`."""
        num_saturating = max(_MIN_REQUESTS, round(self.num_saturating * scale))
        return replace(self, duration_s=self.duration_s * scale, num_saturating=num_saturating)


MAX_MODEL_LEN, VOCAB_SIZE = 2048, 50272
"""OPT's limits."""

_NUM_SATURATING = {OPT_13B: (220, 1500), OPT_66B: (150, 900), OPT_175B: (600, 4000)}
"""Requests of ShareGPT's and Alpaca's lengths that fill the pool several times."""


def sharegpt_load(setup: Setup, *, n: int = 1, beam_width: int | None = None) -> Load:
    """Ninety seconds of chats; the paper's traces have an hour, or a quarter of one for OPT-175B."""
    return Load(sharegpt(MAX_MODEL_LEN, VOCAB_SIZE), 90, _NUM_SATURATING[setup][0], n, beam_width)


def alpaca_load(setup: Setup, *, n: int = 1, beam_width: int | None = None) -> Load:
    """Twenty seconds of instructions: in lengths of a request, as long as the chats."""
    return Load(alpaca(MAX_MODEL_LEN, VOCAB_SIZE), 20, _NUM_SATURATING[setup][1], n, beam_width)


@dataclass(frozen=True, slots=True)
class Job:
    """A simulation: one system, one load, one rate (requests a second; infinite: all at once)."""

    system: str
    setup: Setup
    load: Load
    rate: float
    block_size: int = 16
    preemption_mode: PreemptionMode = PreemptionMode.AUTO

    def requests(self) -> list[LoadRequest]:
        """The requests that arrive in the load's duration at the rate."""
        if math.isinf(self.rate):
            return self.load.requests(self.num_saturating, self.rate)
        return self.load.requests(max(_MIN_REQUESTS, round(self.rate * self.load.duration_s)), self.rate)

    @property
    def num_saturating(self) -> int:
        """Number of requests that arrive at once at an infinite rate, enough to fill the pool several times. If
        requests have several sequences, or reserve the longest sequence, only few fit, and more would take long."""
        width, fills = self.load.width, self.load.num_saturating
        limit = fills // width
        if self.system in (MAX, FASTER_TRANSFORMER):
            limit = min(limit, _FILLS * (self.setup.num_slots // (width * self.setup.shape.max_model_len)))
        return min(fills, max(_MIN_SATURATING, limit))


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the pool's slots, mean over time; the rest is free or lost to the allocator. `tokens_of_held` is the
    share of the allocated slots that hold a token, `saved` the share that sharing saves of the slots that all sequences
    would hold without it."""

    tokens: float
    reserved: float
    wasted: float
    tokens_of_held: float
    saved: float


@dataclass(frozen=True, slots=True)
class Point:
    """The results of a system at one rate.

    Attributes:
        normalized_s: Mean over requests of end-to-end seconds by tokens of output.
        served_rate: Requests that ended a second, over a window: after the first tenth of the time and before the last
            request arrived; if all arrive at once, after 35% of the time until the last one left the queue. If none
            ends in it, as with loads that are too short to fill the pool, over the whole run.
        batched: Requests that ran, mean over that window, which the shares use too.
        preemptions: Preemptions per request.
    """

    rate: float
    normalized_s: float
    served_rate: float
    batched: float
    shares: Shares
    preemptions: float
    swap_outs: int


def run(job: Job) -> Point:
    made: list[BlockManager] = []

    def make_blocks(config: SchedulerConfig) -> BlockManager:
        made.append(SYSTEMS[job.system](config))
        return made[-1]

    requests = job.requests()
    simulation = simulate(
        LoadArrivals(requests, num_tenants=1 if job.load.shares_prefixes else len(requests)),
        _config(job),
        _WithCopies(job.setup.costs(job.block_size), made),
        make_blocks=make_blocks,
        look=paged_memory if job.system == QUIRE else contiguous_memory,
        # As in the paper's systems, a step is planned when the one before is over. A second step in flight would hide
        # the host's time, which is not modelled.
        max_steps_in_flight=1,
    )
    ends = _ends(simulation, made[0])
    arrivals = np.array([request.arrival_s for request in requests])
    lengths = np.array([request.output_len for request in requests])
    steps = _Steps(simulation, saturated=math.isinf(job.rate))
    return Point(
        rate=job.rate,
        normalized_s=float(((ends - arrivals) / lengths).mean()),
        served_rate=steps.rate(ends),
        batched=steps.mean("num_running"),
        shares=steps.shares(),
        preemptions=simulation.num_preemptions / len(requests),
        swap_outs=simulation.num_swap_outs,
    )


def _config(job: Job) -> SchedulerConfig:
    num_blocks = job.setup.num_slots // job.block_size
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=job.block_size,
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        max_model_len=job.setup.shape.max_model_len,
        max_waiting_requests=1 << 30,
        max_waiting_tokens=1 << 40,
        # Swapped blocks never exceed the blocks of the device (the paper's section 4.5).
        num_host_blocks=0 if job.preemption_mode is PreemptionMode.RECOMPUTE else num_blocks,
        preemption_mode=job.preemption_mode,
    )


class _WithCopies:
    """The costs of steps, plus copies of regions when sequences fork."""

    def __init__(self, costs: CostModel, made: Sequence[BlockManager]) -> None:
        self._costs = costs
        self._made = made
        self._num_seen = 0

    def seconds(self, work: StepWork) -> StepSeconds:
        blocks = self._made[0]
        if isinstance(blocks, ContiguousBlocks):
            num_new, self._num_seen = blocks.num_copied_blocks - self._num_seen, blocks.num_copied_blocks
            work = replace(work, copied_blocks=work.copied_blocks + num_new)
        return self._costs.seconds(work)


def _ends(simulation: Simulation, blocks: BlockManager) -> NDArray[np.float64]:
    """When each request was answered. FasterTransformer answers all requests of a batch together."""
    ends = np.array([life.ended for life in simulation.lives], dtype=np.float64)
    assert not np.isnan(ends).any(), [life.error for life in simulation.lives if life.error is not None][:1]
    if isinstance(blocks, RequestLevelBatches):
        for batch in blocks.batches:
            members = [key.handle for key in batch]
            ends[members] = ends[members].max()
    return ends


class _Steps:
    """The steps in the middle of a run, when the load is steady."""

    def __init__(self, simulation: Simulation, *, saturated: bool) -> None:
        began, waiting = simulation.column("began"), simulation.column("num_waiting")
        last = float(began[waiting > 0][-1]) if saturated and waiting.any() else simulation.lives[-1].arrived
        self._end = last or float(began[-1])
        # A pool that is filled at once holds young sequences first.
        self._start = self._end * (0.35 if saturated else 0.1)
        self._chosen = (began >= self._start) & (began <= self._end)
        self._seconds = simulation.column("device_seconds")[self._chosen]
        self._simulation = simulation

    def rate(self, ends: NDArray[np.float64]) -> float:
        """The number of these times in the window, per second; of all of them if none is in it."""
        count = np.count_nonzero((ends > self._start) & (ends <= self._end))
        return float(count / (self._end - self._start)) if count else float(len(ends) / ends.max())

    def mean(self, name: str) -> float:
        """The mean of a column, weighted by the duration of the steps."""
        values = self._simulation.column(name)[self._chosen]
        return float(np.average(values, weights=self._seconds))

    def shares(self) -> Shares:
        total = self._simulation.steps[0].memory.total
        tokens, reserved, wasted, shared = map(self.mean, ("tokens", "reserved", "wasted", "shared"))
        held = tokens + reserved + wasted
        return Shares(tokens / total, reserved / total, wasted / total, tokens / held, shared / (held + shared))
