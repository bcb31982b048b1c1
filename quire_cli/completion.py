"""`quire completion SHELL`: prints a script for the completion of commands, flags, choices and file names."""

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import shtab

from quire.rpc.process import missing_package
from quire.runtime.settings import ConfigurationError, load_settings, make_parser, setting

PROGRAM = "quire completion"
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_SHELLS = ("bash", "zsh", "tcsh")
_FILES = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "DIR|ORG/NAME": shtab.FILE}


@dataclass(frozen=True, slots=True)
class CompletionFlags:
    """Prints the completion of one shell, for example: source <(quire completion bash)."""

    shell: str | None = setting(None, "the shell", positional=True, choices=_SHELLS)


def main(argv: Sequence[str]) -> int:
    """Prints the script."""
    flags = load_settings(CompletionFlags, argv, None, program=PROGRAM)
    if flags.shell is None:
        raise ConfigurationError(f"give the shell: {', '.join(_SHELLS)}")
    print(shtab.complete(_parser(), shell=flags.shell))
    return 0


def _parser() -> argparse.ArgumentParser:
    """All commands in one parser, in the form that shtab reads."""
    # quire_cli.main imports this module when the command is called.
    from quire_cli.main import COMMANDS

    root = argparse.ArgumentParser(prog="quire")
    root.add_argument("--version", action="store_true", help="print the version")
    commands = root.add_subparsers()
    for name, command in COMMANDS.items():
        parser = _add(commands, name, command.help, command.flags.get(""))
        if below := [each for each in command.flags if each]:
            nested = parser.add_subparsers()
            for each in below:
                _add(nested, each, "", command.flags[each])
    return root


def _add(commands: _Commands, name: str, help: str, flags: str | None) -> argparse.ArgumentParser:
    parents = []
    if flags is not None:
        module, _, cls = flags.partition(":")
        try:
            parents.append(make_parser(getattr(importlib.import_module(module), cls), f"quire {name}"))
        except ModuleNotFoundError as error:
            # The packages of this service are not installed: only its name is completed.
            missing_package(error)
    parser = commands.add_parser(name, help=help, parents=parents, add_help=False)
    for action in parser._actions:
        if action.metavar in _FILES:
            # shtab reads this field, which argparse does not have.
            setattr(action, "complete", _FILES[action.metavar])  # noqa: B010
    return parser
