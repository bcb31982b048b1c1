"""Selection of a request's replica: by prefix and load, and away from one without a worker or without room."""

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from google.rpc.code_pb2 import UNAVAILABLE

from gateway.replicas import replica_set
from gateway.replicas.events import (
    ALREADY_TAKEN_OVER,
    EventBatch,
    FinishReason,
    RequestEnded,
    RequestFailed,
    RequestMoved,
    SequenceEnded,
    TokenRun,
    Usage,
    event_batch_from,
)
from gateway.replicas.ledger import Ledger
from gateway.replicas.link import SchedulerLink
from gateway.replicas.live import CallModel, LiveRequest
from gateway.replicas.replica_set import Replicas
from quire.common.v1.common_pb2 import KvSource
from quire.messages.replica_role import ReplicaRole
from quire.rpc.errors import Aborted, Internal, ResourceExhausted, Unavailable
from quire.scheduler.v1.scheduler_pb2 import RequestFailure, TokenEvents
from quire.service.compatibility import UNKNOWN_MODEL, ModelFingerprint, epoch_of_start
from tests.support.parameters import make_request
from tests.support.processes import until_true
from tests.support.tokenizers import byte_level, wrapped

TOKENIZER = wrapped(byte_level())
FAILOVER_DELAY_S = 0.02
CONNECT_TIMEOUT_S = 0.05


@pytest.fixture(autouse=True)
def _one_look(monkeypatch):
    """The second look would take longer than all delays here."""
    monkeypatch.setattr("gateway.replicas.placements.LAST_LOOK_S", 0.0)


class Scheduler:
    """Stands in for a connected scheduler and its worker, whose answers `serve` gives."""

    def __init__(
        self, address: str, *, listener: Replicas, serve: Callable[["Scheduler", LiveRequest], None], **_: object
    ) -> None:
        self.address = address
        self.is_connected = self.is_ready = True
        self.is_draining = False
        self.leave_after_s = 0.0
        self.is_busy = False
        self.welcome = SimpleNamespace(
            block_size=4,
            scheduler_epoch=7,
            durable_grace_s=60.0,
            role=ReplicaRole.BOTH,
            kv_namespace="one",
            takes_offers=False,
        )
        self.model = UNKNOWN_MODEL
        self.cached = self.loading = None
        self.num_deaths = 0
        self.submitted: list[int] = []
        self.released: list[int] = []
        self.resumed: list[int] = []
        self.offered: list[int] = []
        self.aborted: list[int] = []
        self.has: dict[int, LiveRequest] = {}
        self._replicas = listener
        self._serve = serve

    def submit(self, live: LiveRequest) -> None:
        self.submitted.append(live.handle)
        self.has[live.handle] = live
        asyncio.get_running_loop().call_soon(self._serve, self, live)

    def resume(self, live: LiveRequest) -> None:
        self.resumed.append(live.handle)

    def offer(self, live: LiveRequest) -> None:
        self.offered.append(live.handle)

    def abort(self, handle: int, *_: object, **__: object) -> None:
        self.aborted.append(handle)
        self.has.pop(handle, None)

    def withdraw(self, live: LiveRequest) -> None:
        self.abort(live.handle)

    def release(self, handle: int) -> None:
        self.released.append(handle)

    def tell(self, **happened: Any) -> None:
        fields: dict[str, Any] = {"runs": [], "ended": [], "completed": [], "failed": []} | happened
        self._replicas.on_events(cast(SchedulerLink, self), EventBatch(**fields))

    def drain(self, leave_after_s: float = 0.0) -> None:
        self.is_ready, self.is_draining, self.leave_after_s = False, True, leave_after_s
        self._replicas.on_readiness(cast(SchedulerLink, self))

    def lose_stream(self) -> None:
        self.is_connected = False
        self._replicas.on_disconnected(cast(SchedulerLink, self))

    def regain_stream(self) -> None:
        self.is_connected = True
        self._replicas.on_connected(cast(SchedulerLink, self))

    def lose_worker(self, until_back_s: float) -> None:
        self.num_deaths += 1
        self.is_ready = False
        self._replicas.on_readiness(cast(SchedulerLink, self))
        asyncio.get_running_loop().call_later(until_back_s, self._regain_worker)

    def _regain_worker(self) -> None:
        self.is_ready = True
        self._replicas.on_readiness(cast(SchedulerLink, self))
        for live in list(self.has.values()):
            self._serve(self, live)


