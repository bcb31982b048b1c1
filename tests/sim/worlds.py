"""Runs worlds: `python -m tests.sim.worlds SEED COUNT` prints the digest of each."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, cast

from quire.client import BeamSearch, GenerationOptions
from tests.sim.world.charges import Charges
from tests.sim.world.cluster import MANY, Cluster, Layout, draw_layout, watched_schedulers
from tests.sim.world.disk import draw_recording
from tests.sim.world.faults import (
    BadDisk,
    CannotStart,
    Cut,
    Fault,
    Glitch,
    HalfOpen,
    Hang,
    Kill,
    KillAt,
    OtherModel,
    OtherPool,
    Pause,
    PowerOff,
    Reset,
    SetClock,
    SlowBlockDisk,
    draw_bad_disks,
    draw_block_disk_faults,
    draw_drains,
    draw_faults,
    draw_other_model,
    draw_slow_block_disks,
)
from tests.sim.world.gateways import gateways_without_sockets
from tests.sim.world.http_calls import with_http
from tests.sim.world.knobs import LEASES, MOVES, REPLAYS, draw_low_limits, low_limits
from tests.sim.world.oracles import Circumstances
from tests.sim.world.reference import answer_of
from tests.sim.world.traffic import (
    LONGEST,
    MAX_OUTPUT,
    NUM_SPECIAL_TOKENS,
    TENANT,
    VOCAB_SIZE,
    Generate,
    Kind,
    Pin,
    Request,
    Verb,
    draw_requests,
    grown,
    with_adapters,
    with_constraints,
    with_deadly,
    with_deadly_need,
    with_takeovers,
)
from tests.sim.world.world import StuckError, World

_START_S = 2.0
"""By then all processes serve, so that without faults no call fails."""
_PATIENCE_S = 90.0
"""After all trouble, the longest ping and the longest wait of a client for its next call: then all has to be over."""
_QUOTA_S = 300.0
"""What a client of a limited key waits, with all its attempts."""
_DEADLY_S = 200.0
"""Until each of two replicas has found out which request kills its worker, between which it moves."""
_LATER_S = 30.0
"""Until what is known to kill workers has failed a request that needs it, at each of two replicas."""
_RARE = 0.1
"""The share of worlds with a deadly request, of those with another model, of those whose streams are taken over, and of
those in which what seldom comes together does."""
_OFTEN = 0.6
"""The share of worlds with tight pools whose requests come almost at once and grow."""
_ADAPTED = 0.25
"""The share of worlds with adapters."""
_RANKED = 0.2
"""The share of worlds whose workers have two ranks."""
_REPORTED = 100
"""After so many worlds it is told how many there were so far."""
_DRAFTING = 0.4
"""The share of worlds whose workers draft tokens."""
_PASSING = 0.3
"""The share of worlds whose workers run the model several times in a step of decodes."""
_KEEPING = 0.5
"""The share of worlds in which the pools of workers outlive them."""
_MOVING = 0.05
"""The share of worlds in which replicas are drained and requests move between them."""
_ON_DISK = 0.05
"""The share of worlds in which much comes back from disks of blocks."""
_WITH_DISKS = 0.15
"""The share of the others whose workers have such disks."""
_HANDED = 0.05
"""The share of worlds in which rows, blocks and streams change hands in the middle of what they do."""
_SHORT = 0.06
"""The share of worlds in which what is short is asked for by many at once, or answers are late."""
_DISK_BLOCKS = (4, 32, 500, 500)
"""For how many blocks a disk may have room."""
_KEPT_S = 130.0
"""Durable requests are kept for a minute without a reader, and once more after their end; pins are no longer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a world is a function of. Requests and faults can be left out: what is left is a world, too.

    Attributes:
        seed: Of what chance decides while the world runs: delays, jobs, who goes on first.
        low_limits: Names of limits of services that are low in this world.
    """

    seed: int
    layout: Layout
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    low_limits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a world."""

    digest: str
    num_events: int
    seconds: float
    num_tokens: int
    errors: tuple[str, ...]


def draw_plan(seed: int) -> Plan:
    """The plan of a seed. Its generator is not the one that the world itself draws from."""
    short = Random(f"short {seed}")
    if short.random() < _SHORT:
        return short.choice(_SHORTAGES)(seed, short)
    draw = Random(f"worker {seed}")
    if draw.random() < 0.5 * _RARE:
        return draw.choice(_OF_WORKERS)(seed, draw)
    draw = Random(f"rarity {seed}")
    plan = draw.choice(_RARITIES)(seed, draw) if draw.random() < _RARE else _draw_plan(seed)
    moving = Random(f"drains {seed}")
    if moving.random() < _MOVING:
        return draw_moving(seed, moving)
    disks = Random(f"block disks {seed}")
    if disks.random() < _ON_DISK:
        return draw_on_disk(seed, disks)
    hands = Random(f"hands {seed}")
    if hands.random() < _HANDED:
        return hands.choice(_OF_HANDS)(seed, hands)
    if disks.random() < _WITH_DISKS:
        plan = replace(plan, layout=replace(plan.layout, disk_blocks=disks.choice(_DISK_BLOCKS)))
    if draw.random() < 0.5 * _RARE:
        requests, deadly = with_deadly_need(draw, plan.requests)
        plan = replace(plan, requests=requests, layout=replace(plan.layout, deadly=deadly))
    return plan


