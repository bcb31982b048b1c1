"""What durable requests use of their keys' limits while they run on without a reader."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.auth.account import Account, Use
from gateway.requests.live_request import LiveRequest
from gateway.schedulers.requests_by_id_client import DurableState, durable_state
from gateway.schedulers.scheduler_client import SchedulerClient
from quire.rpc.errors import NotFound, QuireError

_POLL_INTERVAL_S = 1.0
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Count:
    """What a request has generated for an account.

    Attributes:
        live: The entry of its last reader here.
        base: Tokens that are not the account's to pay.
        known: What was generated for it before this reader came, who hears all from the start.
    """

    live: LiveRequest
    base: float = 0.0
    known: float = 0.0

    def now(self) -> float:
        return max(self.known, self.live.num_computed_tokens - self.base)

    def at_most(self) -> float:
        """What it will be at the end at most."""
        return max(self.known, self.live.most_computed_tokens - self.base)


@dataclass(slots=True, eq=False)
class _DurableUse:
    """The use of one request that is or was read here. While nobody reads it here, `replica` is set to the address of
    the scheduler that has it, and `heard_at` is when that was certain last."""

    account: Account
    use: Use
    count: _Count
    replica: str | None = None
    heard_at: float = 0.0


class DurableUses:
    """Durable requests that run, by tenant and id, as far as this gateway can know it.

    One that is left before its end is charged for all that it may generate, and keeps its place. Whoever resumes it
    here with the same key goes on with both. Else its scheduler is asked again and again: at its end the place is free,
    and what it did not generate is given back. Where it cannot be told any more (it was forgotten, or the scheduler has
    not answered for `patience_s`) the place is free and the charge stays.
    """

    def __init__(self, clients: Mapping[str, SchedulerClient], patience_s: float, clock: Callable[[], float]) -> None:
        self._clients = clients
        self._patience_s = patience_s
        self._clock = clock
        self._uses: dict[tuple[str, str], _DurableUse] = {}

    def check_resumption(self, account: Account, tenant: str, request_id: str) -> None:
        """Whether the account may resume this request now. Raises as `Account.check` does."""
        if self._own(account, tenant, request_id) is None:
            account.check()
        else:
            account.check_resumption()

    @contextmanager
    def read(self, account: Account, use: Use, live: LiveRequest) -> Iterator[None]:
        """While the context runs, somebody reads a request that was submitted here."""
        with self._read(_DurableUse(account, use, _Count(live))):
            yield

    @contextmanager
    def resumed(self, account: Account, live: LiveRequest, num_had: float) -> Iterator[None]:
        """A resumed stream, which runs while the context does. `num_had` are tokens of it that are not to be paid for,
        where it was not this account's here before.

        Raises:
            Unauthenticated, ResourceExhausted: as `check_resumption` does.
        """
        before = self._own(account, live.request.tenant, live.request.request_id)
        if before is None:
            count = _Count(live, base=num_had)
            admitted = account.admitted(0, count.now)
        else:
            count = _Count(live, before.count.base, known=before.count.now())
            admitted = account.resumed(before.use, count.now)
        with admitted as use, self._read(_DurableUse(account, use, count)):
            yield

    async def watch(self) -> None:
        """Looks every second; ends only by cancellation."""
        while True:
            await asyncio.sleep(_POLL_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Asks how far those are that nobody reads here."""
        await asyncio.gather(*(self._ask(each) for each in self._uses.values() if each.replica is not None))

    def _own(self, account: Account, tenant: str, request_id: str) -> _DurableUse | None:
        durable = self._uses.get((tenant, request_id))
        return durable if durable is not None and durable.account is account else None

    @contextmanager
    def _read(self, durable: _DurableUse) -> Iterator[None]:
        key = _key(durable)
        before = self._uses.get(key)
        if before is not None:
            # Another key of the tenant goes on with it, or its id stands for another request now.
            before.account.end(before.use)
        self._uses[key] = durable
        try:
            yield
        finally:
            if self._uses.get(key) is durable:
                self._leave(durable)

    def _leave(self, durable: _DurableUse) -> None:
        live = durable.count.live
        if live.is_completed or live.replica is None or not durable.account.is_limited:
            del self._uses[_key(durable)]
            return
        durable.use = durable.account.replace(durable.use, durable.count.at_most)
        durable.replica = live.replica
        durable.heard_at = self._clock()

    async def _ask(self, durable: _DurableUse) -> None:
        assert durable.replica is not None
        request = durable.count.live.request
        try:
            state = await durable_state(self._clients[durable.replica], request.tenant, request.request_id)
        except NotFound:
            self._end(durable)
        except QuireError as error:
            if self._clock() - durable.heard_at >= self._patience_s:
                _logger.info("whether %s still runs is not known: %s", request.request_id, error)
                self._end(durable)
        else:
            durable.heard_at = self._clock()
            if state.is_over:
                self._settle(durable, state)

    def _settle(self, durable: _DurableUse, state: DurableState) -> None:
        """It is over, and how much it has generated is known."""
        count = durable.count
        request = count.live.request
        generated = state.num_generated_tokens * request.best_of / request.num_sequences - count.base
        if self._uses.get(_key(durable)) is durable:
            durable.use = durable.account.replace(durable.use, lambda: max(count.now(), generated))
        self._end(durable)

    def _end(self, durable: _DurableUse) -> None:
        """Frees its place, unless somebody has resumed it meanwhile."""
        if self._uses.get(_key(durable)) is durable:
            del self._uses[_key(durable)]
            durable.account.end(durable.use)


def _key(durable: _DurableUse) -> tuple[str, str]:
    request = durable.count.live.request
    return request.tenant, request.request_id
