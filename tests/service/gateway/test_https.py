"""HTTPS: whom the port believes, and what it shows after its files were renewed."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from quire.rpc.certificates import Authority
from quire.rpc.tls import Role
from tests.support.certificates import make_certificates
from tests.support.gateway_process import RunningGateway, running_gateway
from tests.support.scheduler_process import until

SHORT_S = 0.3


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return make_certificates(tmp_path)


@pytest.fixture
async def gateway(tmp_path: Path, authority: Authority) -> AsyncIterator[RunningGateway]:
    async with running_alone(tmp_path) as running:
        yield running


@pytest.fixture
async def asking_gateway(tmp_path: Path, authority: Authority) -> AsyncIterator[RunningGateway]:
    """Asks for certificates."""
    async with running_alone(tmp_path, tls_client_auth=True) as running:
        yield running


def running_alone(directory: Path, **settings):
    """A gateway whose scheduler never comes."""
    return running_gateway(schedulers=(f"unix:{directory / 'nobody.sock'}",), tls_dir=directory, **settings)


def trusting(directory: Path, role: Role | None = None) -> ssl.SSLContext:
    """A client that believes the authority in a directory, with the certificate of a role or with none."""
    context = ssl.create_default_context(cafile=directory / "ca.pem")
    if role is not None:
        context.load_cert_chain(directory / f"{role}.pem", directory / f"{role}.key")
    return context


def client_of(gateway: RunningGateway, verify: ssl.SSLContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.http_url.replace("http:", "https:"), verify=verify, timeout=30)


async def is_answered(gateway: RunningGateway, verify: ssl.SSLContext) -> bool:
    async with client_of(gateway, verify) as client:
        try:
            return (await client.get("/health")).status_code == 200
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
        await gateway.http.get("/health")


async def test_new_files_hold_for_new_connections_and_running_ones_go_on(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    before = trusting(tmp_path)
    async with client_of(gateway, before) as running:
        assert (await running.get("/health")).status_code == 200
        make_certificates(tmp_path)
        assert await is_answered(gateway, trusting(tmp_path))
        assert not await is_answered(gateway, before)
        assert (await running.get("/health")).status_code == 200


async def test_damaged_new_files_leave_the_old_ones_in_force(gateway: RunningGateway, tmp_path: Path) -> None:
    before = trusting(tmp_path)
    (tmp_path / "gateway.pem").write_text("damaged")
    for _ in range(2):
        assert await is_answered(gateway, before)


async def test_a_gateway_that_asks_for_certificates_answers_nobody_without_one(
    asking_gateway: RunningGateway, tmp_path: Path
) -> None:
    make_certificates(tmp_path / "other")
    stranger = trusting(tmp_path)
    stranger.load_cert_chain(tmp_path / "other" / "client.pem", tmp_path / "other" / "client.key")
    assert await is_answered(asking_gateway, trusting(tmp_path, Role.CLIENT))
    assert not await is_answered(asking_gateway, trusting(tmp_path))
    assert not await is_answered(asking_gateway, stranger)


async def test_a_session_from_before_does_not_spare_a_client_its_certificate(
    asking_gateway: RunningGateway, tmp_path: Path
) -> None:
    host, _, port = asking_gateway.gateway.http_address.rpartition(":")
    context = trusting(tmp_path, Role.CLIENT)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
    session = writer.get_extra_info("ssl_object").session
    assert session is None or not session.has_ticket
    assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
    writer.close()


async def test_a_handshake_that_never_ends_is_broken_off(tmp_path: Path, authority: Authority) -> None:
    async with running_alone(tmp_path, handshake_timeout=SHORT_S) as gateway:
        host, _, port = gateway.gateway.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_a_handshake_that_runs_counts_as_a_connection_until_it_ends(tmp_path: Path, authority: Authority) -> None:
    async with running_alone(tmp_path, max_connections=1) as gateway:
        address = gateway.gateway.http_address.rpartition(":")
        _, first = await asyncio.open_connection(address[0], int(address[2]))
        reader, surplus = await asyncio.open_connection(address[0], int(address[2]))
        # Closed in the clear, before any handshake.
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 30) == b""
        surplus.close()
        first.close()
        assert await until(lambda: is_answered(gateway, trusting(tmp_path)))


async def test_handshakes_that_fail_leave_their_places(tmp_path: Path, authority: Authority) -> None:
    async with running_alone(tmp_path, max_connections=2) as gateway:
        address = gateway.gateway.http_address.rpartition(":")
        for _ in range(5):
            reader, writer = await asyncio.open_connection(address[0], int(address[2]))
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 30)
            writer.close()
        assert await is_answered(gateway, trusting(tmp_path))


async def test_a_request_right_behind_the_handshake_is_answered(gateway: RunningGateway, tmp_path: Path) -> None:
    # One packet has the end of the handshake and the request.
    address = gateway.gateway.http_address.rpartition(":")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting(tmp_path).wrap_bio(incoming, outgoing, server_hostname="localhost")
    reader, writer = await asyncio.open_connection(address[0], int(address[2]))
    async with asyncio.timeout(30):
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(65536))
        client.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        writer.write(outgoing.read())
        while True:
            try:
                answer = client.read(65536)
                break
            except ssl.SSLWantReadError:
                incoming.write(await reader.read(65536))
    assert answer.startswith(b"HTTP/1.1 200 ")
    writer.close()
