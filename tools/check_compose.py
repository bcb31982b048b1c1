"""Checks that a compose parser takes compose.yaml. Without one on this machine, says so and checks that it is YAML.

usage: python -m tools.check_compose [FILE]   (default: compose.yaml)
"""

import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent


def compose_command() -> list[str] | None:
    """The compose parser of this machine: the docker plugin, else docker-compose; None where there is neither."""
    if shutil.which("docker") is not None:
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True)
        if plugin.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") is not None else None


def main(argv: list[str]) -> int:
    """Checks the file; 1 when it is not accepted."""
    file = Path(argv[0]) if argv else ROOT / "compose.yaml"
    services = yaml.safe_load(file.read_text(encoding="utf-8"))["services"]
    print(f"{file.name}: {len(services)} services: {', '.join(services)}")
    command = compose_command()
    if command is None:
        print("compose config: NOT RUN, since this machine has neither docker compose nor docker-compose")
        return 0
    status = subprocess.run([*command, "--file", str(file), "config", "--quiet"]).returncode
    print(f"{' '.join(command)} config: " + ("passed" if status == 0 else "failed"))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
