"""What a gateway says about itself: models, limits, health, reflection, HTTP; and tokens to text and back."""

import asyncio

import httpx
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from gateway.replicas.members import Resolver
from quire.gateway.v1 import generation_pb2, model_pb2
from quire.rpc.address import DnsName
from quire.rpc.errors import InvalidArgument, NotFound
from quire.version import VERSION
from tests.support.gateway_process import collect, error_of, running_gateway, stream_request
from tests.support.grpc_types import health_stub, reflection_stub
from tests.support.processes import until_true
from tests.support.rig import TOKENIZER
from tests.support.tokenizers import byte_level, write_model_directory


async def until_health_is(channel, wanted):
    stub = health_stub(channel)
    async with asyncio.timeout(30):
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service="quire.gateway.v1.GenerationService")):
            if health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == wanted:
                return


async def test_models(gateway):
    (listed,) = (await gateway.models.ListModels(model_pb2.ListModelsRequest())).models
    got = (await gateway.models.GetModel(model_pb2.GetModelRequest(model="quire-tiny"))).model
    assert listed == got
    assert (got.name, got.architecture, got.dtype) == ("quire-tiny", "LlamaForCausalLM", "float32")
    assert (got.vocab_size, got.max_model_len, list(got.eos_token_ids)) == (2080, 1024, [2, 6])
    assert got.has_chat_template
    assert isinstance(await error_of(gateway.models.GetModel(model_pb2.GetModelRequest(model="other"))), NotFound)


async def test_server_info(gateway, scheduler):
    info = await gateway.models.GetServerInfo(model_pb2.GetServerInfoRequest())
    assert info.version == VERSION
    (replica,) = info.replicas
    assert (replica.scheduler_address, replica.connected) == (scheduler.address, True)
    assert (replica.scheduler_epoch, replica.num_gpu_blocks) == (scheduler.epoch, 64)
    assert (info.limits.max_prompt_tokens, info.limits.max_stop_strings, info.limits.max_n) == (1023, 16, 128)
    assert (info.limits.max_logit_bias, info.limits.max_stop_token_ids) == (1024, 128)


async def test_tokenize_without_input_is_refused(gateway):
    error = await error_of(gateway.generation.Tokenize(generation_pb2.TokenizeRequest()))
    assert isinstance(error, InvalidArgument)
    empty = generation_pb2.TokenizeRequest(chat=generation_pb2.ChatMessages())
    error = await error_of(gateway.generation.Tokenize(empty))
    assert [violation.field for violation in error.violations] == ["chat.messages"]


async def test_text_to_tokens_and_back(gateway):
    text = "hello 😀 there"
    answer = await gateway.generation.Tokenize(generation_pb2.TokenizeRequest(text=text))
    assert (list(answer.token_ids), list(answer.tokens)) == (TOKENIZER.encode(text).ids, TOKENIZER.encode(text).tokens)
    assert answer.max_model_len == 1024
    bare = await gateway.generation.Tokenize(generation_pb2.TokenizeRequest(text=text, add_special_tokens=False))
    assert list(bare.token_ids) == list(answer.token_ids)[1:]
    for is_special, back in ((False, text), (True, f"<s>{text}")):
        asked = generation_pb2.DetokenizeRequest(token_ids=answer.token_ids, include_special_tokens=is_special)
        assert (await gateway.generation.Detokenize(asked)).text == back


async def test_reflection_lists_the_services(gateway):
    stub = reflection_stub(gateway.channel)

    async def requests():
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        yield reflection_pb2.ServerReflectionRequest(file_containing_symbol="quire.gateway.v1.GenerationService")

    listed, described = [answer async for answer in stub.ServerReflectionInfo(requests())]
    names = {service.name for service in listed.list_services_response.service}
    assert {"quire.gateway.v1.GenerationService", "quire.gateway.v1.ModelService", "grpc.health.v1.Health"} <= names
    assert "quire.gateway.v1.PrefixService" in names
    assert described.file_descriptor_response.file_descriptor_proto


async def test_readiness_follows_the_scheduler(gateway, scheduler):
    await until_health_is(gateway.channel, "SERVING")
    async with httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as client:
        assert (await client.get("/ready")).status_code == 200
        await scheduler.stop()
        await until_health_is(gateway.channel, "NOT_SERVING")
        answer = await client.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["reason"].startswith("no scheduler is connected")
        assert (await client.get("/health")).status_code == 200
        scheduler.epoch += 1
        await scheduler.start()
        await until_health_is(gateway.channel, "SERVING")
        assert (await client.get("/ready")).status_code == 200


async def test_a_replica_without_its_worker_is_not_ready_but_takes_requests(gateway, scheduler):
    await until_health_is(gateway.channel, "SERVING")
    async with httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as client:
        scheduler.lose_worker()
        await until_health_is(gateway.channel, "NOT_SERVING")
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "no scheduler has its worker")
        info = await gateway.models.GetServerInfo(model_pb2.GetServerInfoRequest())
        assert info.replicas[0].connected
        waiting = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request(max_tokens=4))))
        await scheduler.until(lambda: scheduler.live)
        assert not waiting.done()
        scheduler.regain_worker()
        assert len((await waiting).token_ids) == 4
        await until_health_is(gateway.channel, "SERVING")
        assert (await client.get("/ready")).status_code == 200


@pytest.fixture
async def plain_gateway(scheduler, tmp_path):
    """A gateway whose model has neither a chat template nor generation defaults."""
    directory = write_model_directory(tmp_path / "plain", byte_level())
    async with running_gateway(scheduler, model=str(directory), served_model_name="other-name") as gateway:
        yield gateway


async def test_chat_without_a_template_is_refused(plain_gateway):
    request = generation_pb2.ChatRequest(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    error = await error_of(plain_gateway.generation.Chat(request))
    assert isinstance(error, InvalidArgument)
    assert error.reason == "NO_CHAT_TEMPLATE"
    assert '"other-name"' in error.message
    model = (await plain_gateway.models.GetModel(model_pb2.GetModelRequest(model="other-name"))).model
    assert not model.has_chat_template


async def test_readiness_names_a_name_that_cannot_be_resolved():
    async def resolve(name: DnsName) -> list[str]:
        raise OSError(-2, "Name or service not known")

    name = "dns:///replicas.test:50052"
    async with (
        running_gateway(resolver=Resolver(resolve, 0.01), schedulers=(name,)) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as http,
    ):
        replicas = gateway.gateway._generator.replicas
        await until_true(lambda: replicas.problems)
        answer = await http.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["reason"] == f"no scheduler is connected; {name}: Name or service not known"
