"""Writes a version to every place in the repository that names its version.

usage: python -m tools.set_version VERSION   (0.2.0, or 0.2.0.dev0 after a release)

Images and chart are built of the tree, so they have its version. Charts have Semantic Versioning: 0.2.0.dev0 is
0.2.0-dev.0 there.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from quire.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
_PLACES = ("Dockerfile", "compose.yaml", "docs/deploying.md", "quire/version.py", "deploy/chart/**/*.yaml")
_VERSION = re.compile(r"(\d+\.\d+\.\d+)(?:\.dev(\d+))?")


def of_chart(version: str) -> str:
    """The version in Helm's form. Raises ValueError if it is not in ours."""
    match = _VERSION.fullmatch(version)
    if match is None:
        raise ValueError(f"{version} is no version: MAJOR.MINOR.PATCH or MAJOR.MINOR.PATCH.devN")
    return match[1] if match[2] is None else f"{match[1]}-dev.{match[2]}"


def changed(old: str, new: str) -> Iterator[tuple[Path, str]]:
    """The files that name the old version, and their text with the new one."""
    for path in sorted(path for place in _PLACES for path in ROOT.glob(place)):
        text = path.read_text(encoding="utf-8")
        # appVersion is the version itself, and `version` of the chart stands before it.
        named = re.sub(rf"(?m)^version: {re.escape(of_chart(old))}$", f"version: {of_chart(new)}", text)
        named = re.sub(rf"(?<![\w.]){re.escape(old)}(?![\w.]*\w)", new, named)
        if named != text:
            yield path, named


def main(version: str) -> None:
    of_chart(version)
    for path, text in changed(VERSION, version):
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    print("next: python -m tools.check_kubernetes --write")


if __name__ == "__main__":
    main(*sys.argv[1:])
