"""How many log probabilities may come all at once.

Each costs every process on its way a microsecond or two. Those of a stream come a few at a time; those of a prompt, and
of sequences that are chosen when all candidates have ended, do not.
"""

from gateway.requests.request import GenerationRequest
from gateway.requests.violations import Violations

MAX_PROMPT_LOGPROBS = 1 << 20
"""Of all prompts of a call."""

MAX_CHOSEN_LOGPROBS = 1 << 18
"""Of the sequences of one request that come when they have been chosen among others."""


def check_answer_size(request: GenerationRequest) -> None:
    """Raises InvalidArgument where a request asks for more log probabilities than may come at once."""
    check_prompt_logprobs(num_prompt_logprobs(request))
    if request.logprobs is None or not request.chooses:
        return
    num_sequences, max_tokens = request.num_sequences, request.stopping.max_tokens
    count = num_sequences * max_tokens * (1 + request.logprobs)
    if count > MAX_CHOSEN_LOGPROBS:
        _refuse(
            "output.logprobs",
            f"is {request.logprobs}; {num_sequences:,} chosen sequences of up to {max_tokens:,} tokens would have "
            f"{count:,} log probabilities, which come at once, and at most {MAX_CHOSEN_LOGPROBS:,} may",
        )


def num_prompt_logprobs(request: GenerationRequest) -> int:
    """How many log probabilities of its prompt a request asks for."""
    return 0 if request.prompt_logprobs is None else len(request.prompt_token_ids) * (1 + request.prompt_logprobs)


def check_prompt_logprobs(count: int) -> None:
    """Raises InvalidArgument where a call asks for too many log probabilities of its prompts."""
    if count > MAX_PROMPT_LOGPROBS:
        _refuse(
            "output.prompt_logprobs",
            f"asks for {count:,} log probabilities of prompts; a call may ask for at most {MAX_PROMPT_LOGPROBS:,}",
        )


def _refuse(field: str, description: str) -> None:
    violations = Violations()
    violations.add(field, description)
    violations.raise_if_any()
