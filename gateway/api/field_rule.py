"""The rule for fields that the type of a body does not declare: one rule and one table for all HTTP APIs.

A field of an object has one of these classes:

- read: the object's type declares it. A null is the same as an absent field.
- silent: the table lists it as a label or a hint, which has no effect.
- refused: the table lists it because the text, its format or its safety would be wrong without it. It is accepted only
  with the listed values, with which it has no effect.
- ignored: any other field. It is counted, and named once in a header of the answer and once in the debug log.
  `--strict-fields` rejects it.

Names of ignored fields come from callers: they are escaped and cut off before they reach a header or the log, and are
never labels of metrics.
"""

import functools
import logging
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict

from gateway.api import other_servers
from gateway.request.violations import Violations
from gateway.turns import Turns

_MAX_NAMED = 16
_MAX_NAME = 64
_POSITION = re.compile(r"\[\d+\]")
_UNSUPPORTED = "is not supported by this version"
_logger = logging.getLogger(__name__)

IGNORED_HEADER = b"x-quire-ignored-fields"


@dataclass(frozen=True, slots=True)
class Unread:
    """A row of the table: the fields of one kind of object that Quire knows but does not read.

    Attributes:
        silent: Fields without an effect.
        refused: Fields that are refused, except with the values listed here.
        ways_out: Advice that is appended to the error of a refused field.
        harmless: Values with which every refused field has no effect.
        generates: Whether the object requests text. Then fields of other servers that affect the text are refused, too.
    """

    silent: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    ways_out: Mapping[str, str] = field(default_factory=dict[str, str])
    harmless: tuple[Any, ...] = ()
    generates: bool = False

    def values_without_effect(self, name: str) -> tuple[Any, ...] | None:
        """The values with which a refused field is accepted; None if the field is not refused."""
        values = self.refused.get(name)
        if values is None and self.generates:
            values = other_servers.UNREAD.get(name)
        return None if values is None else (*values, *self.harmless)

    def way_out(self, name: str) -> str:
        """The advice in the error of a refused field."""
        if name in self.ways_out or name in self.refused or name not in other_servers.INSTEAD:
            return self.ways_out.get(name, "")
        return f"; use {other_servers.INSTEAD[name]}"

    def plus(self, *silent: str, **refused: tuple[Any, ...]) -> "Unread":
        """A copy with further fields."""
        return replace(self, silent=self.silent | set(silent), refused={**self.refused, **refused})


def _never(*names: str) -> dict[str, tuple[Any, ...]]:
    """Fields that are refused with every value."""
    return dict.fromkeys(names, ())


