"""Checks that a compose parser takes the compose files. Without one here, says so and checks that they are YAML.

usage: python -m tools.check_compose [FILE ...]   (later files change earlier ones)

Without files: compose.yaml alone, then with deploy/compose.tls.yaml.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "compose.yaml"
WITH_TLS = ROOT / "deploy" / "compose.tls.yaml"


def compose_command() -> list[str] | None:
    """The compose parser of this machine: the docker plugin, else docker-compose; None where there is neither."""
    if shutil.which("docker") is not None:
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True)
        if plugin.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") is not None else None


def main(argv: list[str]) -> int:
    """Checks the files; not 0 when they are not accepted."""
    if argv:
        return check([Path(name) for name in argv])
    return max(check([COMPOSE]), check([COMPOSE, WITH_TLS]))


def check(files: Sequence[Path]) -> int:
    """The exit status of the parser for all files together."""
    for file in files:
        services = yaml.safe_load(file.read_text(encoding="utf-8"))["services"]
        print(f"{file.name}: {len(services)} services: {', '.join(services)}")
    command = compose_command()
    if command is None:
        print("compose config: NOT RUN, since this machine has neither docker compose nor docker-compose")
        return 0
    flags = [word for file in files for word in ("--file", str(file))]
    status = subprocess.run([*command, *flags, "config", "--quiet"]).returncode
    print(f"{' '.join(command)} config: " + ("passed" if status == 0 else "failed"))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
