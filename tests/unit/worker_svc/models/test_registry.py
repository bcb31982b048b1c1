"""Model directories, good and bad."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from transformers import GPT2Config

from quire.runtime.settings import ConfigurationError
from tests.support.models import edit_config, edit_tensors, make_model
from tests.support.paged import PagedRunner, Span
from worker_svc.layers.attention import AttentionMetadata
from worker_svc.layers.embedding_norm import TiedHead
from worker_svc.models.base import CausalLM, ModelInput, NativeCausalLM
from worker_svc.models.registry import load_model, resolve_dtype

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
WEIGHTS = "model.safetensors"
FIRST = ("gpt2-tied-32", "opt-pre-norm-32", "llama-gqa-untied-32")


def load(directory: Path) -> CausalLM:
    return load_model(directory, device=CPU, dtype=torch.float32)


def logits(model: CausalLM) -> torch.Tensor:
    return PagedRunner(model, [[5, 9, 200, 31]], block_size=4).step(Span(0, 0, 4))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_model(tmp_path, "llama-gqa-untied-32")
    return tmp_path


@pytest.mark.parametrize(
    ("shape", "prefix"),
    [("gpt2-tied-32", "transformer."), ("opt-pre-norm-32", "model."), ("llama-mha-tied-64", "model.")],
)
def test_names_without_the_base_prefix_are_found(shape: str, prefix: str, tmp_path: Path) -> None:
    make_model(tmp_path, shape)
    expected = logits(load(tmp_path))
    edit_tensors(tmp_path, lambda tensors: {name.removeprefix(prefix): value for name, value in tensors.items()})
    assert torch.equal(logits(load(tmp_path)), expected)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    make_model(tmp_path / "one", "llama-gqa-untied-32")
    make_model(tmp_path / "many", "llama-gqa-untied-32", max_shard_size="300KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(load(tmp_path / "many")), logits(load(tmp_path / "one")))


def test_tensors_that_the_model_does_not_use_are_ignored(directory: Path) -> None:
    expected = logits(load(directory))
    edit_tensors(directory, lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert torch.equal(logits(load(directory)), expected)


def test_progress_rises_to_the_bytes_of_the_model(directory: Path) -> None:
    reports: list[tuple[int, int]] = []
    load_model(directory, device=CPU, dtype=torch.float32, progress=lambda done, total: reports.append((done, total)))
    done = [report[0] for report in reports]
    assert done == sorted(set(done))
    total = sum(tensor.nbytes for tensor in load_file(directory / "model.safetensors").values())
    assert reports[-1] == (total, total)


def remove_tensor(directory: Path, end: str = "1.mlp.up_proj.weight") -> None:
    edit_tensors(directory, lambda tensors: {k: v for k, v in tensors.items() if not k.endswith(end)})


def add_integers(directory: Path) -> None:
    edit_tensors(directory, lambda tensors: {**tensors, "model.norm.weight": torch.ones(128, dtype=torch.int8)})


def put(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())


SPOILED: list[tuple[Callable[[Path], object], str]] = [
    (remove_tensor, "tensor model.layers.1.mlp.up_proj.weight is missing from the safetensors files"),
    (
        lambda directory: edit_config(directory, intermediate_size=190),
        "gate_proj.weight has shape [192, 128]; config.json asks for [190, 128]",
    ),
    (
        lambda directory: put(WEIGHTS, (directory / WEIGHTS).read_bytes()[:-100])(directory),
        "damaged or truncated safetensors file",
    ),
    (put(WEIGHTS, b"\xff" * 64), "damaged or truncated safetensors file"),
    (put(WEIGHTS, b""), "damaged or truncated safetensors file"),
    (add_integers, "tensor model.norm.weight has dtype I8; supported are F64, F32, BF16, F16"),
    (
        lambda directory: (directory / WEIGHTS).rename(directory / "pytorch_model.bin"),
        "pytorch_model.bin is a pickle, which is never loaded; convert the model",
    ),
]
"""tests/unit/quire/model_files/test_model_directory.py covers faults of config.json or of an index as files."""


@pytest.mark.parametrize(("spoil", "message"), SPOILED, ids=[message for _, message in SPOILED])
def test_bad_directory_is_refused_with_one_line(spoil: Callable[[Path], object], message: str, directory: Path) -> None:
    spoil(directory)
    with pytest.raises(ConfigurationError, match=re.escape(message)) as caught:
        load(directory)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "architecture BloomForCausalLM of "),
        (
            {"architectures": None, "model_type": "bloom"},
            "names no architecture, and its model_type is bloom; supported",
        ),
        ({"hidden_act": "xielu"}, "activation 'xielu' is not supported; supported are gelu"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; expected a divisor of num_attention_heads, 4"),
        ({"hidden_size": "128"}, "hidden_size is '128'; expected an integer of at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": 126, "head_dim": None}, "hidden size 126 is not a multiple of the number of heads, 4"),
        ({"head_dim": 33}, "head_dim is 33; expected an even number"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'; expected true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; expected a number above 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; models of at most 10000 layers are served"),
        ({"hidden_size": 10**31}, "expected an integer of at most 1e+30"),
        ({"head_dim": 1 << 20}, "head_dim is 1048576; expected at most 4096"),
        ({"rms_norm_eps": 10**400}, "0000; expected a number above 0"),
        ({"vocab_size": 10**29}, "config.json asks for [100000000000000000000000000000, 128]"),
        ({"head_dim": 4096, "max_position_embeddings": 1 << 20}, "expected at most 262144 for head size 4096, or a"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
    ],
)
def test_configuration_that_cannot_be_served_is_refused(fields: dict[str, Any], message: str, directory: Path) -> None:
    edit_config(directory, **fields)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        load(directory)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("deepseek-v3", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3; expected at most the experts of 1 of 2"),
        ("deepseek-v3", {"n_group": 3}, "n_group is 3; expected groups of at least 2 of 4 experts"),
        (
            "glm4-moe-lite",
            {"mlp_layer_types": ["dense"]},
            "mlp_layer_types is ['dense']; expected 2 of dense and sparse",
        ),
        ("exaone-moe", {"mlp_layer_types": ["dense", "x"]}, "expected 2 of dense and sparse"),
        ("minicpm3", {"v_head_dim": 0}, "v_head_dim is 0; expected an integer of at least 1"),
        ("granite", {"residual_multiplier": 1e-200}, "residual_multiplier is 1e-200; expected a number above 0"),
        # A norm for each of a billion heads.
        (
            "stablelm-head-norms",
            {"hidden_size": 10**10, "num_attention_heads": 10**9, "num_key_value_heads": 10**9},
            "embed_tokens.weight has shape [320, 64]; config.json asks for [320, 10000000000]",
        ),
        # Experts begin after the last layer.
        ("deepseek-v3", {"first_k_dense_replace": 10**12}, "tensor model.layers.1.mlp.gate_proj.weight is missing"),
    ],
)
def test_contradictory_configuration_is_refused(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_model(tmp_path, name)
    edit_config(tmp_path, **{"n_group": 2, **fields})
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        load(tmp_path)


@pytest.mark.parametrize("window", [1 << 31, 1 << 63, 10**29])
def test_window_of_more_tokens_than_any_sequence_has_hides_none(window: int, tmp_path: Path) -> None:
    make_model(tmp_path, "mistral-full-tied")
    expected = logits(load(tmp_path))
    edit_config(tmp_path, sliding_window=window)
    assert torch.equal(logits(load(tmp_path)), expected)


def test_nothing_is_read_before_all_is_checked(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove_tensor(directory)
    allocated: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "worker_svc.weights.Placement.empty", lambda self, *shape: allocated.append(shape) or torch.empty(shape)
    )
    with pytest.raises(ConfigurationError):
        load(directory)
    assert allocated == []


@pytest.mark.parametrize(
    ("config", "requested", "device", "expected"),
    [
        ({"dtype": "bfloat16"}, "auto", CPU, torch.bfloat16),
        ({"torch_dtype": "float32"}, "auto", CPU, torch.float32),
        ({"torch_dtype": "torch.bfloat16"}, "auto", CUDA, torch.bfloat16),
        ({"dtype": "float16"}, "auto", CPU, torch.bfloat16),
        ({"dtype": "float16"}, "auto", CUDA, torch.float16),
        ({"dtype": "float64"}, "auto", CPU, torch.float32),
        ({}, "auto", CPU, torch.float32),
        ({"dtype": "bfloat16"}, "float32", CPU, torch.float32),
        ({}, "float16", CPU, torch.float16),
    ],
)
def test_dtype_is_what_was_asked_or_what_the_model_says(
    config: dict[str, Any], requested: str, device: torch.device, expected: torch.dtype
) -> None:
    assert resolve_dtype(config, requested, device) == expected


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="dtype 'float8_e4m3fn' is not supported; supported are float32"):
        resolve_dtype({"dtype": "float8_e4m3fn"}, "auto", CPU)


@pytest.mark.parametrize(
    "shape",
    [
        *("gpt2-tied-32", "opt-post-norm-projected-64", "llama-gqa-untied-32", "ministral3", "smollm3", "granite"),
        *("olmo2", "glm4", "cohere2-alternating", "cohere-head-norms", "stablelm-head-norms", "hunyuan-dense"),
    ],
)
def test_decodes_stay_on_the_device(shape: str, tmp_path: Path) -> None:
    """The meta device has no values: reading one, or mixing in a CPU tensor, would raise."""
    make_model(tmp_path, shape)
    meta = torch.device("meta")
    model = load_model(tmp_path, device=meta, dtype=torch.bfloat16)
    tokens, rows = torch.zeros(5, dtype=torch.int64, device=meta), torch.ones(5, dtype=torch.int32, device=meta)
    metadata = AttentionMetadata(
        slot_mapping=tokens,
        block_tables=torch.zeros(5, 4, dtype=torch.int32, device=meta),
        query_start_loc=torch.zeros(6, dtype=torch.int32, device=meta),
        seq_lens=rows,
        max_query_len=1,
        max_seq_len=50,
    )
    pool = torch.zeros(2, 30, model.num_kv_heads, 16, model.head_dim, dtype=torch.bfloat16, device=meta)
    output = model.logits(model(ModelInput(tokens, tokens, [metadata], [pool] * model.num_layers)))
    assert (output.shape, output.device, output.dtype) == ((5, 320), meta, torch.float32)


@pytest.mark.parametrize("family", FIRST)
@pytest.mark.parametrize("is_equal", [False, True])
def test_a_head_beside_the_embedding_counts_where_it_differs(family: str, is_equal: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path, family, tie_word_embeddings=False)
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if is_equal:
        with torch.no_grad():
            head.weight.copy_(embedding.weight)
        model.save_pretrained(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    served = load(tmp_path)
    hidden = torch.randn(3, embedding.weight.shape[1])
    with torch.no_grad():
        torch.testing.assert_close(served.logits(hidden), head(hidden))
    assert isinstance(served, NativeCausalLM)
    assert isinstance(served.head, TiedHead) is is_equal


def test_gpt2_may_have_the_field_names_of_other_models(tmp_path: Path) -> None:
    """Its default of 12 heads fits these weights too, with other results."""
    make_model(tmp_path, "gpt2-tied-32", hidden_size=96, num_attention_heads=4)
    expected = logits(load(tmp_path))
    path, config = tmp_path / "config.json", json.loads((tmp_path / "config.json").read_text())
    for name, own in GPT2Config.attribute_map.items():
        config[name] = config.pop(own)
    path.write_text(json.dumps(config))
    assert torch.equal(logits(load(tmp_path)), expected)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("family", FIRST)
def test_a_tied_matrix_may_be_stored_as_the_head_alone(family: str, model_impl: str, tmp_path: Path) -> None:
    """safetensors keeps the first of several names of a tensor; transformers uses it for both."""
    model = make_model(tmp_path, family, tie_word_embeddings=True)
    expected = logits(load(tmp_path))
    save_model(model, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "lm_head.weight" in names
    assert not [name for name in names if "embed_tokens" in name or "wte" in name]
    served = load_model(tmp_path, device=CPU, dtype=torch.float32, model_impl=model_impl)
    torch.testing.assert_close(logits(served), expected)
