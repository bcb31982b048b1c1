"""The entry point: runs a command, and turns its errors into one line and an exit status."""

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from quire.rpc.errors import QuireError, Unavailable
from quire.rpc.process import (
    CONFIGURATION_EXIT_STATUS,
    imports_that_stay,
    missing_package,
    report_configuration_error,
)
from quire.runtime.settings import ConfigurationError
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


GROUPS: Mapping[str, Mapping[str, Command]] = {
    "Serve a model and use it": {
        "serve": Command(
            "quire_cli.serve",
            "serve a model on this machine: all processes",
            {"": "quire_cli.supervisor.settings:ServeSettings"},
        ),
        "chat": Command.of("quire_cli.chat", "ChatFlags", "talk with a model"),
        "generate": Command.of("quire_cli.generate", "GenerateFlags", "continue a prompt, or a file of prompts"),
        "embed": Command.of("quire_cli.embed", "EmbedFlags", "print or save the vectors of texts"),
        "rerank": Command.of("quire_cli.rerank", "RerankFlags", "put documents in order for a query"),
        "batch": Command.of("quire_cli.batch", "BatchSettings", "answer a file of requests, and end"),
        "pull": Command.of("quire_cli.pull", "PullFlags", "download a model of the Hugging Face Hub"),
        "models": Command.of("quire_cli.models", "ModelsFlags", "list the models on this machine, and what they need"),
        "quantize": Command.of("quire_cli.quantize", "QuantizeFlags", "write a model as a GGUF file with fewer bits"),
        "doctor": Command.of(
            "quire_cli.doctor", "DoctorFlags", "show what this machine has, and what Quire uses of it"
        ),
    },
    "Watch and operate what runs": {
        "status": Command.of("quire_cli.status", "StatusFlags", "show health, models and replicas of a gateway"),
        "top": Command.of("quire_cli.top", "TopFlags", "show queues, tokens, memory and steps of all replicas, live"),
        "keys": Command(
            "quire_cli.keys",
            "add, list and revoke the API keys of a gateway",
            {name: f"quire_cli.keys:{name.title()}Flags" for name in ("add", "list", "revoke")},
            reads_environ=False,
        ),
        "certs": Command.of("quire_cli.certs", "CertsFlags", "make or renew certificates for TLS between all services"),
        "drain": Command.of("quire_cli.drain", "DrainFlags", "move the running requests of a replica to the others"),
        "mcp": Command.of("quire_cli.mcp", "McpFlags", "serve operators' tools to agents, over MCP"),
        "pin": Command.of("quire_cli.pins", "PinFlags", "keep a prefix cached for a while", "pin"),
        "unpin": Command.of("quire_cli.pins", "UnpinFlags", "unpin a prefix", "unpin"),
        "log-level": Command.of("quire_cli.log_level", "LogLevelFlags", "change the log level of services that run"),
    },
    "Measure and plan": {
        "bench": Command(
            "quire_cli.bench.command",
            "measure a server under load, or draw what was measured",
            {"": "quire_cli.bench.flags:BenchFlags", "plot": "quire_cli.bench.flags:PlotFlags"},
        ),
        "torture": Command(
            "quire_cli.torture",
            "find out what a server loses when its processes die under load",
            {"": "quire_cli.torture:TortureFlags"},
            reads_environ=False,
        ),
        "simulate": Command.of(
            "quire_cli.simulate", "SimulateFlags", "simulate a replica under load: latencies, and what limits them"
        ),
        "scripted": Command.of(
            "quire_cli.scripted", "ScriptedFlags", "answer by rules instead of a model, for tests of agents"
        ),
        "replay": Command.of("quire_cli.replay", "ReplayFlags", "run a scheduler's recording again, without workers"),
    },
    "Run only one service, on one of several machines": {
        "gateway": Command("gateway.__main__", "run one gateway", {"": "gateway.settings:GatewaySettings"}),
        "scheduler": Command(
            "scheduler_svc.__main__", "run one scheduler", {"": "scheduler_svc.settings:SchedulerSettings"}
        ),
        "worker": Command("worker_svc.__main__", "run one worker", {"": "worker_svc.settings:WorkerSettings"}),
    },
    "The command line itself": {
        "completion": Command.of(
            "quire_cli.completion", "CompletionFlags", "print what completes commands and flags in a shell"
        ),
    },
}
"""All commands in the order of `quire --help`: the ones that most users need first."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status: 0 well, 1 failed, 2 called wrongly, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[0:1] == ["help"]:
        # `quire help serve` is `quire serve --help`.
        arguments = [*arguments[1:], "--help"]
    name = arguments[0] if arguments else ""
    program = f"quire {name}" if name in COMMANDS else "quire"
    try:
        _check_encodable(arguments)
        status = _run(name, arguments[1:])
        # At exit it would be too late to report that the reader is gone, or that the disk is full.
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
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


def _run(name: str, arguments: Sequence[str]) -> int:
    """Runs the command of this name; an empty one has none."""
    match name:
        case "":
            print(_usage(), file=sys.stderr)
            return CONFIGURATION_EXIT_STATUS
        case "-h" | "--help":
            print(_usage())
            return 0
        case "-V" | "--version":
            print(f"quire {VERSION}")
            return 0
        case _ if name not in COMMANDS:
            raise _no_such_command(name)
        case _:
            command = COMMANDS[name]
    try:
        with imports_that_stay():
            module = importlib.import_module(command.module)
        return getattr(module, command.function)(arguments)
    except SystemExit:
        # argparse has printed the help; its errors are raised as ConfigurationErrors.
        return 0


def _no_such_command(name: str) -> ConfigurationError:
    if name.startswith("-"):
        return ConfigurationError(f'"{name}" comes before a command; flags come after it, as in quire serve {name}')
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    return ConfigurationError(f'"{name}" is not a command; {hint}')


def _discard_output() -> None:
    """Discards buffered output, so that it does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_encodable(arguments: Sequence[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigurationError(f"the argument {argument!r} is not UTF-8") from None


_OTHER_HOSTS = "the gateway's certificate is for other hosts"
_NAME_A_HOST = "--tls-server-name is a name that it has; `quire certs --host` gives it others"
_CLOSED = "the connection was closed"
_CLOSED_BY = "check that `quire serve` runs, the port, and whether it needs TLS (--tls-ca-file, --tls-cert-file)"
# Texts of gRPC and Python's ssl about a connection that TLS prevents, the problem, and the way out.
_TLS_FAILURES = (
    ("Hostname Verification Check failed", _OTHER_HOSTS, _NAME_A_HOST),
    ("Hostname mismatch", _OTHER_HOSTS, _NAME_A_HOST),
    ("IP address mismatch", _OTHER_HOSTS, _NAME_A_HOST),
    ("CERTIFICATE_VERIFY_FAILED", "the gateway's certificate is not trusted", "--tls-ca-file names its authority"),
    ("WRONG_VERSION_NUMBER", "the gateway does not use TLS", "leave out the flags and variables of TLS"),
    ("Socket closed", _CLOSED, _CLOSED_BY),
    ("Remote end closed connection without response", _CLOSED, _CLOSED_BY),
)


def explain(error: QuireError) -> str:
    """A failed call in one readable line."""
    if isinstance(error, Unavailable) and error.reason == Unavailable.default_reason:
        said = " ".join(error.message.split())
        if "http1.x server" in said:
            return f"that port speaks HTTP; give the one for gRPC, 50051 unless --grpc-port says otherwise ({said})"
        for mark, problem, way_out in _TLS_FAILURES:
            if mark in said:
                return f"{problem} ({said}); {way_out}"
        return f"no gateway answers ({said}); check that `quire serve` runs, and the address"
    if error.reason == "MISSING_API_KEY":
        return "the gateway requires an API key; set QUIRE_API_KEY"
    wait = "" if error.retry_after_ms is None else f" (retry in {error.retry_after_ms / 1000:.1f} s)"
    return f"{' '.join(error.message.split())}{wait}"


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: quire COMMAND [FLAGS]"]
    for heading, group in GROUPS.items():
        lines += ["", f"{heading}:", *(f"  {name:<{width}}  {command.help}" for name, command in group.items())]
    lines += ["", "Begin with `quire serve`, and `quire chat` in another terminal."]
    return "\n".join([*lines, "`quire COMMAND --help` lists its flags; `quire --version` prints the version."])


if __name__ == "__main__":
    sys.exit(main())
