"""Bodies to the options that the generator takes, and the validator's field names back to the bodies'."""

import re
from collections.abc import Sequence
from typing import cast

from gateway.openai.schemas import ChatBody, CompletionBody, GenerationBody, Message
from gateway.requests.request import (
    BeamSearchOptions,
    ChatMessage,
    ChatPrompt,
    EarlyStopping,
    OutputOptions,
    Prompt,
    RequestOptions,
    SamplingOptions,
    StoppingOptions,
    TextPrompt,
    TokenPrompt,
)

# As OpenAI has it where a completion does not say how long it may get.
DEFAULT_MAX_TOKENS = 16

_EARLY_STOPPING = {
    None: EarlyStopping.FALSE,
    False: EarlyStopping.FALSE,
    True: EarlyStopping.TRUE,
    "never": EarlyStopping.NEVER,
}
_GROUPS = re.compile(r"^(sampling|stopping|output)\.")
_RENAMED = {
    "text": "prompt",
    "token_ids.ids": "prompt",
    "include_stop_string": "include_stop_str_in_output",
    "beam_search.length_penalty": "length_penalty",
    "beam_search.early_stopping": "early_stopping",
}


def completion_prompts(body: CompletionBody) -> list[Prompt]:
    """The prompts of a completion; a list of numbers is one prompt."""
    prompt = body.prompt
    if prompt is None:
        return []
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt or isinstance(prompt[0], int):
        return [TokenPrompt(cast(list[int], prompt))]
    return [_prompt(each) for each in cast(list[str] | list[list[int]], prompt)]


def completion_options(body: CompletionBody, prompt: Prompt | None, request_id: str) -> RequestOptions:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    # Nothing but the prompt is wanted back, whose log probabilities are made by generating one token.
    if is_echo_alone(body):
        max_tokens = 1
    output = OutputOptions(
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        include_special_tokens=body.skip_special_tokens is False,
    )
    return _options(body, prompt, request_id, max_tokens, output)


def chat_options(body: ChatBody, request_id: str) -> RequestOptions:
    output = OutputOptions(
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        include_special_tokens=body.skip_special_tokens is False,
    )
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _options(body, chat_prompt(body.messages), request_id, max_tokens, output)


def chat_prompt(messages: Sequence[Message]) -> ChatPrompt:
    return ChatPrompt([ChatMessage(each.role, message_text(each), each.name or None) for each in messages])


def message_text(message: Message) -> str:
    """A message's content as templates want it: one text, the parts on lines of their own."""
    if isinstance(message.content, list):
        return "\n".join(part.text or "" for part in message.content)
    return message.content or ""


def is_echo_alone(body: CompletionBody) -> bool:
    """Whether only the prompt is to come back, and nothing that follows it."""
    return bool(body.echo) and body.max_tokens == 0


def param_name(body: GenerationBody, field: str) -> str:
    """What a field of the validator is called in the body."""
    name = _GROUPS.sub("", field)
    head, bracket, rest = name.partition("[")
    if isinstance(body, ChatBody):
        if head == "logprobs":
            return "top_logprobs"
        if head == "max_tokens" and body.max_completion_tokens is not None:
            return "max_completion_tokens"
    if head == "beam_search.beam_width":
        return "n" if body.best_of is None else "best_of"
    if (
        head == "prompt_logprobs"
        and isinstance(body, CompletionBody)
        and body.prompt_logprobs != _prompt_logprobs(body)
    ):
        return "logprobs"
    return _RENAMED.get(head, head) + bracket + rest


def _prompt_logprobs(body: CompletionBody) -> int | None:
    """What the body asks of the prompt, of which an echo shows what it shows of the text."""
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((count for count in asked if count is not None), default=None)


def _prompt(prompt: str | list[int]) -> Prompt:
    return TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt)


def _options(
    body: GenerationBody, prompt: Prompt | None, request_id: str, max_tokens: int | None, output: OutputOptions
) -> RequestOptions:
    return RequestOptions(
        prompt=prompt,
        # Some programs that know of no model send an empty name.
        model=body.model or None,
        sampling=_sampling_options(body),
        stopping=StoppingOptions(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
            stop_token_ids=body.stop_token_ids or (),
            ignore_eos=bool(body.ignore_eos),
            include_stop_string=bool(body.include_stop_str_in_output),
        ),
        output=output,
        request_id=request_id,
        # Lower runs earlier in vLLM's API, higher in Quire's.
        priority=None if body.priority is None else -body.priority,
        priority_sign=-1,
    )


def _sampling_options(body: GenerationBody) -> SamplingOptions:
    beam_search = _beam_search_options(body) if body.use_beam_search else None
    return SamplingOptions(
        temperature=body.temperature,
        # vLLM's other way to say all tokens, which many of its clients send by default.
        top_k=0 if body.top_k == -1 else body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        # vLLM's other way to leave the choice to the server.
        seed=None if body.seed == -1 else body.seed,
        n=body.n,
        best_of=body.best_of,
        beam_search=beam_search,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias or {},
        allowed_token_ids=body.allowed_token_ids or (),
        bad_words=body.bad_words or (),
    )


def _beam_search_options(body: GenerationBody) -> BeamSearchOptions:
    """As many beams as `best_of` says, else as many as are returned."""
    width = body.best_of if body.best_of is not None else body.n
    return BeamSearchOptions(
        beam_width=1 if width is None else width,
        length_penalty=body.length_penalty,
        early_stopping=_EARLY_STOPPING[body.early_stopping],
    )
