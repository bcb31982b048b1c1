"""`quire scripted`: a gateway whose answers are written in rules, for tests of programs that call a model."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from quire.rpc.process import imports_that_stay, run_service
from quire.runtime.logs import LOG_LEVELS, begin_logging
from quire.runtime.settings import ConfigurationError, load_settings, setting
from quire.testing.rules import RuleError, read_rule_file

PROGRAM = "quire scripted"
_NAME = re.compile(r"[\w][\w./:@+-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ScriptedFlags:
    """Answers requests by rules, over OpenAI's and Anthropic's APIs and gRPC; see docs/testing-agents.md."""

    rules: Path | None = setting(
        None, "rules in JSON or YAML; without it, PUT /scripted/rules gives them", metavar="FILE"
    )
    http_port: int = setting(8000, "port for HTTP; 0 picks a free one", minimum=0, maximum=65535)
    grpc_port: int = setting(50051, "port for gRPC; 0 picks a free one", minimum=0, maximum=65535)
    host: str = setting("127.0.0.1", "address to listen on")
    model_names: tuple[str, ...] = setting(
        ("scripted",),
        "names of the model that answers with texts, such as the names that an agent is configured with",
        metavar="NAME",
        refuses_empty=True,
    )
    embedding_names: tuple[str, ...] = setting(
        ("scripted-embeddings",), "names of the model that answers with embeddings", metavar="NAME", refuses_empty=True
    )
    log_level: str = setting("warning", "log level", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        names = [*self.model_names, *self.embedding_names]
        if not self.model_names or not self.embedding_names:
            raise ValueError("--model-names and --embedding-names each need at least one name")
        for name in names:
            if not _NAME.fullmatch(name):
                raise ValueError(f"a model cannot be called {name!r}; a name has 1 to 128 letters, digits and ._/:@+-")
            if names.count(name) > 1:
                raise ValueError(
                    f"two models would be called {name!r}; --model-names and --embedding-names must differ"
                )


def main(argv: Sequence[str]) -> int:
    """Serves until a signal comes; returns 0, or 2 if rules or flags cannot be used."""

    async def start() -> None:
        flags = load_settings(ScriptedFlags, argv, os.environ, program=PROGRAM)
        try:
            rules = [] if flags.rules is None else read_rule_file(flags.rules)
        except RuleError as error:
            raise ConfigurationError(str(error)) from error
        # A start is mostly imports. numpy would start threads for products of matrices, and pydantic would build
        # the types of all bodies; now it builds each at its first use.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        with imports_that_stay():
            BaseModel.model_config["defer_build"] = True
            from quire_cli.scripted_server import serve
        begin_logging("scripted", flags.log_level, "text", ScriptedFlags, os.environ, program=PROGRAM)
        ports = {"http_port": flags.http_port, "grpc_port": flags.grpc_port}
        hosts = {"http_host": flags.host, "grpc_host": flags.host}
        await serve(rules, flags.model_names, flags.embedding_names, **ports, **hosts)

    return run_service(start, program=PROGRAM)
