"""Reads flags and environment variables into one frozen dataclass per service, and checks them at start.

    @dataclass(frozen=True, slots=True)
    class WorkerSettings:
        listen: str = setting("127.0.0.1:50053", "where to listen")
        kv_cache_memory: int = setting(1 << 30, "memory of the KV pool", parse=parse_bytes, metavar="BYTES")

    settings = load_settings(WorkerSettings, sys.argv[1:], os.environ, program="quire worker")

A field `kv_cache_memory` has the flag `--kv-cache-memory` and the variable `QUIRE_KV_CACHE_MEMORY`. The flag wins over
the variable, the variable over the configuration file, the file over the default. A variable that is set to nothing
counts as absent. A `bool` has `--x` and `--no-x`. The flag of a tuple takes items with commas and may be repeated.

A class with the field `config` reads a configuration file in TOML, whose keys are the flags without their dashes:

    model = "/models/llama"
    kv-cache-memory = "4GiB"
    keys-file = ["a.json", "b.json"]

A class may inherit fields. `--help` shows the flags that are marked as common first, then the class's own, then the
flags of each base under the first line of the base's docstring.
"""

import argparse
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn, TypedDict, TypeVar, Union, Unpack, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_METADATA_KEY = "quire.setting"
_CONFIG_FIELD = "config"
_VARIABLE_PREFIX = "QUIRE_"
# Minimum similarity, by difflib, of two names if one is the other with a mistake.
_SAME_LETTERS = 0.9
# The same of two words of them.
_SAME_WORD = 0.65
# Messages of argparse.
_UNRECOGNIZED = re.compile(r"unrecognized arguments: (?P<flag>--[\w-]+)")
_VALUE_OF_BOOL = re.compile(r"argument (?P<flag>--\S+)/(?P<negated>--no-\S+): ignored explicit argument (?P<value>.+)")
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_BYTES_PATTERN = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]iB|[KMGT]B|B|)")
_BYTES_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, letter in enumerate("KMGT", start=1)
}


class ConfigurationError(Exception):
    """The configuration cannot work; the message is one clear line. The process exits with status 2."""


class TemporaryError(ConfigurationError):
    """A configuration that may work at a later start, for example once a hub of models can be reached. A service exits
    with another status than 2, so that its supervisor starts it again."""


class Described(TypedDict, total=False):
    """The facts about a field of a settings class in addition to its default and its help; all may be left out.

    Attributes:
        flag: The flag, if it is not the field's name, for example "--gpu-blocks".
        variable: The environment variable, if it is not the flag's name, for example "QUIRE_BLOCKS".
        parse: Text to value; ValueError says what was expected. By default the field's type decides: int, float, str,
            bool, Path, each of them `| None`, and tuple[X, ...].
        choices: The only values allowed.
        metavar: How help calls the value.
        minimum: The least value allowed, inclusive.
        maximum: The greatest value allowed, inclusive.
        positional: An argument without a flag and without a variable, which may be left out; a tuple takes any number.
        common: Most users need it: `--help` lists it first.
        aliases: Earlier names of the flag, which work as it does. Not for a bool.
        refuses_empty: For a tuple: refuses an empty text, for example from an unset shell variable, since it would turn
            off what the caller wants to have. A single comma is the empty tuple. For any other field, an empty
            environment variable counts as absent.
    """

    flag: str
    variable: str
    parse: Callable[[str], Any]
    choices: Sequence[Any]
    metavar: str
    minimum: float | None
    maximum: float | None
    positional: bool
    common: bool
    aliases: Sequence[str]
    refuses_empty: bool


def setting(default: Any, help: str, **described: Unpack[Described]) -> Any:
    """A field of a settings class, with its default and one line for `--help`."""
    return dataclasses.field(default=default, metadata={_METADATA_KEY: {"help": help, **described}})


