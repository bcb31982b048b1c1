"""Pages of the documentation's site that are made from the code: the flags of every command."""

import html
import importlib
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from quire.runtime.settings import Option, flags_of
from quire_cli.main import COMMANDS

_SERVICES = ("serve", "gateway", "scheduler", "worker")
_HEADS = {
    "services": "# Services\n\nThe flags of the services, and of `quire serve`, which starts all of them and hands its "
    "flags on. A flag wins over its variable, the variable over `--config FILE`, whose keys are the flags without "
    "dashes.",
    "commands": "# Commands\n\nThe flags of all other commands. `quire COMMAND --help` shows them, too.",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs when it has found the files of the documentation."""
    others = [name for name in COMMANDS if name not in _SERVICES]
    for page, commands in (("services", _SERVICES), ("commands", others)):
        content = "\n\n".join([_HEADS[page], *(part for name in commands for part in _describe(name))])
        files.append(File.generated(config, f"reference/{page}.md", content=content))
    return files


def _describe(name: str) -> Iterator[str]:
    """The command's headings and tables."""
    for below, path in COMMANDS[name].flags.items():
        module, _, class_name = path.partition(":")
        cls = getattr(importlib.import_module(module), class_name)
        yield f"## quire {name} {below}".rstrip()
        yield " ".join((cls.__doc__ or "").split())
        for heading, options in flags_of(cls):
            if heading:
                yield f"### {heading}"
            rows = [_row(option, COMMANDS[name].reads_environ) for option in options]
            yield "\n".join(["| flag | what it does | default | variable |", "|---|---|---|---|", *rows])


def _row(option: Option, reads_environ: bool) -> str:
    flag = option.flag if option.positional else f"{option.flag} {option.shown_metavar}"
    if option.is_bool:
        flag = f"{option.flag}`, `{option.negated_flag}"
    default = "" if option.positional else f"`{option.shown_default}`"
    variable = f"`{option.variable}`" if option.variable and reads_environ else ""
    cells = (f"`{flag}`", html.escape(option.help), default, variable)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
