"""Beam search finds what transformers finds: the same hypotheses in the same order, with the same scores.

The core drives the worker's real parts in one process.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from scheduler_svc.core.beam_search import BeamParameters, EarlyStopping
from scheduler_svc.core.config import PolicyKind, PreemptionMode
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.sequence import FinishReason
from tests.support.in_process import InProcessReplica, config_of, load_worker
from tests.support.models import VOCAB_SIZE, make_shape
from tests.support.sampling import make_row_sampling
from worker_svc.settings import WorkerSettings

LENGTHS = (1, 8, 17, 40)
PROMPTS_OF_A_LENGTH = 3
SPARE_PROMPTS = 3
WIDTHS = (2, 4, 6)
STOP_TOKEN_IDS = tuple(range(5, VOCAB_SIZE, 32))
"""So many that among random texts of 24 tokens some meet one and some do not."""

_MANY_STOP_TOKEN_IDS = tuple(range(5, VOCAB_SIZE, 6))
"""So many that a search may end before `max_new_tokens`, by each rule at another time."""

_PAD = 0
_NOISE = 1e-5
"""More than two computations of one log probability differ by, and far less than most gaps between candidates."""
_NUM_NOISY = 2


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How to search, in the words of transformers' `generate`; `early_stopping` is a bool or "never"."""

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    max_new_tokens: int = 24
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = STOP_TOKEN_IDS


@dataclass(frozen=True, slots=True)
class Found:
    """One hypothesis: its output, the stop token that ended it included, and its score."""

    token_ids: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True)
class BeamCase:
    """A prompt, how to search after it, and all hypotheses of transformers, best first."""

    prompt: tuple[int, ...]
    options: BeamOptions
    expected: tuple[Found, ...]


_VARIANTS = (
    BeamOptions(0),
    BeamOptions(0, early_stopping=True, min_new_tokens=3, stop_token_ids=_MANY_STOP_TOKEN_IDS),
    BeamOptions(0, length_penalty=2.0, early_stopping="never", stop_token_ids=_MANY_STOP_TOKEN_IDS),
    BeamOptions(0, length_penalty=0.0, min_new_tokens=9),
    BeamOptions(0, length_penalty=0.5, stop_token_ids=_MANY_STOP_TOKEN_IDS),
    BeamOptions(0, length_penalty=-0.2, early_stopping="never", max_new_tokens=17),
    BeamOptions(0, length_penalty=3.0, max_new_tokens=1),
    BeamOptions(0, length_penalty=2.0, stop_token_ids=_MANY_STOP_TOKEN_IDS),
)


def make_beam_cases(model: PreTrainedModel, seed: int) -> list[BeamCase]:
    """Some random prompts of each length, each searched at every width, in random order.

    Where two candidates are so close that rounding decides between them, another prompt is taken.
    """
    rng = random.Random(seed)
    variants = cycle(_VARIANTS)
    cases: list[BeamCase] = []
    for length in LENGTHS:
        prompts = [_random_prompt(rng, length) for _ in range(PROMPTS_OF_A_LENGTH + SPARE_PROMPTS)]
        for width in WIDTHS:
            cases += _clear_cases(model, prompts, replace(next(variants), num_beams=width))
    rng.shuffle(cases)
    return cases


def _random_prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length))


def _clear_cases(model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], options: BeamOptions) -> list[BeamCase]:
    """The first prompts whose search finds the same when a little noise is added to each log probability."""
    # All in one batch: a step of transformers' search costs little more for three times the beams.
    searches = _searches(model, [*prompts] * (1 + _NUM_NOISY), options)
    found = [searches[index :: len(prompts)] for index in range(len(prompts))]
    clear = [
        BeamCase(prompt, options, each)
        for prompt, (each, *others) in zip(prompts, found, strict=True)
        if all(_outputs(other) == _outputs(each) for other in others)
    ]
    if len(clear) < PROMPTS_OF_A_LENGTH:
        raise RuntimeError(f"{len(clear)} of {len(prompts)} searches are clear; expected {PROMPTS_OF_A_LENGTH}")
    return clear[:PROMPTS_OF_A_LENGTH]


def _outputs(found: Sequence[Found]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in found]


class _Noise(LogitsProcessor):
    """Adds a little to each log probability, but in the first part of the batch; other numbers at each step."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = _NOISE * torch.randn(scores.shape, generator=self._generator)
        noise[: len(scores) // (1 + _NUM_NOISY)] = 0.0
        return scores + noise


def _searches(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], options: BeamOptions
) -> list[tuple[Found, ...]]:
    """All hypotheses of each prompt, best first; with noise for all but the first third of them. The prompts are of one
    length, so that nothing is padded."""
    batch = torch.tensor([list(prompt) for prompt in prompts])
    width = options.num_beams
    with torch.inference_mode():
        answer = model.generate(  # pyright: ignore[reportCallIssue]
            batch,
            attention_mask=torch.ones_like(batch),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            max_new_tokens=options.max_new_tokens,
            min_new_tokens=options.min_new_tokens,
            eos_token_id=list(options.stop_token_ids),
            pad_token_id=_PAD,
            logits_processor=LogitsProcessorList([_Noise()]),
            return_dict_in_generate=True,
            output_scores=True,
        )
    outputs = answer.sequences[:, batch.shape[1] :].tolist()
    scores = answer.sequences_scores.tolist()
    found = [Found(_without_padding(output, options), score) for output, score in zip(outputs, scores, strict=True)]
    return [tuple(found[start : start + width]) for start in range(0, len(found), width)]


def assert_found(
    case: BeamCase, token_ids: Sequence[Sequence[int]], cumulative_logprobs: Sequence[float | None]
) -> None:
    """What was served is what transformers found: the same outputs, and the same scores to 1e-4."""
    assert [tuple(each) for each in token_ids] == _outputs(case.expected)
    for each, cumulative, ids in zip(case.expected, cumulative_logprobs, token_ids, strict=True):
        assert cumulative is not None, "a hypothesis has no log probability"
        score = cumulative / len(ids) ** case.options.length_penalty
        assert abs(score - each.score) <= 1e-4, f"score is {score}, transformers has {each.score}"


def _without_padding(output: list[int], options: BeamOptions) -> tuple[int, ...]:
    """The output up to its first stop token; without one it has `max_new_tokens`, as all others are padded to it."""
    ends = (index + 1 for index, token_id in enumerate(output) if token_id in options.stop_token_ids)
    return tuple(output[: next(ends, len(output))])


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