def load_settings(cls: type[T], argv: Sequence[str], environ: Mapping[str, str] | None, *, program: str) -> T:
    """Reads the settings; flags win over `QUIRE_*` variables, variables over the configuration file, it over defaults.

    Args:
        cls: A dataclass whose fields are made by `setting`.
        argv: The command line without the program.
        environ: Usually os.environ. Variables that no field has are ignored. None if the program reads none.
        program: The command that the user called, for example "quire worker", for `--help`.

    Raises:
        ConfigurationError: one line that names flag, variable or file and key, the value and the expectation.
        SystemExit: after `--help` was printed.
    """
    options = _options_of(cls)
    given = vars(make_parser(cls, program, reads_environ=environ is not None).parse_intermixed_args(list(argv)))
    values: dict[str, Any] = {}
    for option in options:
        if option.name in given:
            values[option.name] = option.value(given[option.name], option.flag)
        elif environ and option.variable and (text := option.text_in(environ)) is not None:
            values[option.name] = option.value([text], option.variable)
    if path := values.get(_CONFIG_FIELD):
        values = _read_config(path, options, program) | values
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def overridden(settings: T, texts: Sequence[tuple[str, str]], allowed: Collection[str], *, source: str) -> T:
    """The settings with other values for some flags, given as texts by the flags without dashes; a tuple's may be
    repeated. `allowed` has the names of the fields that may change; `source` is where the texts come from, for errors.

    Raises:
        ConfigurationError: a flag is unknown or not allowed, or a value is not valid.
    """
    known = {option.key: option for option in _options_of(type(settings)) if option.name in allowed}
    given: dict[str, list[str]] = {}
    for key, text in texts:
        if key not in known:
            raise ConfigurationError(
                f"{source}: {key} is no flag that one model may have; these are: {', '.join(sorted(known))}"
            )
        given.setdefault(key, []).append(text)
    values = {known[key].name: known[key].value(each, f"{source}: {key}") for key, each in given.items()}
    try:
        return dataclasses.replace(cast(Any, settings), **values)
    except ValueError as error:
        raise ConfigurationError(f"{source}: {error}") from error


def variables_of(cls: type) -> list[str]:
    """The environment variables that a settings class reads."""
    return [option.variable for option in _options_of(cls) if option.variable]


def misspelt_variables(cls: type, environ: Mapping[str, str], *, program: str) -> list[str]:
    """A line for each variable that is almost one of the class. Other variables are ignored: services share files of
    variables, and NAME_2 belongs to a second service."""
    known = variables_of(cls)
    lines: list[str] = []
    for name in sorted(environ):
        is_ours = name.startswith(_VARIABLE_PREFIX) and environ[name] and name not in known
        if not is_ours or any(name.startswith(f"{each}_") for each in known):
            continue
        for near in difflib.get_close_matches(name, known, 1, _SAME_LETTERS):
            if not _has_other_words(name, near):
                lines.append(f"{name} is set, and no setting of {program}; did you mean {near}?")
    return lines


def _has_other_words(name: str, near: str) -> bool:
    """Whether two names with as many words differ by a word that is no misspelling, as METRICS of TRACES."""
    words, others = name.split("_"), near.split("_")
    return len(words) == len(others) and any(
        difflib.SequenceMatcher(None, word, other).ratio() < _SAME_WORD
        for word, other in zip(words, others, strict=True)
    )


def to_argv(cls: type, values: Mapping[str, object]) -> list[str]:
    """The command line that gives the fields of a settings class these values.

    A field that `values` does not name, or by None, stays at its default. Names that the class does not have are left
    out, so that the settings of several services can be handed to each of them.
    """
    return [
        argument
        for option in _options_of(cls)
        if (value := values.get(option.name)) is not None
        for argument in option.arguments(value)
    ]


