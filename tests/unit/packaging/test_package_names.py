"""Names of packages that other projects on PyPI have, too."""

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

_PACKAGES = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
OURS = set(_PACKAGES["tool"]["scikit-build"]["wheel"]["packages"])


def test_no_package_that_comes_with_others_has_the_name_of_one_of_ours() -> None:
    """One site-packages cannot hold both. Optional requirements count: transformers 5.25 made one of them fixed."""
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for each in distributions() for line in each.requires or ()]
    assert "kernels" in names
    assert OURS.isdisjoint(name.lower().replace("-", "_") for name in names)
