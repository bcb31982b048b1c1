"""The program `quire`, whose servers run these programs as services: `python -m tests.support.quire_of_forks PROGRAMS
COMMAND FLAG...`. PROGRAMS is the JSON of `Programs`."""

import functools
import json
import sys
from typing import Any

from quire_cli import batch, serve
from quire_cli.main import main
from quire_cli.supervisor import LocalServer
from quire_cli.supervisor.commands import Programs

if __name__ == "__main__":
    of_services, *arguments = sys.argv[1:]
    server: Any = functools.partial(LocalServer, programs=Programs(**json.loads(of_services)))
    serve.LocalServer = batch.LocalServer = server
    sys.exit(main(arguments))
