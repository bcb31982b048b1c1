"""A scheduler that speaks the real contract and makes its tokens by a rule, with faults on demand.

`tests/contract/test_scheduler_contract.py` checks that it does what gateways rely on. It has one sequence a request and
stores nothing: it knows no durable request, and a request that is submitted again is new to it.
"""

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.rpc import code_pb2

from quire.common.v1 import common_pb2
from quire.messages.arrays import decode_int32, encode_int32
from quire.rpc.channel import open_channel
from quire.rpc.errors import InvalidArgument, NotFound, QuireError, Unavailable, invalid_field
from quire.scheduler.v1 import scheduler_pb2 as pb
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.service.compatibility import SCHEDULER_PROTOCOL, UNKNOWN_MODEL, ModelFingerprint, ProtocolVersions
from quire.testing.scheduler_servicer import SchedulerStream
from tests.support.logprobs import Line, fill, token_logprobs

_NUM_EARLY_TOKENS, _LATE_TOKENS_PER_STEP = 100, 8

# (prompt token ids, position in the output) -> token id
TokenRule = Callable[[tuple[int, ...], int], int]


# prompt token ids -> numbers
VectorRule = Callable[[tuple[int, ...]], Sequence[float]]


def counting_rule(prompt: tuple[int, ...], position: int) -> int:
    """Ids of ordinary tokens of small vocabularies, different for different prompts."""
    return 40 + (sum(prompt) + 7 * position) % 200


def scripted(token_ids: Sequence[int]) -> TokenRule:
    """Answers every prompt with these ids, over and over."""
    return lambda prompt, position: token_ids[position % len(token_ids)]


@dataclass
class FakeRequest:
    """One submitted request and its progress."""

    submit: pb.Submit
    prompt: tuple[int, ...]
    num_emitted: int
    ending_token_ids: frozenset[int]

    @classmethod
    def of(cls, submit: pb.Submit) -> "FakeRequest":
        emitted = [decode_int32(sequence.token_ids, "token_ids") for sequence in submit.emitted]
        return cls(
            submit=submit,
            prompt=tuple(decode_int32(submit.prompt_token_ids, "prompt_token_ids").tolist()),
            num_emitted=len(emitted[0]) if emitted else 0,
            ending_token_ids=frozenset(submit.eos_token_ids) | frozenset(submit.stopping.stop_token_ids),
        )


def _usage(request: FakeRequest, drafts: Mapping[str, int]) -> common_pb2.Usage:
    num_prompt = len(request.prompt)
    usage = common_pb2.Usage(prompt_tokens=num_prompt, generated_tokens=request.num_emitted, **drafts)
    usage.queue_ms, usage.prefill_ms, usage.decode_ms = 1, 2, 3
    return usage


