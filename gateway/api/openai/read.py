"""Converts the body of a request to protobuf messages, and maps the names of their fields back to names in the body."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter
from starlette.requests import Request

from gateway.api.body import BodyLimits, read_body, validated
from gateway.api.field_rule import FieldRule
from gateway.api.fields import LongList, Names, numbered, options_of, parse
from gateway.api.openai.constraint_fields import constraint_of, constraint_path
from gateway.api.openai.conversation import (
    ConversationFields,
    Message,
    chat_message,
    kept_tools,
    left_out_tools,
    template_options,
    tool_choice_of,
    tools_of,
)
from gateway.api.openai.schemas import (
    UNION_TYPES,
    AgentHints,
    Body,
    ChatBody,
    CompletionBody,
    GenerationBody,
    TokenizeBody,
    check_body,
)
from gateway.auth.caller import LOWEST_PRIORITY, current_caller
from gateway.request.limits import MAX_TIME_TO_LIVE_MS
from gateway.request.violations import Violations
from gateway.types import ChatPrompt, Clamp, Prompt, RequestOptions, TextPrompt, TokenPrompt, write
from quire.common.v1 import common_pb2
from quire.common.v1.common_pb2 import SamplingParameters

BodyType = TypeVar("BodyType", bound=Body)

_MESSAGES = LongList("messages", TypeAdapter(list[Message]))
# OpenAI's default for completions.
DEFAULT_MAX_TOKENS = 16

_EARLY_STOPPING = {
    None: common_pb2.EARLY_STOPPING_FALSE,
    False: common_pb2.EARLY_STOPPING_FALSE,
    True: common_pb2.EARLY_STOPPING_TRUE,
    "never": common_pb2.EARLY_STOPPING_NEVER,
}
_DEFAULT_RETENTION, _RETENTION = "5m", re.compile(r"([1-9][0-9]{0,6})([smh])")
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000}


async def read_request(kind: type[BodyType], request: Request, limits: BodyLimits) -> BodyType:
    """The body of a request. Raises the errors of `read_body` and `parse_body`."""
    return await parse_body(kind, await read_body(request, limits), limits)


async def parse_body(kind: type[BodyType], data: bytes, limits: BodyLimits) -> BodyType:
    """The body in `data`. Raises InvalidArgument like `parse`, also for a field that is not supported."""
    check = partial(_check, limits.rule)
    return await parse(kind, data, limits, _MESSAGES, check, UNION_TYPES, api=kind.api)


def _check(rule: FieldRule, violations: Violations, body: Body) -> None:
    check_body(violations, body)
    if isinstance(body, ChatBody | TokenizeBody):
        rule.leave_out(violations, body.api, left_out_tools(body))


def body_of(kind: type[BodyType], fields: Mapping[str, Any], rule: FieldRule, api: str) -> BodyType:
    """Like `parse_body`, for fields that are already parsed. `api` is the name of the API."""
    body, violations = validated(kind, fields, UNION_TYPES), Violations()
    rule.check(violations, body, api)
    check_body(violations, body)
    violations.raise_if_any()
    return body


def completion_prompts(body: CompletionBody) -> list[Prompt]:
    """The prompts of a completion; a list of numbers is one prompt."""
    prompt = body.prompt
    if prompt is None:
        return []
    add_special_tokens = body.add_special_tokens is not False
    if isinstance(prompt, str):
        return [TextPrompt(prompt, add_special_tokens)]
    if not prompt or isinstance(prompt[0], int):
        return [TokenPrompt(cast(list[int], prompt))]
    prompts = cast(list[str] | list[list[int]], prompt)
    return [TextPrompt(each, add_special_tokens) if isinstance(each, str) else TokenPrompt(each) for each in prompts]


def completion_options(body: CompletionBody, prompt: Prompt | None, request_id: str) -> RequestOptions:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    # The log probabilities of the prompt arrive with the first generated token.
    if is_echo_alone(body):
        max_tokens = 1
    return _options(body, prompt, request_id, max_tokens, body.logprobs, _prompt_logprobs(body))


def chat_options(body: ChatBody, request_id: str) -> RequestOptions:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prompt = dataclasses.replace(
        chat_prompt(body.messages, body),
        tool_choice=tool_choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=constraint_of(body),
    )
    return _options(body, prompt, request_id, max_tokens, logprobs, body.prompt_logprobs)


def chat_prompt(messages: Sequence[Message], fields: ConversationFields) -> ChatPrompt:
    return ChatPrompt(
        [chat_message(each) for each in messages],
        tools=tools_of(fields),
        template_options=template_options(fields),
        template=fields.chat_template,
    )


def is_echo_alone(body: CompletionBody) -> bool:
    """Whether the answer has only the prompt and no generated text."""
    return bool(body.echo) and body.max_tokens == 0


def names_of(body: GenerationBody, prompt: str = "prompt") -> Names:
    """The names of the validator's fields in the body; `prompt` is the prompt's name."""
    begins = {
        "prompt": prompt,
        "text": prompt,
        "token_ids.ids": prompt,
        "stopping.include_stop_string": "include_stop_str_in_output",
        "output.prediction": "prediction.content",
        "sampling.beam_search.beam_width": "n" if body.best_of is None else "best_of",
    }
    path = constraint_path(body)
    whole = {} if path is None else {"sampling.constraint": path, "response_format": path}
    if isinstance(body, CompletionBody) and body.prompt_logprobs != _prompt_logprobs(body):
        begins["output.prompt_logprobs"] = "logprobs"
    if isinstance(body, ChatBody):
        begins |= numbered("tools", kept_tools(body)) | _names_of_calls(body.messages)
        begins["output.logprobs"] = "top_logprobs"
        begins["tool_choice.name"], begins["tool_choice.mode"] = "tool_choice.function.name", "tool_choice"
        begins["tool_choice.allowed"] = "tool_choice.allowed_tools.tools"
        begins["template_options.arguments"] = "chat_template_kwargs"
        own = (name for name in ("documents", "enable_thinking") if getattr(body, name) is not None)
        whole |= {f"template_options.arguments.{name}": name for name in own}
        if body.max_completion_tokens is not None:
            begins["stopping.max_tokens"] = "max_completion_tokens"
    return Names(begins, whole)


def _names_of_calls(messages: Sequence[Message]) -> dict[str, str]:
    """Names of the fields of earlier calls, which OpenAI's bodies nest one level deeper."""
    places = (
        f"messages[{position}].tool_calls[{number}]"
        for position, message in enumerate(messages)
        for number in range(len(message.tool_calls or ()))
    )
    return {f"{place}.{name}": f"{place}.function.{name}" for place in places for name in ("name", "arguments")}


