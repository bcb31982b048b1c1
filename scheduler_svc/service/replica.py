"""The replica: the scheduler's core, the properties of the workers that it plans for, and the requests in it.

Gateways' calls (submit, abort, hand over, pin) change the core here, and so does the replacement or the loss of
workers. `emit` hands the resulting events to the table of requests, which puts them into the outboxes of the gateways
that read the requests. The step loop drives the core; see `scheduler_svc.service.step_loop`.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace

from quire.messages.replica_role import ReplicaRole
from quire.rpc.tls import TlsIdentity
from quire.runtime import clock, entropy
from quire.runtime.failpoint import failpoint
from quire.runtime.logs import REQUEST_ID
from quire.service.compatibility import epoch_of_start
from quire.tracing import TraceContext
from scheduler_svc.core.config import PolicyKind, PreemptionMode, SchedulerConfig
from scheduler_svc.core.moves import KvSource, Lease
from scheduler_svc.core.paging.sequence import SequenceStatus
from scheduler_svc.core.pins import PIN_CLIENT
from scheduler_svc.core.request import ClientId, Request, RequestKey
from scheduler_svc.core.reservations import Kind
from scheduler_svc.core.results import usage_of
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step import ClientEvents, RequestFailure, Usage
from scheduler_svc.recording.recorder import Recorder
from scheduler_svc.service.cache_changes import CacheFeed
from scheduler_svc.service.history import SequenceProgress
from scheduler_svc.service.metrics import SchedulerMetrics
from scheduler_svc.service.pin_calls import PinCalls
from scheduler_svc.service.refusals import RetryAdvisor, refusals_as_errors
from scheduler_svc.service.requests import GATEWAYS, Requests
from scheduler_svc.service.tracing import RequestSpans
from scheduler_svc.service.watchers import Watchers
from scheduler_svc.service.worker_link import (
    WorkerFaultyError,
    WorkerLostError,
    WorkerRefusedError,
    Workers,
    attach_workers,
    release_memory,
)
from scheduler_svc.service.worker_messages import LEASE_S, ReplicaInfo, offer_message
from scheduler_svc.settings import SchedulerSettings

MODEL_CHANGED = "MODEL_CHANGED"
"""Failure reason of requests that began with another model than the one that is attached now."""

_OF_SETTINGS = (
    "max_waiting_requests", "max_waiting_tokens", "tenant_overflow", "watermark", "pin_quota", "max_pinned",
    "max_prefill_share", "output_checkpoints",
)  # fmt: skip
_OF_WORKERS = (
    "block_size", "max_model_len", "num_host_blocks", "prepares_constraints", "max_adapters", "max_drafts",
    "fixed_tokens", "max_passes", "full_groups", "windowed_groups", "window", "state_blocks",
)  # fmt: skip
"""Parts of the core's configuration that settings and workers have under the same name."""

# A CPU computes this number of tokens at nearly the speed of more.
_MAX_MIXED_ON_CPU = 512
_logger = logging.getLogger(__name__)
_LEASE_BYTES = 16
# A timer may fire a little early.
_AFTER_TIMER_S = 0.01
# Seconds that a drain waits for a request that has left: the other replica may refuse it, and it comes back.
_RETURN_S = 1.0


