"""All commands that call a gateway, if it uses TLS and requires certificates."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.rpc.tls import Role, ServerTls, TlsIdentity
from quire_cli.main import main
from tests.support.certificates import make_certificates
from tests.support.fake_gateway import FakeGatewayThread, running_fake_gateway

Run = Callable[..., tuple[int, str, str]]
COMMANDS = [["generate", "--file=-"], ["chat"], ["status"], ["pin", "x"]]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FakeGatewayThread]:
    make_certificates(tmp_path)
    with running_fake_gateway(ServerTls(TlsIdentity.of(tmp_path, Role.GATEWAY))) as gateway:
        yield gateway


def files(directory: Path) -> list[str]:
    names = {"ca": "ca.pem", "cert": f"{Role.CLIENT}.pem", "key": f"{Role.CLIENT}.key"}
    return [f"--tls-{kind}-file={directory / name}" for kind, name in names.items()]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_with_a_certificate_is_answered(run: Run, tmp_path: Path, command: list[str]) -> None:
    status, stdout, stderr = run(*command, *files(tmp_path))
    assert (status, stderr) == (0, "")
    assert stdout


@pytest.mark.parametrize(("command", "num_files"), [*((command, 0) for command in COMMANDS), (["status"], 1)])
def test_a_command_without_one_says_in_one_line_that_it_is_not_connected(
    run: Run, tmp_path: Path, command: list[str], num_files: int
) -> None:
    status, stdout, stderr = run(*command, *files(tmp_path)[:num_files])
    assert status != 0
    assert not stdout.strip()  # one empty line a prompt of a file
    assert "UNAVAILABLE" in stderr
    assert "Traceback" not in stderr


def test_what_tls_prevents_is_told_with_the_flag_that_helps(run: Run, tmp_path: Path) -> None:
    make_certificates(tmp_path / "other")
    for flags, problem, way_out in (
        ([], "the connection was closed", "needs TLS (--tls-ca-file"),
        (files(tmp_path / "other"), "the gateway's certificate is not trusted", "--tls-ca-file names its authority"),
        (
            [*files(tmp_path), "--tls-server-name=elsewhere.example"],
            "the gateway's certificate is for other hosts",
            "--tls-server-name is a name that it has",
        ),
    ):
        status, _, stderr = run("generate", "x", *flags)
        assert status == 1
        assert stderr.startswith(f"quire generate: error: {problem} (")
        assert way_out in stderr
    with running_fake_gateway() as plain:
        status, _, stderr = run("generate", "x", "--address", plain.address, *files(tmp_path))
    assert status == 1
    assert stderr.startswith("quire generate: error: the gateway does not use TLS (")


def test_a_gateway_of_another_name_is_believed_under_the_name_that_is_given(run: Run, tmp_path: Path) -> None:
    assert run("status", *files(tmp_path), "--tls-server-name=elsewhere.example")[0] != 0
    assert run("status", *files(tmp_path), "--tls-server-name=localhost")[0] == 0


@pytest.mark.parametrize("command", [["top"], ["status", "--watch"]], ids=" ".join)
@pytest.mark.parametrize("flag", ["--tls", "--tls-ca-file=ca.pem"])
def test_a_feed_in_clear_is_refused_where_flags_of_tls_are_given(
    capsys: pytest.CaptureFixture[str], command: list[str], flag: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main([*command, "--api-key=secret", flag, "--url", url]) == 2
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert capsys.readouterr().err.splitlines() == [
        f'quire {command[0]}: error: --address: "{url}" is not encrypted, but flags of TLS are given; use https://'
    ]