def make_parser(cls: type, program: str, *, reads_environ: bool = True) -> argparse.ArgumentParser:
    """The parser of the class's flags, for `--help` and for completion in shells. It checks no values."""
    positional = [f" [{option.shown_metavar}]" for option in _options_of(cls) if option.positional]
    usage = f"{program} [FLAGS]{''.join(positional)}"
    parser = _Parser(prog=program, usage=usage, description=cls.__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("-h", "--help", action="help", help="show all flags")
    for heading, options in flags_of(cls):
        section = parser.add_argument_group(heading) if heading else parser
        for option in options:
            _add_option(section, option, reads_environ)
    return parser


def flags_of(cls: type) -> list[tuple[str, list["Option"]]]:
    """The flags with the headings of `--help`; the class's own have none, unless others come before them."""
    common, rest = [], []
    for option in _options_of(cls):
        (common if option.common else rest).append(option)
    groups = [("The flags that most users need", common)] if common else []
    for declared_by, options in itertools.groupby(rest, attrgetter("declared_by")):
        own_heading = "Flags only of this command" if common else ""
        heading = own_heading if declared_by is cls else _heading(declared_by)
        groups.append((heading, list(options)))
    return groups


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a settings class, as the command line, the environment and configuration files know it."""

    declared_by: type
    name: str
    flag: str
    variable: str | None
    is_bool: bool
    is_tuple: bool
    default: Any
    parse: Callable[[str], Any]
    help: str
    choices: Sequence[Any] | None = None
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    positional: bool = False
    common: bool = False
    aliases: Sequence[str] = ()
    refuses_empty: bool = False

    def text_in(self, environ: Mapping[str, str]) -> str | None:
        """The text in the environment; None if it has none."""
        text = environ.get(self.variable) if self.variable else None
        return text if text or self.refuses_empty else None

    @property
    def key(self) -> str:
        """The name in a configuration file."""
        return self.flag.removeprefix("--")

    @property
    def negated_flag(self) -> str:
        """The flag that sets a bool to false."""
        return "--no-" + self.key

    @property
    def shown_metavar(self) -> str:
        """How help calls the value."""
        if self.metavar is None and self.choices is not None:
            return "{" + ",".join(map(str, self.choices)) + "}"
        return self.metavar or (self.name if self.positional else self.key.rpartition("-")[2]).upper()

    @property
    def shown_default(self) -> str:
        """The default as it would be written after the flag; "none" if there is none."""
        if self.default is None or self.default == ():
            return "none"
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        return str(self.default).lower() if self.is_bool else str(self.default)

    def value(self, texts: Sequence[str | list[str]], source: str) -> Any:
        """The value of the flag or the variable `source`; only a tuple's flag can be repeated."""
        # argparse of Python 3.11 makes an empty list of the value "--".
        parsed = [self._parsed(text if isinstance(text, str) else "--", source) for text in texts]
        return tuple(itertools.chain.from_iterable(parsed)) if self.is_tuple else parsed[-1]

    def arguments(self, value: Any) -> list[str]:
        """The flags that set this value."""
        if self.is_bool:
            return [self.flag if value else self.negated_flag]
        nothing = "," if self.refuses_empty else ""
        return [f"{self.flag}={item}" for item in (value or (nothing,) if self.is_tuple else (value,))]

    def _parsed(self, text: str, source: str) -> Any:
        try:
            if self.refuses_empty and not text.strip():
                raise ValueError("it is empty; leave it out if you want none")
            value = self.parse(text)
            for item in value if self.is_tuple else (value,):
                self._check(item)
        except ValueError as error:
            raise ConfigurationError(f'{source}: "{text}" is not valid: {error}') from error
        return value

    def _check(self, value: Any) -> None:
        choices, minimum, maximum = self.choices, self.minimum, self.maximum
        if choices is not None and value not in choices:
            raise ValueError(f"expected one of {', '.join(map(str, choices))}")
        if minimum is not None and value < minimum:
            raise ValueError(f"the least value is {minimum}")
        if maximum is not None and value > maximum:
            raise ValueError(f"the greatest value is {maximum}")


@functools.cache
def _options_of(cls: type) -> tuple[Option, ...]:
    """The options that the class declares, then the options of each base class, except redeclared ones."""
    hints, fields = get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    return tuple(
        _option(base, fields.pop(name), hints[name])
        for base in cls.__mro__
        for name in inspect.get_annotations(base)
        if name in fields
    )


def _option(declared_by: type, field: dataclasses.Field, hint: Any) -> Option:
    described = dict(field.metadata[_METADATA_KEY])
    kind, is_positional = _without_none(hint), described.get("positional", False)
    flag = described.pop("flag", None) or "--" + field.name.replace("_", "-")
    variable = described.pop("variable", None) or _VARIABLE_PREFIX + flag.removeprefix("--").replace("-", "_").upper()
    return Option(
        declared_by=declared_by,
        name=field.name,
        flag=field.name if is_positional else flag,
        variable=None if is_positional else variable,
        is_bool=kind is bool,
        is_tuple=get_origin(kind) is tuple,
        default=field.default,
        parse=described.pop("parse", None) or _parser_of(kind),
        **described,
    )


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ConfigurationErrors."""

    def error(self, message: str) -> NoReturn:
        if (unknown := _UNRECOGNIZED.match(message)) is not None:
            near = difflib.get_close_matches(unknown["flag"], self._option_string_actions, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        elif (given := _VALUE_OF_BOOL.match(message)) is not None:
            message = f"{given['flag']} takes no value, and {given['value']} is given; {given['negated']} turns it off"
        raise ConfigurationError(f"{message} (--help lists all flags)")

    def print_help(self, file: Any = None) -> None:
        # argparse ignores that it cannot write.
        print(self.format_help(), end="", file=file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Values are checked later, where their source is known; the choices are for shells."""


class _AppendBool(argparse.Action):
    """Appends the text "true", or "false" for the negated flag."""

    def __init__(self, option_strings: Sequence[str], dest: str, **further: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **further)

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, flag: str | None = None) -> None:
        given = [*getattr(namespace, self.dest, []), "true" if flag == self.option_strings[0] else "false"]
        setattr(namespace, self.dest, given)