class Cluster:
    """A gateway's ledger and replicas, with stand-ins for schedulers."""

    def __init__(self, num_replicas: int, serve: Callable[[Scheduler, LiveRequest], None]) -> None:
        self.ledger = Ledger(max_chunk_tokens=64)
        addresses = [f"127.0.0.1:{number}" for number in range(1, 1 + num_replicas)]
        with patch.object(replica_set, "SchedulerLink", partial(Scheduler, serve=serve)):
            self.replicas = Replicas(
                addresses,
                self.ledger,
                gateway_id="gateway",
                architecture="x",
                connect_timeout_s=CONNECT_TIMEOUT_S,
                model=UNKNOWN_MODEL,
                failover_delay_s=FAILOVER_DELAY_S,
                reconnect_grace_s=5,
            )
        self.placements = self.replicas.placements
        self.schedulers = cast(list[Scheduler], list(self.replicas.links.values()))

    def place(self, request_id: str, *, num_tokens: int = 8, **fields: Any) -> LiveRequest:
        request = make_request(request_id, prompt=range(num_tokens), eos_token_ids=(), **fields)
        live = self.ledger.open(request, TOKENIZER)
        self.placements.place(live)
        return live


async def test_a_request_leaves_prefill_with_its_first_token_or_for_the_next_prompt():
    cluster = Cluster(2, lambda *_: None)
    prefill, decode = cluster.schedulers
    prefill.welcome.role, decode.welcome.role = ReplicaRole.PREFILL, ReplicaRole.DECODE

    def begin(scheduler: Scheduler, live: LiveRequest) -> None:
        scheduler.tell(runs=[TokenRun(live.handle, 0, 0, [7])])

    first, short = cluster.place("first", num_tokens=300), cluster.place("short")
    assert (prefill.submitted, decode.submitted) == ([first.handle], [short.handle])
    begin(decode, short)
    begin(prefill, first)
    # The decode replica has a stream, and the prefill replica has no prompts: the request stays until one comes.
    assert prefill.released == []
    second = cluster.place("second", num_tokens=300)
    assert prefill.released == [first.handle]
    source = KvSource(kv_namespace="one", endpoints=["there"], lease=b"l")
    prefill.tell(moved=[RequestMoved(first.handle, source)])
    assert (first.replica, first.kv_source, decode.submitted) == (decode.address, source, [short.handle, first.handle])
    third = cluster.place("third", num_tokens=300)
    begin(prefill, second)
    assert prefill.released == [first.handle, second.handle]
    # If the blocks cannot be fetched, the prompt would be computed a second time.
    decode.welcome.kv_namespace = "other"
    begin(prefill, third)
    assert prefill.released == [first.handle, second.handle]


def running_at(cluster: Cluster, first: Scheduler, num_tokens: int = 1) -> LiveRequest:
    """A stream that the first scheduler runs; all others take offers."""
    for other in cluster.schedulers:
        other.welcome.takes_offers = True
        other.is_ready = other is first
    live = cluster.place("story", max_tokens=1000)
    first.tell(runs=[TokenRun(live.handle, 0, 0, [7] * num_tokens)])
    for other in cluster.schedulers:
        other.is_ready = True
    return live


async def test_a_stream_runs_on_until_another_replica_has_room_for_it():
    cluster = Cluster(2, lambda *_: None)
    first, other = cluster.schedulers
    live = running_at(cluster, first)
    first.drain()
    assert (first.released, other.offered) == ([], [live.handle])
    # By now it takes more blocks than in the offer.
    first.tell(runs=[TokenRun(live.handle, 0, 1, [7] * 5)])
    other.tell(has_room=[live.handle])
    assert (first.released, other.offered) == ([], [live.handle] * 2)
    other.tell(has_room=[live.handle])
    assert (first.released, other.submitted) == ([live.handle], [])
    first.tell(moved=[RequestMoved(live.handle, None)])
    assert (live.replica, other.submitted, other.aborted) == (other.address, [live.handle], [])
    # A late answer changes nothing.
    other.tell(has_room=[live.handle])
    assert (first.released, other.aborted) == ([live.handle], [])
    cluster.placements.abort(live)


