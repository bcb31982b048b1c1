"""Releases from this repository's history, whose services run together with today's services."""

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
_CPU = "quire_kernels/cpu"
_OLDER_CPU = "kernels/cpu"
"""The folder in releases before 0.2.0."""
_LIBRARY = "libquire_cpu.so"


class NoHistoryError(Exception):
    """The local history does not reach the release."""


@dataclass(frozen=True, slots=True)
class Release:
    """Code that services can be started from: `python -P -m MODULE`, with `code` in PYTHONPATH."""

    name: str
    python: str
    code: Path

    @classmethod
    def of_today(cls) -> Self:
        return cls("today", sys.executable, ROOT)

    @classmethod
    def check_out(cls, version: str, directory: Path) -> Self:
        """Writes the release to a new folder, with its stubs, its CPU library, and an interpreter that has this one's
        packages without Quire. Raises NoHistoryError."""
        commit = commit_of(version)
        directory.mkdir()
        packed = directory.with_suffix(".tar")
        _git("archive", f"--output={packed}", commit)
        subprocess.run(["tar", "-x", "-f", packed, "-C", directory], check=True)
        packed.unlink()
        release = cls(f"{version} ({commit[:8]})", _make_python(directory), directory)
        subprocess.run([release.python, "-P", "tools/generate_stubs.py"], cwd=directory, check=True)
        _make_library(commit, directory)
        return release

    def write(self, file: Path) -> None:
        """Writes the file for `service_of_release`, which starts the release that it names at each call."""
        new = file.with_suffix(".new")
        new.write_text(f"{self.python}\n{self.code}\n", encoding="utf-8")
        new.replace(file)

    def runs(self, pid: int) -> bool:
        """Whether a process that `service_of_release` started runs this release."""
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return command[0] == os.fsencode(self.python)


def commit_of(version: str) -> str:
    """The last commit whose quire/version.py says this version. Raises NoHistoryError."""
    file, line = "quire/version.py", f'VERSION = "{version}"'
    if line in _git("show", f"HEAD:{file}"):
        return _git("rev-parse", "HEAD")
    # The newest commit that added or removed the line removed it, since the newest file lacks it.
    changed = _git("log", "-1", "--format=%H", f"-S{line}", "--", file)
    if changed and line in _git("show", f"{changed}^:{file}", is_optional=True):
        return _git("rev-parse", f"{changed}^")
    raise NoHistoryError(
        f"no commit with {line} in {file}: this checkout has too little history; `git fetch --unshallow` gets it"
    )


def _git(*arguments: str, is_optional: bool = False) -> str:
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if result.returncode and not is_optional:
        raise NoHistoryError(f"git {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout.strip()


def _make_python(directory: Path) -> str:
    """Makes a separate interpreter, since an editable install would lead this one to today's code."""
    home = directory / ".venv"
    venv.create(home, symlinks=True, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    # Folders in a .pth file are searched, but their own .pth files are not read.
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "release.pth").write_text("\n".join([str(directory), *shared]) + "\n", encoding="utf-8")
    return str(home / "bin" / "python")


def _make_library(commit: str, directory: Path) -> None:
    """Copies today's library if its sources are the same, and builds it if not. If today's was not built, for want of
    a compiler, the release has none either, and its operations run in torch."""
    if not (ROOT / _CPU / _LIBRARY).exists():
        return
    folder = _CPU if (directory / _CPU).is_dir() else _OLDER_CPU
    library = directory / folder / _LIBRARY
    sources = (f"{commit}:{folder}", f"HEAD:{_CPU}")
    if not subprocess.run(["git", "diff", "--quiet", *sources], cwd=ROOT).returncode:
        shutil.copy(ROOT / _CPU / _LIBRARY, library)
        return
    build = directory / "build"
    configure = ["cmake", "-S", directory, "-B", build, "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run([*configure, f"-DPython_EXECUTABLE={sys.executable}"], check=True, stdout=subprocess.DEVNULL)
    make = ["cmake", "--build", build, "--target", "quire_cpu", "--parallel", str(os.cpu_count() or 1)]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    shutil.copy(build / folder / _LIBRARY, library)