def _heading(cls: type) -> str:
    return (inspect.getdoc(cls) or cls.__name__).partition("\n")[0].removesuffix(".")


def _add_option(section: argparse._ActionsContainer, option: Option, reads_environ: bool) -> None:
    """The parser only collects texts, a list for each flag that was given; values are checked afterwards."""
    help_text, absent = _help_of(option, reads_environ), argparse.SUPPRESS
    if option.positional:
        nargs, action = ("*", "extend") if option.is_tuple else ("?", "append")
        section.add_argument(
            option.name, nargs=nargs, action=action, default=absent, metavar=option.shown_metavar, help=help_text
        )
    elif option.is_bool:
        section.add_argument(
            option.flag, option.negated_flag, dest=option.name, action=_AppendBool, default=absent, help=help_text
        )
    else:
        added = section.add_argument(
            option.flag,
            *option.aliases,
            dest=option.name,
            action="append",
            default=absent,
            metavar=option.shown_metavar,
            help=help_text,
        )
        added.choices = option.choices


def _help_of(option: Option, reads_environ: bool) -> str:
    facts = [option.variable] if option.variable and reads_environ else []
    if not option.positional:
        facts.append(f"default: {option.shown_default}")
    shown = f" [{', '.join(facts)}]" if facts else ""
    return f"{option.help}{shown}".replace("%", "%%")


# The configuration file.


def _read_config(path: Path, options: Sequence[Option], program: str) -> dict[str, Any]:
    """The values of a file; raises ConfigurationError for a key that is no flag of the program."""
    import tomllib  # most starts have no file, and its expressions take 2% of the start of a gateway

    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error
    known = {option.key: option for option in options if not option.positional and option.name != _CONFIG_FIELD}
    values: dict[str, Any] = {}
    for written, value in content.items():
        key = written.replace("_", "-")
        if key not in known:
            raise ConfigurationError(f'{path}: "{written}" is not a flag of {program}{_hint(key, value, known)}')
        option = known[key]
        if option.name in values:
            raise ConfigurationError(f'{path}: "{key}" is there twice, with "-" and with "_"')
        source = f"{path}: {written}"
        items = value if isinstance(value, list) and option.is_tuple else [value]
        values[option.name] = option.value([_as_text(item, source) for item in items], source)
    return values


def _hint(key: str, value: object, known: Mapping[str, Option]) -> str:
    """A suggestion for the writer of an unknown key."""
    positive = key.removeprefix("no-")
    if positive != key and positive in known and known[positive].is_bool:
        return f"; write {positive} = false"
    if isinstance(value, dict):
        return "; a file has no tables, all keys are at its top"
    near = difflib.get_close_matches(key, known, n=1)
    return f'; did you mean "{near[0]}"?' if near else ""


def _as_text(value: object, source: str) -> str:
    """A TOML value as it would be written after its flag."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    kinds: dict[type, str] = {dict: "a table", list: "an array"}
    kind = kinds.get(type(value), "a date or a time")
    raise ConfigurationError(f"{source} is {kind}; expected a text, a number, true or false")


# Conversions of texts to values. Every function raises ValueError that names the expectation.


def _parser_of(hint: Any) -> Callable[[str], Any]:
    """The parser for a type: int, float, str, bool, Path, each of them `| None`, and tuple[X, ...] with commas."""
    kind = _without_none(hint)
    if get_origin(kind) is tuple:
        parse_item = _PARSERS[get_args(kind)[0]]
        return lambda text: tuple(parse_item(item.strip()) for item in text.split(",") if item.strip())
    return _PARSERS[kind]


def _without_none(hint: Any) -> Any:
    """`X` of `X | None`; any other type as it is."""
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = (member for member in get_args(hint) if member is not type(None))
        return kind
    return hint


def parse_bytes(text: str) -> int:
    """Bytes from "512MiB", "1.5GiB", "2GB" or "1000000". Raises ValueError."""
    match = _BYTES_PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected a size such as 512MiB, 4GiB or 1000000")
    number, unit = match["number"], _BYTES_UNITS[match["unit"]]
    return int(float(number) * unit) if "." in number else int(number) * unit


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None


def _parse_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered not in _TRUE | _FALSE:
        raise ValueError("expected true or false")
    return lowered in _TRUE


def _parse_path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("expected a path")
    return Path(text)


_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: _parse_int,
    float: _parse_float,
    bool: _parse_bool,
    str: str,
    Path: _parse_path,
}