def _prompt_logprobs(body: CompletionBody) -> int | None:
    """The number of log probabilities per prompt token; with `echo`, at least the number for generated tokens."""
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((count for count in asked if count is not None), default=None)


def _options(
    body: GenerationBody,
    prompt: Prompt | None,
    request_id: str,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> RequestOptions:
    options = options_of(
        body,
        prompt,
        request_id,
        max_tokens=max_tokens,
        include_stop_string=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        include_special_tokens=body.skip_special_tokens is False,
        logprobs=logprobs,
        prediction=body.prediction and body.prediction.text,
        prompt_logprobs=prompt_logprobs,
    )
    as_written = dict(options.as_written)
    _add_sampling(body, options.sampling, as_written)
    return dataclasses.replace(
        options,
        as_written=as_written,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        clamp=Clamp.AS_SET if isinstance(body, ChatBody) else Clamp.NEVER,
        retain_ms=_hinted_retention_ms(body),
        expected_tokens=_hinted_length(body),
        # In vLLM's API lower values run earlier, in Quire higher values.
        priority=_hinted_priority(body) if body.priority is None else -body.priority,
        priority_sign=-1,
    )


def _agent_hints(body: GenerationBody) -> AgentHints:
    hints = None if body.nvext is None else body.nvext.agent_hints
    return hints or AgentHints()


def _hinted_length(body: GenerationBody) -> int | None:
    """The expected number of tokens in the answer; None without a valid hint."""
    length = _agent_hints(body).osl
    return length if length is not None and length > 0 else None


def _hinted_priority(body: GenerationBody) -> int | None:
    """The priority in an agent's hint, limited to the maximum of its key: a hint is never rejected."""
    hints = _agent_hints(body)
    if hints.priority is None:
        return None
    return max(LOWEST_PRIORITY, min(hints.priority, current_caller().access.max_priority))


def _hinted_retention_ms(body: GenerationBody) -> int | None:
    """The hinted time to keep the blocks of the conversation, limited to the maximum time of a pin; None if absent."""
    control = None if body.nvext is None else body.nvext.cache_control
    if control is None or (found := _RETENTION.fullmatch(control.ttl or _DEFAULT_RETENTION)) is None:
        return None
    return min(int(found[1]) * _UNIT_MS[found[2]], MAX_TIME_TO_LIVE_MS)


def _add_sampling(body: GenerationBody, sampling: SamplingParameters, as_written: dict[str, Any]) -> None:
    """Adds the parameters that have another form in the body."""
    if isinstance(body, CompletionBody) and (constraint := constraint_of(body)) is not None:
        sampling.constraint.CopyFrom(constraint)
    if body.seed not in (None, -1):
        # As in torch, a negative seed is the unsigned number with the same 64 bits.
        sampling.seed = body.seed % 2**64
    if body.use_beam_search:
        # The beam width is `best_of`, or by default the number of returned sequences.
        width = body.best_of if body.best_of is not None else body.n
        beam_search, path = sampling.beam_search, "sampling.beam_search"
        beam_search.early_stopping = _EARLY_STOPPING[body.early_stopping]
        write(beam_search, f"{path}.beam_width", 1 if width is None else width, as_written)
        write(beam_search, f"{path}.length_penalty", body.length_penalty, as_written)