class Replica:
    """Owns the core. Everything here runs on one event loop, so the core needs no lock.

    Attributes:
        scheduler, info: The core, and the workers' properties; None until workers were attached once.
        is_attached: Whether workers are attached now.
        was_faulty: Whether the last lost workers were alive, and hung or sent invalid answers.
        kv_source: Where other replicas fetch blocks of the attached workers. It has no lease; `hand_over` adds one.
        workers: The workers' addresses, in order of rank.
        role: Kind of requests that gateways prefer to send here.
        epoch: Rises with every attempt to attach; see `epoch_of_start`.
        version: Rises if the attached workers have another pool, model or limits than the ones before.
        retry: Computes when a request that is refused for a full queue should come back.
        pins: Pins prefixes for callers.
        recorder: Records the inputs of the core (`--record`); None without a recording.
        cache: Reports changes of the prefix cache, to gateways among others.
        metrics: Counters, and the tokens and latencies that gateways were served.
        wake: Set when the step loop should plan a step.
        unsent_offers: Messages yet to be sent to the workers, about leased blocks that other replicas may fetch. They
            have nothing to do with requests that are offers (`Request.is_offer`).
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        requests: Requests,
        metrics: SchedulerMetrics,
        spans: RequestSpans,
        watchers: Watchers,
        on_change: Callable[[], None],
        tls: TlsIdentity | None,
    ) -> None:
        """`on_change` is called when requests, pins or leases came or went, so that `is_busy` may have changed; `tls`
        identifies this scheduler to workers."""
        self.scheduler: Scheduler | None = None
        self.info: ReplicaInfo | None = None
        self.is_attached = False
        self.was_faulty = False
        self.kv_source = KvSource()
        self.workers = settings.workers
        self.role = ReplicaRole(settings.role)
        self.epoch = epoch_of_start(clock.unix_s())
        self.version = 0
        self.retry = RetryAdvisor()
        self.pins = PinCalls(lambda: self.scheduler, self.retry, self._on_pins)
        self.recorder = (
            None
            if settings.record is None
            else Recorder.open(
                settings.record, with_token_ids=settings.record_tokens, max_bytes=settings.record_max_bytes
            )
        )
        self.cache = CacheFeed()
        self.metrics = metrics
        self.wake = asyncio.Event()
        self.unsent_offers: list[bytes] = []
        self._settings = settings
        self._requests = requests
        self._spans = spans
        self._watchers = watchers
        self._on_change = on_change
        self._tls = tls
        # Number of requests that have just moved elsewhere, and may come back.
        self._num_leaving = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, in the workers of all ranks together; 0 before the first worker."""
        return 0 if self.info is None else self.info.block_bytes * len(self.workers)

    @property
    def num_live(self) -> int:
        return 0 if self.scheduler is None else self.scheduler.num_live

    @property
    def is_busy(self) -> bool:
        """Whether a request is live or has just moved elsewhere, a block has to be sealed, or one is kept for another
        replica."""
        core = self.scheduler
        return bool(self._num_leaving or (core and (core.num_live or core.reservations[Kind.LEASE] or core.is_sealing)))

    @property
    def has_pins(self) -> bool:
        """Whether a prefix is pinned."""
        return self.scheduler is not None and bool(self.scheduler.reservations[Kind.PIN])

    def wake_after(self, seconds: float) -> None:
        """Wakes the step loop at that time: the core checks times only when it plans a step."""
        asyncio.get_running_loop().call_later(seconds + _AFTER_TIMER_S, self.wake.set)

    # Calls of gateways

    def submit(self, request: Request, trace: TraceContext | None = None) -> None:
        """Queues a request. Raises QuireError if the core refuses it.

        Args:
            trace: The gateway's span of the request; None if it does not trace the request.
        """
        self._spans.submit(request, trace, self._submit)
        self._on_change()
        self.wake.set()

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
            self._record_abort(group)
        self._spans.aborted(key)
        return had_one

    def abort_sequence(self, key: RequestKey, index: int) -> None:
        """Ends one sequence of a request, and the request with its last one."""
        group = self._group(key)
        if self.scheduler is not None and self.scheduler.abort_sequence(key, index):
            self._record_abort(group if self._group(key) is None else None)
        self._spans.sequence_aborted(key)

    def hand_over(self, key: RequestKey) -> KvSource | None:
        """Ends a request here, so that it continues at another replica after the tokens that were delivered. Returns
        the source of its blocks, which is empty if they cannot be fetched. Returns None and changes nothing if the
        request cannot continue elsewhere."""
        if self.scheduler is None:
            return None
        lease = Lease(entropy.random_bytes(_LEASE_BYTES))
        sealed = self.scheduler.move_away(key, lease, clock.monotonic(), LEASE_S)
        if sealed is None:
            return None
        self._spans.aborted(key)
        self._num_leaving += 1
        asyncio.get_running_loop().call_later(_RETURN_S, self._stop_waiting_for_return)
        source = KvSource()
        if sealed:
            if self.is_attached and self.kv_source.kv_namespace:
                source = replace(self.kv_source, lease=lease)
                self.unsent_offers.append(offer_message(lease, sealed))
                self.wake_after(LEASE_S)
            else:
                # No worker can send the blocks: the lease ends.
                self.scheduler.renew_lease(lease, clock.monotonic(), None)
        self._record_ended(1)
        self.wake.set()
        return source

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

    def forget_cached(self) -> int:
        """Forgets the content of cached blocks without a holder, and notifies watchers of the cache. Returns the number
        of these blocks."""
        assert self.scheduler is not None, "no worker was attached yet"
        num_forgotten = self.scheduler.forget_cached()
        self.cache.report_changes()
        return num_forgotten

    def _group(self, key: RequestKey) -> SequenceGroup | None:
        return None if self.scheduler is None else self.scheduler.group(key)

    def _record_abort(self, group: SequenceGroup | None) -> None:
        """Counts a request that a caller ended, and wakes the step loop, since rows or blocks are free now. `group` is
        None if the request still has other sequences."""
        ended = None if group is None or group.request.is_offer else group
        if ended is not None:
            self.metrics.aborted(ended, clock.monotonic())
        self._record_ended(0 if ended is None else 1)
        self.wake.set()

    def _record_ended(self, num_requests: int) -> None:
        self.retry.ended(num_requests, clock.monotonic())
        self._on_change()

    def _stop_waiting_for_return(self) -> None:
        self._num_leaving -= 1
        self._on_change()

    def _on_pins(self) -> None:
        self._on_change()
        self.wake.set()

    # Events

    def emit(self, step_id: int, events: dict[ClientId, ClientEvents]) -> None:
        """Hands out events of requests and pins."""
        if PIN_CLIENT in events:
            self.pins.wake_waiters()
            self._on_change()
        if (batch := events.get(GATEWAYS)) is not None:
            self._requests.deliver(step_id, batch)
            self._spans.delivered(batch)
            self.metrics.delivered(batch)
            if self._watchers.are_any:
                self._watchers.delivered(batch)
            if num_ended := len(batch.completed) + len(batch.failed):
                self._record_ended(num_ended)

    # Workers come and go

    async def attach(self, timeout_s: float) -> Workers:
        """Attaches the workers under a new epoch, and adapts the core to them before anything runs. Raises
        WorkerLostError."""
        self.epoch += 1
        link = await attach_workers(self.workers, self.epoch, timeout_s, self._tls)
        info, before = link.info, self.info
        try:
            config = core_config(self._settings, info)
        except ValueError as error:
            await link.close()
            raise WorkerRefusedError(f"no scheduler can use the pool of worker {link.address}: {error}") from error
        if self.scheduler is None:
            self.scheduler = Scheduler(config) if self.recorder is None else self.recorder.make_scheduler(config)
            self.cache.follow(self.scheduler)
        else:
            if before is not None and (changes := info.model_changes(before)):
                self._fail_all(self.scheduler, ", ".join(changes))
                if not info.has_tokenizer_of(before):
                    self._requests.forget_outputs()
            # Workers measure `fixed_tokens` at each start, and it differs a little: that requires no new pool.
            before_start = self.scheduler.config
            if replace(config, fixed_tokens=before_start.fixed_tokens) != before_start:
                _logger.warning("the worker came back with another geometry: %s", config)
                failures = self.scheduler.refit(config, clock.monotonic())
                self.pins.wake_waiters()
                self.emit(0, {GATEWAYS: ClientEvents(failed=failures)})
        failpoint("scheduler.attach.before_inventory")
        self.scheduler.restore_sealed(link.sealed)
        self.cache.report_changes()
        self.judge_loss(self.scheduler, was_alive=info.is_same_worker(before) and not self.was_faulty)
        self.info, self.kv_source = info, link.kv_source
        self.unsent_offers.clear()
        self.version += not info.is_like(before)
        return link

    async def release_memory(self, timeout_s: float, *, discard_weights: bool) -> None:
        """Makes the detached workers release the memory of their pools, and of their weights with `discard_weights`.
        Raises QuireError."""
        self.epoch += 1
        await release_memory(self.workers, self.epoch, timeout_s, self._tls, discard_weights=discard_weights)

    def record_loss(self, error: WorkerLostError) -> None:
        """The worker refused a step, or was lost for an unknown reason: the request at fault fails once it is known."""
        assert self.scheduler is not None
        self.metrics.lost_worker()
        self.was_faulty = isinstance(error, WorkerFaultyError)
        if error.refusal is not None:
            self._fail_at_fault(self.scheduler.refuse_in_flight(error.refusal))
        elif error.is_unexplained:
            self.scheduler.lose_in_flight(error.detail)

    def void_steps(self) -> None:
        """The workers are detached, so steps in flight have no result: their requests wait again, and pins that held
        blocks are computed again."""
        if self.scheduler is not None:
            self.scheduler.void_in_flight(clock.monotonic())
            self.cache.report_changes()
            self._on_change()

    def judge_loss(self, scheduler: Scheduler, *, was_alive: bool) -> None:
        """If the worker was lost, decides which of the requests that ran then are at fault or have to be tried."""
        trials_were_on = scheduler.trials.are_on
        self._fail_at_fault(scheduler.judge_loss(was_alive=was_alive))
        if scheduler.trials.are_on and not trials_were_on:
            _logger.warning(
                "the worker is lost again and again; the requests that ran then are tried one by one or in cohorts"
            )

    def _fail_at_fault(self, events: dict[ClientId, ClientEvents]) -> None:
        for failure in itertools.chain.from_iterable(batch.failed for batch in events.values()):
            owned = self._requests.get(failure.key.handle)
            extra = None if owned is None else {REQUEST_ID: owned.request_id}
            _logger.warning("a request caused worker losses and fails: %s", failure.message, extra=extra)
            self.metrics.found_at_fault(failure)
        self.emit(0, events)

    def _fail_all(self, scheduler: Scheduler, changes: str) -> None:
        """The worker came back with another model: all requests fail, and all pins end. Gateways whose tokenizer still
        fits learn the new model when they connect again."""
        for pin in list(scheduler.pins):
            scheduler.unpin(pin.tenant, pin.pin_id)
        self.pins.wake_waiters()
        keys = [group.request.key for group in scheduler.groups()]
        found = f"the worker came back with another model (before and now: {changes})"
        _logger.warning("%s; %d live requests fail", found, len(keys))
        message = f"{found}; this request began with the one before and cannot go on: send it again"
        for key in keys:
            scheduler.abort(key)
        failures = [RequestFailure(key, MODEL_CHANGED, message, self.epoch) for key in keys]
        self.emit(0, {GATEWAYS: ClientEvents(failed=failures)})


def core_config(settings: SchedulerSettings, info: ReplicaInfo) -> SchedulerConfig:
    """The core's configuration: the workers' pool, and of each limit the lower of ours and the workers'."""
    max_num_batched_tokens = min(settings.max_num_batched_tokens, info.max_num_batched_tokens)
    num_further, on_cpu = 2 if info.state_blocks else 0, info.device == "cpu"
    return SchedulerConfig(
        **{name: getattr(settings, name) for name in _OF_SETTINGS},
        **{name: getattr(info, name) for name in _OF_WORKERS},
        num_blocks=info.num_gpu_blocks,
        # Each running sequence takes at least one token of a step, and a prompt goes on by three if layers keep states.
        max_num_seqs=min(settings.max_num_seqs, info.max_num_rows, max(max_num_batched_tokens - num_further, 1)),
        max_num_batched_tokens=max_num_batched_tokens,
        max_mixed_prefill_tokens=settings.max_mixed_prefill_tokens or (_MAX_MIXED_ON_CPU if on_cpu else None),
        # On a CPU the pool is in the same memory: host blocks would be copies, and no additional room.
        caches_on_host=not on_cpu,
        policy=PolicyKind(settings.policy),
        preemption_mode=PreemptionMode(settings.preemption_mode),
    )
