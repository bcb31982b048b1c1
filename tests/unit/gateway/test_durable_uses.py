"""What durable requests use while nobody reads them, and when that ends."""

import contextlib
from dataclasses import dataclass, field

import numpy as np
import pytest

from gateway.auth.account import Account, Limits
from gateway.requests.durable_uses import DurableUses
from gateway.requests.ledger import Ledger
from gateway.requests.request import GenerationRequest, Sampling, Stopping
from gateway.schedulers.scheduler_events import TokenRun
from quire.rpc.errors import NotFound, QuireError, ResourceExhausted, Unavailable
from quire.scheduler.v1 import scheduler_pb2
from tests.support.tokenizers import byte_level, wrapped

TOKENIZER = wrapped(byte_level())
PATIENCE_S = 30.0


@dataclass
class Replica:
    """Answers what the test says."""

    answer: scheduler_pb2.FindDurableResponse | QuireError = field(default_factory=scheduler_pb2.FindDurableResponse)

    async def ask(self, call):
        if isinstance(self.answer, QuireError):
            raise self.answer
        return self.answer


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def replica():
    return Replica()


@pytest.fixture
def account(clock):
    return Account(Limits(tokens_per_minute=1000, max_concurrent_requests=2), clock)


@pytest.fixture
def uses(replica, clock):
    return DurableUses({"replica": replica}, PATIENCE_S, clock)


@pytest.fixture
def ledger():
    return Ledger(max_chunk_tokens=256)


def make_live(ledger, num_tokens=0):
    request = GenerationRequest(
        request_id="story",
        tenant="acme",
        prompt_token_ids=np.array([5, 6, 7], np.int32),
        sampling=Sampling(0.0, 0, 1.0, 0.0, 1),
        stopping=Stopping(500, (), (), (1,)),
        logprobs=None,
        include_special_tokens=False,
        priority=0,
        ignore_eos=False,
        durable=True,
    )
    live = ledger.open(request, lambda: TOKENIZER.detokenizer(include_special_tokens=False))
    live.replica = "replica"
    if num_tokens:
        live.accept(TokenRun(live.handle, 0, 0, [70] * num_tokens))
    return live


def read_and_leave(uses, account, ledger, num_tokens=20):
    with account.admitted(0, lambda: 0) as use, uses.read(account, use, live := make_live(ledger, num_tokens)):
        pass
    ledger.close(live)


def level(account):
    """Tokens that are there."""
    return account._tokens._level


def runs(account):
    return bool(account._running)


async def test_place_and_charge_last_until_the_scheduler_says_that_it_is_over(uses, account, ledger, replica):
    read_and_leave(uses, account, ledger)
    await uses.look()
    with account.admitted(0), pytest.raises(ResourceExhausted):
        account.check()
    replica.answer = scheduler_pb2.FindDurableResponse(is_over=True, generated_tokens=120)
    await uses.look()
    account.check()
    assert level(account) == 880


@pytest.mark.parametrize("read_before", [False, True])
async def test_charge_stays_where_the_scheduler_has_forgotten_it(uses, account, ledger, replica, read_before):
    read_and_leave(uses, account, ledger)
    if read_before:
        live = make_live(ledger, 5)
        with uses.resumed(account, live, 0):
            assert level(account) == 980
        ledger.close(live)
    replica.answer = NotFound("gone", reason="REQUEST_NOT_FOUND")
    await uses.look()
    account.check()
    assert level(account) == 500


async def test_a_reader_that_is_back_pays_for_no_less_than_it_had_before(uses, account, ledger):
    read_and_leave(uses, account, ledger, num_tokens=20)
    with uses.resumed(account, live := make_live(ledger, 5), 0):
        assert level(account) == 980
        live.accept(TokenRun(live.handle, 0, 5, [70] * 25))
        account.check()
        assert level(account) == 970
    assert level(account) == 500


async def test_place_is_free_once_the_scheduler_has_not_answered_for_long(uses, account, ledger, replica, clock):
    read_and_leave(uses, account, ledger)
    replica.answer = Unavailable("not connected")
    clock.now += PATIENCE_S - 1
    await uses.look()
    assert runs(account)
    clock.now += 1
    await uses.look()
    assert not runs(account)


async def test_resumption_with_another_key_frees_the_place_of_the_first(uses, account, ledger, clock):
    read_and_leave(uses, account, ledger)
    other = Account(Limits(max_concurrent_requests=1), clock)
    uses.check_resumption(other, "acme", "story")
    with uses.resumed(other, make_live(ledger), 0):
        assert not runs(account)
        with pytest.raises(ResourceExhausted):
            other.check()


async def test_what_ended_or_never_ran_or_has_no_limits_is_not_kept(uses, account, ledger, clock):
    waiting = make_live(ledger)
    with account.admitted(0) as use, uses.read(account, use, waiting):
        waiting.replica = None
    assert not runs(account)
    ledger.close(waiting)
    unlimited = Account(Limits(requests_per_minute=5), clock)
    with unlimited.admitted(0) as use, uses.read(unlimited, use, make_live(ledger)):
        pass
    assert not runs(unlimited)


async def test_a_new_request_under_the_same_id_ends_the_use_of_the_one_before(uses, account, ledger, clock):
    read_and_leave(uses, account, ledger)
    with account.admitted(0) as use, uses.read(account, use, make_live(ledger)):
        assert len(account._running) == 1
    assert len(account._running) == 1


async def test_resumption_that_is_refused_changes_nothing(uses, clock, ledger):
    account = Account(Limits(requests_per_minute=1, max_concurrent_requests=1), clock)
    read_and_leave(uses, account, ledger)
    with pytest.raises(ResourceExhausted), contextlib.ExitStack() as stack:
        stack.enter_context(uses.resumed(account, make_live(ledger), 0))
    with pytest.raises(ResourceExhausted) as raised:
        account.check()
    assert raised.value.reason == "CONCURRENCY_LIMIT"
