"""Rare coincidences: worlds that are drawn so that certain events come together."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, cast

from quire.client import BeamSearch, Constraint, EarlyStopping, GenerationOptions
from quire.messages.layer_groups import LayerGroups
from tests.sim.plans import (
    KEEPING,
    START_S,
    Plan,
    fresh,
    plan_of,
    with_groups,
    with_long_recomputations,
    with_naps,
    with_passes,
    with_ranks,
    with_stops,
)
from tests.sim.world.cluster import MANY, Layout, draw_layout
from tests.sim.world.faults import (
    CannotStart,
    Cut,
    Fault,
    HalfOpen,
    Hang,
    Kill,
    KillAt,
    OtherPool,
    Pause,
    PowerOff,
    Reset,
    SetClock,
    SlowBlockDisk,
    draw_block_disk_faults,
    draw_drains,
    draw_faults,
    draw_slow_block_disks,
)
from tests.sim.world.knobs import LEASES, MOVES, TIES, draw_low_limits
from tests.sim.world.reference import answer_of
from tests.sim.world.traffic import (
    ADAPTERS,
    LONGEST,
    MAX_OUTPUT,
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
    with_takeovers,
)
from tests.support.fake_worker import FakeWorkerConfig

DISK_BLOCKS = (4, 32, 500, 500)
"""Possible disk sizes, in blocks."""
_HOST_TOKENS = (60, 300, 1000, 3000)
"""Possible sizes of host memory that holds blocks evicted from the pools, in tokens."""


def _searches_that_swap(seed: int, draw: Random) -> Plan:
    """Beam searches are preempted and resumed just after their sequences forked and share blocks that they write."""
    layout, requests = _preempting(draw)
    worker = replace(layout.worker, block_size=16, num_blocks=12, num_host_blocks=64)
    layout = replace(layout, worker=worker, settings=replace(layout.settings, preemption_mode="swap"))
    options = GenerationOptions(beam_search=BeamSearch(2), n=1, max_tokens=MAX_OUTPUT, ignore_eos=True)
    return plan_of(seed, layout, [replace(each, options=options) for each in requests])


def _stops_in_recomputations(seed: int, draw: Random) -> Plan:
    """The worker dies while the gateway is paused. When the gateway finds stop strings, their sequences are already
    computed again, with a prompt that they share."""
    layout, requests = _preempting(draw)
    worker = replace(layout.worker, block_size=4, num_blocks=400)
    layout = replace(with_long_recomputations(replace(layout, worker=worker)), num_gateways=1, slowness=20.0)
    several = [
        replace(
            each,
            prompt=fresh(draw, 40),
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
    return plan_of(seed, layout, map(partial(with_stops, draw), several), faults)


def _preempting(draw: Random) -> tuple[Layout, list[Generate]]:
    """Streams that run at the same time, in a pool that is too small for all."""
    layout = draw_layout(draw, Kind.TIGHT)
    settings = replace(layout.settings, max_waiting_requests=MANY, policy="fcfs")
    layout = replace(layout, settings=settings, worker=replace(layout.worker, max_num_rows=64))
    drawn = draw_requests(draw, Kind.TIGHT, layout.clients, layout.worker.num_blocks * layout.worker.block_size, 0.05)
    streams = [replace(each, verb=Verb.STREAM) for each in drawn if isinstance(each, Generate)]
    return layout, [each for each in grown(draw, streams) if isinstance(each, Generate)]


def _clocks_set_back(seed: int, draw: Random) -> Plan:
    """A scheduler restarts, and by its clock this is before its first start."""
    return _restarting(seed, draw, lambda at: SetClock(at, "scheduler-0", 600.0, restarts=True))


def _clocks_set_back_again(seed: int, draw: Random) -> Plan:
    """The same happens again once the scheduler has its worker."""
    plan = _restarting(seed, draw, lambda at: SetClock(at, "scheduler-0", 600.0, restarts=True))
    again = SetClock(plan.faults[0].at + draw.uniform(40, 50), "scheduler-0", 600.0, restarts=True)
    return replace(plan, faults=(*plan.faults, again))


def _deaths_between_ranks(seed: int, draw: Random) -> Plan:
    """A scheduler dies between its writes to two ranks."""
    point, number = "scheduler.step.between_ranks", draw.randint(1, 20)
    plan = _restarting(seed, draw, lambda at: KillAt(at, "scheduler-0", point, number))
    return replace(plan, layout=replace(plan.layout, worker=replace(plan.layout.worker, world_size=2)))


def draw_moving(seed: int, draw: Random) -> Plan:
    """Replicas drain while requests run, and the transfers between the replicas are disturbed. In half of the worlds
    requests also move with their first token."""
    layout = replace(with_ranks(draw, draw_layout(draw, draw.choice((Kind.MIXED, Kind.RESTARTS)))), num_replicas=2)
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
    layout = replace(with_passes(draw, layout), keeps_pools=Random(f"pools {seed}").random() < KEEPING)
    drains, low = draw_drains(draw, layout.hosts, over_s, layout.worker), ()
    crowded = Random(f"crowded {seed}")
    if crowded.random() < 0.5:
        # Leases give way while their blocks are on the way, and blocks arrive in places that were just freed. The
        # blocks to send are read only as they go out.
        weather = replace(layout.weather, bytes_per_s=crowded.choice((2e4, 1e5)), window_bytes=256)
        requests = tuple(_choosing(crowded, each) for each in _doubled(requests))
        layout = replace(layout, worker=_with_small_pool(layout.worker, requests), weather=weather)
        low = MOVES if crowded.random() < 0.7 else ()
    return plan_of(seed, layout, requests, drains, low)


def _with_small_pool(worker: FakeWorkerConfig, requests: Sequence[Request]) -> FakeWorkerConfig:
    """A worker whose pool is the smallest that refuses no request, or somewhat larger."""

    def needed(request: Generate) -> int:
        options, size = request.options, worker.block_size
        width = options.best_of or options.n or 1 if options.beam_search is None else options.beam_search.beam_width
        shared, longest = len(request.prompt) // size, len(request.prompt) + (options.max_tokens or MAX_OUTPUT)
        return shared + width * (-(-longest // size) - shared)

    largest = max((needed(each) for each in requests if isinstance(each, Generate)), default=0)
    return replace(worker, num_blocks=max((2 * LONGEST + 40) // worker.block_size, largest))


def _choosing(draw: Random, request: Request) -> Request:
    """In a third of the cases returns a beam search, which does not move and takes blocks that others just freed."""
    if not isinstance(request, Generate) or request.front is not None or draw.random() < 0.66:
        return request
    options = GenerationOptions(beam_search=BeamSearch(2), n=1, max_tokens=MAX_OUTPUT, ignore_eos=True)
    return replace(request, options=options)


def _doubled(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Doubles the number of requests for tokens."""
    more = (replace(each, number=1000 + each.number) for each in requests if isinstance(each, Generate))
    return (*requests, *more)


