"""The gateway's reports on itself: models, limits, readiness, its replicas; and tokens to text and back."""

import asyncio

from grpc_health.v1 import health_pb2

from gateway.replicas.members import Resolver
from quire.gateway.v1 import generation_pb2, model_pb2
from quire.rpc.address import DnsName
from quire.rpc.errors import InvalidArgument, NotFound
from quire.version import VERSION
from tests.support.gateway_process import collect, error_of, refusal_of, running_gateway, stream_request
from tests.support.grpc_types import health_stub
from tests.support.processes import until_true
from tests.support.rig import TOKENIZER


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
    await refusal_of(gateway.generation.Tokenize(empty), "chat.messages")


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
    unknown = generation_pb2.DetokenizeRequest(token_ids=[1, 9999])
    await refusal_of(gateway.generation.Detokenize(unknown), "token_ids[1]")


async def test_readiness_follows_the_scheduler(gateway, scheduler):
    await until_health_is(gateway.channel, "SERVING")
    assert (await gateway.http.get("/ready")).status_code == 200
    await scheduler.stop()
    await until_health_is(gateway.channel, "NOT_SERVING")
    answer = await gateway.http.get("/ready")
    assert answer.status_code == 503
    assert answer.json()["reason"].startswith("no scheduler is connected")
    statuses = [(await gateway.http.get(path)).status_code for path in ("/health", "/ping", "/live")]
    assert statuses == [503, 503, 200]
    scheduler.epoch += 1
    await scheduler.start()
    await until_health_is(gateway.channel, "SERVING")
    assert (await gateway.http.get("/ready")).status_code == 200


async def test_a_replica_without_its_worker_is_not_ready_but_takes_requests(gateway, scheduler):
    await until_health_is(gateway.channel, "SERVING")
    scheduler.lose_worker()
    await until_health_is(gateway.channel, "NOT_SERVING")
    answer = await gateway.http.get("/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503, "no scheduler has its worker")
    info = await gateway.models.GetServerInfo(model_pb2.GetServerInfoRequest())
    assert info.replicas[0].connected
    waiting = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request(max_tokens=4))))
    await scheduler.until(lambda: scheduler.live)
    assert not waiting.done()
    scheduler.regain_worker()
    assert len((await waiting).token_ids) == 4
    await until_health_is(gateway.channel, "SERVING")
    assert (await gateway.http.get("/ready")).status_code == 200


NAME = "dns:///replicas.test:50052"


async def test_a_replica_that_appears_gets_requests_and_one_that_goes_gets_none(scheduler, other):
    found = [scheduler]

    async def resolve(name: DnsName) -> list[str]:
        assert str(name) == NAME
        return [each.address for each in found]

    settings = {"schedulers": (NAME,), "routing": "round-robin"}
    async with running_gateway(scheduler, resolver=Resolver(resolve, 0.01), **settings) as gateway:

        async def counts_after_four() -> tuple[int, int]:
            calls = (gateway.generation.GenerateStream(stream_request(max_tokens=2)) for _ in range(4))
            await asyncio.gather(*map(collect, calls))
            return len(scheduler.submits), len(other.submits)

        assert await counts_after_four() == (4, 0)
        found.append(other)
        await other.until_known()
        assert await counts_after_four() == (6, 2)
        found.remove(scheduler)
        links = gateway.gateway._models.default.replicas.links
        await until_true(lambda: scheduler.address not in links)
        assert await counts_after_four() == (6, 6)
        # The counters of a lost replica stay.
        assert (
            'quire_gateway_generated_tokens_total{model="quire-tiny"} 24.0' in (await gateway.http.get("/metrics")).text
        )


async def test_readiness_names_a_name_that_cannot_be_resolved():
    async def resolve(name: DnsName) -> list[str]:
        raise OSError(-2, "Name or service not known")

    async with running_gateway(resolver=Resolver(resolve, 0.01), schedulers=(NAME,)) as gateway:
        replicas = gateway.gateway._models.default.replicas
        await until_true(lambda: replicas.problems)
        answer = await gateway.http.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["reason"] == f"no scheduler is connected; {NAME}: Name or service not known"
