"""Plans of worlds: everything that determines a world, and how a usual plan is drawn."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, cast

from quire.messages.layer_groups import ONE_GROUP, LayerGroups
from tests.sim.world.cluster import MANY, Layout, draw_layout
from tests.sim.world.disk import draw_recording
from tests.sim.world.faults import (
    Cut,
    Fault,
    ForgetCached,
    Kill,
    Nap,
    OtherModel,
    OtherPool,
    Stop,
    draw_bad_disks,
    draw_faults,
    draw_other_model,
    draw_other_pool,
)
from tests.sim.world.http_calls import with_http
from tests.sim.world.knobs import REPLAYS, STATES, draw_low_limits
from tests.sim.world.reference import answer_of
from tests.sim.world.traffic import (
    LONGEST,
    MAX_MODEL_LEN,
    NUM_SPECIAL_TOKENS,
    VOCAB_SIZE,
    Front,
    Generate,
    Kind,
    Request,
    draw_requests,
    grown,
    with_adapters,
    with_deadly,
    with_takeovers,
)

START_S = 2.0
"""All processes serve by this time, so calls do not fail without faults."""
RARE = 0.1
"""The share of worlds with a deadly request, with another model, with streams that are taken over, or with a rare
coincidence."""
_OFTEN = 0.6
"""The share of worlds with tight pools whose requests come almost at once and grow."""
_ADAPTED = 0.25
"""The share of worlds with adapters."""
_RANKED = 0.2
"""The share of worlds whose workers have two ranks."""
_DRAFTING = 0.4
"""The share of worlds whose workers draft tokens."""
_PASSING = 0.3
"""The share of worlds whose workers run the model several times in a step of decodes."""
_LONG_LOAD_S = 33.0
"""Load time of a model that is longer than a scheduler waits for the end of a sleep with weights."""
KEEPING = 0.5
"""The share of worlds in which the workers' pools outlive their processes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that determines a world. A plan without some of its requests and faults is a valid plan, too.

    Attributes:
        seed: Seed of the random choices while the world runs: delays, jobs, the order of processes.
        low_limits: Names of service limits that are low in this world.
    """

    seed: int
    layout: Layout
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    low_limits: tuple[str, ...] = ()


def draw_usual(seed: int) -> Plan:
    draw = Random(f"plan {seed}")
    kind = draw.choice((*Kind, Kind.MIXED, Kind.TIGHT, Kind.RESTARTS))
    layout = with_ranks(Random(f"ranks {seed}"), draw_layout(draw, kind))
    over_s = draw.choice((0.05, 0.3, 0.3) if kind is Kind.TIGHT else (0.3, 3.0, 10.0))
    pool_tokens = layout.worker.num_blocks * layout.worker.block_size
    requests = draw_requests(draw, kind, layout.clients, pool_tokens, over_s)
    # A separate generator, as for all that follows: rare features change nothing else in a plan.
    rare = Random(f"more {seed}")
    if kind is Kind.TIGHT and rare.random() < _OFTEN:
        requests = grown(rare, requests)
        if rare.random() < 0.5:
            layout = with_long_recomputations(layout)
    if rare.random() < 0.5 * _OFTEN:
        requests = tuple(map(partial(with_stops, rare), requests))
    takes_over = rare.random() < RARE
    if takes_over:
        requests = with_takeovers(rare, requests)
    faults = draw_faults(draw, kind, layout.hosts, [each.at for each in requests], over_s, layout.worker)
    rare = Random(f"rare {seed}")
    if rare.random() < RARE:
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
    layout = with_passes(Random(f"passes {seed}"), layout)
    layout = replace(layout, keeps_pools=Random(f"pools {seed}").random() < KEEPING)
    if rare.random() < RARE:
        other = draw_other_model(rare, layout.servers, over_s, layout.worker.fingerprint)
        faults = (*(faults if rare.random() < 0.5 else ()), other)
    disk = Random(f"disk {seed}")
    if (recording := draw_recording(disk)) is not None:
        layout = replace(layout, recording=recording)
        faults = (*faults, *draw_bad_disks(disk, layout.hosts, over_s))
    low = tuple(dict.fromkeys((*draw_low_limits(draw), *(REPLAYS if takes_over else ()))))
    return plan_of(seed, layout, requests, faults, low)


def plan_of(
    seed: int, layout: Layout, requests: Iterable[Request], faults: Iterable[Fault] = (), low: tuple[str, ...] = ()
) -> Plan:
    """A plan whose request and fault times are relative to the moment when all processes serve."""
    return Plan(
        seed,
        layout,
        tuple(replace(each, at=START_S + each.at) for each in requests),
        tuple(replace(cast(Any, each), at=START_S + each.at) for each in faults),
        low,
    )


def with_ranks(draw: Random, layout: Layout) -> Layout:
    """Some workers have two ranks."""
    return replace(layout, worker=replace(layout.worker, world_size=1 + (draw.random() < _RANKED)))


def with_passes(draw: Random, layout: Layout) -> Layout:
    """Some workers of one rank run the model several times in a step of decodes."""
    passes = draw.choice((2, 4, 8)) if draw.random() < _PASSING and layout.worker.world_size == 1 else 1
    return replace(layout, worker=replace(layout.worker, max_passes=passes))


def with_long_recomputations(layout: Layout) -> Layout:
    """Preempted requests are computed again, a little in each step, so that much happens meanwhile."""
    settings = replace(layout.settings, preemption_mode="recompute", max_prefill_share=0.1)
    return replace(layout, worker=replace(layout.worker, max_num_batched_tokens=16), settings=settings)


def with_stops(draw: Random, request: Request) -> Request:
    """Most requests that may stop do so at a text of several tokens in their output, which also has beginnings of other
    stop strings."""
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


def with_least_lengths(draw: Random, plan: Plan) -> Plan:
    """Many outputs have a minimum length, and contain a stop string at about that length."""
    return replace(plan, requests=tuple(_with_least_length(draw, each) for each in plan.requests))


def _with_least_length(draw: Random, request: Request) -> Request:
    if not isinstance(request, Generate) or draw.random() < 0.2:
        return request
    options, is_openai = request.options, request.front in (None, Front.COMPLETIONS, Front.CHAT)
    most = options.max_tokens or 0
    if options.beam_search is not None or options.constraint is not None or not is_openai or not most:
        return request
    options = replace(options, min_tokens=draw.randint(0, most), stop=())
    text = draw.choice(answer_of(replace(request, options=options), 0).sequences).text
    if len(text) < 4 or options.best_of not in (None, options.n):
        return replace(request, options=options)
    end = draw.randint(2, len(text))
    least = min(max(end + draw.choice((-1, -1, 0, 0, 1, 5)), 0), most)
    stop = (text[max(end - draw.choice((1, 2, 4)), 0) : end], text[-2:] + "~")
    return replace(request, options=replace(options, min_tokens=least, stop=stop))


def with_bounded_queues(draw: Random, plan: Plan) -> Plan:
    """Few tokens or few requests may wait, and tenants share the room in the queue."""
    settings = replace(
        plan.layout.settings,
        max_waiting_requests=draw.choice((MANY, 3, 8)),
        max_waiting_tokens=draw.choice((150, 600)),
        tenant_overflow=draw.choice((0.0, 0.5, 1.0)),
    )
    return replace(plan, layout=replace(plan.layout, settings=settings))


def with_forgetting(draw: Random, plan: Plan) -> Plan:
    """Schedulers drop their cached blocks soon after requests."""
    schedulers = [host for host in plan.layout.replicas if host.startswith("scheduler")]
    times = [each.at for each in plan.requests] or [START_S]
    forgets = [
        ForgetCached(draw.choice(times) + draw.uniform(0, 1.0), draw.choice(schedulers))
        for _ in range(draw.choice((1, 3, 10)))
    ]
    return replace(plan, faults=(*plan.faults, *forgets))


def with_naps(draw: Random, plan: Plan) -> Plan:
    """Operators put replicas to sleep and wake them, mostly soon after a request or a fault begins."""
    times = [each.at for each in (*plan.requests, *plan.faults)] or [START_S]
    load_s, faults = draw.choice((0.1, 0.1, 3.0, _LONG_LOAD_S)), list(plan.faults)
    is_long = load_s == _LONG_LOAD_S
    for _ in range(1 if is_long else draw.choice((1, 1, 2, 4))):
        at = max(START_S, draw.choice(times) + draw.uniform(-0.1, draw.choice((0.2, 1.0))))
        levels = draw.choice(((1,), (2,), (2,), (1, 2), (1, 1), (2, 2), (2, 1)))
        sleeps_s = draw.random() * draw.choice((0.0, 0.3, 2.0, *(() if is_long else (10.0,))))
        faults.append(Nap(at, draw.randrange(plan.layout.num_gateways), levels, sleeps_s))
    return replace(plan, layout=replace(plan.layout, load_s=load_s), faults=tuple(faults))


def with_broken_naps(draw: Random, plan: Plan) -> Plan:
    """A fault occurs while an operator puts replicas to sleep."""
    layout, faults = plan.layout, list(plan.faults)
    for nap in [each for each in plan.faults if isinstance(each, Nap)]:
        # By then the call has reached the schedulers and the workers.
        at = nap.at + draw.uniform(0, 0.01 + 10 * layout.weather.max_delay_s)
        replica = draw.randrange(layout.num_replicas)
        scheduler, rank = f"scheduler-{replica}", draw.choice(layout.ranks(f"worker-{replica}"))
        cut = Cut(at, scheduler, rank, True, draw.uniform(0.5, 15))
        faults.append(draw.choice((Kill(at, rank), Kill(at, rank), Stop(at, scheduler), Kill(at, scheduler), cut)))
    return replace(plan, faults=tuple(faults))


def with_groups(draw: Random, plan: Plan, groups: LayerGroups | None = None) -> Plan:
    """Workers whose model has several groups of layers, drawn if none are given. Pools have room for the same
    sequences; in half of the worlds windowed groups have little more than a sequence takes of them."""
    layout, worker = plan.layout, plan.layout.worker
    size, chunk = worker.block_size, worker.max_num_batched_tokens
    groups = groups or _draw_groups(draw, size, chunk)
    num_full, num_windowed, window, num_groups = groups.num_full, groups.num_windowed, groups.window, groups.num_groups
    num_blocks = num_groups * worker.num_blocks
    if draw.random() < 0.5:
        most = -(-(max(window, chunk) + chunk) // size) + 1
        num_blocks -= num_windowed * max(worker.num_blocks - 2 * most, 0)
        needed = (_blocks_needed(each, size, num_full, num_windowed, most) for each in plan.requests)
        num_blocks = max([num_blocks, *needed])
    worker = replace(worker, num_blocks=num_blocks + 1, num_host_blocks=num_groups * worker.num_host_blocks)
    disk_blocks = layout.disk_blocks and layout.disk_blocks * draw.choice((1, num_groups))
    faults = [
        _cut(each, groups, None) if isinstance(each, OtherPool) and each.groups is None else each
        for each in plan.faults
    ]
    layout = replace(layout, worker=worker.with_groups(groups), disk_blocks=disk_blocks)
    return replace(plan, layout=layout, faults=tuple(faults))


def with_states(draw: Random, plan: Plan) -> Plan:
    """Workers whose model has layers that keep a state of each sequence. Pools have room for as many more blocks as the
    states of some sequences take, or for little more than the largest request."""
    layout, worker = plan.layout, plan.layout.worker
    size = draw.choice((1, 1, 2, 3))
    widths = [_width_of(each) for each in plan.requests if isinstance(each, Generate)]

    def least(block_size: int) -> int:
        """Blocks with which no request is refused: its sequences need not share any."""
        return max(widths, default=1) * (worker.groups.num_groups * -(-LONGEST // block_size) + 2 * size) + 1

    num_blocks = max(worker.num_blocks + size * draw.choice((4, 4, 10, 40)), least(worker.block_size))
    tight = Random(f"scarce rooms with states {plan.seed}")
    if tight.random() < 0.3:
        needed = (
            _blocks_with_states(each, worker.block_size, worker.groups.num_groups, size) for each in plan.requests
        )
        num_blocks = max(needed, default=0) + tight.choice((1, 2, 8))
    tokens = max(worker.max_num_batched_tokens, worker.max_num_rows + draw.choice((2, 2, 5, 20)))
    worker = replace(worker, num_blocks=num_blocks, max_num_batched_tokens=tokens, state_blocks=size)
    faults = [
        replace(each, num_blocks=max(each.num_blocks + 8 * size, least(each.block_size)))
        if isinstance(each, OtherPool)
        else each
        for each in plan.faults
    ]
    limits = tuple(name for name in STATES if draw.random() < 0.7)
    layout = replace(layout, worker=worker)
    return replace(plan, layout=layout, faults=tuple(faults), low_limits=(*plan.low_limits, *limits))


def with_other_groups(draw: Random, plan: Plan) -> Plan:
    """Workers with another pool have other groups of layers, too, whatever groups the workers have before. There is at
    least one such worker, in half of the plans with another model at the moment when it has this other model."""
    layout, worker = plan.layout, plan.layout.worker
    faults = list(plan.faults)
    if not any(isinstance(each, OtherPool) for each in faults):
        times = [each.at for each in plan.requests] or [START_S]
        workers = [f"worker-{replica}" for replica in range(layout.num_replicas)]
        at = max(START_S, draw.choice(times) + draw.uniform(0, 0.3))
        models = [each for each in faults if isinstance(each, OtherModel)] if draw.random() < 0.5 else []
        if models:
            workers, at = [models[0].host], models[0].at
        for _ in range(draw.choice((1, 1, 2))):
            faults.append(draw_other_pool(draw, workers, at, worker))
            at += draw.uniform(0.05, draw.choice((0.5, 5.0)))
    for place, each in enumerate(faults):
        if isinstance(each, OtherPool):
            one = draw.random() < 0.2
            groups = ONE_GROUP if one else _draw_groups(draw, each.block_size, worker.max_num_batched_tokens)
            faults[place] = _cut(each, groups, groups)
    return replace(plan, faults=tuple(faults))


def _draw_groups(draw: Random, block_size: int, chunk: int) -> LayerGroups:
    num_full, num_windowed = draw.choice(((1, 1), (1, 1), (1, 2), (0, 1), (2, 3)))
    windows = (2, max(block_size - 1, 2), block_size, block_size + 1, 3 * block_size)
    return LayerGroups(num_full, num_windowed, draw.choice((*windows, chunk, 2 * chunk + 1, 20, 60, MAX_MODEL_LEN)))


def _cut(pool: OtherPool, groups: LayerGroups, told: LayerGroups | None) -> OtherPool:
    """A pool of one group of layers, cut into `groups`. The fault itself sets the groups that it is told."""
    num_blocks, num_host_blocks = (groups.num_groups * each for each in (pool.num_blocks, pool.num_host_blocks))
    return replace(pool, num_blocks=num_blocks + 1, num_host_blocks=num_host_blocks, groups=told)


def _blocks_needed(request: Request, size: int, num_full: int, num_windowed: int, most: int) -> int:
    """Blocks without which a request is refused, if a sequence has at most this many of a windowed group."""
    if not isinstance(request, Generate):
        return 0
    width = _width_of(request)
    whole, shared = -(-LONGEST // size), len(request.prompt) // size
    if width == 1:
        return num_full * whole + num_windowed * min(whole, most)
    return (num_full + num_windowed) * (shared + width * (whole - shared))


def _blocks_with_states(request: Request, block_size: int, num_groups: int, state_blocks: int) -> int:
    """The same for a model with states, if all layers keep all tokens: sequences share the start of their prompt."""
    if not isinstance(request, Generate):
        return 0
    width, whole = _width_of(request), -(-LONGEST // block_size)
    shared = max(len(request.prompt) - 2, 0) // block_size
    return num_groups * (shared + width * (whole - shared)) + (width + 1) * state_blocks


def _width_of(request: Generate) -> int:
    """The number of sequences that are computed for it at once."""
    options = request.options
    return options.best_of or options.n or 1 if options.beam_search is None else options.beam_search.beam_width


def with_starts(draw: Random, plan: Plan) -> Plan:
    """Requests ask for log probabilities of their prompts from some position on."""
    requests = list(plan.requests)
    for place, each in enumerate(requests):
        if isinstance(each, Generate) and each.front is None and each.options.prompt_logprobs is not None:
            start = draw.randrange(1, max(len(each.prompt), 2))
            requests[place] = replace(each, options=replace(each.options, prompt_logprobs_start=start))
    return replace(plan, requests=tuple(requests))


def fresh(draw: Random, count: int) -> tuple[int, ...]:
    """Draws `count` tokens that no other prompt has."""
    return tuple(draw.randrange(NUM_SPECIAL_TOKENS, VOCAB_SIZE) for _ in range(count))
