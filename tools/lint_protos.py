"""Compiles and lints the contracts, and compares them with each release's, by buf (the package buf-bin).

A field that a release has keeps its number, its type and its name; one that goes leaves its number reserved. The
contracts of releases are tests/compat/VERSION/contracts.binpb.gz.

usage: python -m tools.lint_protos
"""

import subprocess
import sys
from pathlib import Path

from tools.proto_descriptors import read_protos

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ROOT / "tests" / "compat"
BUF = Path(sys.executable).with_name("buf")


def main() -> int:
    """Checks; not 0 when protoc or buf refuses a file, or buf is missing."""
    print(f"protoc: {len(read_protos(ROOT / 'protos'))} files compile")
    if not BUF.is_file():
        print(f"buf lint: failed: there is no {BUF}; `make setup` installs it with the package buf-bin")
        return 1
    outcomes = [_buf("lint")]
    for contracts in sorted(RELEASES.glob("*/contracts.binpb.gz")):
        outcomes.append(_buf("breaking", "--against", str(contracts.relative_to(ROOT))))
    return 0 if all(outcomes) else 1


def _buf(*arguments: str) -> bool:
    passed = subprocess.run([str(BUF), *arguments], cwd=ROOT).returncode == 0
    print(f"buf {' '.join(arguments)}: {'passed' if passed else 'failed'}")
    return passed


if __name__ == "__main__":
    sys.exit(main())
