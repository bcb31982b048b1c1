"""Runs worlds: `python -m tests.sim.worlds SEED COUNT [PROCESSES]` prints the digest of each."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from operator import mul
from random import Random

from tests.sim.changeovers import CHANGEOVERS
from tests.sim.plans import (
    RARE,
    START_S,
    Plan,
    draw_usual,
    with_bounded_queues,
    with_broken_naps,
    with_forgetting,
    with_groups,
    with_least_lengths,
    with_naps,
    with_other_groups,
    with_starts,
    with_states,
)
from tests.sim.races import RACES
from tests.sim.situations import (
    COINCIDENCES,
    DISK_BLOCKS,
    OF_GROUPS,
    OF_HANDS,
    OF_LATE,
    OF_MOVES,
    OF_WORKERS,
    RARITIES,
    SHORTAGES,
    UNUSUAL,
    draw_adapters_in_turn,
    draw_endless_preparations,
    draw_moving,
    draw_naps,
    draw_on_disk,
    draw_on_host,
    with_host_cache,
)
from tests.sim.stated import OF_STATES
from tests.sim.world.charges import Charges
from tests.sim.world.cluster import MANY, Cluster, watched_schedulers
from tests.sim.world.faults import (
    BadDisk,
    Cut,
    Fault,
    ForgetCached,
    Glitch,
    HalfOpen,
    Kill,
    KillAt,
    Nap,
    OtherModel,
    OtherPool,
    Reset,
)
from tests.sim.world.gateways import gateways_without_sockets
from tests.sim.world.http_calls import with_returns, with_several_prompts
from tests.sim.world.knobs import CROWDS, low_limits
from tests.sim.world.oracles import Circumstances
from tests.sim.world.traffic import MAX_OUTPUT, TENANT, Generate, with_deadly_need
from tests.sim.world.world import StuckError, World, new_world, without_collections

_PATIENCE_S = 90.0
"""Seconds after all trouble, for the longest ping and a client's longest wait for its next call: all must be over
then."""
_QUOTA_S = 300.0
"""Maximum seconds that a client with a rate-limited key waits, with all its attempts."""
_DEADLY_S = 200.0
"""Seconds until each of two replicas, between which it moves, has found the request that kills its worker."""
_LATER_S = 30.0
"""Seconds until a need that is known to kill workers has failed its request at each of two replicas."""
_HTTP_BYTES = 600
"""Maximum bytes over HTTP for a token, with log probabilities of three more tokens, as a separate event."""
_STEP_BYTES = 1000
"""Bytes of messages of steps that each request adds, on a connection whose small window delays each few bytes."""
_REPORTED = 100
"""Number of worlds between two reports of progress."""
_WORLDS_OF_CHILD = 100
"""Number of worlds that one process runs: what worlds leave in its memory goes with it."""
_MOVING = 0.05
"""The share of worlds in which replicas are drained and requests move between them."""
_ON_DISK = 0.05
"""The share of worlds in which many blocks come back from disk."""
_WITH_DISKS = 0.15
"""The share of the others whose workers have such disks."""
_ON_HOST = 0.03
"""The share of worlds in which many blocks come back from host memory."""
_WITH_HOST = 0.06
"""The share of the others in which host memory caches blocks evicted from the pools."""
_HANDED = 0.05
"""The share of worlds in which rows, blocks and streams get new owners while they are in use."""
_SHORT = 0.06
"""The share of worlds in which many requests compete for scarce resources at once, or answers are late."""
_COINCIDING = 0.04
"""The share of worlds in which several scarcities affect the same blocks at once."""
_BOUNDED = 0.06
"""The share of worlds in which queues have room for few tokens."""
_FORGETTING = 0.05
"""The share of worlds in which schedulers drop their cached blocks."""
_NAPPING = 0.05
"""The share of worlds in which operators put replicas to sleep."""
_DISTURBED = 0.3
"""The share of these worlds in which a fault occurs meanwhile."""
_WITH_LEAST = 0.05
"""The share of worlds in which outputs have a minimum length."""
_SEVERAL = 0.06
"""The share of worlds in which calls have several prompts."""
_RETURNING = 0.04
"""The share of worlds in which durable streams go over HTTP, whose clients leave and come back."""
_UNUSUAL = 0.02
"""The share of worlds in which something happens again long after the first time, or ends early elsewhere."""
_TO_THEIR_PLACE = 0.02
"""The share of worlds in which blocks come from disk into places whose contents go to host memory."""
_IN_TURN = 0.01
"""The share of worlds in which requests use adapters one after the other."""
_ENDLESS = 0.01
"""The share of worlds in which soon only preparations that never end are under way."""
_STARTING = 0.1
"""The share of worlds in which requests ask for log probabilities of their prompts from some position on."""
_CROWDED = 0.3
"""The share of worlds in which even a few requests leave a queue by the path for many."""
_RACING = 0.06
"""The share of worlds in which an event that ends late, or in the same step, races with a repeated request."""
_CHANGING = 0.04
"""The share of worlds in which one thing replaces another that is still at work."""
_OF_LATE = 0.06
"""The share of worlds with ties, requests that end while they wait, renewed pins and the like."""
_GROUPED = 0.25
"""The share of worlds whose models have several groups of layers."""
_STATED = 0.15
"""The share of worlds whose models have layers that keep states."""
_RARELY_STATED = 0.04
"""The share of worlds in which models have such layers and requests run for their sake."""
_RARELY_GROUPED = 0.02
"""The share of worlds with several groups of layers in which requests run for their sake."""
_REGROUPED = 0.04
"""The share of worlds whose workers come back with other groups of layers."""
_KEPT_S = 130.0
"""Durable requests stay for a minute without a reader, and for another one after their end; pins stay no longer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a world."""

    digest: str
    num_events: int
    seconds: float
    num_tokens: int
    errors: tuple[str, ...]


def draw_plan(seed: int) -> Plan:
    """The plan of a seed. Its generator is separate from the world's."""
    # These generator names are chosen so that few seeds of known faults are among the changed ones.
    states = Random(f"known marks in time {seed}")
    if states.random() < _RARELY_STATED:
        return states.choice(OF_STATES)(seed, states)
    changes = Random(f"sudden relay {seed}")
    plan = changes.choice(CHANGEOVERS)(seed, changes) if changes.random() < _CHANGING else _draw_racing(seed)
    queues, caches = Random(f"how long queues are {seed}"), Random(f"fresh caches {seed}")
    naps = Random(f"all asleep {seed}")
    if queues.random() < _BOUNDED:
        plan = with_bounded_queues(queues, plan)
    starts, crowds = Random(f"parts seldom {seed}"), Random(f"crowds that leave {seed}")
    if starts.random() < _STARTING:
        plan = with_starts(starts, plan)
    if crowds.random() < _CROWDED:
        plan = replace(plan, low_limits=(*plan.low_limits, *CROWDS))
    if caches.random() < _FORGETTING:
        plan = with_forgetting(caches, plan)
    if naps.random() < _NAPPING:
        plan = with_naps(naps, plan) if naps.random() < 0.5 else draw_naps(seed, naps)
        disturbed = Random(f"disturbed {seed}")
        if disturbed.random() < _DISTURBED:
            plan = with_broken_naps(disturbed, plan)
    lengths, several = Random(f"at least {seed}"), Random(f"prompts of calls {seed}")
    if lengths.random() < _WITH_LEAST:
        plan = with_least_lengths(lengths, plan)
    if several.random() < _SEVERAL:
        plan = replace(plan, requests=with_several_prompts(several, plan.requests))
    returns = Random(f"durable readers back {seed}")
    if returns.random() < _RETURNING:
        # Slowly read requests are over for long when their readers come back. None may make way for others.
        room = {"max_durable_requests": MANY, "max_durable_tokens": MANY * MANY}
        layout = replace(plan.layout, settings=replace(plan.layout.settings, durable_grace=60.0, **room))
        plan = replace(plan, layout=layout, requests=with_returns(returns, plan.requests))
    others = Random(f"back with foreign groups of layers {seed}")
    if others.random() < _REGROUPED:
        plan = with_other_groups(others, plan)
    several = Random(f"with special windows {seed}")
    if several.random() < _RARELY_GROUPED:
        return several.choice(OF_GROUPS)(seed, several)
    groups = Random(f"small memories without old memories {seed}")
    if groups.random() < _GROUPED:
        plan = with_groups(groups, plan)
    # A worker with other groups of layers would give blocks of states names that blocks of groups have.
    states, is_regrouped = Random(f"words that remember once {seed}"), any(map(_regroups, plan.faults))
    return with_states(states, plan) if states.random() < _STATED and not is_regrouped else plan


