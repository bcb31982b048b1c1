"""Checks that the compose files are what the Compose specification allows.

usage: python -m tools.check_compose [FILE ...]   (later files change earlier ones)

Without files: compose.yaml alone, then with deploy/compose.tls.yaml. Each file must fit the JSON schema of the
specification, which comes with the package check-jsonschema. Where docker compose is installed, its parser must accept
the files together, too.
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
        return check([Path(name) for name in argv])
    return max(check([COMPOSE]), check([COMPOSE, WITH_TLS]))


def check(files: Sequence[Path]) -> int:
    """0 when all files together are accepted."""
    for file in files:
        services = yaml.safe_load(file.read_text(encoding="utf-8"))["services"]
        print(f"{file.name}: {len(services)} services: {', '.join(services)}", flush=True)
    names = [str(file) for file in files]
    schema = [sys.executable, "-m", CHECKER, "--quiet", "--builtin-schema", "vendor.compose-spec", *names]
    status = _run("compose schema", schema)
    if status == 0 and (parser := compose_command()) is not None:
        flags = [word for name in names for word in ("--file", name)]
        status = _run(" ".join(parser), [*parser, *flags, "config", "--quiet"])
    return status


def compose_command() -> list[str] | None:
    """The compose parser of this machine: the docker plugin, else docker-compose; None where there is neither."""
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
