"""The entry point: runs a command and turns what it raises into one line and an exit status."""

import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from quire.rpc.errors import QuireError, Unavailable
from quire.rpc.process import CONFIGURATION_EXIT_STATUS, missing_package, report_configuration_error
from quire.settings import ConfigurationError
from quire.version import VERSION

_INTERRUPTED_EXIT_STATUS = 130


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        module: Has the function, and is imported when the command is called: so `quire generate` imports no torch.
        help: One line.
        flags: The classes of its flags, as MODULE:CLASS, by the name of the command below it, "" for the command's own.
        function: Takes the arguments and returns the exit status.
        reads_environ: Whether its flags have environment variables.
    """

    module: str
    help: str
    flags: Mapping[str, str]
    function: str = "main"
    reads_environ: bool = True

    @classmethod
    def of(cls, module: str, flags: str, help: str, function: str = "main") -> Self:
        """A command whose flags are a class of its module."""
        return cls(module, help, {"": f"{module}:{flags}"}, function)


COMMANDS = {
    "serve": Command(
        "quire.cli.serve",
        "serve a model on this machine: all processes",
        {"": "quire.local.settings:ServeSettings"},
    ),
    "pull": Command.of("quire.cli.pull", "PullFlags", "download a model of the Hugging Face Hub"),
    "gateway": Command("gateway.__main__", "run one gateway", {"": "gateway.settings:GatewaySettings"}),
    "scheduler": Command(
        "scheduler_svc.__main__", "run one scheduler", {"": "scheduler_svc.settings:SchedulerSettings"}
    ),
    "worker": Command("worker_svc.__main__", "run one worker", {"": "worker_svc.settings:WorkerSettings"}),
    "generate": Command.of("quire.cli.generate", "GenerateFlags", "continue a prompt, or a file of prompts"),
    "chat": Command.of("quire.cli.chat", "ChatFlags", "talk with a model"),
    "pin": Command.of("quire.cli.pins", "PinFlags", "keep a prefix cached for a while", "pin"),
    "unpin": Command.of("quire.cli.pins", "UnpinFlags", "unpin a prefix", "unpin"),
    "keys": Command(
        "quire.cli.keys",
        "add, list and revoke the API keys of a gateway",
        {name: f"quire.cli.keys:{name.title()}Flags" for name in ("add", "list", "revoke")},
        reads_environ=False,
    ),
    "certs": Command.of("quire.cli.certs", "CertsFlags", "make or renew certificates for TLS between all services"),
    "bench": Command(
        "quire.cli.bench.command",
        "measure a server under load, or draw what was measured",
        {"": "quire.cli.bench.flags:BenchFlags", "plot": "quire.cli.bench.flags:PlotFlags"},
    ),
    "simulate": Command.of(
        "quire.cli.simulate", "SimulateFlags", "simulate a replica under load: latencies, and what limits them"
    ),
    "replay": Command.of("quire.cli.replay", "ReplayFlags", "run a scheduler's recording again, without workers"),
    "status": Command.of("quire.cli.status", "StatusFlags", "show health, models and replicas of a gateway"),
    "top": Command.of("quire.cli.top", "TopFlags", "show queues, tokens, memory and steps of all replicas, live"),
    "doctor": Command.of("quire.cli.doctor", "DoctorFlags", "show what this machine has, and what Quire uses of it"),
    "completion": Command.of(
        "quire.cli.completion", "CompletionFlags", "print what completes commands and flags in a shell"
    ),
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
        if name not in COMMANDS:
            raise ConfigurationError(f"no such command; there are {', '.join(COMMANDS)}")
        command = COMMANDS[name]
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
        return f"no gateway answers ({' '.join(error.message.split())}); is `quire serve` running, the address right?"
    if error.reason == "MISSING_API_KEY":
        return "the gateway requires an API key; set QUIRE_API_KEY"
    wait = "" if error.retry_after_ms is None else f" (retry in {error.retry_after_ms / 1000:.1f} s)"
    return f"{' '.join(error.message.split())}{wait}"


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return f"usage: quire COMMAND [FLAGS]\n\n{commands}\n\n`quire COMMAND --help` lists a command's flags."


if __name__ == "__main__":
    sys.exit(main())
