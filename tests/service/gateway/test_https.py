"""HTTPS: certificates that the port accepts, the certificate that it shows after its files were renewed, and a
certificate for clients only, from another authority than the one inside."""

import asyncio
import contextlib
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

from quire.rpc.certificates import Authority
from quire.rpc.channel import open_channel
from quire.rpc.tls import Role, TlsIdentity
from quire.runtime.settings import ConfigurationError
from quire_cli.certs import LOCAL_HOSTS
from tests.support.certificates import make_certificates
from tests.support.gateway_process import RunningGateway, running_gateway
from tests.support.grpc_types import channelz_stub, health_stub
from tests.support.scheduler_process import until

SHORT_S = 0.3


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return make_certificates(tmp_path)


@pytest.fixture
async def gateway(tmp_path: Path, authority: Authority) -> AsyncIterator[RunningGateway]:
    async with running_alone(tmp_path) as running:
        yield running


def running_alone(directory: Path, **settings):
    """A gateway whose scheduler never comes."""
    return running_gateway(schedulers=(f"unix:{directory / 'nobody.sock'}",), tls_dir=directory, **settings)


def trusting(directory: Path, holder: Path | None = None) -> ssl.SSLContext:
    """A client that trusts the authority in a directory, with or without the client's certificate in another."""
    context = ssl.create_default_context(cafile=directory / "ca.pem")
    if holder is not None:
        context.load_cert_chain(holder / "client.pem", holder / "client.key")
    return context


def client_of(gateway: RunningGateway, verify: ssl.SSLContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.http_url.replace("http:", "https:"), verify=verify, timeout=30)


async def connected(gateway: RunningGateway, **options) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = gateway.gateway.http_address.rpartition(":")
    return await asyncio.open_connection(host, int(port), **options)


async def is_answered(gateway: RunningGateway, verify: ssl.SSLContext) -> bool:
    async with client_of(gateway, verify) as client:
        try:
            return (await client.get("/live")).status_code == 200
        except httpx.TransportError:
            return False


async def test_who_believes_the_authority_is_answered_and_who_does_not_is_not(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    make_certificates(tmp_path / "other")
    assert await is_answered(gateway, trusting(tmp_path))
    assert not await is_answered(gateway, trusting(tmp_path / "other"))
    assert not await is_answered(gateway, ssl.create_default_context())
    with pytest.raises(httpx.TransportError):
        await gateway.http.get("/live")


async def test_damaged_new_files_leave_the_old_ones_in_force(gateway: RunningGateway, tmp_path: Path) -> None:
    before = trusting(tmp_path)
    (tmp_path / "gateway.pem").write_text("damaged")
    for _ in range(2):
        assert await is_answered(gateway, before)


async def test_a_session_from_before_does_not_spare_a_client_its_certificate(
    tmp_path: Path, authority: Authority
) -> None:
    async with running_alone(tmp_path, tls_client_auth=True) as gateway:
        reader, writer = await connected(gateway, ssl=trusting(tmp_path, tmp_path))
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
        session = writer.get_extra_info("ssl_object").session
        assert session is None or not session.has_ticket
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        writer.close()


async def test_a_handshake_that_never_ends_is_broken_off(tmp_path: Path, authority: Authority) -> None:
    async with running_alone(tmp_path, handshake_timeout=SHORT_S) as gateway:
        reader, writer = await connected(gateway)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_a_handshake_that_runs_counts_as_a_connection_until_it_ends(tmp_path: Path, authority: Authority) -> None:
    async with running_alone(tmp_path, max_connections=1) as gateway:
        _, first = await connected(gateway)
        reader, surplus = await connected(gateway)
        # The connection is closed without TLS, before any handshake.
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 30) == b""
        surplus.close()
        first.close()
        assert await until(lambda: is_answered(gateway, trusting(tmp_path)))


async def test_handshakes_that_fail_leave_their_places(tmp_path: Path, authority: Authority) -> None:
    async with running_alone(tmp_path, max_connections=2) as gateway:
        for _ in range(5):
            reader, writer = await connected(gateway)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 30)
            writer.close()
        assert await is_answered(gateway, trusting(tmp_path))


async def test_a_request_right_behind_the_handshake_is_answered(gateway: RunningGateway, tmp_path: Path) -> None:
    # One packet has the end of the handshake and the request.
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting(tmp_path).wrap_bio(incoming, outgoing, server_hostname="localhost")
    reader, writer = await connected(gateway)
    async with asyncio.timeout(30):
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(65536))
        client.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        writer.write(outgoing.read())
        while True:
            try:
                answer = client.read(65536)
                break
            except ssl.SSLWantReadError:
                incoming.write(await reader.read(65536))
    assert answer.startswith(b"HTTP/1.1 200 ")
    writer.close()


