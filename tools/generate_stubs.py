"""Generates the protobuf and gRPC stubs from protos/.

usage: generate_stubs.py [OUT_DIR]   (default: the repository root, where git ignores them)
"""

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(protos: Path, out: Path) -> list[Path]:
    """Writes the stubs of every file below `protos` into `out`, in the folder of its package; returns the files.

    Raises RuntimeError when protoc refuses a file.
    """
    sources = sorted(protos.rglob("*.proto"))
    out.mkdir(parents=True, exist_ok=True)
    arguments = [
        "protoc",
        f"--proto_path={protos}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *map(str, sources),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc failed on {protos}")
    return sources


if __name__ == "__main__":
    destination = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    print(f"generated stubs of {len(generate(ROOT / 'protos', destination))} files in {destination}")
