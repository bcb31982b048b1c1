"""Conversion of batch requests to calls of the APIs that they name."""

from gateway.api.body import BodyLimits
from gateway.api.openai.completion_calls import ChatCall, CompletionCall
from gateway.api.openai.read import parse_body
from gateway.api.openai.schemas import ChatBody, CompletionBody
from gateway.api.respond import Call
from gateway.api.responses import read as responses
from gateway.api.responses.calls import ResponseCall, conversation_with
from gateway.api.responses.store import ResponseStore


class CallReader:
    """Makes calls from bodies."""

    def __init__(self, model: str, limits: BodyLimits, store: ResponseStore) -> None:
        """`model` is the model for bodies that name none; `store` stores responses."""
        self._model = model
        self._limits = limits
        self._store = store

    async def __call__(self, endpoint: str, data: bytes) -> Call:
        """The call with a body at an endpoint. Raises InvalidArgument."""
        match endpoint:
            case "/v1/chat/completions":
                chat = await parse_body(ChatBody, data, self._limits)
                return ChatCall(chat, chat.model or self._model)
            case "/v1/completions":
                completion = await parse_body(CompletionBody, data, self._limits)
                return CompletionCall(completion, completion.model or self._model)
            case _:
                body = await responses.parse_body(responses.ResponseBody, data, self._limits)
                conversation = await conversation_with(self._store, body)
                return ResponseCall(body, body.model or self._model, self._store, conversation)
