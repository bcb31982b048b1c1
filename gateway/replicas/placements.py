"""Places requests on replicas, and elsewhere when a scheduler rejects them, disconnects or loses its worker.

- A request whose scheduler disconnects stays assigned to it for `failover_delay_s`, since the scheduler may return with
  its KV blocks; then the request moves to any connected replica.
- If no replica accepts requests, a request waits, and fails with UNAVAILABLE after `connect_timeout_s`. It waits longer
  while a draining scheduler still runs requests, because its successor starts after it exits.
- If its scheduler is connected but not ready, a request moves after `failover_delay_s`, if another replica is ready and
  no tokens come. The wait grows with each further move without a token in between: the request may be the one that
  crashes the workers, and one scheduler must see several crashes to detect it.
- A request that a draining scheduler rejects is placed on another one. If all replicas drain, a request that was
  accepted before may run on one of them, preferably the last one that had it.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from gateway.replicas.events import ALREADY_TAKEN_OVER
from gateway.replicas.ledger import Ledger
from gateway.replicas.link import SchedulerLink
from gateway.replicas.live import LiveRequest, required_model
from gateway.replicas.offers import Offers
from gateway.replicas.replica_table import Replica, ReplicaTable
from quire.rpc.errors import FailedPrecondition, QuireError, ResourceExhausted, Unavailable
from quire.rpc.patience import LAST_LOOK_S
from quire.runtime import entropy
from quire.runtime.failpoint import failpoint
from quire.service.compatibility import ModelFingerprint, differing_parts

_DEFAULT_RETRY_MS = 100
_MAX_RETRY_S = 5.0
# Each move makes a request wait four times longer before the next move, up to this number of moves.
_MAX_COUNTED_MOVES = 3
# The wait for the answer to an abort. Without the answer, the usage lacks the values that only the scheduler has.
_USAGE_TIMEOUT_S = 1.0


class Placements:
    """Places live requests on replicas, and keeps them running while schedulers come and go."""

    def __init__(
        self,
        replicas: ReplicaTable,
        offers: Offers,
        ledger: Ledger,
        *,
        connect_timeout_s: float,
        failover_delay_s: float,
    ) -> None:
        self._replicas = replicas
        self._offers = offers
        self._ledger = ledger
        self._connect_timeout_s = connect_timeout_s
        self._failover_delay_s = failover_delay_s
        # At most one timer per request, by handle.
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def place(self, live: LiveRequest) -> None:
        """Sends a request to a replica, or queues it until a replica is available."""
        if candidates := self._replicas.candidates(live):
            self._place_on_best(live, candidates)
            return
        others = self._replicas.accepting()
        if models := [each.link.model for each in others if not live.fits(each.link.model)]:
            live.fail(_model_changed(live, models[0]))
        elif others:
            live.fail(adapters_are_off())
        else:
            self.wait_for_replica(live)

    def abort(self, live: LiveRequest) -> None:
        """Ends a request at its scheduler, or if that is disconnected, after it reconnects. Idempotent."""
        self._cancel_timer(live)
        if (replica := self._replicas.get(live.replica)) is not None:
            replica.abort(live, self._replicas.durable_grace_s)
            self._assign(live, None)

    def detach(self, live: LiveRequest) -> None:
        """Handles the loss of a request's client: a durable request runs on for a while, others end. Idempotent."""
        replica = self._replicas.get(live.replica)
        if not live.request.durable or live.is_completed or replica is None:
            self.abort(live)
            return
        replica.link.detach(live.handle)
        self.unassign(live)

    def resume(self, live: LiveRequest, address: str) -> None:
        """Takes over a durable request from a replica. Raises Unavailable if the replica is disconnected."""
        replica = self._replicas.get(address)
        if replica is None or not replica.link.is_connected:
            raise Unavailable(f"scheduler {address} is not connected", reason="NO_SCHEDULER")
        self._assign(live, replica)
        live.set_model(replica.link.model)
        live.submissions += 1
        replica.link.resume(live)
        if not replica.link.is_ready:
            self._wait_for_worker(live)

    def hand_over(self, earlier: LiveRequest, live: LiveRequest) -> None:
        """Replaces the entry of a request by `live`, which has all tokens of the earlier one: a newer call at this
        gateway reads the request. It stays at its replica if it has one."""
        replica = self._replicas.get(earlier.replica)
        self.unassign(earlier)
        if live.is_over:
            return
        live.is_heir = True
        if replica is None:
            self.place(live)
        elif replica.link.is_connected:
            self.submit(live, replica)
            if not replica.link.is_ready:
                self._wait_for_worker(live)
        else:
            self._assign(live, replica)
            self._set_timer(live, self._failover_delay_s, self._fail_over)

    def submit(self, live: LiveRequest, replica: Replica, num_new_tokens: int | None = None) -> None:
        """Submits a request to a replica, whose cache lacks `num_new_tokens` of its prompt; None means all of them."""
        self._cancel_timer(live)
        if not replica.can_run(live):
            # The scheduler came back with another model, or without adapters.
            self._fail_over(live)
            return
        self._assign(live, replica, num_new_tokens)
        live.set_model(replica.link.model)
        live.submissions += 1
        failpoint("gateway.submit.before_send")
        replica.link.submit(live)

    def submit_to_taker(self, live: LiveRequest) -> None:
        """Submits a request to the replica that has reserved room for it, even if that has begun to drain. The replica
        that ran the request has released it."""
        self._cancel_timer(live)
        taker = self._offers.taker(live)
        if taker is not None and (taker in self._replicas.candidates(live) or taker.can_take_back(live)):
            self.submit(live, taker)
        else:
            self._fail_over(live)

    def unassign(self, live: LiveRequest) -> None:
        """Unassigns a request that no scheduler runs any more, though its client may still read it."""
        self._cancel_timer(live)
        self._assign(live, None)

    def place_anew(self, live: LiveRequest) -> None:
        """Takes a request away from its scheduler and places it again."""

        def place(live: LiveRequest) -> None:
            self.abort(live)
            self.place(live)

        self.for_each([live], place)

    def _place_on_best(self, live: LiveRequest, candidates: Sequence[Replica]) -> None:
        if (call := live.call) is not None:
            same = [each for each in candidates if not differing_parts(call.preferred, each.link.model)]
            candidates = same or candidates
        replica, num_new_tokens = candidates[0], None
        if len(candidates) > 1:
            replica, num_new_tokens = self._replicas.choose(live, candidates)
            if not live.num_generated_tokens and num_new_tokens >= self._replicas.long_prompt:
                self._offers.offer_streams_of(replica)
        self.submit(live, replica, num_new_tokens)

    def _assign(self, live: LiveRequest, replica: Replica | None, num_new_tokens: int | None = None) -> None:
        address = None if replica is None else replica.address
        self._offers.close(live, taken_by=address)
        if (before := self._replicas.get(live.replica)) is not None:
            before.remove(live)
        if replica is not None:
            replica.add(live, num_new_tokens)
            live.last_replica = address
        live.replica = address

    # Requests that a scheduler rejects or ends.

    def on_refusal(self, link: SchedulerLink, error: QuireError, live: LiveRequest) -> None:
        """Handles a rejection. A new request fails; a request that was accepted before is retried later. If the
        scheduler drains, the request goes to another scheduler, or waits for the successor."""
        replica = self._replicas.get(link.address)
        self._assign(live, None)
        if isinstance(error, Unavailable) and error.reason == "DRAINING":
            live.submissions -= 1
            if replica is not None:
                replica.rejects_new = True
                if live.submissions:
                    # While they drain, schedulers of earlier releases also reject requests that were accepted before.
                    replica.rejects_all = True
            self.place(live)
        elif ALREADY_TAKEN_OVER in error.metadata and live.is_heir:
            # The call at this gateway is newer than the call that took the request over from an earlier one here.
            live.is_heir = False
            self.resume(live, link.address)
        elif error.reason == "MODEL_CHANGED":
            others = self._replicas.candidates(live)
            if _names_new_model(link, error):
                # The request was resumed or resubmitted after the change of model, and would fail here again.
                others = [each for each in others if each is not replica]
            elif replica is not None:
                # The scheduler gets no new requests until it reconnects, with a welcome that names its new model.
                replica.rejects_new = True
                others = self._replicas.candidates(live)
            if others and not any(stream.is_behind_client for stream in live.sequences):
                self._place_on_best(live, others)
            else:
                self._fail(live, error)
        elif live.submissions > 1 and isinstance(error, ResourceExhausted | Unavailable):
            self._set_timer(live, self._retry_delay_s(error), self.place)
        else:
            self._fail(live, error)

    def await_usage(self, live: LiveRequest) -> None:
        """Ends a request that ended here without the usage of its scheduler, if that does not report it soon."""
        self._set_timer(live, _USAGE_TIMEOUT_S, self._end_if_complete)

    def _end_if_complete(self, live: LiveRequest) -> None:
        live.end_if_complete()
        if live.is_over:
            self.unassign(live)

    def _fail(self, live: LiveRequest, error: QuireError) -> None:
        """Fails a request that no scheduler runs. Its client may read the error later."""
        self.unassign(live)
        live.fail(error)

    def fail_unexpectedly(self, live: LiveRequest, error: Exception) -> None:
        """Fails a request because of an unexpected error, and aborts it at its scheduler."""
        live.fail_unexpectedly(error)
        self.abort(live)

    def _retry_delay_s(self, error: QuireError) -> float:
        """A random delay. The scheduler reports the time until one place is free; retries are spread over that time
        multiplied by the number of requests that have timers."""
        one_s = (error.retry_after_ms or _DEFAULT_RETRY_MS) / 1000
        return entropy.uniform(one_s, max(one_s, min(one_s * (1 + len(self._timers)), _MAX_RETRY_S)))

    # Requests whose scheduler is lost, or has no worker, or that have no scheduler.

    def on_disconnected(self, address: str) -> None:
        """Ends requests of the lost scheduler that lacked only their usage; its other requests wait for its return.
        Requests without a scheduler get their timer if this was the last one that accepted requests."""
        self.for_each(self._ledger.placed_on(address), self._outlive_scheduler)
        self.for_each(self._ledger.waiting(), self.wait_for_replica)

    def _outlive_scheduler(self, live: LiveRequest) -> None:
        self._end_if_complete(live)
        if not live.is_over:
            self._set_timer(live, self._failover_delay_s, self._fail_over)

    def _fail_over(self, live: LiveRequest) -> None:
        self.unassign(live)
        self.place(live)

    def on_ready(self, address: str) -> None:
        """Stops the timers of requests whose replica has its worker again."""
        for live in self._ledger.running_on(address):
            self._cancel_timer(live)

    def watch_unready(self) -> None:
        """Sets the timers of requests on schedulers that are not ready. A request whose timer fired while no other
        replica was ready gets a new timer, since the readiness of a replica has changed."""
        for replica in self._replicas:
            if replica.link.is_connected and not replica.link.is_ready:
                for live in self._ledger.running_on(replica.address):
                    if live.handle not in self._timers:
                        self._wait_for_worker(live)

    def _wait_for_worker(self, live: LiveRequest) -> None:
        patience_s = self._failover_delay_s * 4 ** min(live.moves, _MAX_COUNTED_MOVES)
        self._set_timer(live, patience_s, self._move_from_unready)

    def _move_from_unready(self, live: LiveRequest) -> None:
        """Moves a request to a ready replica, if there is one, unless its present replica still sends tokens."""
        left_s = self._failover_delay_s - live.seconds_since_news
        if left_s > 0:
            self._set_timer(live, left_s, self._move_from_unready)
        else:
            # Checked once more after a moment: if this process was suspended, tokens may wait to be read.
            self._set_timer(live, LAST_LOOK_S, self._leave_unready)

    def _leave_unready(self, live: LiveRequest) -> None:
        if live.is_over or not any(each.link.is_ready for each in self._replicas.candidates(live)):
            return
        if live.seconds_since_news < self._failover_delay_s:
            self._move_from_unready(live)
        else:
            live.moves += 1
            # Also if it is durable: a copy that ran on there might sample other tokens than the one that is read.
            self.abort(live)
            self.place(live)

    def wait_for_replica(self, live: LiveRequest) -> None:
        """If no replica accepts requests, fails a request after some time, unless it is placed before."""
        if not self._replicas.accepting():
            self._set_timer(live, self._connect_timeout_s, self._give_up)

    def _give_up(self, live: LiveRequest) -> None:
        connected = [each for each in self._replicas if each.link.is_connected]
        if any(each.work.num_requests or each.link.is_busy for each in connected):
            self.wait_for_replica(live)
            return
        message = f"no scheduler could be reached for {self._connect_timeout_s:g} s"
        if connected:
            addresses = ", ".join(each.address for each in connected)
            message = f"no scheduler took requests for {self._connect_timeout_s:g} s: {addresses} drained; restart them"
        live.fail(self._replicas.no_scheduler_error(message))

    # Timers.

    def _set_timer(self, live: LiveRequest, delay_s: float, action: Callable[[LiveRequest], None]) -> None:
        """Calls `action` with the request after `delay_s`. Replaces an earlier timer."""
        self._cancel_timer(live)
        self._timers[live.handle] = asyncio.get_running_loop().call_later(delay_s, self._fire, live, action)

    def _cancel_timer(self, live: LiveRequest) -> None:
        if (timer := self._timers.pop(live.handle, None)) is not None:
            timer.cancel()

    def _fire(self, live: LiveRequest, action: Callable[[LiveRequest], None]) -> None:
        del self._timers[live.handle]
        self.for_each([live], action)

    def for_each(self, requests: Iterable[LiveRequest], action: Callable[[LiveRequest], None]) -> None:
        """Calls `action` with each request; an error in one request does not affect the others."""
        for live in requests:
            try:
                action(live)
            except Exception as error:
                self.fail_unexpectedly(live, error)


def _names_new_model(link: SchedulerLink, changed: QuireError) -> bool:
    """Whether the stream's welcome already names the new model, whose change made a request fail."""
    epoch = changed.metadata.get("scheduler_epoch")
    return epoch is not None and link.welcome is not None and link.welcome.scheduler_epoch >= int(epoch)


def adapters_are_off() -> FailedPrecondition:
    """The error if no worker supports adapters."""
    return FailedPrecondition(
        "the workers run no adapters: start them with --max-adapters above 0", reason="ADAPTERS_OFF"
    )


def _model_changed(live: LiveRequest, model: ModelFingerprint) -> Unavailable:
    parts = ", ".join(differing_parts(required_model(live) or live.model, model))
    return Unavailable(
        f"the replicas have another model than when this request began (before and now: {parts}); it cannot continue: "
        "send it again",
        reason="MODEL_CHANGED",
    )
