"""The entry of all front ends: runs, resumes and cancels requests."""

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext

from gateway.auth.caller import Caller, current_caller
from gateway.auth.quota import Use
from gateway.metrics import GatewayMetrics, RequestStatistics
from gateway.model import ServedModel
from gateway.replicas.calls import no_such_request
from gateway.replicas.ledger import Ledger
from gateway.replicas.live import LiveRequest
from gateway.replicas.pool import Replicas
from gateway.request.answer_memory import (
    STREAMED,
    AnswerForm,
    AnswerLimits,
    AnswerMemory,
    CallMemory,
)
from gateway.request.durable import ClientOffset, DurableReads
from gateway.request.limits import Limits, limits_of
from gateway.request.prepare import CallParameters, continue_from, prepare
from gateway.request.spans import RequestSpans
from gateway.request.types import GenerationRequest, RequestOptions
from gateway.settings import GatewaySettings
from gateway.turns import Turns
from quire.rpc.errors import Cancelled, Unavailable
from quire.tracing import TraceContext, Tracer


class Generator:
    """Validates, tokenizes, places and tracks requests."""

    def __init__(
        self,
        model: ServedModel,
        replicas: Replicas,
        ledger: Ledger,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        tracer: Tracer | None = None,
    ) -> None:
        self.model = model
        self.replicas = replicas
        self.is_draining = False
        self._takes_nothing = False
        self._ledger = ledger
        self._settings = settings
        self._metrics = metrics
        self._spans = RequestSpans(tracer, model.name)
        self._answer_memory = AnswerMemory(
            AnswerLimits(settings.max_answer_bytes, settings.max_key_answer_bytes, settings.max_total_answer_bytes)
        )
        self.durable_reads = DurableReads(ledger, replicas, model.tokenizer)

    @property
    def is_ready(self) -> bool:
        """Whether a request would run at once, as far as the gateway knows."""
        return self.replicas.is_ready and not self.is_draining

    @property
    def statistics(self) -> RequestStatistics:
        """Sums over all requests of this gateway that are over."""
        return self._metrics.statistics

    def take_nothing_more(self) -> None:
        """From now on every call is refused."""
        self._takes_nothing = True

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Lets a call in; a drain waits while the context runs.

        Raises:
            Unavailable: this gateway drains. If it hands over, not before `take_nothing_more`: until then the last
                calls come over connections from before its ports were closed.
        """
        if self._takes_nothing or (self.is_draining and not self._settings.hand_over):
            raise Unavailable("this gateway is about to stop; try another one", reason="DRAINING")
        with self._ledger.arriving():
            yield

    def call_memory(self, form: AnswerForm) -> AbstractContextManager[CallMemory]:
        """The memory of the answer to the current call, until the context ends."""
        return self._answer_memory.call(current_caller().account, form)

    async def limits(self, patience_s: float | None = None) -> Limits:
        """The current limits. If no scheduler was ever reached, waits for the first one, at most `--connect-timeout`.

        Raises:
            Unavailable: no scheduler was reached in that time.
        """
        longest_s = self._settings.connect_timeout
        welcomes = await self.replicas.wait_until_known(longest_s if patience_s is None else min(patience_s, longest_s))
        return limits_of(self._settings, welcomes, self.model.tokenizer.longest_token_bytes)

    @asynccontextmanager
    async def run(
        self, options: RequestOptions, call: CallParameters | None = None, *, memory: CallMemory
    ) -> AsyncIterator[LiveRequest]:
        """A running request. Leaving the context before its end aborts it, unless it is durable. Requests of one call
        share `call` and `memory`.

        Raises:
            QuireError: it is refused; nothing was submitted.
        """
        with self._spans.generation(options) as span:
            caller = current_caller()
            with self.arriving():
                caller.account.check()
                request = await self._prepare(options, caller, span.context, call or CallParameters())
                memory.expect(request, options.asked("stopping.max_tokens"))
                live = self._ledger.open(request, self.model.tokenizer)
                memory.count(live)
            span.opened(live)
            try:
                admitted = caller.account.admitted(len(live.request.prompt_token_ids), lambda: live.num_computed_tokens)
                with admitted as use, self._metrics.track(live), self._durable_read(caller, use, live):
                    if options.continue_from:
                        await continue_from(live, options.continue_from)
                    if not live.is_over:
                        self.replicas.place(live)
                    yield live
            finally:
                self._leave(live)

    @asynccontextmanager
    async def resume(self, request_id: str, offsets: Sequence[ClientOffset]) -> AsyncIterator[LiveRequest]:
        """A durable request from any gateway, without what its client has. Leaving the context does not end it.

        Raises:
            NotFound: the caller's tenant has none of that id.
            AlreadyExists: another request of that id, which is not durable, runs at this gateway.
            InvalidArgument: an offset names what the request does not have.
        """
        caller = current_caller()
        with self._spans.resumption() as span, self.call_memory(STREAMED) as memory:
            with self.arriving():
                self.durable_reads.check_resumption(caller.account, caller.tenant, request_id)
                await self.limits()
                found = await self.durable_reads.find(caller.tenant, request_id, offsets, memory)
                # Again: its present reader must not lose it to a call that is refused.
                self.durable_reads.check_resumption(caller.account, caller.tenant, request_id)
                live = self.durable_reads.take(found, memory)
            span.opened(live)
            for offset in offsets:
                live.sequences[offset.sequence_index].skip(offset.num_tokens, offset.num_characters)
            try:
                counted = self._metrics.track_resumed(live, found.num_generated_tokens)
                with self.durable_reads.resumed(caller.account, live, found.num_had), counted:
                    found.go_on(live)
                    yield live
            finally:
                self._leave(live)

    def _leave(self, live: LiveRequest) -> None:
        if not self.durable_reads.keeps(live):
            self.replicas.detach(live)
            self._ledger.close(live)

    def _durable_read(self, caller: Caller, use: Use, live: LiveRequest) -> AbstractContextManager[None]:
        return self.durable_reads.read(caller.account, use, live) if live.request.durable else nullcontext()

    async def cancel(self, request_id: str) -> None:
        """Ends a running request of the caller's tenant; its own call ends with CANCELLED.

        Raises:
            NotFound: the tenant has none of that id; another tenant's makes no difference.
        """
        tenant = current_caller().tenant
        live = self._ledger.get(tenant, request_id)
        if live is not None and not live.is_over:
            live.fail(Cancelled(f'request "{request_id}" was cancelled', reason="CANCELLED_BY_ID"))
            self.replicas.release(live)
            if live.request.durable:
                await self.replicas.calls.cancel_copies(tenant, request_id)
        elif live is None or live.request.durable:
            await self.replicas.calls.cancel(tenant, request_id)
            self.durable_reads.drop_completed(tenant, request_id)
        else:
            raise no_such_request(request_id)

    async def _prepare(
        self, options: RequestOptions, caller: Caller, trace: TraceContext | None, call: CallParameters
    ) -> GenerationRequest:
        turns = Turns()
        limits = await self.limits()
        call.check(options, limits, caller.visible(self.model.name))
        await turns.pause()
        priority = caller.priority_of(options.priority, options.priority_sign)
        if options.request_id is not None:
            self.durable_reads.drop_completed(caller.tenant, options.request_id)
            self._ledger.check_unused(caller.tenant, options.request_id)
        return await prepare(
            options,
            call,
            self.model,
            limits,
            request_id=options.request_id or f"{self._settings.request_id_prefix}{secrets.token_hex(16)}",
            tenant=caller.tenant,
            priority=priority,
            trace=trace,
        )
