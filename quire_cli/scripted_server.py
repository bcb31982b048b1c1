"""The server of `quire scripted`: a real gateway, so that the wire is Quire's, and a scheduler that answers by
rules, in one process without workers and without torch."""

import asyncio
import dataclasses
import json
import logging
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import gateway.api.anthropic.front
import gateway.api.openai.front
import gateway.api.responses.front  # noqa: F401  (all imports at once)
from gateway.api.answers import STREAM_PART
from gateway.app import Gateway, allow_open_files
from gateway.auth.caller import Caller
from gateway.auth.keys import NoAuthenticator
from gateway.settings import GatewaySettings
from quire.runtime.entropy import ENTROPY, SystemEntropy
from quire.service.model_flag import ModelFlag
from quire.testing.rules import Received, Rule, read_rules
from quire.testing.scripted_model import REASONING_FORMAT, TEXT, TOOL_FORMAT, VECTORS, write_model
from quire.testing.scripted_servicer import CUT, Script, ScriptedScheduler

CONTROL = "/scripted/"
"""The path of rules and records on the HTTP port."""
_FRONTS = ("openai", "responses", "anthropic")
_NONCE_BYTES = 8
_MAX_RULE_BYTES = 16 << 20
_call: ContextVar[Received | None] = ContextVar("call of a scripted server", default=None)


async def serve(
    rules: Sequence[Rule], text_names: Sequence[str], vector_names: Sequence[str], **addresses: Any
) -> None:
    """Serves until it is cancelled.

    Args:
        text_names: Names of the model that answers with texts.
        vector_names: Names of the model that answers with vectors.
        addresses: Hosts and ports, as in GatewaySettings.

    Raises:
        ConfigurationError: it cannot listen.
    """
    script = Script(rules)
    ENTROPY.set(_LinkingEntropy(script))
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-scripted-")))
        models: list[ModelFlag] = []
        schedulers: list[str] = []
        for model, (name, *aliases) in ((TEXT, text_names), (VECTORS, vector_names)):
            address = f"unix:{directory}/{model}.sock"
            await stack.enter_async_context(ScriptedScheduler(script, address, model))
            overrides = [("served-model-aliases", ",".join(aliases))] if aliases else []
            models.append(ModelFlag(name, str(write_model(directory, model)), tuple(overrides)))
            schedulers.append(f"{name}={address}")
        settings = GatewaySettings(
            models=tuple(models),
            schedulers=tuple(schedulers),
            fronts=_FRONTS,
            tool_call_parser=TOOL_FORMAT,
            reasoning_parser=REASONING_FORMAT,
            clamp_max_tokens="always",
            drain_timeout=0.0,
            **addresses,
        )
        allow_open_files(settings.max_connections)
        gateway = await Gateway.start(
            settings, authenticator=_NotingKeys(), around_http=lambda app: _ScriptedHttp(app, script)
        )
        # After uvicorn has set its own level: it logs answers that a rule cuts.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        running = asyncio.create_task(gateway.run())
        try:
            while not gateway.is_ready and not running.done():  # noqa: ASYNC110  (for some milliseconds)
                await asyncio.sleep(0.002)
            if gateway.is_ready:
                print(f"quire: ready grpc={gateway.grpc_address} http={gateway.http_address}", flush=True)
            await running
        finally:
            running.cancel()
            await gateway.stop(0.0)


class _LinkingEntropy(SystemEntropy):
    """The system's source. A nonce that is drawn for a request during a call links the request to the call."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def random_bytes(self, count: int) -> bytes:
        drawn = super().random_bytes(count)
        if count == _NONCE_BYTES and (call := _call.get()) is not None:
            self._script.link(int.from_bytes(drawn), call)
        return drawn


class _NotingKeys(NoAuthenticator):
    """Takes all keys, and notes the key of a call over gRPC."""

    def authenticate(self, authorizations: Sequence[str | bytes]) -> Caller:
        if _call.get() is None:
            shown = [each.decode() if isinstance(each, bytes) else each for each in authorizations]
            _call.set(Received(key=_key_of(shown[0]) if shown else None))
        return super().authenticate(authorizations)


def _key_of(authorization: str) -> str:
    return authorization.removeprefix("Bearer ").strip()


class _ScriptedHttp:
    """The HTTP port: notes what comes, closes connections that a rule cuts, and serves rules and records."""

    def __init__(self, app: ASGIApp, script: Script) -> None:
        self._app = app
        self._script = script

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(CONTROL):
            await self._control(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        shown = headers.pop("authorization", None) or headers.pop("x-api-key", None)
        call = Received(scope["path"], headers, None if shown is None else _key_of(shown), status="refused")
        _call.set(call)
        content = bytearray()
        has_begun = False

        async def receive_noted() -> Message:
            message = await receive()
            content.extend(message.get("body", b""))
            if content and not message.get("more_body", False):
                try:
                    call.body = json.loads(content)
                except ValueError:
                    call.body = content.decode(errors="replace")
            return message

        async def send_unless_cut(message: Message) -> None:
            nonlocal has_begun
            if CUT.encode() in message.get("body", b""):
                if not has_begun:
                    # In place of the start of an error, which the server holds until its body comes.
                    await send({"type": "http.response.start", "status": 200, "headers": []})
                # The server closes the connection of a call that is cancelled.
                raise asyncio.CancelledError
            has_begun = has_begun or (
                message["type"] == "http.response.start"
                and not any(name == b"content-length" for name, _ in message["headers"])
            )
            await send(message)

        # Parts of streams come by `send`, too.
        extensions = {name: each for name, each in scope.get("extensions", {}).items() if name != STREAM_PART}
        await self._app({**scope, "extensions": extensions}, receive_noted, send_unless_cut)
        if scope["method"] == "POST" and call.status == "refused":
            self._script.records.append(call)

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["method"], scope["path"].removeprefix(CONTROL):
            case "GET", "requests":
                records = [dataclasses.asdict(each) for each in self._script.records]
                status, answer = 200, {"requests": records, "unused_rules": self._script.unused}
            case "DELETE", "requests":
                self._script.records.clear()
                status, answer = 200, {}
            case "PUT", "rules":
                status, answer = await self._set_rules(receive)
            case method, path:
                known = "GET and DELETE /scripted/requests, and PUT /scripted/rules"
                status, answer = 404, {"error": f"{method} {CONTROL}{path} is not known; there are {known}"}
        data = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _set_rules(self, receive: Receive) -> tuple[int, dict[str, Any]]:
        content, more = bytearray(), True
        while more and len(content) <= _MAX_RULE_BYTES:
            message = await receive()
            content += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            rules = read_rules(json.loads(content))
        except ValueError as error:
            return 400, {"error": f"the rules are not taken: {error}"}
        self._script.set_rules(rules)
        return 200, {"rules": [each.name for each in rules]}
