"""Independent counts of the numbers that metrics and usage report."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np

from gateway.app import Gateway
from gateway.metrics import GatewayMetrics, ModelMetrics
from gateway.replicas import routing
from gateway.replicas.events import TokenRun
from gateway.replicas.live import Arrivals, LiveRequest
from gateway.replicas.routing import Candidate, Stage
from quire.messages.replica_role import ReplicaRole
from scheduler_svc.core.moves import Arriving
from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step import ClientEvents, RequestEnd, StepPlan, StepResult
from scheduler_svc.service.metrics import SchedulerMetrics
from scheduler_svc.service.requests import GATEWAYS
from tests.sim.world.clients import Story
from tests.sim.world.traffic import Generate
from tests.sim.world.watch import report

_HEADROOM = 1.25
"""Maximum load of a replica relative to its share."""


class Tally:
    """Counts of one core's work, which its process should report."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._of_drafts: dict[RequestKey, tuple[int, int]] = {}
        # Requests that have run; the references also ensure that no other request gets their identity.
        self._begun: dict[int, SequenceGroup] = {}

    def count(self, name: str, number: int = 1) -> None:
        self._counts[name] += number

    def planned(self, plan: StepPlan | None) -> None:
        if plan is not None:
            self.count("steps")
            self.count("batched_tokens", plan.num_tokens)

    def begun(self, group: SequenceGroup) -> None:
        """A request starts to run, perhaps not for the first time."""
        if id(group) not in self._begun:
            self._begun[id(group)] = group
            self.count("prefix_cache_queries", len(group.request.prompt))
            self.count("prefix_cache_hits", group.cached_tokens or 0)

    def fetched(self, arriving: Arriving, num_failed: int) -> None:
        place = "disk" if arriving.source is None else "replica"
        self.count(f"{place} fetched", len(arriving.blocks) - num_failed)
        self.count(f"{place} failed", num_failed)
        self.count("in", arriving.source is not None)

    def applying(self, core: Scheduler, result: StepResult) -> Callable[[Mapping[Any, ClientEvents]], None]:
        """Begins to count a step; call the returned function with the events of the step once it is applied."""
        step, table = core.in_flight[0] if core.in_flight else None, core.batch.rows
        drafted: list[tuple[Any, int, int, int]] = []
        if step is not None and result.num_tokens is not None and result.num_drafts is not None:
            right = np.maximum(result.num_tokens - result.num_passes, 0)
            self.count("draft_samples", int((result.num_drafts > 0).sum()))
            self.count("drafts", int(result.num_drafts.sum()))
            self.count("drafts_accepted", int(right.sum()) if result.num_drafts.any() else 0)
            is_current = (table.incarnation[step.rows] == step.incarnations) & ~table.dependent[step.rows]
            drafted = [
                (table.sequences[row], len(table.sequences[row].token_ids), *numbers)
                for row, is_its, *numbers in zip(
                    *(each.tolist() for each in (step.rows, is_current, right, result.num_drafts)), strict=True
                )
                if is_its and row not in result.failures and numbers[1]
            ]

        def applied(events: Mapping[Any, ClientEvents]) -> None:
            for sequence, length, num_right, num_drafts in drafted:
                all_drafts, all_right = self._of_drafts.get(sequence.request.key, (0, 0))
                num_right = min(num_right, num_drafts, len(sequence.token_ids) - length)
                self._of_drafts[sequence.request.key] = all_drafts + num_drafts, all_right + num_right
            batch = events.get(GATEWAYS, ClientEvents())
            self.count("generated_tokens", len(batch.token_ids))
            for end in batch.completed:
                self._check_drafts(end)

        return applied

    def _check_drafts(self, end: RequestEnd) -> None:
        counted = self._of_drafts.pop(RequestKey(GATEWAYS, end.handle), (0, 0))
        if (end.usage.drafted_tokens, end.usage.accepted_draft_tokens) != counted:
            report(AssertionError(f"{end.usage} of a request with {counted[0]} drafts, {counted[1]} of them right"))

    def wrong(self, metrics: SchedulerMetrics) -> list[str]:
        """Differences between these counts and the metrics of a scheduler, when no request is live."""
        labels = {"in": "direction", "out": "direction"}
        names = [
            *("steps", "batched_tokens", "generated_tokens", "preemptions", "swap_outs", "draft_samples", "drafts"),
            *("drafts_accepted", "prefix_cache_queries", "prefix_cache_hits"),
        ]
        samples = _samples(metrics)
        said = {name: _read(samples, f"quire_scheduler_{name}_total") for name in names}
        for name, label in labels.items():
            said[name] = _read(samples, "quire_scheduler_moved_requests_total", {label: name})
        for source in ("disk", "replica"):
            for outcome in ("fetched", "failed"):
                place = {"source": source, "outcome": outcome}
                said[f"{source} {outcome}"] = _read(samples, "quire_scheduler_moved_blocks_total", place)
        wrong = [
            f"{name} is {value:g}, not {self._counts[name]}"
            for name, value in said.items()
            if value != self._counts[name]
        ]
        outcomes = ("completed", "failed", "aborted")
        ended = sum(_read(samples, "quire_scheduler_requests_total", {"outcome": each}) for each in outcomes)
        left = ended + self._counts["out"] - self._counts["submitted"]
        # Offers that cannot arrive any more fail, too.
        if not 0 <= left <= self._counts["offered"]:
            wrong.append(f"{ended:g} requests have ended, of {self._counts['submitted']}")
        return wrong