def _draw_plan(seed: int) -> Plan:
    draw = Random(f"plan {seed}")
    kind = draw.choice((*Kind, Kind.MIXED, Kind.TIGHT, Kind.RESTARTS))
    layout = _with_ranks(Random(f"ranks {seed}"), draw_layout(draw, kind))
    over_s = draw.choice((0.05, 0.3, 0.3) if kind is Kind.TIGHT else (0.3, 3.0, 10.0))
    pool_tokens = layout.worker.num_blocks * layout.worker.block_size
    requests = draw_requests(draw, kind, layout.clients, pool_tokens, over_s)
    # Of its own, as all that follows: what is rare changes nothing else in a plan.
    rare = Random(f"more {seed}")
    if kind is Kind.TIGHT and rare.random() < _OFTEN:
        requests = grown(rare, requests)
        if rare.random() < 0.5:
            layout = _with_long_recomputations(layout)
    if rare.random() < 0.5 * _OFTEN:
        requests = tuple(map(partial(_with_stops, rare), requests))
    takes_over = rare.random() < _RARE
    if takes_over:
        requests = with_takeovers(rare, requests)
    faults = draw_faults(draw, kind, layout.hosts, [each.at for each in requests], over_s, layout.worker)
    rare = Random(f"rare {seed}")
    if rare.random() < _RARE:
        requests = with_deadly(rare, requests)
    requests = with_http(Random(f"http {seed}"), requests, layout.clients)
    adapted = Random(f"adapters {seed}")
    if adapted.random() < _ADAPTED:
        requests = with_adapters(adapted, requests)
        worker = replace(layout.worker, max_adapters=adapted.choice((1, 2)))
        layout = replace(layout, worker=worker, loads_fail=adapted.random() < 0.5)
    drafting = Random(f"drafts {seed}")
    if drafting.random() < _DRAFTING:
        layout = replace(
            layout, worker=replace(layout.worker, max_drafts=drafting.choice((1, 3, 7)), fixed_tokens=1000)
        )
    layout = _with_passes(Random(f"passes {seed}"), layout)
    layout = replace(layout, keeps_pools=Random(f"pools {seed}").random() < _KEEPING)
    if rare.random() < _RARE:
        other = draw_other_model(rare, layout.servers, over_s, layout.worker.fingerprint)
        faults = (*(faults if rare.random() < 0.5 else ()), other)
    disk = Random(f"disk {seed}")
    if (recording := draw_recording(disk)) is not None:
        layout = replace(layout, recording=recording)
        faults = (*faults, *draw_bad_disks(disk, layout.hosts, over_s))
    low = tuple(dict.fromkeys((*draw_low_limits(draw), *(REPLAYS if takes_over else ()))))
    return _plan(seed, layout, requests, faults, low)


def _plan(
    seed: int, layout: Layout, requests: Iterable[Request], faults: Iterable[Fault] = (), low: tuple[str, ...] = ()
) -> Plan:
    """Times of requests and faults are counted from when all processes serve."""
    return Plan(
        seed,
        layout,
        tuple(replace(each, at=_START_S + each.at) for each in requests),
        tuple(replace(cast(Any, each), at=_START_S + each.at) for each in faults),
        low,
    )


# What seldom comes together by itself.


def _searches_that_swap(seed: int, draw: Random) -> Plan:
    """Beam searches leave and come back when their sequences have just forked and share the blocks that they write."""
    layout, requests = _preempting(draw)
    worker = replace(layout.worker, block_size=16, num_blocks=12, num_host_blocks=64)
    layout = replace(layout, worker=worker, settings=replace(layout.settings, preemption_mode="swap"))
    options = GenerationOptions(beam_search=BeamSearch(2), n=1, max_tokens=MAX_OUTPUT, ignore_eos=True)
    return _plan(seed, layout, [replace(each, options=options) for each in requests])


def _stops_in_recomputations(seed: int, draw: Random) -> Plan:
    """The worker dies while the gateway stands still: that finds stop strings of sequences that are computed again by
    then, with a prompt that they share."""
    layout, requests = _preempting(draw)
    worker = replace(layout.worker, block_size=4, num_blocks=400)
    layout = replace(_with_long_recomputations(replace(layout, worker=worker)), num_gateways=1, slowness=20.0)
    several = [
        replace(
            each,
            prompt=_fresh(draw, 40),
            options=GenerationOptions(
                n=3, temperature=1.0, seed=draw.randrange(1 << 64), max_tokens=MAX_OUTPUT, ignore_eos=True
            ),
        )
        for each in requests[:8]
    ]
    faults: list[Fault] = []
    for first in (1.0, 8.0):
        at = draw.uniform(first, first + 2.0)
        faults += (Pause(at - 0.5, "gateway-0", draw.uniform(1.0, 2.5)), Kill(at, "worker-0"))
    return _plan(seed, layout, map(partial(_with_stops, draw), several), faults)