# The table. It begins with unused fields that all kinds of objects have.
_LABELS = ("metadata", "user", "safety_identifier")
_SERVING = ("service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
NOTHING = Unread()

# OpenAI's completions and chats, with vLLM's fields. Only responses read `store`, since a stored chat cannot be read.
# `_ENGINE` are options of vLLM's slow tokenizers and of its engine, which do not affect the text here.
_ENGINE = ("guided_decoding_backend", "guided_decoding_disable_fallback", "spaces_between_special_tokens", "vllm_xargs")
_GENERATION = Unread(
    frozenset({*_LABELS, *_SERVING, *_ENGINE, "store", "verbosity"}),
    {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "guided_decoding_disable_additional_properties": (False,),
        **_never(
            *("audio", "guided_whitespace_pattern", "logits_processors"),
            *("mm_processor_kwargs", "moderation", "prompt_embeds", "web_search_options"),
        ),
    },
    {"functions": "; use tools", "function_call": "; use tool_choice"},
    generates=True,
)
EMBEDDINGS = Unread(frozenset({*_LABELS, *_SERVING}), {"input_type": ()}, {"input_type": "; use prompt_name"})
# Cohere's, and text-embeddings-inference's.
COHERE_EMBED = Unread(
    frozenset(_LABELS),
    {"images": ([],), "inputs": ([],), "max_tokens": ()},
    {"inputs": "; use texts", "max_tokens": "; shorten the texts"},
)
TEXTS_INFERENCE = Unread(frozenset({"parameters"}), {"raw_scores": (False,)})
RANKING = Unread(frozenset({*_LABELS, *_SERVING}), {"rank_fields": ([], ["text"]), "max_chunks_per_doc": ()})
CHAT = _GENERATION.plus(suffix=("",))
COMPLETION = _GENERATION.plus(
    # There is no chat template that could read it.
    "reasoning_effort",
    tools=([],),
    tool_choice=("none", "auto"),
    parallel_tool_calls=(True, False),
    add_generation_prompt=(True,),
    continue_final_message=(False,),
    **_never("chat_template", "chat_template_kwargs", "documents", "enable_thinking"),
)
# OpenAI's client adds `index`, `parsed` and `parsed_arguments` to answers, which are then sent back.
_OF_HISTORY = ("cache_control", "id", "index", "timestamp", "metadata")
CHAT_MESSAGE = Unread(
    frozenset({*_OF_HISTORY, "annotations", "parsed", "phase", "reasoning_details", "reasoning_opaque"}),
    _never("audio", "function_call"),
    {"function_call": "; use tool_calls"},
    harmless=([], "", {}),
)
CHAT_PART = Unread(frozenset({"cache_control", "annotations"}))
CHAT_CALL = Unread(frozenset({"index", "extra_content"}))
CHAT_CALLED = Unread(frozenset({"parsed_arguments"}))
CHAT_TOOL = Unread(frozenset({"cache_control"}))
STREAM_OPTIONS = Unread(frozenset({"include_obfuscation"}))
STRUCTURED_OUTPUTS = Unread(
    frozenset({"disable_fallback", "backend"}), {"disable_additional_properties": (False,), "whitespace_pattern": ()}
)
# A newer form of structural tags.
RESPONSE_FORMAT = Unread(refused=_never("format"))
# NIM's constraints and sampling parameters, and Dynamo's limits.
_OF_NVEXT: dict[str, tuple[Any, ...]] = {
    **_never("guided_choice", "guided_grammar", "guided_json", "guided_regex", "max_thinking_tokens"),
    "greed_sampling": (False,),
    "ignore_eos": (False,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
}
NVEXT = Unread(refused=_OF_NVEXT, ways_out=dict.fromkeys(_OF_NVEXT, "; set it in the body itself"))

# OpenAI's responses.
RESPONSE_INPUT = Unread(refused=_never("conversation", "personality"))
RESPONSE_COMPACT = RESPONSE_INPUT.plus(
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier"
)
RESPONSE = Unread(
    frozenset({"prompt_cache_options", "prompt_cache_retention", "client_metadata", "context_management", "end_turn"}),
    {**_never("access_programs", "conversation", "image", "moderation", "prompt")},
    generates=True,
)
RESPONSE_ITEM = Unread(frozenset({*_OF_HISTORY, "status", "phase", "encrypted_content", "end_turn"}))
RESPONSE_RESULT = RESPONSE_ITEM.plus("name")
RESPONSE_PART = Unread(frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"}))
RESPONSE_TOOL = Unread(refused={"defer_loading": (False,), "async": (False,)})
RESPONSE_REASONING = Unread(frozenset({"summary", "generate_summary", "context"}), {"mode": ("standard",)})
RESPONSE_TEXT = Unread(frozenset({"verbosity"}))

# Anthropic's messages.
MESSAGES = Unread(
    # `context_management`: edits of a long context by the server. Here all of it is read, or rejected for its length.
    frozenset({"cache_control", "context_management", "metadata", "service_tier", "speed"}),
    # The error code for `thread` makes Anthropic's tool runner send all messages by itself.
    {"mcp_servers": ([],), **_never("container", "diagnostics", "inference_geo", "thread")},
    generates=True,
)
BLOCK = Unread(frozenset({"cache_control"}))
TEXT_BLOCK = BLOCK.plus(citations=([],))
THINKING_BLOCK = BLOCK.plus("signature")
CALL_BLOCK = BLOCK.plus("caller")
RESULT_BLOCK = BLOCK.plus("is_error")
MESSAGES_TOOL = BLOCK.plus("eager_input_streaming", allowed_callers=(["direct"],), input_examples=([],))


class Strict(BaseModel):
    """An object in a body with strict types: a text is never converted to a number, and no number is NaN or infinite.
    Undeclared fields are in `model_extra`."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )


class Part(Strict):
    """An object to which the rule applies.

    Attributes:
        unread: Its row in the table.
        union_types: The types of fields in it that accept several, as errors of a body show them.
    """

    unread: ClassVar[Unread] = NOTHING
    union_types: ClassVar[Mapping[str, str]] = {}

    @property
    def undeclared(self) -> Mapping[str, Any]:
        """The fields that its type does not declare."""
        return self.model_extra or {}


class IgnoredFields:
    """The ignored fields of one call."""

    def __init__(self) -> None:
        self.count = 0
        self._names: dict[str, None] = {}

    @property
    def is_full(self) -> bool:
        """Whether further names would not be shown."""
        return len(self._names) > _MAX_NAMED

    def add(self, path: str) -> None:
        """Adds one field by its path. Paths that differ only in positions are named once."""
        self.count += 1
        if not self.is_full:
            self._names[_POSITION.sub("[]", path)] = None

    def merge(self, others: "IgnoredFields") -> None:
        """Adds other ignored fields of the same call."""
        self.count += others.count
        self._names |= others._names

    @property
    def names(self) -> str:
        """The first names, in characters that every header allows; "..." represents the others."""
        # A name may be empty, and a header's value never ends with a space.
        names = [quote(path, safe="[].-_", errors="replace")[:_MAX_NAME] or '""' for path in self._names]
        return ", ".join(names if len(names) <= _MAX_NAMED else [*names[:_MAX_NAMED], "..."])


_of_call: ContextVar[IgnoredFields | None] = ContextVar("ignored fields of the current call", default=None)


def begin_call() -> IgnoredFields:
    """Begins to collect the ignored fields of the call in this task, for the header of its answer."""
    ignored = IgnoredFields()
    _of_call.set(ignored)
    return ignored


def _uncounted(api: str, count: int) -> None:
    return


@dataclass(frozen=True, slots=True)
class FieldRule:
    """The rule, as one gateway applies it.

    Attributes:
        is_strict: Whether fields are refused that would otherwise be ignored.
        on_ignored: Called with the name of the API and the number of fields that were ignored in a body.
    """

    is_strict: bool = False
    on_ignored: Callable[[str, int], None] = _uncounted

    def check(self, violations: Violations, body: Part, api: str) -> None:
        """Adds a violation for each refused field of the body and of the objects in it; records ignored fields."""
        ignored = IgnoredFields()
        for _ in self._steps(violations, ignored, body):
            pass
        self._note(api, ignored)

    async def check_by_turns(self, violations: Violations, body: Part, api: str, turns: Turns) -> None:
        """Like `check`, but lets other calls run in between: a body may have a hundred thousand fields."""
        ignored = IgnoredFields()
        for _ in self._steps(violations, ignored, body):
            await turns.pause()
        self._note(api, ignored)

    def leave_out(self, violations: Violations, api: str, paths: Mapping[str, str]) -> None:
        """Records omitted entries of lists, such as tools that cannot run here, as ignored. `paths` has their names or
        types by path. In strict mode they are refused."""
        if self.is_strict:
            for path, name in paths.items():
                violations.add(path, f'is "{name:.80}", which is not supported')
        else:
            self.note(api, *(f"{path.removesuffix('.type')}.{name[:_MAX_NAME]}" for path, name in paths.items()))

    def note(self, api: str, *paths: str) -> None:
        """Records fields as ignored that are read, but that this model cannot obey."""
        ignored = IgnoredFields()
        for path in paths:
            ignored.add(path)
        self._note(api, ignored)

    def _note(self, api: str, ignored: IgnoredFields) -> None:
        if not ignored.count:
            return
        self.on_ignored(api, ignored.count)
        _logger.debug("%s: %d fields were ignored: %s", api, ignored.count, ignored.names)
        if (of_call := _of_call.get()) is not None:
            of_call.merge(ignored)

    def _steps(self, violations: Violations, ignored: IgnoredFields, part: Part, path: str = "") -> Iterator[None]:
        """Checks an object and the objects in it. Other calls may run between two steps; a step takes a fraction of a
        millisecond if objects have few undeclared fields."""
        self._check_own(violations, ignored, part, path)
        for name, alias in _fields_with_parts(type(part)):
            value, place = getattr(part, name), _place(path, alias)
            if isinstance(value, Part):
                yield from self._steps(violations, ignored, value, place)
            elif isinstance(value, list):
                for position, entry in enumerate(typing.cast(list[Any], value)):
                    if violations.are_enough:
                        return
                    if isinstance(entry, Part):
                        yield from self._steps(violations, ignored, entry, f"{place}[{position}]")
        yield

    def _check_own(self, violations: Violations, ignored: IgnoredFields, part: Part, path: str) -> None:
        unread = part.unread
        for name, value in part.undeclared.items():
            if value is None or name in unread.silent:
                continue
            values = unread.values_without_effect(name)
            if values is None and not self.is_strict:
                if ignored.is_full:
                    ignored.count += 1
                else:
                    ignored.add(_place(path, name))
            elif values is None:
                known = "is not a known field" if path else "is not a field of this request"
                violations.add(_place(path, name), known)
            # `in` would treat 1 as equal to true.
            elif not any(isinstance(value, bool) is isinstance(each, bool) and value == each for each in values):
                violations.add(_place(path, name), _UNSUPPORTED + unread.way_out(name))
            if violations.are_enough:
                return


def _place(path: str, name: str) -> str:
    return f"{path}.{name[:80]}" if path else name[:80]


@functools.cache
def _fields_with_parts(kind: type[Part]) -> tuple[tuple[str, str], ...]:
    """The fields that may contain objects to check, each with its name in bodies. A prompt, which may have a million
    tokens, is not among them."""
    return tuple(
        (name, declared.alias or name)
        for name, declared in kind.model_fields.items()
        if any(isinstance(each, type) and issubclass(each, Part) for each in _types_in(declared.annotation))
    )


def _types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for each in typing.get_args(annotation):
        yield from _types_in(each)
