"""Answers of servers in a form that can be compared, and their reading from bodies and events."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer.

    Attributes:
        calls: Names and arguments of tool calls.
        end: Its finish_reason; None if the choice has not ended.
        logprobs: One of each token that the server reports.
    """

    text: str
    calls: tuple[tuple[str, str], ...]
    end: str | None
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt: int
    completion: int
    total: int


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, or what has come of it.

    Attributes:
        choices: By index.
        is_complete: Whether all choices have ended, and a stream has its `[DONE]`.
        breaches: Rules of the API that it breaks.
    """

    choices: Mapping[int, Choice]
    usage: Usage | None
    is_complete: bool
    breaches: tuple[str, ...] = ()


@dataclass(slots=True)
class _Part:
    text: list[str] = field(default_factory=list[str])
    calls: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    end: str | None = None
    logprobs: list[float] = field(default_factory=list[float])


@dataclass(slots=True)
class Reading:
    """An answer that is being read: the body of a whole answer, or one event of a stream after the other."""

    num_choices: int
    is_stream: bool
    _parts: dict[int, _Part] = field(default_factory=dict[int, _Part])
    _usage: Usage | None = None
    _is_done: bool = False
    _breaches: list[str] = field(default_factory=list[str])

    def add(self, event: Mapping[str, Any]) -> bool:
        """Returns whether the event has something that was generated. Raises ValueError if it has not the form of
        OpenAI's API."""
        try:
            return self._add(event)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{type(error).__name__} {error}") from error

    def _add(self, event: Mapping[str, Any]) -> bool:
        has_output = False
        if self._is_done:
            self._breaches.append("an event after [DONE]")
        for choice in event.get("choices") or ():
            has_output |= self._add_choice(choice)
        if usage := event.get("usage"):
            numbers = [int(usage[f"{name}_tokens"]) for name in ("prompt", "completion", "total")]
            self._usage = Usage(*numbers)
        return has_output

    def _add_choice(self, choice: Mapping[str, Any]) -> bool:
        part = self._parts.setdefault(int(choice["index"]), _Part())
        content = choice.get("delta") or choice.get("message") or {}
        thought = content.get("reasoning_content") or content.get("reasoning") or ""
        text = choice.get("text") or thought + (content.get("content") or "")
        calls = content.get("tool_calls") or ()
        if part.end is not None and (text or calls):
            self._breaches.append("text after the end of a choice")
        part.text.append(text)
        for place, call in enumerate(calls):
            made = part.calls.setdefault(call.get("index", place), ["", ""])
            made[0] += call["function"].get("name") or ""
            made[1] += call["function"].get("arguments") or ""
        logprobs = choice.get("logprobs") or {}
        part.logprobs += [each for each in logprobs.get("token_logprobs") or () if each is not None]
        part.logprobs += [each["logprob"] for each in logprobs.get("content") or ()]
        if (end := choice.get("finish_reason")) is not None:
            if part.end is not None:
                self._breaches.append("two ends of a choice")
            part.end = str(end)
        return bool(text or calls)

    def done(self) -> None:
        """`[DONE]` came, or the whole body."""
        if self._is_done:
            self._breaches.append("a second [DONE]")
        self._is_done = True

    def answer(self) -> Answer:
        choices = {
            index: Choice(
                "".join(part.text),
                tuple((name, arguments) for name, arguments in part.calls.values()),
                part.end,
                tuple(part.logprobs),
            )
            for index, part in sorted(self._parts.items())
        }
        breaches = list(self._breaches)
        if set(choices) - set(range(self.num_choices)):
            breaches.append(f"choices {list(choices)} of {self.num_choices}")
        ended = [choice.end is not None for choice in choices.values()]
        is_complete = self._is_done and len(ended) == self.num_choices and all(ended)
        return Answer(choices, self._usage, is_complete, tuple(dict.fromkeys(breaches)))
