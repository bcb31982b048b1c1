"""Installs packages into the environment of the interpreter that runs this.

uv does it, several times as fast as pip. uv does not read pip's settings (indexes, certificates, mirrors), so they are
handed to it as uv's variables; variables of uv that are set already win. Where uv is missing or fails, for example
because only pip knows how to log in at an index, pip does it.

usage: install.py [--into PYTHON] [--constraint FILE] [--index URL] [--no-deps]
                  (--requirement FILE | --editable DIRECTORY)
"""

import argparse
import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

# The variable of uv for a setting of pip, and what stands between several values there.
_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", ""),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "no-index": ("UV_NO_INDEX", ""),
    "cert": ("SSL_CERT_FILE", ""),
    "proxy": ("ALL_PROXY", ""),
    "timeout": ("UV_HTTP_TIMEOUT", ""),
    "default-timeout": ("UV_HTTP_TIMEOUT", ""),
}
# Sections of pip's settings that an installation reads. Later ones win.
_SECTIONS = ("global", "install", ":env:")


def read_pip_settings(lines: Iterable[str]) -> dict[str, str]:
    """The settings of pip for an installation, from what `pip config list` prints: `section.name='value'` a line."""
    found: dict[tuple[int, str], str] = {}
    for line in lines:
        name, equals, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if equals and section in _SECTIONS:
            found[_SECTIONS.index(section), key] = str(ast.literal_eval(value))
    return {key: found[section, key] for section, key in sorted(found)}


def environment_of_uv(settings: Mapping[str, str], index: str | None, constraint: str | None) -> dict[str, str]:
    """uv's environment variables with the effect of these settings of pip, one more index and a file of pins."""
    # pip takes the best version of all indexes; uv would take the first index that has the package.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    if constraint is not None:
        variables |= {"UV_CONSTRAINT": constraint, "UV_BUILD_CONSTRAINT": constraint}
    for key, (variable, separator) in _VARIABLES.items():
        if key in settings:
            value = settings[key]
            variables[variable] = separator.join(value.split()) if separator else value
    if index is not None:
        variables["UV_INDEX"] = " ".join([index, *variables.get("UV_INDEX", "").split()])
    return variables


def _install_with_uv(arguments: Sequence[str], into: str, index: str | None, constraint: str | None) -> bool:
    """Whether uv has installed these."""
    if importlib.util.find_spec("uv") is None:
        return False
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    variables = environment_of_uv(read_pip_settings(listed.stdout.splitlines()), index, constraint)
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", into, *arguments]
    return subprocess.run(command, env={**variables, **os.environ}).returncode == 0


def _install_with_pip(arguments: Sequence[str], into: str, index: str | None, constraint: str | None) -> int:
    command = [sys.executable, "-m", "pip", "--python", into, "install", "--no-compile", *arguments]
    if index is not None:
        command += ["--extra-index-url", index]
    # Newer versions of pip give the second name to the pins of isolated builds.
    names = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT") if constraint is not None else ()
    return subprocess.run(command, env={**os.environ, **dict.fromkeys(names, constraint or "")}).returncode


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--into", metavar="PYTHON", default=sys.executable, help="the interpreter of the environment")
    parser.add_argument("--constraint", metavar="FILE", help="pins of versions")
    parser.add_argument("--index", metavar="URL", help="one more index of packages")
    parser.add_argument("--no-deps", action="store_true", help="without what the packages require")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--requirement", metavar="FILE")
    what.add_argument("--editable", metavar="DIRECTORY")
    parsed = parser.parse_args(arguments)
    named = ["--requirement", parsed.requirement] if parsed.requirement else ["--editable", parsed.editable]
    installed = [*(["--no-deps"] if parsed.no_deps else []), *named]
    if _install_with_uv(installed, parsed.into, parsed.index, parsed.constraint):
        return 0
    print("install: uv did not install the packages; pip tries", file=sys.stderr)
    return _install_with_pip(installed, parsed.into, parsed.index, parsed.constraint)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
