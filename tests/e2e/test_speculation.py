"""Text, log probabilities and ends have the same bits with drafts and without, whatever is drafted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.common.v1.common_pb2 import Constraint, RowSampling, SequenceBias
from quire.messages.arrays import encode_int32
from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.request import Request
from tests.support.models import make_model
from tests.support.tiers import parametrize_once
from tests.support.whole_engine import RightDrafter, Text, WholeEngine, WrongDrafter, make_request
from worker_svc.device.replay import RecordedDecodes

FLAGS = [
    "--max-num-seqs=24",
    "--num-gpu-blocks=400",
    "--max-model-len=512",
    "--num-threads=1",
    "--multi-step-ms=0",
]
MULTI_STEP = ["--multi-step-ms", "1000", "--max-drafts", "5"]
POOLS = {
    "bfloat16": ["--dtype", "bfloat16"],
    "float32": ["--dtype", "float32"],
    "int8 pool": ["--dtype", "bfloat16", "--kv-cache-dtype", "int8"],
    "int8 weights": ["--dtype", "bfloat16", "--quantization", "int8-weight-only"],
}
STOP = 1
MODEL_RULES = RowSampling(
    suppress_token_ids=encode_int32(range(3, 2000, 7)),
    begin_suppress_token_ids=encode_int32(range(4, 2000, 5)),
    sequence_biases=[SequenceBias(ids=[50], bias=3.0), SequenceBias(ids=[50, 50], bias=-np.inf)],
    no_repeat_ngram_size=2,
)


# At most two requests find room at once; others are preempted.
SWAP = {"num_blocks": 40, "preemption_mode": PreemptionMode.SWAP}
RECOMPUTE = {"num_blocks": 40, "preemption_mode": PreemptionMode.RECOMPUTE, "max_num_batched_tokens": 40}


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> tuple[WholeEngine, WholeEngine]:
    """Engines without drafts, and with up to five."""
    flags = [*FLAGS, *POOLS[request.param]]
    return WholeEngine(*flags), WholeEngine(*flags, "--speculate", "ngram", "--max-drafts", "5")


def make_requests(vocab_size: int) -> list[Request]:
    """Greedy and sampled requests with all rules for logits, each with repetitive and with other text."""
    parameters: list[dict[str, Any]] = [
        {"sampling": {"temperature": 0.0}},
        {"sampling": {"temperature": 0.9}},
        {"sampling": {"temperature": 0.0}, "logprobs": 3},
        {"sampling": {"temperature": 0.8, "top_p": 0.9, "top_k": 50}, "logprobs": 0},
        {"sampling": {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.2}},
        {"sampling": {"temperature": 0.7, "frequency_penalty": 0.4, "presence_penalty": 0.3}, "logprobs": 1},
        {"sampling": {"temperature": 0.0, "logit_bias": {30: 4.0, 31: -2.0}}, "stopping": {"min_tokens": 12}},
        {"sampling": {"temperature": 0.9}, "bad": [[40], [41, 42]], "num_sequences": 4},
        {"sampling": {"temperature": 1.0}, "num_sequences": 3, "num_returned": 1},
        {"sampling": {"temperature": 0.8}, "num_sequences": 2, "rules": MODEL_RULES},
        {"sampling": {"temperature": 0.0, "constraint": Constraint(regex="(ab|cd|the ){5,20}")}},
    ]
    requests: list[Request] = []
    for number, each in enumerate(parameters):
        rng = np.random.default_rng(number)
        prompt = rng.integers(20, vocab_size, 12 + 5 * number).tolist()
        prompt = prompt + prompt[: number * 3]
        requests.append(make_request(number, prompt, seed=number, stop_token_ids=[STOP], **each))
    return requests


def texts_of(requests: Sequence[Request], outcome: dict[tuple[int, int], Text]) -> list[list[int]]:
    prompts = {int(request.key.handle): list(request.prompt) for request in requests}
    return [[*prompts[handle], *text.token_ids] for (handle, _), text in outcome.items()]


# In other types than float32, recomputation after a preemption rounds differently, with drafts or without.
@parametrize_once(
    "engines, config",
    [("bfloat16", SWAP), ("float32", RECOMPUTE)]
    + [(pool, SWAP) for pool in POOLS if pool != "bfloat16"]
    + [("bfloat16", {})],
    second_tier=0,
    indirect=["engines"],
)
def test_text_is_that_without_drafts(engines: tuple[WholeEngine, WholeEngine], config: dict[str, Any]) -> None:
    off, on = engines
    vocab_size = off.worker.info.model.vocab_size
    requests = make_requests(vocab_size)
    expected = off.run(requests, **config)
    right = RightDrafter(texts_of(requests, expected))
    drafters = {
        "right": right,
        "wrong": WrongDrafter(1, vocab_size),
        "partly right": WrongDrafter(2, vocab_size, right),
    }
    for name, drafter in drafters.items():
        on.use(drafter)
        assert on.run(requests, **config) == expected, name
        assert on.num_drafts > 0
        assert (on.num_accepted > 0) == (name != "wrong")


@parametrize_once("config", [SWAP, {}], second_tier=0, ids=["swap", "room"])
def test_text_is_that_of_one_token_a_step(config: dict[str, Any]) -> None:
    """The model runs several times in a step, without drafts and with right and wrong ones."""
    off, several = WholeEngine(*FLAGS, "--dtype", "bfloat16"), [*FLAGS, "--dtype", "bfloat16", *MULTI_STEP]
    requests = make_requests(off.worker.info.model.vocab_size)
    # By itself, a request without log probabilities never waits for one with them.
    expected = off.run(requests, **config) | off.run(requests[:1])
    plain = WholeEngine(*several)
    assert plain.run(requests, **config) | plain.run(requests[:1]) == expected
    assert plain.num_passes > 3 * plain.num_steps
    # Rows that only need a draw. The logits of one row are NaN once, in the middle of a step.
    simple = [
        make_request(number, [*range(30, 40 + number)], seed=number, max_tokens=50, sampling=sampling)
        for number, sampling in enumerate([{"temperature": 0.0}, {"temperature": 0.9}, {"top_p": 0.9, "min_p": 0.01}])
    ]
    expected_of_simple, run, num_spoiled = off.run(simple, **config), RecordedDecodes.run, 0

    def spoil(decodes: RecordedDecodes, *arguments: Any) -> Tensor:
        nonlocal num_spoiled
        logits = run(decodes, *arguments)
        if len(logits) == len(simple) and not num_spoiled:
            num_spoiled += 1
            logits[1] = torch.nan
        return logits

    with patch.object(RecordedDecodes, "run", spoil):
        assert plain.run(simple, **config) == expected_of_simple
    assert num_spoiled == 1
    drafting = WholeEngine(*several, "--speculate", "ngram")
    drafting.use(WrongDrafter(3, off.worker.info.model.vocab_size, RightDrafter(texts_of(requests, expected))))
    assert drafting.run(requests, **config) | drafting.run(requests[:1]) == expected
    assert drafting.num_accepted > 0


@pytest.mark.parametrize(
    ("family", "dtype", "flags"),
    [
        ("qwen3.5", "bfloat16", MULTI_STEP),
        pytest.param("lfm2", "bfloat16", [], marks=pytest.mark.long),
        *(
            pytest.param(family, dtype, flags, marks=pytest.mark.long)
            for family, dtype, flags in [
                ("qwen3.5", "float32", []),
                ("lfm3", "float32", MULTI_STEP),
                ("mamba", "bfloat16", MULTI_STEP),
            ]
        ),
    ],
)
def test_states_are_those_without_drafts(family: str, dtype: str, flags: list[str], tmp_path: Path) -> None:
    make_model(tmp_path, family)
    common = ["--model", str(tmp_path), *FLAGS, "--dtype", dtype]
    off, on = WholeEngine(*common), WholeEngine(*common, "--max-drafts", "5", *flags, "--speculate", "ngram")
    vocab_size = off.worker.info.model.vocab_size
    # Without the rules for tokens that this vocabulary does not have.
    requests = [each for each in make_requests(vocab_size) if each.key.handle != 9]
    expected, pool = off.run(requests), off.worker.info.pool
    few_blocks = 30 * pool.groups.num_groups + 8 * pool.state_blocks
    lone = [make_request(0, requests[0].prompt, max_tokens=150, sampling={"temperature": 0.0})]
    text = off.run(lone)[0, 0].token_ids
    # The second goes on from the state after a part of the first one's output.
    lone.append(make_request(1, [*lone[0].prompt, *text, 30], seed=1, sampling={"temperature": 0.9}))
    expected_lone = off.run(lone, max_num_seqs=1)
    usages = dict(off.usages)
    assert usages[1].cached_tokens > 100
    right = RightDrafter(texts_of(requests, expected) + texts_of(lone, expected_lone))
    for name, drafter in {
        "right": right,
        "wrong": WrongDrafter(1, vocab_size),
        "partly right": WrongDrafter(2, vocab_size, right),
    }.items():
        on.use(drafter)
        assert on.run(requests) == expected, name
        assert on.run(requests, num_blocks=few_blocks, preemption_mode=PreemptionMode.SWAP) == expected, name
        assert on.run(lone, max_num_seqs=1) == expected_lone, name
        assert on.usages[1].cached_tokens == usages[1].cached_tokens, name
        assert on.num_drafts > 0
        assert (on.num_accepted > 20) == (name != "wrong"), name


def test_no_pass_runs_after_all_rows_have_ended() -> None:
    engine = WholeEngine(*FLAGS, *MULTI_STEP)
    prompts, sampling = [[*range(30, 40)], [*range(60, 75)]], {"temperature": 3.0}
    texts = engine.run([make_request(number, each, sampling=sampling) for number, each in enumerate(prompts)])
    ends = [texts[0, 0].token_ids[4], texts[1, 0].token_ids[20]]
    requests = [
        make_request(number, prompt, stop_token_ids=[end], sampling=sampling)
        for number, (prompt, end) in enumerate(zip(prompts, ends, strict=True))
    ]
    assert [len(text.token_ids) for text in engine.run(requests).values()] == [5, 21]
    # The first pass computes the prompts. Two more belong to steps in flight, which seal blocks.
    assert engine.num_passes == 21 + 2


def test_predictions_and_grammars_and_repetitions_save_steps_and_change_nothing() -> None:
    flags = [*FLAGS, "--dtype", "bfloat16"]
    off = WholeEngine(*flags)
    on = WholeEngine(*flags, "--speculate", "prediction,grammar,ngram")
    vocab_size = off.worker.info.model.vocab_size
    prompt = np.random.default_rng(5).integers(20, vocab_size, 20).tolist()
    greedy = {"temperature": 0.0}
    # It does not end within the tokens of the request.
    schema = '{"type": "object", "properties": {"temperature_in_celsius": {"type": "string", "minLength": 500}}, '
    schema += '"required": ["temperature_in_celsius"], "additionalProperties": false}'
    constrained = greedy | {"constraint": Constraint(json_schema=schema, no_white_space=True)}

    text = off.run([make_request(0, prompt, sampling=greedy)])[0, 0].token_ids
    # Some tokens are left out, and others come in their place.
    predicted = [*text[:10], *text[14:25], 21, 22, *text[27:]]
    cases = {
        "prediction": (
            make_request(0, prompt, sampling=greedy),
            make_request(0, prompt, predicted=predicted, sampling=greedy),
            15,
        ),
        "grammar": (make_request(0, prompt, sampling=constrained), make_request(0, prompt, sampling=constrained), 8),
        "ngram": (make_request(0, prompt * 3, sampling=greedy), make_request(0, prompt * 3, sampling=greedy), 0),
    }
    for name, (plain, drafting, num_saved) in cases.items():
        expected = off.run([plain])
        assert on.run([drafting]) == expected, name
        assert on.num_accepted >= num_saved, name
        assert on.num_steps <= off.num_steps - on.num_accepted // 2, name
        usage = on.usages[0]
        assert (usage.drafted_tokens, usage.accepted_draft_tokens) == (on.num_drafts, on.num_accepted), name
    # Each of several sequences follows the prediction up to its first different token.
    several = {"seed": 2, "sampling": {"temperature": 0.3}, "num_sequences": 3}
    expected = off.run([make_request(0, prompt, **several)])
    assert on.run([make_request(0, prompt, **several, predicted=expected[0, 1].token_ids)]) == expected
    assert on.num_accepted >= len(expected[0, 1].token_ids) // 2
