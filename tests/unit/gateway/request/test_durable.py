"""Durable requests whose clients have left: how long they are read, what they use, and which call resumes them."""

import asyncio
import contextlib

import pytest

from gateway.auth.quota import Account, Limits
from gateway.replicas.events import FinishReason, RequestEnded, SequenceEnded, TokenRun, Usage
from gateway.replicas.ledger import Ledger
from gateway.replicas.live import LiveRequest
from gateway.request import durable
from gateway.request.answer_memory import STREAMED, AnswerMemory
from gateway.request.durable import DurableReads
from quire.rpc.errors import Aborted, ResourceExhausted
from tests.support.parameters import make_request
from tests.support.processes import until_true
from tests.support.tokenizers import byte_level, wrapped

TOKENIZER = wrapped(byte_level())


class FakeReplicas:
    """Records its calls."""

    def __init__(self) -> None:
        self.durable_grace_s = 60.0
        self.detached: list[LiveRequest] = []
        self.placements = self

    def detach(self, live: LiveRequest) -> None:
        self.detached.append(live)

    def hand_over(self, earlier: LiveRequest, live: LiveRequest) -> None:
        raise NotImplementedError

    def abort(self, live: LiveRequest) -> None:
        raise NotImplementedError


@pytest.fixture
def replicas():
    return FakeReplicas()


@pytest.fixture
def account():
    return Account(Limits(tokens_per_minute=1000, max_concurrent_requests=2), lambda: 1000.0)


@pytest.fixture
def ledger():
    return Ledger(max_chunk_tokens=256)


@pytest.fixture
def reads(ledger, replicas):
    return DurableReads(ledger, replicas, TOKENIZER)


def make_live(ledger, num_tokens, request_id="story"):
    live = ledger.open(make_request(request_id, "acme", max_tokens=500, durable=True), TOKENIZER)
    add_tokens(live, num_tokens)
    return live


def add_tokens(live, count):
    begin = len(live.sequences[0].token_ids)
    live.accept(TokenRun(live.handle, 0, begin, [70 + (begin + each) % 20 for each in range(count)]))


def complete(live):
    num_tokens = len(live.sequences[0].token_ids)
    live.end_sequence(SequenceEnded(live.handle, 0, num_tokens, FinishReason.LENGTH, None, None))
    live.complete(RequestEnded(live.handle, Usage(3, 20, cached_tokens=2)))


def read_and_leave(reads, account, ledger, num_tokens=20, request_id="story"):
    live = make_live(ledger, num_tokens, request_id)
    with account.admitted(0, lambda: live.num_computed_tokens) as use, reads.read(account, use, live):
        pass
    return live


def level(account):
    """Tokens that are there."""
    return account._tokens._level


async def test_what_was_left_is_read_on_with_its_place_and_its_charge(reads, account, ledger, replicas):
    live = read_and_leave(reads, account, ledger)
    assert reads.reads_without_client(live)
    assert ledger.get("acme", "story") is live
    assert not replicas.detached
    with account.admitted(0), pytest.raises(ResourceExhausted):
        account.check()
    add_tokens(live, 100)
    account.check()
    assert level(account) == 1000 - 120
    complete(live)
    await until_true(lambda: not account._running)
    assert ledger.get("acme", "story") is live
    reads.close()


async def test_a_call_whose_client_has_left_does_not_take_its_request_back_from_another_gateway(reads, account, ledger):
    """The client went on to the other gateway before this call had any new event."""
    live = make_live(ledger, 20)
    live.is_heir = True
    with account.admitted(0) as use, reads.read(account, use, live):
        assert live.is_heir
    assert reads.reads_without_client(live)
    assert not live.is_heir
    reads.close()


async def test_a_copy_of_what_another_call_has_taken_counts_no_more(reads, ledger, monkeypatch):
    has_copied, goes_on = asyncio.Event(), asyncio.Event()

    async def do(self, tenant, work):
        while not work():
            has_copied.set()
            await goes_on.wait()

    monkeypatch.setattr(durable, "TOKENS_PER_TURN", 1)
    monkeypatch.setattr(durable.TenantTurns, "do", do)
    earlier = make_live(ledger, 50)
    with AnswerMemory(per_call=1 << 20, per_key=1 << 20, total=1 << 20).call("key", STREAMED) as memory:
        finding = asyncio.create_task(reads.find("acme", "story", [], memory))
        await has_copied.wait()
        ledger.close(earlier)
        another = make_live(ledger, 10)
        goes_on.set()
        found = await finding
        assert found.here.num_generated_tokens == 10
        num_bytes = memory.num_bytes
        memory.drop_all()
        memory.count(another)
        add_tokens(another, 10)
        assert memory.num_bytes == num_bytes


