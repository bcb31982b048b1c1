"""Flags, environment and defaults become a dataclass."""

import importlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.runtime.settings import (
    ConfigurationError,
    load_settings,
    misspelt_variables,
    parse_bytes,
    setting,
    to_argv,
    variables_of,
)
from quire_cli.main import COMMANDS


def _one_text(text: str) -> tuple[str, ...]:
    return (text,)


@dataclass(frozen=True, slots=True)
class Settings:
    """Does a thing. With 100% care."""

    target: str | None = setting(None, "what to do it to", positional=True)
    listen: str = setting("127.0.0.1:1", "where to listen")
    count: int = setting(3, "how many", minimum=1, maximum=10)
    share: float = setting(0.5, "which share, in %")
    verbose: bool = setting(False, "say more")
    model: Path | None = setting(None, "a directory", metavar="DIR")
    peers: tuple[str, ...] = setting(("a", "b"), "with whom")
    ports: tuple[int, ...] = setting((), "where", minimum=1)
    texts: tuple[str, ...] = setting((), "texts with commas", parse=_one_text)
    memory: int | None = setting(None, "how much", parse=parse_bytes)
    mode: str = setting("fast", "how", choices=("fast", "slow"))
    blocks: int | None = setting(None, "renamed", flag="--num-blocks")

    def __post_init__(self) -> None:
        if self.listen == "nowhere":
            raise ValueError("--listen nowhere makes no sense")


def load(*argv: str, **environ: str) -> Settings:
    return load_settings(Settings, argv, environ, program="quire thing")


def error_of(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(*argv, **environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_flags_of_every_type_are_read() -> None:
    argv = "it --listen=x --count 4 --share 1e-3 --verbose --model /m --peers c,d --ports 1,2 --memory 2KiB --mode slow"
    loaded = load(*argv.split(), "--num-blocks=7")
    assert loaded == Settings("it", "x", 4, 0.001, True, Path("/m"), ("c", "d"), (1, 2), (), 2048, "slow", 7)
    # The last of repeated flags counts, and tuples add up.
    assert load("--count=1", "--count=2").count == 2
    assert load("--peers=a,b", "--peers=c").peers == ("a", "b", "c")
    assert load("--texts=a, b", "--texts=c").texts == ("a, b", "c")


def test_the_environment_wins_over_the_default_and_the_flag_over_both() -> None:
    assert load(QUIRE_COUNT="", QUIRE_NOTHING="x", COUNT="9", QUIRE_TARGET="y") == load() == Settings()
    assert load(QUIRE_COUNT="5").count == 5
    assert load("--count=6", QUIRE_COUNT="5").count == 6
    assert load("--no-verbose", QUIRE_VERBOSE="true").verbose is False
    assert load(QUIRE_NUM_BLOCKS="9").blocks == 9
    assert all(load(QUIRE_VERBOSE=text).verbose for text in ("true", "1", "Yes"))
    assert not any(load(QUIRE_VERBOSE=text).verbose for text in ("off", "0"))
    assert error_of(QUIRE_VERBOSE="maybe") == 'QUIRE_VERBOSE: "maybe" is not valid: expected true or false'


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--count=x"], '--count: "x" is not valid: expected a whole number'),
        (["--count=0"], '--count: "0" is not valid: the least value is 1'),
        (["--count=11"], '--count: "11" is not valid: the greatest value is 10'),
        (["--share=nan"], '--share: "nan" is not valid: expected a finite number'),
        (["--share=much"], '--share: "much" is not valid: expected a number'),
        (["--mode=odd"], '--mode: "odd" is not valid: expected one of fast, slow'),
        (["--memory=4G1B"], '--memory: "4G1B" is not valid: expected a size such as 512MiB, 4GiB or 1000000'),
        (["--listen=nowhere"], "--listen nowhere makes no sense"),
        (["--unknown"], "unrecognized arguments: --unknown (--help lists all flags)"),
        (["--coun=1"], "unrecognized arguments: --coun=1; did you mean --count? (--help lists all flags)"),
        (
            ["--verbose=no"],
            "--verbose takes no value, and 'no' is given; --no-verbose turns it off (--help lists all flags)",
        ),
        (["--model="], '--model: "" is not valid: expected a path'),
        (["a", "b"], "unrecognized arguments: b (--help lists all flags)"),
        (["--count"], "argument --count: expected one argument (--help lists all flags)"),
    ],
)
def test_an_error_names_flag_value_and_expectation(argv: list[str], message: str) -> None:
    assert error_of(*argv) == message


