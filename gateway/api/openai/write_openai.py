"""Writes the answers and chunks of completions and chat completions."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from gateway.api.answer_parts import (
    NamedByIds,
    chat_logprobs,
    finite,
    logprobs_by_token_id,
    output_tokens_details,
)
from gateway.api.answers import LazyList, few_or_lazy
from gateway.api.custom_tools import InputPieces, custom_input
from gateway.api.generation_fields import CompletionBody, GenerationBody, is_echo_alone
from gateway.api.openai import answers
from gateway.api.openai.schemas import ChatBody, Message, ToolChoiceObject, custom_tools, message_text
from gateway.replicas.events import (
    Chunk,
    Finished,
    FinishReason,
    GeneratedSequence,
    PositionLogprobs,
    Usage,
)
from gateway.replicas.live import LiveRequest
from gateway.request.generator import Result
from gateway.text.detokenizer import TextPieces
from gateway.text.tokenizer import Tokenizer, TokenTexts
from gateway.types import Prompt, TextPrompt, TokenIds
from quire.common.v1.common_pb2 import StoppingParameters
from quire.gateway.v1.generation_pb2 import ToolCall
from quire.version import VERSION

SYSTEM_FINGERPRINT = f"quire-{VERSION}"
_ROLE: Literal["assistant"] = "assistant"


def head_of(id: str, created: int, model: str) -> answers.Head:
    """The first fields of every answer and every chunk of a call. `created` is in seconds since the Unix epoch."""
    return {"id": id, "created": created, "model": model, "system_fingerprint": SYSTEM_FINGERPRINT}


def finish_fields(finished: Finished, stopping: StoppingParameters) -> answers.Finish:
    """The end of a sequence. `stop_reason` is the stop string or stop token of the request; None for an eos token."""
    stop_reason: str | int | None = finished.stop_string
    if finished.stop_token_id in stopping.stop_token_ids:
        stop_reason = finished.stop_token_id
    return {"finish_reason": finished.reason.value, "stop_reason": stop_reason}


NOT_FINISHED: answers.ChunkFinish = {"finish_reason": None, "stop_reason": None}
CUT: answers.Finish = {"finish_reason": FinishReason.LENGTH.value, "stop_reason": None}


def usage_fields(usages: Sequence[Usage]) -> answers.CompletionUsage:
    """The sum of the usages of all requests of a call."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.generated_tokens for usage in usages)
    return {
        **_token_counts(prompt_tokens, completion_tokens),
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": output_tokens_details(usages),
    }


def request_metrics(body: GenerationBody, live: Sequence[LiveRequest], usages: Sequence[Usage]) -> answers.Metrics:
    """vLLM's `metrics`, for a call that requests them; null if several sequences share the times."""
    if not body.include_metrics:
        return {}
    if len(live) != 1 or len(live[0].sequences) != 1:
        return {"metrics": None}
    (usage,), first_s = usages, live[0].seconds_to_first_token
    generation_ms = usage.prefill_ms + usage.decode_ms
    metrics: answers.RequestMetrics = {
        "time_to_first_token_ms": None if first_s is None else round(first_s * 1000, 3),
        "generation_time_ms": round(generation_ms, 3),
        "queue_time_ms": round(usage.queue_ms, 3),
        "tokens_per_second": round(usage.generated_tokens * 1000 / generation_ms, 3) if generation_ms else None,
    }
    # Absent for a single token, as in vLLM.
    if usage.generated_tokens > 1:
        metrics["mean_itl_ms"] = round(usage.decode_ms / (usage.generated_tokens - 1), 3)
    return {"metrics": metrics}


class ChunkUsage:
    """The `usage` of each chunk of a stream: absent, null until the last chunk, or the usage so far."""

    def __init__(self, body: GenerationBody, live: Sequence[LiveRequest]) -> None:
        options = body.stream_options
        self.is_included = options is not None and bool(options.include_usage)
        self._is_continuous = options is not None and bool(options.continuous_usage_stats)
        self._prompt_tokens = sum(len(each.request.prompt_token_ids) for each in live)
        self._completion_tokens = 0

    @property
    def repeats_form(self) -> bool:
        """Whether it is the same in all chunks but the last one."""
        return not (self.is_included and self._is_continuous)

    def after(self, event: Chunk | Finished) -> answers.ChunkUsage:
        """The `usage` in the chunks of `event`. Must be called once for each event, in order."""
        if not self.is_included:
            return {}
        if not self._is_continuous:
            return {"usage": None}
        if isinstance(event, Chunk):
            self._completion_tokens += len(event.token_ids)
        # The number of cached prompt tokens is known only at the end.
        return {"usage": _token_counts(self._prompt_tokens, self._completion_tokens)}


