"""Properties that all public fronts share, as scenarios that run over each of them, whole and as a stream."""

import asyncio
import json
from typing import Any

import pytest
from google.rpc import code_pb2

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2, model_pb2, prefix_pb2
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_scheduler import counting_rule
from tests.support.fronts import (
    CHATS,
    FRONTS,
    Completions,
    Front,
    GrpcChat,
    GrpcGenerate,
    KServe,
    Messages,
    OpenAiChat,
    Responses,
    fronts_that_take,
)
from tests.support.gateway_process import error_of, running_gateway
from tests.support.parameters import row_sampling
from tests.support.rig import (
    CALL,
    EOS,
    REASONED,
    SPEECH,
    TEXT,
    TOKENIZER,
    WEATHER,
    WEATHER_SCHEMA,
    Rig,
    constraint_of,
    prompt_of,
)

OF_GRPC = (GrpcGenerate, GrpcChat)

# Whether the answer is a stream, and the number of tokens in each step.
FORMS = pytest.mark.parametrize(
    ("streams", "step"), [(False, 1), (True, 1), (True, 7)], ids=["whole", "stream", "stream of large steps"]
)
STREAMS = pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])


@pytest.fixture
def front(rig: Rig, request: pytest.FixtureRequest) -> Front:
    return request.param(rig.gateway)


def over(fronts) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("front", fronts, indirect=True, ids=lambda front: front.name)


def cases(*scenarios: tuple) -> list:
    """Pairs each scenario, whose first entry has the needed parameters, with each front that takes them."""
    return [
        pytest.param(front, *scenario, id=f"{front.name}-{'-'.join(scenario[0])}-{number}")
        for number, scenario in enumerate(scenarios)
        for front in fronts_that_take(*scenario[0])
    ]


@over(FRONTS)
@FORMS
async def test_an_answer_has_its_text_its_end_and_its_usage(rig, front, streams, step):
    rig.scheduler.tokens_per_step = step
    answer = await front.ask(streams=streams)
    (submit,) = rig.scheduler.submits
    assert (answer.text, answer.finish, answer.refusal) == (TEXT, "stop", None)
    # Only gRPC reports the end token of the model.
    assert answer.stop == (EOS if isinstance(front, OF_GRPC) else None)
    assert answer.usage == (len(prompt_of(submit)), len(SPEECH) + 1)
    assert len(answer.pieces) > 3 if streams and step == 1 else len(answer.pieces) >= 1
    assert not rig.scheduler.aborted


@pytest.mark.parametrize(
    ("front", "fields", "text", "finish", "stop"),
    cases(
        ({"max_tokens": 3}, TOKENIZER.decode(SPEECH[:3]), "length", None),
        ({"stop": ["little"]}, " there was a ", "stop", "little"),
        ({"stop": ["never", "a litt"]}, " there was ", "stop", "a litt"),
        ({"stop": ["dog. The end"]}, TEXT, "stop", None),
        ({"stop": ["dog"], "include_stop_string": True}, " there was a little dog", "stop", "dog"),
        ({"stop": ["e"], "min_tokens": len(SPEECH) - 1}, TEXT, "stop", None),
        ({"stop_token_ids": [SPEECH[2]]}, TOKENIZER.decode(SPEECH[:2]), "stop", SPEECH[2]),
        ({"stop_token_ids": [EOS]}, TEXT, "stop", EOS),
        ({"ignore_eos": True, "max_tokens": 2 * len(SPEECH) + 1}, TEXT * 2, "length", None),
        (
            {"ignore_eos": True, "include_special_tokens": True, "max_tokens": len(SPEECH) + 1},
            f"{TEXT}</s>",
            "length",
            None,
        ),
    ),
    indirect=["front"],
)
@FORMS
async def test_a_text_ends_where_it_shall_and_says_why(rig, front, fields, text, finish, stop, streams, step):
    rig.scheduler.tokens_per_step = step
    answer = await front.ask(streams=streams, **fields)
    assert (answer.text, answer.finish) == (text, finish)
    if stop is None and finish == "stop" and isinstance(front, OF_GRPC):
        stop = EOS
    assert answer.stop == (stop if not isinstance(front, KServe) else None)
    if isinstance(stop, str):
        # The scheduler cannot know that a stop string came, so the gateway aborts the request.
        await rig.scheduler.until(lambda: not rig.scheduler.live)