async def test_all_replicas_are_asked_after_a_while_and_the_first_with_room_gets_it(monkeypatch):
    monkeypatch.setattr("gateway.replicas.offers._FIRST_LOOK_S", 0.001)
    cluster = Cluster(3, lambda *_: None)
    first, *others = cluster.schedulers
    live = running_at(cluster, first)
    first.drain()
    assert sum(len(each.offered) for each in others) == 1
    await until_true(lambda: all(each.offered == [live.handle] for each in others))
    slow, fast = others
    fast.tell(has_room=[live.handle])
    assert (slow.aborted, fast.aborted, first.released) == ([live.handle], [], [live.handle])
    # The replica that keeps room is lost: the request goes to another one.
    fast.lose_stream()
    first.tell(moved=[RequestMoved(live.handle, None)])
    assert live.replica == slow.address
    cluster.placements.abort(live)


async def test_a_stream_leaves_a_replica_that_drains_in_the_end_and_one_that_is_over_is_withdrawn(monkeypatch):
    monkeypatch.setattr("gateway.replicas.offers._FIRST_LOOK_S", 0.001)
    cluster = Cluster(2, lambda *_: None)
    first, other = cluster.schedulers
    live = running_at(cluster, first)
    first.drain(leave_after_s=0.01)
    await until_true(lambda: first.released)
    first.tell(moved=[RequestMoved(live.handle, None)])
    # It takes the offer's place in the queue.
    assert (live.replica, other.submitted, other.aborted) == (other.address, [live.handle], [])
    cluster.placements.abort(live)
    assert other.aborted == [live.handle]
    cluster = Cluster(2, lambda *_: None)
    first, other = cluster.schedulers
    live = running_at(cluster, first)
    first.drain()
    cluster.placements.abort(live)
    assert other.aborted == first.aborted == [live.handle]


async def test_a_replica_that_knows_no_offers_is_not_asked():
    cluster = Cluster(2, lambda *_: None)
    first, other = cluster.schedulers
    live = running_at(cluster, first)
    other.welcome.takes_offers = False
    first.drain()
    assert (first.released, other.offered) == ([live.handle], [])
    cluster.placements.abort(live)


async def test_hints_of_length_move_load_as_far_as_max_tokens_and_until_the_tokens_came():
    def shares(first: int | None, rest: int | None, *, num_first_tokens: int = 0) -> list[int]:
        """Shares of two replicas of 21 requests for one prompt, the larger first."""
        cluster = Cluster(2, lambda *_: None)
        live = cluster.place("first", expected_tokens=first, max_tokens=1000)
        (home,) = (each for each in cluster.schedulers if each.submitted)
        home.tell(runs=[TokenRun(live.handle, 0, 0, [7] * num_first_tokens)] if num_first_tokens else [])
        for number in range(20):
            cluster.place(f"request {number}", expected_tokens=rest, max_tokens=1000)
        return [len(home.submitted), 21 - len(home.submitted)]

    plain = shares(None, None)
    assert plain == shares(100, 100) == shares(10**9, 1000)
    assert shares(1000, 100)[0] < plain[0]
    # Its tokens have come: it now counts as short as the others.
    assert shares(1000, 100, num_first_tokens=900) == plain


async def test_a_request_stays_where_the_worker_is_back_soon_and_leaves_where_it_is_not():
    cluster = Cluster(2, lambda *_: None)
    live = cluster.place("story")
    first, other = sorted(cluster.schedulers, key=lambda each: not each.submitted)
    first.lose_worker(until_back_s=FAILOVER_DELAY_S / 10)
    await asyncio.sleep(3 * FAILOVER_DELAY_S)
    assert (live.replica, first.submitted, other.submitted) == (first.address, [live.handle], [])
    first.lose_worker(until_back_s=60)
    await until_true(lambda: live.handle in other.has)
    assert (live.replica, first.has) == (other.address, {})
    cluster.placements.abort(live)