def _regroups(fault: Fault) -> bool:
    return isinstance(fault, OtherPool) and fault.groups is not None


def _draw_racing(seed: int) -> Plan:
    races = Random(f"late again again {seed}")
    return races.choice(RACES)(seed, races) if races.random() < _RACING else _draw_plan(seed)


def _draw_plan(seed: int) -> Plan:
    late = Random(f"late lately {seed}")
    if late.random() < _OF_LATE:
        return late.choice(OF_LATE)(seed, late)
    places = Random(f"from disk {seed}")
    if places.random() < _TO_THEIR_PLACE:
        return places.choice(OF_MOVES)(seed, places)
    unusual = Random(f"far apart {seed}")
    if unusual.random() < _UNUSUAL:
        return unusual.choice(UNUSUAL)(seed, unusual)
    slots = Random(f"adapter slots {seed}")
    if slots.random() < _IN_TURN:
        return draw_adapters_in_turn(seed, slots)
    waits = Random(f"given up {seed}")
    if waits.random() < _ENDLESS:
        return draw_endless_preparations(seed, waits)
    coincidences = Random(f"coincidences {seed}")
    if coincidences.random() < _COINCIDING:
        return coincidences.choice(COINCIDENCES)(seed, coincidences)
    short = Random(f"short {seed}")
    if short.random() < _SHORT:
        return short.choice(SHORTAGES)(seed, short)
    draw = Random(f"worker {seed}")
    if draw.random() < 0.5 * RARE:
        return draw.choice(OF_WORKERS)(seed, draw)
    draw = Random(f"rarity {seed}")
    plan = draw.choice(RARITIES)(seed, draw) if draw.random() < RARE else draw_usual(seed)
    moving = Random(f"drains {seed}")
    if moving.random() < _MOVING:
        return draw_moving(seed, moving)
    disks = Random(f"block disks {seed}")
    if disks.random() < _ON_DISK:
        return draw_on_disk(seed, disks)
    hands = Random(f"hands {seed}")
    if hands.random() < _HANDED:
        return hands.choice(OF_HANDS)(seed, hands)
    memory = Random(f"memory below {seed}")
    if memory.random() < _ON_HOST:
        return draw_on_host(seed, memory)
    if memory.random() < _WITH_HOST:
        plan = replace(plan, layout=with_host_cache(memory, plan.layout))
    if disks.random() < _WITH_DISKS:
        plan = replace(plan, layout=replace(plan.layout, disk_blocks=disks.choice(DISK_BLOCKS)))
    if draw.random() < 0.5 * RARE:
        requests, deadly = with_deadly_need(draw, plan.requests)
        plan = replace(plan, requests=requests, layout=replace(plan.layout, deadly=deadly))
    return plan