EVERYTHING = {
    "temperature": 0.5, "top_k": 4, "top_p": 0.75, "min_p": 0.125, "seed": 5, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "repetition_penalty": 1.25, "logit_bias": {7: -100.0, 8: 1.5},
    "allowed_token_ids": [9, 8, 9], "bad_words": ["fox"], "max_tokens": 7, "min_tokens": 2, "stop_token_ids": [77, 78],
    "ignore_eos": False, "logprobs": 2, "priority": 7,
}  # fmt: skip


@over(OF_GRPC)
async def test_the_scheduler_gets_every_parameter_and_every_default(rig, front):
    await front.ask(**EVERYTHING)
    (submit,) = rig.scheduler.submits
    row = row_sampling(submit)
    assert row.sampling == common_pb2.SamplingParameters(
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.125,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={7: -100.0, 8: 1.5},
        allowed_token_ids=[9, 8],
    )
    fox = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in ("fox", " fox")]
    assert [list(each.ids) for each in row.bad_token_sequences] == fox
    assert (row.stopping.min_tokens, set(row.stopping.stop_token_ids)) == (2, {2, 6, 77, 78})
    # Only the fields that the scheduler decides on.
    assert submit.sampling == common_pb2.SamplingParameters(seed=5, n=1, best_of=1)
    assert (submit.stopping.max_tokens, list(submit.stopping.stop_token_ids)) == (7, [77, 78])
    assert (submit.output.logprobs, submit.priority, list(submit.eos_token_ids)) == (2, 7, [2, 6])
    rig.scheduler.submits.clear()
    await front.ask()
    (submit,) = rig.scheduler.submits
    # generation_config.json of the embedded model says do_sample: false.
    drawn_by = row_sampling(submit).sampling
    assert (drawn_by.temperature, drawn_by.top_k, drawn_by.top_p, drawn_by.min_p) == (0, 0, 1, 0)
    assert submit.sampling.HasField("seed")


@over([each for each in FRONTS if each not in OF_GRPC])
@STREAMS
async def test_the_scheduler_gets_from_each_front_what_it_gets_over_grpc(rig, front, streams):
    alike = GrpcChat if isinstance(front, CHATS) else GrpcGenerate
    asked: dict[str, Any] = {name: value for name, value in EVERYTHING.items() if name in front.takes}
    for each in (front, alike(rig.gateway)):
        assert (await each.ask("hello there", streams=streams, **asked)).refusal is None
    ours, theirs = rig.scheduler.submits
    for submit in (ours, theirs):
        for name in ("handle", "nonce", "request_id"):
            submit.ClearField(name)
        if "seed" not in asked:
            submit.sampling.ClearField("seed")
    assert ours == theirs


@over(fronts_that_take("logprobs"))
@FORMS
async def test_log_probabilities_come_one_a_token(rig, front, streams, step):
    rig.scheduler.tokens_per_step = step
    answer = await front.ask(streams=streams, logprobs=2, max_tokens=5)
    assert answer.logprobs == [-0.5] * 5
    # The end token has no log probability.
    whole = await front.ask(streams=streams, logprobs=2)
    assert len(whole.logprobs) == whole.usage[1]
    assert not (await front.ask(streams=streams, max_tokens=5)).logprobs


@pytest.mark.parametrize(
    ("front", "fields", "place", "says"),
    cases(
        ({"temperature": -1}, "", "is -1; it must be in [0, 100]"),
        ({"top_p": 1.5}, "", "is 1.5; it must be in (0, 1]"),
        ({"max_tokens": 0}, "", "is 0"),
        ({"stop": ["ok", ""]}, "[1]", "is empty"),
        ({"stop_token_ids": [3, 9999]}, "[1]", "is 9999"),
        ({"logprobs": 21}, "", "is 21; it must be in [0, 20]"),
        ({"n": 129}, "", "is 129"),
        ({"logit_bias": {"5": 101}}, "[5]", "[-100, 100]"),
        ({"bad_words": [""]}, "[0]", "is empty"),
        ({"request_id": "a b"}, "", '"a b"'),
        ({"priority": 101}, "", "101; it must be in [-100, 100]"),
        ({"schema": {"type": "nothing"}}, "", "nothing"),
    ),
    indirect=["front"],
)
@STREAMS
async def test_a_parameter_that_is_wrong_is_named_as_its_front_has_it(rig, front, fields, place, says, streams):
    field = front.field_name(list(fields)[-1]) + place
    refusal = await front.refused(streams=streams, **fields)
    assert refusal.status == "INVALID_ARGUMENT"
    assert says in refusal.message
    assert field in refusal.message
    if not isinstance(front, Messages):
        assert (refusal.reason, refusal.field) == ("INVALID_ARGUMENT", field)
    assert refusal.retry_after_s is None
    assert not rig.scheduler.submits
    assert (await front.ask(streams=streams)).text == TEXT


