"""One replica of the model, as this gateway sees it: the stream to its scheduler, and the requests placed on it."""

import asyncio

from gateway.replicas.link import SchedulerLink
from gateway.replicas.live import LiveRequest
from gateway.replicas.routing import Work
from quire.messages.replica_role import ReplicaRole
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