def _token_counts(prompt_tokens: int, completion_tokens: int) -> answers.TokenCounts:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass(slots=True, eq=False)
class CompletionLogprobs:
    """Log probabilities of one choice of a completion.

    Attributes:
        text_offset: The number of characters of the choice's text before the next token.
    """

    texts: TokenTexts | NamedByIds
    detokenizer: TextPieces
    num_top: int
    text_offset: int = 0

    def keys(self, token_ids: TokenIds) -> Iterator[str]:
        return (self.texts.key_of(int(token_id)) for token_id in token_ids)

    def offsets(self, token_ids: TokenIds) -> Iterator[int]:
        """The offsets of the next tokens of the choice in its text."""
        for token_id in token_ids:
            yield self.text_offset
            self.text_offset += len(self.detokenizer.push(int(token_id)))

    def top(self, entry: PositionLogprobs | None) -> dict[str, float] | None:
        """The most likely tokens, and the chosen token if it is not one of them."""
        if entry is None:
            return None
        entries = (*entry.top[: self.num_top], entry.chosen)
        return {self.texts.key_of(each.token_id): finite(each.logprob) for each in entries}


LogprobsPart = tuple[CompletionLogprobs, TokenIds, Iterable[PositionLogprobs | None]]
"""The next tokens of a choice with their log probabilities; None for the first token of a prompt, which has none."""


def completion_logprobs(*parts: LogprobsPart) -> answers.CompletionLogprobs:
    """The entry for the next tokens of a choice, in parts. Its lists must be written before the next call, since they
    are lazy and count characters."""
    return {
        "tokens": LazyList(lambda: chain.from_iterable(each.keys(ids) for each, ids, _ in parts)),
        "token_logprobs": LazyList(
            lambda: (
                entry if entry is None else finite(entry.chosen.logprob) for _, _, entries in parts for entry in entries
            )
        ),
        "top_logprobs": LazyList(lambda: (each.top(entry) for each, _, entries in parts for entry in entries)),
        "text_offset": LazyList(lambda: chain.from_iterable(each.offsets(ids) for each, ids, _ in parts)),
    }


def token_ids(body: GenerationBody, ids: Sequence[int] | TokenIds) -> list[int] | None:
    """`token_ids` of a choice; None unless the call requests them."""
    return [int(each) for each in ids] if body.return_token_ids else None


def chunk_token_ids(body: GenerationBody, event: Chunk | Finished) -> answers.ChunkTokenIds:
    """`token_ids` of a chunk; absent unless the call requests them."""
    ids = token_ids(body, event.token_ids if isinstance(event, Chunk) else ())
    return {} if ids is None else {"token_ids": ids}


def of_prompt(texts: TokenTexts, body: GenerationBody, live: LiveRequest) -> answers.OfPrompt:
    """The fields about the prompt; None unless the call requests them."""
    return {
        "prompt_logprobs": prompt_logprobs(texts, live.prompt_logprobs, body.prompt_logprobs),
        "prompt_token_ids": live.request.prompt_token_ids.tolist() if body.return_token_ids else None,
    }


def chunk_of_prompt(texts: TokenTexts, body: GenerationBody, live: LiveRequest) -> answers.ChunkOfPrompt:
    """The fields of `of_prompt` that the call requests."""
    whole, shown = of_prompt(texts, body, live), answers.ChunkOfPrompt()
    if (logprobs := whole["prompt_logprobs"]) is not None:
        shown["prompt_logprobs"] = logprobs
    if (ids := whole["prompt_token_ids"]) is not None:
        shown["prompt_token_ids"] = ids
    return shown


def prompt_logprobs(
    texts: TokenTexts, logprobs: Iterable[PositionLogprobs], num_top: int | None
) -> answers.PromptLogprobs | None:
    """`prompt_logprobs`, for a call that requests it: one entry per prompt token; the first is null."""
    if num_top is None:
        return None
    entries = logprobs_by_token_id(texts, logprobs, num_top)
    return LazyList(lambda: chain([None], entries))