@pytest.fixture
def inner(tmp_path: Path) -> Path:
    """Certificates of the services."""
    make_certificates(tmp_path / "inner")
    return tmp_path / "inner"


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """An authority that the services do not know, and the files that it signed for the gateway: site.pem, site.key."""
    issue_public(tmp_path / "public", Authority.make(365, dt.datetime.now(dt.UTC)))
    return tmp_path / "public"


@pytest.fixture
async def public_gateway(inner: Path, public: Path) -> AsyncIterator[RunningGateway]:
    async with running_publicly(public, tls_dir=inner, admin_port=0) as running:
        yield running


def issue_public(directory: Path, authority: Authority) -> None:
    directory.mkdir(exist_ok=True)
    authority.write(directory)
    authority.issue(directory, Role.CLIENT, LOCAL_HOSTS, 1, dt.datetime.now(dt.UTC))
    for ending in ("key", "pem"):
        (directory / f"client.{ending}").replace(directory / f"site.{ending}")


def running_publicly(public: Path, **settings):
    """A gateway with a public certificate, whose scheduler never comes."""
    return running_gateway(
        schedulers=(f"unix:{public / 'nobody.sock'}",),
        public_cert=public / "site.pem",
        public_key=public / "site.key",
        **settings,
    )


async def is_answered_over_grpc(gateway: RunningGateway, authority: Path, holder: Path | None = None) -> bool:
    """Whether a caller that trusts an authority reaches the gateway, with a client's certificate or without."""
    key, certificate = (None if holder is None else (holder / f"client.{end}").read_bytes() for end in ("key", "pem"))
    credentials = grpc.ssl_channel_credentials((authority / "ca.pem").read_bytes(), key, certificate)
    async with grpc.aio.secure_channel(gateway.gateway.grpc_address, credentials) as channel:
        try:
            await health_stub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        except grpc.aio.AioRpcError:
            return False
        return True


async def test_clients_see_the_public_certificate_on_both_ports(
    public_gateway: RunningGateway, public: Path, inner: Path
) -> None:
    assert await is_answered_over_grpc(public_gateway, public)
    assert await is_answered(public_gateway, trusting(public))
    assert not await is_answered_over_grpc(public_gateway, inner)
    assert not await is_answered(public_gateway, trusting(inner))


async def test_operators_still_see_the_one_inside(public_gateway: RunningGateway, inner: Path) -> None:
    admin = public_gateway.gateway.admin_address
    assert admin is not None
    request = channelz_pb2.GetServersRequest()
    async with open_channel(admin, tls=TlsIdentity.of(inner, Role.OPERATOR)) as channel:
        assert await channelz_stub(channel).GetServers(request, timeout=30)
    async with open_channel(admin, tls=TlsIdentity.of(inner, Role.CLIENT)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channelz_stub(channel).GetServers(request, timeout=30)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_renewed_public_certificate_holds_for_new_connections(
    public_gateway: RunningGateway, public: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "ca.pem").write_bytes((public / "ca.pem").read_bytes())
    issue_public(public, Authority.make(365, dt.datetime.now(dt.UTC)))
    assert await is_answered_over_grpc(public_gateway, public)
    assert await is_answered(public_gateway, trusting(public))
    assert not await is_answered_over_grpc(public_gateway, old)
    assert not await is_answered(public_gateway, trusting(old))


async def test_clients_that_must_show_a_certificate_show_one_of_the_authority_inside(public: Path, inner: Path) -> None:
    make_certificates(public.parent / "other")
    async with running_publicly(public, tls_dir=inner, tls_client_auth=True) as gateway:
        for holder, is_let_in in ((inner, True), (None, False), (public.parent / "other", False)):
            assert await is_answered_over_grpc(gateway, public, holder) == is_let_in
            assert await is_answered(gateway, trusting(public, holder)) == is_let_in


async def test_a_chain_by_way_of_an_intermediate_authority_is_believed(tmp_path: Path) -> None:
    """With RSA keys, which many public authorities use."""
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
    async with running_publicly(tmp_path) as gateway:
        assert await is_answered_over_grpc(gateway, tmp_path)
        assert await is_answered(gateway, trusting(tmp_path))


def signed(
    name: str, key: rsa.RSAPrivateKey, issuer: str, issuer_key: rsa.RSAPrivateKey, *, is_authority: bool
) -> bytes:
    """A certificate in PEM that is valid for an hour."""
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
        async with running_publicly(public):
            pass


async def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(public: Path) -> None:
    key = serialization.load_pem_private_key((public / "site.key").read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    encrypted = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    (public / "site.key").write_bytes(encrypted)
    with pytest.raises(ConfigurationError, match=r"site\.key"):
        async with running_publicly(public):
            pass