@over(FRONTS)
@STREAMS
async def test_more_output_than_the_context_has_is_refused_in_the_words_of_a_prompt_that_is_too_long(
    rig, front, streams
):
    if isinstance(front, Messages):
        # Agents request the original model's maximum output from Anthropic's API, and get the tokens that are left.
        assert (await front.ask(streams=streams, max_tokens=5000)).text == TEXT
        return
    refusal = await front.refused(streams=streams, max_tokens=5000)
    assert (refusal.reason, refusal.field) == ("CONTEXT_LENGTH_EXCEEDED", front.field_name("max_tokens"))
    assert "is 5,000; it must be in [1, 1,023], since this model's maximum context length is 1024" in refusal.message


# A few tokens too many, and far more bytes than any prompt that fits.
@pytest.mark.parametrize(
    ("text", "says"),
    [("a " * 1500, "has 1,50"), ("hello wo" * 400_000, "has at least 168,422 tokens")],
    ids=["slightly", "far"],
)
@over(FRONTS)
@STREAMS
async def test_a_prompt_that_is_too_long_is_refused_in_the_same_words(rig, front, streams, text, says):
    """Clients such as litellm and langchain-openai look for these words, and for the code, to try another model."""
    refusal = await front.refused(text, streams=streams)
    assert refusal.status == "INVALID_ARGUMENT"
    assert "prompt is too long" in refusal.message
    assert "this model's maximum context length is 1024 tokens" in refusal.message
    assert says in refusal.message
    if not isinstance(front, Messages):
        assert (refusal.reason, refusal.field) == ("CONTEXT_LENGTH_EXCEEDED", front.field_name("prompt"))
    assert not rig.scheduler.submits


@over(FRONTS)
async def test_another_model_is_refused_and_the_served_one_named(rig, front):
    assert (await front.ask(model="quire-tiny")).text == TEXT
    refusal = await front.refused(model="gpt-5")
    assert refusal.status == ("INVALID_ARGUMENT" if isinstance(front, OF_GRPC) else "NOT_FOUND")
    assert '"gpt-5"' in refusal.message
    assert '"quire-tiny"' in refusal.message
    if not isinstance(front, (Messages, KServe)):
        assert (refusal.reason, refusal.field) == ("MODEL_NOT_FOUND", "model")


@over(FRONTS)
@STREAMS
async def test_a_refusal_of_the_scheduler_is_the_answer(rig, front, streams):
    failure = {"reason": "QUEUE_FULL", "message": "the queue is full", "retry_after_ms": 2000}
    rig.scheduler.refusal.append(scheduler_pb2.RequestFailure(code=code_pb2.RESOURCE_EXHAUSTED, **failure))
    refusal = await front.refused(streams=streams)
    assert (refusal.status, refusal.message, refusal.retry_after_s) == ("RESOURCE_EXHAUSTED", "the queue is full", 2)
    assert refusal.reason == (None if isinstance(front, Messages) else "QUEUE_FULL")
    late = scheduler_pb2.RequestFailure(code=code_pb2.DEADLINE_EXCEEDED, reason="LATE", message="late")
    rig.scheduler.refusal.append(late)
    refusal = await front.refused(streams=streams)
    assert refusal.status == "DEADLINE_EXCEEDED"


