"""The commands that the Makefile runs, read from `make --dry-run`."""

import os
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((), False), (("TORCH_INDEX=http://torch.example/cpu",), True)],
)
def test_torch_index_adds_an_index_to_the_installation(arguments: tuple[str, ...], expected: bool) -> None:
    command = ["make", "--dry-run", "--always-make", "serve", *arguments]
    # Without MAKEFLAGS and TORCH_INDEX of the calling `make test`.
    environment = {"PATH": os.environ["PATH"]}
    printed = subprocess.run(
        command, cwd=_ROOT, env=environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout
    installs = [line for line in printed.replace("\\\n", "").splitlines() if "tools/install.py" in line]
    (packages,) = [line for line in installs if "--editable" not in line]
    (project,) = [line for line in installs if "--editable" in line]
    assert "--requirement" in packages
    assert ("--index 'http://torch.example/cpu'" in packages) == expected
    # Its own requirements are among the packages.
    assert "--no-deps" in project


def test_serve_compiles_for_one_instruction_set_beside_the_installation_and_installs_no_tools(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "serve", f"VENV={tmp_path / 'none'}", "PYTHON=python3"]
    environment = {"PATH": os.environ["PATH"]}
    printed = subprocess.run(command, cwd=_ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    assert "--jobs=2 SERVING=serve setup" in printed
    assert f"list_requirements.py all >{tmp_path}" in printed
    assert ".quire-serving-editable" in printed
    assert "QUIRE_BEST_ISA=ON" in printed
    assert "list_requirements.py dev" not in printed
