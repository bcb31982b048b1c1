"""What gateways ask of schedulers where callers and flags leave it to them, or go to the limit, a real one takes."""

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from tests.support.fake_worker import FakeWorkerConfig
from tests.support.two_gateways import two_gateways

POOL = FakeWorkerConfig()


async def test_sequences_share_out_a_pool_that_has_not_the_whole_context_for_each(tmp_path):
    num_sequences = 8
    request = generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[5, 6, 7]))
    request.sampling.n = num_sequences
    request.stopping.ignore_eos = True
    async with two_gateways(tmp_path) as gateways:
        answer = await gateways.first.generation.Generate(request, timeout=30)
    num_tokens = POOL.num_blocks // num_sequences * POOL.block_size + 1 - 3
    assert num_tokens < POOL.max_model_len - 3
    assert [len(sequence.token_ids) for sequence in answer.sequences] == [num_tokens] * num_sequences
    assert {sequence.finish_reason for sequence in answer.sequences} == {common_pb2.FINISH_REASON_LENGTH}


async def test_the_longest_grace_of_a_gateway_is_taken(tmp_path):
    async with two_gateways(tmp_path, reconnect_grace=600.0) as gateways:
        request = generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[5, 6, 7]))
        request.stopping.max_tokens = 1
        answer = await gateways.first.generation.Generate(request, timeout=30)
    assert len(answer.sequences[0].token_ids) == 1
