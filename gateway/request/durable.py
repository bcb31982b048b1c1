"""Durable requests: the gateway reads them for their clients, continues for a while after a client has left, and lets
a returning client resume.

A gateway has everything that a request needs to continue: prompt, parameters, seed and tokens. So a request that is
read here survives its scheduler, and a returning client finds it here whatever happened to the scheduler.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from gateway.auth.quota import Account, Use
from gateway.replicas.generation_request import GenerationRequest
from gateway.replicas.ledger import Ledger
from gateway.replicas.live import LiveRequest
from gateway.replicas.replica_set import Replicas
from gateway.request.answer_memory import CallMemory
from gateway.request.violations import Violations
from gateway.text.tokenizer import Tokenizer
from gateway.turns import TOKENS_PER_TURN, TenantTurns
from quire.rpc.errors import Aborted

MAX_KEPT_TOKENS = 2_000_000
"""The maximum tokens of all requests that are read without clients, including tokens that they may still generate. A
log probability counts as a token. Requests beyond the bound are left to the scheduler."""


@dataclass(frozen=True, slots=True)
class ClientOffset:
    """The number of tokens of one sequence that the client of a resumed stream already has, and the number of
    characters if it counts them."""

    sequence_index: int
    num_tokens: int
    num_characters: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A durable request that a client resumes.

    Attributes:
        num_generated_tokens: Its tokens so far, of all sequences that are returned.
        num_had: Tokens, including tokens of candidates, that were not generated for this client.
        here: The entry of this gateway, if the request is read here.
        go_on: Continues the request with an entry.
    """

    request: GenerationRequest
    num_generated_tokens: int
    num_had: float
    here: LiveRequest | None
    go_on: Callable[[LiveRequest], None]


@dataclass(slots=True, eq=False)
class _Read:
    """A request, and its use of a key's limits. `base` is the number of tokens that were charged to another key.

    Without a client it has a `timer` that ends it, and counts towards `kept_tokens`.
    """

    account: Account
    use: Use
    live: LiveRequest
    base: float
    timer: asyncio.TimerHandle | None = None
    kept_tokens: int = 0

    @property
    def name(self) -> tuple[str, str]:
        return self.live.request.tenant, self.live.request.request_id


