"""The base image of the tests: the Dockerfile's, or one of Debian's packages where no registry of images answers.

usage: python -m tests.containers.base_image   (prints its name)
"""

import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.support.compose import ROOT
from tests.support.containers import docker

IMAGE = "quire-test-python:3.11"
_DEBIAN = "quire-test-debian:12"
_PACKAGES = (
    "ca-certificates,netbase,tzdata,libssl3,libffi8,libsqlite3-0,zlib1g,liblzma5,libbz2-1.0,libreadline8,libncursesw6,"
    "libuuid1,libgdbm6,libdb5.3,libexpat1"
)
_LEFT_OUT = {"site-packages", "__pycache__", "test", "idlelib", "tkinter"}
# Settings by which this machine reaches registries of packages.
_SETTINGS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/apt/apt.conf.d", "/etc/pip.conf")
_DOCKERFILE = f"""
FROM {_DEBIAN}
COPY etc /etc
COPY local /usr/local
ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
RUN ldconfig && python -m ensurepip && ln -sf pip3 /usr/local/bin/pip
"""


def base_image() -> str:
    """`PYTHON_IMAGE` of the environment; else the Dockerfile's, if it is here or a registry has it; else one that is
    made of Debian's packages (as root, with mmdebstrap) and this interpreter, which must be CPython 3.11."""
    if (named := os.environ.get("PYTHON_IMAGE")) is not None:
        return named
    (pinned,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    if docker("image", "inspect", pinned, check=False).strip() not in ("", "[]"):
        return pinned
    if docker("pull", "--quiet", pinned, check=False).strip():
        return pinned
    if docker("image", "inspect", IMAGE, check=False).strip() in ("", "[]"):
        _make()
    return IMAGE


def _make() -> None:
    assert sys.version_info[:2] == (3, 11), "the base image is made of this interpreter, which must be 3.11"
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "root.tar"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root)]
        subprocess.run(command, check=True)
        with root.open("rb") as file:
            subprocess.run(["docker", "import", "-", _DEBIAN], stdin=file, check=True, stdout=subprocess.DEVNULL)
    command = ["docker", "build", "--quiet", "--tag", IMAGE, "-"]
    subprocess.run(command, input=_context(), check=True, stdout=subprocess.DEVNULL)


def _context() -> bytes:
    """A tar archive with the Dockerfile, the interpreter, and settings of this machine."""
    prefix, to = Path(sys.base_prefix), io.BytesIO()
    with tarfile.open(fileobj=to, mode="w") as archive:
        about = tarfile.TarInfo("Dockerfile")
        about.size = len(_DOCKERFILE.encode())
        archive.addfile(about, io.BytesIO(_DOCKERFILE.encode()))
        for each in map(Path, _SETTINGS):
            if each.exists():
                archive.add(each, f"etc/{each.relative_to('/etc')}")
        library = prefix / "lib" / "python3.11"
        archive.add(library, "local/lib/python3.11", filter=_wanted)
        archive.add(prefix / "include" / "python3.11", "local/include/python3.11")
        for shared in prefix.glob("lib/libpython3*"):
            archive.add(shared, f"local/lib/{shared.name}")
        for name in ("python3.11", "python3", "python"):
            archive.add((prefix / "bin" / "python3.11").resolve(), f"local/bin/{name}")
    return to.getvalue()


def _wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if _LEFT_OUT & set(Path(member.name).parts[3:]) else member


if __name__ == "__main__":
    print(base_image())