def test_help_shows_variable_and_default(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "usage: quire thing" in text
    assert "Does a thing. With 100% care." in text
    assert "how many [QUIRE_COUNT, default: 3]" in text
    assert "which share, in % [QUIRE_SHARE, default: 0.5]" in text
    assert "with whom [QUIRE_PEERS, default: a,b]" in text
    assert "where [QUIRE_PORTS, default: none]" in text
    assert "say more [QUIRE_VERBOSE, default: false]" in text
    assert "--verbose, --no-verbose" in text


@dataclass(frozen=True)
class PlaceFlags:
    """Where to work.

    Only the first line is a heading.
    """

    place: str = setting("here", "where")
    level: int = setting(1, "how high", minimum=1)


@dataclass(frozen=True)
class TimeFlags:
    """When, at 100% speed."""

    hours: int = setting(8, "how long")


@dataclass(frozen=True)
class JobSettings(TimeFlags, PlaceFlags):
    """Does a job."""

    name: str = setting("job", "what it is called")
    level: int = setting(2, "how high this job is", minimum=2)


def test_a_field_that_is_declared_again_counts_and_help_shows_each_base_under_its_heading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert load_settings(JobSettings, ["--place=there"], {}, program="q") == JobSettings(place="there", level=2)
    with pytest.raises(ConfigurationError, match="the least value is 2"):
        load_settings(JobSettings, ["--level=1"], {}, program="q")
    assert to_argv(JobSettings, {"hours": 1, "level": 3, "place": "x"}) == ["--level=3", "--hours=1", "--place=x"]
    with pytest.raises(SystemExit):
        load_settings(JobSettings, ["--help"], {}, program="quire job")
    _, _, text = capsys.readouterr().out.partition("options:")
    parts = "--name", "--level", "how high this job is", "When, at 100% speed:", "--hours", "Where to work:", "--place"
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.count("--level") == 1
    assert "Only the first line" not in text


@dataclass(frozen=True)
class FileSettings(Settings):
    """Reads a file."""

    config: Path | None = setting(None, "the file", common=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "quire.toml"


def load_file(file: Path, text: str, *argv: str, **environ: str) -> FileSettings:
    file.write_text(text)
    return load_settings(FileSettings, [f"--config={file}", *argv], environ, program="quire thing")


def test_a_file_gives_flags_of_every_type(file: Path) -> None:
    text = """
        listen = "x"
        count = 4
        share = 1e-3
        verbose = true
        model = "/m"
        peers = ["c", "d"]
        ports = [1, 2]
        texts = ["a, b", "c"]
        memory = "2KiB"
        mode = "slow"
        num_blocks = 7  # as the flag, with _ for -
    """
    assert load_file(file, text) == FileSettings(
        None, "x", 4, 0.001, True, Path("/m"), ("c", "d"), (1, 2), ("a, b", "c"), 2048, "slow", 7, config=file
    )
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match=f"{file} is not TOML"):
        load_settings(FileSettings, [f"--config={file}"], {}, program="quire thing")
    file.unlink()
    with pytest.raises(ConfigurationError, match=f"cannot read {file}: No such file"):
        load_settings(FileSettings, [f"--config={file}"], {}, program="quire thing")


def test_flags_and_variables_win_over_the_file_and_the_file_over_defaults(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'count = 4\nshare = 0.25\npeers = "c,d"\nports = []'
    loaded = load_file(file, text, "--count=5", QUIRE_SHARE="0.75")
    assert (loaded.count, loaded.share, loaded.peers, loaded.ports) == (5, 0.75, ("c", "d"), ())
    loaded = load_settings(FileSettings, [], {"QUIRE_CONFIG": str(file)}, program="quire thing")
    assert loaded.count == 4
    # Help shows common flags first, and no variables if none are read.
    with pytest.raises(SystemExit):
        load_settings(FileSettings, ["--help"], None, program="quire thing")
    shown = capsys.readouterr().out
    assert shown.index("most users need") < shown.index("--config") < shown.index("--count")
    assert "how many [default: 3]" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuont = 1", '{file}: "cuont" is not a flag of quire thing; did you mean "count"?'),
        ("no-verbose = true", '{file}: "no-verbose" is not a flag of quire thing; write verbose = false'),
        ("[thing]", '{file}: "thing" is not a flag of quire thing; a file has no tables, all keys are at its top'),
        ('config = "other"', '{file}: "config" is not a flag of quire thing'),
        ("count = 11", '{file}: count: "11" is not valid: the greatest value is 10'),
        ("[count]", "{file}: count is a table; expected a text, a number, true or false"),
        ("count = 2026-01-01", "{file}: count is a date or a time; expected a text, a number, true or false"),
        ("num-blocks = 1\nnum_blocks = 2", '{file}: "num-blocks" is there twice, with "-" and with "_"'),
        ("count 4", "{file} is not TOML: Expected '=' after a key in a key/value pair (at line 1, column 7)"),
    ],
)
def test_an_error_in_the_file_names_file_key_and_value(file: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_file(file, text)
    assert str(caught.value) == message.format(file=file)


@given(
    st.builds(
        Settings,
        listen=st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text != "nowhere"),
        count=st.integers(1, 10),
        share=st.floats(allow_nan=False, allow_infinity=False),
        verbose=st.booleans(),
        peers=st.lists(st.text("abc-=", min_size=1)).map(tuple),
        ports=st.lists(st.integers(1, 99)).map(tuple),
        memory=st.none() | st.integers(0, 2**60),
        mode=st.sampled_from(["fast", "slow"]),
        blocks=st.none() | st.integers(),
    )
)
def test_to_argv_and_back_is_the_same(original: Settings) -> None:
    values = {name: getattr(original, name) for name in Settings.__slots__ if name != "texts"}
    assert load(*to_argv(Settings, {**values, "other": 1})) == original


