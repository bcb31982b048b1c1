"""The replicas as this gateway sees them: their streams and requests, and the best choice for a request."""

import asyncio
from collections.abc import Iterator, Sequence

from gateway.replicas.events import Welcome
from gateway.replicas.link import SchedulerLink
from gateway.replicas.live import LiveRequest
from gateway.replicas.members import Members
from gateway.replicas.routing import Candidate, Router, Stage, Work, loads_of
from quire.messages.replica_role import ReplicaRole
from quire.rpc.errors import Unavailable
from quire.service.compatibility import are_of_one_start


class Replica:
    """A replica, and the requests of this gateway on it.

    Attributes:
        link: The stream to its scheduler.
        work: The requests that are placed on it, by stage.
        rejects_new: Whether its scheduler rejects new requests until it reconnects: it drains, or changed its model.
        rejects_all: Whether its scheduler also rejects requests that were accepted before.
    """

    def __init__(self, link: SchedulerLink) -> None:
        self.link = link
        self.address = link.address
        self.work = Work()
        self.rejects_new = self.rejects_all = False
        # Placed requests whose callers gave an expected length, by handle.
        self._hinted: dict[int, LiveRequest] = {}
        # Durable requests that were aborted while their scheduler was disconnected, by handle, with its epoch.
        self._unsent_aborts: dict[int, tuple[LiveRequest, int]] = {}

    @property
    def role(self) -> ReplicaRole:
        return ReplicaRole.BOTH if self.link.welcome is None else self.link.welcome.role

    @property
    def is_idle(self) -> bool:
        """Whether it has no request of this gateway."""
        return not self.work.num_requests and not self._unsent_aborts

    def can_run(self, live: LiveRequest) -> bool:
        """Whether it can run the request. Schedulers of earlier releases would ignore its adapter and its salt."""
        welcome = self.link.welcome
        if live.request.adapter is not None and (welcome is None or not welcome.max_adapters):
            return False
        if live.request.cache_salt and (welcome is None or not welcome.takes_cache_salts):
            return False
        return live.fits(self.link.model)

    def can_take_back(self, live: LiveRequest) -> bool:
        """Whether it drains, and would still run the request, which was accepted before."""
        drains = self.link.is_connected and self.link.is_draining and not self.rejects_all
        return drains and live.submissions > 0 and self.can_run(live)

    def can_fetch_from(self, other: "Replica") -> bool:
        """Whether it can fetch KV blocks from another replica."""
        here, there = self.link.welcome, other.link.welcome
        return here is not None and there is not None and here.kv_namespace == there.kv_namespace != ""

    @property
    def expected_tokens(self) -> list[int]:
        """The expected remaining tokens of each request on it that has such a hint."""
        return [live.num_expected_tokens or 1 for live in self._hinted.values()]

    def add(self, live: LiveRequest, num_new_tokens: int | None) -> None:
        """Counts a request that is placed here. The cache lacks `num_new_tokens` of its prompt; None means all."""
        if live.request.expected_tokens is not None:
            self._hinted[live.handle] = live
        if live.num_generated_tokens:
            self.work.add_stream(live.handle)
        else:
            num_tokens = len(live.request.prompt_token_ids) if num_new_tokens is None else num_new_tokens
            self.work.add_prompt(live.handle, num_tokens)

    def remove(self, live: LiveRequest) -> None:
        """Stops counting a request. Idempotent."""
        self._hinted.pop(live.handle, None)
        self.work.remove(live.handle)

    def abort(self, live: LiveRequest, grace_s: float) -> None:
        """Aborts a request at its scheduler. If that is disconnected, a durable request is aborted after it reconnects
        within `grace_s`: the scheduler keeps it for its next reader, but drops a plain one that is not resubmitted."""
        if self.link.is_connected:
            self.link.withdraw(live)
        elif live.request.durable and self.link.welcome is not None:
            self._unsent_aborts[live.handle] = (live, self.link.welcome.scheduler_epoch)
            asyncio.get_running_loop().call_later(grace_s, self._unsent_aborts.pop, live.handle, None)

    def send_unsent_aborts(self) -> None:
        """Aborts durable requests that were aborted while their scheduler was disconnected. Each is submitted first, so
        that this stream becomes its reader, which may abort it. A restarted scheduler does not have these requests."""
        assert self.link.welcome is not None
        for live, epoch in self._unsent_aborts.values():
            if are_of_one_start(epoch, self.link.welcome.scheduler_epoch):
                live.submissions += 1
                self.link.submit(live)
                self.link.abort(live.handle)
        self._unsent_aborts.clear()


