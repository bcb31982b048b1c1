"""Both clients with several gateways: which gateway is called, and the effects of a lost one."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.client import AsyncClient, Client, ClientTls
from quire.rpc.errors import Unavailable
from quire.rpc.server import RpcServer
from quire.rpc.tls import Role, ServerTls, TlsIdentity
from quire.runtime.settings import ConfigurationError
from tests.support.certificates import make_certificates
from tests.support.either_client import EitherClient
from tests.support.fake_gateway import FakeGeneration, start_fake_gateway

NOBODY = "127.0.0.1:1"

pytestmark = pytest.mark.parametrize("kind", [Client, AsyncClient])
Kind = type[Client] | type[AsyncClient]


@contextlib.asynccontextmanager
async def two_gateways(*addresses: str, tls: ServerTls | None = None) -> AsyncIterator[tuple[RpcServer, RpcServer]]:
    """Two gateways with the ids "first" and "second"."""
    wanted = addresses or ("127.0.0.1:0", "127.0.0.1:0")
    first, second = [
        await start_fake_gateway(address, FakeGeneration(), tls, gateway_id=gateway_id)
        for address, gateway_id in zip(wanted, ("first", "second"), strict=True)
    ]
    try:
        yield first, second
    finally:
        await first.stop(0)
        await second.stop(0)


@contextlib.asynccontextmanager
async def client_of(kind: Kind, *addresses: str, tls: ClientTls | None = None) -> AsyncIterator[EitherClient]:
    client = EitherClient(kind(addresses, tls=tls))
    try:
        yield client
    finally:
        await client.close()


async def who_answers(client: EitherClient) -> str:
    return (await client.call("server_info", timeout_s=60)).gateway_id


async def until_answered_by(client: EitherClient, *gateway_ids: str) -> None:
    """Calls until each gateway has answered, which takes a connection to each."""
    missing = set(gateway_ids)
    async with asyncio.timeout(30):
        while missing:
            missing.discard(await who_answers(client))


async def test_calls_go_to_each_in_turn_but_to_who_is_not_there_or_dies_until_it_is_back(kind: Kind) -> None:
    async with two_gateways() as (first, second), client_of(kind, first.address, second.address) as client:
        await until_answered_by(client, "first", "second")
        assert Counter([await who_answers(client) for _ in range(6)]) == {"first": 3, "second": 3}
        assert client.client.address == f"{first.address},{second.address}"
        await first.stop(0)
        assert [await who_answers(client) for _ in range(6)] == ["second"] * 6
        again = await start_fake_gateway(first.address, FakeGeneration(), gateway_id="first")
        await until_answered_by(client, "first")
        await again.stop(0)
        async with client_of(kind, NOBODY, second.address) as other:
            assert [await who_answers(other) for _ in range(4)] == ["second"] * 4


async def test_names_sockets_and_addresses_of_both_families_are_called(kind: Kind, tmp_path: Path) -> None:
    async with two_gateways() as (first, second):
        names = [server.address.replace("127.0.0.1", "localhost") for server in (first, second)]
        # The machine may have no IPv6; mapped addresses use IPv4 then.
        for addresses in (["[::1]:1", first.address, second.address], names):
            async with client_of(kind, *addresses) as client:
                await until_answered_by(client, "first", "second")
    sockets = [f"unix:{tmp_path / name}" for name in ("a", "b")]
    async with two_gateways(*sockets), client_of(kind, *sockets) as client:
        await until_answered_by(client, "first", "second")


async def test_gateways_are_believed_by_the_name_of_their_one_host_or_the_name_that_is_given(
    kind: Kind, tmp_path: Path
) -> None:
    make_certificates(tmp_path)
    identity = TlsIdentity.of(tmp_path, Role.CLIENT)

    def believing(server_name: str | None) -> ClientTls:
        return ClientTls(identity.authority, identity.certificate, identity.key, server_name)

    async with two_gateways(tls=ServerTls(TlsIdentity.of(tmp_path, Role.GATEWAY))) as (first, second):
        on_several = first.address, second.address.replace("127.0.0.1", "localhost")
        for addresses, name in (((first.address, second.address), None), (on_several, "localhost")):
            async with client_of(kind, *addresses, tls=believing(name)) as client:
                await until_answered_by(client, "first", "second")
        async with client_of(kind, *on_several, tls=believing("elsewhere.example")) as client:
            with pytest.raises(Unavailable):
                await who_answers(client)
        with pytest.raises(ConfigurationError, match="server_name"):
            kind(on_several, tls=believing(None))
