"""Rules of a scripted server: which requests a rule is for, and how it answers them. As Python objects, and as JSON or
YAML for tests in other languages."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

# The attribute of a dataclass that pydantic reads.
_CONFIG = "__pydantic_config__"


class RuleError(ValueError):
    """Rules that cannot work; the message names the place, the value and the expectation in one line."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the request offers."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as Quire reports it, over every API in the form of that API.

    Attributes:
        status: The HTTP status, one of `STATUSES`; over gRPC the code for it.
        retry_after_s: The header Retry-After, rounded up to seconds; over gRPC RetryInfo.
        reason: The code for programs, for example CONTEXT_LENGTH_EXCEEDED; by default SCRIPTED.
    """

    status: int = 500
    message: str = "a scripted error"
    retry_after_s: float | None = None
    reason: str = "SCRIPTED"

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise RuleError(f"status is {self.status}; Quire answers with one of {', '.join(map(str, STATUSES))}")


STATUSES: Mapping[int, str] = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""HTTP statuses of failures, and the gRPC code of each."""


def context_too_long(limit: int = 4096) -> Failure:
    """The error of a prompt that does not fit, in the words by which client libraries recognise it."""
    message = (
        f"has more tokens than fit; a prompt may have at most {limit:,}, so the prompt is too long: this model's "
        f"maximum context length is {limit:,} tokens"
    )
    return Failure(400, message, reason="CONTEXT_LENGTH_EXCEEDED")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: reasoning, then text, then calls of tools, then an end.

    Attributes:
        text: The content. It is streamed word by word if `between_tokens_s` is set, else as one piece.
        pieces: The content as it is to be streamed, in place of `text`.
        json: The content as a JSON value, in place of `text`.
        embedding: The vector of a text, for requests of embeddings.
        error: Ends the answer after what comes before it; an answer with only an error fails before it begins.
        first_token_s: Seconds before the first piece, or before the error.
        between_tokens_s: Seconds between two pieces.
        cut: Closes the client's connection after the last piece; over gRPC the call ends with UNAVAILABLE.
        finish: "stop" or "length". An answer comes whole, whatever max_tokens is.
    """

    text: str = ""
    pieces: Sequence[str] = ()
    json: Any = None
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    embedding: Sequence[float] = ()
    error: Failure | None = None
    first_token_s: float = 0.0
    between_tokens_s: float = 0.0
    cut: bool = False
    finish: str = "stop"

    def __post_init__(self) -> None:
        given = [name for name in ("text", "pieces", "json") if getattr(self, name) not in ("", (), [], None)]
        if len(given) > 1:
            raise RuleError(f"{' and '.join(given)} are both the content; give one of them")
        if self.finish not in ("stop", "length"):
            raise RuleError(f'finish is "{self.finish}"; it must be stop or length')
        if min(self.first_token_s, self.between_tokens_s) < 0:
            raise RuleError("first_token_s and between_tokens_s must be at least 0")

    @property
    def streamed(self) -> list[str]:
        """The pieces of the content."""
        content = self.text if self.json is None else json.dumps(self.json, ensure_ascii=False)
        if self.pieces or not content:
            return list(filter(None, self.pieces))
        return re.findall(r"\S+\s*|\s+", content) if self.between_tokens_s else [content]


@dataclass(frozen=True, slots=True)
class When:
    """The requests that a rule is for: they fit all conditions that are given. Texts are regular expressions, found
    anywhere.

    Attributes:
        last: The text of the last message, or the prompt, or the text to embed.
        system: The text of the system messages.
        any: The text of any message.
        role: The role of the last message: user, tool, assistant; exact.
        tool: A tool that the request offers; exact.
        turn: The number of the assistant's messages so far.
        model: The model that the request names; exact. Only over HTTP.
        path: The HTTP path, for example /v1/messages; grpc for all calls over gRPC.
        key: The API key of the request; exact.
        headers: Headers of the request. Only over HTTP.
    """

    last: str | None = None
    system: str | None = None
    any: str | None = None
    role: str | None = None
    tool: str | None = None
    turn: int | None = None
    model: str | None = None
    path: str | None = None
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        patterns = {name: getattr(self, name) for name in ("last", "system", "any", "path")}
        for name, pattern in (patterns | {f"headers.{name}": text for name, text in self.headers.items()}).items():
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise RuleError(f"{name} is {pattern!r}, which is no regular expression: {error}") from error

    def fits(self, request: "Received") -> bool:
        """Whether a request is one of them."""
        texts = [message.text for message in request.messages]
        searched = [
            (self.last, texts[-1:]),
            (self.system, [each.text for each in request.messages if each.role in ("system", "developer")]),
            (self.any, texts),
            (self.path, [request.path]),
            *((pattern, [request.headers.get(name.lower(), "")]) for name, pattern in self.headers.items()),
        ]
        equal = [
            (self.role, request.messages[-1].role if request.messages else None),
            (self.turn, sum(message.role == "assistant" for message in request.messages)),
            (self.model, request.model),
            (self.key, request.key),
        ]
        return (
            all(wanted is None or wanted == value for wanted, value in equal)
            and (self.tool is None or self.tool in request.tools)
            and all(
                pattern is None or any(re.search(pattern, text, re.DOTALL) for text in found)
                for pattern, found in searched
            )
        )

    def __str__(self) -> str:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return ", ".join(f"{name}={value!r}" for name, value in given.items() if value not in (None, {})) or "any"


@dataclass(frozen=True, slots=True)
class Rule:
    """Answers requests.

    Attributes:
        answers: The answers to the first, second, ... request of the rule; the last one is repeated.
        when: Which requests.
        times: After this many requests the rule is used up, and later rules are tried; None is without limit.
        name: For records and errors; by default the rule's position.
    """

    answers: Sequence[Answer]
    when: When = field(default_factory=When)
    times: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not self.answers:
            raise RuleError("a rule needs at least one answer")
        if self.times is not None and self.times < 1:
            raise RuleError(f"times is {self.times}; it must be at least 1")


def rule(*answers: Answer | str, name: str = "", times: int | None = None, **when: Any) -> Rule:
    """A rule: texts or answers, and the fields of `When`."""
    made = [Answer(each) if isinstance(each, str) else each for each in answers]
    return Rule(made, When(**when), times, name)


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation, in one form for all APIs."""

    role: str
    text: str
    tool_calls: Sequence[ToolCall] = ()
    name: str | None = None
    tool_call_id: str | None = None


