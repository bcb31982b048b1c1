"""`quire mcp`: operators' tools for agents, over the Model Context Protocol.

The tools read what `quire top` reads, with the key of an operator: over stdio the key of this process, over HTTP the
key that each caller shows, which the gateway checks. Tools that change the deployment exist only with
`--allow-changes`.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import AnyHttpUrl

from quire.rpc.address import TcpAddress, parse_address
from quire.rpc.errors import PermissionDenied, QuireError, Unauthenticated, Unavailable
from quire.runtime.settings import ConfigurationError, load_settings, setting
from quire.version import VERSION
from quire_cli.drain import DrainFlags, drain
from quire_cli.feed import Deployment, FeedFlags, object_of, read_feed

PROGRAM = "quire mcp"
_REASONS = {
    "no_worker": "no worker is attached to the replica",
    "next_step": "it arrived after the last step was planned, or that step admitted its maximum of requests",
    "rows": "it is next, and too few rows are free for its sequences (--max-num-seqs)",
    "blocks": "it is next, and too few KV blocks are free for its tokens",
    "tokens": "running requests use up the token budget of the steps (--max-num-batched-tokens)",
    "behind": "other requests go before it, by the scheduling policy",
    "swapped_first": "swapped requests come back first",
    "preemption": "the last step preempted requests, and no request enters in such a step",
    "constraint": "the workers compile its constraint",
    "shared_prefix": "a running request computes the blocks of its prefix, which it will share",
    "suspects": "only requests run that may have caused the loss of the worker",
    "adapter": "the workers load its adapter, or running requests use all adapter slots",
    "moved_blocks": "the workers fetch its blocks from another replica, or it still runs there",
}
_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_CHANGES = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False)
_INSTRUCTIONS = "The state of a Quire deployment, an LLM server: replicas, queues, and why requests wait."


@dataclass(frozen=True, slots=True)
class McpFlags(FeedFlags):
    """Serves operators' tools to agents over MCP: the state of the replicas, and why requests wait. It reads a gateway
    as `quire top` does, with the key of an operator."""

    http: str | None = setting(
        None,
        "serve streamable HTTP at http://HOST:PORT/mcp in place of stdio; callers then show their own keys, and TLS is "
        "left to a proxy",
        metavar="HOST:PORT",
    )
    allow_changes: bool = setting(False, "also offer tools that change the deployment: draining a replica")
    operator_tls_dir: Path | None = setting(
        None, "directory with ca.pem, operator.pem and operator.key, for draining where services use TLS", metavar="DIR"
    )


def main(argv: Sequence[str]) -> int:
    """Serves until stdin ends, or until Ctrl-C. Raises QuireError if the gateway does not answer at the start."""
    flags = load_settings(McpFlags, argv, os.environ, program=PROGRAM)
    if flags.http is None:
        _check_gateway(flags)
        make_server(flags, lambda: flags).run("stdio")
        return 0
    try:
        address = parse_address(flags.http)
    except ConfigurationError:
        address = None
    if not isinstance(address, TcpAddress) or address.port == 0:
        raise ConfigurationError(f'--http is "{flags.http}"; it must be HOST:PORT, with a port from 1 to 65535')
    if flags.api_key is not None:
        raise ConfigurationError("an API key is given with --http, where callers show their own; leave it out")
    server = make_server(flags, lambda: _of_caller(flags), None if _is_open(flags) else _Keys(flags), flags.http)
    print(f"{PROGRAM}: serving http://{address}/mcp", file=sys.stderr, flush=True)
    server.run("streamable-http", host=address.host, port=address.port, stateless_http=True, json_response=True)
    return 0


def make_server(
    flags: McpFlags, caller: Callable[[], McpFlags], keys: TokenVerifier | None = None, address: str = ""
) -> MCPServer:
    """The server with its tools. `caller` returns the flags with the key of the current caller; `keys` checks keys of
    callers over HTTP, at `address`."""
    auth = None
    if keys is not None:
        auth = AuthSettings(issuer_url=AnyHttpUrl(f"http://{address}"), resource_server_url=None)
    server = MCPServer(
        "quire", version=VERSION, instructions=_INSTRUCTIONS, token_verifier=keys, auth=auth, log_level="WARNING"
    )

    @server.tool(annotations=_READS)
    async def status() -> dict[str, Any]:
        """The version, the model, and each replica: its health, queues, rates per second, latencies and memory."""
        deployment = await _reading(caller(), wants_rates=True)
        replicas = [object_of(deployment, each) for each in deployment.replicas.values()]
        return {"gateway": dict(deployment.gateway or {}), "replicas": replicas}

    @server.tool(annotations=_READS)
    async def why_requests_wait() -> dict[str, Any]:
        """The requests that wait, each with its replica, for how long it has waited, and why. A replica shows the first
        ones of its queue; `waiting_requests` counts all."""
        deployment = await _reading(caller())
        return {
            "waiting_requests": sum(each.numbers["waiting_requests"] for each in _numbered(deployment)),
            "requests": [_waiting(each.address, one) for each in _numbered(deployment) for one in each.waiting],
        }

    @server.tool(annotations=_READS)
    async def explain_request(request_id: str) -> dict[str, Any]:
        """The state of one request by its id, such as chatcmpl-... or resp_...: waiting and why, or running, with its
        replica and its sequences."""
        deployment = await _reading(caller(), wants_memory=True)
        for replica in deployment.replicas.values():
            for one in replica.waiting:
                if one["request_id"] == request_id:
                    return {"state": "swapped" if one["is_swapped"] else "waiting", **_waiting(replica.address, one)}
            if found := [one for one in replica.sequences.values() if one["request_id"] == request_id]:
                return {"state": "running", "replica": replica.address, "sequences": found}
        raise ToolError(
            f'request "{request_id:.200}" neither runs nor is among the first that wait: it has ended, waits far '
            "behind, or never came to these replicas"
        )

    if flags.allow_changes:

        @server.tool(annotations=_CHANGES)
        async def drain_replica(replica: str, timeout_s: float = 60.0) -> dict[str, Any]:
            """Drains a replica, by its address in `status`: it refuses new requests, and its requests move to the other
            replicas. Returns the number of requests that are left after `timeout_s` seconds at most."""
            if not 0 <= timeout_s <= 3600:
                raise ToolError(f"timeout_s is {timeout_s:g}; it must be from 0 to 3600")
            deployment = await _reading(caller())
            if replica not in deployment.replicas:
                known = ", ".join(deployment.replicas)
                raise ToolError(f'replica is "{replica:.200}", which is not one of the replicas: {known}')
            asked = DrainFlags(replica, timeout_s, flags.operator_tls_dir)
            return {"replica": replica, "remaining_requests": await _in_thread(drain, replica, asked)}

    return server


async def _reading(flags: McpFlags, *, wants_rates: bool = False, wants_memory: bool = False) -> Deployment:
    return await _in_thread(_read, flags, wants_rates, wants_memory)


async def _in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function in a thread. Raises ToolError for errors of Quire."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except (QuireError, ConfigurationError) as error:
        raise ToolError(str(error)) from error


def _read(flags: McpFlags, wants_rates: bool, wants_memory: bool) -> Deployment:
    """The state of the deployment, once there are numbers, or rates, of each replica. Raises QuireError."""
    deployment = Deployment()
    with closing(read_feed(flags, flags.url, wants_memory=wants_memory)) as events:
        for name, value in events:
            deployment.add_event(name, value)
            known = (each.problem is not None or each.numbers is not None for each in deployment.replicas.values())
            if deployment.is_known or (not wants_rates and deployment.gateway is not None and all(known)):
                return deployment
    raise Unavailable(f"{flags.url}: it ended the feed")


def _numbered(deployment: Deployment) -> list[Any]:
    return [each for each in deployment.replicas.values() if each.numbers is not None]


def _waiting(replica: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """A waiting request, with its reason as a sentence."""
    why = _REASONS.get(request["reason"], "for a reason that this version does not know")
    return {"replica": replica, **request, "why": why}


def _check_gateway(flags: McpFlags) -> None:
    """Raises QuireError if the gateway does not answer, or refuses the key."""
    with closing(read_feed(flags, flags.url)) as events:
        next(events, None)


def _is_open(flags: McpFlags) -> bool:
    """Whether the gateway needs no key. Raises QuireError if it does not answer."""
    try:
        _check_gateway(flags)
    except Unauthenticated:
        return False
    return True


def _of_caller(flags: McpFlags) -> McpFlags:
    token = get_access_token()
    return flags if token is None else replace(flags, api_key=token.token)


class _Keys(TokenVerifier):
    """Asks the gateway whether a key is that of an operator."""

    def __init__(self, flags: McpFlags) -> None:
        self._flags = flags

    async def verify_token(self, token: str) -> AccessToken | None:
        flags = replace(self._flags, api_key=token)
        try:
            is_open = await asyncio.to_thread(_is_open, flags)
        except PermissionDenied:
            return None
        return AccessToken(token=token, client_id="operator", scopes=[]) if is_open else None