def run_world(
    plan: Plan,
    on_world: Callable[[World], object] = lambda _: None,
    on_quiet: Callable[[Cluster], object] = lambda _: None,
) -> Outcome:
    """Runs a cluster and its requests under the faults of a plan. `on_world` gets the world before it begins, and
    `on_quiet` the cluster when everything is over.

    Raises:
        FalseAnswerError: an answer is wrong.
        StuckError: not everything has ended in time.
        ServiceFailedError: a process failed.
    """
    # The world is over and unreferenced when garbage is collected.
    with without_collections():
        return _run_world(plan, on_world, on_quiet)


def _run_world(plan: Plan, on_world: Callable[[World], object], on_quiet: Callable[[Cluster], object]) -> Outcome:
    with new_world(plan.seed) as world:
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
            cluster.check_rates(world.now - START_S)
            cluster.check_glitches()
            # State that clients have left behind is released soon after.
            try:
                world.run(lambda: cluster.has_failed or cluster.is_quiet, _KEPT_S + _PATIENCE_S)
            except StuckError as error:
                raise StuckError(f"{', '.join(cluster.held)}: {error}") from error
            cluster.check()
            cluster.check_charges(charges)
            cluster.check_tallies()
            on_quiet(cluster)
            cluster.check_left()
            for disk in cluster.disks.values():
                disk.check()
        errors = tuple(story.error.reason for story in cluster.stories if story.error is not None)
        num_tokens = sum(story.witness.last.num_tokens for story in cluster.stories if story.witness is not None)
        return Outcome(world.digest, world.num_events, world.now, num_tokens, errors)


