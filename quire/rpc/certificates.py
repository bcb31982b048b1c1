"""A private certificate authority, for services that have no other."""

import datetime as dt
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quire.rpc.tls import AUTHORITY_FILE, ROLE_URI, Role
from quire.runtime import entropy
from quire.runtime.replacement import replace_file
from quire.runtime.settings import ConfigurationError

_AUTHORITY_KEY_FILE = "ca.key"
# Clocks differ.
_BACKDATED = dt.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates: elliptic curve P-256, SHA-256."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def not_valid_after(self) -> dt.datetime:
        """When it ends, and with it all that it has signed."""
        return self.certificate.not_valid_after_utc

    @classmethod
    def make(cls, days: int, now: dt.datetime) -> "Authority":
        """A new authority with a new key."""
        key = ec.generate_private_key(ec.SECP256R1())
        # A unique name: in a file with two authorities, it identifies the issuer of a certificate.
        name = _name(f"Quire certificate authority {entropy.random_hex(4)}")
        builder = (
            _builder(name, name, key.public_key(), now)
            .not_valid_after(now + dt.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def open(cls, directory: Path) -> "Authority":
        """Reads the authority in a directory; of several trusted ones, the authority of ca.key. ConfigurationError if
        it cannot be read."""
        try:
            certificates = x509.load_pem_x509_certificates((directory / AUTHORITY_FILE).read_bytes())
            key = serialization.load_pem_private_key((directory / _AUTHORITY_KEY_FILE).read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(f"{directory}: the authority cannot be read: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigurationError(f"{directory / _AUTHORITY_KEY_FILE}: not a key that quire certs made")
        for certificate in certificates:
            if certificate.public_key() == key.public_key():
                return cls(certificate, key)
        raise ConfigurationError(
            f"{directory / AUTHORITY_FILE}: no certificate belongs to {_AUTHORITY_KEY_FILE}; give both of one authority"
        )

    def write(self, directory: Path) -> None:
        """Writes its key and its certificate into a directory, which still trusts authorities that it trusted."""
        path = directory / AUTHORITY_FILE
        trusted = path.read_bytes() if path.exists() else b""
        # The key last: should this end in between, the authority from before is still whole.
        replace_file(path, self.certificate.public_bytes(serialization.Encoding.PEM) + trusted, 0o644)
        _write_key(directory / _AUTHORITY_KEY_FILE, self.key)

    def issue(self, directory: Path, role: Role, hosts: Sequence[str], days: int, now: dt.datetime) -> x509.Certificate:
        """Writes a new key and certificate of a role into a directory and replaces older ones. The certificate ends
        with the authority at the latest. Raises ConfigurationError if the authority has ended."""
        if self.not_valid_after <= now:
            raise ConfigurationError(
                f"the authority ended on {self.not_valid_after:%Y-%m-%d}; --renew-authority makes a new one"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        names = [*(_host_name(host) for host in hosts), x509.UniformResourceIdentifier(f"{ROLE_URI}{role}")]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = (
            _builder(_name(f"quire {role}"), self.certificate.subject, key.public_key(), now)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(signer, critical=False)
            .not_valid_after(min(now + dt.timedelta(days=days), self.not_valid_after))
        )
        certificate = builder.sign(self.key, hashes.SHA256())
        _write_key(directory / f"{role}.key", key)
        replace_file(directory / f"{role}.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        return certificate


def hosts_of(path: Path) -> tuple[str, ...]:
    """The hosts that the certificate in a file names; empty if there is no such file. ConfigurationError if it cannot
    be read."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigurationError(f"{path}: its hosts cannot be read: {error}; give them as --host") from error
    return (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))


def share_authority(source: Path, target: Path) -> None:
    """Makes one directory trust the authority of another; copies no key. OSError when it cannot."""
    target.mkdir(mode=0o700, exist_ok=True)
    replace_file(target / AUTHORITY_FILE, (source / AUTHORITY_FILE).read_bytes(), 0o644)


def has_authority(directory: Path) -> bool:
    """Whether a directory has the files of an authority, or one of them."""
    return any((directory / name).exists() for name in (AUTHORITY_FILE, _AUTHORITY_KEY_FILE))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: dt.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if re.fullmatch(r"[A-Za-z0-9._*-]+", host) is None:
        raise ConfigurationError(
            f"--host {host!r} is neither an IP address nor a host name; give only the name, without scheme and port"
        )
    return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    encryption = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    replace_file(path, pem, 0o600)