def with_host_cache(draw: Random, layout: Layout) -> Layout:
    worker = layout.worker
    tokens = draw.choice(_HOST_TOKENS)
    return replace(layout, worker=replace(worker, device="cuda", num_host_blocks=max(tokens // worker.block_size, 1)))


def draw_on_host(seed: int, draw: Random) -> Plan:
    """A few prompts repeat; the pool has room for one or two of them, host memory for more. So do some disks."""
    layout, requests, over_s = _few_prompts(draw)
    layout = with_host_cache(draw, with_ranks(Random(f"ranks of hosts {seed}"), layout))
    layout = replace(layout, settings=replace(layout.settings, max_durable_requests=MANY))
    faults: tuple[Fault, ...] = ()
    if draw.random() < 0.5:
        kind = draw.choice((Kind.MIXED, Kind.RESTARTS, Kind.TIGHT))
        faults = draw_faults(draw, kind, layout.hosts, [each.at for each in requests], over_s, layout.worker)
    if draw.random() < 0.2:
        layout = replace(layout, disk_blocks=draw.choice(DISK_BLOCKS))
    return plan_of(seed, layout, requests, faults, MOVES if draw.random() < 0.2 else ())


def draw_on_disk(seed: int, draw: Random) -> Plan:
    """A few prompts repeat; the pool has room for one or two of them, and the disk for more."""
    layout, requests, over_s = _few_prompts(draw)
    layout = replace(layout, disk_blocks=draw.choice(DISK_BLOCKS), keeps_pools=draw.random() < 0.3)
    layout = with_ranks(Random(f"parts on disk {seed}"), layout)
    late = draw_slow_block_disks(Random(f"slow {seed}"), over_s)
    if any(isinstance(fault, HalfOpen | PowerOff) for fault in late):
        # The worker waits until its answers have gone out, and only then hears of the next scheduler.
        layout = replace(layout, weather=replace(layout.weather, window_bytes=32))
    faults = (*draw_block_disk_faults(draw, layout.hosts, over_s), *late)
    steps = Random(f"steps {seed}")
    if steps.random() < 0.4:
        # Blocks arrive while steps that write to them are in flight.
        settings = replace(layout.settings, max_steps_in_flight=4)
        layout = replace(layout, slowness=10.0, settings=settings, worker=replace(layout.worker, max_steps_in_flight=4))
    return plan_of(seed, layout, requests, faults, MOVES if draw.random() < 0.5 else ())


def _few_prompts(draw: Random) -> tuple[Layout, list[Request], float]:
    """A pool with room for one or two of a few prompts, requests that repeat them, and the seconds in which they do."""
    layout, over_s = draw_layout(draw, Kind.TIGHT), draw.choice((1.0, 5.0))
    worker = layout.worker
    # The smallest pool that refuses no request.
    pool_tokens = 2 * LONGEST + 40
    worker = replace(worker, num_blocks=pool_tokens // worker.block_size)
    drawn = draw_requests(draw, draw.choice((Kind.CALM, Kind.TIGHT)), layout.clients, pool_tokens, over_s)
    prompts = [fresh(draw, 100) for _ in range(6)]
    tenant = draw.choice((None, "ann", "ann"))
    drawn = _doubled(drawn)
    requests: list[Request] = [
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
    return replace(layout, worker=worker), requests, over_s


def _restarting(seed: int, draw: Random, fault: Callable[[float], Fault]) -> Plan:
    """One fault while requests run."""
    layout = replace(draw_layout(draw, Kind.RESTARTS), num_replicas=1)
    pool_tokens = layout.worker.num_blocks * layout.worker.block_size
    requests = draw_requests(draw, Kind.RESTARTS, layout.clients, pool_tokens, 0.3)
    return plan_of(seed, layout, requests, [fault(draw.uniform(0, 0.5))])


def _slow_preparations(seed: int, draw: Random) -> Plan:
    """Many constraints and adapters; some of them take longer than schedulers wait."""
    layout, over_s = draw_layout(draw, Kind.MIXED), draw.choice((0.3, 0.3, 10.0))
    low = draw_low_limits(draw) or ("scheduler_svc.core.preparation.NUM_KEPT",)
    pool_tokens = layout.worker.num_blocks * layout.worker.block_size
    drawn = draw_requests(draw, Kind.MIXED, layout.clients, pool_tokens, over_s)
    requests = with_adapters(draw, with_constraints(draw, drawn))
    faults = draw_faults(draw, Kind.MIXED, layout.hosts, [each.at for each in requests], over_s, layout.worker)
    layout = replace(layout, preparations_are_slow=True, worker=replace(layout.worker, max_adapters=2))
    return plan_of(seed, layout, requests, faults if draw.random() < 0.5 else (), low)


def draw_endless_preparations(seed: int, draw: Random) -> Plan:
    """All requests arrive at once, each with its own constraint. Soon nothing runs, and workers prepare only
    constraints that never finish. The other constraints can be prepared only after these are given up."""
    layout = replace(draw_layout(draw, Kind.CALM), num_replicas=1, num_gateways=1, preparations_are_slow=True)
    worker = replace(layout.worker, max_num_rows=64, num_blocks=1600 // layout.worker.block_size)
    settings = replace(layout.settings, max_waiting_requests=MANY, max_durable_requests=MANY)
    requests: list[Request] = []
    for first, last in zip("abcdefabcdefabcdef", "ppppppqqqqqqrrrrrr", strict=True):
        options = GenerationOptions(max_tokens=4, constraint=Constraint(regex=f"[{first}-{last}]+"))
        at, prompt = draw.uniform(0, 0.1), fresh(draw, draw.randint(1, 9))
        requests.append(Generate(len(requests), at, "client-0", "ann", prompt, options))
    return plan_of(seed, replace(layout, worker=worker, settings=settings), requests)


def _restarts_of_ranks(seed: int, draw: Random) -> Plan:
    """Workers of two ranks; now and then one rank ends or is unreachable."""
    layout = draw_layout(draw, Kind.RESTARTS)
    layout = replace(layout, worker=replace(layout.worker, world_size=2), keeps_pools=draw.random() < KEEPING)
    pool_tokens = layout.worker.num_blocks * layout.worker.block_size
    requests = draw_requests(draw, Kind.RESTARTS, layout.clients, pool_tokens, 3.0)
    times = [each.at for each in requests]
    faults = draw_faults(draw, Kind.RESTARTS, layout.hosts, times, 3.0, layout.worker)
    return plan_of(seed, layout, requests, faults if draw.random() < 0.7 else ())


def draw_naps(seed: int, draw: Random) -> Plan:
    """Replicas are put to sleep while ranks restart, requests move, or blocks come from disks or go to the host."""
    base = draw.choice((_restarts_of_ranks, _restarts_of_ranks, draw_moving, draw_on_disk, draw_on_host))
    return with_naps(draw, base(seed, draw))


def _adapters_that_swap(seed: int, draw: Random) -> Plan:
    """Requests are swapped out to host memory, and their adapter has lost its slot when they come back."""
    layout, requests = _preempting(draw)
    settings = replace(layout.settings, preemption_mode="swap")
    layout = replace(layout, settings=settings, worker=replace(layout.worker, num_host_blocks=640, max_adapters=1))
    return plan_of(seed, layout, with_adapters(draw, requests))


def draw_adapters_in_turn(seed: int, draw: Random) -> Plan:
    """More adapters than slots, used mostly one after the other, so that the order of eviction shows."""
    layout = replace(draw_layout(draw, Kind.CALM), num_replicas=1)
    layout = replace(layout, worker=replace(layout.worker, max_adapters=2))
    requests: list[Request] = []
    for number in range(24):
        at, prompt = 0.4 * number + draw.uniform(0, 0.2), fresh(draw, draw.randint(1, 20))
        options = GenerationOptions(max_tokens=draw.choice((2, 10, 60)), ignore_eos=True)
        tenant, adapter = draw.choice(("ann", "bob")), draw.choice(ADAPTERS)
        requests.append(Generate(number, at, "client-0", tenant, prompt, options, adapter=adapter))
    return plan_of(seed, layout, requests)


def _deaths_at_several_steps(seed: int, draw: Random) -> Plan:
    """A worker dies repeatedly while it computes one prompt, but never twice in a row at the same step of it, nor with
    the same two steps in flight: the request is not at fault."""
    layout = draw_layout(draw, Kind.RESTARTS)
    worker = replace(layout.worker, max_num_batched_tokens=16, block_size=16, num_blocks=100)
    layout = replace(layout, num_replicas=1, worker=worker, slowness=10.0)
    request = draw_requests(draw, Kind.RESTARTS, layout.clients, 1600, 0.0)[0]
    requests = [Generate(0, 0.0, request.client, "ann", fresh(draw, 100), GenerationOptions(max_tokens=4), Verb.STREAM)]
    point, first = "worker.step.admitted", draw.randint(1, 3)
    times = [sum(0.1 * 2**number + 0.5 for number in range(count)) for count in range(draw.randint(6, 8))]
    faults = [KillAt(at, "worker-0", point, first + 2 * (count % 2)) for count, at in enumerate(times)]
    return plan_of(seed, layout, requests, faults)


def draw_rows_that_change_hands(seed: int, draw: Random) -> Plan:
    """Requests end and others take their rows and blocks while steps of the first ones are in flight."""
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
            # Few requests fill the pool, so each new one takes the blocks of the one that has just ended.
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
    return plan_of(seed, layout, requests)


def draw_streams_that_change_hands(seed: int, draw: Random) -> Plan:
    """Durable streams are taken over or cancelled while a worker or the connection to a scheduler is down for long."""
    way_is_gone = draw.random() < 0.5
    # A request that is cancelled while its scheduler is away must run long after that, to show whether it is ended.
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
        # Lost streams are read again, and taken over before any token arrives.
        lost_at = at + draw.uniform(0.1, 1.0)
        lost = [Reset(lost_at, "client", number) for number in range(8 if draw.random() < 0.5 else 0)]
        return plan_of(seed, layout, requests, [CannotStart(at, f"worker-{number}", 25.0), *lost])
    # Without resets, a cut is noticed late.
    resets = [Reset(at + 0.01, "gateway", number) for number in range(6)]
    away_s = draw.choice((3.0, 8.0))
    away = [Cut(at, gateway, f"scheduler-{number}", True, away_s) for gateway in layout.gateways]
    return plan_of(seed, layout, requests, [*away, *resets])


def _lost_again(seed: int, draw: Random) -> Plan:
    """Durable streams with slow readers are lost with all gateways, and again more than a minute later, when no process
    has them any more."""
    layout = draw_layout(draw, Kind.RESTARTS)
    gateway, weather = replace(layout.gateway, max_chunk_tokens=1), replace(layout.weather, window_bytes=256)
    settings = replace(layout.settings, max_waiting_requests=MANY, max_durable_requests=MANY)
    layout = replace(layout, num_replicas=1, gateway=gateway, weather=weather, settings=settings)
    requests: list[Request] = []
    for number in range(4):
        options = GenerationOptions(
            n=draw.choice((1, 1, 2)), temperature=1.0, seed=number, max_tokens=MAX_OUTPUT, ignore_eos=True
        )
        prompt, pause_s = fresh(draw, draw.randint(1, 40)), draw.uniform(1.3, 1.6) / (options.n or 1)
        stream = Generate(number, draw.uniform(0, 0.5), "client-0", "ann", prompt, options, Verb.DURABLE)
        requests.append(replace(cast(Any, with_stops(draw, stream)), pause_s=pause_s))
    summed = Random(f"sums {seed}")
    if summed.random() < 0.5:
        # A gateway that continues from its tokens has the sum of their log probabilities.
        requests = [replace(cast(Any, each), options=replace(cast(Any, each).options, logprobs=0)) for each in requests]
    faults: list[Fault] = []
    for at in (draw.uniform(1.0, 4.0), draw.uniform(66.0, 72.0)):
        faults += [Kill(at, host) for host in layout.gateways]
    return plan_of(seed, layout, requests, faults)


def _cancelled_elsewhere(seed: int, draw: Random) -> Plan:
    """Durable streams continue elsewhere while the connection to their scheduler is cut, or wait for it. They are
    cancelled then, or when the connection is back."""
    layout = replace(draw_layout(draw, Kind.RESTARTS), num_replicas=2, num_gateways=2, slowness=150.0)
    settings = replace(layout.settings, max_waiting_requests=MANY, max_durable_requests=MANY, durable_grace=60.0)
    gateway = replace(layout.gateway, failover_delay=draw.choice((0.5, 0.5, 5.0)), reconnect_grace=10.0)
    at, requests = draw.uniform(1.0, 1.5), list[Request]()
    for number in range(12):
        options = GenerationOptions(temperature=1.0, seed=number, max_tokens=MAX_OUTPUT, ignore_eos=True)
        prompt, asked_at = fresh(draw, draw.randint(1, 40)), draw.uniform(0, 0.8)
        stream = Generate(
            number, asked_at, "client-0", "ann", prompt, options, draw.choice((Verb.DURABLE, Verb.STREAM))
        )
        requests.append(replace(stream, cancels_after_s=at - asked_at + draw.choice((1.5, 4.0, 5.0, 6.0))))
    away = [Cut(at, host, "scheduler-0", True, 2.5) for host in draw.choice((["gateway-0"], layout.gateways))]
    resets = [Reset(at + 0.01, "gateway", number) for number in range(6)]
    return plan_of(seed, replace(layout, settings=settings, gateway=gateway), requests, [*away, *resets])


def _stopped_early(seed: int, draw: Random) -> Plan:
    """Stop strings end slow outputs early, while a scheduler may be unreachable."""
    layout = replace(draw_layout(draw, Kind.CALM), slowness=80.0)
    settings = replace(layout.settings, max_waiting_requests=MANY, max_durable_requests=MANY)
    requests: list[Request] = []
    for number in range(8):
        several = {"n": draw.choice((1, 1, 1, 2)), "seed": number, "temperature": 1.0}
        options = GenerationOptions(**several, max_tokens=MAX_OUTPUT, ignore_eos=True)
        verb = draw.choice((Verb.STREAM, Verb.DURABLE))
        request = Generate(number, draw.uniform(0, 2), "client-0", "ann", fresh(draw, 9), options, verb)
        text = answer_of(request, 0).sequences[0].text[:20]
        requests.append(replace(request, options=replace(options, stop=(text[8:10], text[4:6] + "~"))))
    late = Random(f"resumed at the end {seed}")
    if late.random() < 0.5:
        # Some are resumed before their usage has arrived.
        requests = [
            replace(each, taken_over_after_s=late.uniform(0.1, 1.5), num_takeovers=4)
            if isinstance(each, Generate) and each.verb is Verb.DURABLE
            else each
            for each in requests
        ]
    times = [2.8 * number + draw.uniform(0.5, 1.5) for number in range(draw.choice((0, 4)))]
    faults = [Cut(at, gateway, "scheduler-0", False, 2.4) for at in times for gateway in layout.gateways]
    return plan_of(seed, replace(layout, settings=settings), requests, faults)


def _pins_that_give_way(seed: int, draw: Random) -> Plan:
    """Tenants pin more than there is room for while requests move, and workers restart with other pools."""
    plan = draw_moving(seed, draw)
    settings = replace(plan.layout.settings, pin_quota=draw.choice((0.25, 0.45)), max_pinned=0.9)
    requests, faults, worker = list(plan.requests), list(plan.faults), plan.layout.worker
    for number in range(2000, 2000 + draw.choice((8, 16))):
        at, client, tenant = draw.uniform(0, 1.5), draw.choice(plan.layout.clients), draw.choice(("ann", "bob"))
        requests.append(Pin(number, START_S + at, client, tenant, fresh(draw, draw.randint(20, 104)), 60_000))
    if draw.random() < 0.5:
        size = draw.choice((2, 4, 16))
        num_blocks = worker.num_blocks * worker.block_size // size + draw.choice((0, 7))
        faults.append(OtherPool(START_S + draw.uniform(0.5, 3), "worker-0", size, num_blocks, 32))
    layout = replace(plan.layout, settings=settings)
    return replace(plan, layout=layout, requests=tuple(requests), faults=tuple(faults))


def _leases_that_give_way(seed: int, draw: Random) -> Plan:
    """Requests move slowly with their first token, and beam searches that stay take their blocks meanwhile."""
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
            prompt = fresh(draw, draw.randint(40, 100))
            changed.append(replace(each, prompt=prompt, at=draw.uniform(0, 2)))
    # The replica that they move to has room.
    larger = OtherPool(-1.5, "worker-1", size, 8 * worker.num_blocks, 0)
    return plan_of(seed, replace(layout, slowness=5.0), changed, [larger], low=LEASES)


def _moves_that_end_late(seed: int, draw: Random) -> Plan:
    """A scheduler dies, and its successor uses blocks that a slow disk still brings to the worker for the first one,
    whose stream stays open until its answers can go out."""
    plan = draw_on_disk(seed, draw)
    at = min(each.at for each in plan.requests) + draw.uniform(0.3, 2.0)
    slow = SlowBlockDisk(at - 0.3, "worker-0", draw.choice((1.0, 2.0)), 20.0)
    layout = replace(plan.layout, num_replicas=1, weather=replace(plan.layout.weather, window_bytes=32))
    gone = HalfOpen(at, "scheduler", 0), Kill(at + draw.uniform(0.01, 0.3), "scheduler-0")
    return replace(plan, layout=layout, faults=(slow, *gone), low_limits=MOVES)


def _blocks_that_come_for_others(seed: int, draw: Random) -> Plan:
    """The same, and new prompts take these blocks."""
    plan, options = _moves_that_end_late(seed, draw), GenerationOptions(max_tokens=MAX_OUTPUT, ignore_eos=True)
    # Part of a move has arrived by then, and the rest has not.
    gone_at = min(each.at for each in plan.requests) + draw.uniform(1.5, 4.5)
    slow = SlowBlockDisk(gone_at - 1.0, "worker-0", draw.choice((0.3, 0.6)), 20.0)
    faults = slow, HalfOpen(gone_at, "scheduler", 0), Kill(gone_at + draw.uniform(0.01, 0.1), "scheduler-0")
    new = [
        Generate(number, gone_at + draw.uniform(0.3, 3), "client-0", "ann", fresh(draw, 100), options, Verb.STREAM)
        for number in range(3000, 3010)
    ]
    layout = replace(plan.layout, disk_blocks=500)
    return replace(plan, requests=(*plan.requests, *new), faults=faults, layout=layout)


def _pins_beside_leases(seed: int, draw: Random) -> Plan:
    """Requests move slowly with their first token, one after the other, from a pool that is full of pins."""
    layout, requests = _preempting(draw)
    size = draw.choice((2, 4))
    worker = replace(layout.worker, block_size=size, num_blocks=(2 * LONGEST + 40) // size, num_host_blocks=0)
    weather = replace(layout.weather, max_delay_s=0.001, bytes_per_s=2e4, window_bytes=256)
    settings = replace(layout.settings, pin_quota=0.45, max_pinned=0.9)
    layout = replace(layout, num_replicas=2, first_role="prefill", weather=weather, settings=settings, worker=worker)
    layout = replace(layout, gateway=replace(layout.gateway, long_prompt=1))
    pins = [
        Pin(2000 + number, draw.uniform(0, 0.3), "client-0", ("ann", "bob")[number % 2], fresh(draw, 50), 60_000)
        for number in range(6)
    ]
    moving = [
        replace(each, prompt=fresh(draw, 100), at=0.5 + number * draw.uniform(0.2, 0.6))
        for number, each in enumerate(requests)
    ]
    larger = OtherPool(-1.5, "worker-1", size, 8 * worker.num_blocks, 0)
    return plan_of(seed, layout, [*pins, *moving], [larger], low=LEASES)


def _heirs(seed: int, draw: Random) -> Plan:
    """Requests preempt others that hold little more than the only copy of their common prefix; further ones stay."""
    layout, _ = _preempting(draw)
    size = draw.choice((2, 4))
    worker = replace(layout.worker, block_size=size, num_blocks=(2 * LONGEST + 40) // size, num_host_blocks=0)
    layout = replace(layout, worker=worker, settings=replace(layout.settings, policy="priority"), num_replicas=1)
    requests: list[Request] = []

    def ask(at: float, prompt: tuple[int, ...], priority: int, max_tokens: int, count: int = 1) -> None:
        options = GenerationOptions(
            n=count, temperature=1.0, seed=len(requests), max_tokens=max_tokens, ignore_eos=True
        )
        requests.append(Generate(len(requests), at, "client-0", "ann", prompt, options, priority=priority))

    for begins in range(0, 16, 4):
        stem = fresh(draw, draw.randint(60, 80))
        for _ in range(3):
            ask(begins + draw.uniform(0, 0.1), fresh(draw, draw.randint(65, 85)), 5, 30)
        ask(begins + draw.uniform(0.15, 0.25), stem + fresh(draw, 5), -5, 30)
        ask(begins + draw.uniform(0.4, 0.7), stem + fresh(draw, draw.randint(25, 44)), 1, 20, draw.choice((1, 2)))
    return plan_of(seed, replace(layout, slowness=10.0), requests)


def _displaced_for_moves(seed: int, draw: Random) -> Plan:
    """A request preempts the only running one, which is swapped out, and loads blocks from disk into its places."""
    layout, _ = _preempting(draw)
    size = draw.choice((2, 4))
    worker = replace(layout.worker, block_size=size, num_blocks=(LONGEST + 20) // size, num_host_blocks=640 // size)
    settings = replace(
        layout.settings, policy="priority", preemption_mode="swap", max_steps_in_flight=draw.choice((1, 2))
    )
    layout = replace(layout, worker=worker, settings=settings, num_replicas=1, disk_blocks=500, slowness=10.0)
    requests: list[Request] = []
    for begins in range(0, 24, 6):
        stored = fresh(draw, 100)
        for at, prompt, priority, max_tokens in (
            (0.0, stored, 0, 4),
            (0.8, fresh(draw, 100), 0, 50),
            (2.8, fresh(draw, draw.randint(85, 100)), -5, 60),
            (2.8 + draw.uniform(0.2, 1.0), stored, 5, 20),
        ):
            options = GenerationOptions(max_tokens=max_tokens, ignore_eos=True)
            request = Generate(len(requests), begins + at, "client-0", "ann", prompt, options, priority=priority)
            requests.append(request)
    return plan_of(seed, layout, requests, low=MOVES if draw.random() < 0.5 else ())


def _hosts_beside_disks(seed: int, draw: Random) -> Plan:
    """While one request runs, prompts repeat: their blocks come from disk into places whose contents host memory takes
    over, while a step runs and the next one is not planned."""
    layout, _ = _preempting(draw)
    size = draw.choice((2, 4))
    host_tokens = draw.choice((100, 200))
    worker = replace(layout.worker, block_size=size, num_blocks=(LONGEST + 20) // size)
    worker = replace(worker, device="cuda", num_host_blocks=host_tokens // size)
    settings = replace(layout.settings, max_steps_in_flight=1)
    weather = replace(layout.weather, max_delay_s=draw.choice((0.001, 0.02)))
    layout = replace(layout, worker=worker, settings=settings, weather=weather, num_replicas=1)
    prompts, requests = [fresh(draw, 100) for _ in range(5)], list[Request]()
    for number in range(40):
        for prompt, max_tokens in ((draw.choice(prompts), 3), *(((fresh(draw, 5), 60),) if number % 2 == 0 else ())):
            at, options = 0.6 * number + draw.uniform(0, 0.3), GenerationOptions(max_tokens=max_tokens, ignore_eos=True)
            requests.append(Generate(len(requests), at, "client-0", "ann", prompt, options))
    return plan_of(seed, replace(layout, disk_blocks=500, slowness=8.0), requests)


def _displacing(seed: int, draw: Random) -> Plan:
    """Requests of several sequences, some with a common prefix, preempt each other, or end together and leave blocks
    that are not free at once."""
    layout, requests = _preempting(draw)
    settings = replace(layout.settings, policy=draw.choice(("priority", "priority", "fair")))
    size, counts = draw.choice((2, 4)), draw.choice(((1, 1, 2), (1, 4, 4)))
    stems = [fresh(draw, 60) for _ in range(draw.choice((2, 8)))]
    worker = replace(layout.worker, block_size=size, num_blocks=(2 * LONGEST + 40) // size, num_host_blocks=0)
    low = tuple(f"scheduler_svc.core.kv_cache.{name}" for name in ("_MAX_RECLAIMED", "_MAX_RECLAIMED_BLOCKS"))
    changed: list[Request] = []
    for each in _doubled(requests):
        options = GenerationOptions(n=draw.choice(counts), temperature=1.0, seed=draw.randrange(1 << 64))
        options = replace(options, max_tokens=draw.choice((20, 20, 50)), ignore_eos=True)
        prompt = draw.choice(stems)[: draw.choice((4, 60))] + fresh(draw, draw.randint(1, 9))
        given = {"priority": draw.randint(-2, 2), "tenant": draw.choice(("ann", "bob")), "at": draw.uniform(0, 2.0)}
        changed.append(replace(cast(Any, each), prompt=prompt, options=options, **given))
    layout = replace(layout, worker=worker, settings=settings, num_replicas=1, slowness=draw.choice((5.0, 10.0)))
    return plan_of(seed, layout, changed, low=low if draw.random() < 0.7 else ())


def _deadly_crowds(seed: int, draw: Random) -> Plan:
    """When one request kills a worker, enough requests run that they are tried in cohorts."""
    layout, requests = _preempting(draw)
    worker = replace(layout.worker, block_size=16, num_blocks=400, max_num_batched_tokens=512)
    layout = replace(layout, num_replicas=1, worker=worker, slowness=10.0)
    options = GenerationOptions(max_tokens=MAX_OUTPUT, ignore_eos=True)
    stay = {"options": options, "timeout_s": None, "leaves_after_s": None, "cancels_after_s": None}
    many = [replace(cast(Any, each), **stay) for each in _doubled(requests)]
    return plan_of(seed, layout, with_deadly(draw, many))


def _late_answers(seed: int, draw: Random) -> Plan:
    """Steps that wait for each other take long together, and a scheduler that was paused reads late heartbeats before
    their answers."""
    plan = _restarting(seed, draw, lambda at: Hang(at, "worker-0", 4.0))
    at = plan.faults[0].at
    others = (Hang(at + 3.9, "worker-0", 4.0), Pause(at + 0.1, "scheduler-0", draw.uniform(5.5, 8.0)))
    layout, several = plan.layout, {"max_steps_in_flight": 4}
    layout = replace(layout, worker=replace(layout.worker, **several), settings=replace(layout.settings, **several))
    faults = plan.faults[0], draw.choice(others)
    return replace(plan, layout=replace(layout, slowness=10.0), faults=faults)


def _paid(seed: int, draw: Random) -> Plan:
    """One key pays for all requests. Some are refused and some are read by several calls; nothing breaks."""
    layout = replace(draw_layout(draw, Kind.CALM), num_gateways=1, num_replicas=1, slowness=10.0)
    settings = replace(layout.settings, max_waiting_requests=draw.choice((2, MANY)), max_durable_requests=MANY)
    layout = replace(layout, settings=settings, worker=replace(layout.worker, max_num_rows=4))
    drawn = draw_requests(draw, Kind.CALM, layout.clients, layout.worker.num_blocks * layout.worker.block_size, 0.3)
    asked = [each for each in drawn if isinstance(each, Generate)]
    requests = [replace(each, tenant="metered", prompt=each.prompt[:20]) for each in asked]
    return plan_of(seed, layout, with_takeovers(draw, requests) if draw.random() < 0.5 else requests)


def _searches_that_tie(seed: int, draw: Random) -> Plan:
    """Beams are equally likely in half of the worlds, and some have fewer continuations than the search width."""
    layout, over_s = draw_layout(draw, draw.choice((Kind.CALM, Kind.TIGHT))), 0.3
    pool_tokens = layout.worker.num_blocks * layout.worker.block_size
    requests: list[Request] = []
    for each in draw_requests(draw, Kind.CALM, layout.clients, pool_tokens, over_s):
        width = draw.randint(2, min(4, pool_tokens // LONGEST))
        search = BeamSearch(
            width,
            length_penalty=draw.choice((None, 0.0, 0.0, 2.0)),
            early_stopping=draw.choice((None, EarlyStopping.TRUE, EarlyStopping.NEVER)),
        )
        options = GenerationOptions(beam_search=search, n=draw.randint(1, width), max_tokens=draw.randint(1, 20))
        if draw.random() < 0.5:
            pattern = Constraint(regex=draw.choice(("[a-a]+", "[a-b]+", "[c-p]+")))
            options = replace(options, constraint=pattern)
        else:
            options = replace(
                options, stop_token_ids=fresh(draw, draw.choice((8, 30))), logprobs=draw.choice((None, 3))
            )
        requests.append(replace(each, options=options) if isinstance(each, Generate) else each)
    return plan_of(seed, layout, requests, low=TIES if draw.random() < 0.8 else ())


def _minds_that_change(seed: int, draw: Random) -> Plan:
    """Requests end while they wait for rows, for adapters and constraints, or for blocks of other requests."""
    layout = replace(draw_layout(draw, Kind.CALM), num_replicas=1, slowness=10.0)
    worker = replace(layout.worker, max_num_rows=4, max_adapters=2)
    settings = replace(layout.settings, max_waiting_requests=MANY)
    layout = replace(layout, worker=worker, settings=settings)
    pool_tokens = worker.num_blocks * worker.block_size
    requests = with_adapters(
        draw, with_constraints(draw, draw_requests(draw, Kind.CALM, layout.clients, pool_tokens, 1.0))
    )
    changed: list[Request] = []
    for each in requests:
        if isinstance(each, Generate):
            each = replace(each, tenant=draw.choice(("ann", "bob", "metered")))
            match draw.choice(("stay", "leave", "cancel")):
                case "leave":
                    each = replace(each, leaves_after_s=draw.uniform(0.01, 2.0))
                case "cancel":
                    each = replace(each, cancels_after_s=draw.uniform(0.01, 2.0))
                case _:
                    pass
        changed.append(each)
    return plan_of(seed, layout, changed)


def _pins_again(seed: int, draw: Random) -> Plan:
    """Three tenants pin the same few prefixes repeatedly, for shorter and longer times, while other requests fill the
    batch."""
    layout, requests = _preempting(draw)
    settings = replace(layout.settings, pin_quota=draw.choice((0.25, 0.45)), max_pinned=0.5)
    layout = replace(layout, settings=settings, slowness=draw.choice((1.0, 10.0)))
    stems = [fresh(draw, 104) for _ in range(2)]
    pins = [
        Pin(
            2000 + number,
            draw.uniform(0, 4),
            draw.choice(layout.clients),
            draw.choice(("ann", "bob", "metered")),
            draw.choice(stems)[: draw.choice((16, 40, 41, 80, 104))],
            draw.choice((300, 1000, 5000, 60_000)),
            draw.choice((None, None, draw.uniform(0, 2))),
        )
        for number in range(24)
    ]
    spread = [replace(each, at=draw.uniform(0, 2)) for each in requests]
    return plan_of(seed, layout, [*spread, *pins], [Kill(draw.uniform(0, 3), "worker-0")] * draw.choice((0, 0, 1)))


def _moves_beside_hosts(seed: int, draw: Random) -> Plan:
    """A few prompts repeat, and move when some of their blocks are about to come from host memory."""
    plan = draw_moving(seed, draw)
    prompts = [fresh(draw, 100) for _ in range(6)]
    layout = with_host_cache(draw, replace(plan.layout, slowness=draw.choice((1.0, 10.0))))
    requests = [
        replace(each, prompt=draw.choice(prompts)[: draw.randint(60, 100)])
        if isinstance(each, Generate) and each.front is None
        else each
        for each in plan.requests
    ]
    layout = replace(layout, worker=_with_small_pool(layout.worker, requests))
    return replace(plan, layout=layout, requests=tuple(requests))


def _drafts_that_do_not_pay(seed: int, draw: Random) -> Plan:
    """Drafts pay off when few sequences run, and do not when many run."""
    layout = draw_layout(draw, draw.choice((Kind.CALM, Kind.TIGHT)))
    drafting = replace(layout.worker, max_drafts=draw.choice((1, 3, 7)), fixed_tokens=draw.choice((1, 2, 4)))
    layout = with_passes(draw, replace(layout, worker=drafting))
    pool_tokens = layout.worker.num_blocks * layout.worker.block_size
    return plan_of(seed, layout, draw_requests(draw, Kind.TIGHT, layout.clients, pool_tokens, draw.choice((0.05, 1.0))))


def _sequences_behind_windows(seed: int, draw: Random) -> Plan:
    """Requests of several sequences, which got unequal numbers of drafts, are computed again. Host memory has
    blocks of them; their prompts are longer than windows."""
    layout, requests = _preempting(draw)
    size = draw.choice((2, 4))
    num_host_blocks = draw.choice((200, 400, 1000)) // size
    worker = replace(layout.worker, block_size=size, num_host_blocks=num_host_blocks)
    settings = replace(layout.settings, preemption_mode="recompute")
    worker = replace(worker, device="cuda", max_drafts=draw.choice((3, 7)), fixed_tokens=16)
    layout = replace(layout, worker=worker, settings=settings)
    several = [
        replace(
            each,
            prompt=fresh(draw, draw.randint(10, 40)),
            options=GenerationOptions(
                n=2,
                temperature=1.0,
                seed=draw.randrange(1 << 64),
                max_tokens=MAX_OUTPUT,
                ignore_eos=True,
            ),
        )
        for each in requests[:8]
    ]
    plan = with_groups(draw, plan_of(seed, layout, several), LayerGroups(1, 1, draw.choice((2 * size, 10, 20))))
    # The smallest pool that refuses no request.
    worker = replace(plan.layout.worker, num_blocks=2 * LONGEST // size + 1)
    return replace(plan, layout=replace(plan.layout, worker=worker))


def _groups_without_windows(seed: int, draw: Random) -> Plan:
    """Layers without windows are in several groups, and the pool has room for one or two of a few prompts."""
    layout, requests, _ = _few_prompts(draw)
    return with_groups(draw, plan_of(seed, layout, requests), LayerGroups(draw.choice((2, 3))))


_SHORT_OF_ROOM = (_pins_that_give_way, _leases_that_give_way, _leases_that_give_way)
SHORTAGES = (*_SHORT_OF_ROOM, _moves_that_end_late, _displacing, _displacing, _deadly_crowds, _late_answers, _paid)
COINCIDENCES = (_blocks_that_come_for_others, _blocks_that_come_for_others, _pins_beside_leases, _heirs)
OF_MOVES = (_displaced_for_moves, _hosts_beside_disks)
OF_LATE = (
    _searches_that_tie,
    _minds_that_change,
    _minds_that_change,
    _pins_again,
    _moves_beside_hosts,
    _drafts_that_do_not_pay,
)
OF_GROUPS = (_sequences_behind_windows, _groups_without_windows)
OF_HANDS = (draw_rows_that_change_hands, draw_streams_that_change_hands)
OF_WORKERS = (
    _slow_preparations,
    _slow_preparations,
    _adapters_that_swap,
    _deaths_at_several_steps,
    _stops_in_recomputations,
)
UNUSUAL = (_lost_again, _stopped_early, _clocks_set_back_again, _cancelled_elsewhere)
RARITIES = (_searches_that_swap, _stops_in_recomputations, _clocks_set_back, _deaths_between_ranks)