def _circumstances(plan: Plan) -> Circumstances:
    faults, naps_s = [each for each in plan.faults if not isinstance(each, BadDisk | ForgetCached | Nap)], _naps_s(plan)
    plan = replace(plan, faults=tuple(faults))
    trouble_s = sum(fault.seconds for fault in faults) + (naps_s if faults else 0.0)
    settings = plan.layout.settings
    changes = [fault for fault in plan.faults if isinstance(fault, OtherModel)]
    deadly = [each for each in plan.requests if isinstance(each, Generate) and each.deadly_at is not None]
    is_deadly = bool(deadly) or plan.layout.deadly is not None
    kills = [fault for fault in plan.faults if isinstance(fault, Kill | KillAt)]
    return Circumstances(
        (plan.layout.worker.block_size, *(each.block_size for each in plan.faults if isinstance(each, OtherPool))),
        bool(plan.faults),
        settings.max_waiting_requests < MANY or settings.max_waiting_tokens < MANY,
        settings.max_durable_requests < MANY,
        trouble_s,
        any(isinstance(fault, Glitch) for fault in plan.faults),
        models=tuple(sorted({0} | {int(fault.model.weights) for fault in changes})),
        # If another replica has the model, and nothing else is wrong, requests continue there.
        may_lose_model=bool(changes)
        and (plan.layout.num_replicas == 1 or len(plan.faults) > 1 or is_deadly or bool(naps_s)),
        may_mix_models=bool(changes) and (len(plan.faults) > 1 or bool(naps_s)),
        deadly={each.options.seed or 0: each.deadly_at or 0 for each in deadly},
        deadly_need=plan.layout.deadly,
        # The next scheduler starts soon, and ends the work that the one before began.
        may_hang=is_deadly or len(kills) < len(plan.faults) or len(kills) > 1,
        may_cut=any(map(_may_cut, plan.faults)),
        may_fail_loads=plan.layout.loads_fail,
        may_be_slow=plan.layout.preparations_are_slow,
    )


def _naps_s(plan: Plan) -> float:
    """Total time for which replicas sleep, or load their models again."""
    naps = [fault for fault in plan.faults if isinstance(fault, Nap)]
    return sum(each.seconds + (1 + len(each.levels)) * plan.layout.load_s for each in naps)


def _may_cut(fault: Fault) -> bool:
    """Whether the fault may end connections between clients and gateways."""
    return isinstance(fault, Cut | Reset | HalfOpen) or getattr(fault, "host", "").startswith("gateway")