class DurableReads:
    """All durable requests that are read here, by tenant and id.

    When a client leaves, its request is read on for as long as the scheduler would keep it, and for the same time after
    its end. Until its end it counts as a running request of its key and is charged for its tokens. A client that
    resumes it here with the same key takes over both.
    """

    def __init__(self, ledger: Ledger, replicas: Replicas, tokenizer: Tokenizer) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self._tokenizer = tokenizer
        self._reads: dict[tuple[str, str], _Read] = {}
        self._kept_tokens = 0
        # Finished requests without a client, oldest first; they are evicted to make room.
        self._over: dict[_Read, None] = {}
        self._is_closed = False
        self._turns = TenantTurns()
        # The requests that a call resumes now, each with the call that resumes it next, if any.
        self._next: dict[tuple[str, str], asyncio.Future[None] | None] = {}

    def check_resumption(self, account: Account, tenant: str, request_id: str) -> None:
        """Checks that the account may resume this request now. Raises as `Account.check` does."""
        if self._own(account, tenant, request_id) is None:
            account.check()
        else:
            account.check_resumption()

    @contextmanager
    def read(self, account: Account, use: Use, live: LiveRequest, *, base: float = 0.0) -> Generator[None]:
        """A client reads the request during the context. After it, the request is kept, or left to the scheduler."""
        read = _Read(account, use, live, base)
        before = self._reads.get(read.name)
        if before is not None:
            self._forget(before)
        if live.request.durable:
            self._reads[read.name] = read
        try:
            yield
        finally:
            if not self._read_on(read):
                self._stop(read)

    @contextmanager
    def resumed(self, account: Account, live: LiveRequest, num_had: float) -> Generator[None]:
        """A resumed stream, for the duration of the context. Its first `num_had` tokens are free of charge, unless this
        account read it here before.

        Raises:
            Unauthenticated, ResourceExhausted: as `check_resumption` does.
        """
        before = self._own(account, live.request.tenant, live.request.request_id)
        base = num_had if before is None else before.base
        generated = _generated(live, base)
        admitted = account.admitted(0, generated) if before is None else account.resumed(before.use, generated)
        with admitted as use, self.read(account, use, live, base=base):
            yield

    async def find(self, tenant: str, request_id: str, offsets: Sequence[ClientOffset], memory: CallMemory) -> Found:
        """Finds a durable request, here or at a scheduler, without changing it.

        All output of the request is rebuilt for the client. So one call at a time does that for a request. When it is
        done, only the newest of the waiting calls goes on: it would take the request from the others.

        Raises:
            NotFound: the tenant has none with this id.
            InvalidArgument: an offset is beyond the output of the request.
            Aborted: a newer call resumes it.
        """
        async with self._resuming(tenant, request_id):
            return await self._find(tenant, request_id, offsets, memory)

    @asynccontextmanager
    async def _resuming(self, tenant: str, request_id: str) -> AsyncGenerator[None]:
        name = tenant, request_id
        if name in self._next:
            if (before := self._next[name]) is not None and not before.done():
                before.set_exception(_taken_over(request_id))
            self._next[name] = turn = asyncio.get_running_loop().create_future()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._pass_on(name)
                raise
        self._next.setdefault(name, None)
        try:
            yield
        finally:
            self._pass_on(name)

    def _pass_on(self, name: tuple[str, str]) -> None:
        """Gives the turn to the next waiting call, after a call has resumed a request."""
        turn = self._next[name]
        if turn is None or turn.done():
            del self._next[name]
        else:
            self._next[name] = None
            turn.set_result(None)

    async def _find(self, tenant: str, request_id: str, offsets: Sequence[ClientOffset], memory: CallMemory) -> Found:
        while True:
            earlier = self._ledger.get(tenant, request_id)
            if earlier is None or not earlier.is_resumable:
                return await self._find_at_scheduler(tenant, request_id, offsets)
            _check_offsets(offsets, earlier.request)
            live = self._ledger.prepare(earlier.request, self._tokenizer)
            memory.count(live)
            await self._turns.do(tenant, partial(live.catch_up, earlier, TOKENS_PER_TURN))
            if self._ledger.get(tenant, request_id) is earlier and earlier.is_resumable:
                num_had = live.num_computed_tokens
                go_on = partial(self._replicas.placements.hand_over, earlier)
                return Found(earlier.request, live.num_generated_tokens, num_had, live, go_on)
            # Another call has taken it in the meantime.
            memory.drop_all()

    async def _find_at_scheduler(self, tenant: str, request_id: str, offsets: Sequence[ClientOffset]) -> Found:
        found = await self._replicas.calls.find_durable(tenant, request_id)
        _check_offsets(offsets, found.request)
        num_had = found.num_generated_tokens if found.is_over else sum(each.num_tokens for each in offsets)
        num_had *= found.request.sampling.best_of / found.request.sampling.n
        go_on = partial(self._replicas.placements.resume, address=found.address)
        return Found(found.request, found.num_generated_tokens, num_had, None, go_on)

    def claim(self, found: Found, memory: CallMemory) -> LiveRequest:
        """The entry of a request for the client that resumes it. The call of this gateway that read it before ends; the
        scheduler ends calls of other gateways. Raises AlreadyExists if another request has its id."""
        request = found.request
        earlier = self._ledger.get(request.tenant, request.request_id)
        if earlier is not None and earlier.request.durable:
            self._ledger.close(earlier)
            earlier.fail(_taken_over(request.request_id))
        if found.here is not None:
            self._ledger.enter(found.here)
            return found.here
        live = self._ledger.open(request, self._tokenizer)
        memory.count(live)
        return live

    def reads_without_client(self, live: LiveRequest) -> bool:
        """Whether a request is read without a client."""
        read = self._reads.get((live.request.tenant, live.request.request_id))
        return read is not None and read.live is live and read.timer is not None

    def drop_completed(self, tenant: str, request_id: str) -> None:
        """Frees the id of a finished request without a client."""
        read = self._reads.get((tenant, request_id))
        if read is not None and read.timer is not None and read.live.is_over:
            self._stop(read)

    def close(self) -> None:
        """Prepares for the stop of this gateway: requests without a client are left to the scheduler from now on."""
        self._is_closed = True
        for read in list(self._reads.values()):
            if read.timer is not None:
                self._stop(read)

    def _own(self, account: Account, tenant: str, request_id: str) -> _Read | None:
        read = self._reads.get((tenant, request_id))
        return read if read is not None and read.account is account else None

    def _read_on(self, read: _Read) -> bool:
        """Continues to read a request without a client; returns whether there is room for it."""
        grace_s = self._replicas.durable_grace_s
        live = read.live
        if self._reads.get(read.name) is not read or self._is_closed or not grace_s:
            return False
        # A request that is not prepared was refused or cancelled before it ran.
        if not live.is_prepared or not live.is_resumable or not self._make_room(_num_tokens(live)):
            return False
        # A call of another gateway that takes the request over from now on is newer than the call that has ended.
        live.is_heir = False
        # The request continues although the context of its earlier use ends.
        read.use = read.account.replace(read.use, _generated(live, read.base))
        read.timer = asyncio.get_running_loop().call_later(grace_s, self._expire, read)
        self._count(read, _num_tokens(live))
        live.when_over(lambda: self._on_request_over(read, grace_s))
        return True

    def _make_room(self, num_tokens: int) -> bool:
        """Forgets finished requests until there is room for this many tokens; returns whether there is."""
        while self._kept_tokens + num_tokens > MAX_KEPT_TOKENS and self._over:
            self._stop(next(iter(self._over)))
        return self._kept_tokens + num_tokens <= MAX_KEPT_TOKENS

    def _count(self, read: _Read, num_tokens: int) -> None:
        self._kept_tokens += num_tokens - read.kept_tokens
        read.kept_tokens = num_tokens

    def _on_request_over(self, read: _Read, grace_s: float) -> None:
        """Restarts the grace period of a request that has ended. A failed request, or one that another gateway reads,
        is forgotten."""
        if read.timer is None:
            return
        read.timer.cancel()
        read.account.end(read.use)
        self._count(read, _num_tokens(read.live))
        self._over[read] = None
        # Deferred, because the caller that ended the request may still use it.
        delay_s = grace_s if read.live.is_completed else 0
        read.timer = asyncio.get_running_loop().call_later(delay_s, self._stop, read)

    def _expire(self, read: _Read) -> None:
        """Ends a request whose grace period is over."""
        self._replicas.placements.abort(read.live)
        self._stop(read)

    def _stop(self, read: _Read) -> None:
        """Stops reading a request. A running one is left to the scheduler."""
        self._forget(read)
        self._replicas.placements.detach(read.live)
        self._ledger.close(read.live)

    def _forget(self, read: _Read) -> None:
        """Charges its tokens and stops counting it as running. Idempotent."""
        if self._reads.get(read.name) is read:
            del self._reads[read.name]
        if read.timer is not None:
            read.timer.cancel()
            read.timer = None
            self._count(read, 0)
            self._over.pop(read, None)
        read.account.end(read.use)


