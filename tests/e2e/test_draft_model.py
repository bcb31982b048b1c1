"""A draft model decides how many tokens a step gives, but never which."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.model_files.model_directory import ModelDirectory
from quire.model_files.model_source import resolve_model
from quire.runtime.settings import ConfigurationError, load_settings
from tests.e2e.test_speculation import FLAGS, MULTI_STEP, POOLS, RECOMPUTE, SWAP, make_requests, texts_of
from tests.support.models import edit_config, edit_tensors, make_model
from tests.support.whole_engine import EveryDraft, WholeEngine, make_request
from worker_svc import draft_setup
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.device.draft_choice import Guesses
from worker_svc.device.draft_model import DraftModel
from worker_svc.device.runner import ModelRunner
from worker_svc.models.base import ModelInput
from worker_svc.settings import WorkerSettings
from worker_svc.startup import build_worker

pytestmark = pytest.mark.extended


def drafting(draft_model: Path, *flags: str, choice: EveryDraft | None = None) -> WholeEngine:
    """An engine that verifies all guesses of the draft model."""
    engine = WholeEngine(*flags, "--speculate", "draft", "--draft-model", str(draft_model), "--max-drafts", "5")
    assert isinstance(engine.worker.runner, ModelRunner)
    engine.worker.runner.choose_drafts(choice or EveryDraft())
    return engine


def assert_full_blocks_are_those_of_the_model(engine: WholeEngine) -> None:
    """The draft model of `engine` must be the model itself."""
    runner = engine.worker.runner
    assert isinstance(runner, ModelRunner)
    pool, blocks = runner._pool, runner.sealed_blocks().block_ids
    assert len(blocks) >= 4
    half = len(pool.gpu) // 2
    for of_model, of_draft_model in zip(pool.gpu[:half], pool.gpu[half:], strict=True):
        torch.testing.assert_close(of_draft_model[:, blocks], of_model[:, blocks], atol=1e-3, rtol=1e-3)


def draft_model_of(engine: WholeEngine) -> DraftModel:
    assert isinstance(engine.worker.runner, ModelRunner)
    assert engine.worker.runner._draft_model is not None
    return engine.worker.runner._draft_model


def cut(directory: Path, num_layers: int) -> Path:
    """quire-tiny without its last layers."""
    shutil.copytree(resolve_model(None), directory)
    edit_config(directory, num_hidden_layers=num_layers)
    ends = tuple(f"model.layers.{index}." for index in range(num_layers, 4))
    edit_tensors(directory, lambda tensors: {k: v for k, v in tensors.items() if not k.startswith(ends)})
    return directory


def random(directory: Path) -> Path:
    """A model of another family, with other heads, random weights, and the same tokenizer."""
    make_model(directory, "qwen3", vocab_size=2080, max_position_embeddings=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model(None) / name, directory / name)
    return directory


def share_right(engine: WholeEngine) -> float:
    assert engine.num_drafts >= 40
    return engine.num_accepted / engine.num_drafts


@pytest.fixture(scope="module")
def same() -> tuple[WholeEngine, WholeEngine]:
    """Without drafts, and with drafts of the model itself: nearly all are right if its keys and values are."""
    flags = [*FLAGS, "--dtype", "float32"]
    return WholeEngine(*flags), drafting(resolve_model(None), *flags)


def test_a_draft_model_that_is_the_model_is_nearly_always_right(same: tuple[WholeEngine, WholeEngine]) -> None:
    off, on = same
    for sampling in ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95}):
        requests = [make_request(0, range(30, 70), sampling=sampling, max_tokens=60)]
        assert on.run(requests) == off.run(requests)
        assert share_right(on) > 0.9
        assert on.num_steps < off.num_steps / 4
        assert_full_blocks_are_those_of_the_model(on)


def test_blocks_of_the_prefix_cache_have_its_keys_and_values_of_prompts_and_of_answers(
    same: tuple[WholeEngine, WholeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    off, on = same
    first = make_request(0, range(30, 70), sampling={"temperature": 0.8}, max_tokens=100)
    answer = off.run([first])[0, 0].token_ids
    later = make_request(1, [*first.prompt, *answer], sampling={"temperature": 0.0}, max_tokens=60)
    expected = off.run([first, later], max_num_seqs=1)
    model, num_computed = draft_model_of(on), 0
    forward = model._forward

    def count(inputs: ModelInput) -> Tensor:
        nonlocal num_computed
        num_computed += len(inputs.token_ids)
        return forward(inputs)

    monkeypatch.setattr(model, "_forward", count)
    assert on.run([first, later], max_num_seqs=1) == expected
    assert on.usages[1].cached_tokens >= 128
    assert on.usages[1].accepted_draft_tokens > 0.9 * on.usages[1].drafted_tokens > 0
    # In addition to both prompts it computed the last tokens of full blocks, and no cached tokens.
    assert num_computed < 40 + 12 + 60
    assert_full_blocks_are_those_of_the_model(on)


def test_swaps_and_copies_of_blocks_keep_it_right(same: tuple[WholeEngine, WholeEngine]) -> None:
    off, on = same
    requests = [
        make_request(number, range(30 + number, 70 + number), max_tokens=60, seed=number, num_sequences=count)
        for number, count in enumerate((1, 4, 1, 3, 1, 1, 4, 3))
    ]
    config: dict[str, Any] = SWAP | {"max_num_seqs": 6, "num_blocks": 24}
    assert on.run(requests, **config) == off.run(requests, **config)
    assert on.swap_outs > 0
    assert share_right(on) > 0.9
    assert_full_blocks_are_those_of_the_model(on)


class LateDraft(EveryDraft):
    """Has guesses only for long rows."""

    def plan(self, guesses: Guesses, num_rows: int, num_missing: int) -> np.ndarray:
        return np.where(guesses.lengths > 100, guesses.num_tokens, 0)


def test_rows_that_pay_late_are_caught_up_and_right() -> None:
    flags = [*FLAGS, "--dtype", "float32", "--max-num-batched-tokens", "40"]
    off, on = WholeEngine(*flags), drafting(resolve_model(None), *flags, choice=LateDraft())
    requests = [make_request(number, range(30, 70), seed=number, max_tokens=90) for number in range(4)]
    assert on.run(requests) == off.run(requests)
    assert share_right(on) > 0.9


@pytest.mark.parametrize(
    ("pool", "config"),
    [
        ("bfloat16", SWAP),
        *(
            pytest.param(pool, config, marks=pytest.mark.long)
            for pool, config in [
                *((pool, SWAP) for pool in POOLS if pool not in ("bfloat16", "int8 weights")),
                ("bfloat16", {}),
                ("float32", RECOMPUTE),
            ]
        ),
    ],
)
def test_text_is_that_without_drafts(pool: str, config: dict[str, Any], tmp_path: Path) -> None:
    flags = [*FLAGS, *POOLS[pool]]
    off = WholeEngine(*flags)
    requests = make_requests(off.worker.info.model.vocab_size)
    expected = off.run(requests, **config)
    models = {"half": cut(tmp_path / "half", 2), "random": random(tmp_path / "random")}
    for name, directory in models.items():
        on = drafting(directory, *flags)
        assert on.run(requests, **config) == expected, name
        assert on.num_drafts > 0
        assert (on.swap_outs > 0) == (config == SWAP)


def test_several_passes_of_a_step_have_drafts_too() -> None:
    off, on = WholeEngine(*FLAGS), drafting(resolve_model(None), *FLAGS, *MULTI_STEP)
    requests = make_requests(off.worker.info.model.vocab_size)
    # It does not know penalties and constraints.
    assert on.run(requests) == off.run(requests)
    assert on.num_drafts > on.num_accepted > 0
    # By itself, a request without log probabilities never waits for one with them.
    assert on.run(requests[:1]) == off.run(requests[:1])
    assert on.num_passes > on.num_steps
    assert on.num_accepted > 0


@pytest.mark.long
def test_one_that_does_not_pay_drafts_next_to_nothing(tmp_path: Path) -> None:
    """The choice depends on its cost and on how often it was right."""
    off = WholeEngine(*FLAGS)
    on = WholeEngine(*FLAGS, "--speculate", "draft", "--draft-model", str(random(tmp_path / "random")))
    request = make_request(0, range(30, 70), sampling={"temperature": 0.9}, max_tokens=400)
    assert on.run([request]) == off.run([request])
    assert 0 < on.num_drafts < 60


@pytest.mark.parametrize("case", ["no model", "nowhere", "not named", "other tokens", "too short", "two ranks"])
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    tiny, drafts = str(resolve_model(None)), ["--speculate", "draft"]
    if case in ("other tokens", "too short"):
        make_model(tmp_path / "other", "qwen3", vocab_size=2080, max_position_embeddings=256)
    if case == "too short":
        shutil.copy(resolve_model(None) / "tokenizer.json", tmp_path / "other")
    flags, message = {
        "no model": (drafts, "--draft-model is None; give both"),
        "nowhere": ([*drafts, "--draft-model", str(tmp_path / "nowhere")], "^--draft-model: .*nowhere does not exist"),
        "not named": (["--draft-model", tiny, "--speculate=off"], "--speculate is off and --draft-model"),
        "other tokens": ([*drafts, "--draft-model", str(tmp_path / "other")], f"{tmp_path}.*different vocabularies"),
        "too short": ([*drafts, "--draft-model", str(tmp_path / "other")], "256 positions .* up to 512"),
        "two ranks": ([*drafts, "--draft-model", tiny, "--tensor-parallel-size", "2"], "one rank"),
    }[case]
    settings = load_settings(WorkerSettings, [*FLAGS, *flags], {}, program="quire worker")
    if case == "two ranks":
        # Each would wait for the other one.
        start = partial(draft_setup.draft_directory, settings, ModelDirectory.open(tiny), torch.device("cpu"))
    else:
        start = partial(build_worker, settings, DeviceLoop())
    with pytest.raises(ConfigurationError, match=message):
        start()


@pytest.mark.parametrize(
    ("name", "other"), [("deepseek-v3", "llama-gqa-untied-32"), ("llama-gqa-untied-32", "minicpm3")]
)
@pytest.mark.parametrize("pool", ["bfloat16", pytest.param("int8 pool", marks=pytest.mark.long)])
def test_one_of_model_and_draft_model_may_have_latents(name: str, other: str, pool: str, tmp_path: Path) -> None:
    for each in (name, other):
        make_model(tmp_path / each, each)
    flags = [*FLAGS, *POOLS[pool], "--model", str(tmp_path / name)]
    off = WholeEngine(*flags)
    requests = [
        make_request(number, list(range(20, 40 + 30 * number)), sampling={"temperature": number / 8})
        for number in range(8)
    ]
    on = drafting(tmp_path / other, *flags)
    assert on.run(requests, **SWAP) == off.run(requests, **SWAP)
    assert on.num_drafts > 0
    assert min(on.swap_outs, off.swap_outs) > 0


@pytest.mark.parametrize(
    ("pool", "flags", "config"),
    [
        ("bfloat16", MULTI_STEP, {}),
        pytest.param("int8 pool", [], {}, marks=pytest.mark.long),
        pytest.param("float32", [], {"num_blocks": 100}, marks=pytest.mark.long),
    ],
)
def test_text_of_a_model_with_states_is_that_without_drafts(
    pool: str, flags: list[str], config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("qwen3.5", "qwen3"):
        make_model(tmp_path / name, name, max_position_embeddings=1024)
    flags = [*FLAGS, *POOLS[pool], *flags, "--model", str(tmp_path / "qwen3.5")]
    off, on = WholeEngine(*flags), drafting(tmp_path / "qwen3", *flags)
    assert off.worker.info.pool.state_blocks == on.worker.info.pool.state_blocks > 1
    # Without the rules for tokens that this vocabulary does not have.
    requests = [each for each in make_requests(off.worker.info.model.vocab_size) if each.key.handle != 9]
    expected = off.run(requests, **config)
    texts, model, random_state = texts_of(requests, expected), draft_model_of(on), np.random.default_rng(0)
    guess = model.guess

    def guess_partly_right(rows: NDArray[np.int64], lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        guess(rows, lengths, counts)
        for row, length, count in zip(rows, lengths, counts, strict=True):
            for text in texts:
                if text[:length] == model._token_ids[row, :length].tolist():
                    right = text[length : length + random_state.integers(0, count + 1)]
                    model._token_ids[row, length : length + len(right)] = right

    monkeypatch.setattr(model, "guess", guess_partly_right)
    assert on.run(requests, **config) == expected
    assert on.num_drafts > on.num_accepted > on.num_drafts / 5
    assert (on.preemptions > 0) == bool(config)
