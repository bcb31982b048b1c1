"""Text to token ids and back, as generation would see them."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.auth.caller import current_caller
from gateway.requests.generator import Generator
from gateway.requests.request import ChatPrompt, TextPrompt
from gateway.requests.validation import check_messages, check_model, texts_of
from gateway.requests.violations import Violations


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Token ids, how the vocabulary spells them, and how many of them prompt and output may have together."""

    token_ids: list[int]
    tokens: list[str]
    max_model_len: int


class TextService:
    """Tokenizes and detokenizes for callers, within the limits of generation."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._model = generator.model

    async def tokenize(
        self, model: str | None, text: TextPrompt | ChatPrompt | None, *, add_special_tokens: bool
    ) -> TokenizedText:
        """The tokens of a text, or of the prompt that the chat template makes.

        Raises:
            QuireError: the model is not served here, the input is missing or refused.
        """
        caller = current_caller()
        caller.account.check()
        limits = await self._generator.limits()
        check_model(model, caller.visible(self._model.name))
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
        with caller.account.admitted(0):
            token_ids = await self._encode(text, add_special_tokens=add_special_tokens)
            return TokenizedText(token_ids, await self._model.tokenizer.spell(token_ids), limits.max_model_len)

    async def detokenize(self, model: str | None, token_ids: Sequence[int], *, include_special_tokens: bool) -> str:
        """The text of token ids.

        Raises:
            QuireError: the model is not served here, or an id is out of range.
        """
        caller = current_caller()
        caller.account.check()
        limits = await self._generator.limits()
        check_model(model, caller.visible(self._model.name))
        violations = Violations()
        if violations.check_count("token_ids", token_ids, limits.max_model_len):
            violations.check_token_ids("token_ids", token_ids, limits.vocab_size)
        violations.raise_if_any()
        with caller.account.admitted(0):
            return await self._model.tokenizer.decode_any(token_ids, include_special_tokens=include_special_tokens)

    async def _encode(self, text: TextPrompt | ChatPrompt | None, *, add_special_tokens: bool) -> list[int]:
        if isinstance(text, ChatPrompt):
            return await self._model.encode_chat(text.messages)
        assert text is not None, "the validator lets no missing text pass"
        return await self._model.tokenizer.encode(text.text, add_special_tokens=add_special_tokens)