class ReplicaTable:
    """The replicas of the gateway.

    Attributes:
        links: The stream to each scheduler, by address. They change with the answers for DNS names.
        long_prompt: The number of uncached tokens from which a prompt is long.
    """

    def __init__(self, members: Members, router: Router) -> None:
        self._members = members
        self._router = router
        self.links = members.links
        self.long_prompt = router.long_prompt
        self._replicas = {address: Replica(link) for address, link in self.links.items()}
        # Set while at least one scheduler is connected.
        self._some_connected = asyncio.Event()
        # Set while at least one replica is ready, and while no replica is ready.
        self._some_ready = asyncio.Event()
        self._none_ready = asyncio.Event()
        self._none_ready.set()

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._replicas.values()))

    def get(self, address: str | None) -> Replica | None:
        """The replica with this address; None if it was removed, or if no address is given."""
        return None if address is None else self._replicas.get(address)

    @property
    def is_ready(self) -> bool:
        """Whether a connected replica runs steps now. Requests are placed on connected replicas in any case."""
        return self._some_ready.is_set()

    @property
    def num_connected(self) -> int:
        return sum(each.link.is_connected for each in self)

    @property
    def welcomes(self) -> list[Welcome]:
        """The properties of the connected replicas; if there are none, the last known ones."""
        known = [each.link for each in self if each.link.welcome is not None]
        live = [link for link in known if link.is_connected]
        return [link.welcome for link in live or known if link.welcome is not None]

    @property
    def durable_grace_s(self) -> float:
        """Seconds for which schedulers keep durable requests without a reader."""
        return max((welcome.durable_grace_s for welcome in self.welcomes), default=0.0)

    async def wait_until_ready(self) -> None:
        await self._some_ready.wait()

    async def wait_until_not_ready(self) -> None:
        await self._none_ready.wait()

    async def wait_until_known(self, patience_s: float) -> list[Welcome]:
        """The welcomes, at once if a scheduler was ever reached, else as soon as the first scheduler is reached.

        Raises:
            Unavailable: no scheduler was reached within `patience_s`.
        """
        if not self.welcomes:
            try:
                async with asyncio.timeout(patience_s):
                    await self._some_connected.wait()
            except TimeoutError:
                message = f"no scheduler was reached within {patience_s:g} s, nor before"
                raise self.no_scheduler_error(message) from None
        return self.welcomes

    def no_scheduler_error(self, message: str) -> Unavailable:
        """The error if no scheduler is available, with the progress of a scheduler whose workers load the model."""
        loading = next((each.link.loading for each in self if each.link.loading is not None), None)
        if loading is None:
            return Unavailable(message, reason="NO_SCHEDULER")
        message = f"{message}; the model is being loaded: {loading}"
        return Unavailable(message, reason="NO_SCHEDULER", metadata=loading.metadata())

    def _update_readiness(self) -> None:
        set_event, cleared = self._some_ready, self._none_ready
        if not any(each.link.is_ready for each in self):
            set_event, cleared = cleared, set_event
        set_event.set()
        cleared.clear()

    def accepting(self) -> list[Replica]:
        """The replicas that accept new requests."""
        accepting = [each for each in self if each.link.is_connected and not each.rejects_new]
        return [each for each in accepting if self._members.is_listed(each.address)] or accepting

    def candidates(self, live: LiveRequest) -> list[Replica]:
        """The replicas that may get a request: ready replicas, else connected ones, which queue it. If there are none,
        a request that was accepted before may go to a draining replica, preferably the last one that had it."""
        fitting = [each for each in self.accepting() if each.can_run(live)]
        if not fitting:
            fitting = [each for each in self if each.can_take_back(live)]
            if last := [each for each in fitting if each.address == live.last_replica]:
                return last
        return [each for each in fitting if each.link.is_ready] or fitting

    def choose(self, live: LiveRequest, replicas: Sequence[Replica]) -> tuple[Replica, int]:
        """The best of these replicas, and the number of prompt tokens that it is not known to have cached."""
        hints = {each.address: each.expected_tokens for each in replicas}
        loads = loads_of({each.address: each.work.num_requests for each in replicas}, hints)
        candidates = {
            each.address: Candidate(loads[each.address], welcome.block_size, each.link.cached, welcome.role, each.work)
            for each in replicas
            if (welcome := each.link.welcome) is not None
        }
        request = live.request
        adapter = None if request.adapter is None else request.adapter.digest
        chosen = self._router.choose(
            request.prompt_token_ids, request.tenant, candidates, adapter, request.cache_salt, next_stage(live)
        )
        return self._replicas[chosen.replica], chosen.num_new_tokens


def next_stage(live: LiveRequest) -> Stage:
    """The next stage of a request. A request that chooses among candidate sequences does not move before its end."""
    if live.request.chooses:
        return Stage.STAY
    return Stage.STREAM if live.num_generated_tokens else Stage.PROMPT
