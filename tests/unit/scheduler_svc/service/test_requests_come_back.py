"""A gateway that comes back gets what it lacks. Worlds break streams in any order, and compare every event."""

import numpy as np
import pytest

from scheduler_svc.core.request import Handle
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step import ClientEvents, RequestEnd, SequenceEnd
from scheduler_svc.service import outbox
from scheduler_svc.service.outbox import Held, Outgoing, PromptLogprobs
from scheduler_svc.service.requests import OwnedRequest, Reader
from tests.support.core_driver import make_request
from tests.support.logprobs import Line, columns_of
from tests.support.request_bench import NO_USAGE, ends_of, has, offsets_of, take_all


def test_a_reader_that_lacks_more_than_is_kept_is_not_attached_and_the_request_ends(bench):
    first = bench.connect()
    owned = bench.admit(make_request(3), first)
    for _ in range(3):
        bench.step(owned)
        first.outbox.poll()
    bench.requests.taken(first, 2)
    bench.requests.close(first)
    assert bench.resubmit(make_request(3), bench.connect(), has(1)) is None
    assert not bench.core.live
    assert len(bench.requests) == 0


def test_a_handle_that_stands_for_another_request_by_now_does_not_mix_their_tokens(bench):
    first = bench.connect()
    earlier = bench.admit(make_request(3), first, nonce=1)
    bench.step(earlier, ends=True)
    take_all(first)
    later = bench.admit(make_request(3), first, nonce=2)
    bench.step(later)
    bench.requests.close(first)
    assert bench.resubmit(make_request(3), bench.connect(), has(0), nonce=2) is None


def test_sequences_that_ended_for_the_reader_are_left_out(bench):
    first = bench.connect()
    owned = bench.admit(make_request(3, num_sequences=2), first)
    handle = owned.key.handle
    events = ClientEvents([handle] * 2, [0, 1], [0, 0], [5, 6])
    events.finished += [SequenceEnd(handle, index, 1, FinishReason.LENGTH, None) for index in range(2)]
    events.completed.append(RequestEnd(handle, NO_USAGE))
    del bench.core.live[owned.key]
    bench.requests.deliver(1, events)
    bench.requests.close(first)
    second = bench.connect()
    bench.resubmit(make_request(3, num_sequences=2), second, Held({0: 1}, frozenset([0])))
    ((batch,),) = [each.batches for each in take_all(second)]
    assert (batch.sequence_indices, batch.token_ids) == ([1], [6])
    assert [end.sequence_index for end in batch.finished] == [1]


def prompt_report(owned: OwnedRequest, first_position: int, count: int) -> PromptLogprobs:
    positions = np.arange(first_position, first_position + count, dtype=np.int32)
    columns = columns_of(Line(-float(position), int(position)) for position in positions)
    return PromptLogprobs(owned.key.handle, first_position, positions.tolist(), columns)


def reported(outgoing: list[Outgoing]) -> list[tuple[int, list[int]]]:
    entries = [entry for each in outgoing for entry in each.prompt_logprobs]
    return [(entry.first_position, entry.columns.chosen_ranks.tolist()) for entry in entries]


@pytest.mark.parametrize("durable", [False, True])
def test_log_probabilities_of_a_prompt_that_is_computed_again_are_sent_once(bench, durable):
    connection = bench.connect()
    owned = bench.admit(make_request(3), connection, durable=durable)
    for first_position, count in ((1, 3), (1, 3), (2, 1), (2, 4), (6, 2), (1, 7)):
        bench.requests.deliver_prompt_logprobs([prompt_report(owned, first_position, count)])
    assert reported(take_all(connection)) == [(1, [1, 2, 3]), (4, [4, 5]), (6, [6, 7])]


def test_log_probabilities_of_a_prompt_go_on_where_the_reader_is(bench):
    first = bench.connect()
    owned = bench.admit(make_request(3), first)
    bench.requests.deliver_prompt_logprobs([prompt_report(owned, 1, 3)])
    bench.requests.close(first)
    bench.requests.deliver_prompt_logprobs([prompt_report(owned, 4, 2)])
    second = bench.connect()
    bench.resubmit(make_request(3), second, Held({}, frozenset(), 3))
    assert reported(take_all(second)) == [(3, [3]), (4, [4, 5])]
    bench.requests.taken(second, 1)
    bench.requests.close(second)
    assert bench.resubmit(make_request(3), bench.connect(), Held({}, frozenset(), 2)) is None


def resume(bench, owned, connection, handle=50):
    bench.requests.attach(owned, Reader(connection, Handle(handle)), Held())


def test_a_long_durable_request_comes_in_parts_with_what_happens_meanwhile_between_them(bench, monkeypatch):
    monkeypatch.setattr(outbox, "_REPLAYED_AT_ONCE", 10)
    first, second = bench.connect("gateway-a"), bench.connect("gateway-b")
    long = bench.admit(make_request(1, max_tokens=100), first, durable=True)
    other = bench.admit(make_request(2, max_tokens=100), second)
    bench.step(*[long] * 35)
    resume(bench, long, second)
    taken = []
    while len(offsets_of(taken, 50)) < 35:
        before = len(offsets_of(taken, 2))
        bench.step(other, long)
        for _ in range(2):
            outgoing = second.outbox.poll()
            if outgoing is not None:
                taken.append(outgoing)
                assert sum(len(batch.handles) for batch in outgoing.batches) <= 10
        # The other request waits for one part at most.
        assert len(offsets_of(taken, 2)) > before
    bench.step(other, long)
    bench.step(long, ends=True)
    taken += take_all(second)
    num_tokens = bench.requests.find("", "request-1").history.num_tokens
    assert offsets_of(taken, 50) == list(range(num_tokens))
    assert ends_of(taken) == [50]
