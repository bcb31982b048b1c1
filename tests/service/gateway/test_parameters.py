"""What a request asks of the sampler reaches the scheduler; what the gateway does itself shows in the answer."""

from tokenizers import Tokenizer

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from quire.model_source import resolve_model
from tests.support.gateway_process import collect, stream_request

TOKENIZER = Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


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
