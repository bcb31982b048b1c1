"""/v1/completions: answers and chunks."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from gateway.api.answers import LazyList
from gateway.openai.logprobs import CompletionLogprobs, prompt_logprobs
from gateway.openai.options import is_echo_alone
from gateway.openai.schemas import CompletionBody
from gateway.openai.shapes import CUT, NOT_FINISHED, ChunkUsage, Head, as_chunk, finish_fields, usage_fields
from gateway.openai.token_text import TokenTexts
from gateway.replicas.events import Chunk, Finished, Usage
from gateway.replicas.live import LiveRequest
from gateway.request.running import Result
from gateway.request.types import Prompt, TextPrompt
from gateway.text.tokenizer import Tokenizer


class CompletionShaper:
    """Shapes the answer to a completion of one or several prompts.

    Sequence s of prompt p is the choice p * n + s.
    """

    def __init__(
        self,
        head: Head,
        body: CompletionBody,
        prompts: Sequence[Prompt | None],
        echoes: Sequence[str],
        live: Sequence[LiveRequest],
        tokenizer: Tokenizer,
        texts: TokenTexts | None,
    ) -> None:
        """`echoes` are what each text begins with; `texts` are those of the tokens, where log probabilities are asked
        for."""
        self._head = head
        self._body = body
        self._live = live
        self._texts = texts
        self._tokenizer = tokenizer
        self._is_echo_alone = is_echo_alone(body)
        self._choices = [
            [self._make_choice(prompt, echo, each) for _ in each.sequences]
            for prompt, echo, each in zip(prompts, echoes, live, strict=True)
        ]
        self._usage_so_far = ChunkUsage(body, live)

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        usage = self._usage([usage for _, usage in results])
        choices = LazyList(lambda: self._whole_choices(results))
        return self._head.fields("text_completion") | {"choices": choices, "usage": usage}

    def _whole_choices(self, results: Sequence[Result]) -> Iterator[dict[str, Any]]:
        for position, (sequences, _) in enumerate(results):
            prompt_logprobs = self._prompt_logprobs(position)
            for sequence in sequences:
                choice = self._choice(position, self._shown(as_chunk(sequence)))
                yield choice | self._finish(position, sequence.finished) | prompt_logprobs

    def chunk(self, position: int, event: Chunk | Finished) -> dict[str, Any]:
        match event:
            case Chunk():
                event = self._shown(event)
                choice = self._choice(position, event) | NOT_FINISHED
            case Finished(sequence_index=index):
                choice = self._choice(position, Chunk(index, 0, [], "")) | self._finish(position, event)
        return self._head.fields("text_completion") | {"choices": [choice]} | self._usage_so_far.after(event)

    def usage_chunk(self, usages: Sequence[Usage]) -> dict[str, Any]:
        return self._head.fields("text_completion") | {"choices": [], "usage": self._usage(usages)}

    def _choice(self, position: int, chunk: Chunk) -> dict[str, Any]:
        choices = self._choices[position]
        index = position * len(choices) + chunk.sequence_index
        return {"index": index} | choices[chunk.sequence_index].take(chunk)

    def _shown(self, chunk: Chunk) -> Chunk:
        return Chunk(chunk.sequence_index, chunk.offset, [], "") if self._is_echo_alone else chunk

    def _finish(self, position: int, finished: Finished) -> dict[str, Any]:
        return CUT if self._is_echo_alone else finish_fields(finished, self._live[position].request.stopping)

    def _usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        if self._is_echo_alone:
            usages = [dataclasses.replace(usage, generated_tokens=0) for usage in usages]
        return usage_fields(usages)

    def _prompt_logprobs(self, position: int) -> dict[str, Any]:
        if self._body.prompt_logprobs is None or self._texts is None:
            return {}
        logprobs = self._live[position].prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(self._texts, logprobs, self._body.prompt_logprobs)}

    def _make_choice(self, prompt: Prompt | None, echo: str, live: LiveRequest) -> "_Choice":
        request = live.request
        if self._body.logprobs is None or self._texts is None:
            return _Choice(live, echo, None, None)
        shapers = [
            CompletionLogprobs(
                self._texts,
                self._tokenizer.detokenizer(include_special_tokens=with_special_tokens),
                self._body.logprobs,
                text_offset=text_offset,
            )
            # A prompt that came as text is echoed as it came, without the special tokens that are put before it.
            for with_special_tokens, text_offset in (
                (request.output.include_special_tokens and not isinstance(prompt, TextPrompt), 0),
                (request.output.include_special_tokens, len(echo)),
            )
        ]
        return _Choice(live, echo, shapers[0] if self._body.echo else None, shapers[1])


class _Choice:
    """One choice as it grows; the prompt, where it is wanted back, comes with its first piece."""

    def __init__(
        self,
        live: LiveRequest,
        echo: str,
        prompt_logprobs: CompletionLogprobs | None,
        logprobs: CompletionLogprobs | None,
    ) -> None:
        self._live = live
        self._echo = echo
        self._prompt_logprobs = prompt_logprobs
        self._logprobs = logprobs

    def take(self, chunk: Chunk) -> dict[str, Any]:
        """The next piece of the choice: text and log probabilities."""
        text, self._echo = self._echo + chunk.text, ""
        return {"text": text, "logprobs": self._shape(chunk)}

    def _shape(self, chunk: Chunk) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        shaped = self._logprobs.shape(chunk.token_ids, chunk.logprobs)
        if self._prompt_logprobs is None:
            return shaped if chunk.token_ids else None
        # The first token of a prompt follows nothing, so it has no log probability.
        prompt = self._prompt_logprobs.shape(
            self._live.request.prompt_token_ids, LazyList(lambda: chain([None], self._live.prompt_logprobs))
        )
        self._prompt_logprobs = None
        return {name: values and _joined(values, shaped[name]) for name, values in prompt.items()}


def _joined(first: LazyList, second: LazyList | None) -> LazyList:
    return LazyList(lambda: chain(first, second or ()))
