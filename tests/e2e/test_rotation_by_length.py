"""Models whose rotation depends on the length of the sequence, by a worker and the scheduler's core."""

from pathlib import Path

import pytest
import torch

from tests.support.models import VOCAB_SIZE, make_model
from tests.support.whole_engine import WholeEngine, make_request
from tests.unit.worker_svc.models.test_rotation_by_length import LONGEST, SCALED

PHI_3 = SCALED["phi3-longrope"]
TEXT = torch.randint(3, VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(1)).tolist()


def start(directory: Path, *flags: str) -> WholeEngine:
    common = ["--dtype=float32", "--num-threads=1", "--max-num-seqs=8", "--block-size=8", "--num-gpu-blocks=120"]
    return WholeEngine("--model", str(directory), *common, *flags)


def test_prompts_of_all_lengths_share_a_prefix_and_generate_beyond_the_original_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompts = make_model(tmp_path, PHI_3), [TEXT[:length] for length in (70, 20, 31, 32, 33, 41)]
    engine = start(tmp_path, f"--max-model-len={LONGEST}")
    assert f"the rotation of all sequences is the one for {LONGEST} tokens" in caplog.text
    assert engine.worker.info.model.max_model_len == LONGEST
    requests = [make_request(number, prompt, max_tokens=58) for number, prompt in enumerate(prompts)]
    texts = engine.run(requests, max_num_batched_tokens=24)
    assert any(usage.cached_tokens for usage in engine.usages.values())
    for number, prompt in enumerate(prompts):
        output = texts[number, 0].token_ids
        with torch.inference_mode():
            likeliest = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert output == likeliest.tolist()


def test_a_draft_model_is_rotated_for_the_length_that_the_model_is_served_with(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama-gqa-untied-32")
    make_model(tmp_path / "draft", PHI_3, max_position_embeddings=512)
    flags = ("--speculate", "draft", "--draft-model", str(tmp_path / "draft"), "--max-drafts=3")
    expected = start(tmp_path / "model").run([make_request(1, TEXT[:20], max_tokens=60)])
    assert start(tmp_path / "model", *flags).run([make_request(1, TEXT[:20], max_tokens=60)]) == expected
