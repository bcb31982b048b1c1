"""Drives the core: attaches the workers, keeps their pipeline of steps full, and applies their results.

The course of a step: `_send_steps` plans it (`Scheduler.schedule`) and sends it to the workers. While they run it, the
next one is planned. `_receive_answers` receives the result, applies it (`Scheduler.apply`) and emits the events, which
`Requests.deliver` puts into the outboxes of the gateways that read the requests.
"""

import asyncio
import logging
from collections.abc import Callable

from quire.rpc.patience import LAST_LOOK_S
from quire.rpc.tls import TlsIdentity
from quire.runtime import clock
from quire.runtime.failpoint import failpoint
from quire.runtime.settings import ConfigurationError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.lifecycle import Lifecycle
from scheduler_svc.service.metrics import SchedulerMetrics
from scheduler_svc.service.replica import Replica
from scheduler_svc.service.requests import Requests
from scheduler_svc.service.tracing import RequestSpans, StepTrace
from scheduler_svc.service.watch_messages import ReplicaNow
from scheduler_svc.service.watchers import Watchers
from scheduler_svc.service.worker_link import (
    InvalidAnswerError,
    WorkerHangsError,
    WorkerLostError,
    WorkerRefusedError,
    Workers,
    WorkerTakenError,
)
from scheduler_svc.service.worker_messages import (
    LEASE_S,
    MOVE_TIMEOUT_S,
    Fetched,
    Prepared,
    PromptLogprobsRouter,
    StepAnswer,
    TierChanged,
    prepare_message,
    step_message,
)
from scheduler_svc.settings import SchedulerSettings

_logger = logging.getLogger(__name__)
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.05, 1.0
# Only this scheduler waits for a worker that starts, so it tries often.
_LAST_ATTACH_BACKOFF_S = 0.2
_ATTACH_TIMEOUT_S = 5.0
_LAST_READ_S = 0.1


