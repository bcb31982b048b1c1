"""Prints the distribution's requirements, one a line, so that an image can install them ahead of the code.

usage: list_requirements.py EXTRA...
"""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def list_requirements(pyproject: Path, extras: Sequence[str]) -> list[str]:
    """The requirements of the project and of these extras, without the project's references to itself.

    Raises KeyError for an extra that the project does not have.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    own = project["name"] + "["
    return [requirement for group in groups for requirement in group if not requirement.startswith(own)]


if __name__ == "__main__":
    print("\n".join(list_requirements(PYPROJECT, sys.argv[1:])))
