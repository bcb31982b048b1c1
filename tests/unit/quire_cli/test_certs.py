"""`quire certs`: files that it writes, and files that it does not touch."""

import datetime as dt
import os
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from quire.rpc.certificates import Authority
from quire.rpc.tls import Role, TlsIdentity
from quire.runtime.settings import ConfigurationError
from quire_cli.main import main


def names_of(path: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def test_every_role_gets_a_key_for_its_owner_alone_and_a_certificate_that_a_second_call_renews(tmp_path: Path) -> None:
    call = ["certs", "--tls-dir", str(tmp_path), "--host", "gpu-1.example,10.0.0.7"]
    assert main(call) == 0
    for role in Role:
        assert TlsIdentity.of(tmp_path, role).read().certificate
        names = names_of(tmp_path / f"{role}.pem")
        assert {"localhost", "127.0.0.1", "gpu-1.example", "10.0.0.7", f"quire://role/{role}"} <= set(names)
    for name in ("ca.key", *(f"{role}.key" for role in Role)):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    authority, worker = (tmp_path / "ca.pem").read_bytes(), (tmp_path / "worker.pem").read_bytes()
    # Readable for the group of a service, which may belong to another user.
    owner = (4711, 4712) if os.getuid() == 0 else (os.getuid(), os.getgid())
    (tmp_path / "worker.key").chmod(0o640)
    os.chown(tmp_path / "worker.key", *owner)
    assert main(call) == 0
    found = (tmp_path / "worker.key").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (*owner, 0o640)
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert (tmp_path / "worker.pem").read_bytes() != worker


def test_what_would_make_no_certificates_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(directory: Path, *flags: str) -> str:
        assert main(["certs", "--tls-dir", str(directory), *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    for host in ("füße", "gateway.example:50051", "https://gateway.example", "two names"):
        assert "neither an IP address nor a host name" in refusal(tmp_path, "--host", host)
    for name in ("ca.pem", "ca.key"):
        directory = tmp_path / f"without {name}"
        assert main(["certs", "--tls-dir", str(directory)]) == 0
        key = (directory / "ca.key").read_bytes()
        (directory / name).unlink()
        assert "the authority cannot be read" in refusal(directory)
        assert not (directory / name).exists()
    # The key belongs to another authority.
    (directory / "ca.key").write_bytes(key)
    other = tmp_path / "other"
    assert main(["certs", "--tls-dir", str(other)]) == 0
    (other / "ca.key").write_bytes(key)
    assert "no certificate belongs to ca.key" in refusal(other)


@pytest.mark.parametrize("by_role", [False, True])
def test_a_renewal_keeps_hosts_and_directories_unless_it_names_others(tmp_path: Path, by_role: bool) -> None:
    call = ["certs", "--tls-dir", str(tmp_path)]
    assert main([*call, *(["--by-role"] if by_role else []), "--host", "gpu-1.example,*.replicas,10.0.0.7"]) == 0
    files = {path for path in tmp_path.rglob("*.pem") if path.name != "ca.pem"}
    before = {path: (names_of(path), path.read_bytes()) for path in files}
    # The authority is renewed, and after it a certificate.
    assert main([*call, "--renew-authority"]) == 0
    assert main(call) == 0
    assert {path for path in tmp_path.rglob("*.pem") if path.name != "ca.pem"} == files
    for path, (names, content) in before.items():
        assert path.read_bytes() != content
        assert sorted(names_of(path)) == sorted(names)
    assert len(certificates_of(min(files).with_name("ca.pem"))) == 2
    assert main([*call, "--host", "gpu-2.example"]) == 0
    for path in files:
        assert "gpu-2.example" in names_of(path)
        assert "gpu-1.example" not in names_of(path)


def test_hosts_that_cannot_be_read_are_to_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["certs", "--tls-dir", str(tmp_path)]
    assert main(call) == 0
    (tmp_path / "worker.pem").write_text("none")
    assert main(call) == 2
    assert "worker.pem: its hosts cannot be read: " in capsys.readouterr().err
    assert main([*call, "--host", "gpu-1.example"]) == 0
    assert "gpu-1.example" in names_of(tmp_path / "worker.pem")


def certificates_of(path: Path) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(path.read_bytes())


def test_no_certificate_outlives_its_authority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", "--tls-dir", str(tmp_path), "--days=30", "--authority-days=3"]) == 0
    (authority,) = certificates_of(tmp_path / "ca.pem")
    for role in Role:
        (certificate,) = certificates_of(tmp_path / f"{role}.pem")
        assert certificate.not_valid_after_utc == authority.not_valid_after_utc
    assert "the authority ends on" in capsys.readouterr().out


def test_an_authority_that_has_ended_signs_nothing(tmp_path: Path) -> None:
    now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    authority = Authority.make(3, now)
    with pytest.raises(ConfigurationError, match=r"^the authority ended on 2026-01-04; --renew-authority"):
        authority.issue(tmp_path, Role.WORKER, (), 1, now + dt.timedelta(days=3))
    assert not list(tmp_path.iterdir())


def test_a_new_authority_is_trusted_beside_the_old_one_and_signs_at_the_next_call(tmp_path: Path) -> None:
    def signer_of(role: Role) -> x509.Name:
        (certificate,) = certificates_of(tmp_path / role / f"{role}.pem")
        return certificate.issuer

    call = ["certs", "--tls-dir", str(tmp_path), "--by-role"]
    assert main(call) == 0
    (old,) = certificates_of(tmp_path / "ca.pem")
    assert main([*call, "--renew-authority"]) == 0
    new, kept = certificates_of(tmp_path / "ca.pem")
    assert kept == old
    assert new.subject != old.subject
    for role in Role:
        assert certificates_of(tmp_path / role / "ca.pem") == [new, old]
        assert signer_of(role) == old.subject
    assert main(call) == 0
    assert certificates_of(tmp_path / "ca.pem") == [new, old]
    assert {signer_of(role) for role in Role} == {new.subject}
    # Without the old authority, which is deleted by hand, everything works.
    (tmp_path / "ca.pem").write_bytes(new.public_bytes(serialization.Encoding.PEM))
    assert main(call) == 0
    assert {signer_of(role) for role in Role} == {new.subject}


def test_by_role_a_directory_has_what_its_role_needs_and_no_more(tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["certs", "--tls-dir", str(tmp_path), "--by-role"]) == 0
    for role in Role:
        assert {path.name for path in (tmp_path / role).iterdir()} == {"ca.pem", f"{role}.pem", f"{role}.key"}
        assert TlsIdentity.of(tmp_path / role, role).authority
    assert {path.name for path in tmp_path.iterdir()} == {"ca.pem", "ca.key", *Role}
