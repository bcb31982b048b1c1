"""tools/install.py: pip's settings reach uv, and pip installs where uv does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.install import environment_of_uv, read_pip_settings

_TOOL = Path(__file__).parents[3] / "tools" / "install.py"


def test_settings_of_the_environment_win_over_those_of_the_command_and_of_all_commands() -> None:
    printed = [
        ":env:.index-url='http://env.example/simple'",
        "freeze.timeout='1'",
        "global.index-url='http://global.example/simple'",
        "global.extra-index-url='http://a.example/simple\\nfile:///b/simple'",
        "install.index-url='http://install.example/simple'",
        "install.find-links='/wheels /more'",
        "user.name",
    ]
    settings = read_pip_settings(printed)
    assert settings == {
        "index-url": "http://env.example/simple",
        "extra-index-url": "http://a.example/simple\nfile:///b/simple",
        "find-links": "/wheels /more",
    }
    assert environment_of_uv(settings, "http://torch.example/cpu", "pins.txt") == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_CONSTRAINT": "pins.txt",
        "UV_BUILD_CONSTRAINT": "pins.txt",
        "UV_DEFAULT_INDEX": "http://env.example/simple",
        "UV_INDEX": "http://torch.example/cpu http://a.example/simple file:///b/simple",
        "UV_FIND_LINKS": "/wheels,/more",
    }


@pytest.mark.parametrize("program", ["raise SystemExit(2)", None])
def test_pip_installs_where_uv_fails_or_is_missing(tmp_path: Path, program: str | None) -> None:
    packages, record = tmp_path / "packages", tmp_path / "record"
    packages.mkdir()
    # The module `uv` fails, and the module `pip` writes down its arguments.
    if program is not None:
        (packages / "uv.py").write_text(program)
    (packages / "pip.py").write_text(
        "import os, sys\nfrom pathlib import Path\n"
        f"Path({str(record)!r}).open('a').write(' '.join([*sys.argv[1:], os.getenv('PIP_CONSTRAINT', '')]) + '\\n')\n"
    )
    command = [sys.executable, "-S", str(_TOOL), "--into", "other", "--constraint", "pins.txt"]
    command += ["--index", "http://torch.example/cpu", "--no-deps", "--requirement", "needs.txt"]
    ran = subprocess.run(command, env={"PYTHONPATH": str(packages)}, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "")
    assert "pip tries" in ran.stderr
    assert record.read_text().splitlines()[-1] == (
        "--python other install --no-compile --no-deps --requirement needs.txt "
        "--extra-index-url http://torch.example/cpu pins.txt"
    )
