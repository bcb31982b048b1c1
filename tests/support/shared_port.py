"""Finding one's way to one of two gateways behind the same port."""

from quire.client import AsyncClient
from quire_cli.supervisor import LocalServer

_NAMES = ("gateway", "gateway-1")


async def names_by_id(server: LocalServer) -> dict[str, str]:
    """Which process calls itself by which id; one that is started again has another."""
    names: dict[str, str] = {}
    for number, name in enumerate(_NAMES):
        async with AsyncClient(server.gateway_address(number)) as client:
            names[await gateway_id_of(client)] = name
    return names


async def gateway_id_of(client: AsyncClient) -> str:
    """The id of the gateway that the client is connected to."""
    return (await client.server_info(timeout_s=60)).gateway_id
