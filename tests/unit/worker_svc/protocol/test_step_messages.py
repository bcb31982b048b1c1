"""A StepRequest that is wrong by itself is refused with the name of the fault; a right one arrives unchanged."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.common.v1 import common_pb2
from quire.common.v1.common_pb2 import RowSampling, SamplingParameters, SequenceBias
from quire.messages.arrays import encode_float32, encode_int32
from quire.messages.layer_groups import LayerGroups
from quire.rpc.errors import FailedPrecondition, InvalidArgument
from quire.service.compatibility import WORKER_PROTOCOL
from quire.worker.v1 import worker_pb2
from tests.support.logprobs import Line, columns_of, lines_by_row
from tests.support.worker_client import make_assign, make_batch
from worker_svc.protocol.step_messages import StepDecoder, epoch_of, info_message, protocol_of, result_message
from worker_svc.step import (
    ModelGeometry,
    PoolGeometry,
    PromptLogprobs,
    RowCandidates,
    StepOutput,
    StepTimings,
    TokenLogprobs,
    WorkerInfo,
    WorkerLimits,
)

INFO = WorkerInfo(
    worker_generation=77,
    rank=0,
    world_size=1,
    pool=PoolGeometry(4, 32, 8, 2, 3, 16, "float32", 3072),
    model=ModelGeometry("TinyForCausalLM", "float32", 50, 20, "cpu"),
    limits=WorkerLimits(6, 12, 2, 8),
)
DECODER = StepDecoder(INFO)


def make_request(**fields: Any) -> worker_pb2.StepRequest:
    return worker_pb2.StepRequest(step_id=1, scheduler_epoch=1, worker_generation=77, **fields)


def operations(**pairs: list[int]) -> worker_pb2.CacheOperations:
    return worker_pb2.CacheOperations(**{name: encode_int32(values) for name, values in pairs.items()})


def raw_batch(**columns: bytes) -> worker_pb2.Batch:
    batch = make_batch([0, 1], [1, 1], [0, 0])
    for name, value in columns.items():
        setattr(batch, name, value)
    return batch


def assign_request(**changes: Any) -> worker_pb2.StepRequest:
    assign = make_assign(0, [1, 2, 3], [0])
    for name, value in changes.items():
        setattr(assign, name, value)
    return make_request(assign=[assign])


def sampling_request(**sampling: Any) -> worker_pb2.StepRequest:
    return make_request(assign=[make_assign(0, [1, 2, 3], [0], **sampling)])


REFUSED: list[tuple[worker_pb2.StepRequest, str, str]] = [
    (make_request(cache_operations=operations(swap_out=[32, 0])), "cache_operations.swap_out", "32"),
    (make_request(cache_operations=operations(swap_out=[0, 8])), "cache_operations.swap_out", "8"),
    (make_request(cache_operations=operations(swap_in=[8, 0])), "cache_operations.swap_in", "8"),
    (make_request(cache_operations=operations(copy=[1, 2, 3])), "cache_operations.copy", "12 bytes"),
    (make_request(cache_operations=operations(copy=[1, 2, 3, 2])), "cache_operations.copy", "block 2 twice"),
    (make_request(cache_operations=operations(copy=[1, 2, 2, 3])), "cache_operations.copy", "as source and as"),
    (make_request(cache_operations=operations(swap_out=[0, 4, 1, 4])), "cache_operations.swap_out", "host block 4"),
    (make_request(release=encode_int32([6])), "release", "6"),
    (make_request(release=encode_int32([2, 2])), "release", "row 2 twice"),
    (make_request(fork=encode_int32([0, 6])), "fork", "6"),
    (make_request(fork=encode_int32([0, 2, 1, 2])), "fork", "child row 2 twice"),
    (make_request(reseed=[worker_pb2.ReseedRow(row=6)]), "reseed[0].row", "below 6"),
    (make_request(reseed=[worker_pb2.ReseedRow(row=1), worker_pb2.ReseedRow(row=1)]), "reseed", "row 1 twice"),
    (
        make_request(set_tokens=[worker_pb2.SetTokens(row=1, position=p, token_ids=encode_int32([1])) for p in (1, 2)]),
        "set_tokens",
        "row 1 twice",
    ),
    (make_request(set_tokens=[worker_pb2.SetTokens(row=9)]), "set_tokens[0].row", "below 6"),
    (make_request(set_tokens=[worker_pb2.SetTokens(row=1)]), "set_tokens[0].token_ids", "at least 1"),
    (
        make_request(set_tokens=[worker_pb2.SetTokens(row=1, position=20, token_ids=encode_int32([1]))]),
        "set_tokens[0].token_ids",
        "at most 20",
    ),
    (make_request(block_table_deltas=encode_int32([6, 0, 0])), "block_table_deltas", "column 0"),
    (make_request(block_table_deltas=encode_int32([0, 1, 3, 0, 1, 4])), "block_table_deltas", "block 1 of row 0 twice"),
    (assign_request(row=6), "assign[0].row", "below 6"),
    (assign_request(token_ids=b"", num_prompt_tokens=0), "assign[0].token_ids", "empty"),
    (assign_request(token_ids=encode_int32([1, 50, 2])), "assign[0].token_ids", "50"),
    (assign_request(token_ids=encode_int32([1] * 21)), "assign[0].token_ids", "at most 20"),
    (assign_request(num_prompt_tokens=4), "assign[0].num_prompt_tokens", "4"),
    (assign_request(block_table=encode_int32([32])), "assign[0].block_table", "32"),
    (assign_request(block_table=encode_int32([1, 2, 3, 4, 5, 6])), "assign[0].block_table", "at most 5"),
    (make_request(assign=[make_assign(0, [1], [0]), make_assign(0, [1], [1])]), "assign", "row 0 twice"),
    (sampling_request(num_candidates=0), "assign[0].num_candidates", "at least 1"),
    (make_request(batch=raw_batch(rows=encode_int32([0, 6]))), "batch.rows", "6"),
    (make_request(batch=raw_batch(rows=encode_int32([0, 0]))), "batch.rows", "row 0 twice"),
    (make_request(batch=raw_batch(num_new_tokens=encode_int32([1]))), "batch.num_new_tokens", "1 entries"),
    (make_request(batch=raw_batch(num_new_tokens=encode_int32([1, 0]))), "batch.num_new_tokens", "0"),
    (make_request(batch=raw_batch(num_new_tokens=encode_int32([6, 7]))), "batch.num_new_tokens", "at most 12"),
    (make_request(batch=raw_batch(num_new_tokens=encode_int32([2**31 - 1] * 2))), "batch.num_new_tokens", "21"),
    (make_request(batch=raw_batch(num_computed_tokens=encode_int32([0, -1]))), "batch.num_computed_tokens", "-1"),
    (
        make_request(batch=make_batch([0], [3], [18])),
        "batch.num_new_tokens",
        "row 0 to 21 tokens; a sequence has at most 20",
    ),
    (make_request(batch=raw_batch(samples=encode_int32([0, 0, 0, 1]))), "batch.samples", "row 0 twice"),
    (make_request(batch=raw_batch(samples=encode_int32([0, 3]))), "batch.samples", "row 3"),
    (make_request(sealed_block_ids=encode_int32([32]), sealed_hashes=b"h" * 32), "sealed_block_ids", "32"),
    (make_request(sealed_block_ids=encode_int32([1]), sealed_hashes=b"h" * 31), "sealed_hashes", "31 bytes"),
]


@pytest.mark.parametrize(("request_message", "field", "detail"), REFUSED, ids=[f"{f}-{d}" for _, f, d in REFUSED])
def test_a_wrong_field_is_refused_by_name_with_its_value(
    request_message: worker_pb2.StepRequest, field: str, detail: str
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        DECODER.decode(request_message)
    assert raised.value.violations[0].field == field
    assert detail in raised.value.message
    assert field in raised.value.message


NAN, INF = float("nan"), float("inf")
REFUSED_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.5}, "sampling.temperature is -0.5; it must be at least 0"),
    ({"temperature": NAN}, "sampling.temperature is nan; it must be finite"),
    ({"top_p": 0.0}, "sampling.top_p is 0; it must be above 0 and at most 1"),
    ({"min_p": -0.5}, "sampling.min_p is -0.5; it must be from 0 to 1"),
    ({"presence_penalty": NAN}, "sampling.presence_penalty is nan; it must be finite"),
    ({"frequency_penalty": INF}, "sampling.frequency_penalty is inf; it must be finite"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty is 0; it must be above 0"),
    ({"logit_bias": {50: 1.0}}, "sampling.logit_bias holds token 50; token ids of this model are below 50"),
    ({"logit_bias": {3: NAN}}, "sampling.logit_bias holds nan; it must be finite"),
    ({"allowed_token_ids": [50]}, "sampling.allowed_token_ids holds token 50; token ids of this model are below 50"),
    ({"bad_token_sequences": [[1], []]}, "bad_token_sequences[1] is empty; a sequence has at least 1 token"),
    ({"bad_token_sequences": [[50]]}, "bad_token_sequences[0] holds token 50; token ids of this model are below 50"),
    ({"sequence_biases": [SequenceBias(bias=1.0)]}, "sequence_biases[0] is empty; a sequence has at least 1 token"),
    (
        {"sequence_biases": [SequenceBias(ids=[1], bias=INF)]},
        "sequence_biases[0] has the bias inf; it must be finite or -infinity",
    ),
    (
        {"sequence_biases": [SequenceBias(ids=[1], bias=NAN)]},
        "sequence_biases[0] has the bias nan; it must be finite or -infinity",
    ),
    (
        {"sequence_biases": [SequenceBias(ids=[1, 50])]},
        "sequence_biases[0] holds token 50; token ids of this model are below 50",
    ),
    ({"suppress_token_ids": encode_int32([50])}, "suppress_token_ids holds 50; values must be below 50"),
    ({"begin_suppress_token_ids": b"abc"}, "begin_suppress_token_ids has 3 bytes; expected a multiple of 4"),
    ({"logprobs": 9}, "output.logprobs is 9; the limit is 8"),
    ({"prompt_logprobs": 9}, "output.prompt_logprobs is 9; the limit is 8"),
]


@pytest.mark.parametrize(("sampling", "refusal"), REFUSED_SAMPLING, ids=[each for _, each in REFUSED_SAMPLING])
def test_sampling_that_is_wrong_is_refused_for_its_row_alone(sampling: dict[str, Any], refusal: str) -> None:
    request = make_request(assign=[make_assign(0, [1], [0], **sampling), make_assign(1, [1], [1], temperature=0.5)])
    wrong, right = DECODER.decode(request).row_changes.assign
    assert wrong.sampling.refusal == refusal
    assert (wrong.sampling.rules, wrong.sampling.prompt_logprobs, wrong.sampling.num_candidates) == (None, None, None)
    assert (right.sampling.refusal, right.sampling.parameters.temperature) == (None, 0.5)


def test_sampling_that_is_no_message_is_refused_for_its_row_alone() -> None:
    (assign,) = DECODER.decode(assign_request(row_sampling=b"\xff\xff")).row_changes.assign
    assert (assign.sampling.refusal or "").startswith("row_sampling is not a RowSampling message: ")


def test_a_parameter_of_a_newer_gateway_is_refused_for_its_row_and_not_ignored() -> None:
    # A field with number 100, a varint, in the parameters.
    newer = RowSampling(sampling=SamplingParameters.FromString(b"\xa0\x06\x01"))
    (assign,) = DECODER.decode(assign_request(row_sampling=newer.SerializeToString())).row_changes.assign
    assert assign.sampling.refusal == (
        "row_sampling has quire.common.v1.SamplingParameters.100, which this worker's release lacks: upgrade workers "
        "first"
    )


@pytest.mark.parametrize(
    "neutral",
    [
        {"repetition_penalty": 1.0, "presence_penalty": -0.0},
        {"repetition_penalty": 1.0, "stop_token_ids": [2]},
        # An eos id that the model cannot draw.
        {"min_tokens": 5, "stop_token_ids": [50]},
        {"min_tokens": 5},
    ],
    ids=str,
)
def test_values_that_change_no_logit_make_no_rules(neutral: dict[str, Any]) -> None:
    (assign,) = DECODER.decode(sampling_request(**neutral)).row_changes.assign
    assert assign.sampling.rules is None


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (9, 9), (50, 50), (51, 50), (2**32 - 1, 50)])
def test_candidates_have_no_limit_but_the_vocabulary(asked: int, given: int) -> None:
    (assign,) = DECODER.decode(sampling_request(num_candidates=asked)).row_changes.assign
    assert assign.sampling.num_candidates == given


def test_logit_rules_arrive_as_they_were_sent() -> None:
    request = sampling_request(
        prompt_logprobs=0,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.5,
        logit_bias={4: -100.0, 1: 0.5},
        allowed_token_ids=[49, 0],
        bad_token_sequences=[[1], [2, 3]],
        min_tokens=7,
        stop_token_ids=[2],
    )
    (assign,) = DECODER.decode(request).row_changes.assign
    rules = assign.sampling.rules
    assert rules is not None
    assert (assign.sampling.prompt_logprobs, assign.num_prompt_tokens) == (0, 3)
    assert (rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty) == (0.5, -0.25, 1.5)
    assert dict(zip(rules.bias_token_ids.tolist(), rules.bias_values.tolist(), strict=True)) == {4: -100.0, 1: 0.5}
    assert (rules.allowed_token_ids.tolist(), rules.stop_token_ids.tolist()) == ([49, 0], [2])
    assert [each.tolist() for each in rules.bad_sequences] == [[1], [2, 3]]
    assert rules.min_tokens == 7


def test_the_rules_of_the_model_arrive_as_they_were_sent() -> None:
    request = sampling_request(
        logit_bias={4: 1.5},
        suppress_token_ids=encode_int32([7, 4]),
        begin_suppress_token_ids=encode_int32([1, 49]),
        sequence_biases=[SequenceBias(ids=[2, 3], bias=0.5), SequenceBias(ids=[9], bias=-INF)],
        no_repeat_ngram_size=3,
    )
    (assign,) = DECODER.decode(request).row_changes.assign
    rules = assign.sampling.rules
    assert rules is not None
    assert (rules.bias_token_ids.tolist(), rules.bias_values.tolist()) == ([4, 7, 4], [1.5, -INF, -INF])
    assert (rules.first_excluded.tolist(), rules.no_repeat_ngram_size) == ([1, 49], 3)
    assert [(ids.tolist(), bias) for ids, bias in rules.sequence_biases] == [([2, 3], 0.5), ([9], -INF)]


def test_a_result_is_sent_with_all_its_parts() -> None:
    output = StepOutput(
        step_id=4,
        rows=np.array([2, 3, 5], np.int32),
        token_ids=np.array([8, 0, 0], np.int32),
        logprobs=TokenLogprobs(np.array([0], np.int32), columns_of([Line(-0.5, 1, [8, 9], [-0.5, -1.5])])),
        candidates=(RowCandidates(5, np.array([7], np.int32), np.array([-0.25], np.float32)),),
        failed_rows=(3, 5),
        refusals={5: "sampling.top_p is 7"},
        non_finite_chunks=(9, 1),
        timings=StepTimings(1, 2, 3, 2**40),
        prompt_logprobs=(
            PromptLogprobs(3, 17, columns_of([Line(-2.5, 4, [1], [-0.125]), Line(-3.0, 5, [2], [-0.25])])),
        ),
    )
    result = result_message(output).result
    assert result.step_id == 4
    assert result.rows == encode_int32([2, 3, 5])
    assert result.token_ids == encode_int32([8, 0, 0])
    assert result.non_finite_chunks == encode_int32([9, 1])
    assert lines_by_row(result) == {2: Line(-0.5, 1, [8, 9], [-0.5, -1.5])}
    assert result.candidates[0].token_ids == encode_int32([7])
    non_finite, refused = result.failures
    assert (non_finite.row, non_finite.reason) == (3, worker_pb2.ROW_FAILURE_REASON_NON_FINITE_LOGITS)
    assert (refused.row, refused.detail) == (5, "sampling.top_p is 7")
    assert refused.reason == worker_pb2.ROW_FAILURE_REASON_INVALID_SAMPLING
    (prompt,) = result.prompt_logprobs
    assert (prompt.row, prompt.first_position) == (3, 17)
    assert prompt.chosen_logprobs == encode_float32([-2.5, -3.0])
    assert prompt.chosen_ranks == encode_int32([4, 5])
    assert prompt.top_token_ids == encode_int32([1, 2])
    assert prompt.top_logprobs == encode_float32([-0.125, -0.25])
    assert result.timings.sample_us == 2**32 - 1


def test_a_stream_begins_with_an_epoch() -> None:
    attach = worker_pb2.RunRequest(attach=worker_pb2.Attach(protocol=WORKER_PROTOCOL.message(), scheduler_epoch=3))
    assert epoch_of(attach) == 3
    with pytest.raises(FailedPrecondition):
        epoch_of(worker_pb2.RunRequest())


def test_several_groups_of_layers_are_described_and_need_a_scheduler_that_knows_them() -> None:
    groups = LayerGroups(1, 2, window=5)
    info = replace(INFO, pool=replace(INFO.pool, groups=groups))
    pool = info_message(info).pool
    assert (pool.full_groups, pool.windowed_groups, pool.window) == (1, 2, 5)
    ours = protocol_of(info.pool)
    older = common_pb2.ProtocolVersions(oldest=2, newest=ours.oldest - 1)
    attach = worker_pb2.RunRequest(attach=worker_pb2.Attach(protocol=older))
    epoch_of(attach, protocol_of(INFO.pool))
    with pytest.raises(FailedPrecondition, match="upgrade the scheduler"):
        epoch_of(attach, ours)
    decoder = StepDecoder(info)
    (assigned,) = decoder.decode(assign_request(block_table=encode_int32([0, 4, 8]))).row_changes.assign
    assert assigned.block_table.tolist() == [0, 4, 8]
    deltas = encode_int32([0, 14, 1])
    assert decoder.decode(make_request(block_table_deltas=deltas)).row_changes.block_table_deltas.tolist() == [
        [0, 14, 1]
    ]
    with pytest.raises(InvalidArgument, match="values there must be below 15"):
        decoder.decode(make_request(block_table_deltas=encode_int32([0, 15, 1])))
    with pytest.raises(InvalidArgument, match="has 4 blocks; it must have as many of each of the 3 groups"):
        decoder.decode(assign_request(block_table=encode_int32([0, 4, 8, 1])))


def test_a_batch_composed_as_the_last_one_is_read_alike_and_its_other_fields_are_checked() -> None:
    decoder = StepDecoder(INFO)
    first = decoder.decode(make_request(batch=make_batch([0, 1], [1, 1], [0, 3]))).batch
    second = decoder.decode(make_request(batch=make_batch([0, 1], [1, 1], [1, 4]))).batch
    for name in ("rows", "num_new_tokens", "samples"):
        assert getattr(second, name).tolist() == getattr(first, name).tolist()
    assert second.num_computed_tokens.tolist() == [1, 4]
    for batch, problem in (
        (make_batch([0, 1], [1, 1], [1, 20]), "batch.num_computed_tokens holds 20"),
        (raw_batch(num_computed_tokens=encode_int32([1])), "has 1 entries; batch.rows has 2"),
        (make_batch([0, 0], [1, 1], [1, 4]), "row 0 twice"),
        # The decoder does not remember a refused one.
        (make_batch([0, 0], [1, 1], [1, 4]), "row 0 twice"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            decoder.decode(make_request(batch=batch))