def _limit_s(plan: Plan) -> float:
    """The time by which everything must have ended. A replica computes all requests in a few seconds, unless its
    network is slow."""
    last_s = max((each.at for each in (*plan.requests, *plan.faults)), default=0.0)
    generates = [each for each in plan.requests if isinstance(each, Generate)]
    weather = plan.layout.weather
    # An answer over HTTP waits for its reader after each window of bytes, and so does a step for its worker.
    byte_s = 1 / weather.bytes_per_s + 2 * weather.max_delay_s / weather.window_bytes
    event_s = [each.pause_s + (_HTTP_BYTES * byte_s if each.front else 0.0) for each in generates]
    num_events = [(MAX_OUTPUT + 2) * each.num_returned for each in generates]
    reading_s = max(map(mul, event_s, num_events), default=0.0)
    is_limited = any(set(TENANT[each.tenant].limits.values()) != {None} for each in plan.requests)
    needy = [each for each in generates if plan.layout.deadly in each.needs] if plan.layout.deadly else []
    deadly_s = len(_circumstances(plan).deadly) * _DEADLY_S + bool(needy) * _DEADLY_S + len(needy) * _LATER_S
    trouble_s = _circumstances(plan).trouble_s + _naps_s(plan)
    steps_s = len(generates) * _STEP_BYTES * byte_s
    return last_s + trouble_s + deadly_s + reading_s + steps_s + _PATIENCE_S + is_limited * _QUOTA_S


@dataclass(frozen=True, slots=True)
class _Ran:
    """A world that ran: its outcome, or why it failed, and its seconds of processor time."""

    outcome: Outcome | str
    cpu_s: float


@dataclass(frozen=True, slots=True)
class _Child:
    """A forked process that runs worlds and sends what they were."""

    seeds: range
    process: ForkProcess
    results: Connection


def main(first: int, count: int, num_processes: int = 1) -> int:
    """Prints a line for each world, in the order of their seeds, and the speed to stderr. Returns 1 if a world has
    failed."""
    num_events, seconds, used, failed = 0, 0.0, 0.0, list[int]()
    for number, (seed, ran) in enumerate(_run_worlds(range(first, first + count), num_processes), start=1):
        used, outcome = used + ran.cpu_s, ran.outcome
        if isinstance(outcome, Outcome):
            num_events, seconds = num_events + outcome.num_events, seconds + outcome.seconds
            print(seed, outcome.digest, outcome.num_events, f"{outcome.seconds:.3f}", *outcome.errors, flush=True)
        else:
            failed.append(seed)
            print(seed, "fails:", outcome, flush=True)
        if number % _REPORTED == 0 or number == count:
            print(
                f"{number} worlds, {num_events} events, {seconds:.0f} virtual s: {used:.1f} s of CPU, "
                f"{num_events / (used or 1.0):.0f} events a second; {len(failed)} failed: {failed}",
                file=sys.stderr,
                flush=True,
            )
    return 1 if failed else 0


def _run_worlds(seeds: range, num_processes: int) -> Iterator[tuple[int, _Ran]]:
    """Runs worlds in forked processes. Each ends after some worlds; one that dies fails only its world."""
    parts = (seeds[first : first + _WORLDS_OF_CHILD] for first in range(0, len(seeds), _WORLDS_OF_CHILD))
    children = deque(map(_start, islice(parts, num_processes)))
    while children:
        child = children.popleft()
        for number, seed in enumerate(child.seeds, start=1):
            try:
                yield seed, child.results.recv()
            except EOFError:
                child.process.join()
                yield seed, _Ran(f"its process ended with {child.process.exitcode}", 0.0)
                if number < len(child.seeds):
                    children.appendleft(_start(child.seeds[number:]))
                break
        else:
            child.process.join()
            child.results.close()
        children.extend(map(_start, islice(parts, num_processes - len(children))))


def _start(seeds: range) -> _Child:
    fork = get_context("fork")
    results, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_send_results, args=(seeds, sender))
    process.start()
    sender.close()
    return _Child(seeds, process, results)


def _send_results(seeds: range, sender: Connection) -> None:
    for seed in seeds:
        started, outcome = time.process_time(), _outcome(seed)
        sender.send(_Ran(outcome, time.process_time() - started))


def _outcome(seed: int) -> Outcome | str:
    try:
        return run_world(draw_plan(seed))
    except Exception as error:
        return f"{type(error.__cause__ or error).__name__} {error}".replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
