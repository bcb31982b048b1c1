"""/tokenize and /detokenize, in the shapes that vLLM has for them."""

from typing import Any

from gateway.openai.options import chat_prompt
from gateway.openai.schemas import DetokenizeBody, TokenizeBody
from gateway.requests.request import ChatPrompt, TextPrompt
from gateway.text.text_service import TextService
from quire.rpc.errors import invalid_field

_PARAMS = {"text": "prompt", "input": "prompt", "token_ids": "tokens"}


class TextEndpoints:
    """Tokens of a text or a conversation, and the text of tokens."""

    def __init__(self, texts: TextService) -> None:
        self._texts = texts

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """Raises QuireError as `TextService.tokenize` does."""
        tokenized = await self._texts.tokenize(
            body.model or None, _tokenize_input(body), add_special_tokens=body.add_special_tokens is not False
        )
        return {
            "count": len(tokenized.token_ids),
            "max_model_len": tokenized.max_model_len,
            "tokens": tokenized.token_ids,
            "token_strs": tokenized.tokens if body.return_token_strs else None,
        }

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """Raises QuireError as `TextService.detokenize` does."""
        return {"prompt": await self._texts.detokenize(body.model or None, body.tokens, include_special_tokens=True)}


def text_param_name(field: str) -> str:
    """What a field of the text service is called in the bodies."""
    head, bracket, rest = field.removeprefix("chat.").partition("[")
    return _PARAMS.get(head, head) + bracket + rest


def _tokenize_input(body: TokenizeBody) -> TextPrompt | ChatPrompt:
    if body.prompt is not None and body.messages is not None:
        raise invalid_field("prompt", "is set besides messages; set exactly one of them")
    if body.messages is not None:
        return chat_prompt(body.messages)
    if body.prompt is None:
        raise invalid_field("prompt", "is missing; set prompt or messages")
    return TextPrompt(body.prompt)