class ChatShaper:
    """The answer to a chat request; each sequence is one assistant message."""

    def __init__(self, head: answers.Head, body: ChatBody, live: LiveRequest, texts: TokenTexts) -> None:
        self._head = head
        self._body = body
        self._live = live
        self._texts = texts
        self._shown_texts = NamedByIds(texts) if body.return_tokens_as_token_ids else texts
        self._custom = frozenset(tool.name for tool in custom_tools(body))
        # The inputs of unfinished calls of custom tools, by sequence and position.
        self._inputs: dict[tuple[int, int], InputPieces] = {}
        self._started: set[int] = set()
        self._usage_so_far = ChunkUsage(body, [live])
        self._echo = _echoed(body.messages[-1]) if body.echo else ""
        # As in OpenAI's API, a forced call ends with "stop".
        self._names_tool = isinstance(body.tool_choice, ToolChoiceObject) and body.tool_choice.type == "function"
        self._shows_reasoning = body.include_reasoning is not False

    def whole(self, results: Sequence[Result]) -> answers.ChatCompletion:
        ((sequences, usage),) = results
        choices: list[answers.ChatChoice] = [
            {
                "index": sequence.finished.sequence_index,
                "message": self._message(sequence),
                "logprobs": self._logprobs(sequence.logprobs),
                **self._finish(sequence.finished),
                "token_ids": token_ids(self._body, sequence.token_ids),
            }
            for sequence in sequences
        ]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_fields([usage]),
            **of_prompt(self._texts, self._body, self._live),
            **request_metrics(self._body, [self._live], [usage]),
        }

    def begin(self) -> Iterable[answers.ChatCompletionChunk]:
        return ()

    def event(self, position: int, event: Chunk | Finished) -> Iterable[answers.ChatCompletionChunk]:
        usage, ids = self._usage_so_far.after(event), chunk_token_ids(self._body, event)
        finish: answers.ChunkFinish = NOT_FINISHED
        match event:
            case Chunk(sequence_index=index):
                deltas, logprobs = list(self._deltas(event)), self._logprobs(event.logprobs)
            case Finished(sequence_index=index):
                deltas, logprobs = [*self._rests(index), answers.ChatDelta()], None
                finish = {**self._finish(event)}
        if not deltas and (logprobs or ids):
            # The tokens have no visible output, for example omitted reasoning.
            deltas = [answers.ChatDelta()]
        prompt: answers.ChunkOfPrompt = {} if self._started else chunk_of_prompt(self._texts, self._body, self._live)
        for delta in deltas:
            if index not in self._started:
                # The role, in the first chunk of each choice.
                self._started.add(index)
                delta = answers.ChatDelta({"role": _ROLE, **delta})
            choice: answers.ChatChunkChoice = {"index": index, "delta": delta, "logprobs": logprobs, **finish, **ids}
            yield {**self._chunk([choice]), **prompt, **usage}
            # Only the first delta has the log probabilities and the tokens.
            logprobs, ids, prompt = None, answers.ChunkTokenIds(), answers.ChunkOfPrompt()

    def repeats_form(self, sequence_index: int) -> bool:
        return sequence_index in self._started and self._usage_so_far.repeats_form and not self._body.return_token_ids

    def end(self, usages: Sequence[Usage]) -> Iterable[answers.ChatCompletionChunk]:
        metrics = request_metrics(self._body, [self._live], usages)
        if self._usage_so_far.is_included:
            yield {**self._chunk([]), "usage": usage_fields(usages), **metrics}
        elif metrics:
            yield {**self._chunk([]), **metrics}

    def _message(self, sequence: GeneratedSequence) -> answers.ChatAnswer:
        content = self._echo + sequence.text
        message: answers.ChatAnswer = {
            "role": _ROLE,
            "content": content or (None if sequence.tool_calls else ""),
            "refusal": None,
            **self._reasoning(sequence.reasoning),
        }
        if sequence.tool_calls:
            message["tool_calls"] = [self._call(call) for call in sequence.tool_calls]
        return message

    def _deltas(self, chunk: Chunk) -> Iterator[answers.ChatDelta]:
        """The deltas of a chunk, one each for reasoning, text and each call, in this order. The first delta of a call
        has no arguments."""
        text = chunk.text if chunk.sequence_index in self._started else self._echo + chunk.text
        if reasoning := self._reasoning(chunk.reasoning):
            yield {**reasoning}
        if text:
            yield {"content": text}
        elif not (chunk.reasoning or chunk.tool_calls):
            # The chunk has tokens but no text yet.
            yield {}
        for call in chunk.tool_calls:
            place = chunk.sequence_index, call.index
            if call.name in self._custom:
                self._inputs[place] = InputPieces()
                custom = answers.CustomDelta(name=call.name, input="")
                yield _call_delta({"index": call.index, "id": call.id, "type": "custom", "custom": custom})
            elif call.name:
                function = answers.FunctionDelta(name=call.name, arguments="")
                yield _call_delta({"index": call.index, "id": call.id, "type": "function", "function": function})
            if place in self._inputs:
                if text := self._inputs[place].push(call.arguments):
                    yield _call_delta({"index": call.index, "custom": {"input": text}})
            elif call.arguments:
                yield _call_delta({"index": call.index, "function": {"arguments": call.arguments}})

    def _rests(self, index: int) -> Iterator[answers.ChatDelta]:
        """The remaining inputs of a sequence's calls, at its end."""
        for (sequence_index, position), pieces in self._inputs.items():
            if sequence_index == index and (rest := pieces.rest):
                yield _call_delta({"index": position, "custom": {"input": rest}})

    def _call(self, call: ToolCall) -> answers.ChatToolCall | answers.ChatCustomToolCall:
        if call.name in self._custom:
            return {
                "id": call.id,
                "type": "custom",
                "custom": {"name": call.name, "input": custom_input(call.arguments)},
            }
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _reasoning(self, text: str) -> answers.ReasoningFields:
        return {"reasoning_content": text, "reasoning": text} if text and self._shows_reasoning else {}

    def _finish(self, finished: Finished) -> answers.Finish:
        fields = finish_fields(finished, self._live.request.stopping)
        if self._names_tool and finished.reason is FinishReason.TOOL_CALLS:
            fields["finish_reason"] = FinishReason.STOP.value
        return fields

    def _logprobs(self, logprobs: Iterable[PositionLogprobs]) -> answers.ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._shown_texts, logprobs, shows_chosen=bool(self._body.logprob_token_ids))

    def _chunk(self, choices: list[answers.ChatChunkChoice]) -> answers.ChatCompletionChunk:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}


