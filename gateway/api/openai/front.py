"""OpenAI's completions and chat completions, and vLLM's API for tokens."""

from gateway.api.front import Front, FrontContext
from gateway.api.generation_fields import CompletionBody
from gateway.api.openai.completion_calls import ChatCall, CompletionCall
from gateway.api.openai.read_openai import parse_body
from gateway.api.openai.routes import openai_routes
from gateway.api.openai.schemas import ChatBody


def open_front(context: FrontContext) -> Front:
    """Opens the front."""
    model, limits = context.generator.model.name, context.body_limits

    async def read_chat(data: bytes) -> ChatCall:
        body = await parse_body(ChatBody, data, limits)
        return ChatCall(body, body.model or model)

    async def read_completion(data: bytes) -> CompletionCall:
        body = await parse_body(CompletionBody, data, limits)
        return CompletionCall(body, body.model or model)

    return Front(
        routes=openai_routes(context),
        call_readers={"/v1/chat/completions": read_chat, "/v1/completions": read_completion},
    )
