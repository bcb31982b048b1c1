"""The entry point of all front ends: runs, resumes and cancels requests, one or several per call."""

import asyncio
from collections import Counter, abc
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TypeVar

from gateway.auth.caller import current_caller
from gateway.auth.quota import Refund
from gateway.metrics import ModelMetrics
from gateway.replicas.events import Chunk, Completed, Event, Finished, GeneratedSequence, Usage, Welcome
from gateway.replicas.ledger import Ledger
from gateway.replicas.live import CallModel, LiveRequest
from gateway.replicas.replica_set import Replicas
from gateway.replicas.scheduler_calls import no_such_request
from gateway.request.adapter_names import Adapters
from gateway.request.answer_memory import (
    STREAMED,
    AnswerForm,
    AnswerMemory,
    CallMemory,
    check_prompt_logprobs,
    num_prompt_logprobs,
)
from gateway.request.durable import ClientOffset, DurableReads
from gateway.request.limits import Limits, limits_of
from gateway.request.parameters import CallParameters, LastParameters
from gateway.request.prepare import continue_from, prepare
from gateway.request.served_model import ServedModel
from gateway.request.spans import RequestSpan
from gateway.request.validation import check_call
from gateway.settings import GatewaySettings
from gateway.turns import Turns
from gateway.types import ChatPrompt, ModelKind, RequestOptions
from quire.rpc.errors import Cancelled, QuireError, ResourceExhausted, Unavailable, Unimplemented
from quire.runtime import entropy
from quire.runtime.logs import set_request_id
from quire.tracing import Tracer

REFUSAL_S = 0.5
"""A scheduler that refuses a request does so within this time."""

Result = tuple[list[GeneratedSequence], Usage]
Answer = TypeVar("Answer")
# An answer with this many log probabilities is made in a thread, because it would delay other calls.
_LARGE = 10_000
# The log probabilities that take as long as one sequence, and the tokens that take as long as one log probability.
_SIZE_OF_A_SEQUENCE = 10
_TOKENS_OF_A_LOGPROB = 16
# After this many requests have ended, other calls get a turn.
_ENDED_AT_ONCE = 16
MAX_PREPARED = 4096
"""The maximum number of requests that calls with several prompts prepare at once. A scheduler's queue bounds submitted
requests, but a call submits none before all are valid."""
_RETRY_AFTER_MS = 1000
_PIN_TIMEOUT_S = 10.0


