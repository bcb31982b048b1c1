"""The validator of requests, the same for every front end.

It checks all fields before it raises, and allocates nothing of the size of a request. Each violation names the field,
its value and the limit.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gateway.request.chat_validation import check_chat, check_constraints
from gateway.request.limits import (
    DRAWING,
    MAX_CALL_PARAMETER_ENTRIES,
    MAX_CALL_STOP_BYTES,
    MAX_LOGIT_BIAS,
    MAX_REQUEST_ID_LENGTH,
    NUMBERS,
    Limits,
)
from gateway.request.violations import Violations, shortened, shown, utf8_size
from gateway.types import MAX_ENTRIES, ChatPrompt, ModelKind, Prompt, RequestOptions, TextPrompt, TokenPrompt
from quire.common.v1.common_pb2 import Constraint, EarlyStopping
from quire.constraints.program import MAX_CONSTRAINT_BYTES
from quire.rpc.errors import FieldViolation, InvalidArgument, QuireError

_MIN_SEED = -(2**63)
_MAX_SEED = 2**64 - 1
# In characters; OpenAI's limit.
_MAX_NAME_LENGTH = 64
_MAX_LENGTH_PENALTY = 10
_MAX_BEAM_CANDIDATES = 2048
_MAX_BAD_WORDS = 128
_MAX_BAD_WORD_BYTES = 128
_MISSING_PROMPT = FieldViolation("prompt", "is missing; set text or token_ids")
_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_REQUEST_ID_LENGTH}}}")


def check_model(model: str | None, served_model: str | None, error: type[QuireError] = InvalidArgument) -> None:
    """Raises an error if a request names another model than the served one: NotFound where a model is looked up."""
    if (violation := wrong_model(model, served_model)) is not None:
        raise error.of_field("model", violation.description, reason="MODEL_NOT_FOUND")


def wrong_model(model: str | None, served_model: str | None) -> FieldViolation | None:
    """The violation of a model name; None if the name is absent or right.

    `served_model` is None for a caller that may use no model. Such a caller does not learn the name of the served one.
    """
    if served_model is None:
        shown = "is absent" if model is None else f'is "{shortened(model)}"'
        return FieldViolation("model", f"{shown}; no model is served here that this API key may use")
    if model is None or model == served_model:
        return None
    return FieldViolation("model", f'is "{shortened(model)}"; the model served here is "{served_model}"')


def check_request(request: RequestOptions, limits: Limits, served_model: str | None) -> None:
    """Checks everything except the number of prompt tokens, which only the tokenizer knows.

    `served_model` is None for a caller that may use no model.

    Raises:
        InvalidArgument: the model is not served here, or fields are missing or out of range.
    """
    check_model(request.model, served_model)
    violations = Violations()
    check_prompt(violations, request.prompt, limits, is_truncated=request.is_truncated)
    has_constraint = request.sampling.HasField("constraint")
    if has_constraint:
        _check_constraint_size(violations, "sampling.constraint", request.sampling.constraint)
    if isinstance(request.prompt, ChatPrompt):
        check_constraints(violations, request.prompt, has_constraint=has_constraint)
        if request.prompt.response_format is not None:
            _check_constraint_size(violations, "response_format", request.prompt.response_format)
    if request.sampling.HasField("beam_search"):
        _check_beam_search(violations, request, limits)
    else:
        _check_drawing(violations, request, limits)
    _check_sampling(violations, request, limits)
    _check_stopping(violations, request, limits)
    for field in ("output.logprobs", "output.prompt_logprobs"):
        violations.check_range(field, request.asked(field), 0, limits.max_logprobs)
    if (start := request.asked("output.prompt_logprobs_start")) is not None:
        violations.check_range("output.prompt_logprobs_start", start, 1, limits.max_prompt_tokens)
        if request.asked("output.prompt_logprobs") is None:
            violations.add("output.prompt_logprobs_start", "is set without output.prompt_logprobs")
    _check_logprob_token_ids(violations, request, limits)
    if prediction := request.asked("output.prediction"):
        violations.check_text("output.prediction", prediction)
        _check_prompt_size(violations, "output.prediction", [prediction], limits, is_truncated=True)
    violations.check_range("priority", request.priority, -100, 100)
    violations.check_range("truncate_prompt_tokens", request.truncate_prompt_tokens, -1, limits.max_prompt_tokens)
    if request.truncate_prompt_tokens == 0:
        violations.add("truncate_prompt_tokens", "is 0; a prompt needs at least 1 token, and -1 keeps what fits")
    _check_request_id(violations, request.request_id)
    violations.raise_if_any()


def check_another(request: RequestOptions, limits: Limits) -> None:
    """Checks a request with the model and the parameters of one that passed `check_request`.

    Raises:
        InvalidArgument: its prompt or its id is missing or out of range.
    """
    violations = Violations()
    check_prompt(violations, request.prompt, limits, is_truncated=request.is_truncated)
    _check_request_id(violations, request.request_id)
    violations.raise_if_any()


def check_call(request: RequestOptions, num_requests: int, limits: Limits) -> None:
    """Checks the totals of `num_requests` requests with the same parameters. Limits of a single request are left to
    `check_request`.

    Raises:
        InvalidArgument: the call has too many sequences, or too many copies of long parameters.
    """
    violations = Violations()
    if request.sampling.HasField("beam_search"):
        field = "sampling.beam_search.beam_width"
    else:
        field = "sampling.n" if request.asked("sampling.best_of") is None else "sampling.best_of"
    per_request = max(request.asked(field) or 1, 1)
    count = num_requests * per_request
    # A number out of range is left out of the sums: it may have thousands of digits.
    is_in_range = per_request <= limits.max_n
    # The front end of vectors bounds their texts.
    if is_in_range and count > limits.max_call_sequences and request.kind is ModelKind.TEXT:
        violations.add(
            field,
            f"is {per_request:,} for each of {num_requests:,} prompts, {count:,} sequences together; a call may have "
            f"at most {limits.max_call_sequences:,}; send fewer prompts at once, or ask for fewer sequences of each",
        )
    copied: list[tuple[str, int, str, int, str, int, str]] = []
    stop = request.asked("stopping.stop")
    if is_in_range and len(stop) <= limits.max_stop_strings:
        num_bytes, way_out = sum(map(utf8_size, stop)), ", or shorter stop strings"
        copied.append(("stopping.stop", num_bytes, "bytes", count, "sequences", MAX_CALL_STOP_BYTES, way_out))
    of_each = num_requests, "prompts", MAX_CALL_PARAMETER_ENTRIES, ""
    for field in ("sampling.allowed_token_ids", "sampling.logit_bias", "stopping.stop_token_ids"):
        if (num_entries := len(request.asked(field))) <= limits.vocab_size:
            copied.append((field, num_entries, "entries", *of_each))
    if num_requests > 1:
        copied.append(("output.prediction", utf8_size(request.asked("output.prediction") or ""), "bytes", *of_each))
    for field, size, unit, copies, of, limit, way_out in copied:
        if size * copies > limit:
            violations.add(
                field,
                f"has {size:,} {unit} for each of {copies:,} {of}, {size * copies:,} together; a call may have at most "
                f"{limit:,}; send fewer prompts at once{way_out}",
            )
    violations.raise_if_any()


def _check_request_id(violations: Violations, request_id: str | None) -> None:
    if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
        allowed = f"1 to {MAX_REQUEST_ID_LENGTH} characters of [A-Za-z0-9._:-]"
        violations.add("request_id", f'is "{shortened(request_id)}"; it must be {allowed}')


def check_prompt(
    violations: Violations,
    prompt: Prompt | None,
    limits: Limits,
    *,
    missing: FieldViolation = _MISSING_PROMPT,
    chat_field: str = "messages",
    is_truncated: bool = False,
) -> None:
    """Checks a prompt before it is tokenized. `missing` is the violation if there is no prompt. A prompt that is to be
    truncated may have more tokens than others."""
    match prompt:
        case None:
            violations.add(missing.field, missing.description)
        case TextPrompt(text=text):
            violations.check_text("text", text)
            _check_prompt_size(violations, "text", [text], limits, is_truncated=is_truncated)
        case TokenPrompt(token_ids=token_ids):
            if not token_ids:
                violations.add("token_ids.ids", "is empty; a prompt needs at least 1 token")
            elif is_truncated or _check_prompt_length(violations, "token_ids.ids", len(token_ids), limits):
                violations.check_token_ids("token_ids.ids", token_ids, limits.vocab_size)
        case ChatPrompt():
            if check_messages(violations, prompt, limits, field=chat_field):
                _check_prompt_size(violations, chat_field, texts_of(prompt), limits, is_truncated=is_truncated)


def check_messages(violations: Violations, prompt: ChatPrompt, limits: Limits, *, field: str = "messages") -> bool:
    """Checks the messages in `field`, except their size. Returns whether they are few enough to check their size.

    Any role passes: only the chat template knows the roles.
    """
    if not prompt.messages:
        violations.add(field, "is empty; at least one message is needed")
    if not violations.check_count(field, prompt.messages, limits.max_chat_messages):
        return False
    for position, message in enumerate(prompt.messages):
        if not message.role:
            violations.add(f"{field}[{position}].role", 'is empty; it must be a role such as "user"')
        violations.check_text(f"{field}[{position}].role", message.role)
        violations.check_text(f"{field}[{position}].content", message.content)
        name = message.name or ""
        if len(name) > _MAX_NAME_LENGTH:
            description = f"has {len(name):,} characters; the max is {_MAX_NAME_LENGTH}"
            violations.add(f"{field}[{position}].name", description)
        violations.check_text(f"{field}[{position}].name", name)
    check_chat(violations, prompt, field)
    return True


def texts_of(prompt: ChatPrompt) -> Iterator[str]:
    """All texts of the messages."""
    for message in prompt.messages:
        yield from (message.role, message.content, message.name or "", message.reasoning or "")
        for call in message.tool_calls:
            yield from (call.name, call.arguments)
    for tool in prompt.tools:
        yield from (tool.name, tool.description, tool.parameters)


def _check_prompt_size(
    violations: Violations, field: str, texts: Iterable[str], limits: Limits, *, is_truncated: bool
) -> None:
    """Refuses a text whose size implies too many tokens, before the tokenizer spends time on it."""
    if is_truncated:
        violations.check_size(field, texts, limits.max_tokenize_bytes)
        return
    fewest = -(-sum(map(utf8_size, texts)) // limits.longest_token_bytes)
    _check_prompt_length(violations, field, fewest, limits, is_lower_bound=True)


def _check_prompt_length(
    violations: Violations, field: str, num_tokens: int, limits: Limits, *, is_lower_bound: bool = False
) -> bool:
    if num_tokens <= limits.max_prompt_tokens:
        return True
    count = f"at least {num_tokens:,}" if is_lower_bound else f"{num_tokens:,}"
    violations.add(
        field,
        f"has {count} tokens; a prompt may have at most {limits.max_prompt_tokens:,}, so the prompt is too long: "
        f"shorten it; {_context_length(limits)}",
        reason="CONTEXT_LENGTH_EXCEEDED",
    )
    return False


def _context_length(limits: Limits) -> str:
    """The words by which client libraries recognise a prompt that is too long."""
    return f"this model's maximum context length is {limits.shown_model_len} tokens (context_length_exceeded)"


def check_prompt_tokens(field: str, token_ids: Sequence[int], limits: Limits) -> None:
    """Checks the tokens of a prompt that was given as `field`.

    Raises:
        InvalidArgument: the prompt is empty or too long, or the tokenizer knows more tokens than the model.
    """
    violations = Violations()
    if not token_ids:
        violations.add(field, "has no tokens; at least 1 is needed")
    elif _check_prompt_length(violations, field, len(token_ids), limits) and max(token_ids) >= limits.vocab_size:
        violations.add(
            field, f"has the token {max(token_ids)}; token ids of this model are below {limits.vocab_size:,}"
        )
    violations.raise_if_any()


def resolve_max_tokens(
    field: str, token_ids: Sequence[int], max_tokens: int | None, num_sequences: int, limits: Limits
) -> int:
    """The maximum number of tokens to generate after a prompt in `field`: `max_tokens`, or the room that is left for
    each of the sequences.

    Raises:
        InvalidArgument: as `check_prompt_tokens`, or prompt and output exceed the context.
    """
    check_prompt_tokens(field, token_ids, limits)
    prompt_tokens = len(token_ids)
    if max_tokens is None:
        # If there is no room for one token of each, the scheduler refuses the request with its figures.
        return max(limits.longest_sequence(prompt_tokens, num_sequences) - prompt_tokens, 1)
    if prompt_tokens + max_tokens > limits.max_model_len:
        raise InvalidArgument.of_field(
            "stopping.max_tokens",
            f"is {max_tokens:,} after a prompt of {prompt_tokens:,} tokens, together {prompt_tokens + max_tokens:,}; "
            f"a sequence can have at most {limits.max_model_len:,} tokens here, since {_context_length(limits)}",
            reason="CONTEXT_LENGTH_EXCEEDED",
        )
    return max_tokens


def check_numbers(violations: Violations, request: RequestOptions, names: Iterable[str] = NUMBERS) -> None:
    """Checks the ranges of sampling parameters, of a request or as the defaults of a model directory."""
    for name in names:
        number, field = NUMBERS[name], f"sampling.{name}"
        violations.check_range(field, request.asked(field), number.low, number.high, above_low=number.is_above_low)


def _check_drawing(violations: Violations, request: RequestOptions, limits: Limits) -> None:
    """Checks parameters of sampling that a beam search treats differently."""
    check_numbers(violations, request, DRAWING)
    n, best_of = request.asked("sampling.n"), request.asked("sampling.best_of")
    violations.check_range("sampling.n", n, 1, limits.max_n)
    violations.check_range("sampling.best_of", best_of, n or 1, limits.max_n)
    if request.asked("stopping.stop") and (best_of or n or 1) > (n or 1):
        # The best sequences are chosen before their text is known.
        violations.add(
            "stopping.stop",
            f"cannot be used where best_of, which is {shown(best_of)}, is above n, which is {shown(n or 1)}; use "
            "stop_token_ids",
        )


def _check_beam_search(violations: Violations, request: RequestOptions, limits: Limits) -> None:
    """Checks `beam_search` and the parameters that contradict it."""
    width = request.asked("sampling.beam_search.beam_width")
    of_length = -_MAX_LENGTH_PENALTY, _MAX_LENGTH_PENALTY
    for name, low, high in (("beam_width", 1, limits.max_n), ("length_penalty", *of_length)):
        field = f"sampling.beam_search.{name}"
        violations.check_range(field, request.asked(field), low, high)
    early_stopping = request.sampling.beam_search.early_stopping
    if early_stopping not in EarlyStopping.values():
        names = ", ".join(EarlyStopping.keys()[1:])
        violations.add("sampling.beam_search.early_stopping", f"is {early_stopping}; it must be one of {names}")
    violations.check_range("sampling.n", request.asked("sampling.n"), 1, max(width, 1))
    best_of = request.asked("sampling.best_of")
    if best_of not in (None, width):
        violations.add(
            "sampling.best_of",
            f"is {shown(best_of)}; with beam search it must be absent or beam_width, which is {shown(width)}",
        )
    for name, only in DRAWING.items():
        value = request.asked(f"sampling.{name}")
        if value not in (None, only):
            description = f"is {shown(value)}; with beam search it must be absent or {only}: nothing is drawn"
            violations.add(f"sampling.{name}", description)
    num_stop_tokens = len(request.asked("stopping.stop_token_ids"))
    num_candidates = width * (1 + num_stop_tokens)
    if width <= limits.max_n and num_candidates > _MAX_BEAM_CANDIDATES:
        violations.add(
            "stopping.stop_token_ids",
            f"has {num_stop_tokens:,} entries, so that each of {width:,} beams would report "
            f"{num_candidates:,} candidates; the max is {_MAX_BEAM_CANDIDATES:,}",
        )
    if request.asked("stopping.stop"):
        # Hypotheses are chosen before their text is known.
        violations.add("stopping.stop", "cannot be used with beam search; use stop_token_ids")


def _check_sampling(violations: Violations, request: RequestOptions, limits: Limits) -> None:
    """Checks parameters of both sampling and beam search."""
    violations.check_range("sampling.seed", request.asked("sampling.seed"), _MIN_SEED, _MAX_SEED)
    budget = request.asked("sampling.thinking_token_budget")
    violations.check_range("sampling.thinking_token_budget", budget, 0, 2**32 - 1)
    check_numbers(violations, request, [name for name in NUMBERS if name not in DRAWING])
    _check_logit_bias(violations, request.asked("sampling.logit_bias"), limits)
    allowed = request.asked("sampling.allowed_token_ids")
    if allowed and violations.check_count("sampling.allowed_token_ids", allowed, min(limits.vocab_size, MAX_ENTRIES)):
        violations.check_token_ids("sampling.allowed_token_ids", allowed, limits.vocab_size)
    bad_words = request.asked("sampling.bad_words")
    if bad_words and violations.check_count("sampling.bad_words", bad_words, _MAX_BAD_WORDS):
        _check_texts(violations, "sampling.bad_words", bad_words, _MAX_BAD_WORD_BYTES)


def _check_constraint_size(violations: Violations, field: str, constraint: Constraint) -> None:
    """Refuses a constraint that is too large, before it is copied several times."""
    if (size := constraint.ByteSize()) > MAX_CONSTRAINT_BYTES:
        violations.add(field, f"has {size:,} bytes; the max is {MAX_CONSTRAINT_BYTES:,}")


def _check_logit_bias(violations: Violations, logit_bias: Mapping[int, float], limits: Limits) -> None:
    if not violations.check_count("sampling.logit_bias", logit_bias, MAX_LOGIT_BIAS):
        return
    for token_id, bias in logit_bias.items():
        field = f"sampling.logit_bias[{token_id}]"
        violations.check_range(field, bias, -100, 100)
        if not 0 <= token_id < limits.vocab_size:
            violations.add(field, f"is for token {token_id}; token ids of this model are below {limits.vocab_size:,}")


def _check_stopping(violations: Violations, request: RequestOptions, limits: Limits) -> None:
    max_tokens = request.asked("stopping.max_tokens")
    longest = limits.max_model_len - 1
    if limits.clamps(request):
        max_tokens = min(max_tokens, longest)
    if max_tokens is not None and max_tokens > longest:
        violations.add(
            "stopping.max_tokens",
            f"is {shown(max_tokens)}; it must be in [1, {longest:,}], since {_context_length(limits)}",
            reason="CONTEXT_LENGTH_EXCEEDED",
        )
    else:
        violations.check_range("stopping.max_tokens", max_tokens, 1, longest)
    highest = longest if max_tokens is None else max_tokens
    violations.check_range("stopping.min_tokens", request.asked("stopping.min_tokens"), 0, highest)
    stop, stop_token_ids = request.asked("stopping.stop"), request.asked("stopping.stop_token_ids")
    if stop and violations.check_count("stopping.stop", stop, limits.max_stop_strings):
        _check_texts(violations, "stopping.stop", stop, limits.max_stop_string_bytes)
    if violations.check_count("stopping.stop_token_ids", stop_token_ids, min(limits.max_stop_token_ids, MAX_ENTRIES)):
        violations.check_token_ids("stopping.stop_token_ids", stop_token_ids, limits.vocab_size)


def _check_logprob_token_ids(violations: Violations, request: RequestOptions, limits: Limits) -> None:
    field, token_ids = "output.logprob_token_ids", request.asked("output.logprob_token_ids")
    if not token_ids:
        return
    if request.asked("output.logprobs") is None:
        violations.add(field, "is set without output.logprobs, which turns log probabilities on")
    if request.sampling.HasField("beam_search"):
        violations.add(field, "cannot be used with beam search, which reports the tokens of its beams")
    if violations.check_count(field, token_ids, limits.max_logprobs):
        violations.check_token_ids(field, token_ids, limits.vocab_size)


def _check_texts(violations: Violations, field: str, texts: Sequence[str], max_bytes: int) -> None:
    for position, text in enumerate(texts):
        if not text:
            violations.add(f"{field}[{position}]", "is empty; it needs at least 1 character")
        elif violations.check_size(f"{field}[{position}]", [text], max_bytes):
            violations.check_text(f"{field}[{position}]", text)
