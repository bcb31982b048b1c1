"""Worlds in which one thing replaces another that is still at work: sessions that supersede each other, schedulers that
begin to drain while requests are on their way, and calls that are cancelled just as their turn comes."""

from dataclasses import replace
from random import Random

from quire.client import GenerationOptions
from tests.sim.plans import Plan, fresh, plan_of
from tests.sim.world.cluster import MANY, draw_layout
from tests.sim.world.faults import HalfOpen, Kill, Stop
from tests.sim.world.knobs import TURNS
from tests.sim.world.traffic import ADAPTERS, MAX_OUTPUT, Generate, Kind, Request, Verb


def sessions_at_work(seed: int, draw: Random) -> Plan:
    """A scheduler dies, and the next one is loading adapters and fetching blocks when the worker learns that the stream
    of the first one has ended: it learns that late, since its answers could not go out."""
    layout = replace(draw_layout(draw, Kind.CALM), num_replicas=1, num_gateways=1, slowness=10.0, disk_blocks=500)
    size = layout.worker.block_size
    worker = replace(layout.worker, max_adapters=1, max_num_rows=16, num_blocks=640 // size, num_host_blocks=0)
    weather = replace(layout.weather, window_bytes=32)
    settings = replace(layout.settings, max_waiting_requests=MANY, max_durable_requests=MANY)
    # Slow loads are under way when the scheduler dies, or when its stream ends.
    layout = replace(layout, worker=worker, weather=weather, settings=settings)
    layout = replace(layout, preparations_are_slow=draw.random() < 0.5)
    prompts, requests = [fresh(draw, 100) for _ in range(6)], list[Request]()
    for number in range(40):
        options = GenerationOptions(max_tokens=draw.choice((2, 20)), ignore_eos=True)
        at, prompt = draw.uniform(0, 12), draw.choice(prompts)[: draw.randint(20, 100)]
        verb, adapter = draw.choice((Verb.STREAM, Verb.DURABLE)), draw.choice(ADAPTERS)
        requests.append(Generate(number, at, "client-0", "ann", prompt, options, verb, adapter=adapter))
    at = draw.uniform(1.0, 3.0)
    gone = HalfOpen(at, "scheduler", 0), Kill(at + draw.uniform(0.01, 0.3), "scheduler-0")
    return plan_of(seed, layout, requests, gone)


def drains_on_the_way(seed: int, draw: Random) -> Plan:
    """A scheduler begins to drain, with the maximum drain time, while requests are on their way to it. Its requests
    continue at another replica, whose queue may be short."""
    layout = replace(draw_layout(draw, Kind.CALM), num_replicas=2, slowness=20.0)
    weather = replace(layout.weather, max_delay_s=draw.choice((0.02, 0.1)))
    settings = replace(layout.settings, max_waiting_requests=draw.choice((3, MANY)), max_durable_requests=MANY)
    layout = replace(layout, weather=weather, settings=settings, keeps_pools=True)
    at, requests = draw.uniform(0.5, 2.0), list[Request]()
    for number in range(24):
        options = GenerationOptions(max_tokens=draw.choice((2, MAX_OUTPUT)), ignore_eos=True)
        begins, verb = at + draw.uniform(-0.3, 0.2), draw.choice((Verb.STREAM, Verb.DURABLE))
        client, prompt = draw.choice(layout.clients), fresh(draw, draw.randint(1, 60))
        requests.append(Generate(number, begins, client, draw.choice(("ann", "bob")), prompt, options, verb))
    return plan_of(seed, layout, requests, [Stop(at, "scheduler-0"), Stop(at + 40.0, "scheduler-1")])


def turns_of_clients_that_leave(seed: int, draw: Random) -> Plan:
    """Calls resume the same streams almost at once, through two gateways that are slow to find them. Many of their
    clients leave just as a wait ends, for example the wait for a turn to resume a stream."""
    layout = replace(draw_layout(draw, Kind.CALM), num_gateways=2, slowness=10.0)
    weather = replace(layout.weather, max_delay_s=draw.choice((0.02, 0.1)))
    settings = replace(layout.settings, max_waiting_requests=MANY, max_durable_requests=MANY, durable_grace=3.0)
    requests: list[Request] = []
    for number in range(8):
        begins, client = draw.choice((0.0, 1.0)) + draw.uniform(0, 0.01), draw.choice(layout.clients)
        options, prompt = GenerationOptions(max_tokens=MAX_OUTPUT, ignore_eos=True), fresh(draw, draw.randint(1, 40))
        at_waits = tuple(draw.choice((None, draw.randint(1, 6))) for _ in range(8))
        leave = {"leaves_at_wait": draw.choice((None, draw.randint(1, 12))), "takeovers_leave_at": at_waits}
        resume = {"taken_over_after_s": draw.uniform(0.01, 0.1), "num_takeovers": len(at_waits)}
        tenant = draw.choice(("ann", "bob"))
        requests.append(Generate(number, begins, client, tenant, prompt, options, Verb.DURABLE, **leave, **resume))
    return plan_of(seed, replace(layout, weather=weather, settings=settings), requests, low=TURNS)


CHANGEOVERS = (sessions_at_work, drains_on_the_way, turns_of_clients_that_leave, turns_of_clients_that_leave)
