"""Beam search finds what transformers finds: the same hypotheses in the same order, with the same scores.

Once with the core driving the worker's real parts in one process, and once through all services.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from quire.client import BeamSearch, FinishReason, GeneratedSequence, GenerationOptions
from quire.client import EarlyStopping as ClientEarlyStopping
from scheduler_svc.core import sequence as core
from scheduler_svc.core.beam_search import BeamParameters, EarlyStopping
from scheduler_svc.core.config import PolicyKind, PreemptionMode
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey, RowSampling
from tests.support.beam_reference import LENGTHS, BeamCase, BeamOptions, assert_found, make_beam_cases
from tests.support.in_process import InProcessReplica, config_of, load_worker
from tests.support.metrics import read_metric
from tests.support.models import make_shape
from tests.support.ports import free_port
from tests.support.sampling import make_row_sampling
from tests.support.serving import serving
from worker_svc.settings import WorkerSettings

# 128 rows of up to 84 tokens and 272 slots. The host has room for most that leave.
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


def assert_both_kinds_of_end(ends_by_token: Sequence[bool]) -> None:
    """The references are worth comparing with: many hypotheses end early, and many do not."""
    share = sum(ends_by_token) / len(ends_by_token)
    assert 0.1 < share < 0.9, f"{share:.0%} of the hypotheses end with a stop token"


@dataclass(frozen=True, slots=True)
class Reference:
    """A model with random weights, where it lies, and what transformers finds with it."""

    directory: Path
    model: PreTrainedModel
    cases: list[BeamCase]


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """The reference of a shape and lengths of prompts, made once."""

    @cache
    def make(shape: str, lengths: tuple[int, ...] = LENGTHS) -> Reference:
        directory = tmp_path_factory.mktemp(shape)
        model = make_shape(directory, shape, seed=3)
        return Reference(directory, model, make_beam_cases(model, seed=1, lengths=lengths))

    return make


@pytest.mark.extended
@pytest.mark.parametrize(
    ("shape", "mode", "policy"),
    [
        ("gpt2-untied-64", PreemptionMode.SWAP, PolicyKind.FAIR),
        ("llama-gqa-untied-32", PreemptionMode.AUTO, PolicyKind.PRIORITY),
    ],
    ids=["gpt2-swap-fair", "llama-auto-priority"],
)
def test_150_searches_equal_transformers_while_blocks_run_out(
    shape: str, mode: PreemptionMode, policy: PolicyKind, reference_of: Callable[..., Reference]
) -> None:
    reference = reference_of(shape)
    cases, worker = reference.cases, load_worker(reference.directory, SMALL_POOL)
    replica = InProcessReplica(worker, config_of(worker, preemption_mode=mode, policy=policy))
    for handle, case in enumerate(cases):
        replica.submit(beam_request(handle, case))
    replica.run_until_idle()
    for handle, case in enumerate(cases):
        outputs = replica.outputs[handle]
        assert_found(case, [each.token_ids for each in outputs], [each.cumulative_logprob for each in outputs])
    reasons = [each.reason for handle in range(len(cases)) for each in replica.outputs[handle]]
    assert_both_kinds_of_end([reason is core.FinishReason.STOP for reason in reasons])
    scheduler = replica.scheduler
    assert scheduler.num_swap_outs > 50
    assert len(replica.usage) == len(cases)
    assert scheduler.batch.blocks.pool.num_used == scheduler.swap_space.pool.num_used == 0


def client_options(options: BeamOptions) -> GenerationOptions:
    early_stopping = ClientEarlyStopping(str(options.early_stopping).lower())
    return GenerationOptions(
        beam_search=BeamSearch(options.num_beams, options.length_penalty, early_stopping),
        n=options.num_beams,
        max_tokens=options.max_new_tokens,
        min_tokens=options.min_new_tokens,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=True,
    )


def assert_served(case: BeamCase, sequences: Sequence[GeneratedSequence]) -> None:
    assert [sequence.index for sequence in sequences] == list(range(case.options.num_beams))
    assert_found(case, [each.token_ids for each in sequences], [each.cumulative_logprob for each in sequences])
    for sequence in sequences:
        ends_by_token = sequence.token_ids[-1] in case.options.stop_token_ids
        assert sequence.finish_reason == (FinishReason.STOP if ends_by_token else FinishReason.LENGTH)


async def test_searches_through_all_services_equal_transformers_while_blocks_run_out(
    reference_of: Callable[..., Reference],
) -> None:
    reference = reference_of("llama-gqa-untied-32", lengths=(1, 17, 40))
    # 28 blocks hold 448 tokens; the host has room for more than all searches at once. How many leave depends on which
    # searches arrive together: about 30 do.
    limits = {"num_gpu_blocks": 28, "swap_space": 1 << 24, "max_num_seqs": 128, "preemption_mode": "swap"}
    port = free_port()
    async with serving(
        model=str(reference.directory), dtype="float32", scheduler_metrics_port=port, **limits
    ) as served:
        answers = await served.together(
            served.client.generate(case.prompt, client_options(case.options)) for case in reference.cases
        )
        num_swap_outs = await read_metric(port, "quire_scheduler_swap_outs_total")
    for case, answer in zip(reference.cases, answers, strict=True):
        assert_served(case, answer.sequences)
    ends = [each.finish_reason == FinishReason.STOP for answer in answers for each in answer.sequences]
    assert_both_kinds_of_end(ends)
    assert num_swap_outs > 10
