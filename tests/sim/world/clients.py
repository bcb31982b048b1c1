"""Clients in a world: Quire's own Python client on separate hosts, and the outcome of each request."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from quire.client import AsyncClient, AsyncStream, ChatMessage, RetryPolicy
from quire.client import client_messages as convert
from quire.client.retries import Resumption
from quire.client.types import StreamEvent
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import DeadlineExceeded, NotFound, QuireError, from_rpc_error
from tests.sim.world.gateways import character_of, key_of
from tests.sim.world.hang_ups import leaving
from tests.sim.world.http_calls import HttpClient, testimony_of
from tests.sim.world.oracles import Circumstances, FalseAnswerError, Testimony, check_pin, check_tokens
from tests.sim.world.traffic import TENANT, Generate, Mistake, Pin, Request, Tokenize, Verb
from tests.sim.world.world import World


@dataclass(slots=True)
class Story:
    """A request and its outcome.

    Attributes:
        has_ended, has_left: Whether it was answered, or its client left before.
        error: The error that it failed with.
    """

    request: Request
    witness: Testimony | None = None
    has_ended: bool = False
    has_left: bool = False
    error: QuireError | None = None

    @property
    def is_over(self) -> bool:
        return self.has_ended or self.has_left or self.error is not None


@dataclass(slots=True)
class Client:
    """The process of a client. It calls gateways by any of their addresses.

    Attributes:
        false_answers: Receives the errors of wrong answers.
    """

    world: World
    addresses: str
    http: HttpClient
    circumstances: Circumstances
    false_answers: list[FalseAnswerError]
    cancelling: Callable[[tuple[str, str]], Callable[[float], None]]
    """Called with a request that is about to be cancelled; the returned function is called once that is done."""
    _clients: dict[str, AsyncClient] = field(default_factory=dict[str, AsyncClient])

    async def ask(self, story: Story) -> None:
        """Makes the calls of a request, and checks the answers."""
        request, began_s = story.request, self.world.now
        try:
            try:
                await self._answer(request, story)
                story.has_ended = not story.has_left
            except QuireError as error:
                story.error = error
                witness = None if story.witness is None else story.witness.last
                self.circumstances.check_refusal(request, error, witness)
                self._check_deadline(request, error, self.world.now - began_s)
        except FalseAnswerError as error:
            self.false_answers.append(error)
        reason = None if story.error is None else story.error.reason
        num_tokens = None if story.witness is None else story.witness.last.num_tokens
        self.world.note("answer", request.number, num_tokens, reason, story.has_left)

    @staticmethod
    def _check_deadline(request: Request, error: QuireError, took_s: float) -> None:
        """Checks a deadline; clocks may differ slightly."""
        limit_s = request.timeout_s if isinstance(request, Generate) else None
        if limit_s is not None and isinstance(error, DeadlineExceeded) and took_s < 0.99 * limit_s - 0.01:
            raise FalseAnswerError(f"request {request.number} is late after {took_s} s of {limit_s} s")

    async def _answer(self, request: Request, story: Story) -> None:
        match request:
            case Generate():
                await self._generate(request, story)
            case Pin():
                await self._pin(request)
            case Tokenize():
                await self._tokenize(request)
            case Mistake():
                await self.http.err(request)

    def _client(self, tenant: str) -> AsyncClient:
        client = self._clients.get(tenant)
        if client is None:
            policy = RetryPolicy(resume_for_s=60)
            client = AsyncClient(self.addresses, api_key=key_of(TENANT[tenant]), retry=policy)
            self._clients[tenant] = client
        return client

    async def _generate(self, request: Generate, story: Story) -> None:
        witness = story.witness = testimony_of(request, self.circumstances.models)
        cancelling = None
        taking: list[asyncio.Task[None]] = []
        if (after_s := request.taken_over_after_s) is not None:
            for number in range(1, request.num_takeovers + 1):
                at_wait = dict(enumerate(request.takeovers_leave_at, start=1)).get(number)
                taking.append(asyncio.create_task(self._take_over(request, witness, number * after_s, at_wait)))
        if request.cancels_after_s is not None:
            cancelling = asyncio.create_task(self._cancel(request, request.cancels_after_s))
        try:
            async with leaving(request.leaves_after_s, request.leaves_at_wait):
                if request.front is not None:
                    await self.http.ask(request, witness)
                elif request.verb in (Verb.GENERATE, Verb.CHAT):
                    await self._whole(request, witness)
                else:
                    await self._read(request, witness)
        except TimeoutError:
            story.has_left = True
        finally:
            if cancelling is not None:
                cancelling.cancel()
            await asyncio.gather(*taking)

    async def _whole(self, request: Generate, witness: Testimony) -> None:
        client = self._client(request.tenant)
        given = {"request_id": request.request_id, "priority": request.priority, "timeout_s": request.timeout_s}
        given["model"] = request.adapter
        if request.verb is Verb.CHAT:
            answer = await client.chat(_messages(request), request.options, **given)
        else:
            answer = await client.generate(request.prompt, request.options, **given)
        witness.generation(answer)

    async def _read(self, request: Generate, witness: Testimony) -> None:
        async with self._stream(request, witness) as stream:
            async for event in stream:
                witness.event(event)
                if request.pause_s:
                    await asyncio.sleep(request.pause_s)
        if not witness.last.is_complete:
            raise FalseAnswerError(f"{request.request_id} ends before its last event")

    async def _take_over(self, request: Generate, witness: Testimony, after_s: float, at_wait: int | None) -> None:
        await asyncio.sleep(after_s)
        other = witness.resumed()
        message = generation_pb2.ResumeStreamRequest(request_id=request.request_id)
        for index, offset, num_characters in witness.last.offsets:
            message.offsets.add(sequence_index=index, offset=offset, num_characters=num_characters)
        self.world.note("take over", request.number, witness.last.num_tokens)
        calls = self._client(request.tenant)._stubs.generation
        # Long queues and slow connections take longer; the time limit of the world applies to them.
        timeout_s = 60 if self.circumstances.may_wait else None
        try:
            # A separate call, which does not continue after a lost connection.
            async with leaving(None, at_wait):
                async for response in calls.ResumeStream(message, timeout=timeout_s):
                    other.event(convert.from_stream_response(response))
            if not other.last.is_complete:
                raise FalseAnswerError(f"{request.request_id}, resumed, ends before its last event")
            self.world.note("taken over", request.number)
        except TimeoutError:
            self.world.note("left", request.number)
        except grpc.RpcError as error:
            self.circumstances.check_takeover(request, from_rpc_error(error))

    def _stream(self, request: Generate, witness: Testimony) -> AsyncStream:
        client = self._client(request.tenant)
        given = {"request_id": request.request_id, "priority": request.priority, "timeout_s": request.timeout_s}
        given["model"] = request.adapter
        given["durable"] = request.verb.is_durable
        if request.verb.is_chat:
            stream = client.chat_stream(_messages(request), request.options, **given)
        else:
            stream = client.generate_stream(request.prompt, request.options, **given)
        if isinstance(recovery := stream._recovery, Resumption):
            if self.circumstances.may_mix_models and recovery.go_on is not None:
                recovery.go_on = witness.watched(recovery.go_on)
            stream._recovery = _SubmitsOnce.of(recovery, self.false_answers.append)
        return stream

    async def _cancel(self, request: Generate, after_s: float) -> None:
        await asyncio.sleep(after_s)
        # Another call may resume the stream before it hears of its end.
        is_taken_over = request.taken_over_after_s is not None
        done = (lambda _: None) if is_taken_over else self.cancelling((request.tenant, request.request_id))
        try:
            await self._client(request.tenant).cancel(request.request_id, timeout_s=30)
            done(self.world.now)
        except NotFound:
            pass
        except QuireError as error:
            self.world.note("cancel", request.number, error.reason)

    async def _pin(self, request: Pin) -> None:
        client = self._client(request.tenant)
        pin = await client.pin_prefix(request.prompt, time_to_live_ms=request.time_to_live_ms)
        check_pin(request, pin, self.circumstances.block_sizes)
        if request.unpins_after_s is not None:
            await asyncio.sleep(request.unpins_after_s)
            with suppress(NotFound):
                await client.unpin_prefix(pin.pin_id)

    async def _tokenize(self, request: Tokenize) -> None:
        client = self._client(request.tenant)
        text = _text(request.prompt)
        check_tokens(request, await client.tokenize(text))
        if (again := await client.detokenize(request.prompt)) != text:
            raise FalseAnswerError(f"the text of tokens {request.number} is {again!r}, not {text!r}")


@dataclass(slots=True)
class _SubmitsOnce(Resumption):
    """Never submits a request again just after a server said that it runs, since its key would pay twice, and checks
    that the delay before an attempt is long enough."""

    report: Callable[[FalseAnswerError], object] = lambda _: None
    _lost_since: float | None = field(default=None, init=False)
    _runs: bool = field(default=False, init=False)

    @classmethod
    def of(cls, own: Resumption, report: Callable[[FalseAnswerError], object]) -> "_SubmitsOnce":
        return cls(own.start, own.attempts, own.request_id, own.resume, own.go_on, own.num_sequences, report)

    def delay_after(self, error: QuireError) -> float:
        self._runs = error.reason in ("REQUEST_TAKEN_OVER", "REQUEST_ID_IN_USE")
        delay_s = Resumption.delay_after(self, error)
        if delay_s < (error.retry_after_ms or 0) / 1000:
            self.report(FalseAnswerError(f"{self.request_id} comes back after {delay_s} s, too soon for {error}"))
        now, policy = self.attempts.time.clock(), self.attempts.policy
        self._lost_since = now if self._lost_since is None else self._lost_since
        if self._is_lost and policy is not None and now + delay_s > self._lost_since + policy.resume_for_s + 1e-6:
            self.report(FalseAnswerError(f"{self.request_id} is lost since {self._lost_since}, and tries on at {now}"))
        return delay_s

    def accept(self, event: StreamEvent) -> StreamEvent | None:
        self._lost_since = None
        return Resumption.accept(self, event)

    def record_accepted(self) -> None:
        self._lost_since = None
        Resumption.record_accepted(self)

    def call(self) -> Any:
        if self._runs and not self._is_submitted:
            self.report(FalseAnswerError(f"{self.request_id} is submitted anew, and runs"))
        return Resumption.call(self)


def _text(token_ids: tuple[int, ...]) -> str:
    return "".join(map(character_of, token_ids))


def _messages(request: Generate) -> list[ChatMessage]:
    """Messages whose template adds no text."""
    return [ChatMessage("user", _text(request.prompt))]
