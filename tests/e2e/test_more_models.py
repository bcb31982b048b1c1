"""Families beyond the first three, Quire's own and those of transformers: each token is the likeliest one after those
before it, as transformers finds.

The core drives the worker's real parts in one process. What families differ in is in the tests of
tests/unit/worker_svc/models, for all of them; here are those whose pool or attention is of a kind of its own.
"""

import random
from pathlib import Path

import pytest

from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey, RowSampling
from tests.support.greedy import likeliest_after
from tests.support.in_process import InProcessReplica, config_of, load_worker
from tests.support.models import SHAPES, VOCAB_SIZE, make_shape
from tests.support.more_models import FAMILIES, make_family
from worker_svc.settings import WorkerSettings

pytestmark = pytest.mark.extended

NUM_PROMPTS, MAX_TOKENS = 16, 16
# Shorter and longer than the blocks, the chunks and the sliding windows.
LENGTHS = (1, 7, 8, 17, 20, 21, 40, 60)
# 256 slots for requests that come to 690 tokens; the longest prompt takes two steps at least.
SMALL_POOL = WorkerSettings(
    device="cpu", block_size=8, num_gpu_blocks=32, swap_space=1 << 20, max_num_seqs=16, max_num_batched_tokens=48
)


def make_prompts(seed: int) -> list[list[int]]:
    """Two prompts of each length, in random order."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in 2 * LENGTHS]
    rng.shuffle(prompts)
    return prompts


def greedy_request(handle: int, prompt: list[int]) -> Request:
    key = RequestKey(ClientId(0), Handle(handle))
    return Request(key, f"greedy-{handle}", prompt, RowSampling(seed=0), MAX_TOKENS)


# Biases by distance, windows, heads of several sizes, layers that attend several times, attention sinks; odd shapes.
PECULIAR = (
    *("bloom", "falcon-alibi", "gpt-neo-alternating", "deepseek-v2", "gemma4-shared", "longcat-flash", "hrm-text"),
    *("gpt-oss", "mimo-v2", "mistral-sliding", "gpt2-80", "opt-post-norm-projected-64", "llama-mqa-80"),
)


@pytest.mark.parametrize("family", PECULIAR)
def test_greedy_output_equals_transformers_while_blocks_run_out(family: str, tmp_path: Path) -> None:
    model = make_shape(tmp_path, family) if family in SHAPES else make_family(tmp_path, FAMILIES[family])
    prompts = make_prompts(seed=1)
    worker = load_worker(tmp_path, SMALL_POOL)
    replica = InProcessReplica(worker, config_of(worker))
    for handle, prompt in enumerate(prompts):
        replica.submit(greedy_request(handle, prompt))
    replica.run_until_idle()
    outputs = [replica.outputs[handle][0].token_ids for handle in range(NUM_PROMPTS)]
    assert {len(output) for output in outputs} == {MAX_TOKENS}
    assert outputs == likeliest_after(model, prompts, outputs)
    assert len({tuple(output) for output in outputs}) > NUM_PROMPTS // 2, "the model says the same to everybody"
    assert replica.scheduler.num_preemptions > 0
