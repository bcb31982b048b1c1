"""What both front ends call: a request from its options to its live entry."""

import dataclasses
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import numpy as np

from gateway.auth.caller import Caller, current_caller
from gateway.bad_words import bad_token_sequences
from gateway.ledger import Ledger
from gateway.limits import MAX_N, Limits
from gateway.live_request import LiveRequest
from gateway.metrics import GatewayMetrics
from gateway.model import ServedModel
from gateway.offsets import ClientOffset, check_offsets
from gateway.replicas import Replicas
from gateway.request import (
    BeamSearch,
    BeamSearchOptions,
    ChatPrompt,
    EarlyStopping,
    GenerationRequest,
    Prompt,
    RequestOptions,
    Sampling,
    SamplingOptions,
    Stopping,
    StoppingOptions,
    TextPrompt,
    TokenPrompt,
)
from gateway.request_spans import RequestSpans
from gateway.request_statistics import RequestStatistics
from gateway.requests_by_id_client import cancel_by_id, find_durable, no_such_request
from gateway.scheduler_events import Welcome
from gateway.settings import GatewaySettings
from gateway.validation import check_choice, check_request, resolve_max_tokens
from quire.rpc.errors import Aborted, Cancelled, Unavailable
from quire.tracing import TraceContext, Tracer

T = TypeVar("T")


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
        self._ledger = ledger
        self._settings = settings
        self._metrics = metrics
        self._spans = RequestSpans(tracer, model.name)

    @property
    def is_ready(self) -> bool:
        """Whether a request would run at once, as far as the gateway can know."""
        return self.replicas.is_ready and not self.is_draining

    @property
    def statistics(self) -> RequestStatistics:
        """Sums over all requests of this gateway that are over."""
        return self._metrics.statistics

    def check_accepting(self) -> None:
        """Raises Unavailable when this gateway drains, unless it hands over: what comes then, came by a connection from
        before its ports were closed, and is the last to do so."""
        if self.is_draining and not self._settings.hand_over:
            raise Unavailable("this gateway is about to stop; try another one", reason="DRAINING")

    async def limits(self) -> Limits:
        """Raises Unavailable when no scheduler was reached yet."""
        welcomes = await self.replicas.wait_until_known()
        return limits_of(self._settings, welcomes, self.model.tokenizer.longest_token_bytes)

    @asynccontextmanager
    async def run(self, options: RequestOptions) -> AsyncIterator[LiveRequest]:
        """A running request. Leaving the context before its end, by whatever way, aborts it.

        Raises:
            QuireError: it is refused; nothing was submitted.
        """
        with self._spans.generation(options) as span:
            self.check_accepting()
            caller = current_caller()
            caller.account.check()
            request = await self._prepare(options, caller, span.context)
            live = self._open(request)
            span.opened(live)
            try:
                admitted = caller.account.admitted(len(request.prompt_token_ids), lambda: _num_computed(live))
                with admitted, self._metrics.track(live):
                    self.replicas.place(live)
                    yield live
            finally:
                self.replicas.leave(live)
                self._ledger.close(live)

    @asynccontextmanager
    async def resume(self, request_id: str, offsets: Sequence[ClientOffset]) -> AsyncIterator[LiveRequest]:
        """A durable request, whoever submitted it, without what its client has. Leaving does not end it.

        Raises:
            NotFound: the caller's tenant has none of that id.
            InvalidArgument: an offset names what the request does not have.
        """
        with self._spans.resumption() as span:
            self.check_accepting()
            caller = current_caller()
            caller.account.check()
            await self.limits()
            found = await find_durable(self.replicas.clients.values(), caller.tenant, request_id)
            check_offsets(offsets, found.request)
            self._take_from_earlier_call(caller.tenant, request_id)
            live = self._open(found.request)
            span.opened(live)
            for offset in offsets:
                live.skip(offset.sequence_index, offset.num_tokens, offset.num_characters)
            try:
                with caller.account.admitted(0):
                    self.replicas.resume(live, found.client)
                    yield live
            finally:
                self.replicas.leave(live)
                self._ledger.close(live)

    def _open(self, request: GenerationRequest) -> LiveRequest:
        tokenizer = self.model.tokenizer
        return self._ledger.open(
            request, lambda: tokenizer.detokenizer(include_special_tokens=request.include_special_tokens)
        )

    def _take_from_earlier_call(self, tenant: str, request_id: str) -> None:
        """A call of this gateway that reads the request ends; the scheduler tells those of other gateways."""
        earlier = self._ledger.get(tenant, request_id)
        if earlier is not None:
            earlier.fail(Aborted(f'request "{request_id}" is read by another call now', reason="REQUEST_TAKEN_OVER"))
            self.replicas.leave(earlier)
            self._ledger.close(earlier)

    async def cancel(self, request_id: str) -> None:
        """Ends a running request of the caller's tenant; its own call ends with CANCELLED.

        Raises:
            NotFound: the tenant has none of that id; another tenant's makes no difference.
        """
        tenant = current_caller().tenant
        live = self._ledger.get(tenant, request_id)
        if live is None or live.request.durable:
            await cancel_by_id(self.replicas.clients.values(), tenant, request_id)
        if live is None:
            return
        if live.is_over and not live.request.durable:
            raise no_such_request(request_id)
        live.fail(Cancelled(f'request "{request_id}" was cancelled', reason="CANCELLED_BY_ID"))
        self.replicas.release(live)

    async def _prepare(self, options: RequestOptions, caller: Caller, trace: TraceContext | None) -> GenerationRequest:
        limits = await self.limits()
        check_request(options, limits, caller.visible(self.model.name))
        priority = caller.priority_of(options.priority)
        if options.request_id is not None:
            self._ledger.check_unused(caller.tenant, options.request_id)
        field, token_ids = await self._encode(options.prompt)
        max_tokens = resolve_max_tokens(field, token_ids, options.stopping.max_tokens, limits)
        bad_sequences = await bad_token_sequences(self.model.tokenizer, options.sampling.bad_words, limits.vocab_size)
        sampling = resolve_sampling(options.sampling, self.model.sampling_defaults, bad_sequences)
        stopping = self._resolve_stopping(options.stopping, max_tokens)
        check_choice(sampling, stopping)
        return GenerationRequest(
            request_id=options.request_id or f"{self._settings.request_id_prefix}{secrets.token_hex(16)}",
            tenant=caller.tenant,
            prompt_token_ids=np.asarray(token_ids, dtype=np.int32),
            sampling=sampling,
            stopping=stopping,
            logprobs=options.output.logprobs,
            prompt_logprobs=options.output.prompt_logprobs,
            include_special_tokens=options.output.include_special_tokens,
            priority=priority,
            ignore_eos=options.stopping.ignore_eos,
            num_sequences=options.sampling.n or 1,
            best_of=_num_candidates(options.sampling),
            durable=options.durable,
            trace=trace,
        )

    def _resolve_stopping(self, asked: StoppingOptions, max_tokens: int) -> Stopping:
        return Stopping(
            max_tokens=max_tokens,
            stop=tuple(asked.stop),
            stop_token_ids=tuple(dict.fromkeys(asked.stop_token_ids)),
            eos_token_ids=() if asked.ignore_eos else self.model.eos_token_ids,
            min_tokens=asked.min_tokens or 0,
            include_stop_string=asked.include_stop_string,
        )

    async def _encode(self, prompt: Prompt | None) -> tuple[str, Sequence[int]]:
        """The name of the field that holds the prompt, and its token ids."""
        match prompt:
            case TextPrompt(text=text):
                return "text", await self.model.tokenizer.encode(text, add_special_tokens=True)
            case TokenPrompt(token_ids=token_ids):
                return "token_ids.ids", token_ids
            case ChatPrompt(messages=messages):
                return "messages", await self.model.encode_chat(messages)
        raise AssertionError("the validator lets no request without a prompt pass")


