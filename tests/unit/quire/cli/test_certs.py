"""`quire certs`: what it writes, and what it leaves alone."""

import stat
from pathlib import Path

import pytest
from cryptography import x509

from quire.cli.main import main
from quire.rpc.tls import Role, TlsIdentity


def names_of(path: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def test_every_role_gets_a_certificate_for_its_hosts(tmp_path: Path) -> None:
    assert main(["certs", "--tls-dir", str(tmp_path / "new"), "--host", "gpu-1.example,10.0.0.7"]) == 0
    for role in Role:
        assert TlsIdentity.of(tmp_path / "new", role).read().certificate
        names = names_of(tmp_path / "new" / f"{role}.pem")
        assert {"localhost", "127.0.0.1", "gpu-1.example", "10.0.0.7", f"quire://role/{role}"} <= set(names)


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    assert main(["certs", "--tls-dir", str(tmp_path)]) == 0
    for name in ("ca.key", *(f"{role}.key" for role in Role)):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_second_call_renews_everything_but_the_authority(tmp_path: Path) -> None:
    assert main(["certs", "--tls-dir", str(tmp_path)]) == 0
    authority, worker = (tmp_path / "ca.pem").read_bytes(), (tmp_path / "worker.pem").read_bytes()
    assert main(["certs", "--tls-dir", str(tmp_path)]) == 0
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert (tmp_path / "worker.pem").read_bytes() != worker


@pytest.mark.parametrize("name", ["ca.pem", "ca.key"])
def test_an_authority_without_one_of_its_files_is_not_replaced(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", "--tls-dir", str(tmp_path)]) == 0
    (tmp_path / name).unlink()
    assert main(["certs", "--tls-dir", str(tmp_path)]) == 2
    assert "the authority cannot be read" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_a_host_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", "--tls-dir", str(tmp_path), "--host", "füße"]) == 2
    assert "--host" in capsys.readouterr().err


def test_by_role_a_directory_has_what_its_role_needs_and_no_more(tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["certs", "--tls-dir", str(tmp_path), "--by-role"]) == 0
    for role in Role:
        assert {path.name for path in (tmp_path / role).iterdir()} == {"ca.pem", f"{role}.pem", f"{role}.key"}
        assert TlsIdentity.of(tmp_path / role, role).authority
    assert {path.name for path in tmp_path.iterdir()} == {"ca.pem", "ca.key", *Role}


def test_by_role_everyone_believes_all_whom_the_directory_names(tmp_path: Path) -> None:
    assert main(["certs", "--tls-dir", str(tmp_path), "--by-role"]) == 0
    assert main(["certs", "--tls-dir", str(tmp_path / "next"), "--by-role"]) == 0
    both = (tmp_path / "ca.pem").read_bytes() + (tmp_path / "next" / "ca.pem").read_bytes()
    (tmp_path / "ca.pem").write_bytes(both)
    assert main(["certs", "--tls-dir", str(tmp_path), "--by-role"]) == 0
    assert (tmp_path / "worker" / "ca.pem").read_bytes() == both