@dataclass(slots=True)
class Received:
    """A request that came, and what became of it so far.

    Attributes:
        path: The HTTP path; "grpc" for all calls over gRPC.
        headers: HTTP headers, in lower case, without the key.
        key: The API key; None without one.
        body: The body of an HTTP request; None over gRPC.
        messages: The conversation; the prompt of a completion or a text to embed is one message of the role user.
        tools: Names of the tools that it offers.
        rule: The name of the rule that answered; None if there was none, or if the gateway refused the request.
        status: "answered", "failed", "cut", "abandoned" by its client, "refused" before any rule was tried, "no rule",
            or "running".
    """

    path: str = "grpc"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    key: str | None = None
    body: Any = None
    messages: Sequence[Message] = ()
    tools: Sequence[str] = ()
    rule: str | None = None
    status: str = "running"

    @property
    def model(self) -> str | None:
        """The model that an HTTP request names."""
        return self.body.get("model") if isinstance(self.body, dict) else None


def read_record(content: Mapping[str, Any]) -> Received:
    """A record from its JSON."""
    messages = [_read_message(each) for each in content["messages"]]
    return Received(**dict[str, Any](content, messages=messages))


def _read_message(content: Mapping[str, Any]) -> Message:
    calls = [ToolCall(**call) for call in content["tool_calls"]]
    return Message(**dict[str, Any](content, tool_calls=calls))


def read_rules(content: Any) -> list[Rule]:
    """The rules of {"rules": [...]}. `answer` stands for one of `answers`, and a text for an answer with only this
    text. Raises RuleError."""
    # Only servers read rules, and they have imported it for the gateway.
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    for each in (Rule, When, Answer, ToolCall, Failure):
        setattr(each, _CONFIG, ConfigDict(extra="forbid", strict=True))
    if not isinstance(content, dict) or content.keys() != {"rules"} or not isinstance(content["rules"], list):
        raise RuleError('rules are an object with the one field "rules", a list')
    try:
        # As JSON, since strict types of Python values would be instances of the classes.
        rules = TypeAdapter(list[Rule]).validate_json(json.dumps([*map(_in_full, content["rules"])], default=str))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"])
        is_unknown = first["type"] == "unexpected_keyword_argument"
        problem = "there is no such field" if is_unknown else first["msg"].removeprefix("Value error, ")
        raise RuleError(f"rules{place}: {problem}") from None
    named = [each if each.name else replace(each, name=f"rules[{position}]") for position, each in enumerate(rules)]
    names = [each.name for each in named]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RuleError(f'two rules have the name "{twice}"; names must differ')
    return named


def _in_full(content: Any) -> Any:
    """A rule whose answers are written in their full form."""
    if not isinstance(content, dict):
        return content
    answers = content.get("answers", [content["answer"]] if "answer" in content else None)
    if isinstance(answers, list):
        answers = [{"text": each} if isinstance(each, str) else each for each in answers]
    rest = {name: each for name, each in content.items() if name != "answer" or "answers" in content}
    return rest if answers is None else rest | {"answers": answers}


def read_rule_file(path: Path) -> list[Rule]:
    """The rules of a file, YAML if its name ends in .yaml or .yml, else JSON. Raises RuleError, and ModuleNotFoundError
    if the package for YAML is missing."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix not in (".yaml", ".yml"):
            return read_rules(json.loads(text))
        import yaml

        try:
            return read_rules(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise RuleError(" ".join(str(error).split())) from error
    except (OSError, ValueError) as error:
        raise RuleError(f"cannot use {path}: {error}") from error