def _preempting(draw: Random) -> tuple[Layout, list[Generate]]:
    """Streams that run at once, in a pool that is too small for all."""
    layout = draw_layout(draw, Kind.TIGHT)
    settings = replace(layout.settings, max_waiting_requests=MANY, policy="fcfs")
    layout = replace(layout, settings=settings, worker=replace(layout.worker, max_num_rows=64))
    drawn = draw_requests(draw, Kind.TIGHT, layout.clients, layout.worker.num_blocks * layout.worker.block_size, 0.05)
    streams = [replace(each, verb=Verb.STREAM) for each in drawn if isinstance(each, Generate)]
    return layout, [each for each in grown(draw, streams) if isinstance(each, Generate)]


def _clocks_set_back(seed: int, draw: Random) -> Plan:
    """A scheduler starts again, and by its clock before it started first."""
    return _restarting(seed, draw, lambda at: SetClock(at, "scheduler-0", 600.0, restarts=True))


def _deaths_between_ranks(seed: int, draw: Random) -> Plan:
    """A scheduler dies between its writes to two ranks."""
    point, number = "scheduler.step.between_ranks", draw.randint(1, 20)
    plan = _restarting(seed, draw, lambda at: KillAt(at, "scheduler-0", point, number))
    return replace(plan, layout=replace(plan.layout, worker=replace(plan.layout.worker, world_size=2)))


