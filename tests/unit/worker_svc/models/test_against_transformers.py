"""Each family and shape against transformers: prefill, chunks, decodes and mixes of them over a scrambled pool."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.models import SHAPES, VOCAB_SIZE, make_model, make_shape
from tests.support.paged import PagedRunner, Span
from worker_svc.models.base import CausalLM
from worker_svc.models.registry import load_model

CPU = torch.device("cpu")
TOLERANCE = 1e-4


def load(directory: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(directory, device=CPU, dtype=dtype)


def make_sequences(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def expected_logits(reference: PreTrainedModel, sequence: list[int]) -> torch.Tensor:
    return reference(torch.tensor([sequence])).logits[0].float()


def assert_same_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_however_the_tokens_come(shape: str, tmp_path: Path) -> None:
    reference = make_shape(tmp_path, shape)
    sequences = make_sequences(40, 1, 17)
    expected = [expected_logits(reference, sequence) for sequence in sequences]
    runner = PagedRunner(load(tmp_path), sequences, block_size=5)

    whole = runner.step(Span(0, 0, 40), Span(1, 0, 1), Span(2, 0, 16))
    assert_same_logits(whole, torch.cat((expected[0], expected[1], expected[2][:16])))
    assert_same_logits(runner.step(Span(2, 16, 17), Span(0, 39, 40)), torch.stack((expected[2][16], expected[0][39])))

    chunked = PagedRunner(runner.model, sequences, block_size=16, seed=1)
    for start, end in [(0, 1), (1, 8), (8, 33), (33, 34), (34, 40)]:
        assert_same_logits(chunked.step(Span(0, start, end)), expected[0][start:end])
    mixed = chunked.step(Span(2, 0, 9), Span(0, 39, 40), Span(1, 0, 1))
    assert_same_logits(mixed, torch.cat((expected[2][:9], expected[0][39:], expected[1])))


@pytest.mark.parametrize("shape", ["gpt2-tied-32", "opt-post-norm-projected-64", "llama-gqa-explicit-128"])
def test_greedy_continuation_equals_generate(shape: str, tmp_path: Path) -> None:
    reference = make_shape(tmp_path, shape)
    prompts = make_sequences(3, 11, 26)
    runner = PagedRunner(load(tmp_path), prompts, block_size=4)
    lengths = [len(prompt) for prompt in prompts]
    spans = [Span(row, 0, length) for row, length in enumerate(lengths)]
    for step in range(24):
        logits = runner.step(*spans)
        ends = torch.tensor([span.end - span.start for span in spans]).cumsum(0) - 1
        for row, token in enumerate(logits[ends].argmax(-1).tolist()):
            runner.sequences[row].append(token)
        spans = [Span(row, length + step, length + step + 1) for row, length in enumerate(lengths)]
    for row, length in enumerate(lengths):
        prompt = torch.tensor([runner.sequences[row][:length]])
        generated = reference.generate(  # pyright: ignore[reportCallIssue]
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24, eos_token_id=None
        )
        assert runner.sequences[row] == generated[0].tolist()


VARIANTS = [
    ("gpt2", {"scale_attn_weights": False, "activation_function": "gelu"}),
    ("gpt2", {"activation_function": "relu", "layer_norm_epsilon": 1e-2}),
    ("opt", {"activation_function": "gelu", "enable_bias": False}),
    ("opt", {"layer_norm_elementwise_affine": False}),
    ("opt", {"_remove_final_layer_norm": True}),
    ("opt", {"do_layer_norm_before": False}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-2}),
    ("llama", {"attention_bias": True}),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_variants_of_the_configuration(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    reference = make_model(tmp_path, family, **overrides)
    (sequence,) = make_sequences(19)
    runner = PagedRunner(load(tmp_path), [sequence], block_size=16)
    assert_same_logits(runner.step(Span(0, 0, 19)), expected_logits(reference, sequence))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ["gpt2-tied-32", "opt-pre-norm-32", "llama-gqa-untied-32"])
def test_half_precision_is_as_close_as_transformers_own(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference = make_shape(tmp_path, shape)
    (sequence,) = make_sequences(23)
    exact = expected_logits(reference, sequence)
    rounded = reference.to(dtype)  # pyright: ignore[reportArgumentType]
    theirs = (expected_logits(rounded, sequence) - exact).abs().mean()
    ours = PagedRunner(load(tmp_path, dtype), [sequence], block_size=16).step(Span(0, 0, 23))
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < 1.5 * theirs


def test_geometry_is_that_of_the_configuration(tmp_path: Path) -> None:
    make_shape(tmp_path, "llama-gqa-explicit-128")
    model = load(tmp_path, torch.bfloat16)
    assert model.architecture == "LlamaForCausalLM"
    geometry = (model.num_layers, model.num_kv_heads, model.head_dim, model.vocab_size, model.max_model_len)
    assert geometry == (2, 2, 128, VOCAB_SIZE, 512)
    assert (model.device, model.dtype) == (CPU, torch.bfloat16)