def limits_of(settings: GatewaySettings, welcomes: Sequence[Welcome], longest_token_bytes: int) -> Limits:
    """What holds on every replica, since each of them may get the request."""
    max_model_len = min(welcome.max_model_len for welcome in welcomes)
    longest_prompt = max_model_len - 1
    if settings.max_prompt_tokens is not None:
        longest_prompt = min(longest_prompt, settings.max_prompt_tokens)
    return Limits(
        vocab_size=min(welcome.vocab_size for welcome in welcomes),
        max_model_len=max_model_len,
        max_prompt_tokens=longest_prompt,
        max_prompt_bytes=longest_prompt * longest_token_bytes,
        max_message_bytes=settings.max_message_bytes,
        max_logprobs=min(settings.max_logprobs, *(welcome.max_logprobs for welcome in welcomes)),
        max_stop_strings=settings.max_stop_strings,
        max_stop_string_bytes=settings.max_stop_string_bytes,
        max_stop_token_ids=settings.max_stop_token_ids,
        max_chat_messages=settings.max_chat_messages,
        max_n=min(MAX_N, *(welcome.max_num_seqs for welcome in welcomes)),
    )


def resolve_sampling(
    asked: SamplingOptions, defaults: SamplingOptions, bad_sequences: tuple[tuple[int, ...], ...] = ()
) -> Sampling:
    """Each value as asked, else the model's default, else the contract's; a seed is drawn where none is given.

    `bad_sequences` are the bad words as tokens. Beam search draws nothing, so the model's defaults of how to draw do
    not apply to it.
    """
    if asked.beam_search is not None:
        defaults = dataclasses.replace(defaults, temperature=0.0, top_k=None, top_p=None, min_p=None)
    return Sampling(
        temperature=_first(asked.temperature, defaults.temperature, 1.0),
        top_k=_first(asked.top_k, defaults.top_k, 0),
        top_p=_first(asked.top_p, defaults.top_p, 1.0),
        min_p=_first(asked.min_p, defaults.min_p, 0.0),
        # A negative one is the number of 64 bits that has the same bits, as torch has it.
        seed=secrets.randbits(64) if asked.seed is None else asked.seed % 2**64,
        presence_penalty=_first(asked.presence_penalty, defaults.presence_penalty, 0.0),
        frequency_penalty=_first(asked.frequency_penalty, defaults.frequency_penalty, 0.0),
        repetition_penalty=_first(asked.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=asked.logit_bias,
        allowed_token_ids=tuple(dict.fromkeys(asked.allowed_token_ids)),
        bad_token_sequences=bad_sequences,
        beam_search=None if asked.beam_search is None else _resolve_beam_search(asked.beam_search),
    )


def _resolve_beam_search(asked: BeamSearchOptions) -> BeamSearch:
    assert isinstance(asked.early_stopping, EarlyStopping), "the validator lets nothing else pass"
    return BeamSearch(asked.beam_width, _first(asked.length_penalty, None, 1.0), asked.early_stopping)


def _num_candidates(asked: SamplingOptions) -> int:
    """The sequences among which those that are returned are chosen."""
    if asked.beam_search is not None:
        return asked.beam_search.beam_width
    return asked.best_of or asked.n or 1


def _num_computed(live: LiveRequest) -> float:
    """The tokens that were generated so far, with those of candidates that are not returned."""
    return live.num_generated_tokens * live.request.best_of / live.request.num_sequences


def _first(asked: T | None, model_default: T | None, default: T) -> T:
    if asked is not None:
        return asked
    return default if model_default is None else model_default
