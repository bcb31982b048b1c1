"""The scheduler of a scripted server: answers the requests of a real gateway by rules, and records them."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.rpc import code_pb2

from quire.common.v1 import common_pb2
from quire.messages.arrays import decode_int32, encode_int32
from quire.scheduler.v1 import scheduler_pb2
from quire.service.compatibility import UNKNOWN_MODEL
from quire.testing.rules import STATUSES, Answer, Failure, Received, Rule
from quire.testing.scheduler_servicer import SchedulerStream
from quire.testing.scripted_model import END, MAX_TOKENS, TEXT, Prompt, answer_texts, architecture_of, read_prompt

CUT = "the connection is cut here by a rule"
"""The message of the failure that ends a request whose connection is to be cut. The HTTP port closes the connection in
its place."""
_MAX_RECORDS = 1000
_BLOCK_SIZE = 16
_REASONS = {"stop": common_pb2.FINISH_REASON_STOP, "length": common_pb2.FINISH_REASON_LENGTH}


class Script:
    """The rules of a server, and the requests that came.

    Attributes:
        records: The last 1,000 requests in the order of their arrival.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.records: deque[Received] = deque(maxlen=_MAX_RECORDS)
        self._calls: dict[int, Received] = {}
        self.set_rules(rules)

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """Replaces all rules; their counts begin anew."""
        self._rules = [*rules]
        self._num_used = [0] * len(rules)

    @property
    def unused(self) -> list[str]:
        """The names of rules that no request has matched."""
        return [each.name for each, count in zip(self._rules, self._num_used, strict=True) if not count]

    def link(self, nonce: int, call: Received) -> None:
        """A request with this nonce, if it is submitted, is of this call."""
        self._calls[nonce] = call
        if len(self._calls) > _MAX_RECORDS:
            del self._calls[next(iter(self._calls))]

    def received(self, nonce: int, prompt: Prompt) -> Received:
        """Records a request. Several requests of one call are several records."""
        call = self._calls.pop(nonce, None) or Received()
        record = dataclasses.replace(call, messages=prompt.messages, tools=prompt.tools, status="running")
        call.status = "submitted"
        self.records.append(record)
        return record

    def answer(self, request: Received) -> Answer:
        """The next answer of the first rule that fits and is not used up; else the error that no rule does."""
        for number, rule in enumerate(self._rules):
            count = self._num_used[number]
            if (rule.times is None or count < rule.times) and rule.when.fits(request):
                self._num_used[number] += 1
                request.rule = rule.name
                return rule.answers[min(count, len(rule.answers) - 1)]
        return Answer(error=Failure(400, self._no_rule(request)))

    def _no_rule(self, request: Received) -> str:
        last = request.messages[-1]
        tried = [
            f"{rule.name} ({rule.when}{'' if rule.times is None else f'; used {count} of {rule.times} times'})"
            for rule, count in zip(self._rules, self._num_used, strict=True)
        ]
        said = f'{last.role}: "{last.text[-200:]}"'
        return f"no rule is for this request to {request.path} with the last message {said}; rules: " + (
            "; ".join(tried) or "none"
        )


@dataclass(slots=True)
class _Running:
    """A request, the rest of its answer, and when the next piece of that is due."""

    submit: scheduler_pb2.Submit
    answer: Answer
    record: Received
    pieces: deque[bytes]
    due_at: float
    num_tokens: int = 0

    @property
    def fails(self) -> bool:
        return self.answer.cut or self.answer.error is not None


@dataclass(slots=True)
class _Columns:
    """Tokens of a step: request, sequence, offset and id of each."""

    handles: list[int] = field(default_factory=list[int])
    sequence_indices: list[int] = field(default_factory=list[int])
    offsets: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])

    def add(self, running: _Running, piece: bytes) -> None:
        count, handle = len(piece), running.submit.handle
        for index in range(_num_sequences(running.submit)):
            self.handles += [handle] * count
            self.sequence_indices += [index] * count
            self.offsets += range(running.num_tokens, running.num_tokens + count)
            self.token_ids += piece
        running.num_tokens += count