def _generated(live: LiveRequest, base: float) -> Callable[[], float]:
    return lambda: max(live.num_computed_tokens - base, 0.0)


def _taken_over(request_id: str) -> Aborted:
    return Aborted(f'request "{request_id}" is read by another call now', reason="REQUEST_TAKEN_OVER")


def _num_tokens(live: LiveRequest) -> int:
    request = live.request
    per_prompt = 1 if request.prompt_logprobs is None else 2 + request.prompt_logprobs
    per_output = 1 if request.logprobs is None else 2 + request.logprobs
    return len(request.prompt_token_ids) * per_prompt + live.max_generated_tokens * per_output


def _check_offsets(offsets: Sequence[ClientOffset], request: GenerationRequest) -> None:
    """Raises InvalidArgument if a sequence occurs twice or an offset is beyond its output."""
    violations = Violations()
    seen: set[int] = set()
    for position, offset in enumerate(offsets[: request.sampling.n + 1]):
        field, index = f"offsets[{position}]", offset.sequence_index
        if index >= request.sampling.n:
            violations.add(f"{field}.sequence_index", f"is {index}; the request has {request.sampling.n} sequences")
        elif index in seen:
            violations.add(f"{field}.sequence_index", f"is {index}, as of another entry; name each sequence once")
        elif offset.num_tokens > request.stopping.max_tokens:
            limit = request.stopping.max_tokens
            violations.add(f"{field}.offset", f"is {offset.num_tokens}; a sequence has at most {limit} tokens")
        seen.add(index)
    violations.raise_if_any()