async def test_a_request_whose_tokens_cannot_become_text_fails_alone_and_is_aborted(caplog):
    cluster = Cluster(1, lambda *_: None)
    (scheduler,) = cluster.schedulers
    detokenizer = SimpleNamespace(push=lambda token_id: 1 / 0, push_all=lambda token_ids: 1 / 0)
    tokenizer = cast(Any, SimpleNamespace(detokenizer=lambda **_: detokenizer))
    broken, other = cluster.ledger.open(make_request("broken"), tokenizer), cluster.place("other")
    cluster.placements.place(broken)
    scheduler.tell(runs=[TokenRun(live.handle, 0, 0, [50]) for live in (broken, other)])
    with pytest.raises(Internal) as caught:
        await anext(aiter(broken.events()))
    cluster.placements.detach(broken)
    assert (list(scheduler.has), other.num_generated_tokens) == ([other.handle], 1)
    assert (caught.value.reason, "division" in caught.value.message) == ("UNEXPECTED", False)
    assert sum(record.exc_info is not None for record in caplog.records) == 1
    cluster.placements.abort(other)


async def test_those_that_a_full_queue_refuses_do_not_come_back_all_at_once():
    full = ResourceExhausted("the queue is full", retry_after_ms=20)

    def refuse(scheduler: Scheduler, live: LiveRequest) -> None:
        scheduler.tell(failed=[RequestFailed(live.handle, full)])

    cluster = Cluster(1, refuse)
    scheduler = cluster.schedulers[0]
    requests = [cluster.place(f"request {number}") for number in range(300)]
    for live in requests:
        # It ran before, at a scheduler that is gone.
        live.submissions = 2
    await asyncio.sleep(0)
    first = len(scheduler.submitted)
    assert first == 300
    await asyncio.sleep(0.2)
    # One at each given time, and not all of them each time.
    assert 0 < len(scheduler.submitted) - first < 250
    for live in requests:
        cluster.placements.abort(live)


async def test_what_is_completed_counts_for_no_replica_though_its_client_still_reads():
    def complete(scheduler: Scheduler, live: LiveRequest) -> None:
        scheduler.tell(
            runs=[TokenRun(live.handle, 0, 0, [50])],
            ended=[SequenceEnded(live.handle, 0, 1, FinishReason.LENGTH, None, None)],
            completed=[RequestEnded(live.handle, Usage(8, 1))],
        )

    cluster = Cluster(3, complete)
    unread = [cluster.place(f"request {number}") for number in range(30)]
    await until_true(lambda: all(live.is_completed for live in unread))
    aborted = []
    for scheduler in cluster.schedulers:
        scheduler.abort = lambda handle, *_, **__: aborted.append(handle)
    # They begin alike, so that all go to one replica while it has room: only they count.
    for number in range(3):
        live = cluster.place(f"later {number}")
        await until_true(lambda live=live: live.is_completed)
    assert sorted(len(scheduler.submitted) for scheduler in cluster.schedulers)[-1] >= 13 + 3
    for live in unread:
        cluster.placements.detach(live)
    assert aborted == []


@pytest.mark.parametrize(
    ("durable", "epoch", "is_ended"),
    [(True, 7, True), (True, 8, True), (True, epoch_of_start(0.001), False), (False, 7, False)],
)
async def test_a_durable_request_is_ended_at_its_scheduler_when_that_is_back(durable, epoch, is_ended):
    """It would be kept for another reader, even if its worker was attached again meanwhile; a plain request ends by
    itself, and another scheduler does not have it."""
    cluster = Cluster(1, lambda *_: None)
    (scheduler,) = cluster.schedulers
    live = cluster.place("story", durable=durable)
    scheduler.lose_stream()
    cluster.placements.abort(live)
    cluster.ledger.close(live)
    again = cluster.place("story", durable=durable)
    aborted: list[int] = []
    scheduler.abort = lambda handle, *_, **__: aborted.append(handle)
    scheduler.welcome.scheduler_epoch = epoch
    scheduler.regain_stream()
    assert aborted == [live.handle] * is_ended
    # The abort comes before a request that now has its id.
    assert scheduler.submitted == [live.handle] * (1 + is_ended) + [again.handle]
    scheduler.lose_stream()
    scheduler.regain_stream()
    assert aborted == [live.handle] * is_ended
    cluster.placements.abort(again)


