"""Compiles the contracts and lints them with buf, which `make setup` installs (the package buf-bin).

usage: python -m tools.lint_protos
"""

import subprocess
import sys
from pathlib import Path

from tools.proto_descriptors import read_protos

ROOT = Path(__file__).resolve().parent.parent
BUF = Path(sys.executable).with_name("buf")


def main() -> int:
    """Lints; not 0 when protoc or buf refuses a file, or buf is missing."""
    print(f"protoc: {len(read_protos(ROOT / 'protos'))} files compile")
    if not BUF.is_file():
        print(f"buf lint: failed: there is no {BUF}; `make setup` installs it with the package buf-bin")
        return 1
    status = subprocess.run([str(BUF), "lint"], cwd=ROOT).returncode
    print("buf lint: " + ("passed" if status == 0 else "failed"))
    return status


if __name__ == "__main__":
    sys.exit(main())
