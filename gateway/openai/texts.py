"""/tokenize, /detokenize and /tokenizer_info, in the shapes that vLLM has for them."""

import asyncio
from collections.abc import Mapping
from typing import Any

from gateway.api.answers import as_json
from gateway.auth.caller import current_caller
from gateway.model import ServedModel
from gateway.openai.options import chat_prompt
from gateway.openai.schemas import DetokenizeBody, TokenizeBody
from gateway.request.prompts import TextService
from gateway.request.types import ChatPrompt, TextPrompt
from gateway.request.validation import find_model
from quire.rpc.errors import invalid_field

# So many are written in less than a millisecond.
_FEW = 4096
# What stands for a tokenizer.json without a tokenizer_config.json in transformers.
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
# Names of files and directories where the model was made, and what our reader of the directory adds.
_NOT_SHOWN = frozenset(
    {"vocab_file", "merges_file", "tokenizer_file", "special_tokens_map_file", "name_or_path", "added_tokens"}
)
_PARAMS = {"text": "prompt", "input": "prompt", "token_ids": "tokens"}


class TextEndpoints:
    """Tokens of a text or a conversation, and the text of tokens."""

    def __init__(self, texts: TextService) -> None:
        self._texts = texts

    async def tokenize(self, body: TokenizeBody) -> bytes:
        """The answer as JSON. Raises QuireError as `TextService.tokenize` does."""
        tokenized = await self._texts.tokenize(
            body.model or None, _tokenize_input(body), add_special_tokens=body.add_special_tokens is not False
        )
        answer = {
            "count": len(tokenized.token_ids),
            "max_model_len": tokenized.max_model_len,
            "tokens": tokenized.token_ids,
            "token_strs": tokenized.tokens if body.return_token_strs else None,
        }
        return await _as_json(answer, len(tokenized.token_ids))

    async def detokenize(self, body: DetokenizeBody) -> bytes:
        """The answer as JSON. Raises QuireError as `TextService.detokenize` does."""
        text = await self._texts.detokenize(body.model or None, body.tokens, include_special_tokens=True)
        return await _as_json({"prompt": text}, len(body.tokens))


async def _as_json(answer: Mapping[str, Any], num_tokens: int) -> bytes:
    """An answer of many tokens is written in a thread, so that other calls go on."""
    return as_json(answer) if num_tokens <= _FEW else await asyncio.to_thread(as_json, answer)


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """The tokenizer's configuration with its chat template; tokens are their texts.

    Raises:
        NotFound: the caller may not use the model.
    """
    find_model(model.name, current_caller().visible(model.name))
    config = {name: _plain(value) for name, value in model.tokenizer_config.items() if name not in _NOT_SHOWN}
    config.setdefault("tokenizer_class", _TOKENIZER_CLASS)
    return config if model.chat.template is None else config | {"chat_template": model.chat.template.source}


def _plain(value: Any) -> Any:
    """A value of tokenizer_config.json in which each token that is written as an object is its text."""
    match value:
        case {"content": str(content)}:
            return content
        case Mapping():
            return {name: _plain(each) for name, each in value.items()}
        case list():
            return [_plain(each) for each in value]
    return value


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