async def test_a_request_with_tokens_goes_on_with_no_other_model_and_one_without_does():
    cluster = Cluster(1, lambda *_: None)
    (scheduler,) = cluster.schedulers
    scheduler.model = ModelFingerprint(weights="w1")
    begun, waiting = cluster.place("begun"), cluster.place("waiting")
    scheduler.tell(runs=[TokenRun(begun.handle, 0, 0, [50])])
    scheduler.lose_stream()
    scheduler.model = ModelFingerprint(weights="w2")
    scheduler.regain_stream()
    says = r"before and now: weights w1 and w2\); it cannot continue: send it again"
    with pytest.raises(Unavailable, match=says) as caught:
        await begun.result()
    assert caught.value.reason == "MODEL_CHANGED"
    assert scheduler.submitted == [begun.handle, waiting.handle, waiting.handle]
    cluster.placements.abort(waiting)


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_change_of_model_moves_its_requests_and_keeps_others_away_until_the_welcome_says_so(is_known):
    cluster = Cluster(2, lambda *_: None)
    live = cluster.place("moved")
    changed, other = sorted(cluster.schedulers, key=lambda each: not each.submitted)

    def fail(scheduler: Scheduler) -> None:
        failure = RequestFailure(handle=live.handle, code=UNAVAILABLE, reason="MODEL_CHANGED", message="send it again")
        failure.scheduler_epoch = scheduler.welcome.scheduler_epoch + (not is_known)
        scheduler.tell(failed=event_batch_from(TokenEvents(failed=[failure])).failed)

    fail(changed)
    assert (live.replica, other.submitted) == (other.address, [live.handle])
    other.lose_stream()
    assert cluster.place("next").replica == (changed.address if is_known else None)
    other.regain_stream()
    changed.is_connected = False
    fail(other)
    with pytest.raises(Unavailable, match="send it again"):
        await live.result()


def lose_for_good(cluster: Cluster, scheduler: Scheduler) -> None:
    """For example, a DNS name no longer has its address."""
    scheduler.is_connected = False
    del cluster.replicas.links[scheduler.address]
    cluster.replicas.on_gone(scheduler.address)


async def test_requests_of_a_replica_that_is_gone_for_good_go_to_others_and_those_that_failed_do_not():
    cluster = Cluster(2, lambda *_: None)
    running, failed = cluster.place("running"), cluster.place("failed")
    gone, other = sorted(cluster.schedulers, key=lambda each: running.handle not in each.has)
    while failed.replica != gone.address:
        failed = cluster.place(f"failed {failed.handle}")
    # Its client has not read the error yet.
    failed.fail(ResourceExhausted("no"))
    lose_for_good(cluster, gone)
    assert running.replica == other.address
    assert failed.handle not in other.submitted
    for live in (running, failed):
        cluster.placements.abort(live)
        cluster.placements.detach(live)


async def test_a_request_that_is_taken_over_from_a_replica_that_is_gone_is_placed_anew():
    cluster = Cluster(2, lambda *_: None)
    earlier = cluster.place("story", durable=True)
    gone, other = sorted(cluster.schedulers, key=lambda each: earlier.handle not in each.has)
    live = cluster.ledger.prepare(earlier.request, TOKENIZER)
    cluster.ledger.close(earlier)
    cluster.ledger.enter(live)
    live.is_prepared = False
    lose_for_good(cluster, gone)
    live.is_prepared = True
    cluster.placements.hand_over(earlier, live)
    assert live.replica == other.address
    with pytest.raises(Unavailable, match="is not connected"):
        cluster.placements.resume(live, gone.address)


def taken_over_error(metadata: dict[str, str]) -> Aborted:
    return Aborted("is read by another call now", reason="REQUEST_TAKEN_OVER", metadata=metadata)


def resumed_here(cluster: Cluster) -> LiveRequest:
    """A durable request with a token, which a newer call at this gateway reads."""
    (scheduler,) = cluster.schedulers
    earlier = cluster.place("story", durable=True)
    scheduler.tell(runs=[TokenRun(earlier.handle, 0, 0, [50])])
    live = cluster.ledger.prepare(earlier.request, TOKENIZER)
    cluster.ledger.close(earlier)
    cluster.ledger.enter(live)
    live.catch_up(earlier, 1)
    live.catch_up(earlier, 1)
    cluster.placements.hand_over(earlier, live)
    return live


async def test_a_call_does_not_take_its_stream_back_from_a_call_that_came_later():
    """The client left before this call had any new event, and went on at another gateway. This gateway learns of that
    call before it learns that its own client has left, for example because that connection is half open."""
    cluster = Cluster(1, lambda *_: None)
    (scheduler,) = cluster.schedulers
    live = resumed_here(cluster)
    scheduler.tell(failed=[RequestFailed(live.handle, taken_over_error({}))])
    assert scheduler.resumed == []
    with pytest.raises(Aborted, match="another call"):
        await live.result()


