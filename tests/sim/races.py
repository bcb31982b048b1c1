"""Worlds in which an event that ends late, or in the same step, races with a repeated request for the same thing."""

from dataclasses import replace
from random import Random

from quire.client import Constraint, GenerationOptions
from tests.sim.plans import Plan, fresh, plan_of
from tests.sim.situations import DISK_BLOCKS, OF_LATE, draw_moving, draw_on_disk
from tests.sim.world.cluster import MANY, draw_layout
from tests.sim.world.faults import Cut, Kill
from tests.sim.world.traffic import ADAPTERS, LONGEST, MAX_OUTPUT, Generate, Kind, Pin, Request, Verb, draw_requests


def _constraints_again(seed: int, draw: Random) -> Plan:
    """Requests need slow constraints again before these are compiled, while the maximum of others is under way."""
    layout = replace(draw_layout(draw, Kind.CALM), num_replicas=1, num_gateways=1, preparations_are_slow=True)
    worker = replace(layout.worker, max_num_rows=64, num_blocks=1600 // layout.worker.block_size)
    layout = replace(layout, worker=worker, settings=replace(layout.settings, max_waiting_requests=MANY))
    requests: list[Request] = []
    # The third and the fourth constraint of the first wave take 7 s, and are given up after 5 s.
    waves = (("abcd", 0.0, 0.0), ("efgh", 5.1, 0.3), ("cd", 5.6, 1.3), ("cdij", 6.0, 4.0))
    for first, last, at, within_s in [
        (first, last, at, within_s)
        for firsts, at, within_s in waves
        for first, last in zip(firsts, "pqrs", strict=False)
    ]:
        # The same constraint has the same pattern.
        options = GenerationOptions(max_tokens=4, constraint=Constraint(regex=f"[{first}-{'p' if last else last}]+"))
        begins = at + (0.01 * len(requests) if not within_s else draw.uniform(0, within_s))
        requests.append(Generate(len(requests), begins, "client-0", "ann", fresh(draw, 5), options))
    return plan_of(seed, layout, requests)


def _adapters_that_end_together(seed: int, draw: Random) -> Plan:
    """Requests with two adapters end in one step, while one of these adapters already makes way for a third one."""
    layout = replace(draw_layout(draw, Kind.CALM), num_replicas=1, num_gateways=1, slowness=10.0)
    layout = replace(layout, worker=replace(layout.worker, max_adapters=2, max_num_rows=16))
    requests: list[Request] = []
    for begins in range(0, 18, 3):
        one, other, third = draw.sample(ADAPTERS, 3)
        prompt = fresh(draw, 8)
        for at, adapter, max_tokens in (
            (0.0, one, 2),
            (0.0, other, 2),
            (1.0, one, 30),
            (1.0, other, 30),
            (1.0 + draw.uniform(0.05, 0.3), third, 4),
        ):
            options = GenerationOptions(max_tokens=max_tokens, ignore_eos=True)
            requests.append(Generate(len(requests), begins + at, "client-0", "ann", prompt, options, adapter=adapter))
    return plan_of(seed, layout, requests)


def _swaps_in_recomputations(seed: int, draw: Random) -> Plan:
    """Requests of several sequences are computed again in small parts when their worker is back. Other requests preempt
    them before that is done, while host memory has room for them."""
    layout = replace(draw_layout(draw, Kind.TIGHT), num_replicas=1, slowness=10.0)
    worker = replace(layout.worker, block_size=4, num_blocks=(2 * LONGEST + 40) // 4, num_host_blocks=160)
    worker = replace(worker, max_num_rows=16, max_num_batched_tokens=16)
    settings = replace(layout.settings, policy="priority", preemption_mode="swap", max_waiting_requests=MANY)
    requests: list[Request] = []
    at, few = draw.uniform(1.5, 3.0), draw.randint(2, 3)
    for number in range(12):
        is_urgent = number >= few
        count = 1 if is_urgent else 2
        options = GenerationOptions(
            n=count, temperature=1.0, seed=number, max_tokens=30 if is_urgent else MAX_OUTPUT, ignore_eos=True
        )
        prompt = fresh(draw, draw.randint(50, 80) if is_urgent else draw.randint(20, 40))
        begins = at + draw.uniform(0.1, 1.5) if is_urgent else draw.uniform(0, 0.1)
        request = Generate(number, begins, "client-0", "ann", prompt, options, priority=5 if is_urgent else 0)
        requests.append(request)
    return plan_of(seed, replace(layout, worker=worker, settings=settings), requests, [Kill(at, "worker-0")])


def _few_durable_tokens(seed: int, draw: Random) -> Plan:
    """Finished durable requests make way for new ones, with little room for the tokens of durable requests."""
    layout = replace(draw_layout(draw, Kind.CALM), num_replicas=1)
    limits = {"max_durable_tokens": draw.choice((300, 600, 1000)), "max_durable_requests": draw.choice((4, 20))}
    layout = replace(layout, settings=replace(layout.settings, durable_grace=60.0, **limits))
    pool_tokens = layout.worker.num_blocks * layout.worker.block_size
    drawn = draw_requests(draw, Kind.CALM, layout.clients, pool_tokens, 10.0)
    return plan_of(
        seed,
        layout,
        [
            replace(each, verb=Verb.DURABLE, at=draw.uniform(0, 20))
            if isinstance(each, Generate) and each.front is None
            else each
            for each in drawn
        ],
    )


def _pins_in_full_queues(seed: int, draw: Random) -> Plan:
    """Pins that have given up blocks are pinned again, when these blocks are gone and the queue is full."""
    layout = replace(draw_layout(draw, Kind.TIGHT), num_replicas=1, num_gateways=1, slowness=10.0)
    size = draw.choice((2, 4))
    worker = replace(layout.worker, block_size=size, num_blocks=(2 * LONGEST + 40) // size, max_num_rows=4)
    settings = replace(layout.settings, max_waiting_requests=2, pin_quota=0.45, max_pinned=0.9)
    layout = replace(layout, worker=worker, settings=settings)
    stem, requests = fresh(draw, 104), list[Request]()
    for number in range(12):
        at = 0.7 * number + draw.uniform(0, 0.2)
        requests.append(Pin(2000 + number, at, "client-0", "ann", stem[: draw.choice((80, 80, 104))], 1000))
    for number in range(30):
        options = GenerationOptions(max_tokens=draw.choice((10, 40)), ignore_eos=True)
        prompt = fresh(draw, draw.randint(40, 100))
        requests.append(Generate(number, draw.uniform(0, 8), "client-0", "bob", prompt, options))
    return plan_of(seed, layout, requests)


def _disks_after_restarts(seed: int, draw: Random) -> Plan:
    """Workers restart again and again, and continue with their small disks."""
    plan = draw_on_disk(seed, draw)
    layout = replace(plan.layout, disk_blocks=draw.choice(DISK_BLOCKS[:2]), keeps_pools=False)
    first = min(each.at for each in plan.requests)
    requests = [replace(each, at=first + draw.uniform(0, 9)) for each in plan.requests]
    kills = [
        Kill(first + begins + draw.uniform(0, 1.0), rank)
        for begins in (2.0, 4.5, 7.0)
        for rank in layout.ranks("worker-0")[:1]
    ]
    return replace(plan, layout=layout, requests=tuple(requests), faults=tuple(kills))


def draw_moves_of_one_rank(seed: int, draw: Random) -> Plan:
    """Requests move between workers of two ranks whose second ranks cannot reach each other."""
    plan = draw_moving(seed, draw)
    layout = replace(plan.layout, worker=replace(plan.layout.worker, world_size=2, max_passes=1))
    one, other = (layout.ranks(worker)[1] for worker in ("worker-0", "worker-1"))
    first = min(each.at for each in plan.requests)
    cuts = [Cut(first + begins, one, other, True, 29.0) for begins in (-0.5, 28.5)]
    return replace(plan, layout=layout, faults=(*plan.faults, *cuts))


def _wide_against_many(seed: int, draw: Random) -> Plan:
    """Under the policy `fair`, requests of several sequences preempt some of many small ones, but not too many."""
    layout = replace(draw_layout(draw, Kind.CALM), num_replicas=1, num_gateways=1, slowness=10.0)
    worker = replace(layout.worker, max_num_rows=draw.choice((8, 9)), num_blocks=2400 // layout.worker.block_size)
    settings = replace(layout.settings, policy="fair", max_waiting_requests=MANY)
    requests: list[Request] = []
    for begins in (0, 10):
        for _ in range(12):
            at = begins + draw.uniform(0, 0.3)
            options = GenerationOptions(max_tokens=MAX_OUTPUT, ignore_eos=True)
            requests.append(Generate(len(requests), at, "client-0", "ann", fresh(draw, 5), options))
        for _ in range(2):
            at = begins + draw.uniform(1.0, 4.0)
            options = GenerationOptions(
                n=draw.choice((2, 3, 4)), temperature=1.0, seed=1, max_tokens=20, ignore_eos=True
            )
            requests.append(Generate(len(requests), at, "client-0", "bob", fresh(draw, 5), options))
    return plan_of(seed, replace(layout, worker=worker, settings=settings), requests)


RACES = (
    _constraints_again,
    _adapters_that_end_together,
    _swaps_in_recomputations,
    _few_durable_tokens,
    _pins_in_full_queues,
    _disks_after_restarts,
    draw_moves_of_one_rank,
    _wide_against_many,
    OF_LATE[0],
)
