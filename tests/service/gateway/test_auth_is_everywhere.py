"""Without a key only health can be reached; data of other tenants or of the deployment is hidden."""

import asyncio
import itertools
import logging
import re
from collections.abc import Iterator

import grpc
import httpx
import pytest
import pytest_asyncio
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from gateway.api.ui.access import OperatorAccess
from gateway.auth import keys as key_ring
from gateway.auth.caller import Access
from gateway.auth.quota import Limits
from gateway.server.grpc import AuthInterceptor
from quire.client import AsyncClient, Client
from quire.client.connection import KeyedChannel
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.gateway.v1.prefix_pb2 import PinPrefixRequest
from quire.inference import open_inference_pb2
from quire.rpc.errors import (
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    from_rpc_error,
)
from quire.rpc.server import RpcServer
from quire_cli.main import main
from tests.support.gateway_process import error_of, running_gateway, stream_request
from tests.support.grpc_types import EOF, health_stub
from tests.support.keys import KeysFile
from tests.support.scheduler_process import until

HEALTH = "grpc.health.v1.Health"
KSERVE = "/inference.GRPCInferenceService/"
OPEN_PATHS = {"/health", "/live", "/ping", "/ready", "/version", "/v2/health/live", "/v2/health/ready"}
LONG_TEXT = "Once upon a time there was a fox who lived in a wood with many friends and slept in a hollow tree"


@pytest.fixture
def keys(tmp_path):
    return KeysFile(tmp_path / "keys.json")


@pytest.fixture
def key(keys):
    """The key of an ordinary tenant."""
    return keys.add("acme")


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(scheduler, keys, key):
    async with running_gateway(scheduler, keys_files=(keys.path,)) as running:
        yield running


def bearer(key):
    return [("authorization", f"Bearer {key}")]


def methods_of(address: str, key: str) -> list[str]:
    """All methods of the server, as its reflection reports them to the holder of a key."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(KeyedChannel(channel, key))  # pyrefly: ignore
        pool = DescriptorPool(database)
        services = [pool.FindServiceByName(name) for name in database.get_services()]
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


def paths_of(routes) -> Iterator[str]:
    """All paths of an application and of its routers."""
    for route in routes:
        if hasattr(route, "path"):
            yield route.path
        else:
            yield from paths_of(route.original_router.routes)


async def refusal_of(call) -> Unauthenticated:
    error = await error_of(call)
    assert isinstance(error, Unauthenticated), error
    return error


def stream_refusal_of(channel: grpc.Channel, method: str, messages: list[bytes], metadata=()) -> Unauthenticated:
    """Uses the blocking API: grpc.aio loses the server's status if a message is still on its way when it comes."""
    with pytest.raises(grpc.RpcError) as raised:
        list(channel.stream_stream(method)(iter(messages), timeout=30, metadata=metadata))
    error = from_rpc_error(raised.value)
    assert isinstance(error, Unauthenticated), (method, error)
    return error


def assert_refused_without_a_key(address: str, methods: list[str]) -> None:
    with grpc.insecure_channel(address) as channel:
        for method, messages in itertools.product(methods, ([], [b"\xff not a message"])):
            assert stream_refusal_of(channel, method, messages).reason == "MISSING_API_KEY", method
            assert stream_refusal_of(channel, method, messages, bearer("wrong")).reason == "INVALID_API_KEY", method


async def test_every_method_but_health_is_refused_without_a_key(gateway, key, scheduler):
    methods = await asyncio.to_thread(methods_of, gateway.gateway.grpc_address, key)
    assert {f"/grpc.reflection.{each}.ServerReflection/ServerReflectionInfo" for each in ("v1", "v1alpha")} <= {
        *methods
    }
    is_open = (f"/{HEALTH}/", f"{KSERVE}ServerLive", f"{KSERVE}ServerReady")
    guarded = [method for method in methods if not method.startswith(is_open)]
    assert {"GenerateStream", "ListModels", "PinPrefix", "ServerReflectionInfo"} <= {m.split("/")[2] for m in guarded}
    await asyncio.to_thread(assert_refused_without_a_key, gateway.gateway.grpc_address, guarded)
    assert not scheduler.submits


async def test_health_needs_no_key(gateway):
    stub = health_stub(gateway.channel)
    await stub.Check(health_pb2.HealthCheckRequest())
    watching = stub.Watch(health_pb2.HealthCheckRequest())
    assert await watching.read() is not EOF
    watching.cancel()
    assert await gateway.channel.unary_unary(f"{KSERVE}ServerLive")(b"", timeout=30) == b"\x08\x01"
    assert await gateway.channel.unary_unary(f"{KSERVE}ServerReady")(b"", timeout=30) == b"\x08\x01"


