"""Drives the core: attaches the workers, keeps their pipeline of steps full, and distributes the results.

The course of a step: `_send_steps` plans it (`Scheduler.schedule`) and sends it to the workers. While they run it, the
next one is planned. `_receive_results` receives the result, applies it (`Scheduler.apply`) and emits the events, which
`Requests.deliver` puts into the outboxes of the gateways that read the requests.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace

from quire.messages.replica_role import ReplicaRole
from quire.model_files.progress import ASLEEP, ASLEEP_WITHOUT_WEIGHTS, LoadProgress
from quire.rpc.errors import Unavailable, Unimplemented
from quire.rpc.tls import TlsIdentity
from quire.runtime import clock, entropy
from quire.runtime.failpoint import failpoint
from quire.runtime.logs import REQUEST_ID
from quire.runtime.settings import ConfigurationError
from quire.service.compatibility import epoch_of_start
from quire.service.histograms import Distribution
from quire.tracing import TraceContext
from scheduler_svc.core.config import PolicyKind, PreemptionMode, SchedulerConfig
from scheduler_svc.core.moves import KvSource, Lease
from scheduler_svc.core.paging.sequence import SequenceStatus
from scheduler_svc.core.pins import PIN_CLIENT
from scheduler_svc.core.request import ClientId, Request, RequestKey
from scheduler_svc.core.results import usage_of
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step import ClientEvents, RequestFailure, Usage
from scheduler_svc.recording.recorder import Recorder
from scheduler_svc.service.awaited import Awaited
from scheduler_svc.service.cache_feed import CacheFeed
from scheduler_svc.service.metrics import SchedulerMetrics, Served
from scheduler_svc.service.outbox import Readiness, SequenceProgress
from scheduler_svc.service.pin_calls import PinCalls
from scheduler_svc.service.refusals import RetryAdvisor, refusals_as_errors
from scheduler_svc.service.requests import GATEWAYS, Requests
from scheduler_svc.service.tracing import RequestSpans, StepTrace
from scheduler_svc.service.watch_messages import ReplicaNow
from scheduler_svc.service.watchers import Watchers
from scheduler_svc.service.worker_link import (
    InvalidAnswerError,
    WorkerFaultyError,
    WorkerGroup,
    WorkerHangsError,
    WorkerLink,
    WorkerLostError,
    WorkerRefusedError,
    WorkerTakenError,
    attach_workers,
    release_memory,
)
from scheduler_svc.service.worker_messages import (
    LEASE_S,
    MOVE_TIMEOUT_S,
    Fetched,
    Prepared,
    PromptLogprobsRouter,
    ReplicaInfo,
    TierChanged,
    offer_message,
)
from scheduler_svc.settings import SchedulerSettings

MODEL_CHANGED = "MODEL_CHANGED"
"""Failure reason of requests that began with another model than the one that is attached now."""

_logger = logging.getLogger(__name__)
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.05, 1.0
# Only this scheduler waits for a worker that starts, so it tries often.
_LAST_ATTACH_BACKOFF_S = 0.2
_ATTACH_TIMEOUT_S = 5.0
_LAST_READ_S = 0.1
_RELEASE_TIMEOUT_S = 30.0
_WAKE_TIMEOUT_S, _LOAD_TIMEOUT_S = 30.0, 600.0
_LEASE_BYTES = 16
_AFTER_LEASE_S = 0.01
# Share of a drain's time in which requests leave only if there is room for them elsewhere.
_LEAVING, _MIN_LEAVING_S = 0.75, 0.001
# Seconds that requests that never ran wait in a drain, so that other replicas take them.
_HOLD_NEW_S = 0.5
# Seconds that a drain waits for a request that has left: the other replica may refuse it, and it comes back.
_RETURN_S = 1.0


class Sleep:
    """Whether the workers are to stay detached, and whether they have dropped their weights."""

    def __init__(self) -> None:
        self.has_no_weights = False
        self.lock = asyncio.Lock()
        self.is_asked = asyncio.Event()
        self.is_detached = asyncio.Event()
        self.is_attached = asyncio.Event()
        self._is_awake = asyncio.Event()
        self._is_awake.set()
        # Not set while a worker is about to release its memory: that would end an attachment in the meantime.
        self._is_released = asyncio.Event()
        self._is_released.set()

    def begin(self) -> None:
        self._is_awake.clear()
        self._is_released.clear()
        self.is_asked.set()

    def end(self) -> None:
        self.has_no_weights = False
        self.is_asked.clear()
        self._is_awake.set()

    def released(self) -> None:
        """The workers have released their memory, or will not."""
        self._is_released.set()

    async def pass_by(self) -> None:
        """Waits, detached, until the sleep ends."""
        self.is_detached.set()
        await self._is_awake.wait()
        await self._is_released.wait()
        self.is_detached.clear()

    def note_attached(self, is_attached: bool) -> None:
        if is_attached:
            self.is_attached.set()
        else:
            self.is_attached.clear()


class StepLoop:
    """Owns the core and the workers. Everything here runs on one event loop, so the core needs no lock.

    Attributes:
        scheduler, replica: The core, and the workers' properties; None until workers were attached once.
        is_attached: Whether workers are attached now.
        loading: The workers' progress in loading their model; None if they report none.
        is_draining: Whether new requests are refused for good.
        role: Kind of requests that gateways prefer to send here.
        kv_source: Where other replicas find blocks of the attached workers, without a lease.
        epoch: Rises with every attempt to attach; see `epoch_of_start`.
        version: Rises if other workers are attached than before, by their pool, model or limits.
        retry: Computes when a request that is refused for a full queue should come back.
        pins: Pins prefixes for callers.
        trace: The parts of each step (`--trace-steps`).
        recorder: Records the inputs of the core (`--record`); None without a recording.
        cache: Notifies watchers of changes in the prefix cache.
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
        """`report_readiness` is called whenever `is_ready` changes; `tls` identifies this scheduler to workers."""
        self.scheduler: Scheduler | None = None
        self.replica: ReplicaInfo | None = None
        self.is_attached = False
        self.loading: LoadProgress | None = None
        self.is_draining = False
        self._leave_after_s = 0.0
        self.kv_source = KvSource()
        self.role = ReplicaRole(settings.role)
        self.epoch = epoch_of_start(clock.unix_s())
        self.version = 0
        self.retry = RetryAdvisor()
        self.pins = PinCalls(lambda: self.scheduler, self.retry, self._note_pins)
        self.trace = StepTrace.open(settings.trace_steps)
        self.recorder = (
            None
            if settings.record is None
            else Recorder.open(
                settings.record, with_token_ids=settings.record_tokens, max_bytes=settings.record_max_bytes
            )
        )
        self.cache = CacheFeed()
        self.watchers = Watchers(self._now)
        self._settings = settings
        self._requests = requests
        self._metrics = metrics
        self._spans = spans
        self._report_readiness = report_readiness
        self._tls = tls
        self._prompt_logprobs = PromptLogprobsRouter()
        self._wake = asyncio.Event()
        self._sleep = Sleep()
        self._idle = asyncio.Event()
        self._idle.set()
        # Number of requests that have just moved elsewhere, and may come back.
        self._num_leaving = 0
        # Steps in flight, and the constraints and adapters that workers prepare meanwhile.
        self._steps, self._preparations = Awaited(settings.step_timeout), Awaited(settings.step_timeout)
        # Block fetches; workers give them up by themselves.
        self._moves = Awaited(MOVE_TIMEOUT_S + settings.step_timeout)
        # Unsent messages about blocks that other replicas may fetch.
        self._offers: list[bytes] = []
        # Whether the attached workers have answered a step or sent a heartbeat.
        self._has_heard = False
        # Whether the last lost workers were alive, and hung or sent invalid answers.
        self._was_faulty = False

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """The workers' addresses, in order of rank."""
        return self._settings.workers

    @property
    def is_ready(self) -> bool:
        """Whether gateways should send requests to this replica."""
        return self.is_attached and not self.is_draining

    @property
    def readiness(self) -> Readiness:
        """The readiness that gateways get."""
        is_busy = self.is_draining and not self._idle.is_set()
        return Readiness(self.is_ready, self.loading, self.is_draining, self._leave_after_s, is_busy)

    @property
    def is_asleep(self) -> bool:
        """Whether no worker is attached until `wake_up`."""
        return self._sleep.is_asked.is_set()

    @property
    def step_tokens(self) -> Distribution:
        """The distribution of the number of tokens that steps computed."""
        return self._metrics.step_tokens

    @property
    def served(self) -> Served:
        """Tokens and latencies that gateways were served."""
        return self._metrics.served

    @property
    def num_live(self) -> int:
        return 0 if self.scheduler is None else self.scheduler.num_live

    # Requests

    def submit(self, request: Request, trace: TraceContext | None = None) -> None:
        """Queues a request. Raises QuireError if the core refuses it.

        Args:
            trace: The gateway's span of the request; None if it does not trace the request.
        """
        self._spans.submit(request, trace, self._submit)
        self._set_busy()
        self._wake.set()

    def _submit(self, request: Request) -> SequenceGroup:
        assert self.scheduler is not None, "no worker was attached yet"
        with refusals_as_errors(self.retry):
            self.scheduler.submit(request, clock.monotonic())
        return self.scheduler.waiting.get(request.key)

    def abort(self, key: RequestKey) -> bool:
        """Ends a request and frees its blocks at once. Returns whether there was one."""
        group = self._group(key)
        had_one = self.scheduler is not None and self.scheduler.abort(key)
        if had_one:
            self._note_aborted(group)
        self._spans.aborted(key)
        return had_one

    def abort_sequence(self, key: RequestKey, index: int) -> None:
        """Ends one sequence of a request, and the request with its last one."""
        group = self._group(key)
        if self.scheduler is not None and self.scheduler.abort_sequence(key, index):
            self._note_aborted(group if self._group(key) is None else None)
        self._spans.sequence_aborted(key)

    def hand_over(self, key: RequestKey) -> KvSource | None:
        """Ends a request here that continues at another replica after its delivered tokens. Returns where its blocks
        can be fetched, which may be nowhere. Returns None and changes nothing if it cannot continue elsewhere."""
        if self.scheduler is None:
            return None
        lease = Lease(entropy.random_bytes(_LEASE_BYTES))
        sealed = self.scheduler.hand_over(key, lease, clock.monotonic(), LEASE_S)
        if sealed is None:
            return None
        self._spans.aborted(key)
        self._num_leaving += 1
        asyncio.get_running_loop().call_later(_RETURN_S, self._note_left)
        source = KvSource()
        if sealed:
            if self.is_attached and self.kv_source.kv_namespace:
                source = replace(self.kv_source, lease=lease)
                self._offers.append(offer_message(lease, sealed))
                self._wake_after_lease()
            else:
                self.scheduler.renew_lease(lease, clock.monotonic(), 0)
        self._note_ended(1)
        self._wake.set()
        return source

    def _note_left(self) -> None:
        self._num_leaving -= 1
        self._note_idle()

    def _wake_after_lease(self) -> None:
        """Wakes the loop after a lease: the core checks for expired leases when it plans a step."""
        asyncio.get_running_loop().call_later(LEASE_S + _AFTER_LEASE_S, self._wake.set)

    def _group(self, key: RequestKey) -> SequenceGroup | None:
        return None if self.scheduler is None else self.scheduler.group(key)

    def progress(self, key: RequestKey) -> list[SequenceProgress] | None:
        """The part of each sequence of a live request that its reader was sent; None if the request is over."""
        group = self._group(key)
        if group is None:
            return None
        if group.request.selects:
            # Nothing is sent before the end.
            return []
        return [
            SequenceProgress(each.index, each.num_output_tokens, each.status is SequenceStatus.FINISHED)
            for each in group.sequences
        ]

    def usage_so_far(self, key: RequestKey) -> Usage | None:
        """The usage of a live request, including its current phase up to now; None if the request is over."""
        group = self._group(key)
        if group is None:
            return None
        usage, line, now = usage_of(group), group.timeline, clock.monotonic()
        if line.started is None:
            return usage._replace(queue_s=now - line.arrived)
        if line.first_token is None:
            return usage._replace(prefill_s=now - line.started)
        return usage._replace(decode_s=now - line.first_token)

    async def drain(self, timeout_s: float | None) -> int:
        """Refuses new requests from now on, reports that, and waits until no request is live or has just moved
        elsewhere, all blocks are sealed and none is kept for another replica. Requests that were accepted before still
        arrive, if no other replica takes them.

        Returns the number of live requests at the timeout; None waits without limit.
        """
        self._sleep.end()
        self._leave_after_s = 0.0 if timeout_s is None else max(_LEAVING * timeout_s, _MIN_LEAVING_S)
        if self.scheduler is not None and not self.is_draining:
            self.scheduler.hold_new(clock.monotonic(), _HOLD_NEW_S)
            asyncio.get_running_loop().call_later(_HOLD_NEW_S + _AFTER_LEASE_S, self._wake.set)
        self._set_ready(is_draining=True)
        failpoint("scheduler.drain.begun")
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            _logger.warning("%d requests still live after draining for %s s", self.num_live, timeout_s)
        return self.num_live

    def check_not_draining(self) -> None:
        """Raises Unavailable if this scheduler takes no new requests."""
        if self.is_draining:
            raise Unavailable("the scheduler drains", reason="DRAINING")

    def forget_cached(self) -> int:
        """Forgets the content of cached blocks without a holder, and notifies watchers of the cache. Returns the number
        of these blocks."""
        assert self.scheduler is not None, "no worker was attached yet"
        num_forgotten = self.scheduler.forget_cached()
        self.cache.tell()
        return num_forgotten

    async def sleep(self, *, discard_weights: bool) -> None:
        """Makes the workers release the memory of their pools, and of their weights with `discard_weights`, and
        attaches none until `wake_up`. All requests wait meanwhile, as after the loss of a worker. Idempotent; a second
        call may discard weights that the first one kept.

        Raises:
            QuireError: no worker is attached, one cannot release memory, or this scheduler drains. Then requests
                continue, unless an earlier call made them wait.
        """
        async with self._sleep.lock:
            self.check_not_draining()
            if self.is_asleep and (self._sleep.has_no_weights or not discard_weights):
                return
            if self.replica is None or not (self.is_attached or self.is_asleep):
                raise Unavailable("no worker is attached", reason="NO_WORKER", retry_after_ms=1000)
            if self.replica.device not in ("", "cpu") and not discard_weights:
                raise Unimplemented(
                    f"the KV pool is on {self.replica.device}, whose memory goes back only with the weights: use "
                    "level 2",
                    reason="POOL_STAYS",
                )
            was_asleep = self.is_asleep
            self._sleep.begin()
            try:
                async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                    await self._sleep.is_detached.wait()
                self.check_not_draining()
                self.epoch += 1
                await release_memory(
                    self.worker_addresses, self.epoch, _RELEASE_TIMEOUT_S, self._tls, discard_weights=discard_weights
                )
            except BaseException:
                if not was_asleep:
                    self._sleep.end()
                raise
            finally:
                self._sleep.released()
            # A drain may have ended the sleep meanwhile.
            self.check_not_draining()
            self._sleep.has_no_weights = discard_weights
            self.forget_cached()
            self._set_loading(LoadProgress(ASLEEP_WITHOUT_WEIGHTS if discard_weights else ASLEEP))
            what = "KV pools and weights" if discard_weights else "KV pools"
            _logger.info("asleep: the workers gave the memory of their %s back; %d requests wait", what, self.num_live)

    async def wake_up(self) -> None:
        """Ends a `sleep`, and waits until the workers are attached. Idempotent. Raises Unavailable if they do not come
        back in time."""
        async with self._sleep.lock:
            timeout_s = _LOAD_TIMEOUT_S if self._sleep.has_no_weights else _WAKE_TIMEOUT_S
            self._sleep.end()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._sleep.is_attached.wait()
            except TimeoutError:
                text = f"the worker did not come back within {timeout_s:g} s"
                raise Unavailable(text, reason="NO_WORKER", retry_after_ms=1000) from None

    # Steps

    async def run(self) -> None:
        """Attaches the workers, drives them, and starts again after each loss. Runs until it is cancelled, or raises
        ConfigurationError once a newer scheduler has the workers: if both continued, neither would finish a step."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            await self._sleep.pass_by()
            link = await self._attach()
            self._has_heard = False
            try:
                await self._drive(link)
            except WorkerLostError as error:
                _logger.warning("%s; its steps are void, running requests wait for its return", error)
                self._take_loss(error)
            if self.scheduler is not None:
                self.scheduler.void_in_flight(clock.monotonic())
                self.cache.tell()
                if self.num_live:
                    # Pins that held blocks are computed again.
                    self._idle.clear()
                self._note_idle()
            # A worker that is lost before its first answer may be lost again by the same step.
            if self._has_heard:
                backoff_s = _FIRST_BACKOFF_S
            if self._was_faulty or not self._has_heard:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _drive(self, link: WorkerLink | WorkerGroup) -> None:
        """Sends steps and receives results until one of the two fails. Raises WorkerLostError."""
        receiving = asyncio.create_task(self._receive_results(link))
        sleeping = asyncio.create_task(self._sleep.is_asked.wait())
        halves = [receiving, asyncio.create_task(self._send_steps(link)), sleeping]
        try:
            await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
            if not sleeping.done():
                # A write to a broken stream does not say why it broke; the next read does.
                await asyncio.wait([receiving], timeout=_LAST_READ_S)
        finally:
            self._set_ready(is_attached=False)
            for half in halves:
                half.cancel()
            await link.close()
            outcomes = await asyncio.gather(*halves, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _send_steps(self, link: WorkerLink | WorkerGroup) -> None:
        """Plans steps and sends them, up to the number of steps in flight that the workers take."""
        scheduler = self.scheduler
        assert scheduler is not None
        depth = min(self._settings.max_steps_in_flight, link.info.max_steps_in_flight)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while len(scheduler.in_flight) < depth:
                await self._send_offers(link)
                started = clock.monotonic()
                plan = scheduler.schedule(started)
                for key in scheduler.promised:
                    self._requests.keep_room(key)
                if plan is None:
                    break
                planned = clock.monotonic()
                self._steps.sent(plan.step_id, started)
                self._prompt_logprobs.planned(plan, scheduler.batch.rows)
                self._metrics.planned(plan, planned - started)
                if self.watchers.are_any:
                    self.watchers.planned(scheduler, plan, started, planned)
                failpoint("scheduler.step.before_send")
                await link.send(plan)
                self.trace.planned(plan, started, planned)
                self.trace.part("send", plan.step_id, planned, clock.monotonic())
            for preparation in scheduler.take_preparations():
                awaited = self._preparations if preparation.arriving is None else self._moves
                awaited.sent(preparation.number, clock.monotonic())
                await link.prepare(preparation)
            await self._send_offers(link)
            # A lease may have expired.
            self._note_idle()

    async def _send_offers(self, link: WorkerLink | WorkerGroup) -> None:
        """Sends offers before a step is planned that may reuse a lease's blocks: a worker leaves out blocks that are
        overwritten after an offer, but does not know about writes before it."""
        while self._offers:
            await link.write(self._offers.pop(0))

    async def _receive_results(self, link: WorkerLink | WorkerGroup) -> None:
        """Receives results, applies them to the core, and emits the events."""
        scheduler = self.scheduler
        assert scheduler is not None
        while True:
            answer = await link.receive()
            self._has_heard = True
            now = clock.monotonic()
            if answer is None:
                self._check_progress(now, link)
                self._check_preparations(scheduler, now)
                continue
            if isinstance(answer, TierChanged):
                scheduler.tier_changed(answer.slots, answer.hashes)
                self.cache.tell()
                continue
            if isinstance(answer, Fetched):
                num_done = scheduler.leases.count_done(answer.lease) if answer.is_done else 0
                is_over = num_done == len(self.worker_addresses)
                scheduler.renew_lease(answer.lease, now, 0 if is_over else LEASE_S)
                self._wake_after_lease()
                self._note_idle()
                continue
            if isinstance(answer, Prepared):
                self._preparations.answered(answer.number, now)
                if (arriving := scheduler.preparations.arriving(answer.number)) is not None:
                    self._metrics.fetched(arriving, self._moves.answered(answer.number, now))
                self._take_prepared(scheduler, answer, link)
                self.cache.tell()
                continue
            result = answer.result
            step_s = self._steps.answered(result.step_id, now)
            self._metrics.stepped(step_s)
            if self.watchers.are_any:
                self.watchers.answered(result.step_id, step_s)
            try:
                if scheduler.in_flight:
                    answer.check_rows(scheduler.in_flight[0])
                prompt_logprobs = self._prompt_logprobs.answered(answer)
                events = scheduler.apply(result, now)
            except ValueError as error:
                raise InvalidAnswerError(f"worker {link.address}: {error}") from error
            self._wake.set()
            self.trace.answered(result.step_id, answer.worker_us, now)
            self.trace.part("apply", result.step_id, now, clock.monotonic())
            failpoint("scheduler.apply.before_emit")
            self._requests.deliver_prompt_logprobs(prompt_logprobs)
            self._emit(result.step_id, events)
            self.cache.tell()

    def _take_prepared(self, scheduler: Scheduler, prepared: Prepared, link: WorkerLink | WorkerGroup) -> None:
        try:
            events = scheduler.prepared(prepared.number, prepared.failure, prepared.failed)
        except ValueError as error:
            raise InvalidAnswerError(f"worker {link.address}: {error}") from error
        if prepared.failure is not None:
            _logger.warning("worker %s cannot load an adapter: %s", link.address, prepared.failure)
        self._emit(0, events)
        self._wake.set()

    def _check_progress(self, now: float, link: WorkerLink | WorkerGroup) -> None:
        """Handles a heartbeat: the process is alive, but its device may hang. Raises WorkerHangsError."""
        if (late := self._steps.late(now)) is not None:
            raise WorkerHangsError(f"worker {link.address} has not answered a step for {late[1]:.1f} s")

    def _check_preparations(self, scheduler: Scheduler, now: float) -> None:
        """Fails requests whose constraint or adapter takes too long; steps and other preparations continue."""
        if (late := self._moves.late(now)) is not None:
            self._moves.answered(late[0], now)
            scheduler.give_up_preparation(*late)
            self._wake.set()
        if (late := self._preparations.late(now)) is None:
            return
        number, seconds = late
        self._preparations.answered(number, now)
        events = scheduler.give_up_preparation(number, seconds)
        failures = [failure for batch in events.values() for failure in batch.failed]
        detail = failures[0].message if failures else f"the workers have not prepared number {number}"
        _logger.warning("%s; %d requests that wait for it fail", detail, len(failures))
        self._emit(0, events)
        self._wake.set()

    def _emit(self, step_id: int, events: dict[ClientId, ClientEvents]) -> None:
        """Hands out events of requests and pins."""
        assert self.scheduler is not None
        if PIN_CLIENT in events:
            self.pins.wake_waiters()
            self._note_idle()
        if (batch := events.get(GATEWAYS)) is not None:
            self._requests.deliver(step_id, batch)
            self._spans.delivered(batch)
            self._metrics.delivered(batch)
            if self.watchers.are_any:
                self.watchers.delivered(batch)
            if num_ended := len(batch.completed) + len(batch.failed):
                self._note_ended(num_ended)

    # Workers come and go

    async def _attach(self) -> WorkerLink | WorkerGroup:
        backoff_s = _FIRST_BACKOFF_S
        logged = ""
        while True:
            self.epoch += 1
            tried_at = clock.monotonic()
            try:
                link = await attach_workers(self.worker_addresses, self.epoch, _ATTACH_TIMEOUT_S, self._tls)
                self._take_over(link)
                return link
            except WorkerTakenError as error:
                raise ConfigurationError(
                    f"{error}; the newer one keeps it. A worker takes one scheduler: name it in one --workers"
                ) from error
            except WorkerLostError as error:
                self._set_loading(error.loading)
                # One log line per phase, not per read byte.
                kind = str(error) if error.loading is None else error.loading.phase
                if kind != logged:
                    logged = kind
                    level = logging.WARNING if isinstance(error, WorkerRefusedError) else logging.INFO
                    _logger.log(level, "%s; trying again", error)
                # A worker that loads its model answers late.
                await asyncio.sleep(max(backoff_s - (clock.monotonic() - tried_at), 0))
                backoff_s = min(2 * backoff_s, _LAST_ATTACH_BACKOFF_S)

    def _take_over(self, link: WorkerLink | WorkerGroup) -> None:
        """Adapts the core to workers that were attached, before anything runs."""
        info, before = link.info, self.replica
        config = self._config(info)
        if self.scheduler is None:
            self.scheduler = self._make_core(config)
        else:
            if before is not None and (changes := info.model_changes(before)):
                self._end_all(self.scheduler, ", ".join(changes))
                if not info.has_tokenizer_of(before):
                    self._requests.forget_outputs()
            # The cost of a step is measured at each start and differs a little: that makes no other pool.
            before_start = self.scheduler.config
            if replace(config, fixed_tokens=before_start.fixed_tokens) != before_start:
                self._refit(self.scheduler, config)
        scheduler = self.scheduler
        failpoint("scheduler.attach.before_inventory")
        scheduler.restore_sealed(link.sealed)
        self.cache.tell()
        self._judge_loss(scheduler, was_alive=info.is_same_worker(before) and not self._was_faulty)
        self.replica, self.kv_source = info, link.kv_source
        self._offers.clear()
        self.version += not info.is_like(before)
        for awaited in (self._steps, self._preparations, self._moves):
            awaited.clear(clock.monotonic())
        self._prompt_logprobs.clear()
        self.trace.attached(scheduler.config, info.vocab_size)
        self.loading = None
        self._set_ready(is_attached=True)
        self._wake.set()
        self._note_idle()
        _logger.info(
            "attached worker generation %d as epoch %d: %s, %d blocks of %d tokens, %d of them cached",
            info.worker_generation,
            self.epoch,
            info.architecture,
            info.num_gpu_blocks,
            info.block_size,
            scheduler.batch.blocks.pool.num_cached,
        )

    def _config(self, info: ReplicaInfo) -> SchedulerConfig:
        settings = self._settings
        max_num_batched_tokens = min(settings.max_num_batched_tokens, info.max_num_batched_tokens)
        return SchedulerConfig(
            num_blocks=info.num_gpu_blocks,
            block_size=info.block_size,
            # Each running sequence takes at least one token of a step.
            max_num_seqs=min(settings.max_num_seqs, info.max_num_rows, max_num_batched_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=info.max_model_len,
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
            tenant_overflow=settings.tenant_overflow,
            watermark=settings.watermark,
            num_host_blocks=info.num_host_blocks,
            # On a CPU the pool is in the same memory: host blocks would be copies, and no additional room.
            caches_on_host=info.device != "cpu",
            policy=PolicyKind(settings.policy),
            preemption_mode=PreemptionMode(settings.preemption_mode),
            pin_quota=settings.pin_quota,
            max_pinned=settings.max_pinned,
            max_prefill_share=settings.max_prefill_share,
            prepares_constraints=info.prepares_constraints,
            max_adapters=info.max_adapters,
            max_drafts=info.max_drafts,
            fixed_tokens=info.fixed_tokens,
            max_passes=info.max_passes,
        )

    def _make_core(self, config: SchedulerConfig) -> Scheduler:
        scheduler = Scheduler(config) if self.recorder is None else self.recorder.make_scheduler(config)
        self.cache.follow(scheduler)
        return scheduler

    def _end_all(self, scheduler: Scheduler, changes: str) -> None:
        """The worker came back with another model: all requests fail, and all pins end. Gateways whose tokenizer still
        fits learn the new model when they connect again."""
        message = (
            f"the worker came back with another model (before and now: {changes}); this request began with the one "
            "before and cannot go on: send it again"
        )
        for pin in list(scheduler.pins):
            scheduler.unpin(pin.tenant, pin.pin_id)
        self.pins.wake_waiters()
        _logger.warning(
            "the worker came back with another model (before and now: %s); %d live requests fail",
            changes,
            self.num_live,
        )
        keys = [group.request.key for group in scheduler.groups()]
        for key in keys:
            scheduler.abort(key)
        failures = [RequestFailure(key, MODEL_CHANGED, message, self.epoch) for key in keys]
        self._emit(0, {GATEWAYS: ClientEvents(failed=failures)})

    def _refit(self, scheduler: Scheduler, config: SchedulerConfig) -> None:
        """The worker came back with a pool of another size."""
        _logger.warning("the worker came back with another geometry: %s", config)
        failures = scheduler.refit(config, clock.monotonic())
        self.pins.wake_waiters()
        self._emit(0, {GATEWAYS: ClientEvents(failed=failures)})

    def _take_loss(self, error: WorkerLostError) -> None:
        """The worker refused a step, or was lost for an unknown reason: the request at fault fails once it is known."""
        assert self.scheduler is not None
        self._metrics.lost_worker()
        self._was_faulty = isinstance(error, WorkerFaultyError)
        if error.refusal is not None:
            self._fail_at_fault(self.scheduler.refuse_in_flight(error.refusal))
        elif error.is_unexplained:
            self.scheduler.lose_in_flight(error.detail)

    def _judge_loss(self, scheduler: Scheduler, *, was_alive: bool) -> None:
        """Judges the requests that ran when the worker was lost, if it was."""
        trials_were_on = scheduler.trials.are_on
        self._fail_at_fault(scheduler.judge_loss(was_alive=was_alive))
        if scheduler.trials.are_on and not trials_were_on:
            _logger.warning(
                "the worker is lost again and again; the requests that ran then are tried one by one or in cohorts"
            )

    def _fail_at_fault(self, events: dict[ClientId, ClientEvents]) -> None:
        for failure in itertools.chain.from_iterable(batch.failed for batch in events.values()):
            owned = self._requests.of_handle(failure.key.handle)
            extra = None if owned is None else {REQUEST_ID: owned.request_id}
            _logger.warning("a request caused worker losses and fails: %s", failure.message, extra=extra)
            self._metrics.found_at_fault(failure)
        self._emit(0, events)

    # Reports of changes

    def _set_loading(self, loading: LoadProgress | None) -> None:
        if loading != self.loading:
            self.loading = loading
            self._requests.report_readiness(self.readiness)

    def _now(self) -> ReplicaNow:
        return ReplicaNow(
            self.scheduler,
            self.epoch,
            is_ready=self.is_ready,
            is_attached=self.is_attached,
            is_draining=self.is_draining,
            num_gateways=self._requests.num_connected,
            block_bytes=0 if self.replica is None else self.replica.block_bytes * len(self.worker_addresses),
            first_token_ms=self.served.first_token_ms(),
        )

    def _set_ready(self, *, is_attached: bool | None = None, is_draining: bool = False) -> None:
        was_ready = self.is_ready
        if is_attached is not None:
            self.is_attached = is_attached
            self._sleep.note_attached(is_attached)
        self.is_draining = self.is_draining or is_draining
        if self.is_ready != was_ready or is_draining:
            self._requests.report_readiness(self.readiness)
            self._report_readiness(self.is_ready)

    def _note_aborted(self, group: SequenceGroup | None) -> None:
        """A request was ended from outside; its rows and blocks are free. None if it still has other sequences."""
        ended = None if group is None or group.request.is_offer else group
        if ended is not None:
            self._metrics.aborted(ended, clock.monotonic())
        self._note_ended(0 if ended is None else 1)
        self._wake.set()

    def _note_pins(self) -> None:
        if self.num_live:
            self._set_busy()
        self._note_idle()
        self._wake.set()

    def _note_ended(self, count: int) -> None:
        self.retry.ended(count, clock.monotonic())
        self._note_idle()

    def _set_busy(self) -> None:
        was_idle = self._idle.is_set()
        self._idle.clear()
        if was_idle and self.is_draining:
            self._requests.report_readiness(self.readiness)

    def _note_idle(self) -> None:
        scheduler = self.scheduler
        keeps = scheduler is not None and bool(len(scheduler.leases) or scheduler.is_sealing)
        if not (self.num_live or self._num_leaving or keeps or self._idle.is_set()):
            self._idle.set()
            if self.is_draining:
                self._requests.report_readiness(self.readiness)