def test_parse_bytes_reads_sizes_and_refuses_what_is_none() -> None:
    sizes = {"0": 0, "1000000": 10**6, "512MiB": 2**29, "4GiB": 2**32, "2GB": 2 * 10**9, "1.5 KiB": 1536, "1TiB": 2**40}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "-1", "1gib", "GiB", "1 2", "1e9", "0x10"):
        with pytest.raises(ValueError, match="expected a size"):
            parse_bytes(text)


def test_a_variable_that_is_almost_one_of_a_setting_is_named_with_it() -> None:
    environ = {"QUIRE_MEMROY": "1", "QUIRE_NUM_BLOCK": "2", "QUIRE_PEERS": "a", "QUIRE_OTHER": "3", "MEMRY": "4"}
    environ |= {"QUIRE_NUM_BLOCKS_2": "5", "QUIRE_PEER": ""}
    assert misspelt_variables(Settings, environ, program="quire thing") == [
        "QUIRE_MEMROY is set, and no setting of quire thing; did you mean QUIRE_MEMORY?",
        "QUIRE_NUM_BLOCK is set, and no setting of quire thing; did you mean QUIRE_NUM_BLOCKS?",
    ]


def test_what_another_command_reads_is_not_taken_for_a_mistake() -> None:
    """Services and commands share files of variables."""
    of_commands = {
        name: getattr(importlib.import_module(module), cls)
        for name, command in COMMANDS.items()
        for module, _, cls in [command.flags.get("", "quire_cli.serve:").partition(":")]
        if command.reads_environ and cls
    }
    known = {variable: "x" for cls in of_commands.values() for variable in variables_of(cls)}
    compose = Path(__file__).resolve().parents[4].joinpath("compose.yaml").read_text()
    known |= dict.fromkeys(re.findall(r"QUIRE_[A-Z0-9_]+", compose), "x")
    assert len(known) > 200
    for name in ("serve", "gateway", "scheduler", "worker"):
        assert misspelt_variables(of_commands[name], known, program=name) == []
