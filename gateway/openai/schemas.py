"""The bodies of requests: which fields there are and of what types. Ranges are the validator's business.

A field that is null is as good as absent. Fields that a body does not declare are kept apart (`model_extra`), for
`unsupported.py` to judge.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from gateway.request.limits import MAX_LOGIT_BIAS

Element = TypeVar("Element")
# Only the first thing that is wrong is told, and a body may hold millions of them.
ListOf = Annotated[list[Element], Field(fail_fast=True)]


def _check_size(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        most = f"{MAX_LOGIT_BIAS:,}"
        raise PydanticCustomError("too_long", "an object of at most {most} entries", {"most": most})
    return value


class Body(BaseModel):
    """Strict about types: no text is taken for a number, and no number is NaN or infinite."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    include_usage: bool | None = None
    # vLLM's: with include_usage, every chunk has the usage so far.
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What completions and chat completions have in common; below the blank line, what vLLM adds."""

    n: int | None = None
    best_of: int | None = None
    stop: str | ListOf[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Names in JSON are texts.
    logit_bias: Annotated[dict[Annotated[int, Field(strict=False)], float] | None, BeforeValidator(_check_size)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: ListOf[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: ListOf[int] | None = None
    bad_words: ListOf[str] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: int | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None


class CompletionBody(GenerationBody):
    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    type: str
    text: str | None = None


class Message(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    role: str
    content: str | ListOf[ContentPart] | None = None
    name: str | None = None


class ChatBody(GenerationBody):
    messages: ListOf[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None


class TokenizeBody(Body):
    """Either a prompt or messages."""

    prompt: str | None = None
    messages: ListOf[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: ListOf[int]


# What the types of fields with several are called in errors.
UNION_TYPES: dict[str, str] = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": "a string or a list of text parts",
    "early_stopping": 'true, false or "never"',
}
