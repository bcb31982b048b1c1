"""Calls that do not generate: tokenize, detokenize, and pinned prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.auth.caller import Caller, current_caller
from gateway.auth.quota import Refund
from gateway.replicas.scheduler_calls import Pin
from gateway.request.generator import Generator
from gateway.request.limits import MAX_TIME_TO_LIVE_MS, Limits
from gateway.request.models import Models
from gateway.request.prepare import encode_prompt
from gateway.request.validation import check_messages, check_model, check_prompt, check_prompt_tokens, texts_of
from gateway.request.violations import Violations
from gateway.types import ChatPrompt, ModelKind, Prompt, TextPrompt
from quire.rpc.errors import FieldViolation, invalid_field

_DEFAULT_TIME_TO_LIVE_MS = 5 * 60 * 1000
_MISSING_PREFIX = FieldViolation("prefix", "is missing; set text, token_ids or chat")


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Token ids, their spelling in the vocabulary, and the maximum tokens of prompt and output together."""

    token_ids: list[int]
    tokens: list[str]
    max_model_len: int


class TextService:
    """Tokenizes and detokenizes for callers, within the limits of generation. Pins prefixes on every connected replica,
    so that any of them may get the requests."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def tokenize(
        self, model: str | None, text: TextPrompt | ChatPrompt | None, *, add_special_tokens: bool
    ) -> TokenizedText:
        """The tokens of a text, or of the prompt that the chat template makes of messages.

        Raises:
            QuireError: the model is not served here, the input is missing or refused.
        """
        generator = self._models.of(model)
        caller, limits = await _admit(generator, model)
        violations = Violations()
        match text:
            case None:
                violations.add("input", "is missing; set text or chat")
            case TextPrompt():
                violations.check_text("text", text.text)
                violations.check_size("text", [text.text], limits.max_tokenize_bytes)
            case ChatPrompt():
                if check_messages(violations, text, limits, field="chat.messages"):
                    violations.check_size("chat.messages", texts_of(text), limits.max_tokenize_bytes)
        violations.raise_if_any()
        assert text is not None
        tokenizer = generator.model.tokenizer
        with caller.account.admitted(0):
            if isinstance(text, ChatPrompt):
                token_ids = await generator.model.chat.encode(text)
            else:
                token_ids = await tokenizer.encode(text.text, add_special_tokens=add_special_tokens)
            return TokenizedText(token_ids, await tokenizer.spell(token_ids), limits.shown_model_len)

    async def detokenize(self, model: str | None, token_ids: Sequence[int], *, include_special_tokens: bool) -> str:
        """The text of token ids.

        Raises:
            QuireError: the model is not served here, or an id is out of range.
        """
        generator = self._models.of(model)
        caller, limits = await _admit(generator, model)
        violations = Violations()
        if violations.check_count("token_ids", token_ids, limits.max_model_len):
            violations.check_token_ids("token_ids", token_ids, limits.vocab_size)
        violations.raise_if_any()
        with caller.account.admitted(0):
            return await generator.model.tokenizer.decode_any(token_ids, include_special_tokens=include_special_tokens)

    async def pin(
        self, model: str | None, prefix: Prompt | None, time_to_live_ms: int | None, *, timeout_s: float | None
    ) -> Pin:
        """Pins the start of later requests with this prefix; if replicas differ, returns the shortest pin.

        Raises:
            QuireError: the prefix is refused here or by a replica, or a replica could not be reached.
        """
        current_caller().check_may_pin()
        generator = self._models.of(model, ModelKind.TEXT)
        with generator.arriving():
            caller, limits = await _admit(generator, model)
            adapter = generator.adapters.resolve(model)
            violations = Violations()
            if prefix == TextPrompt(""):
                violations.add("text", "is empty")
            check_prompt(violations, prefix, limits, missing=_MISSING_PREFIX, chat_field="chat.messages")
            violations.check_range("time_to_live_ms", time_to_live_ms, 1, MAX_TIME_TO_LIVE_MS)
            violations.raise_if_any()
            lifetime_ms = _DEFAULT_TIME_TO_LIVE_MS if time_to_live_ms is None else time_to_live_ms
            with caller.account.admitted() as use:
                if isinstance(prefix, ChatPrompt):
                    field, token_ids = "chat.messages", await generator.model.chat.encode_prefix(prefix)
                else:
                    field, token_ids = await encode_prompt(prefix, generator.model)
                check_prompt_tokens(field, token_ids, limits)
                caller.account.charge_prompt(use, len(token_ids))
                # A pin that ended while it was computed does not count as refused.
                use.refund = lambda error: Refund.NOTHING if error.reason == "PIN_LOST" else Refund.ALL
                calls = generator.replicas.calls
                return await calls.pin(caller.tenant, token_ids, lifetime_ms, timeout_s=timeout_s, adapter=adapter)

    async def unpin(self, pin_id: str, *, timeout_s: float | None) -> None:
        """Ends a pin on every connected replica.

        Raises:
            QuireError: NotFound if no replica has it; else the error of one.
        """
        caller = current_caller()
        caller.check_may_pin()
        if not pin_id:
            raise invalid_field("pin_id", "is empty; it must be one that PinPrefix returned")
        await self._models.unpin(caller.tenant, pin_id, timeout_s)


async def _admit(generator: Generator, model: str | None) -> tuple[Caller, Limits]:
    """The caller and the limits of a call. Raises QuireError if its key may not call now, or names another model."""
    caller = current_caller()
    caller.account.check()
    limits = await generator.limits()
    check_model(model, generator.adapters.visible(caller, model))
    return caller, limits
