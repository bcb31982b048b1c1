"""Drives the core: keeps the worker's pipeline of steps full and hands out what comes back."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from quire.rpc.tls import TlsIdentity
from scheduler_svc.core.config import PolicyKind, PreemptionMode, SchedulerConfig
from scheduler_svc.core.events import ClientEvents, RequestFailure
from scheduler_svc.core.pins import PIN_CLIENT, Pin
from scheduler_svc.core.request import ClientId, Request, RequestKey
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceStatus
from scheduler_svc.service.gateway_convert import MODEL_CHANGED
from scheduler_svc.service.history import SequenceProgress
from scheduler_svc.service.metrics import SchedulerMetrics
from scheduler_svc.service.pinning import Pinning
from scheduler_svc.service.prompt_logprobs import PromptLogprobs, PromptLogprobsRouter
from scheduler_svc.service.refusals import RetryAdvisor
from scheduler_svc.service.replica import ReplicaInfo
from scheduler_svc.service.step_refusal import is_unexplained, refusal_of
from scheduler_svc.service.step_trace import StepTrace
from scheduler_svc.service.worker_group import StepLink, attach_workers
from scheduler_svc.service.worker_link import InvalidAnswerError, WorkerHangsError, WorkerLostError, WorkerRefusedError
from scheduler_svc.settings import SchedulerSettings

_logger = logging.getLogger(__name__)
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.05, 1.0
# A worker that starts is awaited by nobody but this scheduler.
_LAST_ATTACH_BACKOFF_S = 0.2
_ATTACH_TIMEOUT_S = 5.0
_SHORTEST_TIMER_S = 0.001
_LAST_WORDS_S = 0.1

Deliver = Callable[[int, dict[ClientId, ClientEvents]], None]
"""Takes the id of a step and what it meant for each client."""

DeliverPromptLogprobs = Callable[[dict[ClientId, list[PromptLogprobs]]], None]
"""Takes what a step said of prompts, before what it meant for each client."""


class StepLoop:
    """Owns the core and the worker. Everything here runs on one event loop, so the core needs no lock.

    `epoch` rises with every attachment, `version` where the worker that is attached is another one than before by its
    pool, its model or its limits. `scheduler` and `replica` are None until a worker was attached once.
    `report_attached` is told whenever the worker comes or goes; `forget_outputs` drops outputs of requests that are
    over, since the tokenizer is another one. `tls` is who it is towards workers.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        metrics: SchedulerMetrics,
        deliver: Deliver,
        deliver_prompt_logprobs: DeliverPromptLogprobs,
        report_attached: Callable[[bool], None],
        forget_outputs: Callable[[], None],
        tls: TlsIdentity | None = None,
    ) -> None:
        self.scheduler: Scheduler | None = None
        self.replica: ReplicaInfo | None = None
        self.is_attached = False
        self.epoch = int(time.time() * 1e3)
        self.version = 0
        self.retry = RetryAdvisor()
        self.trace = StepTrace.open(settings.trace_steps)
        self._settings = settings
        self._tls = tls
        self._metrics = metrics
        self._deliver = deliver
        self._deliver_prompt_logprobs = deliver_prompt_logprobs
        self._prompt_logprobs = PromptLogprobsRouter()
        self._pinning = Pinning()
        self._pin_timer: asyncio.TimerHandle | None = None
        self._report_attached = report_attached
        self._forget_outputs = forget_outputs
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._sent_at: dict[int, float] = {}
        # When the worker that is attached answered last, or was attached.
        self._answered_at = time.monotonic()
        # Whether the worker that is attached has answered a step or sent a heartbeat.
        self._has_heard = False
        # Whether the worker that was lost last was one that lived, and hung or answered nonsense.
        self._was_faulty = False

    def submit(self, request: Request) -> None:
        """Queues a request. Raises the core's RefusedError."""
        assert self.scheduler is not None, "no worker was attached yet"
        self.scheduler.submit(request, time.monotonic())
        self._idle.clear()
        self._wake.set()

    def abort(self, key: RequestKey) -> bool:
        """Ends a request; its blocks are free at once. Returns whether there was one."""
        had_one = self.scheduler is not None and self.scheduler.abort(key)
        if had_one:
            self._note_aborted(1)
        return had_one

    def progress(self, key: RequestKey) -> list[SequenceProgress] | None:
        """How far the sequences of a live request are that are said to its reader; None where it is over."""
        group = None if self.scheduler is None else self.scheduler.group(key)
        if group is None:
            return None
        if group.request.selects:
            # Which ones these are is known in the end.
            return []
        return [
            SequenceProgress(each.index, each.num_output_tokens, each.status is SequenceStatus.FINISHED)
            for each in group.sequences
        ]

    def abort_sequence(self, key: RequestKey, index: int) -> None:
        """Ends one sequence of a request, and the request with its last one."""
        num_live = self.num_live()
        if self.scheduler is not None and self.scheduler.abort_sequence(key, index):
            self._note_aborted(num_live - self.num_live())

    async def pin(self, tenant: str, token_ids: list[int], time_to_live_s: float) -> Pin:
        """Pins a prefix and returns once its blocks are computed. Raises the core's RefusedError, or PinFailedError."""
        assert self.scheduler is not None, "no worker was attached yet"
        pin = self.scheduler.pin(tenant, token_ids, time.monotonic(), time_to_live_s)
        self._set_pin_timer()
        self._idle.clear()
        self._wake.set()
        self._note_idle()
        await self._pinning.wait(pin)
        return pin

    def unpin(self, tenant: str, pin_id: str) -> bool:
        """Lets go of a pin. Returns whether the tenant had it."""
        if self.scheduler is None or not self.scheduler.unpin(tenant, pin_id):
            return False
        self._pinning.settle(self.scheduler.pins)
        self._wake.set()
        self._note_idle()
        return True

    def _expire_pins(self) -> None:
        assert self.scheduler is not None
        self.scheduler.expire_pins(time.monotonic())
        self._pinning.settle(self.scheduler.pins)
        self._set_pin_timer()
        self._wake.set()
        self._note_idle()

    def _set_pin_timer(self) -> None:
        """Wakes up when the next pin ends; an idle scheduler plans no steps that would see to it. A timer may fire a
        little early, so it is set again for as long as there are pins."""
        if self._pin_timer is not None:
            self._pin_timer.cancel()
            self._pin_timer = None
        if self.scheduler is not None and (ends_at := self.scheduler.pins.next_end) is not None:
            delay_s = max(ends_at - time.monotonic(), _SHORTEST_TIMER_S)
            self._pin_timer = asyncio.get_running_loop().call_later(delay_s, self._expire_pins)

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """In order of rank."""
        return self._settings.workers

    async def wait_idle(self) -> None:
        """Returns once no request is live."""
        await self._idle.wait()

    def num_live(self) -> int:
        return 0 if self.scheduler is None else self.scheduler.num_live

    async def run(self) -> None:
        """Attaches the worker, drives it, and starts again whenever it is lost. Runs until it is cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            link = await self._attach()
            self._has_heard = False
            try:
                await self._drive(link)
            except WorkerLostError as error:
                _logger.warning("%s; its steps are void, running requests wait for it to come back", error)
                self._take_loss(error)
            if self.scheduler is not None:
                self.scheduler.void_in_flight(time.monotonic())
                if self.num_live():
                    # Pins that held their blocks are computed again.
                    self._idle.clear()
            # A worker that is lost before it answers anything may be lost again by the same step.
            if self._has_heard:
                backoff_s = _FIRST_BACKOFF_S
            if self._was_faulty or not self._has_heard:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    def _take_loss(self, error: WorkerLostError) -> None:
        """Where the worker refused a step, or was lost and did not say why, the request at fault fails once it is
        found."""
        assert self.scheduler is not None
        self._metrics.lost_worker()
        self._was_faulty = isinstance(error, (WorkerHangsError, InvalidAnswerError))
        refusal = refusal_of(error)
        if refusal is not None:
            self._fail_at_fault(self.scheduler.refuse_in_flight(refusal))
        elif is_unexplained(error):
            self.scheduler.lose_in_flight(str(error.__cause__) if isinstance(error, InvalidAnswerError) else None)

    def _judge_loss(self, scheduler: Scheduler, *, was_alive: bool) -> None:
        """Where the worker was lost before, what that says of the requests that ran."""
        trials_were_on = scheduler.trials.are_on
        self._fail_at_fault(scheduler.judge_loss(was_alive=was_alive))
        if scheduler.trials.are_on and not trials_were_on:
            _logger.warning(
                "the worker is lost again and again; the requests that ran then are tried alone or in cohorts"
            )

    def _fail_at_fault(self, events: dict[ClientId, ClientEvents]) -> None:
        for failure in itertools.chain.from_iterable(batch.failed for batch in events.values()):
            _logger.warning("a request is at fault and fails: %s", failure.message)
            self._metrics.found_at_fault(failure)
        self._hand_out(0, events, time.monotonic())

    async def _attach(self) -> StepLink:
        backoff_s = _FIRST_BACKOFF_S
        said = ""
        while True:
            self.epoch += 1
            try:
                link = await attach_workers(self.worker_addresses, self.epoch, _ATTACH_TIMEOUT_S, self._tls)
                self._take_over(link)
                return link
            except WorkerLostError as error:
                if str(error) != said:
                    said = str(error)
                    level = logging.WARNING if isinstance(error, WorkerRefusedError) else logging.INFO
                    _logger.log(level, "%s; trying again", said)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LAST_ATTACH_BACKOFF_S)

    def _take_over(self, link: StepLink) -> None:
        info = link.info
        config = self._config(info)
        if self.scheduler is None:
            self.scheduler = Scheduler(config)
        else:
            if self.replica is not None and (changes := info.model_changes(self.replica)):
                self._fail_for_model(self.scheduler, changes)
                if not info.has_tokenizer_of(self.replica):
                    self._forget_outputs()
            if config != self.scheduler.config:
                self._rebuild(config)
        self.scheduler.restore_sealed(link.sealed)
        self._judge_loss(self.scheduler, was_alive=info.is_same_worker(self.replica) and not self._was_faulty)
        self._take_info(info)
        self._sent_at.clear()
        self._answered_at = time.monotonic()
        self._prompt_logprobs.clear()
        self._set_attached(True)
        self._wake.set()
        _logger.info(
            "attached worker generation %d as epoch %d: %s, %d blocks of %d tokens, %d of them cached",
            info.worker_generation,
            self.epoch,
            info.architecture,
            info.num_gpu_blocks,
            info.block_size,
            self.scheduler.batch.blocks.pool.num_cached,
        )

    def _take_info(self, info: ReplicaInfo) -> None:
        if not info.is_like(self.replica):
            self.version += 1
        self.replica = info

    def _config(self, info: ReplicaInfo) -> SchedulerConfig:
        settings = self._settings
        max_num_batched_tokens = min(settings.max_num_batched_tokens, info.max_num_batched_tokens)
        return SchedulerConfig(
            num_blocks=info.num_gpu_blocks,
            block_size=info.block_size,
            # Each sequence has a token at the least in a step.
            max_num_seqs=min(settings.max_num_seqs, info.max_num_rows, max_num_batched_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=info.max_model_len,
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
            tenant_overflow=settings.tenant_overflow,
            watermark=settings.watermark,
            num_host_blocks=info.num_host_blocks,
            policy=PolicyKind(settings.policy),
            preemption_mode=PreemptionMode(settings.preemption_mode),
            pin_quota=settings.pin_quota,
            max_pinned=settings.max_pinned,
            max_prefill_share=settings.max_prefill_share,
        )

    def _fail_for_model(self, scheduler: Scheduler, changes: list[str]) -> None:
        """The worker came back with another model. Requests and pins of the one before are of no use: all of them end.
        Gateways whose tokenizer still fits learn what the model is now when they connect again."""
        message = (
            f"the worker came back with another model (before and now: {', '.join(changes)}); this request began with "
            "the one before and cannot go on: send it again"
        )
        for pin in list(scheduler.pins):
            scheduler.unpin(pin.tenant, pin.pin_id)
        self._pinning.settle(scheduler.pins)
        _logger.warning(
            "the worker came back with another model (before and now: %s); %d live requests fail",
            ", ".join(changes),
            self.num_live(),
        )
        events: dict[ClientId, ClientEvents] = {}
        for key in [group.request.key for group in scheduler.groups()]:
            scheduler.abort(key)
            events.setdefault(key.client, ClientEvents()).failed.append(RequestFailure(key, MODEL_CHANGED, message))
        self._hand_out(0, events, time.monotonic())
        self._note_idle()

    def _rebuild(self, config: SchedulerConfig) -> None:
        """The worker came back with another pool: the live requests move over, in order of arrival."""
        assert self.scheduler is not None
        _logger.warning("the worker came back with another geometry: %s", config)
        old, self.scheduler = self.scheduler, Scheduler(config)
        for failure in self.scheduler.take_over(old, time.monotonic()):
            self._hand_out(0, {failure.key.client: ClientEvents(failed=[failure])}, time.monotonic())
        self._pinning.settle(self.scheduler.pins)
        self._note_idle()

    async def _drive(self, link: StepLink) -> None:
        """Sends steps and receives results until one of the two fails. Raises WorkerLostError."""
        receiving = asyncio.create_task(self._receive_results(link))
        halves = [receiving, asyncio.create_task(self._send_steps(link))]
        try:
            await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
            # A write to a stream that broke does not say why it broke; the next read does.
            await asyncio.wait([receiving], timeout=_LAST_WORDS_S)
        finally:
            self._set_attached(False)
            for half in halves:
                half.cancel()
            await link.close()
            outcomes = await asyncio.gather(*halves, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _send_steps(self, link: StepLink) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        depth = min(self._settings.max_steps_in_flight, link.info.max_steps_in_flight)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while len(scheduler.in_flight) < depth:
                started = time.monotonic()
                plan = scheduler.schedule(started)
                if plan is None:
                    break
                planned = time.monotonic()
                self._sent_at[plan.step_id] = started
                self._prompt_logprobs.planned(plan, scheduler.batch.rows)
                self._metrics.planned(plan, planned - started)
                await link.send(plan)
                self.trace.planned(plan.step_id, plan.num_tokens, started, planned)
                self.trace.sent(plan.step_id, planned, time.monotonic())

    async def _receive_results(self, link: StepLink) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        while True:
            answer = await link.receive()
            self._has_heard = True
            now = time.monotonic()
            if answer is None:
                self._check_progress(now, link)
                continue
            self._answered_at = now
            result = answer.result
            self._metrics.stepped(now - self._sent_at.pop(result.step_id, now))
            try:
                if scheduler.in_flight:
                    answer.check_rows(scheduler.in_flight[0])
                prompt_logprobs = self._prompt_logprobs.answered(result.step_id, answer.prompt_logprobs)
                events = scheduler.apply(result, now)
            except ValueError as error:
                raise InvalidAnswerError(f"worker {link.address}: {error}") from error
            self._wake.set()
            self.trace.answered(result.step_id, answer.worker_us, now)
            self.trace.applied(result.step_id, now, time.monotonic())
            self._deliver_prompt_logprobs(prompt_logprobs)
            self._hand_out(result.step_id, events, now)

    def _check_progress(self, now: float, link: StepLink) -> None:
        """A heartbeat came: the process lives, but its device may hang."""
        if not self._sent_at:
            return
        # A step that was sent before the last answer came has waited for it.
        seconds = now - max(min(self._sent_at.values()), self._answered_at)
        if seconds > self._settings.step_timeout:
            raise WorkerHangsError(f"worker {link.address} has not answered a step for {seconds:.1f} s")

    def _hand_out(self, step_id: int, events: dict[ClientId, ClientEvents], now: float) -> None:
        if events.pop(PIN_CLIENT, None) is not None:
            assert self.scheduler is not None
            self._pinning.settle(self.scheduler.pins)
            self._note_idle()
        if not events:
            return
        self._deliver(step_id, events)
        self._metrics.delivered(events)
        ended = sum(len(batch.completed) + len(batch.failed) for batch in events.values())
        if ended:
            self._note_ended(ended, now)

    def _note_aborted(self, count: int) -> None:
        """`count` requests were ended from outside, 0 where one still has other sequences; what they held is free."""
        self._metrics.aborted(count)
        self._note_ended(count, time.monotonic())
        self._wake.set()

    def _note_ended(self, count: int, now: float) -> None:
        self.retry.ended(count, now)
        self._note_idle()

    def _set_attached(self, attached: bool) -> None:
        self.is_attached = attached
        self._report_attached(attached)

    def _note_idle(self) -> None:
        if self.num_live() == 0:
            self._idle.set()
