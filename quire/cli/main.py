"""The entry point: runs a command and turns what it raises into one line and an exit status."""

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from quire.rpc.errors import QuireError, Unavailable
from quire.rpc.process import CONFIGURATION_EXIT_STATUS, missing_package, report_configuration_error
from quire.settings import ConfigurationError
from quire.version import VERSION

_INTERRUPTED_EXIT_STATUS = 130


@dataclass(frozen=True, slots=True)
class _Command:
    module: str
    help: str
    function: str = "main"


# Modules by name, so that `quire gateway` and `quire generate` import no torch.
_COMMANDS = {
    "serve": _Command("quire.cli.serve", "serve a model on this machine: all processes"),
    "gateway": _Command("gateway.__main__", "run one gateway"),
    "scheduler": _Command("scheduler_svc.__main__", "run one scheduler"),
    "worker": _Command("worker_svc.__main__", "run one worker"),
    "generate": _Command("quire.cli.generate", "continue a prompt, or a file of prompts"),
    "chat": _Command("quire.cli.chat", "talk with a model"),
    "pin": _Command("quire.cli.pins", "keep a prefix cached for a while", "pin"),
    "unpin": _Command("quire.cli.pins", "unpin a prefix", "unpin"),
    "keys": _Command("quire.cli.keys", "add, list and revoke the API keys of a gateway"),
    "certs": _Command("quire.cli.certs", "make or renew certificates for TLS between all services"),
    "bench": _Command("quire.cli.bench.command", "measure a server under load, or draw what was measured"),
    "simulate": _Command("quire.cli.simulate", "simulate a replica under load: latencies, and what limits them"),
    "replay": _Command("quire.cli.replay", "run a scheduler's recording again, without workers"),
    "status": _Command("quire.cli.status", "show health, models and replicas of a gateway"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status: 0 well, 1 failed, 2 called wrongly, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else CONFIGURATION_EXIT_STATUS
    if arguments[0] == "--version":
        print(f"quire {VERSION}")
        return 0
    name, rest = arguments[0], arguments[1:]
    program = f"quire {name}"
    try:
        _check_encodable(rest)
        if name not in _COMMANDS:
            raise ConfigurationError(f"no such command; there are {', '.join(_COMMANDS)}")
        command = _COMMANDS[name]
        return getattr(importlib.import_module(command.module), command.function)(rest)
    except ConfigurationError as error:
        report_configuration_error(error, program=program)
        return CONFIGURATION_EXIT_STATUS
    except ModuleNotFoundError as error:
        report_configuration_error(missing_package(error), program=program)
        return CONFIGURATION_EXIT_STATUS
    except QuireError as error:
        print(f"{program}: error: {explain(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED_EXIT_STATUS
    except BrokenPipeError:
        # The reader is gone, for example `head`.
        _discard_output()
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        print(f"{program}: error: cannot write: {error.strerror}", file=sys.stderr)
        return 1


def _discard_output() -> None:
    """Discards buffered output, so that it does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_encodable(arguments: Sequence[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigurationError(f"the argument {argument!r} is not UTF-8") from None


def explain(error: QuireError) -> str:
    """A failed call in one line for people."""
    if isinstance(error, Unavailable) and error.reason == Unavailable.default_reason:
        return f"no gateway answers ({' '.join(error.message.split())}); is `quire serve` running, is --address right?"
    if error.reason == "MISSING_API_KEY":
        return "the gateway requires an API key; set QUIRE_API_KEY"
    wait = "" if error.retry_after_ms is None else f" (retry in {error.retry_after_ms / 1000:.1f} s)"
    return f"{' '.join(error.message.split())}{wait}"


def _usage() -> str:
    width = max(map(len, _COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in _COMMANDS.items())
    return f"usage: quire COMMAND [FLAGS]\n\n{commands}\n\n`quire COMMAND --help` lists a command's flags."


if __name__ == "__main__":
    sys.exit(main())
