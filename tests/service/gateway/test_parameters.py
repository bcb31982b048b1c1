"""What a request asks of the sampler reaches the scheduler; what the gateway does itself shows in the answer."""

from tokenizers import Tokenizer

from quire.arrays import decode_int32
from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from quire.model_source import resolve_model
from tests.support.fake_scheduler import scripted
from tests.support.gateway_process import collect, stream_request
from tests.support.parameters import row_sampling

TOKENIZER = Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


async def test_all_parameters_reach_the_scheduler(gateway, scheduler):
    sampling = common_pb2.SamplingParameters(
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={7: -100.0, 8: 1.5},
        allowed_token_ids=[9, 8, 9],
        bad_words=["fox"],
    )
    request = stream_request(sampling=sampling, output=common_pb2.OutputOptions(prompt_logprobs=3))
    request.stopping.min_tokens = 2
    await collect(gateway.generation.GenerateStream(request))
    (submit,) = scheduler.submits
    row = row_sampling(submit)
    assert row.sampling == common_pb2.SamplingParameters(
        temperature=0,
        top_k=0,
        top_p=1,
        min_p=0,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={7: -100.0, 8: 1.5},
        allowed_token_ids=[9, 8],
    )
    assert [list(each.ids) for each in row.bad_token_sequences] == [ids_of("fox"), ids_of(" fox")]
    assert row.stopping == common_pb2.StoppingParameters(min_tokens=2, stop_token_ids=[2, 6])
    # What the scheduler decides on, and no more.
    assert submit.sampling == common_pb2.SamplingParameters(seed=submit.sampling.seed, n=1, best_of=1)
    assert submit.output.prompt_logprobs == 3


async def test_prompt_logprobs_are_in_both_kinds_of_answer(gateway, scheduler):
    scheduler.repeats_events = True
    options = common_pb2.OutputOptions(prompt_logprobs=0)
    prompt = common_pb2.TokenIds(ids=[50, 60, 70])
    stream = await collect(gateway.generation.GenerateStream(stream_request(None, token_ids=prompt, output=options)))
    request = generation_pb2.GenerateRequest(token_ids=prompt, output=options)
    request.stopping.max_tokens = 2
    answer = await gateway.generation.Generate(request)
    for reported in (stream.completed.prompt_logprobs, answer.prompt_logprobs):
        assert [(entry.chosen.token_id, entry.chosen.logprob) for entry in reported] == [(60, -1.0), (70, -2.0)]


async def test_prompt_logprobs_survive_a_scheduler_that_dies(gateway, scheduler):
    scheduler.step_delay_s = 0.02
    request = stream_request(max_tokens=20, output=common_pb2.OutputOptions(prompt_logprobs=0))
    call = aiter(gateway.generation.GenerateStream(request))
    await anext(call)
    await scheduler.restart()
    events = [event async for event in call]
    prompt = decode_int32(scheduler.submits[0].prompt_token_ids, "prompt").tolist()
    reported = events[-1].completed.prompt_logprobs
    assert len(scheduler.submits) == 2
    assert [entry.chosen.token_id for entry in reported] == prompt[1:]


async def test_stop_strings_wait_for_min_tokens_and_may_be_kept(gateway, scheduler):
    text = "The fox ran. The fox slept."
    scheduler.rule = scripted(ids_of(text))
    request = stream_request(max_tokens=100)
    request.stopping.stop.append("fox")
    request.stopping.min_tokens = len(ids_of("The fox ran."))
    request.stopping.include_stop_string = True
    stream = await collect(gateway.generation.GenerateStream(request))
    assert stream.text == "The fox ran. The fox"
    assert stream.finished.stop_string == "fox"