class PendingOrders:
    """Orders that workers have not answered yet: steps, or constraints to compile, adapters to load and blocks to
    fetch. Workers handle one after the other, or give up by themselves in time, so only the oldest is checked, and its
    time begins with the answer to the one before it.

    Only a second check finds it late: after a pause of this process its answer may have arrived and not be read yet.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # The time of sending, by number, oldest first.
        self._sent_at: dict[int, float] = {}
        # When the oldest became the oldest, or the workers were attached.
        self._oldest_since = 0.0
        # The first check that found the oldest too slow.
        self._late_since: float | None = None

    def clear(self, now: float) -> None:
        """Workers were attached; nothing is sent yet."""
        self._sent_at.clear()
        self._oldest_since, self._late_since = now, None

    def record_sent(self, number: int, now: float) -> None:
        self._sent_at[number] = now

    def record_answer(self, number: int, now: float) -> float:
        """An answer came, or the wait for it was given up. Returns the seconds since it was sent."""
        if number == next(iter(self._sent_at), None):
            self._oldest_since, self._late_since = now, None
        return now - self._sent_at.pop(number, now)

    def find_late(self, now: float) -> tuple[int, float] | None:
        """The number of a late order, and its seconds so far; None if none is late. Called while workers live."""
        if not self._sent_at:
            return None
        number, sent_at = next(iter(self._sent_at.items()))
        seconds = now - max(sent_at, self._oldest_since)
        if seconds <= self._timeout_s:
            return None
        if self._late_since is None:
            self._late_since = now
        return (number, seconds) if now - self._late_since > LAST_LOOK_S else None


class StepLoop:
    """Drives the workers of one replica, step by step.

    Attributes:
        replica: The core and the requests in it.
        lifecycle: Whether the replica is ready, sleeps or drains.
        trace: The parts of each step (`--trace-steps`).
        watchers: Clients that watch memory, queues and steps.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        requests: Requests,
        metrics: SchedulerMetrics,
        spans: RequestSpans,
        report_readiness: Callable[[bool], None],
        tls: TlsIdentity | None = None,
    ) -> None:
        """`report_readiness` is called whenever the replica becomes ready or unready; `tls` identifies this scheduler
        to workers."""
        self.trace = StepTrace.open(settings.trace_steps)
        self.watchers = Watchers(self._replica_now)
        self.replica = Replica(
            settings, requests, metrics, spans, self.watchers, lambda: self.lifecycle.update_busy(), tls
        )
        self.lifecycle = Lifecycle(self.replica, requests.report_readiness, report_readiness, settings.idle_unload)
        self._max_steps_in_flight = settings.max_steps_in_flight
        self._requests = requests
        self._metrics = metrics
        self._prompt_logprobs = PromptLogprobsRouter()
        self._steps, self._preparations = PendingOrders(settings.step_timeout), PendingOrders(settings.step_timeout)
        # Block fetches; workers give them up by themselves.
        self._moves = PendingOrders(MOVE_TIMEOUT_S + settings.step_timeout)
        # Whether the attached workers have answered a step or sent a heartbeat.
        self._has_heard = False

    async def run(self) -> None:
        """Attaches the workers, drives them, and starts again after each loss. Runs until it is cancelled, or raises
        ConfigurationError once a newer scheduler has the workers: if both continued, neither would finish a step."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            await self.lifecycle.wait_until_awake()
            link = await self._attach()
            self._has_heard = False
            try:
                await self._drive(link)
            except WorkerLostError as error:
                _logger.warning("%s; its steps are void, running requests wait for its return", error)
                self.replica.record_loss(error)
            self.replica.void_steps()
            # A worker that is lost before its first answer may be lost again by the same step.
            if self._has_heard:
                backoff_s = _FIRST_BACKOFF_S
            if self.replica.was_faulty or not self._has_heard:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _attach(self) -> Workers:
        """Tries until the workers are attached."""
        backoff_s = _FIRST_BACKOFF_S
        logged = ""
        while True:
            tried_at = clock.monotonic()
            try:
                link = await self.replica.attach(_ATTACH_TIMEOUT_S)
            except WorkerTakenError as error:
                raise ConfigurationError(
                    f"{error}; the newer one keeps it. A worker takes one scheduler: name it in one --workers"
                ) from error
            except WorkerLostError as error:
                self.lifecycle.set_loading(error.loading)
                # One log line per phase, not per read byte.
                kind = str(error) if error.loading is None else error.loading.phase
                if kind != logged:
                    logged = kind
                    level = logging.WARNING if isinstance(error, WorkerRefusedError) else logging.INFO
                    _logger.log(level, "%s; trying again", error)
                # A worker that loads its model answers late.
                await asyncio.sleep(max(backoff_s - (clock.monotonic() - tried_at), 0))
                backoff_s = min(2 * backoff_s, _LAST_ATTACH_BACKOFF_S)
            else:
                self._start(link)
                return link

    def _start(self, link: Workers) -> None:
        """Workers were attached: the first step can be planned."""
        replica, info = self.replica, link.info
        assert replica.scheduler is not None
        for pending in (self._steps, self._preparations, self._moves):
            pending.clear(clock.monotonic())
        self._prompt_logprobs.clear()
        self.trace.attached(replica.scheduler.config, info.vocab_size)
        self.lifecycle.set_attached(True)
        replica.wake.set()
        self.lifecycle.update_busy()
        _logger.info(
            "attached worker generation %d as epoch %d: %s, %d blocks of %d tokens, %d of them cached",
            info.worker_generation,
            replica.epoch,
            info.architecture,
            info.num_gpu_blocks,
            info.block_size,
            replica.scheduler.batch.blocks.pool.num_cached,
        )

    async def _drive(self, link: Workers) -> None:
        """Sends steps and receives results until one of the two fails. Raises WorkerLostError."""
        scheduler = self.replica.scheduler
        assert scheduler is not None
        receiving = asyncio.create_task(self._receive_answers(link, scheduler))
        sleeping = asyncio.create_task(self.lifecycle.sleep_requested.wait())
        halves = [receiving, asyncio.create_task(self._send_steps(link, scheduler)), sleeping]
        try:
            await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
            if not sleeping.done():
                # A write to a broken stream does not say why it broke; the next read does.
                await asyncio.wait([receiving], timeout=_LAST_READ_S)
        finally:
            self.lifecycle.set_attached(False)
            for half in halves:
                half.cancel()
            await link.close()
            outcomes = await asyncio.gather(*halves, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    # To the workers

    async def _send_steps(self, link: Workers, scheduler: Scheduler) -> None:
        """Plans steps and sends them, up to the number of steps in flight that the workers take."""
        depth, wake = min(self._max_steps_in_flight, link.info.max_steps_in_flight), self.replica.wake
        while True:
            await wake.wait()
            wake.clear()
            while len(scheduler.in_flight) < depth:
                await self._send_offers(link)
                started = clock.monotonic()
                plan = scheduler.schedule(started)
                for key in scheduler.promised:
                    self._requests.announce_room(key)
                if plan is None:
                    break
                planned = clock.monotonic()
                self._steps.record_sent(plan.step_id, started)
                self._prompt_logprobs.planned(plan, scheduler.batch.rows)
                self._metrics.planned(plan, planned - started)
                if self.watchers.are_any:
                    self.watchers.planned(scheduler, plan, started, planned)
                failpoint("scheduler.step.before_send")
                await link.write(step_message(plan, self.replica.epoch, link.info.worker_generation))
                self.trace.planned(plan, started, planned)
                self.trace.part("send", plan.step_id, planned, clock.monotonic())
            for preparation in scheduler.take_preparations():
                pending = self._preparations if preparation.arriving is None else self._moves
                pending.record_sent(preparation.number, clock.monotonic())
                await link.write(prepare_message(preparation))
            await self._send_offers(link)
            # A lease may have expired.
            self.lifecycle.update_busy()

    async def _send_offers(self, link: Workers) -> None:
        """Sends offers before a step is planned that may reuse a lease's blocks: a worker leaves out blocks that are
        overwritten after an offer, but does not know about writes before it."""
        while self.replica.unsent_offers:
            await link.write(self.replica.unsent_offers.pop(0))

    # From the workers

    async def _receive_answers(self, link: Workers, scheduler: Scheduler) -> None:
        """Receives answers and applies them to the core. Raises WorkerLostError."""
        while True:
            answer = await link.receive()
            self._has_heard = True
            now = clock.monotonic()
            match answer:
                case StepAnswer():
                    self._apply_result(answer, scheduler, now, link.address)
                case None:
                    self._check_progress(now, link.address)
                    self._give_up_preparations(scheduler, now)
                case Prepared():
                    self._apply_preparation(answer, scheduler, now, link.address)
                case Fetched():
                    self._renew_lease(answer, scheduler, now)
                case TierChanged():
                    scheduler.tier_changed(answer.slots, answer.hashes)
                    self.replica.cache.report_changes()

    def _apply_result(self, answer: StepAnswer, scheduler: Scheduler, now: float, address: str) -> None:
        """Applies the result of the oldest step, and emits its events. Raises InvalidAnswerError."""
        result = answer.result
        step_s = self._steps.record_answer(result.step_id, now)
        self._metrics.stepped(step_s)
        if self.watchers.are_any:
            self.watchers.answered(result.step_id, step_s)
        try:
            if scheduler.in_flight:
                answer.check_rows(scheduler.in_flight[0])
            prompt_logprobs = self._prompt_logprobs.answered(answer)
            events = scheduler.apply(result, now)
        except ValueError as error:
            raise InvalidAnswerError(f"worker {address}: {error}") from error
        self.replica.wake.set()
        self.trace.answered(result.step_id, answer.worker_us, now)
        self.trace.part("apply", result.step_id, now, clock.monotonic())
        failpoint("scheduler.apply.before_emit")
        self._requests.deliver_prompt_logprobs(prompt_logprobs)
        self.replica.emit(result.step_id, events)
        self.replica.cache.report_changes()

    def _apply_preparation(self, prepared: Prepared, scheduler: Scheduler, now: float, address: str) -> None:
        """A constraint is compiled, an adapter loaded, or blocks are fetched. Raises InvalidAnswerError."""
        self._preparations.record_answer(prepared.number, now)
        if (arriving := scheduler.preparations.arriving(prepared.number)) is not None:
            self._metrics.fetched(arriving, self._moves.record_answer(prepared.number, now))
        try:
            events = scheduler.prepared(prepared.number, prepared.failure, prepared.failed)
        except ValueError as error:
            raise InvalidAnswerError(f"worker {address}: {error}") from error
        if prepared.failure is not None:
            _logger.warning("worker %s cannot load an adapter: %s", address, prepared.failure)
        self.replica.emit(0, events)
        self.replica.wake.set()
        self.replica.cache.report_changes()

    def _renew_lease(self, fetched: Fetched, scheduler: Scheduler, now: float) -> None:
        """Another replica has fetched blocks: their lease is renewed, or ends once all ranks' blocks were fetched."""
        num_done = scheduler.reservations.count_fetched(fetched.lease) if fetched.is_done else 0
        is_over = num_done == len(self.replica.workers)
        scheduler.renew_lease(fetched.lease, now, None if is_over else LEASE_S)
        self.replica.wake_after(LEASE_S)
        self.lifecycle.update_busy()

    def _check_progress(self, now: float, address: str) -> None:
        """Handles a heartbeat: the process is alive, but its device may hang. Raises WorkerHangsError."""
        if (late := self._steps.find_late(now)) is not None:
            raise WorkerHangsError(f"worker {address} has not answered a step for {late[1]:.1f} s")

    def _give_up_preparations(self, scheduler: Scheduler, now: float) -> None:
        """Fails requests whose constraint or adapter takes too long; steps and other preparations continue."""
        if (late := self._moves.find_late(now)) is not None:
            self._moves.record_answer(late[0], now)
            scheduler.end_late_preparation(*late)
            self.replica.wake.set()
        if (late := self._preparations.find_late(now)) is None:
            return
        number, seconds = late
        self._preparations.record_answer(number, now)
        events = scheduler.end_late_preparation(number, seconds)
        failures = [failure for batch in events.values() for failure in batch.failed]
        detail = failures[0].message if failures else f"the workers have not prepared number {number}"
        _logger.warning("%s; %d requests that wait for it fail", detail, len(failures))
        self.replica.emit(0, events)
        self.replica.wake.set()

    # To watchers

    def _replica_now(self) -> ReplicaNow:
        replica = self.replica
        return ReplicaNow(
            replica.scheduler,
            replica.epoch,
            is_ready=self.lifecycle.is_ready,
            is_attached=replica.is_attached,
            is_draining=self.lifecycle.is_draining,
            num_gateways=self._requests.num_connected,
            block_bytes=replica.block_bytes,
            first_token_ms=self._metrics.served.first_token_ms(),
        )
