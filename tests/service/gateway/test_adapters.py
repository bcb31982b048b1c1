"""A gateway's adapters: all fronts select them by name, schedulers get digests, operators load and unload."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from gateway.app import Gateway
from gateway.auth.caller import Access
from gateway.settings import GatewaySettings
from quire.client import AsyncClient, GenerationOptions
from quire.gateway.v1 import generation_pb2, model_pb2
from quire.model_files.adapter_files import read_adapter
from quire.rpc.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, PermissionDenied
from quire.runtime.settings import ConfigurationError
from tests.support.adapter_files import write_adapter
from tests.support.fake_scheduler import FakeScheduler
from tests.support.fronts import FRONTS, Front
from tests.support.gateway_process import collect, error_of, running_gateway, stream_request
from tests.support.keys import KeysFile
from tests.support.rig import Rig, running_rig

MODULES = {"model.layers.0.self_attn.q_proj": (4, 256, 256)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for alpha, name in enumerate(("one", "two", "three"), 1):
        write_adapter(directory / name, MODULES, lora_alpha=alpha)
    return directory


@pytest_asyncio.fixture
async def rig(tmp_path: Path, files: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, adapters=(f"one={files / 'one'}", f"two={files / 'two'}")) as running:
        running.reset()
        yield running


@pytest.mark.parametrize("kind", FRONTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("streams", [False, True])
async def test_each_front_chooses_by_the_name_and_schedulers_get_the_digest(
    rig: Rig, files: Path, kind: type[Front], streams: bool
) -> None:
    for name in ("two", "quire-tiny"):
        answer = await kind(rig.gateway).ask(model=name, streams=streams)
        assert answer.refusal is None
    adapted, plain = rig.scheduler.submits
    assert adapted.adapter.digest == read_adapter(files / "two").digest
    assert (adapted.adapter.name, adapted.adapter.directory) == ("two", str(files / "two"))
    assert not plain.HasField("adapter")
    refusal = await kind(rig.gateway).refused(model="three", streams=streams)
    assert refusal.status in ("NOT_FOUND", "INVALID_ARGUMENT")
    assert '"three"' in refusal.message


async def test_adapters_are_models_with_a_parent(rig: Rig) -> None:
    listed = (await rig.http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["parent"], each["root"]) for each in listed] == [
        ("quire-tiny", None, "quire-tiny"), ("one", "quire-tiny", "quire-tiny"), ("two", "quire-tiny", "quire-tiny"),
    ]  # fmt: skip
    assert (await rig.http.get("/v1/models/two")).json()["parent"] == "quire-tiny"
    answer = (await rig.http.post("/v1/completions", json={"model": "two", "prompt": "hello"})).json()
    assert answer["model"] == "two"
    assert (await rig.http.get("/v2/models/two")).json()["name"] == "two"


async def test_operators_load_and_unload_by_vllms_paths(rig: Rig, files: Path, tmp_path: Path) -> None:
    async def post(path: str, **body: str) -> tuple[int, str]:
        answer = await rig.http.post(f"/v1/{path}_lora_adapter", json=body)
        if answer.status_code == 200:
            return 200, answer.text
        error = json.loads(answer.text)["error"]
        return answer.status_code, f"{error['param']}: {error['code']}"

    three = {"lora_name": "three", "lora_path": str(files / "three")}
    assert await post("load", **three) == (200, "Success: LoRA adapter 'three' added successfully.")
    assert await post("load", **three) == (409, "lora_name: adapter_exists")
    assert await post("load", **(three | {"lora_name": "quire-tiny"})) == (409, "lora_name: adapter_exists")
    assert await post("load", **(three | {"lora_name": "a b"})) == (400, "lora_name: invalid_argument")
    assert await post("load", lora_name="x", lora_path="relative") == (400, "lora_path: invalid_argument")
    nothing, damaged = str(files / "none"), tmp_path / "damaged"
    assert await post("load", lora_name="x", lora_path=nothing) == (404, "lora_path: no_adapter_in_directory")
    assert await post("load", lora_name="x", lora_path=str(files)) == (404, "lora_path: no_adapter_in_directory")
    damaged.mkdir()
    (damaged / "adapter_config.json").write_text("{")
    assert await post("load", lora_name="x", lora_path=str(damaged)) == (400, "lora_path: unusable_adapter")
    assert await post("load", lora_name="x") == (400, "lora_path: invalid_argument")
    assert (await rig.http.post("/v1/completions", json={"model": "three", "prompt": "hello"})).status_code == 200
    assert await post("unload", lora_name="three") == (200, "Success: LoRA adapter 'three' removed successfully.")
    assert await post("unload", lora_name="three") == (404, "lora_name: adapter_not_found")
    assert (await rig.http.post("/v1/completions", json={"model": "three", "prompt": "hello"})).status_code == 404


async def test_the_client_loads_lists_and_unloads(rig: Rig, files: Path) -> None:
    async with AsyncClient(rig.gateway.gateway.grpc_address) as client:
        loaded = await client.load_adapter("three", files / "three")
        assert (loaded.parent, loaded.rank, loaded.directory) == ("quire-tiny", 4, str(files / "three"))
        assert loaded.digest == read_adapter(files / "three").digest.hex()
        assert [each.name for each in await client.list_adapters()] == ["one", "two", "three"]
        assert [(each.name, each.parent) for each in await client.list_models()][-1] == ("three", "quire-tiny")
        assert (await client.get_model("three")).parent == "quire-tiny"
        with pytest.raises(AlreadyExists, match="replace"):
            await client.load_adapter("three", files / "one")
        replaced = await client.load_adapter("three", files / "one", replace=True)
        assert replaced.digest == read_adapter(files / "one").digest.hex()
        with pytest.raises(AlreadyExists):
            await client.load_adapter("quire-tiny", files / "one", replace=True)
        await client.unload_adapter("three")
        with pytest.raises(NotFound):
            await client.unload_adapter("three")
        with pytest.raises(InvalidArgument, match="three"):
            await client.generate("hello", GenerationOptions(max_tokens=2), model="three")


async def test_unloading_and_changed_files_leave_requests_that_run_as_they_are(rig: Rig, tmp_path: Path) -> None:
    write_adapter(tmp_path / "mine", MODULES)
    digest = read_adapter(tmp_path / "mine").digest
    await rig.gateway.models.LoadAdapter(model_pb2.LoadAdapterRequest(name="mine", directory=str(tmp_path / "mine")))
    rig.scheduler.step_delay_s = 0.05
    call = rig.gateway.generation.GenerateStream(stream_request(model="mine", durable=True, request_id="r"))
    await call.read()
    await rig.gateway.models.UnloadAdapter(model_pb2.UnloadAdapterRequest(name="mine"))
    shutil.rmtree(tmp_path / "mine")
    await rig.scheduler.restart()
    rig.scheduler.step_delay_s = 0.001
    while isinstance(await call.read(), generation_pb2.GenerateStreamResponse):
        pass
    assert await call.code() is grpc.StatusCode.OK
    assert [submit.adapter.digest for submit in rig.scheduler.submits] == [digest, digest]


async def test_an_adapter_that_is_loaded_in_place_is_that_of_later_requests(rig: Rig, tmp_path: Path) -> None:
    """The earlier adapter, whose tokens and blocks running requests have, has another digest."""

    async def load(**more: bool) -> tuple[int, bytes]:
        body = {"lora_name": "mine", "lora_path": str(tmp_path / "mine")} | more
        answer = await rig.http.post("/v1/load_lora_adapter", json=body)
        return answer.status_code, read_adapter(tmp_path / "mine").digest

    write_adapter(tmp_path / "mine", MODULES)
    assert (first := await load(load_inplace=True))[0] == 200
    with rig.scheduler.standing_still():
        call = rig.gateway.generation.GenerateStream(stream_request(model="mine"))
        await rig.scheduler.until(lambda: rig.scheduler.live)
        shutil.rmtree(tmp_path / "mine")
        write_adapter(tmp_path / "mine", MODULES, lora_alpha=7)
        assert (await load())[0] == (await load(load_inplace=False))[0] == 409
        assert (second := await load(load_inplace=True))[0] == 200
    assert (await collect(call)).token_ids
    assert (await rig.http.post("/v1/completions", json={"model": "mine", "prompt": "hello"})).status_code == 200
    assert [submit.adapter.digest for submit in rig.scheduler.submits] == [first[1], second[1]]
    assert not rig.scheduler.aborted
    assert [each["id"] for each in (await rig.http.get("/v1/models")).json()["data"]].count("mine") == 1


async def test_pins_are_of_an_adapter(rig: Rig, files: Path) -> None:
    async with AsyncClient(rig.gateway.gateway.grpc_address) as client:
        await client.pin_prefix("word " * 40, model="one")
        await client.pin_prefix("word " * 40)
    adapted, plain = rig.scheduler.pin_requests
    assert adapted.adapter.digest == read_adapter(files / "one").digest
    assert not plain.HasField("adapter")


async def test_a_scheduler_without_adapters_gets_none(files: Path) -> None:
    """Its release may ignore them."""
    async with (
        FakeScheduler(max_adapters=0) as old,
        running_gateway(old, adapters=(f"one={files / 'one'}",)) as gateway,
    ):
        error = await error_of(gateway.generation.Generate(generation_pb2.GenerateRequest(text="hello", model="one")))
        assert isinstance(error, FailedPrecondition)
        assert error.reason == "ADAPTERS_OFF"
        request = model_pb2.LoadAdapterRequest(name="two", directory=str(files / "two"))
        assert (await error_of(gateway.models.LoadAdapter(request))).reason == "ADAPTERS_OFF"
        async with FakeScheduler() as new, running_gateway(old, new, adapters=(f"one={files / 'one'}",)) as both:
            for _ in range(4):
                await both.generation.Generate(generation_pb2.GenerateRequest(text="hello", model="one"))
            assert len(new.submits) == 4
        assert not old.submits


async def test_names_are_fixed_where_gateways_share_ports(files: Path) -> None:
    async with FakeScheduler() as scheduler, running_gateway(scheduler, reuse_port=True, hand_over=True) as gateway:
        request = model_pb2.LoadAdapterRequest(name="two", directory=str(files / "two"))
        error = await error_of(gateway.models.LoadAdapter(request))
    assert error.reason == "ADAPTERS_FIXED"
    assert "--adapters" in str(error)


async def test_keys_are_restricted_to_names_and_operators_load(files: Path, tmp_path: Path) -> None:
    keys = KeysFile(tmp_path / "keys.json")
    some = keys.add("acme", access=Access(models=frozenset({"one"})))
    operator = keys.add("ops", access=Access(is_operator=True))
    given = tuple(f"{name}={files / name}" for name in ("one", "two"))
    async with (
        FakeScheduler() as scheduler,
        running_gateway(scheduler, keys_files=(keys.path,), adapters=given) as gateway,
    ):
        async with AsyncClient(gateway.gateway.grpc_address, api_key=some) as client:
            assert [each.name for each in await client.list_models()] == ["one"]
            assert [(each.name, each.directory) for each in await client.list_adapters()] == [("one", "")]
            await client.generate("hello", GenerationOptions(max_tokens=2), model="one")
            for model in ("two", None):
                with pytest.raises(InvalidArgument, match="no model is served here that this API key may use"):
                    await client.generate("hello", GenerationOptions(max_tokens=2), model=model)
            with pytest.raises(PermissionDenied):
                await client.load_adapter("three", files / "three")
            with pytest.raises(PermissionDenied):
                await client.unload_adapter("one")
        async with AsyncClient(gateway.gateway.grpc_address, api_key=operator) as client:
            await client.load_adapter("three", files / "three")
            assert [each.name for each in await client.list_adapters()] == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("adapters", "line"),
    [(("quire-tiny={}/one",), "the name of the model"), (("x={}/none",), "is no directory"), (("x=a",), "absolute")],
)
async def test_a_gateway_with_unusable_adapters_does_not_start(
    files: Path, adapters: tuple[str, ...], line: str
) -> None:
    settings = GatewaySettings(grpc_port=0, http_port=0, adapters=tuple(each.format(files) for each in adapters))
    with pytest.raises(ConfigurationError, match=line):
        await Gateway.start(settings)


@pytest.mark.parametrize(
    ("adapters", "line"), [(("x",), "must be NAME=DIR"), (("x=/a", "x=/b"), "has the name x twice")]
)
def test_flags_name_each_adapter_once(adapters: tuple[str, ...], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        GatewaySettings(adapters=adapters)