@pytest.mark.parametrize("method", ["/quire.gateway.v1.GenerationService/Invented", "/x/Y", "/grpc.health.v1.Health/Z"])
async def test_an_unknown_method_is_refused_without_a_key_and_unknown_with_one(gateway, key, method):
    call = gateway.channel.unary_unary(method)
    await refusal_of(call(b"", timeout=30))
    error = await error_of(call(b"", timeout=30, metadata=bearer(key)))
    assert isinstance(error, Unimplemented)
    assert (error.reason, error.message) == ("UNKNOWN_METHOD", f"this server has no method {method}")


async def test_a_service_that_nobody_named_is_refused_with_a_key_too(keys, key):
    ring = key_ring.KeyRing([keys.path])
    refused = []
    interceptor = AuthInterceptor(ring, [], refused.append)

    def register(server):
        servicer = generation_pb2_grpc.GenerationServiceServicer()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)

    server = await RpcServer.start("127.0.0.1:0", register, [], interceptors=[interceptor])
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        error = await error_of(stub.Cancel(generation_pb2.CancelRequest(), metadata=bearer(key), timeout=30))
    await server.stop(0)
    assert isinstance(error, PermissionDenied)
    assert error.reason == "METHOD_NOT_ALLOWED"
    assert refused == ["METHOD_NOT_ALLOWED"]


async def test_every_path_but_the_open_ones_is_refused_without_a_key(gateway, key):
    known = set(paths_of(gateway.gateway._http.config.app.routes))
    assert {"/v1/chat/completions", "/v1/models", "/metrics", "/tokenize"} <= known
    for path in {re.sub(r"{.*?}", "x", path) for path in known} | {"/", "/no/such", "/docs", "/health/"}:
        for method in ("GET", "POST", "OPTIONS", "PUT"):
            response = await gateway.http.request(method, path)
            if path in OPEN_PATHS | OperatorAccess.open_paths:
                assert response.status_code != 401, path
                continue
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == "Bearer"
            if method == "GET" and path in ("/ui", "/ui/"):
                assert "This page is for operators" in response.text
                continue
            error = response.json()["error"]
            if path.split("/")[1] == "v2" and path not in ("/v2/rerank", "/v2/embed"):
                assert "API key" in error, path
                continue
            if path.startswith("/v1/messages"):
                assert error["type"] == "authentication_error"
                continue
            assert (error["type"], error["code"]) == ("invalid_request_error", "missing_api_key")
    for path in OPEN_PATHS:
        assert (await gateway.http.get(path)).status_code in (200, 503)
    assert (await gateway.http.get("/no/such", headers=dict(bearer(key)))).status_code == 404


async def test_a_key_may_come_in_the_header_of_anthropic_s_clients(gateway, key):
    for shown, status in ((key, 200), ("no", 401)):
        assert (await gateway.http.get("/v1/models", headers={"x-api-key": shown})).status_code == status


async def test_another_tenants_running_request_cannot_be_told_from_one_that_is_not_there(gateway, keys, scheduler):
    keys_of = [keys.add("one"), keys.add("two")]
    await gateway.gateway.authenticator.refresh()
    scheduler.emits.clear()
    running = gateway.generation.GenerateStream(stream_request(request_id="mine"), metadata=bearer(keys_of[0]))
    reading = asyncio.ensure_future(running.read())
    await scheduler.until(lambda: scheduler.live)
    errors = [
        await error_of(
            gateway.generation.Cancel(generation_pb2.CancelRequest(request_id=request_id), metadata=bearer(keys_of[1]))
        )
        for request_id in ("mine", "none")
    ]
    assert all(isinstance(error, NotFound) and error.reason == "REQUEST_NOT_FOUND" for error in errors)
    assert errors[0].message.replace("mine", "none") == errors[1].message
    assert errors[0].metadata == errors[1].metadata
    assert scheduler.live
    await gateway.generation.Cancel(generation_pb2.CancelRequest(request_id="mine"), metadata=bearer(keys_of[0]))
    with pytest.raises(grpc.aio.AioRpcError):
        await reading
    await scheduler.until(lambda: scheduler.aborted)


async def test_pins_need_a_key_that_allows_them_and_are_the_tenants_own(gateway, keys, key, scheduler):
    pinning = {tenant: keys.add(tenant, access=Access(may_pin=True)) for tenant in ("one", "two")}
    operator = keys.add("staff", access=Access(is_operator=True))
    await gateway.gateway.authenticator.refresh()
    async with AsyncClient(gateway.gateway.grpc_address, api_key=key) as client:
        for call in (client.pin_prefix(LONG_TEXT), client.unpin_prefix("abc")):
            with pytest.raises(PermissionDenied) as raised:
                await call
            assert raised.value.reason == "PINNING_NOT_ALLOWED"
    for tenant in pinning:
        async with AsyncClient(gateway.gateway.grpc_address, api_key=pinning[tenant]) as client:
            await client.pin_prefix(LONG_TEXT)
    assert [request.tenant for request in scheduler.pin_requests] == ["one", "two"]
    metrics = (await gateway.http.get("/metrics", headers=dict(bearer(operator)))).text
    assert 'quire_gateway_refused_callers_total{reason="PINNING_NOT_ALLOWED"} 2.0' in metrics


