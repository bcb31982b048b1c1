"""What a gateway says about itself: models, limits, health, reflection, HTTP; and tokens to text and back."""

import asyncio

import httpx
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from quire.gateway.v1 import generation_pb2, model_pb2
from quire.rpc.errors import InvalidArgument, NotFound, Unavailable
from quire.version import VERSION
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import collect, error_of, running_gateway, stream_request
from tests.support.grpc_types import health_stub, reflection_stub
from tests.support.parameters import row_sampling
from tests.support.rig import TOKENIZER
from tests.support.tokenizers import byte_level, write_model_directory


async def health_of(channel, service=""):
    answer = await health_stub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


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


async def test_detokenize_refuses_ids_out_of_range(gateway):
    error = await error_of(gateway.generation.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[1, 9999])))
    assert isinstance(error, InvalidArgument)
    assert error.violations[0].field == "token_ids[1]"


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


async def test_requests_go_to_replicas_that_have_their_worker(scheduler):
    other = FakeScheduler()
    await other.start()
    async with running_gateway(scheduler, other) as gateway:
        scheduler.lose_worker()
        other.lose_worker()
        await until_health_is(gateway.channel, "NOT_SERVING")
        other.regain_worker()
        await until_health_is(gateway.channel, "SERVING")
        for number in range(8):
            await collect(gateway.generation.GenerateStream(stream_request(f"hello {number}", max_tokens=2)))
        assert (len(scheduler.submits), len(other.submits)) == (0, 8)
    await other.stop()


async def test_health_knows_every_service(gateway):
    await until_health_is(gateway.channel, "SERVING")
    for name in ("Generation", "Model", "Prefix"):
        assert await health_of(gateway.channel, f"quire.gateway.v1.{name}Service") == "SERVING"


async def test_http_describes_the_server(gateway):
    request = generation_pb2.GenerateRequest(text="hello")
    request.stopping.max_tokens = 5
    await gateway.generation.Generate(request)
    async with httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as client:
        assert (await client.get("/version")).json() == {"version": VERSION}
        models = (await client.get("/v1/models")).json()
        assert models["object"] == "list"
        assert [(model["id"], model["object"]) for model in models["data"]] == [("quire-tiny", "model")]
        metrics = (await client.get("/metrics")).text
    assert 'quire_gateway_requests_total{outcome="completed"} 1.0' in metrics
    assert "quire_gateway_generated_tokens_total 5.0" in metrics


async def test_model_service_is_unavailable_where_no_scheduler_was_reached():
    scheduler = FakeScheduler(refuses_connections=True)
    await scheduler.start()
    async with running_gateway(scheduler, connect_timeout=0.05) as gateway:
        error = await error_of(gateway.models.ListModels(model_pb2.ListModelsRequest()))
        assert isinstance(error, Unavailable)
        assert await health_of(gateway.channel) == "NOT_SERVING"
    await scheduler.stop()


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


async def test_contract_defaults_hold_where_the_model_says_nothing(plain_gateway, scheduler):
    request = generation_pb2.GenerateRequest(text="hello")
    request.stopping.max_tokens = 2
    await plain_gateway.generation.Generate(request)
    assert row_sampling(scheduler.submits[0]).sampling.temperature == 1
    assert list(scheduler.submits[0].eos_token_ids) == [1]
