"""`quire completion`: completions in the shell."""

import subprocess
from pathlib import Path

import pytest

from quire_cli.main import COMMANDS, main

# Calls the script as bash does when the user presses Tab.
_ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 ))
_shtab_quire
echo "${COMPREPLY[@]}"
"""


def test_bash_completes_commands_flags_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "quire.sh").write_text(capsys.readouterr().out)
    for words, completed in (
        ([""], set(COMMANDS)),
        (["serve", "--policy", ""], {"fcfs", "priority", "fair"}),
        (["keys", "add", "--ten"], {"--tenant"}),
        (["bench", "plot", "--p"], {"--plot"}),
    ):
        command = ["bash", "-c", _ASK, "ask", str(tmp_path / "quire.sh"), "quire", *words]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert set(run.stdout.split()) == completed


def test_every_shell_has_a_script_and_another_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("zsh", "tcsh"):
        assert main(["completion", shell]) == 0
        assert "--keys-file" in capsys.readouterr().out
    assert main(["completion"]) == 2
    assert main(["completion", "fish"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors == [
        "quire completion: error: give the shell: bash, zsh, tcsh",
        'quire completion: error: shell: "fish" is not valid: expected one of bash, zsh, tcsh',
    ]