async def test_a_pin_that_ends_while_it_is_computed_costs_its_tokens(gateway, keys, scheduler):
    poor = keys.add("poor", access=Access(may_pin=True), limits=Limits(tokens_per_minute=30))
    await gateway.gateway.authenticator.refresh()
    pin = gateway.channel.unary_unary("/quire.gateway.v1.PrefixService/PinPrefix")
    request = PinPrefixRequest(text=LONG_TEXT, time_to_live_ms=10).SerializeToString()
    for error, reason in (
        (ResourceExhausted("too many blocks", reason="PIN_QUOTA"), "PIN_QUOTA"),
        (Unavailable("the pin ended", reason="PIN_LOST"), "PIN_LOST"),
        (None, "RATE_LIMIT_EXCEEDED"),
    ):
        scheduler.pin_error = error
        assert (await error_of(pin(request, metadata=bearer(poor)))).reason == reason


async def test_replicas_and_metrics_are_for_operators(gateway, keys, key):
    operator = keys.add("staff", access=Access(is_operator=True))
    await gateway.gateway.authenticator.refresh()
    for shown, status, num_replicas in ((key, 403, 0), (operator, 200, 1)):
        async with AsyncClient(gateway.gateway.grpc_address, api_key=shown) as client:
            assert len((await client.server_info()).replicas) == num_replicas
        response = await gateway.http.get("/metrics", headers=dict(bearer(shown)))
        assert response.status_code == status
    assert 'quire_gateway_refused_callers_total{reason="OPERATORS_ONLY"} 1.0' in response.text


async def test_statistics_are_for_operators_who_may_use_the_model_and_caches_are_theirs_to_forget(gateway, keys, key):
    operator = keys.add("staff", access=Access(is_operator=True))
    stranger = keys.add("other", access=Access(models=frozenset({"other"}), is_operator=True))
    await gateway.gateway.authenticator.refresh()
    call = gateway.channel.unary_unary("/inference.GRPCInferenceService/ModelStatistics")

    async def names(shown: str) -> list[str]:
        answer = open_inference_pb2.ModelStatisticsResponse.FromString(await call(b"", metadata=bearer(shown)))
        return [each.name for each in answer.model_stats]

    assert await names(operator) == ["quire-tiny"]
    assert await names(stranger) == []
    assert (await error_of(call(b"", metadata=bearer(key)))).reason == "OPERATORS_ONLY"
    reset = await gateway.http.post("/reset_prefix_cache", headers=dict(bearer(key)))
    assert (reset.status_code, reset.json()["error"]["code"]) == (403, "operators_only")


async def test_a_changed_file_is_taken_over_while_the_gateway_runs(scheduler, keys, key, monkeypatch):
    monkeypatch.setattr(key_ring, "_POLL_INTERVAL_S", 0.01)
    async with running_gateway(scheduler, keys_files=(keys.path,)) as gateway:
        added = keys.add("new")

        async def is_known():
            try:
                async with AsyncClient(gateway.gateway.grpc_address, api_key=added) as client:
                    return await client.list_models()
            except Unauthenticated:
                return None

        assert await until(is_known)
        keys.path.write_text("{")
        async with httpx.AsyncClient(base_url=gateway.http_url, headers=dict(bearer(added)), timeout=60) as client:
            assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    "command", [["status"], ["generate", "hello", "--max-tokens=2"], ["generate", "--file=FILE", "--max-tokens=2"]]
)
async def test_the_commands_show_the_key_that_they_are_given(gateway, key, command, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompts").write_text("hello\n")
    command = [word.replace("FILE", str(tmp_path / "prompts")) for word in command]
    command.append(f"--address={gateway.gateway.grpc_address}")
    assert await asyncio.to_thread(main, command) == 1
    captured = capsys.readouterr()
    assert "API key" in captured.out + captured.err
    assert await asyncio.to_thread(main, [*command, f"--api-key={key}"]) == 0
    monkeypatch.setenv("QUIRE_API_KEY", key)
    assert await asyncio.to_thread(main, command) == 0


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_an_open_gateway_that_other_machines_reach_warns(scheduler, keys, key, caplog, host, warns):
    with caplog.at_level(logging.WARNING, logger="gateway.app"):
        async with running_gateway(scheduler, http_host=host):
            pass
        assert ("--keys-file" in caplog.text) == warns
        caplog.clear()
        async with running_gateway(scheduler, http_host=host, keys_files=(keys.path,)):
            pass
    assert "--keys-file" not in caplog.text


@pytest.mark.parametrize("key", ["", "a b", "x" * 513, "ä", "a\n"])
def test_a_key_that_no_header_can_hold_is_refused_where_it_is_given(key):
    with pytest.raises(Unauthenticated) as raised, Client(api_key=key):
        pass
    assert raised.value.reason == "INVALID_API_KEY"
