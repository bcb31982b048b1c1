"""`quire keys`: its output, its file, and its refusals."""

import json
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.auth.caller import Access
from gateway.auth.keys import hash_of, read_keys, write_keys
from gateway.auth.quota import Limits
from quire_cli.main import main
from tests.support.keys import make_entry


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.json"


@pytest.fixture
def run(capsys):
    """Runs `quire keys`; returns status, stdout and stderr."""

    def call(*arguments):
        status = main(["keys", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_add_prints_the_key_alone_and_keeps_only_its_hash(run, path):
    status, stdout, stderr = run("add", path, "--tenant=acme")
    key = stdout.removesuffix("\n")
    assert status == 0
    assert "\n" not in key
    assert 'tenant "acme"' in stderr
    assert key not in stderr
    (entry,) = read_keys(path)
    assert entry.hash == hash_of(key)
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_add_takes_what_a_key_may_and_how_much(run, path):
    run(
        "add", path, "--tenant=acme", "--id=batch", "--note=at night", "--requests-per-minute=60",
        "--tokens-per-minute=1000", "--max-concurrent-requests=8", "--models=m,n", "--priority=-5", "--max-priority=3",
        "--may-pin", "--operator", "--days=2",
    )  # fmt: skip
    (entry,) = read_keys(path)
    assert (entry.id, entry.tenant, entry.note) == ("batch", "acme", "at night")
    assert entry.access == Access(frozenset({"m", "n"}), -5, 3, may_pin=True, is_operator=True)
    assert entry.limits == Limits(60, 1000, 8)
    assert entry.created_at is not None
    assert entry.expires_at == entry.created_at + timedelta(days=2)


# Forked, so that they all begin at the same time.
ADD_AT_ONCE = """
import os, sys
from quire_cli import keys
children = []
for _ in range(3):
    children.append(os.fork())
    if not children[-1]:
        children.clear()
        break
status = keys.main(["add", sys.argv[1], "--tenant=acme"])
for child in children:
    status |= os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(status)
"""


def test_processes_that_add_at_once_lose_nothing(path):
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", ADD_AT_ONCE, str(path)]
    adding = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root, check=True)
    keys = adding.stdout.split()
    assert len(set(keys)) == 4
    assert {entry.hash for entry in read_keys(path)} == {hash_of(key) for key in keys}


def test_list_shows_what_keys_may_do_and_nothing_that_opens(run, path):
    key = run("add", path, "--tenant=acme", "--id=a", "--requests-per-minute=60", "--note=batch")[1].strip()
    now = datetime.now(UTC)
    old = make_entry("b", "x", "other", Access(models=frozenset({"m"})), expires_at=now - timedelta(days=1))
    write_keys(path, [*read_keys(path), old])
    status, stdout, _ = run("list", path)
    lines = stdout.splitlines()
    assert (status, lines[0]) == (0, "a: tenant acme, 60 requests per minute (batch)")
    assert lines[1].startswith("b: tenant other, models m, expired ")
    shown = [json.loads(line) for line in run("list", path, "--format=json")[1].splitlines()]
    assert [(each["key_id"], each["limits"]["requests_per_minute"]) for each in shown] == [("a", 60), ("b", None)]
    for text in (stdout, json.dumps(shown)):
        assert key not in text
        assert hash_of(key).hex() not in text


def test_revoke_takes_keys_out_and_one_that_is_there_or_is_not_there_changes_nothing(run, path):
    for key_id, tenant in (("a", "t"), ("b", "t"), ("c", "u"), ("d", "v")):
        run("add", path, f"--tenant={tenant}", f"--id={key_id}")
    assert run("revoke", path, "--id=a", "--id=c")[0] == 0
    assert [entry.id for entry in read_keys(path)] == ["b", "d"]
    assert run("revoke", path, "--tenant=v")[0] == 0
    # A second key of one id is refused.
    assert run("add", path, "--tenant=t", "--id=b")[0] == 2
    status, _, stderr = run("revoke", path, "--id=b", "--id=a")
    assert status == 2
    assert 'no key "a"' in stderr
    assert len(read_keys(path)) == 1
    assert run("revoke", path, "--tenant=nobody") == (
        1,
        "",
        f'quire keys revoke: error: {path} has no key of tenant "nobody"\n',
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "usage: quire keys"),
        (["drop", "KEYS"], '"drop" is not a command; there are add, list, revoke'),
        (["add"], "--tenant is missing"),
        (["add", "--tenant=t"], "give the file"),
        (["add", "KEYS", "--tenant=a b"], '--tenant is "a b"'),
        (["add", "KEYS", "--tenant=t", "--id="], '--id is ""'),
        (["add", "KEYS", "--tenant=t", "--priority=5", "--max-priority=4"], "--priority is 5"),
        (["add", "KEYS", "--tenant=t", "--note=a\nb"], "--note is 'a\\nb'"),
        (["add", "KEYS/no/file", "--tenant=t"], "cannot write"),
        (["list", "KEYS"], "No such file"),
        (["revoke", "KEYS"], "give either --id or --tenant"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(run, path, arguments, says):
    status, stdout, stderr = run(*(argument.replace("KEYS", str(path)) for argument in arguments))
    assert status == 2
    assert says in stdout + stderr
    assert not path.exists()


def test_a_broken_file_is_left_as_it_is(run, path):
    path.write_text('{"keys": [7]}')
    for arguments in (["add", path, "--tenant=t"], ["list", path], ["revoke", path, "--id=a"]):
        status, _, stderr = run(*arguments)
        assert status == 2
        assert "keys[0]" in stderr
    assert path.read_text() == '{"keys": [7]}'
