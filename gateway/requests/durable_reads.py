"""Durable requests that this gateway reads: for their clients, and for a while when these have left.

A gateway has all that a request needs to go on: prompt, parameters, seed and tokens. So one that is read here outlives
its scheduler, and a client that comes back finds it here whatever became of that.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.auth.quota import Account, Use
from gateway.replicas.ledger import Ledger
from gateway.replicas.live import LiveRequest
from gateway.replicas.pool import Replicas

MAX_KEPT_TOKENS = 2_000_000
"""How many tokens requests may have together that are read without clients, those included that they may still
generate. A log probability counts as a token. What is more is left to the scheduler."""


@dataclass(slots=True, eq=False)
class _Read:
    """A request, and what it uses of the limits of a key. `base` are tokens that another key has paid for. Without a
    client, `keeping` ends it in time."""

    account: Account
    use: Use
    live: LiveRequest
    base: float
    keeping: asyncio.Task[None] | None = None

    @property
    def name(self) -> tuple[str, str]:
        return self.live.request.tenant, self.live.request.request_id


class DurableReads:
    """All durable requests that are read here, by tenant and id.

    One whose client leaves is read on for as long as the scheduler would keep it, and as long after its end. It keeps
    its place among its key's requests until its end, and is charged as it goes. Whoever resumes it here with the same
    key takes over both.
    """

    def __init__(self, ledger: Ledger, replicas: Replicas) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self._reads: dict[tuple[str, str], _Read] = {}
        self._is_closed = False

    def __len__(self) -> int:
        """How many are read without a client."""
        return sum(read.keeping is not None for read in self._reads.values())

    def check_resumption(self, account: Account, tenant: str, request_id: str) -> None:
        """Whether the account may resume this request now. Raises as `Account.check` does."""
        if self._own(account, tenant, request_id) is None:
            account.check()
        else:
            account.check_resumption()

    @contextmanager
    def read(self, account: Account, use: Use, live: LiveRequest, *, base: float = 0.0) -> Iterator[None]:
        """While the context runs, a client reads the request. Then it is kept, or its stream to the scheduler ends."""
        read = _Read(account, use, live, base)
        before = self._reads.get(read.name)
        if before is not None:
            self._forget(before)
        if live.request.durable:
            self._reads[read.name] = read
        try:
            yield
        finally:
            if not self._keep(read):
                self._end(read)

    @contextmanager
    def resumed(self, account: Account, live: LiveRequest, num_had: float) -> Iterator[None]:
        """A resumed stream, which runs while the context does. `num_had` are tokens of it that are not to be paid for,
        where it was not this account's here before.

        Raises:
            Unauthenticated, ResourceExhausted: as `check_resumption` does.
        """
        before = self._own(account, live.request.tenant, live.request.request_id)
        base = num_had if before is None else before.base
        generated = _generated(live, base)
        admitted = account.admitted(0, generated) if before is None else account.resumed(before.use, generated)
        with admitted as use, self.read(account, use, live, base=base):
            yield

    def keeps(self, live: LiveRequest) -> bool:
        """Whether it is read on though its client has left."""
        read = self._reads.get((live.request.tenant, live.request.request_id))
        return read is not None and read.live is live and read.keeping is not None

    def drop_completed(self, tenant: str, request_id: str) -> None:
        """Makes way for another request of this id, where nobody reads the one that has it, and that is over."""
        read = self._reads.get((tenant, request_id))
        if read is not None and read.keeping is not None and read.live.is_over:
            self._end(read)

    def close(self) -> None:
        """This gateway is about to stop: what is read without a client is left to the scheduler, now and later."""
        self._is_closed = True
        for read in list(self._reads.values()):
            if read.keeping is not None:
                self._end(read)

    def _own(self, account: Account, tenant: str, request_id: str) -> _Read | None:
        read = self._reads.get((tenant, request_id))
        return read if read is not None and read.account is account else None

    def _keep(self, read: _Read) -> bool:
        """Whether a request is read on now that its client has left."""
        grace_s = self._replicas.durable_grace_s
        live = read.live
        if self._reads.get(read.name) is not read or self._is_closed or not grace_s:
            return False
        # One that is not prepared was refused, or left, while it took in the tokens of its caller: nobody would run it.
        if not live.is_prepared or not live.is_resumable or not self._has_room(live):
            return False
        # The end of the use that it had so far is no end of this one.
        read.use = read.account.replace(read.use, _generated(read.live, read.base))
        read.keeping = asyncio.create_task(self._read_on(read, grace_s))
        return True

    async def _read_on(self, read: _Read, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await read.live.wait_over()
        except TimeoutError:
            # Nobody has come back for it.
            self._replicas.release(read.live)
        else:
            read.account.end(read.use)
            if read.live.is_completed:
                await asyncio.sleep(grace_s)
        self._end(read)

    def _has_room(self, live: LiveRequest) -> bool:
        kept = [read for read in self._reads.values() if read.keeping is not None]
        num_tokens = _num_tokens(live) + sum(_num_tokens(read.live) for read in kept)
        for read in kept:
            if num_tokens > MAX_KEPT_TOKENS and read.live.is_over:
                num_tokens -= _num_tokens(read.live)
                self._end(read)
        return num_tokens <= MAX_KEPT_TOKENS

    def _end(self, read: _Read) -> None:
        """The request is read no more. One that still runs is left to the scheduler."""
        self._forget(read)
        self._replicas.detach(read.live)
        self._ledger.close(read.live)

    def _forget(self, read: _Read) -> None:
        """What it used of its key's limits is settled. Idempotent."""
        if self._reads.get(read.name) is read:
            del self._reads[read.name]
        if read.keeping is not None:
            read.keeping.cancel()
        read.account.end(read.use)


def _generated(live: LiveRequest, base: float) -> Callable[[], float]:
    return lambda: max(live.num_computed_tokens - base, 0.0)


def _num_tokens(live: LiveRequest) -> int:
    request = live.request
    per_prompt = 1 if request.prompt_logprobs is None else 2 + request.prompt_logprobs
    per_output = 1 if request.logprobs is None else 2 + request.logprobs
    return len(request.prompt_token_ids) * per_prompt + live.max_generated_tokens * per_output