@over(FRONTS)
@STREAMS
async def test_a_failure_in_the_middle_ends_the_answer(rig, front, streams):
    rig.scheduler.rule, rig.scheduler.step_delay_s = counting_rule, 0.01
    asking = asyncio.create_task(front.ask(streams=streams, max_tokens=500))
    await rig.scheduler.until(lambda: any(live.num_emitted > 3 for live in rig.scheduler.live.values()))
    failure = {"code": code_pb2.INTERNAL, "reason": "NUMERICS", "message": "logits are not finite"}
    rig.scheduler.fail(rig.scheduler.submits[-1].handle, **failure)
    answer = await asking
    refusal = answer.refusal
    assert refusal is not None
    assert (answer.finish, bool(answer.pieces)) == (None, streams)
    assert refusal.message == "logits are not finite"
    assert refusal.reason == (None if isinstance(front, Messages) else "NUMERICS")
    # The HTTP status of a stream was sent before the error.
    assert refusal.status == ("" if streams and not isinstance(front, (*OF_GRPC, KServe)) else "INTERNAL")


@over(FRONTS)
@STREAMS
@pytest.mark.parametrize("num_tokens", [0, 4])
async def test_a_client_that_leaves_takes_its_request_with_it(rig, front, streams, num_tokens):
    rig.scheduler.rule, rig.scheduler.step_delay_s = counting_rule, 0.01
    if not num_tokens:
        rig.scheduler.emits.clear()
    asking = asyncio.create_task(front.ask(streams=streams, max_tokens=900))
    await rig.scheduler.until(lambda: any(each.num_emitted >= num_tokens for each in rig.scheduler.live.values()))
    asking.cancel()
    await asyncio.wait([asking])
    await rig.scheduler.until(lambda: rig.scheduler.aborted)
    assert not rig.scheduler.live
    async with asyncio.timeout(30):
        await rig.gateway.gateway._models.default.ledger.wait_until_empty()


@over([GrpcGenerate, GrpcChat, Completions, OpenAiChat])
@STREAMS
async def test_an_id_is_of_one_request_at_a_time_which_is_cancelled_by_it(rig, front, streams):
    rig.scheduler.emits.clear()
    asking = asyncio.create_task(front.ask(streams=streams, request_id="mine"))
    await rig.scheduler.until(lambda: rig.scheduler.live)
    second = (await front.ask(streams=streams, request_id="mine")).refusal
    assert second is not None
    assert (second.status, second.reason) == ("ALREADY_EXISTS", "REQUEST_ID_IN_USE")
    assert "mine" in second.message
    await rig.gateway.generation.Cancel(generation_pb2.CancelRequest(request_id="mine"))
    assert (await asking).reason == "CANCELLED_BY_ID"
    await rig.scheduler.until(lambda: rig.scheduler.aborted == ["mine"])
    rig.scheduler.emits.set()
    assert (await front.ask(streams=streams, request_id="mine")).text == TEXT


