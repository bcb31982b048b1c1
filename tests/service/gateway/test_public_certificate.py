"""A certificate for clients alone, of another authority than the one inside: who sees which, and when it is renewed."""

import datetime as dt
import ipaddress
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2

from gateway.settings import GatewaySettings
from quire.rpc.certificates import Authority
from quire.rpc.channel import open_channel
from quire.rpc.tls import Role, TlsIdentity
from quire.settings import ConfigurationError, load_settings
from quire_cli.certs import LOCAL_HOSTS
from tests.support.certificates import make_certificates
from tests.support.gateway_process import RunningGateway, running_gateway
from tests.support.grpc_types import channelz_stub, health_stub


@pytest.fixture
def inner(tmp_path: Path) -> Path:
    """Certificates of the services."""
    make_certificates(tmp_path / "inner")
    return tmp_path / "inner"


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """An authority that the services do not know, and what it has signed for the gateway: site.pem and site.key."""
    issue_public(tmp_path / "public", Authority.make(365, dt.datetime.now(dt.UTC)))
    return tmp_path / "public"


@pytest.fixture
async def gateway(inner: Path, public: Path) -> AsyncIterator[RunningGateway]:
    async with running_alone(public, tls_dir=inner, admin_port=0) as running:
        yield running


def issue_public(directory: Path, authority: Authority) -> None:
    directory.mkdir(exist_ok=True)
    authority.write(directory)
    authority.issue(directory, Role.CLIENT, LOCAL_HOSTS, 1, dt.datetime.now(dt.UTC))
    for ending in ("key", "pem"):
        (directory / f"client.{ending}").replace(directory / f"site.{ending}")


def running_alone(public: Path, **settings):
    """A gateway with a public certificate, whose scheduler never comes."""
    return running_gateway(
        schedulers=(f"unix:{public / 'nobody.sock'}",),
        public_cert=public / "site.pem",
        public_key=public / "site.key",
        **settings,
    )


async def is_answered_over_grpc(gateway: RunningGateway, authority: Path, holder: Path | None = None) -> bool:
    """Whether a caller that believes an authority reaches the gateway, with a client's certificate or without."""
    key, certificate = (None if holder is None else (holder / f"client.{end}").read_bytes() for end in ("key", "pem"))
    credentials = grpc.ssl_channel_credentials((authority / "ca.pem").read_bytes(), key, certificate)
    async with grpc.aio.secure_channel(gateway.gateway.grpc_address, credentials) as channel:
        try:
            await health_stub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        except grpc.aio.AioRpcError:
            return False
        return True


async def is_answered_over_http(gateway: RunningGateway, authority: Path, holder: Path | None = None) -> bool:
    context = ssl.create_default_context(cafile=authority / "ca.pem")
    if holder is not None:
        context.load_cert_chain(holder / "client.pem", holder / "client.key")
    async with httpx.AsyncClient(verify=context, timeout=30) as client:
        try:
            return (await client.get(gateway.http_url.replace("http:", "https:") + "/health")).status_code == 200
        except httpx.TransportError:
            return False


async def test_clients_see_the_public_certificate_on_both_ports(
    gateway: RunningGateway, public: Path, inner: Path
) -> None:
    assert await is_answered_over_grpc(gateway, public)
    assert await is_answered_over_http(gateway, public)
    assert not await is_answered_over_grpc(gateway, inner)
    assert not await is_answered_over_http(gateway, inner)


async def test_operators_still_see_the_one_inside(gateway: RunningGateway, inner: Path) -> None:
    admin = gateway.gateway.admin_address
    assert admin is not None
    request = channelz_pb2.GetServersRequest()
    async with open_channel(admin, tls=TlsIdentity.of(inner, Role.OPERATOR)) as channel:
        assert await channelz_stub(channel).GetServers(request, timeout=30)
    async with open_channel(admin, tls=TlsIdentity.of(inner, Role.CLIENT)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channelz_stub(channel).GetServers(request, timeout=30)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_renewed_public_certificate_holds_for_new_connections(
    gateway: RunningGateway, public: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "ca.pem").write_bytes((public / "ca.pem").read_bytes())
    issue_public(public, Authority.make(365, dt.datetime.now(dt.UTC)))
    assert await is_answered_over_grpc(gateway, public)
    assert await is_answered_over_http(gateway, public)
    assert not await is_answered_over_grpc(gateway, old)
    assert not await is_answered_over_http(gateway, old)


async def test_clients_that_must_show_a_certificate_show_one_of_the_authority_inside(public: Path, inner: Path) -> None:
    make_certificates(public.parent / "other")
    async with running_alone(public, tls_dir=inner, tls_client_auth=True) as gateway:
        for is_answered in (is_answered_over_grpc, is_answered_over_http):
            assert await is_answered(gateway, public, inner)
            assert not await is_answered(gateway, public)
            assert not await is_answered(gateway, public, public.parent / "other")


async def test_a_chain_by_way_of_an_intermediate_authority_is_believed(tmp_path: Path) -> None:
    """With RSA keys, as many public authorities have them."""
    root, intermediate, site = (rsa.generate_private_key(65537, 2048) for _ in range(3))
    certificates = [
        signed("root", root, "root", root, is_authority=True),
        signed("intermediate", intermediate, "root", root, is_authority=True),
        signed("site", site, "intermediate", intermediate, is_authority=False),
    ]
    (tmp_path / "ca.pem").write_bytes(certificates[0])
    (tmp_path / "site.pem").write_bytes(certificates[2] + certificates[1])
    plain = serialization.NoEncryption()
    key = site.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    (tmp_path / "site.key").write_bytes(key)
    async with running_alone(tmp_path) as gateway:
        assert await is_answered_over_grpc(gateway, tmp_path)
        assert await is_answered_over_http(gateway, tmp_path)


def signed(
    name: str, key: rsa.RSAPrivateKey, issuer: str, issuer_key: rsa.RSAPrivateKey, *, is_authority: bool
) -> bytes:
    """A certificate in PEM that is good for an hour."""
    now = dt.datetime.now(dt.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )
    return certificate.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("name", ["site.pem", "site.key"])
@pytest.mark.parametrize("content", [None, "damaged"])
async def test_files_that_cannot_be_used_are_refused_at_start(public: Path, name: str, content: str | None) -> None:
    path = public / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ConfigurationError, match=str(path)):
        async with running_alone(public):
            pass


async def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(public: Path) -> None:
    key = serialization.load_pem_private_key((public / "site.key").read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    encrypted = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    (public / "site.key").write_bytes(encrypted)
    with pytest.raises(ConfigurationError, match=r"site\.key"):
        async with running_alone(public):
            pass


@pytest.mark.parametrize("given", ["--public-cert=x.pem", "--public-key=x.key"])
def test_one_without_the_other_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError, match="--public-cert and --public-key go together"):
        load_settings(GatewaySettings, [given], {}, program="quire gateway")