def _call_delta(call: answers.ToolCallDeltaShape) -> answers.ChatDelta:
    return {"tool_calls": [call]}


def _echoed(message: Message) -> str:
    """The text of the last message if it has the role of the answer, else empty."""
    return message_text(message) if message.role == _ROLE else ""


class CompletionShaper:
    """The answer to a completion of one or several prompts. Sequence s of prompt p is the choice p * n + s."""

    def __init__(
        self,
        head: answers.Head,
        body: CompletionBody,
        prompts: Sequence[Prompt | None],
        echoes: Sequence[str],
        live: Sequence[LiveRequest],
        tokenizer: Tokenizer,
    ) -> None:
        """`echoes` are the texts with which the choices begin."""
        self._head = head
        self._body = body
        self._live = live
        self._texts = tokenizer.token_texts
        self._tokenizer = tokenizer
        self._is_echo_alone = is_echo_alone(body)
        self._choices = [
            [self._make_choice(prompt, echo, each) for _ in each.sequences]
            for prompt, echo, each in zip(prompts, echoes, live, strict=True)
        ]
        self._usage_so_far = ChunkUsage(body, live)
        # Choices that have a written chunk.
        self._begun: set[tuple[int, int]] = set()

    def whole(self, results: Sequence[Result]) -> answers.Completion:
        usages = [usage for _, usage in results]
        return {
            **self._head,
            "object": "text_completion",
            "choices": few_or_lazy(lambda: self._whole_choices(results), sum(map(len, self._choices))),
            "usage": self._usage(usages),
            **request_metrics(self._body, self._live, usages),
        }

    def _whole_choices(self, results: Sequence[Result]) -> Iterator[answers.CompletionChoice]:
        for position, (sequences, _) in enumerate(results):
            for sequence in sequences:
                index = sequence.finished.sequence_index
                shown = self._shown(Chunk(index, 0, sequence.token_ids, sequence.text, sequence.logprobs))
                yield {
                    "index": self._index(position, index),
                    **self._piece(position, shown),
                    **self._finish(position, sequence.finished),
                    "token_ids": token_ids(self._body, shown.token_ids),
                    **of_prompt(self._texts, self._body, self._live[position]),
                }

    def begin(self) -> Iterable[answers.CompletionChunk]:
        return ()

    def event(self, position: int, event: Chunk | Finished) -> Iterable[answers.CompletionChunk]:
        place = position, event.sequence_index
        finish: answers.ChunkFinish = NOT_FINISHED
        match event:
            case Chunk():
                event = shown = self._shown(event)
            case Finished():
                shown = Chunk(event.sequence_index, 0, [], "")
                finish = {**self._finish(position, event)}
        prompt: answers.ChunkOfPrompt = {}
        if place not in self._begun:
            self._begun.add(place)
            prompt = chunk_of_prompt(self._texts, self._body, self._live[position])
        choice: answers.CompletionChunkChoice = {
            "index": self._index(*place),
            **self._piece(position, shown),
            **finish,
            **chunk_token_ids(self._body, event),
            **prompt,
        }
        yield {**self._chunk([choice]), **self._usage_so_far.after(event)}

    def repeats_form(self, sequence_index: int) -> bool:
        is_begun = (0, sequence_index) in self._begun
        return is_begun and self._usage_so_far.repeats_form and not self._body.return_token_ids

    def end(self, usages: Sequence[Usage]) -> Iterable[answers.CompletionChunk]:
        metrics = request_metrics(self._body, self._live, usages)
        if self._usage_so_far.is_included:
            yield {**self._chunk([]), "usage": self._usage(usages), **metrics}
        elif metrics:
            yield {**self._chunk([]), **metrics}

    def _chunk(self, choices: list[answers.CompletionChunkChoice]) -> answers.CompletionChunk:
        return {**self._head, "object": "text_completion", "choices": choices}

    def _index(self, position: int, sequence_index: int) -> int:
        return position * len(self._choices[position]) + sequence_index

    def _piece(self, position: int, chunk: Chunk) -> answers.CompletionPiece:
        return self._choices[position][chunk.sequence_index].take(chunk)

    def _shown(self, chunk: Chunk) -> Chunk:
        return Chunk(chunk.sequence_index, chunk.offset, [], "") if self._is_echo_alone else chunk

    def _finish(self, position: int, finished: Finished) -> answers.Finish:
        return CUT if self._is_echo_alone else finish_fields(finished, self._live[position].request.stopping)

    def _usage(self, usages: Sequence[Usage]) -> answers.CompletionUsage:
        if self._is_echo_alone:
            usages = [dataclasses.replace(usage, generated_tokens=0) for usage in usages]
        return usage_fields(usages)

    def _make_choice(self, prompt: Prompt | None, echo: str, live: LiveRequest) -> "_Choice":
        request = live.request
        if self._body.logprobs is None:
            return _Choice(live, echo)
        texts = NamedByIds(self._texts) if self._body.return_tokens_as_token_ids else self._texts
        with_special_tokens = request.output.include_special_tokens
        detokenizer = self._tokenizer.detokenizer(
            include_special_tokens=with_special_tokens, prompt=request.prompt_token_ids
        )
        logprobs = CompletionLogprobs(texts, detokenizer, request.logprobs or 0, len(echo))
        if not self._body.echo:
            return _Choice(live, echo, logprobs)
        # A text prompt is echoed unchanged, without the special tokens before it.
        is_text = isinstance(prompt, TextPrompt)
        detokenizer = self._tokenizer.detokenizer(include_special_tokens=with_special_tokens and not is_text)
        return _Choice(live, echo, logprobs, CompletionLogprobs(texts, detokenizer, self._body.logprobs))


@dataclass(slots=True, eq=False)
class _Choice:
    """One choice of a stream. Its first piece has the prompt if the answer echoes it."""

    live: LiveRequest
    echo: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: CompletionLogprobs | None = None

    def take(self, chunk: Chunk) -> answers.CompletionPiece:
        """The next piece of the choice: text and log probabilities."""
        text, self.echo = self.echo + chunk.text, ""
        return {"text": text, "logprobs": self._shape(chunk)}

    def _shape(self, chunk: Chunk) -> answers.CompletionLogprobs | None:
        if self.logprobs is None:
            return None
        part: LogprobsPart = self.logprobs, chunk.token_ids, chunk.logprobs
        if self.prompt_logprobs is None:
            return completion_logprobs(part) if chunk.token_ids else None
        # The first token of a prompt has no log probability.
        entries = LazyList(lambda: chain([None], self.live.prompt_logprobs))
        prompt: LogprobsPart = self.prompt_logprobs, self.live.request.prompt_token_ids, entries
        self.prompt_logprobs = None
        return completion_logprobs(prompt, part)