async def test_of_calls_that_resume_it_at_once_one_copies_at_a_time_and_only_the_newest_waits(
    reads, account, ledger, monkeypatch
):
    copied = []
    catch_up = LiveRequest.catch_up
    monkeypatch.setattr(durable, "TOKENS_PER_TURN", 1)
    monkeypatch.setattr(
        LiveRequest, "catch_up", lambda self, *arguments: copied.append(self) or catch_up(self, *arguments)
    )
    with AnswerMemory(per_call=1 << 20, per_key=1 << 20, total=1 << 20).call("key", STREAMED) as memory:
        complete(make_live(ledger, 50))

        async def resume():
            return reads.claim(await reads.find("acme", "story", [], memory), memory)

        calls = [asyncio.create_task(resume()) for _ in range(20)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    first, *superseded, last = outcomes
    assert all(isinstance(error, Aborted) and error.reason == "REQUEST_TAKEN_OVER" for error in superseded)
    assert ledger.get("acme", "story") is last
    # One call of `catch_up` for each token and one for the end, of the first and of the last call.
    assert copied == [first] * 51 + [last] * 51


async def test_resumption_with_another_key_pays_for_what_comes_from_then_on(reads, account, ledger):
    earlier = read_and_leave(reads, account, ledger)
    ledger.close(earlier)
    other = Account(Limits(tokens_per_minute=100, max_concurrent_requests=1), lambda: 1000.0)
    reads.check_resumption(other, "acme", "story")
    live = make_live(ledger, 20)
    with reads.resumed(other, live, live.num_computed_tokens):
        assert not account._running
        add_tokens(live, 5)
    reads.close()
    assert (level(account), level(other)) == (980, 95)


async def test_resumption_that_is_refused_changes_nothing(reads, ledger):
    account = Account(Limits(requests_per_minute=1, max_concurrent_requests=1), lambda: 1000.0)
    live = read_and_leave(reads, account, ledger)
    with pytest.raises(ResourceExhausted), contextlib.ExitStack() as stack:
        stack.enter_context(reads.resumed(account, live, 0))
    assert reads.reads_without_client(live)
    with pytest.raises(ResourceExhausted) as raised:
        account.check()
    assert raised.value.reason == "CONCURRENCY_LIMIT"
    reads.close()


async def test_only_so_many_tokens_are_kept_and_what_is_over_makes_way(reads, account, ledger, replicas, monkeypatch):
    monkeypatch.setattr(durable, "MAX_KEPT_TOKENS", 1010)
    account.change_limits(Limits())
    over = read_and_leave(reads, account, ledger, request_id="over")
    complete(over)
    kept = [read_and_leave(reads, account, ledger, request_id=f"kept-{number}") for number in range(2)]
    assert replicas.detached == [over]
    beyond = read_and_leave(reads, account, ledger, request_id="beyond")
    assert replicas.detached == [over, beyond]
    assert all(map(reads.reads_without_client, kept))
    reads.close()


async def test_one_that_is_over_makes_way_for_another_of_its_id(reads, account, ledger):
    complete(read_and_leave(reads, account, ledger))
    reads.drop_completed("acme", "story")
    ledger.check_unused("acme", "story")


async def test_a_call_that_resumes_it_and_leaves_while_it_waits_lets_the_next_one_go_on(reads, account, ledger):
    with AnswerMemory(per_call=1 << 20, per_key=1 << 20, total=1 << 20).call("key", STREAMED) as memory:
        complete(make_live(ledger, 50))
        calls = [asyncio.create_task(reads.find("acme", "story", [], memory)) for _ in range(2)]
        await asyncio.sleep(0)
        calls[1].cancel()
        await asyncio.wait(calls)
        found = await reads.find("acme", "story", [], memory)
        assert calls[0].result().num_generated_tokens == found.num_generated_tokens == 50
        assert not reads._next