class _Signal(asyncio.Event):
    """An event that also wakes the stream when it is set."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake

    def set(self) -> None:
        super().set()
        self._wake()


@dataclass
class FakeScheduler(SchedulerStream):
    """Emits one token per live request and step, one message per step.

    Attributes:
        rule: Gives the next token.
        vector: Gives the vector of a prompt, as a scheduler whose model gives vectors; None gives none.
        step_delay_s: Time between steps; 0 is as fast as the gateway's stream takes them.
        tokens_per_step: Tokens of each request in one step, as after a slow stream. If neither this nor the delay is
            set, there are more after the first hundred.
        emits: While it is clear, no step is made.
        refusal: Answers to the next submits instead of tokens; None accepts one.
        drains: Answers DRAINING to new streams and to every submit; running requests continue.
        refuses_connections: Connect answers UNAVAILABLE, as without a worker.
        checks_hello: Refuses gateways of other versions or with another model; otherwise gateways must check.
        submits, aborted: Submits, and request ids of aborts, in order.
        aborted_handles: Handles of all aborts that came, whether the request still ran or not.
        live: Requests of the open stream by handle.
        wants_cache_updates: Whether the gateway of the open stream wants updates of the cache.
        is_heard: Whether the gateway of the open stream has sent a message after hello, as it does after the welcome.
        max_adapters: How many adapters its workers hold at once; 0 also stands for a release without adapters.
        max_drafts: How many drafts of a sequence its workers verify; 0 also stands for a release without drafts.
        drafts: Figures of drafts in the usage of each request.
        block_size: Block size for pins; shorter prefixes are refused.
        pins: The pinned token ids by pin id.
        pin_requests: Requests about pins, in order.
        pin_error: Answers to every call about pins.
        frames: Frames that Watch sends; no others follow.
        blocks: Blocks that ReadBlock answers; there are no others.
        watches: The calls of Watch that came.
        is_asleep: Whether a call has put it to sleep.
    """

    vocab_size: int = 2080
    max_model_len: int = 1024
    architecture: str = "LlamaForCausalLM"
    max_logprobs: int = 20
    max_adapters: int = 2
    max_drafts: int = 7
    drafts: Mapping[str, int] = field(default_factory=dict[str, int])
    protocol: ProtocolVersions = SCHEDULER_PROTOCOL
    model: ModelFingerprint = UNKNOWN_MODEL
    rule: TokenRule = counting_rule
    vector: VectorRule | None = None
    step_delay_s: float = 0.001
    tokens_per_step: int = 1
    refuses_connections: bool = False
    checks_hello: bool = True
    drains: bool = False
    epoch: int = 1000
    refusal: deque[pb.RequestFailure | None] = field(default_factory=deque)
    emits: asyncio.Event = field(default_factory=asyncio.Event)
    submits: list[pb.Submit] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    aborted_handles: list[int] = field(default_factory=list)
    live: dict[int, FakeRequest] = field(default_factory=dict)
    address: str = "127.0.0.1:0"
    connections: int = 0
    is_heard: bool = False
    wants_cache_updates: bool = False
    block_size: int = 16
    pins: dict[str, list[int]] = field(default_factory=dict)
    pin_requests: list[pb.PinPrefixRequest] = field(default_factory=list)
    pin_error: QuireError | None = None
    frames: list[pb.WatchResponse] = field(default_factory=list)
    blocks: dict[int, pb.ReadBlockResponse] = field(default_factory=dict)
    is_asleep: bool = False
    watches: list[pb.WatchRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.open_stream()
        self.emits = _Signal(self.wake)
        self.emits.set()
        self._step_id, self._step_at = 0, 0.0

    async def stop(self) -> None:
        await super().stop()
        self.live.clear()

    async def restart(self) -> None:
        """A new incarnation that knows nothing of the old one."""
        await self.stop()
        self.epoch += 1 << 20
        self.drains = False
        await self.start()

    def tell_cache(self, update: pb.CacheUpdate) -> None:
        """Sends a change of the prefix cache."""
        self.say(cache=update)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """No request ends by itself in the block, so requests that are no longer live were aborted."""
        self.emits.clear()
        try:
            yield
        finally:
            self.emits.set()

    def lose_worker(self) -> None:
        """Reports that no step runs, and runs none."""
        self.emits.clear()
        self._send_state(ready=False)

    def regain_worker(self) -> None:
        self.emits.set()
        self._send_state(ready=True)

    def drain(self) -> None:
        """Refuses new requests, and reports that it drains."""
        self.drains = True
        self._send_state(ready=False)

    def fail(self, handle: int, **failure: Any) -> None:
        """Fails one live request."""
        self.live.pop(handle, None)
        super().fail(handle, **failure)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Waits until a message makes the condition true."""
        async with asyncio.timeout(60):
            while not condition():
                self.heard.clear()
                await self.heard.wait()

    async def until_known(self) -> None:
        """Waits until its gateway has read the welcome, unless it never will."""
        said = (self.architecture, self.protocol, self.model)
        if not self.refuses_connections and said == (FakeScheduler.architecture, SCHEDULER_PROTOCOL, UNKNOWN_MODEL):
            await self.until(lambda: self.is_heard)

    def check_hello(self, first: pb.ConnectRequest) -> None:
        if self.refuses_connections:
            raise Unavailable("no worker is attached yet", reason="NO_WORKER")
        if self.drains:
            raise Unavailable("the scheduler drains", reason="DRAINING")
        self.connections += 1
        self.heard.set()
        super().check_hello(first)

    def on_connect(self, hello: pb.Hello) -> None:
        self.is_heard = False
        self.wants_cache_updates = hello.wants_cache_updates
        self.live.clear()

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: object) -> pb.PinPrefixResponse:
        self.pin_requests.append(request)
        self.heard.set()
        self._admit()
        token_ids = decode_int32(request.token_ids, "token_ids", minimum=0).tolist()
        num_blocks = len(token_ids) // self.block_size
        if not num_blocks:
            raise InvalidArgument(f"the prefix has {len(token_ids)} tokens; a block has {self.block_size}")
        pinned = token_ids[: num_blocks * self.block_size]
        pin_id = hashlib.blake2b(f"{request.tenant}{pinned}".encode(), digest_size=16).hexdigest()
        self.pins[pin_id] = pinned
        return pb.PinPrefixResponse(pin_id=pin_id, pinned_tokens=len(pinned), pinned_blocks=num_blocks)

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: object) -> pb.UnpinPrefixResponse:
        self._admit()
        if self.pins.pop(request.pin_id, None) is None:
            raise NotFound(f'no pin "{request.pin_id}"', reason="PIN_NOT_FOUND")
        return pb.UnpinPrefixResponse()

    def _admit(self) -> None:
        if self.pin_error is not None:
            raise self.pin_error

    async def Watch(self, request: pb.WatchRequest, context: object) -> AsyncIterator[pb.WatchResponse]:
        self.watches.append(request)
        for frame in self.frames:
            yield frame
        await asyncio.get_running_loop().create_future()

    async def GetState(self, request: pb.GetStateRequest, context: object) -> pb.GetStateResponse:
        return pb.GetStateResponse(asleep=self.is_asleep)

    async def Sleep(self, request: pb.SleepRequest, context: object) -> pb.SleepResponse:
        self.is_asleep = True
        return pb.SleepResponse()

    async def WakeUp(self, request: pb.WakeUpRequest, context: object) -> pb.WakeUpResponse:
        self.is_asleep = False
        return pb.WakeUpResponse()

    async def ResetPrefixCache(self, request: object, context: object) -> pb.ResetPrefixCacheResponse:
        return pb.ResetPrefixCacheResponse()

    async def ReadBlock(self, request: pb.ReadBlockRequest, context: object) -> pb.ReadBlockResponse:
        if request.block_id not in self.blocks:
            raise invalid_field("block_id", f"is {request.block_id}, which the pool does not have")
        return self.blocks[request.block_id]

    async def Drain(self, request: pb.DrainRequest, context: object) -> pb.DrainResponse:
        self.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.timeout_ms / 1e3 if request.HasField("timeout_ms") else None):
                while self.live:
                    self.heard.clear()
                    await self.heard.wait()
        return pb.DrainResponse(remaining_requests=len(self.live))

    def _send_state(self, *, ready: bool) -> None:
        self.say(state=pb.ReplicaState(ready=ready))

    def _handle(self, message: pb.ConnectRequest) -> None:
        self.is_heard = True
        super()._handle(message)

    def on_abort(self, abort: pb.Abort) -> None:
        self.aborted_handles.append(abort.handle)
        ended = self.live.pop(abort.handle, None)
        if ended is not None:
            self.aborted.append(ended.submit.request_id)
        if abort.wants_usage:
            end = pb.RequestEnd(handle=abort.handle, usage=None if ended is None else _usage(ended, self.drafts))
            self.send(pb.TokenEvents(completed=[end]))

    def on_submit(self, submit: pb.Submit) -> None:
        self.submits.append(submit)
        if self.drains:
            self.fail(submit.handle, code=code_pb2.UNAVAILABLE, reason="DRAINING", message="the scheduler drains")
        elif self.refusal and (failure := self.refusal.popleft()) is not None:
            failure.handle = submit.handle
            self.send(pb.TokenEvents(failed=[failure]))
        else:
            self.live[submit.handle] = FakeRequest.of(submit)

    def step_at(self) -> float | None:
        return self._step_at if self.live and self.emits.is_set() else None

    def step(self) -> pb.TokenEvents:
        self._step_id += 1
        self._step_at = asyncio.get_running_loop().time() + self.step_delay_s
        columns: tuple[list[int], ...] = ([], [], [], [])
        lines: dict[int, Line] = {}
        events = pb.TokenEvents(step_id=self._step_id)
        for handle, request in list(self.live.items()):
            if not request.num_emitted:
                self._add_prompt_logprobs(events, request)
            for position in range(request.num_emitted, request.num_emitted + self._num_next(request)):
                token_id = self.rule(request.prompt, position)
                if (logprobs := self._logprobs(request, token_id)) is not None:
                    lines[len(columns[0])] = logprobs
                for column, value in zip(columns, (handle, 0, position, token_id), strict=True):
                    column.append(value)
                if self._is_over(request, position, token_id, events):
                    del self.live[handle]
                    break
        events.handles, events.sequence_indices, events.offsets, events.token_ids = map(encode_int32, columns)
        if lines:
            events.token_logprobs.CopyFrom(token_logprobs(lines))
        return events

    def _num_next(self, request: FakeRequest) -> int:
        """Tokens of a request in the next step. A test that lets one run on and on only waits for its end."""
        is_usual = self.tokens_per_step == 1 and self.step_delay_s == FakeScheduler.step_delay_s
        return _LATE_TOKENS_PER_STEP if is_usual and request.num_emitted >= _NUM_EARLY_TOKENS else self.tokens_per_step

    def _is_over(self, request: FakeRequest, position: int, token_id: int, events: pb.TokenEvents) -> bool:
        request.num_emitted = position + 1
        is_stop = token_id in request.ending_token_ids
        if not is_stop and request.num_emitted < request.submit.stopping.max_tokens:
            return False
        end = pb.SequenceEnd(handle=request.submit.handle, num_tokens=request.num_emitted)
        end.reason = common_pb2.FINISH_REASON_STOP if is_stop else common_pb2.FINISH_REASON_LENGTH
        if is_stop:
            end.stop_token_id = token_id
        if self.vector is not None:
            end.vector = np.array(self.vector(request.prompt), np.float32).tobytes()
        events.finished.append(end)
        events.completed.append(pb.RequestEnd(handle=request.submit.handle, usage=_usage(request, self.drafts)))
        return True

    @staticmethod
    def _logprobs(request: FakeRequest, token_id: int) -> Line | None:
        """The token and those after it in the vocabulary, as the most likely ones."""
        if not request.submit.output.HasField("logprobs"):
            return None
        ranks = range(request.submit.output.logprobs)
        return Line(-0.5, 1, [token_id + rank for rank in ranks], [-0.5 - rank for rank in ranks])

    @staticmethod
    def _add_prompt_logprobs(events: pb.TokenEvents, request: FakeRequest) -> None:
        if not request.submit.output.HasField("prompt_logprobs"):
            return
        token_ids, positions = request.prompt[1:], range(1, len(request.prompt))
        if not token_ids:
            return
        entry = events.prompt_logprobs.add(
            handle=request.submit.handle, first_position=1, token_ids=encode_int32(token_ids)
        )
        fill(entry, [Line(-float(position), position) for position in positions])

    def welcome(self) -> pb.Welcome:
        return pb.Welcome(
            protocol=self.protocol.message(),
            model=self.model.message(),
            scheduler_epoch=self.epoch,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_gpu_blocks=64,
            num_host_blocks=0,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            architecture=self.architecture,
            dtype="float32",
            max_logprobs=self.max_logprobs,
            max_adapters=self.max_adapters,
            max_drafts=self.max_drafts,
            takes_batches=True,
        )


@contextlib.asynccontextmanager
async def running_fake_scheduler(directory: Path, **attributes: Any) -> AsyncIterator[SchedulerServiceStub]:
    """Serves until the block ends; yields a stub that is connected to a socket in `directory`."""
    async with (
        FakeScheduler(address=f"unix:{directory / 'scheduler'}", **attributes) as fake,
        open_channel(fake.address) as channel,
    ):
        yield SchedulerServiceStub(channel)