def _samples(metrics: Any) -> list[Any]:
    return [sample for family in metrics.registry.collect() for sample in family.samples]


def _read(samples: Iterable[Any], name: str, labels: Mapping[str, str] | None = None) -> float:
    # Metrics of a gateway have the label `model`, too.
    sought = dict(labels or {}).items()
    return sum(each.value for each in samples if each.name == name and sought <= each.labels.items())


def wrong_at(gateway: Gateway) -> str | None:
    """A contradiction between the metrics of a gateway; None if there is none."""
    metrics = gateway._context.metrics
    completed = _read(_samples(metrics), "quire_gateway_requests_total", {"outcome": "completed"})
    others = sum(each.value for each in _uncompleted(metrics))
    counted = gateway._models.default.metrics.statistics
    if (completed, others) == (counted.completed.count, counted.failed.count):
        return None
    return f"{completed:g} requests are completed, and {others:g} are not; there were {counted}"


@contextmanager
def counted_once() -> Iterator[None]:
    """Checks inside the block that tokens that a stream had before it was resumed are not counted again."""
    accept, track_resumed = LiveRequest.accept, ModelMetrics.track_resumed
    counted = WeakKeyDictionary[LiveRequest, int]()

    def accept_checked(live: LiveRequest, run: TokenRun, arrivals: Arrivals | None = None) -> bool:
        before = 0 if arrivals is None else arrivals.num_tokens
        has_ended = accept(live, run, arrivals)
        counted[live] = counted.get(live, 0) + (0 if arrivals is None else arrivals.num_tokens - before)
        return has_ended

    @contextmanager
    def track(metrics: ModelMetrics, live: LiveRequest, num_known_tokens: int) -> Iterator[None]:
        before = counted.get(live, 0)
        try:
            with track_resumed(metrics, live, num_known_tokens):
                yield
        finally:
            count, wanted = counted.get(live, 0) - before, max(live.num_generated_tokens - num_known_tokens, 0)
            if count != wanted:
                report(AssertionError(f"{count} tokens of a resumed stream are counted, and {wanted} are new"))

    with patch.object(LiveRequest, "accept", accept_checked), patch.object(ModelMetrics, "track_resumed", track):
        yield


def _uncompleted(metrics: GatewayMetrics) -> list[Any]:
    """The number of requests of each outcome except completion."""
    samples = [each for family in metrics._families.requests.collect() for each in family.samples]
    return [each for each in samples if each.name.endswith("_total") and each.labels["outcome"] != "completed"]


