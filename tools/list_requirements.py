"""Prints the distribution's requirements, one a line, so that an image can install them ahead of the code.

usage: list_requirements.py EXTRA...
       list_requirements.py --build     (of the build of the package)
"""

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def list_requirements(pyproject: Path, extras: Sequence[str]) -> list[str]:
    """The requirements of the project and of these extras, each once. A reference of the project to its own extras
    stands for their requirements.

    Raises KeyError for an extra that the project does not have.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    own = re.compile(re.escape(project["name"]) + r"\[(.*)\]")
    found = dict.fromkeys(project["dependencies"])
    wanted = list(extras)
    for extra in wanted:
        for requirement in project["optional-dependencies"][extra]:
            if reference := own.fullmatch(requirement):
                wanted += [each for each in reference[1].split(",") if each not in wanted]
            else:
                found[requirement] = None
    return list(found)


def list_build_requirements(pyproject: Path) -> list[str]:
    """The requirements of the project's build."""
    return tomllib.loads(pyproject.read_text(encoding="utf-8"))["build-system"]["requires"]


if __name__ == "__main__":
    is_build = sys.argv[1:] == ["--build"]
    print("\n".join(list_build_requirements(PYPROJECT) if is_build else list_requirements(PYPROJECT, sys.argv[1:])))
