"""Beam search finds what transformers finds: the same hypotheses in the same order, with the same scores.

The core drives the worker's real parts in one process.
"""

from pathlib import Path

from scheduler_svc.core.beam_search import BeamParameters, EarlyStopping
from scheduler_svc.core.config import PolicyKind, PreemptionMode
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.sequence import FinishReason
from tests.support.beam_reference import BeamCase, assert_found, make_beam_cases
from tests.support.in_process import InProcessReplica, config_of, load_worker
from tests.support.models import make_shape
from tests.support.sampling import make_row_sampling
from worker_svc.settings import WorkerSettings

# 128 rows of up to 64 tokens and 272 slots. The host has room for most that leave.
SMALL_POOL = WorkerSettings(
    device="cpu", block_size=8, num_gpu_blocks=34, swap_space=1 << 20, max_num_seqs=128, max_num_batched_tokens=300
)
EARLY_STOPPING = {False: EarlyStopping.FALSE, True: EarlyStopping.TRUE, "never": EarlyStopping.NEVER}


def beam_request(handle: int, case: BeamCase) -> Request:
    options = case.options
    return Request(
        RequestKey(ClientId(0), Handle(handle)),
        f"beams-{handle}",
        list(case.prompt),
        RowSampling(0, make_row_sampling(min_tokens=options.min_new_tokens, stop_token_ids=options.stop_token_ids)),
        options.max_new_tokens,
        frozenset(options.stop_token_ids),
        num_sequences=options.num_beams,
        num_returned=options.num_beams,
        tenant=f"tenant-{handle % 3}",
        priority=handle % 5,
        beam=BeamParameters(options.num_beams, options.length_penalty, EARLY_STOPPING[options.early_stopping]),
    )


def test_searches_equal_transformers_while_blocks_run_out(tmp_path: Path) -> None:
    # Every variant of the options at several widths, after prompts shorter and longer than a block.
    cases = make_beam_cases(make_shape(tmp_path, "llama-gqa-untied-32", seed=3), seed=1)
    worker = load_worker(tmp_path, SMALL_POOL)
    replica = InProcessReplica(
        worker, config_of(worker, preemption_mode=PreemptionMode.AUTO, policy=PolicyKind.PRIORITY)
    )
    for handle, case in enumerate(cases):
        replica.submit(beam_request(handle, case))
    replica.run_until_idle()
    for handle, case in enumerate(cases):
        outputs = replica.outputs[handle]
        assert_found(case, [each.token_ids for each in outputs], [each.cumulative_logprob for each in outputs])
    ends = [each.reason is FinishReason.STOP for handle in range(len(cases)) for each in replica.outputs[handle]]
    assert 0.1 < sum(ends) / len(ends) < 0.9, "too few hypotheses end by a stop token, or too many"
    scheduler = replica.scheduler
    assert scheduler.num_swap_outs > 10
    assert len(replica.usage) == len(cases)
    assert scheduler.batch.blocks.pool.num_used == scheduler.swap_space.pool.num_used == 0
