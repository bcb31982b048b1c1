"""Rules of a scripted server: which requests a rule is for, and how it answers them. As Python objects, and as JSON or
YAML for tests in other languages."""

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_JSON_NAMES = {str: "a text", bool: "true or false", int: "an integer", float: "a number"}


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
    """The requests that a rule is for: those that fit all that is given. Texts are regular expressions, found anywhere.

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
            (self.last, [texts[-1] if texts else ""]),
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
            all(pattern is None or any_found(pattern, found) for pattern, found in searched)
            and all(wanted is None or wanted == value for wanted, value in equal)
            and (self.tool is None or self.tool in request.tools)
        )

    def __str__(self) -> str:
        given = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return ", ".join(f"{name}={value!r}" for name, value in given.items() if value not in (None, {})) or "any"


def any_found(pattern: str, texts: Iterable[str]) -> bool:
    """Whether a regular expression is found in one of the texts."""
    return any(re.search(pattern, text, re.DOTALL) for text in texts)


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


def to_json(value: Any) -> Any:
    """The JSON of rules or records: fields that have their defaults are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given: dict[str, Any] = {}
        for each in dataclasses.fields(value):
            content = getattr(value, each.name)
            made = each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default
            if content != made:
                given[each.name] = to_json(content)
        return given
    if isinstance(value, Mapping):
        return {str(name): to_json(each) for name, each in value.items()}
    return [to_json(each) for each in value] if isinstance(value, list | tuple) else value


def read_rules(content: Any) -> list[Rule]:
    """The rules of {"rules": [...]} or of the list itself. `answer` stands for one of `answers`, and a text for an
    answer with only this text. Raises RuleError."""
    if isinstance(content, dict):
        if unknown := content.keys() - {"rules"}:
            raise RuleError(f'the file has "{min(unknown)}"; its one field is "rules", a list')
        content = content.get("rules")
    if not isinstance(content, list):
        raise RuleError(f'"rules" is {_shown(content)}; it must be a list of rules')
    rules = [_read_rule(each, f"rules[{position}]") for position, each in enumerate(content)]
    names = [each.name for each in rules if each.name]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RuleError(f'two rules have the name "{twice}"; names must differ')
    return [
        each if each.name else dataclasses.replace(each, name=f"rules[{position}]")
        for position, each in enumerate(rules)
    ]


def read_rule_file(path: Path) -> list[Rule]:
    """The rules of a file, YAML if its name ends in .yaml or .yml, else JSON. Raises RuleError, and ModuleNotFoundError
    if the package for YAML is missing."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"cannot read {path}: {error}") from error
    try:
        if path.suffix not in (".yaml", ".yml"):
            return read_rules(json.loads(text))
        import yaml

        try:
            return read_rules(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise RuleError(f"no YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise RuleError(f"{path}: {error}") from error


def _read_rule(content: Any, place: str) -> Rule:
    if isinstance(content, dict) and "answer" in content:
        if "answers" in content:
            raise RuleError(f"{place} has answer and answers; give one of them")
        content = {name: value for name, value in content.items() if name != "answer"} | {
            "answers": [content["answer"]]
        }
    return read_value(Rule, content, place)


def read_value(kind: Any, content: Any, place: str) -> Any:
    """A value of a type from JSON; `place` is for errors. Raises RuleError."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return content
    if origin in (Union, UnionType):
        if content is None and NoneType in arguments:
            return None
        return read_value(next(each for each in arguments if each is not NoneType), content, place)
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, {"text": content} if kind is Answer and isinstance(content, str) else content, place)
    if origin is not None and issubclass(origin, Mapping):
        _check(isinstance(content, dict), content, place, "an object")
        return {name: read_value(arguments[1], each, f"{place}.{name}") for name, each in content.items()}
    if origin is not None:
        _check(isinstance(content, list), content, place, "a list")
        return [read_value(arguments[0], each, f"{place}[{position}]") for position, each in enumerate(content)]
    allowed = (int, float) if kind is float else kind
    _check(isinstance(content, allowed) and isinstance(content, bool) == (kind is bool), content, place, _name(kind))
    return content


def _read_fields(kind: type[T], content: Any, place: str) -> T:
    _check(isinstance(content, dict), content, place, f"an object of {', '.join(_types_of(kind))}")
    for name in content:
        if name not in _types_of(kind):
            near = difflib.get_close_matches(str(name), _types_of(kind), n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_types_of(kind))}"
            raise RuleError(f'{place} has "{name}", which is not a field; {hint}')
    values = {name: read_value(_types_of(kind)[name], each, f"{place}.{name}") for name, each in content.items()}
    try:
        return kind(**values)
    except RuleError as error:
        raise RuleError(f"{place}: {error}") from None
    except TypeError as error:
        raise RuleError(f"{place}: {str(error).partition(' ')[2]}") from None


@functools.cache
def _types_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _name(kind: type) -> str:
    return _JSON_NAMES[kind]


def _check(is_valid: bool, content: Any, place: str, expected: str) -> None:
    if not is_valid:
        raise RuleError(f"{place} is {_shown(content)}; it must be {expected}")


def _shown(content: Any) -> str:
    return json.dumps(content, default=str)[:80]
