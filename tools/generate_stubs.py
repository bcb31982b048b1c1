"""Generates the protobuf and gRPC stubs from protos/.

usage: generate_stubs.py [OUT_DIR]   (default: the repository root, where git ignores them)
"""

import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def roots_of(protos: Path) -> list[Path]:
    """The folders that contracts are imported from: that of the internal contracts, then that of the public ones."""
    return [root for root in (protos / "internal", protos) if root.is_dir()]


def import_name(protos: Path, source: Path) -> str:
    """The name by which other contracts import a file, such as "quire/common/v1/common.proto"."""
    root = next(root for root in roots_of(protos) if source.is_relative_to(root))
    return source.relative_to(root).as_posix()


def generate(protos: Path, out: Path) -> list[Path]:
    """Writes the stubs of every file below `protos` into `out`, in the folder of its package; returns the files.

    Stubs of foreign packages come below `out`/quire.

    Raises RuntimeError when protoc refuses a file.
    """
    sources = sorted(protos.rglob("*.proto"))
    ours = [source for source in sources if import_name(protos, source).startswith("quire/")]
    _write_stubs(protos, ours, out, "--grpc_python_out")
    # Packages of public standards have no top-level module of ours. Their services are registered by descriptor:
    # generated gRPC code would import the messages from where the standard has them.
    _write_stubs(protos, [source for source in sources if source not in ours], out / "quire")
    return sources


def _write_stubs(protos: Path, sources: Sequence[Path], out: Path, *further_outputs: str) -> None:
    if sources:
        out.mkdir(parents=True, exist_ok=True)
        run_protoc(protos, sources, *(f"{output}={out}" for output in ("--python_out", "--pyi_out", *further_outputs)))


def run_protoc(protos: Path, sources: Sequence[Path], *options: str) -> None:
    """Raises RuntimeError if protoc refuses a file of `sources`, which lie below `protos`."""
    imported_from = (*roots_of(protos), files("grpc_tools") / "_proto")
    flags = [*(f"--proto_path={root}" for root in imported_from), *options, *map(str, sources)]
    if protoc.main(["protoc", *flags]) != 0:
        raise RuntimeError(f"protoc failed on {protos}")


if __name__ == "__main__":
    destination = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    print(f"generated stubs of {len(generate(ROOT / 'protos', destination))} files in {destination}")