class Preparations:
    """Counts the requests that calls with several prompts prepare, by tenant."""

    def __init__(self) -> None:
        self._num_requests: Counter[str] = Counter()

    @contextmanager
    def counted(self, tenant: str, num_requests: int) -> abc.Generator[None]:
        """Counts the requests of a call during the context. Each tenant may always have one call.

        Raises:
            ResourceExhausted: too many are prepared already, in all or by this tenant, which may have half of them.
        """
        own, total = self._num_requests[tenant], self._num_requests.total()
        if own and (own + num_requests > MAX_PREPARED // 2 or total + num_requests > MAX_PREPARED):
            raise ResourceExhausted(
                f"{own:,} prompts of this tenant's calls are prepared, and {total:,} of all; {num_requests:,} more "
                f"would exceed {MAX_PREPARED // 2:,} of one tenant or {MAX_PREPARED:,} of all; try again, and send "
                "fewer at once",
                reason="WORK_QUEUE_FULL",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._num_requests[tenant] += num_requests
        try:
            yield
        finally:
            self._num_requests[tenant] -= num_requests
            if not self._num_requests[tenant]:
                del self._num_requests[tenant]


class SharedBounds:
    """Bounds on the requests of all models of a gateway together."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.preparations = Preparations()
        self.answer_memory = AnswerMemory(
            per_call=settings.max_answer_bytes,
            per_key=settings.max_key_answer_bytes,
            total=settings.max_total_answer_bytes,
        )


class Generator:
    """Validates, tokenizes, places and tracks the requests of one model."""

    def __init__(
        self,
        model: ServedModel,
        replicas: Replicas,
        ledger: Ledger,
        settings: GatewaySettings,
        metrics: ModelMetrics,
        tracer: Tracer | None,
        adapters: Adapters,
        shared: SharedBounds,
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.replicas = replicas
        self.is_draining = False
        self.preparations = shared.preparations
        self._refuses_all = False
        self._pinning: set[asyncio.Task[None]] = set()
        self.ledger = ledger
        self._settings = settings
        self.metrics = metrics
        self._tracer = tracer
        self._answer_memory = shared.answer_memory
        self.durable_reads = DurableReads(ledger, replicas, model.tokenizer)
        self.last_parameters = LastParameters()
        # The last limits, and the welcomes that they follow from.
        self._limits: tuple[list[Welcome], Limits] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a request would run at once, by what the gateway knows."""
        return self.replicas.is_ready and not self.is_draining and not self.model.constraints.is_starting

    @property
    def num_live(self) -> int:
        """Requests that run at this gateway."""
        return len(self.ledger)

    def holds(self, tenant: str, request_id: str) -> bool:
        """Whether a live request of the tenant has this id at this gateway."""
        return self.ledger.get(tenant, request_id) is not None

    def refuse_all_calls(self) -> None:
        self._refuses_all = True

    @contextmanager
    def arriving(self) -> abc.Generator[None]:
        """Admits a call; a drain waits for the end of the context.

        Raises:
            Unavailable: this gateway drains. A gateway that hands over its ports raises only after
                `refuse_all_calls`: until then the last calls arrive over connections from before.
        """
        if self._refuses_all or (self.is_draining and not self._settings.hand_over):
            raise Unavailable("this gateway is about to stop; try another one", reason="DRAINING")
        with self.ledger.arriving():
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
        if self._limits is None or self._limits[0] != welcomes:
            longest, kind = self.model.tokenizer.longest_token_bytes, self.model.kind
            self._limits = welcomes, limits_of(self._settings, welcomes, longest, kind)
        return self._limits[1]

    @asynccontextmanager
    async def run(self, options: RequestOptions, *, memory: CallMemory) -> AsyncGenerator[LiveRequest]:
        """Runs a request during the context. Leaving the context earlier aborts it, unless it is durable.

        Raises:
            QuireError: the request is refused; nothing was submitted.
        """
        async with self.admitted(options, CallParameters(self.last_parameters), memory=memory) as live:
            self.start(live)
            yield live

    @asynccontextmanager
    async def admitted(
        self, options: RequestOptions, call: CallParameters, *, memory: CallMemory
    ) -> AsyncGenerator[LiveRequest]:
        """A request that is valid and counted in the limits of its key; `start` submits it. Leaving the context aborts
        it, unless it is durable and was started. Requests of one call share `call` and `memory`.

        Raises:
            QuireError: the request is refused.
        """
        is_chat, is_text = isinstance(options.prompt, ChatPrompt), options.kind is ModelKind.TEXT
        operation = "chat" if is_chat else "text_completion" if is_text else "embeddings"
        with RequestSpan(self._tracer, self.model.name, operation) as span, ExitStack() as stack:
            caller = current_caller()
            with self.arriving():
                caller.account.check()
                limits = await self.limits()
                turns = Turns()
                call.check(options, limits, self.adapters.visible(caller, options.model))
                self.check_kind(options)
                adapter = self.adapters.resolve(options.model)
                await turns.pause()
                priority = caller.priority_of(options.priority, options.priority_sign)
                request_id = self._request_id(options, caller.tenant)
                # Counted before it is tokenized: the key's requests per minute limit that work too.
                use = stack.enter_context(caller.account.admitted())
                request = await prepare(
                    options,
                    call,
                    self.model,
                    limits,
                    request_id=request_id,
                    tenant=caller.tenant,
                    priority=priority,
                    trace=span.context,
                    adapter=adapter,
                )
                use.refund = lambda error: Refund.PROMPT
                set_request_id(request.request_id)
                asked_max_tokens = None if limits.clamps(options) else options.asked("stopping.max_tokens")
                memory.expect(request, asked_max_tokens)
                caller.account.charge_prompt(use, len(request.prompt_token_ids))
                live = self.ledger.open(request, self.model.tokenizer)
                live.is_prepared = False
                use.generated, use.refund = (lambda: live.num_computed_tokens), partial(_refund, live)
                memory.count(live)
            span.opened(live)
            try:
                with self.metrics.track(live, operation), self.durable_reads.read(caller.account, use, live):
                    if options.continue_from:
                        await continue_from(live, options.continue_from)
                    yield live
            finally:
                self._detach(live)
                if options.retain_ms is not None and live.is_completed and not options.cache_salt:
                    self._retain(live, options.retain_ms)

    def check_kind(self, options: RequestOptions) -> None:
        """Raises Unimplemented if the model gives something else."""
        if options.kind is not self.model.kind:
            raise Unimplemented(
                f'model "{self.model.name}" {self.model.kind.value}; send this to a server with a model that '
                f"{options.kind.value}",
                reason="WRONG_KIND_OF_MODEL",
            )

    def _retain(self, live: LiveRequest, lifetime_ms: int) -> None:
        """Pins prompt and first answer at the replica that has their blocks. A hint: nothing happens if the key may
        not pin, or the replica refuses it."""

        async def pin() -> None:
            request = live.request
            token_ids = [*request.prompt_token_ids.tolist(), *live.sequences[0].token_ids]
            with suppress(QuireError):
                await self.replicas.calls.pin(
                    *(request.tenant, token_ids, lifetime_ms),
                    timeout_s=_PIN_TIMEOUT_S,
                    adapter=request.adapter,
                    replica=live.last_replica,
                )

        if current_caller().access.may_pin:
            task = asyncio.create_task(pin())
            self._pinning.add(task)
            task.add_done_callback(self._pinning.discard)

    def name_of(self, live: LiveRequest) -> str:
        """The name of the model that answers a request."""
        adapter = live.request.adapter
        return self.model.name if adapter is None else adapter.name

    def start(self, live: LiveRequest) -> None:
        """Submits an admitted request."""
        live.is_prepared = True
        if not live.is_over:
            self.replicas.placements.place(live)

    @asynccontextmanager
    async def resume(self, request_id: str, offsets: Sequence[ClientOffset]) -> AsyncGenerator[LiveRequest]:
        """Resumes a durable request of any gateway after the output that its client has. Leaving the context does not
        end it.

        Raises:
            NotFound: the caller's tenant has none with this id.
            AlreadyExists: another request with this id, which is not durable, runs at this gateway.
            InvalidArgument: an offset is beyond the output of the request.
        """
        caller = current_caller()
        set_request_id(request_id)
        with RequestSpan(self._tracer, self.model.name, "resume") as span, self.call_memory(STREAMED) as memory:
            with self.arriving():
                self.durable_reads.check_resumption(caller.account, caller.tenant, request_id)
                await self.limits()
                found = await self.durable_reads.find(caller.tenant, request_id, offsets, memory)
                # Checked again: a call that is refused must not take the request from its present reader.
                self.durable_reads.check_resumption(caller.account, caller.tenant, request_id)
                live = self.durable_reads.claim(found, memory)
            span.opened(live)
            for offset in offsets:
                live.sequences[offset.sequence_index].skip(offset.num_tokens, offset.num_characters)
            try:
                counted = self.metrics.track_resumed(live, found.num_generated_tokens)
                with self.durable_reads.resumed(caller.account, live, found.num_had), counted:
                    found.go_on(live)
                    yield live
            finally:
                self._detach(live)

    def _detach(self, live: LiveRequest) -> None:
        # Its events are no longer read, and the writer knows it, too.
        live.direct = None
        if not self.durable_reads.reads_without_client(live):
            self.replicas.placements.detach(live)
            self.ledger.close(live)

    async def cancel(self, request_id: str) -> None:
        """Ends a running request of the caller's tenant; its own call ends with CANCELLED.

        Raises:
            NotFound: the tenant has none with this id. Requests of other tenants do not count.
        """
        tenant = current_caller().tenant
        live = self.ledger.get(tenant, request_id)
        if live is not None and not live.is_over:
            live.fail(Cancelled(f'request "{request_id}" was cancelled', reason="CANCELLED_BY_ID"))
            self.replicas.placements.abort(live)
            if live.request.durable:
                await self.replicas.calls.cancel_copies(tenant, request_id)
        elif live is None or live.request.durable:
            await self.replicas.calls.cancel(tenant, request_id)
            self.durable_reads.drop_completed(tenant, request_id)
        else:
            raise no_such_request(request_id)

    def _request_id(self, options: RequestOptions, tenant: str) -> str:
        """The id of a request: the caller's, or a new one. Raises AlreadyExists if another request has it."""
        if options.request_id is None:
            return f"{self._settings.request_id_prefix}{entropy.random_hex(16)}"
        self.durable_reads.drop_completed(tenant, options.request_id)
        self.ledger.check_unused(tenant, options.request_id)
        return options.request_id


@asynccontextmanager
async def running(
    generator: Generator,
    requests: Sequence[RequestOptions],
    refusal: Callable[[int, QuireError], Exception],
    memory: CallMemory,
    *,
    shows_prompt_by_sequence: bool = False,
) -> AsyncGenerator[list[LiveRequest]]:
    """The running requests, in order. Leaving the context aborts requests that still run. `memory` is the call's.

    All are checked, tokenized and charged before the first one is submitted. If one of them is refused, none runs, and
    the context raises the error that `refusal` makes of its position and its error.
    Log probabilities of prompts count as often as the answer has them: once, or with each sequence.
    """
    caller, preparing = current_caller(), ExitStack()
    try:
        check_call(requests[0], len(requests), await generator.limits())
        caller.account.check_call(len(requests))
        if len(requests) > 1:
            preparing.enter_context(generator.preparations.counted(caller.tenant, len(requests)))
    except QuireError as error:
        raise refusal(0, error) from error
    async with AsyncExitStack() as stack:
        stack.enter_context(preparing)
        live: list[LiveRequest] = []
        num_logprobs = 0
        parameters, turns = CallParameters(generator.last_parameters), Turns()
        for position, options in enumerate(requests):
            try:
                if position and position % _ENDED_AT_ONCE == 0:
                    stack.push_async_callback(asyncio.sleep, 0)
                live.append(await stack.enter_async_context(generator.admitted(options, parameters, memory=memory)))
                await turns.pause()
                request = live[-1].request
                copies = request.sampling.n if shows_prompt_by_sequence else 1
                num_logprobs += num_prompt_logprobs(request) * copies
                check_prompt_logprobs(num_logprobs)
            except QuireError as error:
                # Ends the earlier requests with the original error, not with the front end's version of it.
                await stack.__aexit__(type(error), error, error.__traceback__)
                raise refusal(position, error) from error
        if len(live) > 1:
            call = CallModel(live, generator.replicas.placements.place_anew)
            stack.callback(call.close)
            for each in live:
                each.call = call
        for each in live:
            generator.start(each)
            await turns.pause()
        preparing.close()
        yield live


def _refund(live: LiveRequest, error: QuireError) -> Refund:
    """The refund of a refused request. A request that ended with another one of its call may have been computed."""
    if live.may_have_run:
        return Refund.NOTHING
    return Refund.ALL if live.has_failed else Refund.PROMPT


async def answer(live: Sequence[LiveRequest], make: Callable[[Sequence[Result]], Answer]) -> Answer:
    """The value of `make` for all results; a large answer is made in a thread, so that other calls continue.

    Raises:
        QuireError: one of them failed; the others are not waited for.
    """
    results = await results_of(live)
    num_logprobs = 0
    for each, (sequences, _) in zip(live, results, strict=True):
        num_logprobs += _num_prompt_logprobs(each)
        for sequence in sequences:
            num_logprobs += _num_logprobs(each, sequence)
            num_logprobs += _SIZE_OF_A_SEQUENCE + len(sequence.token_ids) // _TOKENS_OF_A_LOGPROB
    return await _made(num_logprobs, partial(make, results))


async def answer_event(live: LiveRequest, event: Event, make: Callable[[], Answer]) -> Answer:
    """The value of `make`, which makes an answer of an event of a stream; in a thread if it is large.

    Log probabilities of the prompt are part of the first chunk of a sequence, or of the end.
    """
    num_logprobs = 0 if isinstance(event, Finished) else _num_prompt_logprobs(live)
    if isinstance(event, Chunk):
        num_logprobs = _num_logprobs(live, event) + (0 if event.offset else num_logprobs)
    # Called for each event: `_made` would be one more coroutine.
    return await asyncio.to_thread(make) if num_logprobs > _LARGE else make()


async def _made(num_logprobs: int, make: Callable[[], Answer]) -> Answer:
    return await asyncio.to_thread(make) if num_logprobs > _LARGE else make()


def _num_prompt_logprobs(live: LiveRequest) -> int:
    num_positions = len(live.prompt_logprobs)
    return num_positions and (1 + (live.request.prompt_logprobs or 0)) * num_positions


def _num_logprobs(live: LiveRequest, part: GeneratedSequence | Chunk) -> int:
    num_positions = len(part.logprobs)
    return num_positions and (1 + (live.request.logprobs or 0)) * num_positions


async def results_of(live: Sequence[LiveRequest]) -> list[Result]:
    """Waits for the results of all.

    Raises:
        QuireError: one of them failed; the others are not waited for.
    """
    if len(live) == 1:
        return [await live[0].result()]
    tasks = [asyncio.create_task(each.result()) for each in live]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def events(live: Sequence[LiveRequest]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all requests, each with the position of its request, until all are completed.

    While the reader is busy, at most one event waits here; later tokens join the requests' next chunks.

    Raises:
        QuireError: one of them failed.
    """
    if len(live) == 1:
        async for event in live[0].events():
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(1)

    async def pump(position: int) -> None:
        try:
            async for event in live[position].events():
                await queue.put((position, event))
        except Exception as error:
            await queue.put((position, error))

    pumps = [asyncio.create_task(pump(position)) for position in range(len(live))]
    num_running = len(live)
    try:
        while num_running:
            position, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            num_running -= isinstance(event, Completed)
            yield position, event
    finally:
        for task in pumps:
            task.cancel()