def wrong_at_gateways(gateways: Iterable[Gateway], stories: Iterable[Story]) -> list[str]:
    """Metrics of all gateways together that are below or above the numbers that their clients saw. Call it only if
    nothing broke and nothing runs."""
    metrics = [gateway._context.metrics for gateway in gateways]
    least, most = defaultdict[str, float](float), defaultdict[str, float](float)
    for story in stories:
        if isinstance(request := story.request, Generate):
            wanted: dict[str, float] = {
                "requests": len(request.parts),
                "prompt_tokens": request.num_prompt_tokens,
                "generated_tokens": request.num_returned * (request.options.max_tokens or 0),
            }
            again = request.taken_over_after_s is not None or request.returns_after is not None
            if story.has_ended and story.witness is not None:
                expected = story.witness.last.expected.sequences
                wanted["generated_tokens"] = sum(len(each.token_ids) for each in expected)
                # Tokens that arrive between two calls are not counted.
                for name in wanted:
                    least[name] += 0 if again and name == "generated_tokens" else wanted[name]
                # Candidates that were not returned count, too; their number is not predicted for a beam search.
                counts = story.witness.last.expected.num_generated
                wanted["generated_tokens"] = math.inf if counts is None else max(counts)
            elif request.chooses:
                wanted["generated_tokens"] = math.inf
            num_calls = 1 + request.num_takeovers if request.taken_over_after_s is not None else 1
            # A refused call is made again.
            num_calls = math.inf if not story.has_ended or request.returns_after is not None else num_calls
            for name in filter(wanted.get, wanted):
                most[name] += wanted[name] * num_calls
    samples = [*map(_samples, metrics)]
    said = {
        "requests": sum(_read(each, "quire_gateway_requests_total", {"outcome": "completed"}) for each in samples),
        "prompt_tokens": sum(_read(each, "quire_gateway_prompt_tokens_total") for each in samples),
        "generated_tokens": sum(_read(each, "quire_gateway_generated_tokens_total") for each in samples),
    }
    if any(each.value for own in metrics for each in _uncompleted(own)):
        # A request may have been refused, and then made again.
        most["prompt_tokens"] = math.inf
    wrong = [
        f"{name} is {value:g}, not {least[name]} to {most[name]}"
        for name, value in said.items()
        if not least[name] <= value <= most[name]
    ]
    if live := sum(_read(each, "quire_gateway_live_requests") for each in samples):
        wrong.append(f"{live:g} requests are live")
    return wrong


@contextmanager
def checked_routing() -> Iterator[None]:
    """Checks inside the block that a prompt goes to the replica that has most of it cached, unless that is much busier
    than others. If replicas have roles, it goes to one with the right role, where it delays the least."""
    choose, narrow, by_prefix = routing.choose_replica, routing.narrowed, routing._by_prefix

    def choose_checked(key: bytes, loads: Mapping[str, float], cached_tokens: Mapping[str, float] | None = None) -> str:
        chosen = choose(key, loads, cached_tokens)
        most = math.ceil(_HEADROOM * (sum(loads.values()) + 1) / len(loads))
        worth = cached_tokens or {}
        better = [each for each, load in loads.items() if load < most and worth.get(each, 0) > worth.get(chosen, 0)]
        if better or loads[chosen] >= most:
            report(AssertionError(f"{chosen} gets a prompt, by {dict(worth)} and {dict(loads)}"))
        return chosen

    def find_checked(prompt: Any, candidates: Any, adapter: Any, found: Mapping[str, routing.Found]) -> str:
        if any(each.worth > each.num_cached for each in found.values()):
            report(AssertionError("blocks on disk are worth more than those in the pool"))
        return by_prefix(prompt, candidates, adapter, found)

    def narrow_checked(
        candidates: Mapping[str, Candidate], num_new: Mapping[str, int], stage: Stage, long_prompt: int
    ) -> Any:
        chosen = narrow(candidates, num_new, stage, long_prompt)
        others = [each for each, place in candidates.items() if place.role is not ReplicaRole.PREFILL]
        has_roles = bool(others) and any(place.role is not ReplicaRole.BOTH for place in candidates.values())
        is_long = stage is Stage.PROMPT and bool(others) and min(num_new[each] for each in others)
        if has_roles and stage is Stage.STAY and set(chosen) != set(others):
            report(AssertionError("what does not move goes to a replica for prefill"))
        if has_roles and is_long and is_long >= long_prompt:
            delays = {each: _delay(place, num_new[each]) for each, place in candidates.items()}
            if any(delays[each] > min(delays.values()) for each in chosen):
                report(AssertionError("a long prompt goes where it delays more"))
        return chosen

    with (
        patch.object(routing, "choose_replica", choose_checked),
        patch.object(routing, "narrowed", narrow_checked),
        patch.object(routing, "_by_prefix", find_checked),
    ):
        yield


def _delay(place: Candidate, num_new_tokens: int) -> int:
    """Delay in tokens: prompts computed before this one, and its own tokens, once more for each stream that waits for
    it."""
    delayed = 0 if place.role is ReplicaRole.PREFILL else len(place.work.streams)
    return sum(place.work.prompts.values()) + (1 + delayed) * num_new_tokens