@pytest.mark.parametrize("has_news", [False, True])
async def test_a_call_that_goes_on_here_takes_its_stream_back_from_who_read_it_before(has_news):
    """Another gateway has read it meanwhile, and this one has not been notified yet."""
    cluster = Cluster(1, lambda *_: None)
    (scheduler,) = cluster.schedulers
    live = resumed_here(cluster)
    if has_news:
        # It is the reader by then, and a later reader keeps it for good.
        scheduler.tell(runs=[TokenRun(live.handle, 0, 1, [51])])
    taken_over = RequestFailed(live.handle, taken_over_error({ALREADY_TAKEN_OVER: "true"}))
    scheduler.tell(failed=[taken_over])
    assert (live.has_failed, scheduler.resumed) == (has_news, [] if has_news else [live.handle])
    if not has_news:
        assert live.replica == scheduler.address
        scheduler.tell(runs=[TokenRun(live.handle, 0, 0, [50, 51])])
        assert live.sequences[0].token_ids == [50, 51]
        scheduler.tell(failed=[taken_over])
    with pytest.raises(Aborted, match="another call"):
        await live.result()
    assert len(scheduler.resumed) == (not has_news)


OLD, NEW = ModelFingerprint(weights="w1"), ModelFingerprint(weights="w2")


def cluster_of_two_models(num_prompts: int) -> tuple[Cluster, list[Scheduler], list[LiveRequest]]:
    """A gateway whose two replicas have different models, and the requests of a call with several prompts."""
    cluster = Cluster(2, lambda *_: None)
    for scheduler, model in zip(cluster.schedulers, (OLD, NEW), strict=True):
        scheduler.model = model
    requests = [
        cluster.ledger.open(make_request(f"prompt {number}", prompt=range(number, number + 8)), TOKENIZER)
        for number in range(num_prompts)
    ]
    call = CallModel(requests, cluster.placements.place_anew)
    for each in requests:
        each.call = call
    return cluster, cluster.schedulers, requests


def is_at(scheduler: Scheduler) -> Callable[[LiveRequest], bool]:
    return lambda live: live.replica == scheduler.address


@pytest.mark.parametrize("are_of_one_call", [True, False])
async def test_all_prompts_of_a_call_go_to_replicas_with_one_model(are_of_one_call):
    cluster, _, requests = cluster_of_two_models(6)
    for each in requests:
        each.call = each.call if are_of_one_call else None
        cluster.placements.place(each)
    assert len({each.replica for each in requests}) == (1 if are_of_one_call else 2)


@pytest.mark.parametrize("is_vector", [False, True])
async def test_the_first_output_of_a_call_decides_the_model_of_its_other_prompts(is_vector):
    """The first replica was lost while some of the prompts were there, and came back before all had left it."""
    cluster, (first, other), (begun, late, waiting) = cluster_of_two_models(3)
    cluster.placements.submit(begun, cast(Any, cluster.replicas.get(first.address)))
    cluster.placements.submit(late, cast(Any, cluster.replicas.get(other.address)))
    if is_vector:
        end = SequenceEnded(begun.handle, 0, 0, FinishReason.STOP, None, None, b"\0" * 8)
        first.tell(ended=[end], completed=[RequestEnded(begun.handle, Usage(1, 0))])
    else:
        first.tell(runs=[TokenRun(begun.handle, 0, 0, [50])])
    assert (late.replica, other.aborted) == (first.address, [late.handle])
    assert first.submitted == [begun.handle, late.handle]
    cluster.placements.place(waiting)
    assert waiting.replica == first.address
    # Events of the other model that were under way are dropped.
    other.tell(runs=[TokenRun(late.handle, 0, 0, [51])])
    assert not late.num_generated_tokens


async def test_a_prompt_fails_if_no_replica_has_the_model_that_answered_another_prompt_of_its_call():
    cluster, (first, other), (begun, late) = cluster_of_two_models(2)
    for each in (begun, late):
        cluster.placements.submit(each, cast(Any, cluster.replicas.get(first.address)))
    first.tell(runs=[TokenRun(begun.handle, 0, 0, [50])])
    lose_for_good(cluster, first)
    for each in (begun, late):
        with pytest.raises(Unavailable, match="weights w1 and w2") as failed:
            await each.result()
        assert failed.value.reason == "MODEL_CHANGED"
    assert other.submitted == []