def draw_moving(seed: int, draw: Random) -> Plan:
    """Replicas are drained while requests run, and what moves between them is disturbed; as often as not, requests move
    with their first token, too."""
    layout = replace(_with_ranks(draw, draw_layout(draw, draw.choice((Kind.MIXED, Kind.RESTARTS)))), num_replicas=2)
    roles = Random(f"roles {seed}")
    if roles.random() < 0.5:
        options = replace(layout.gateway, long_prompt=roles.choice((1, 10, 30)))
        layout = replace(layout, first_role="prefill", gateway=options)
    if draw.random() < 0.3:
        layout = replace(layout, weather=replace(layout.weather, bytes_per_s=2e4))
    over_s = draw.choice((0.3, 1.0))
    pool_tokens = layout.worker.num_blocks * layout.worker.block_size
    requests = draw_requests(draw, Kind.NETWORK, layout.clients, pool_tokens, over_s)
    if draw.random() < 0.2:
        layout = replace(layout, worker=replace(layout.worker, max_drafts=3, fixed_tokens=1000))
    layout = replace(_with_passes(draw, layout), keeps_pools=Random(f"pools {seed}").random() < _KEEPING)
    drains, low = draw_drains(draw, layout.hosts, over_s, layout.worker), ()
    crowded = Random(f"crowded {seed}")
    if crowded.random() < 0.5:
        # Leases give way while their blocks are on the way, and blocks come where others have just been.
        worker = replace(layout.worker, num_blocks=(2 * LONGEST + 40) // layout.worker.block_size)
        # What is asked for is read only as it goes out.
        weather = replace(layout.weather, bytes_per_s=crowded.choice((2e4, 1e5)), window_bytes=256)
        layout = replace(layout, worker=worker, weather=weather)
        requests = tuple(_choosing(crowded, each) for each in _doubled(requests))
        low = MOVES if crowded.random() < 0.7 else ()
    return _plan(seed, layout, requests, drains, low)


def _choosing(draw: Random, request: Request) -> Request:
    """In a third of the cases a beam search, which does not move, and grows where others have just left."""
    if not isinstance(request, Generate) or request.front is not None or draw.random() < 0.66:
        return request
    options = GenerationOptions(beam_search=BeamSearch(2), n=1, max_tokens=MAX_OUTPUT, ignore_eos=True)
    return replace(request, options=options)


def _doubled(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Twice as many requests for tokens."""
    more = (replace(each, number=1000 + each.number) for each in requests if isinstance(each, Generate))
    return (*requests, *more)


def draw_on_disk(seed: int, draw: Random) -> Plan:
    """A few prompts come again and again, the pool has room for one or two of them, and the disk for more."""
    layout, over_s = draw_layout(draw, Kind.TIGHT), draw.choice((1.0, 5.0))
    worker = layout.worker
    # As small as one that refuses no request may be.
    pool_tokens = 2 * LONGEST + 40
    worker = replace(worker, num_blocks=pool_tokens // worker.block_size)
    drawn = draw_requests(draw, draw.choice((Kind.CALM, Kind.TIGHT)), layout.clients, pool_tokens, over_s)
    prompts = [_fresh(draw, 100) for _ in range(6)]
    tenant = draw.choice((None, "ann", "ann"))
    drawn = _doubled(drawn)
    requests = [
        replace(
            each,
            prompt=draw.choice(prompts)[: draw.randint(60, 100)],
            at=draw.uniform(0, over_s),
            tenant=tenant or each.tenant,
        )
        if isinstance(each, Generate) and each.front is None
        else each
        for each in drawn
    ]
    layout = replace(layout, worker=worker, disk_blocks=draw.choice(_DISK_BLOCKS), keeps_pools=draw.random() < 0.3)
    layout = _with_ranks(Random(f"parts on disk {seed}"), layout)
    late = draw_slow_block_disks(Random(f"slow {seed}"), over_s)
    if any(isinstance(fault, HalfOpen | PowerOff) for fault in late):
        # The worker waits to be rid of its answers, and hears of the next scheduler only then.
        layout = replace(layout, weather=replace(layout.weather, window_bytes=32))
    faults = (*draw_block_disk_faults(draw, layout.hosts, over_s), *late)
    steps = Random(f"steps {seed}")
    if steps.random() < 0.4:
        # Blocks come while steps are in flight that write to them.
        settings = replace(layout.settings, max_steps_in_flight=4)
        layout = replace(layout, slowness=10.0, settings=settings, worker=replace(layout.worker, max_steps_in_flight=4))
    return _plan(seed, layout, requests, faults, MOVES if draw.random() < 0.5 else ())


def _restarting(seed: int, draw: Random, fault: Callable[[float], Fault]) -> Plan:
    """One fault, when requests run."""
    layout = replace(draw_layout(draw, Kind.RESTARTS), num_replicas=1)
    pool_tokens = layout.worker.num_blocks * layout.worker.block_size
    requests = draw_requests(draw, Kind.RESTARTS, layout.clients, pool_tokens, 0.3)
    return _plan(seed, layout, requests, [fault(draw.uniform(0, 0.5))])


def _slow_preparations(seed: int, draw: Random) -> Plan:
    """Many constraints and adapters, of which some take longer than schedulers wait."""
    layout, over_s = draw_layout(draw, Kind.MIXED), draw.choice((0.3, 0.3, 10.0))
    low = draw_low_limits(draw) or ("scheduler_svc.core.preparation.NUM_KEPT",)
    pool_tokens = layout.worker.num_blocks * layout.worker.block_size
    drawn = draw_requests(draw, Kind.MIXED, layout.clients, pool_tokens, over_s)
    requests = with_adapters(draw, with_constraints(draw, drawn))
    faults = draw_faults(draw, Kind.MIXED, layout.hosts, [each.at for each in requests], over_s, layout.worker)
    layout = replace(layout, preparations_are_slow=True, worker=replace(layout.worker, max_adapters=2))
    return _plan(seed, layout, requests, faults if draw.random() < 0.5 else (), low)


def _adapters_that_swap(seed: int, draw: Random) -> Plan:
    """Requests leave for host memory, and their adapter has left its slot when they come back."""
    layout, requests = _preempting(draw)
    settings = replace(layout.settings, preemption_mode="swap")
    layout = replace(layout, settings=settings, worker=replace(layout.worker, num_host_blocks=640, max_adapters=1))
    return _plan(seed, layout, with_adapters(draw, requests))


def _deaths_at_several_steps(seed: int, draw: Random) -> Plan:
    """A worker dies again and again while it computes one prompt, and never twice in a row at the same step of it: the
    request is not at fault."""
    layout = draw_layout(draw, Kind.RESTARTS)
    worker = replace(layout.worker, max_num_batched_tokens=16, block_size=16, num_blocks=100)
    layout = replace(layout, num_replicas=1, worker=worker, slowness=10.0)
    request = draw_requests(draw, Kind.RESTARTS, layout.clients, 1600, 0.0)[0]
    requests = [
        Generate(0, 0.0, request.client, "ann", _fresh(draw, 100), GenerationOptions(max_tokens=4), Verb.STREAM)
    ]
    point, first = "worker.step.admitted", draw.randint(1, 3)
    times = [sum(0.1 * 2**number + 0.5 for number in range(count)) for count in range(draw.randint(6, 8))]
    faults = [KillAt(at, "worker-0", point, first + count % 2) for count, at in enumerate(times)]
    return _plan(seed, layout, requests, faults)


def draw_rows_that_change_hands(seed: int, draw: Random) -> Plan:
    """Requests end and others take their rows and blocks while steps of them are in flight."""
    layout, size = draw_layout(draw, Kind.TIGHT), draw.choice((2, 4))
    worker = replace(
        layout.worker,
        max_num_rows=draw.choice((2, 4)),
        block_size=size,
        num_blocks=(2 * LONGEST + 40) // size,
        num_host_blocks=0,
        max_steps_in_flight=4,
        max_drafts=draw.choice((0, 1, 7)),
        fixed_tokens=1000,
        max_passes=draw.choice((1, 4)),
    )
    settings = replace(layout.settings, max_waiting_requests=MANY, max_steps_in_flight=draw.choice((2, 4)))
    layout = replace(layout, slowness=10.0, worker=worker, settings=settings)
    requests, within_s = list[Request](), draw.choice((2.0, 8.0))
    for each in _doubled(draw_requests(draw, Kind.TIGHT, layout.clients, worker.num_blocks * size, 0.3)):
        if isinstance(each, Generate) and each.front is None:
            # Few fill the pool, so that each that comes takes the blocks of the one that has just left.
            prompt = (each.prompt * 100)[: draw.randint(60, 100)]
            each = replace(each, at=draw.uniform(0, 0.3), timeout_s=None, prompt=prompt)
            match draw.choice(("stay", "leave", "cancel")):
                case "leave":
                    each = replace(each, leaves_after_s=draw.uniform(0.02, within_s))
                case "cancel":
                    each = replace(each, cancels_after_s=draw.uniform(0.02, within_s))
                case _:
                    pass
        requests.append(each)
    return _plan(seed, layout, requests)


def draw_streams_that_change_hands(seed: int, draw: Random) -> Plan:
    """Durable streams are taken over or cancelled while a worker is gone for long, or the way to a scheduler."""
    way_is_gone = draw.random() < 0.5
    # What is cancelled while its scheduler is away has to run for long after that, to show whether it is ended.
    slowness = 150.0 if way_is_gone else 20.0
    layout = replace(draw_layout(draw, Kind.RESTARTS), num_replicas=2, num_gateways=2, slowness=slowness)
    layout = replace(layout, settings=replace(layout.settings, max_durable_requests=MANY, durable_grace=60.0))
    failover_s = 5.0 if way_is_gone else draw.choice((0.5, 5.0, 5.0))
    layout = replace(layout, gateway=replace(layout.gateway, failover_delay=failover_s))
    pool_tokens = layout.worker.num_blocks * layout.worker.block_size
    at, number = draw.uniform(0.4, 0.8), draw.randrange(2)
    requests: list[Request] = []
    for each in draw_requests(draw, Kind.RESTARTS, layout.clients, pool_tokens, 0.3)[: 6 if way_is_gone else None]:
        if isinstance(each, Generate) and each.options.beam_search is None and each.options.constraint is None:
            options = replace(each.options, max_tokens=MAX_OUTPUT, ignore_eos=True, stop_token_ids=(), stop=())
            each = replace(each, verb=Verb.DURABLE, options=options, timeout_s=None, leaves_after_s=None)
            after_s = max(at - each.at, 0.0) + draw.uniform(0.05, 2.0)
            match draw.choice(("stay", "take over", "cancel")):
                case "take over":
                    each = replace(each, taken_over_after_s=after_s, num_takeovers=draw.choice((1, 1, 3)))
                case "cancel":
                    each = replace(each, cancels_after_s=after_s, taken_over_after_s=None)
                case _:
                    pass
        requests.append(each)
    if not way_is_gone:
        # Streams that were lost are read again, and taken over before any token comes.
        lost_at = at + draw.uniform(0.1, 1.0)
        lost = [Reset(lost_at, "client", number) for number in range(8 if draw.random() < 0.5 else 0)]
        return _plan(seed, layout, requests, [CannotStart(at, f"worker-{number}", 25.0), *lost])
    # A cut alone is noticed late.
    resets = [Reset(at + 0.01, "gateway", number) for number in range(6)]
    away_s = draw.choice((3.0, 8.0))
    away = [Cut(at, gateway, f"scheduler-{number}", True, away_s) for gateway in layout.gateways]
    return _plan(seed, layout, requests, [*away, *resets])


def _pins_that_give_way(seed: int, draw: Random) -> Plan:
    """Tenants pin more than there is room for while requests move, and workers come back with other pools."""
    plan = draw_moving(seed, draw)
    settings = replace(plan.layout.settings, pin_quota=draw.choice((0.25, 0.45)), max_pinned=0.9)
    requests, faults, worker = list(plan.requests), list(plan.faults), plan.layout.worker
    for number in range(2000, 2000 + draw.choice((8, 16))):
        at, client, tenant = draw.uniform(0, 1.5), draw.choice(plan.layout.clients), draw.choice(("ann", "bob"))
        requests.append(Pin(number, _START_S + at, client, tenant, _fresh(draw, draw.randint(20, 104)), 60_000))
    if draw.random() < 0.5:
        size = draw.choice((2, 4, 16))
        num_blocks = worker.num_blocks * worker.block_size // size + draw.choice((0, 7))
        faults.append(OtherPool(_START_S + draw.uniform(0.5, 3), "worker-0", size, num_blocks, 32))
    layout = replace(plan.layout, settings=settings)
    return replace(plan, layout=layout, requests=tuple(requests), faults=tuple(faults))


def _fresh(draw: Random, count: int) -> tuple[int, ...]:
    """So many tokens that no other prompt has."""
    return tuple(draw.randrange(NUM_SPECIAL_TOKENS, VOCAB_SIZE) for _ in range(count))


def _leases_that_give_way(seed: int, draw: Random) -> Plan:
    """Requests move with their first token, slowly, and beam searches that stay take their blocks meanwhile."""
    layout, requests = _preempting(draw)
    size = draw.choice((2, 4))
    worker = replace(layout.worker, block_size=size, num_blocks=(2 * LONGEST + 40) // size, num_host_blocks=0)
    weather = replace(layout.weather, max_delay_s=0.001, bytes_per_s=draw.choice((2e4, 1e5)), window_bytes=256)
    options = replace(layout.gateway, long_prompt=1)
    layout = replace(layout, num_replicas=2, first_role="prefill", gateway=options, worker=worker, weather=weather)
    beams = GenerationOptions(beam_search=BeamSearch(2), n=1, max_tokens=MAX_OUTPUT, ignore_eos=True)
    changed: list[Request] = []
    for each in _doubled(requests):
        if isinstance(each, Generate) and draw.random() < 0.4:
            changed.append(replace(each, options=beams, at=draw.uniform(0, 1)))
        elif isinstance(each, Generate):
            prompt = _fresh(draw, draw.randint(40, 100))
            changed.append(replace(each, prompt=prompt, at=draw.uniform(0, 2)))
    # Where they go there is room.
    larger = OtherPool(-1.5, "worker-1", size, 8 * worker.num_blocks, 0)
    return _plan(seed, replace(layout, slowness=5.0), changed, [larger], low=LEASES)


def _moves_that_end_late(seed: int, draw: Random) -> Plan:
    """A scheduler is gone, and the next one uses blocks that a slow disk still brings to the worker for the one before,
    whose stream is open as long as its answers cannot go out."""
    plan = draw_on_disk(seed, draw)
    at = min(each.at for each in plan.requests) + draw.uniform(0.3, 2.0)
    slow = SlowBlockDisk(at - 0.3, "worker-0", draw.choice((1.0, 2.0)), 20.0)
    layout = replace(plan.layout, num_replicas=1, weather=replace(plan.layout.weather, window_bytes=32))
    gone = HalfOpen(at, "scheduler", 0), Kill(at + draw.uniform(0.01, 0.3), "scheduler-0")
    return replace(plan, layout=layout, faults=(slow, *gone), low_limits=MOVES)


def _displacing(seed: int, draw: Random) -> Plan:
    """Requests of several sequences, of which some begin alike, displace each other, or end together and leave blocks
    that are not free at once."""
    layout, requests = _preempting(draw)
    settings = replace(layout.settings, policy=draw.choice(("priority", "priority", "fair")))
    size, counts = draw.choice((2, 4)), draw.choice(((1, 1, 2), (1, 4, 4)))
    stems = [_fresh(draw, 60) for _ in range(draw.choice((2, 8)))]
    worker = replace(layout.worker, block_size=size, num_blocks=(2 * LONGEST + 40) // size, num_host_blocks=0)
    low = tuple(f"scheduler_svc.core.kv_cache.{name}" for name in ("_MAX_RECLAIMED", "_MAX_RECLAIMED_BLOCKS"))
    changed: list[Request] = []
    for each in _doubled(requests):
        options = GenerationOptions(n=draw.choice(counts), temperature=1.0, seed=draw.randrange(1 << 64))
        options = replace(options, max_tokens=draw.choice((20, 20, 50)), ignore_eos=True)
        prompt = draw.choice(stems)[: draw.choice((4, 60))] + _fresh(draw, draw.randint(1, 9))
        given = {"priority": draw.randint(-2, 2), "tenant": draw.choice(("ann", "bob")), "at": draw.uniform(0, 2.0)}
        changed.append(replace(cast(Any, each), prompt=prompt, options=options, **given))
    layout = replace(layout, worker=worker, settings=settings, num_replicas=1, slowness=draw.choice((5.0, 10.0)))
    return _plan(seed, layout, changed, low=low if draw.random() < 0.7 else ())


def _deadly_crowds(seed: int, draw: Random) -> Plan:
    """So many requests run when a worker dies of one that they are tried in cohorts."""
    layout, requests = _preempting(draw)
    worker = replace(layout.worker, block_size=16, num_blocks=400, max_num_batched_tokens=512)
    layout = replace(layout, num_replicas=1, worker=worker, slowness=10.0)
    options = GenerationOptions(max_tokens=MAX_OUTPUT, ignore_eos=True)
    stay = {"options": options, "timeout_s": None, "leaves_after_s": None, "cancels_after_s": None}
    many = [replace(cast(Any, each), **stay) for each in _doubled(requests)]
    return _plan(seed, layout, with_deadly(draw, many))


def _late_answers(seed: int, draw: Random) -> Plan:
    """Steps that wait for each other take long together, and a scheduler that stands still finds late heartbeats before
    their answers."""
    plan = _restarting(seed, draw, lambda at: Hang(at, "worker-0", 4.0))
    at = plan.faults[0].at
    others = (Hang(at + 3.9, "worker-0", 4.0), Pause(at + 0.1, "scheduler-0", draw.uniform(5.5, 8.0)))
    layout, several = plan.layout, {"max_steps_in_flight": 4}
    layout = replace(layout, worker=replace(layout.worker, **several), settings=replace(layout.settings, **several))
    faults = plan.faults[0], draw.choice(others)
    return replace(plan, layout=replace(layout, slowness=10.0), faults=faults)


def _paid(seed: int, draw: Random) -> Plan:
    """One key pays for all, of which some is refused and some is read by several calls; nothing breaks."""
    layout = replace(draw_layout(draw, Kind.CALM), num_gateways=1, num_replicas=1, slowness=10.0)
    settings = replace(layout.settings, max_waiting_requests=draw.choice((2, MANY)), max_durable_requests=MANY)
    layout = replace(layout, settings=settings, worker=replace(layout.worker, max_num_rows=4))
    drawn = draw_requests(draw, Kind.CALM, layout.clients, layout.worker.num_blocks * layout.worker.block_size, 0.3)
    asked = [each for each in drawn if isinstance(each, Generate)]
    requests = [replace(each, tenant="metered", prompt=each.prompt[:20]) for each in asked]
    return _plan(seed, layout, with_takeovers(draw, requests) if draw.random() < 0.5 else requests)


_SHORT_OF_ROOM = (_pins_that_give_way, _leases_that_give_way, _leases_that_give_way)
_SHORTAGES = (*_SHORT_OF_ROOM, _moves_that_end_late, _displacing, _displacing, _deadly_crowds, _late_answers, _paid)
_OF_HANDS = (draw_rows_that_change_hands, draw_streams_that_change_hands)
_OF_WORKERS = (
    _slow_preparations,
    _slow_preparations,
    _adapters_that_swap,
    _deaths_at_several_steps,
    _stops_in_recomputations,
)
_RARITIES = (_searches_that_swap, _stops_in_recomputations, _clocks_set_back, _deaths_between_ranks)


def _with_ranks(draw: Random, layout: Layout) -> Layout:
    """Some workers have two ranks."""
    return replace(layout, worker=replace(layout.worker, world_size=1 + (draw.random() < _RANKED)))


def _with_passes(draw: Random, layout: Layout) -> Layout:
    """Some workers of one rank run the model several times in a step of decodes."""
    passes = draw.choice((2, 4, 8)) if draw.random() < _PASSING and layout.worker.world_size == 1 else 1
    return replace(layout, worker=replace(layout.worker, max_passes=passes))


def _with_long_recomputations(layout: Layout) -> Layout:
    """What was preempted is computed again, a little in each step, so that much happens meanwhile."""
    settings = replace(layout.settings, preemption_mode="recompute", max_prefill_share=0.1)
    return replace(layout, worker=replace(layout.worker, max_num_batched_tokens=16), settings=settings)


def _with_stops(draw: Random, request: Request) -> Request:
    """Most requests that may stop do so at a text of several tokens that they say, and say the beginnings of others."""
    if not isinstance(request, Generate) or draw.random() < 0.3:
        return request
    options = request.options
    if options.beam_search is not None or options.constraint is not None or options.best_of not in (None, options.n):
        return request
    text = draw.choice(answer_of(replace(request, options=replace(options, stop=())), 0).sequences).text
    if len(text) < 4:
        return request
    begin, size = draw.randrange(len(text) - 1), draw.randint(2, 4)
    said, begun = text[begin : begin + size], [text[place : place + 2] + "~" for place in (begin, len(text) // 2)]
    stop = (*((said,) if draw.random() < 0.6 else ()), *begun, text[-1] + "~")
    return replace(request, options=replace(options, stop=stop, include_stop_string=draw.choice((None, True))))


def run_world(plan: Plan, on_world: Callable[[World], object] = lambda _: None) -> Outcome:
    """Runs a cluster and its requests under the faults of a plan. `on_world` gets the world before it begins.

    Raises:
        FalseAnswerError: an answer says what it must not.
        StuckError: not everything has ended in time.
        ServiceFailedError: a process did what it must not.
    """
    with World(plan.seed) as world:
        on_world(world)
        clusters, charges = list[Cluster](), Charges()
        with (
            gateways_without_sockets(),
            watched_schedulers(clusters),
            low_limits(plan.low_limits),
            charges.noted(),
        ):
            cluster = Cluster(world, plan.layout, _circumstances(plan))
            clusters.append(cluster)
            for request in plan.requests:
                world.at(request.at, lambda request=request: cluster.ask(request))
            for fault in plan.faults:
                world.at(fault.at, lambda fault=fault: fault.begin(cluster))

            world.run(lambda: cluster.has_failed or cluster.num_over == len(plan.requests), _limit_s(plan))
            cluster.check()
            cluster.check_rates(world.now - _START_S)
            cluster.check_glitches()
            # What clients have left behind ends soon after.
            try:
                world.run(lambda: cluster.has_failed or cluster.is_quiet, _KEPT_S + _PATIENCE_S)
            except StuckError as error:
                raise StuckError(f"{', '.join(cluster.held)}: {error}") from error
            cluster.check()
            cluster.check_charges(charges)
            for disk in cluster.disks.values():
                disk.check()
        errors = tuple(story.error.reason for story in cluster.stories if story.error is not None)
        num_tokens = sum(story.witness.last.num_tokens for story in cluster.stories if story.witness is not None)
        return Outcome(world.digest, world.num_events, world.now, num_tokens, errors)


def _circumstances(plan: Plan) -> Circumstances:
    plan = replace(plan, faults=tuple(fault for fault in plan.faults if not isinstance(fault, BadDisk)))
    trouble_s = sum(fault.seconds for fault in plan.faults)
    settings = plan.layout.settings
    changes = [fault for fault in plan.faults if isinstance(fault, OtherModel)]
    deadly = [each for each in plan.requests if isinstance(each, Generate) and each.deadly_at is not None]
    is_deadly = bool(deadly) or plan.layout.deadly is not None
    kills = [fault for fault in plan.faults if isinstance(fault, Kill | KillAt)]
    return Circumstances(
        (plan.layout.worker.block_size, *(each.block_size for each in plan.faults if isinstance(each, OtherPool))),
        bool(plan.faults),
        settings.max_waiting_requests < MANY,
        settings.max_durable_requests < MANY,
        trouble_s,
        any(isinstance(fault, Glitch) for fault in plan.faults),
        models=tuple(sorted({0} | {int(fault.model.weights) for fault in changes})),
        # Where another replica has it, and nothing else is wrong, requests go on there.
        may_lose_model=bool(changes) and (plan.layout.num_replicas == 1 or len(plan.faults) > 1 or is_deadly),
        may_mix_models=bool(changes) and len(plan.faults) > 1,
        deadly={each.options.seed or 0: each.deadly_at or 0 for each in deadly},
        deadly_need=plan.layout.deadly,
        # The next scheduler is there soon, and ends what the one before began.
        may_hang=is_deadly or len(kills) < len(plan.faults) or len(kills) > 1,
        may_cut=any(map(_may_cut, plan.faults)),
        may_fail_loads=plan.layout.loads_fail,
        may_be_slow=plan.layout.preparations_are_slow,
    )


def _may_cut(fault: Fault) -> bool:
    """Whether it may end connections between clients and gateways."""
    return isinstance(fault, Cut | Reset | HalfOpen) or getattr(fault, "host", "").startswith("gateway")


def _limit_s(plan: Plan) -> float:
    """When everything has to have ended. A replica computes all that is asked in a few seconds."""
    last_s = max((each.at for each in (*plan.requests, *plan.faults)), default=0.0)
    generates = [each for each in plan.requests if isinstance(each, Generate)]
    reading_s = max((each.pause_s * (MAX_OUTPUT + 2) * each.num_returned for each in generates), default=0.0)
    is_limited = any(set(TENANT[each.tenant].limits.values()) != {None} for each in plan.requests)
    needy = [each for each in generates if plan.layout.deadly in each.needs] if plan.layout.deadly else []
    deadly_s = len(_circumstances(plan).deadly) * _DEADLY_S + bool(needy) * _DEADLY_S + len(needy) * _LATER_S
    return last_s + _circumstances(plan).trouble_s + deadly_s + reading_s + _PATIENCE_S + is_limited * _QUOTA_S


def main(first: int, count: int) -> int:
    """Prints a line for each world, and how fast they were to stderr. Returns 1 where one has failed."""
    started, num_events, seconds, failed = time.process_time(), 0, 0.0, list[int]()
    for number, seed in enumerate(range(first, first + count), start=1):
        try:
            outcome = run_world(draw_plan(seed))
        except Exception as error:
            failed.append(seed)
            print(seed, "fails:", type(error.__cause__ or error).__name__, str(error).replace("\n", " "), flush=True)
        else:
            num_events, seconds = num_events + outcome.num_events, seconds + outcome.seconds
            print(seed, outcome.digest, outcome.num_events, f"{outcome.seconds:.3f}", *outcome.errors, flush=True)
        if number % _REPORTED == 0 or number == count:
            used = time.process_time() - started
            print(
                f"{number} worlds, {num_events} events, {seconds:.0f} virtual s: {used:.1f} s of CPU, "
                f"{num_events / used:.0f} events a second; {len(failed)} failed: {failed}",
                file=sys.stderr,
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
