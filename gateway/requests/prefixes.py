"""Pinned prefixes: from text, tokens or messages to every connected replica, and back."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gateway.auth.caller import current_caller
from gateway.requests.generator import Generator
from gateway.requests.limits import MAX_TIME_TO_LIVE_MS, Limits
from gateway.requests.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from gateway.requests.validation import check_model, check_prompt, check_prompt_tokens
from gateway.requests.violations import Violations
from gateway.schedulers.pin_client import Pin, pin_prefix, unpin_prefix
from gateway.schedulers.scheduler_client import SchedulerClient
from gateway.text.chat_prefix import encode_chat_prefix
from quire.rpc.errors import FieldViolation, NotFound, QuireError, Unavailable

_DEFAULT_TIME_TO_LIVE_MS = 5 * 60 * 1000
_MISSING_PREFIX = FieldViolation("prefix", "is missing; set text, token_ids or chat")

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A pin, and how long it is kept."""

    pin: Pin
    time_to_live_ms: int


class Prefixes:
    """Pins on every connected replica, so that it does not matter which of them gets the requests.

    The id of a pin comes from its content, so it is the same on all. A replica that fails does not undo the others:
    they may have had the pin before. Pinning again, or unpinning, brings all to one state.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._model = generator.model

    async def pin(
        self, model: str | None, prefix: Prompt | None, time_to_live_ms: int | None, *, timeout_s: float | None
    ) -> PinnedPrefix:
        """Pins what later requests with this prefix begin with; where replicas differ, says the least that all keep.

        Raises:
            QuireError: the prefix is refused here or by a replica, or a replica could not be reached.
        """
        caller = current_caller()
        caller.check_may_pin()
        with self._generator.arriving():
            caller.account.check()
            limits = await self._generator.limits()
            check_model(model, caller.visible(self._model.name))
            _check_pin(prefix, time_to_live_ms, limits)
            field, token_ids = await self._encode(prefix)
            check_prompt_tokens(field, token_ids, limits)
            lifetime_ms = _DEFAULT_TIME_TO_LIVE_MS if time_to_live_ms is None else time_to_live_ms
            with caller.account.admitted(len(token_ids)):
                pins, errors = await self._on_every_replica(
                    lambda client: pin_prefix(client, caller.tenant, token_ids, lifetime_ms, timeout_s)
                )
                if errors:
                    raise errors[0]
        return PinnedPrefix(min(pins, key=lambda pin: pin.num_tokens), lifetime_ms)

    async def unpin(self, pin_id: str, *, timeout_s: float | None) -> None:
        """Ends a pin wherever it is.

        Raises:
            QuireError: NotFound when no replica has it; else what went wrong with one.
        """
        caller = current_caller()
        caller.check_may_pin()
        violations = Violations()
        if not pin_id:
            violations.add("pin_id", "is empty; it must be one that PinPrefix answered")
        violations.raise_if_any()
        ended, errors = await self._on_every_replica(
            lambda client: unpin_prefix(client, caller.tenant, pin_id, timeout_s)
        )
        for error in errors:
            if not isinstance(error, NotFound):
                raise error
        if not ended:
            raise errors[0]

    async def _encode(self, prefix: Prompt | None) -> tuple[str, Sequence[int]]:
        """The name of the field that holds the prefix, and the token ids that requests with it begin with."""
        match prefix:
            case TextPrompt(text=text):
                return "text", await self._model.tokenizer.encode(text, add_special_tokens=True)
            case TokenPrompt(token_ids=token_ids):
                return "token_ids.ids", token_ids
            case ChatPrompt(messages=messages):
                return "chat.messages", await encode_chat_prefix(self._model, messages)
        raise AssertionError("the validator lets no pin without a prefix pass")

    async def _on_every_replica(
        self, call: Callable[[SchedulerClient], Awaitable[Answer]]
    ) -> tuple[list[Answer], list[QuireError]]:
        """The answers and the errors of all connected replicas. Raises Unavailable when there is none."""
        clients = [client for client in self._generator.replicas.clients.values() if client.is_connected]
        if not clients:
            raise Unavailable("no scheduler is connected", reason="NO_SCHEDULER")
        outcomes = await asyncio.gather(*(_outcome(call(client)) for client in clients))
        errors = [outcome for outcome in outcomes if isinstance(outcome, QuireError)]
        return [outcome for outcome in outcomes if not isinstance(outcome, QuireError)], errors


async def _outcome(call: Awaitable[Answer]) -> Answer | QuireError:
    try:
        return await call
    except QuireError as error:
        return error


def _check_pin(prefix: Prompt | None, time_to_live_ms: int | None, limits: Limits) -> None:
    violations = Violations()
    if prefix == TextPrompt(""):
        violations.add("text", "is empty")
    check_prompt(violations, prefix, limits, missing=_MISSING_PREFIX, chat_field="chat.messages")
    violations.check_range("time_to_live_ms", time_to_live_ms, 1, MAX_TIME_TO_LIVE_MS)
    violations.raise_if_any()