async def test_a_call_without_output_goes_to_another_model_if_no_replica_has_the_first_one():
    cluster, (first, other), requests = cluster_of_two_models(3)
    for each in requests:
        cluster.placements.submit(each, cast(Any, cluster.replicas.get(first.address)))
    lose_for_good(cluster, first)
    assert all(map(is_at(other), requests))


async def read_to_end(live: LiveRequest) -> None:
    async for _ in live.events():
        pass


async def test_where_all_drain_a_request_goes_on_where_it_was():
    """It was about to go to the other replica when both reported that they drain."""
    cluster = Cluster(2, lambda *_: None)
    first, other = cluster.schedulers
    live = running_at(cluster, first)
    first.drain()
    other.drain()
    assert other.aborted == [live.handle]
    first.tell(moved=[RequestMoved(live.handle, None)])
    assert (live.replica, first.submitted, other.submitted) == (first.address, [live.handle] * 2, [])
    cluster.placements.abort(live)


async def test_a_replica_that_keeps_room_gets_the_request_that_was_released_for_it_though_it_drains():
    cluster = Cluster(2, lambda *_: None)
    first, other = cluster.schedulers
    live = running_at(cluster, first)
    first.drain()
    other.tell(has_room=[live.handle])
    other.drain()
    first.tell(moved=[RequestMoved(live.handle, None)])
    assert (live.replica, other.submitted, other.aborted) == (other.address, [live.handle], [])
    # A replica of an earlier release takes no more requests.
    other.tell(failed=[RequestFailed(live.handle, Unavailable("it drains", reason="DRAINING"))])
    assert (live.replica, first.submitted) == (first.address, [live.handle] * 2)
    cluster.placements.abort(live)


async def test_where_all_drain_a_new_request_fails_once_nothing_runs_any_more():
    cluster = Cluster(2, lambda *_: None)
    first = cluster.schedulers[0]
    running = cluster.place("running")
    for scheduler in cluster.schedulers:
        scheduler.drain()
    live = cluster.place("late")
    assert live.replica is None
    await asyncio.sleep(2 * CONNECT_TIMEOUT_S)
    assert not live.is_over
    # The first scheduler still has requests of other gateways.
    first.is_busy = True
    cluster.placements.abort(running)
    await asyncio.sleep(2 * CONNECT_TIMEOUT_S)
    assert not live.is_over
    first.is_busy = False
    with pytest.raises(Unavailable, match="drained; restart them") as failed:
        await asyncio.wait_for(read_to_end(live), 5)
    assert failed.value.reason == "NO_SCHEDULER"


async def test_a_replica_that_refuses_an_offer_is_asked_again_after_a_while(monkeypatch):
    monkeypatch.setattr("gateway.replicas.offers._FIRST_LOOK_S", 0.001)
    monkeypatch.setattr("gateway.replicas.offers._NEXT_LOOK_S", 0.001)
    monkeypatch.setitem(globals(), "FAILOVER_DELAY_S", 60.0)
    cluster = Cluster(2, lambda *_: None)
    first, other = cluster.schedulers
    live = running_at(cluster, first)
    first.drain()
    for num_asked in range(1, 4):
        await until_true(lambda num_asked=num_asked: len(other.offered) == num_asked)
        other.tell(failed=[RequestFailed(live.handle, ResourceExhausted("no room"))])
    assert (live.replica, live.is_over) == (first.address, False)
    other.tell(has_room=[live.handle])
    assert first.released == []
    await until_true(lambda: len(other.offered) == 4)
    other.tell(has_room=[live.handle])
    assert first.released == [live.handle]
    cluster.placements.abort(live)


async def test_a_request_that_waits_where_all_drain_goes_to_the_successor():
    cluster = Cluster(1, lambda *_: None)
    (scheduler,) = cluster.schedulers
    scheduler.drain()
    live = cluster.place("late")
    scheduler.lose_stream()
    scheduler.is_draining, scheduler.is_ready = False, True
    scheduler.regain_stream()
    assert scheduler.submitted == [live.handle]
    await asyncio.sleep(2 * CONNECT_TIMEOUT_S)
    assert not live.is_over