class ScriptedScheduler(SchedulerStream):
    """Answers by the rules of a script, for one of the models of `scripted_model`."""

    model = UNKNOWN_MODEL

    def __init__(self, script: Script, address: str, model_name: str = TEXT) -> None:
        """To be made in an event loop."""
        self.address = address
        self._script = script
        self._model_name = model_name
        self._running: dict[int, _Running] = {}
        self._step_id = 0
        self._clock = asyncio.get_running_loop().time
        self.open_stream()

    def welcome(self) -> scheduler_pb2.Welcome:
        return scheduler_pb2.Welcome(
            protocol=self.protocol.message(),
            model=self.model.message(),
            scheduler_epoch=1,
            vocab_size=END + 1,
            max_model_len=MAX_TOKENS,
            block_size=_BLOCK_SIZE,
            num_gpu_blocks=MAX_TOKENS // _BLOCK_SIZE * 256,
            max_num_seqs=256,
            max_num_batched_tokens=MAX_TOKENS,
            architecture=architecture_of(self._model_name),
            dtype="float32",
            takes_batches=True,
        )

    def on_submit(self, submit: scheduler_pb2.Submit) -> None:
        prompt = read_prompt(decode_int32(submit.prompt_token_ids, "prompt_token_ids").tolist())
        record = self._script.received(submit.nonce, prompt)
        answer = self._script.answer(record)
        if (problem := self._misfit(answer, submit, record)) is not None:
            message = f"{record.rule} cannot answer this request: {problem}"
            answer = Answer(error=Failure(400, message))
        texts = ["."] if answer.embedding else []
        if not answer.embedding and (answer.error is None or answer.streamed):
            texts = answer_texts(answer, has_begun_reasoning=prompt.has_begun_reasoning)
        pieces = deque(each.encode() for each in texts)
        due_at = self._clock() + answer.first_token_s
        self._running[submit.handle] = _Running(submit, answer, record, pieces, due_at)

    def _misfit(self, answer: Answer, submit: scheduler_pb2.Submit, record: Received) -> str | None:
        """Why an answer cannot be one to the request; None if it can."""
        if answer.error is not None and not answer.streamed:
            return None
        for call in answer.tool_calls:
            if call.name not in record.tools:
                return f"it calls the tool {call.name}, and the request offers {', '.join(record.tools) or 'no tools'}"
        if submit.output.HasField("logprobs") or submit.output.HasField("prompt_logprobs"):
            return "it has no log probabilities, which the request asks for"
        if bool(answer.embedding) != (self._model_name != TEXT):
            return "it has an embedding" if answer.embedding else "embeddings are asked for, and it has no embedding"
        return None

    def on_abort(self, abort: scheduler_pb2.Abort) -> None:
        ended = self._running.pop(abort.handle, None)
        if ended is not None:
            ended.record.status = "abandoned"
        if abort.wants_usage:
            usage = None if ended is None else _usage(ended)
            end = scheduler_pb2.RequestEnd(handle=abort.handle, usage=usage)
            self.send(scheduler_pb2.TokenEvents(completed=[end]))

    def step_at(self) -> float | None:
        return min((each.due_at for each in self._running.values()), default=None)

    def step(self) -> scheduler_pb2.TokenEvents:
        self._step_id += 1
        now, columns = self._clock(), _Columns()
        events = scheduler_pb2.TokenEvents(step_id=self._step_id)
        for handle, running in [*self._running.items()]:
            if running.due_at > now:
                continue
            if running.pieces:
                columns.add(running, running.pieces.popleft())
                running.due_at = now + running.answer.between_tokens_s
                if running.pieces or running.fails:
                    # A failure comes in a step of its own: with tokens it would come before them.
                    continue
            del self._running[handle]
            self._end(running, events)
        events.handles, events.sequence_indices = encode_int32(columns.handles), encode_int32(columns.sequence_indices)
        events.offsets, events.token_ids = encode_int32(columns.offsets), encode_int32(columns.token_ids)
        return events

    @staticmethod
    def _end(running: _Running, events: scheduler_pb2.TokenEvents) -> None:
        answer, handle = running.answer, running.submit.handle
        failure = Failure(503, CUT) if answer.cut else answer.error
        if failure is not None:
            is_without_rule = running.record.rule is None
            running.record.status = "no rule" if is_without_rule else "cut" if answer.cut else "failed"
            events.failed.append(_failure(handle, failure))
            return
        running.record.status = "answered"
        for index in range(_num_sequences(running.submit)):
            end = events.finished.add(handle=handle, sequence_index=index, num_tokens=running.num_tokens)
            end.reason = _REASONS[answer.finish]
            end.vector = np.array(answer.embedding, np.float32).tobytes()
        events.completed.add(handle=handle, usage=_usage(running))


def _num_sequences(submit: scheduler_pb2.Submit) -> int:
    return max(submit.sampling.n, 1)


def _usage(running: _Running) -> common_pb2.Usage:
    num_prompt = len(running.submit.prompt_token_ids) // 4
    return common_pb2.Usage(prompt_tokens=num_prompt, generated_tokens=running.num_tokens)


def _failure(handle: int, failure: Failure) -> scheduler_pb2.RequestFailure:
    made: dict[str, Any] = {"code": code_pb2.Code.Value(STATUSES[failure.status]), "reason": failure.reason}
    if failure.retry_after_s is not None:
        made["retry_after_ms"] = round(failure.retry_after_s * 1000)
    return scheduler_pb2.RequestFailure(handle=handle, message=failure.message, **made)