@over(CHATS)
@FORMS
async def test_reasoning_text_and_calls_come_apart(rig, front, streams, step):
    rig.says(REASONED)
    rig.scheduler.tokens_per_step = step
    answer = await front.ask("Is it warm in Rome?", streams=streams, tools=[WEATHER], max_tokens=300)
    assert (answer.reasoning, answer.text, answer.finish) == ("I need it.", "Let me see.", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == [
        ("get_weather", {"city": "Rome"})
    ] * 2


@over(fronts_that_take("tools", "stop"))
async def test_stop_strings_are_those_of_the_content(rig, front):
    rig.says("<think>\nDone here.\n</think>\n\nAll is Done here.")
    answer = await front.ask(stop=["Done"], max_tokens=200)
    assert (answer.reasoning, answer.text, answer.stop) == ("Done here.", "All is ", "Done")


@over([each for each in CHATS if each is not GrpcChat])
@pytest.mark.parametrize("choice", [None, "auto", "none", "required", "get_weather"])
async def test_tools_and_their_choice_are_in_the_prompt_and_the_constraint_as_over_grpc(rig, front, choice):
    rig.says(CALL)
    asked: dict[str, Any] = {"tools": [WEATHER]} | ({} if choice is None else {"tool_choice": choice})
    for each in (front, GrpcChat(rig.gateway)):
        assert (await each.ask(**asked)).refusal is None
    ours, theirs = rig.scheduler.submits
    assert prompt_of(ours) == prompt_of(theirs)
    assert constraint_of(ours) == constraint_of(theirs)
    assert (constraint_of(ours) is None) == (choice == "none")


@over(fronts_that_take("schema"))
async def test_a_format_of_the_answer_is_its_constraint(rig, front):
    await front.ask(schema=WEATHER_SCHEMA)
    (submit,) = rig.scheduler.submits
    constraint = constraint_of(submit)
    assert constraint is not None
    assert json.loads(constraint.json_schema) == WEATHER_SCHEMA
    # In a chat, the text after the reasoning.
    assert constraint.begins_after == ("</think>" if isinstance(front, CHATS) else "")


def tool(**fields) -> dict[str, Any]:
    return WEATHER | fields


NAMES = {GrpcChat: "name", OpenAiChat: "function.name", Responses: "name", Messages: "name"}
PARAMETERS = {
    GrpcChat: "parameters", OpenAiChat: "function.parameters", Responses: "parameters", Messages: "input_schema"
}  # fmt: skip
CHOICES = {GrpcChat: "name", OpenAiChat: "function.name", Responses: "name", Messages: "name"}


@pytest.mark.parametrize(
    ("fields", "fields_at_fault", "says"),
    [
        ({"tools": [tool(name="a b")]}, {front: f"tools[0].{name}" for front, name in NAMES.items()}, '"a b"'),
        ({"tools": [WEATHER] * 2}, {front: f"tools[1].{name}" for front, name in NAMES.items()}, "must be unique"),
        (
            {"tools": [tool(parameters={"not": {}}, strict=True)]},
            {front: f"tools[0].{name}" for front, name in PARAMETERS.items()},
            '"not"',
        ),
        (
            {"tools": [WEATHER], "tool_choice": "other"},
            {front: f"tool_choice.{name}" for front, name in CHOICES.items()},
            "other",
        ),
        (
            {"tools": [], "tool_choice": "required"},
            dict.fromkeys(CHATS, "tool_choice") | {GrpcChat: "tool_choice.mode"},
            "tools",
        ),
    ],
    ids=["name", "twice", "parameters", "choice", "none"],
)
@over(CHATS)
async def test_what_is_wrong_with_tools_is_named_as_its_front_has_it(rig, front, fields, fields_at_fault, says):
    refusal = await front.refused(**fields)
    field = fields_at_fault[type(front)]
    assert refusal.status == "INVALID_ARGUMENT"
    assert says in refusal.message
    if isinstance(front, Messages):
        assert field in refusal.message
    else:
        assert refusal.field == field
    assert not rig.scheduler.submits


async def test_a_gateway_that_drains_finishes_what_runs_and_refuses_what_is_new_over_every_front(scheduler):
    scheduler.emits.clear()
    async with running_gateway(scheduler) as gateway:
        fronts = [front(gateway) for front in FRONTS]
        running = [asyncio.create_task(front.ask(streams=True, max_tokens=9)) for front in fronts]
        await scheduler.until(lambda: len(scheduler.live) == len(fronts))
        stopping = asyncio.create_task(gateway.gateway.stop(60))
        await asyncio.sleep(0)
        for front in fronts:
            refusal = await front.refused()
            assert refusal.status == "UNAVAILABLE"
            assert isinstance(front, Messages) or refusal.reason == "DRAINING"
        scheduler.emits.set()
        for answer in await asyncio.gather(*running):
            assert (answer.finish, answer.usage and answer.usage[1], answer.refusal) == ("length", 9, None)
        await stopping


async def test_without_a_scheduler_every_front_is_unavailable():
    async with running_gateway(schedulers=("127.0.0.1:1",), connect_timeout=0.05) as gateway:
        for front in FRONTS:
            refusal = await front(gateway).refused()
            assert refusal.status == "UNAVAILABLE"
            assert front is Messages or refusal.reason == "NO_SCHEDULER"
        listing = gateway.models.ListModels(model_pb2.ListModelsRequest())
        pinning = gateway.prefixes.PinPrefix(prefix_pb2.PinPrefixRequest(text="hello"))
        assert [(await error_of(call)).reason for call in (listing, pinning)] == ["NO_SCHEDULER"] * 2
        models = (await gateway.http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [("quire-tiny", None)]
