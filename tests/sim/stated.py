"""Worlds whose models have layers that keep states, in situations in which the states matter."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

from quire.client import GenerationOptions
from tests.sim.plans import Plan, fresh, plan_of, with_states
from tests.sim.situations import draw_moving
from tests.sim.world.cluster import MANY, Layout, draw_layout
from tests.sim.world.faults import Fault, Glitch, Kill
from tests.sim.world.knobs import STATES
from tests.sim.world.reference import answer_of
from tests.sim.world.traffic import Generate, Kind, Pin, Request, Verb


def _layout(draw: Random, block_size: int) -> Layout:
    """A replica whose pool is the smallest that refuses no request, once states are added."""
    layout = draw_layout(draw, Kind.TIGHT)
    worker = replace(
        layout.worker, block_size=block_size, num_blocks=1, num_host_blocks=0, max_num_rows=draw.choice((4, 8, 16))
    )
    settings = replace(layout.settings, max_waiting_requests=MANY, max_durable_requests=MANY)
    return replace(layout, num_replicas=1, worker=worker, settings=settings)


def _stated(seed: int, draw: Random, layout: Layout, requests: Sequence[Request], faults: Sequence[Fault] = ()) -> Plan:
    """The plan of these, with states and checkpoints at short intervals, and mostly with small steps."""
    plan = with_states(draw, plan_of(seed, layout, requests, faults))
    worker = plan.layout.worker
    tokens = worker.max_num_rows + draw.choice((2, 3, 6, 20, 100))
    worker = replace(worker, max_num_batched_tokens=tokens)
    return replace(plan, layout=replace(plan.layout, worker=worker), low_limits=STATES)


def _asked(draw: Random, layout: Layout, number: int, at: float, prompt: tuple[int, ...], **options: int) -> Generate:
    """A stream of "ann" without an early end."""
    options.setdefault("max_tokens", draw.randint(2, 30))
    chosen = GenerationOptions(temperature=0.0, ignore_eos=True, **options)  # type: ignore[arg-type]
    return Generate(number, at, draw.choice(layout.clients), "ann", prompt, chosen, Verb.STREAM)


def _turns(seed: int, draw: Random, has_host: bool) -> Plan:
    """Conversations go on, one after the other, in a pool that has room for little more than one of them. Host memory
    may have room for some blocks more, and for parts of states."""
    layout = _layout(draw, draw.choice((2, 4)))
    if has_host:
        worker = replace(layout.worker, device="cuda", num_host_blocks=draw.choice((20, 40, 80)))
        layout = replace(layout, worker=worker)
    said = [fresh(draw, 104) for _ in range(draw.choice((2, 3)))]
    lengths = [draw.randint(5, 20) for _ in said]
    requests: list[Request] = []
    for number in range(14):
        which = draw.randrange(len(said))
        lengths[which] = min(lengths[which] + draw.randint(1, 25), 104)
        prompt = (*said[which][: lengths[which] - 2], *fresh(draw, 2))
        requests.append(_asked(draw, layout, number, 0.1 * number, prompt, max_tokens=draw.randint(2, 9)))
    plan = _stated(seed, draw, layout, requests)
    while has_host and plan.layout.worker.state_blocks == 1:
        plan = _stated(seed, draw, layout, requests)
    return plan


def _followers(seed: int, draw: Random, fault: Callable[[float, str], Fault] | None = None) -> Plan:
    """Requests come while a long prompt is computed that begins as they do. Some of them have several sequences."""
    layout = replace(_layout(draw, draw.choice((2, 4))), slowness=draw.choice((3.0, 10.0)))
    requests: list[Request] = []
    for start in (0.0, 1.0):
        stem = fresh(draw, 104)
        requests.append(_asked(draw, layout, len(requests), start, stem))
        for _ in range(5):
            prompt = (*stem[: draw.choice((draw.randint(8, 96), 96, 104))], *fresh(draw, draw.choice((0, 1, 8))))
            at, several = start + draw.uniform(0, 0.4), draw.choice((1, 1, 2))
            requests.append(_asked(draw, layout, len(requests), at, prompt[:104], n=several))
    faults = [] if fault is None else [fault(draw.uniform(0, 1.5), "worker-0") for _ in range(draw.choice((1, 2, 4)))]
    return _stated(seed, draw, layout, requests, faults)


def _forks(seed: int, draw: Random) -> Plan:
    """Requests of several sequences enter a pool that is almost full, at the same time."""
    layout = _layout(draw, draw.choice((2, 4, 16)))
    requests = [
        _asked(draw, layout, number, draw.uniform(0, 0.05), fresh(draw, draw.randint(3, 30)), n=draw.choice((1, 2, 3)))
        for number in range(14)
    ]
    return _stated(seed, draw, layout, requests)


def _preempted_stems(seed: int, draw: Random) -> Plan:
    """Requests are preempted after their first tokens whose prompts end one token behind a checkpoint of others."""
    size = draw.choice((2, 4))
    layout, stem = _layout(draw, size), fresh(draw, size * draw.randint(3, 8))
    settings = replace(layout.settings, policy="fcfs")
    layout = replace(layout, settings=settings, worker=replace(layout.worker, max_num_rows=16))
    requests = [
        _asked(
            draw,
            layout,
            number,
            0.02 * number,
            (*stem, *fresh(draw, 5 if number < 4 else 1)),
            max_tokens=draw.randint(30, 50),
        )
        for number in range(12)
    ]
    return _stated(seed, draw, layout, requests)


def _pins_of_output(seed: int, draw: Random) -> Plan:
    """Prompts are pinned for a short time together with output that was just generated. A pin ends one block behind the
    newest checkpoint, which the sequence soon replaces."""
    layout = replace(_layout(draw, 2), slowness=draw.choice((20.0, 40.0)))
    settings = replace(layout.settings, pin_quota=0.5, max_pinned=0.5)
    layout = replace(layout, settings=settings)
    requests: list[Request] = []
    for number in range(3):
        request = _asked(draw, layout, number, 0.0, fresh(draw, 8), max_tokens=30)
        tokens = (*request.prompt, *answer_of(request, 0).sequences[0].token_ids)
        requests.append(request)
        for place in range(12):
            pinned = tokens[: 4 * draw.randint(3, 8) + 2]
            at = 0.0021 * layout.slowness * (len(pinned) - len(request.prompt) + draw.uniform(0, 4))
            requests.append(Pin(100 * (number + 1) + place, at, request.client, "ann", pinned, 100))
    return _stated(seed, draw, layout, requests)


def _moved(seed: int, draw: Random) -> Plan:
    """Requests move between replicas with their states."""
    plan = with_states(draw, draw_moving(seed, draw))
    return replace(plan, low_limits=(*plan.low_limits, *STATES))


OF_STATES = (
    partial(_turns, has_host=False),
    partial(_turns, has_host=False),
    partial(_turns, has_host=True),
    _followers,
    _followers,
    partial(_followers, fault=Glitch),
    partial(_followers, fault=Kill),
    _forks,
    _preempted_stems,
    _pins_of_output,
    _moved,
)
