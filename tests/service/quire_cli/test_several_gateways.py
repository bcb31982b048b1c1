"""Commands that call a gateway, with the addresses of several."""

import io
import json
import sys
from collections.abc import Callable, Iterator

import pytest

from quire_cli.main import main
from tests.support.fake_gateway import FakeGatewayThread, running_fake_gateway

NOBODY = "127.0.0.1:1"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def other(gateway: FakeGatewayThread) -> Iterator[FakeGatewayThread]:
    """Besides `gateway`."""
    with running_fake_gateway() as other:
        yield other


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command; returns status, stdout and stderr."""

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_prompts_of_a_file_go_to_all(run: Run, gateway: FakeGatewayThread, other: FakeGatewayThread) -> None:
    prompts = [f"prompt {i}" for i in range(200)]
    both = f"{gateway.address},{other.address}"
    status, stdout, stderr = run("generate", "--file=-", "--address", both, stdin="\n".join(prompts))
    assert (status, stderr) == (0, "")
    assert stdout.splitlines() == [f"{prompt}!" for prompt in prompts]
    shares = [len(each.generation.requests) for each in (gateway, other)]
    assert sum(shares) == 200
    assert min(shares) > 0


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"], ["pin", "hello"]], ids=lambda each: each[0])
def test_a_command_is_answered_by_whom_it_reaches(
    run: Run, gateway: FakeGatewayThread, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("QUIRE_ADDRESS", f"{NOBODY},{gateway.address}")
    status, stdout, stderr = run(*command, stdin="hello\n")
    assert (status, stderr) == (0, "")
    assert stdout.startswith("pin" if command[0] == "pin" else "hello!")


def test_status_shows_each(run: Run, gateway: FakeGatewayThread, other: FakeGatewayThread) -> None:
    addresses = [gateway.address, other.address]
    status, stdout, stderr = run("status", "--address", ",".join(addresses))
    assert (status, stderr) == (0, "")
    heads = [line for line in stdout.splitlines() if line.startswith("serving")]
    assert [head.split()[2] for head in heads] == addresses
    status, stdout, _ = run("status", "--format=json", "--address", ",".join(addresses))
    assert status == 0
    assert [json.loads(line)["address"] for line in stdout.splitlines()] == addresses


def test_status_shows_the_others_where_one_does_not_answer(run: Run, gateway: FakeGatewayThread) -> None:
    status, stdout, stderr = run("status", "--address", f"{NOBODY},{gateway.address}")
    assert status == 1
    assert stdout.startswith(f"serving at {gateway.address}")
    assert stderr.startswith(f"quire status: error: {NOBODY}: no gateway answers")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["generate", "x"], ["status"]], ids=lambda each: each[0])
@pytest.mark.parametrize("address", ["127.0.0.1:1,", "127.0.0.1:1,nonsense"])
def test_a_malformed_address_is_one_line_and_status_2(run: Run, command: list[str], address: str) -> None:
    status, stdout, stderr = run(*command, "--address", address)
    assert (status, stdout) == (2, "")
    assert stderr.count("\n") == 1
