"""GGUF files that Quire writes: reading them gives the model that was written."""

import gc
import json
import resource
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from quire.model_files.gguf_header import GgufHeader
from quire.model_files.model_directory import ModelDirectory
from quire.model_files.model_source import resolve_model
from quire.runtime.settings import ConfigurationError
from quire_cli.main import main
from tests.support.gguf_files import write_gguf as write_by_package
from tests.support.models import Family, edit_config, edit_tensors, make_model, make_tokenizer
from tests.support.paged import PagedRunner, Span
from tests.support.tiers import parametrize_once
from tests.support.tokenizers import byte_fallback
from tests.unit.worker_svc.test_gguf_weights import FURTHER, SIZES, make
from worker_svc.gguf_codes import encode
from worker_svc.gguf_weights import gguf_weights
from worker_svc.gguf_writer import FORMATS, write_gguf
from worker_svc.models.registry import load_model

Kind = gguf.GGMLQuantizationType
CODED = ("Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
TEXTS = ("the cat sat", " two  spaces", "naïve café 😀", "tabs\tand\n\nlines", "it's 12345 o'clock", "", "</s> x<s>")


def write(directory: Path, file: Path, format: str) -> Path:
    write_gguf(directory, file, format, lambda *_: None)
    return file


def tokenizer_of(path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_buffer(ModelDirectory.open(path).tokenizer_json())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", *FURTHER])
def test_a_file_has_the_weights_and_tokens_of_its_directory(tmp_path: Path, family: str) -> None:
    make(tmp_path / "model", family)
    file = write(tmp_path / "model", tmp_path / "m.gguf", "F32")
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    found, expected = gguf_weights(file), load_file(weights)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        exact: dict[str, Any] = {"rtol": 0, "atol": 1e-6 if family.startswith("gemma") else 0}
        torch.testing.assert_close(weight.read(), expected[name].float(), **exact)
    # Names and layouts as in the package's table.
    by_package = write_by_package(tmp_path / "p.gguf", tmp_path / "model")
    ours, theirs = (GgufHeader.read(each) for each in (file, by_package))
    assert {name: each.shape for name, each in ours.tensors.items()} == {
        name: each.shape for name, each in theirs.tensors.items()
    }
    own, read = tokenizer_of(tmp_path / "model"), tokenizer_of(file)
    for text in TEXTS:
        assert own.encode(text).ids == read.encode(text).ids, text


@pytest.mark.parametrize("case", ["differs", "equal", "alone"])
@pytest.mark.parametrize("family", ["llama-mha-tied-64", "gpt2-tied-32"])
def test_a_head_beside_the_embedding_or_in_its_place_is_written_as_it_is_served(
    tmp_path: Path, family: str, case: str
) -> None:
    """The model's configuration says that they are one matrix."""
    make_model(tmp_path / "model", family)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        embedding = next(name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
        head = tensors.pop(embedding) if case == "alone" else tensors[embedding].clone()
        return {**tensors, "lm_head.weight": head.flip(0).contiguous() if case == "differs" else head}

    edit_tensors(tmp_path / "model", change)
    file = write(tmp_path / "model", tmp_path / "m.gguf", "F32")
    runners = [
        PagedRunner(load_model(path, device=torch.device("cpu"), dtype=torch.float32), [[5, 9, 200]], block_size=4)
        for path in (tmp_path / "model", file)
    ]
    assert torch.equal(*(runner.step(Span(0, 0, 3)) for runner in runners))
    assert ("output.weight" in GgufHeader.read(file).tensors) is (case == "differs")


ROTATIONS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
    "yarn": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128, "beta_fast": 16.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
# Fields of config.json; transformers has defaults for the rest.
LEFT_OUT: dict[str, tuple[Family, tuple[str, ...], dict[str, Any]]] = {
    # Same as the published models of 4B, but with another pattern and rotation.
    "gemma3": (
        Family("Gemma3", {**HEADS, "head_dim": 256, "max_position_embeddings": 131072}, "Gemma3TextConfig"),
        ("hidden_size", "intermediate_size", "vocab_size"),
        {
            "num_hidden_layers": 3,
            "rope_local_base_freq": 300.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 5,
            "sliding_window_pattern": 3,
        },
    ),
    # The name that the published models have for GELU by tanh.
    "gemma": (FURTHER["gemma"], (*SIZES, "head_dim"), {"hidden_act": "gelu", "hidden_activation": None}),
    "mixtral": (
        FURTHER["mixtral"],
        (*SIZES, "num_local_experts", "num_experts_per_tok"),
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": None}},
    ),
    # Fields that the family does not have.
    "llama": (Family("Llama"), (*SIZES,), {"sliding_window": 5}),
    "qwen2": (Family("Qwen2"), (*SIZES,), {"attention_bias": False, "sliding_window": 5, "max_window_layers": 0}),
}


@pytest.mark.parametrize("family", LEFT_OUT)
def test_what_a_configuration_leaves_out_is_written_as_it_is_served(tmp_path: Path, family: str) -> None:
    """Fields that are missing, and older forms of fields from transformers 4."""
    made, kept, further = LEFT_OUT[family]
    make_model(tmp_path / "model", made, num_hidden_layers=further.get("num_hidden_layers", 2))
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    names = ("architectures", "model_type", "eos_token_id", *kept)
    path.write_text(json.dumps({name: config[name] for name in names} | further))
    file = write(tmp_path / "model", tmp_path / "m.gguf", "F32")
    tokens = [3 + 7 * index % 300 for index in range(40)]
    cpu: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_model_len": 64}
    found, expected = (
        PagedRunner(load_model(path, **cpu), [tokens], block_size=4).step(Span(0, 0, 40))
        for path in (file, tmp_path / "model")
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if family.startswith("gemma") else 0)


@pytest.mark.parametrize("kind", ROTATIONS)
def test_rotations_are_written(tmp_path: Path, kind: str) -> None:
    make(tmp_path / "model", "llama")
    rope = {"rope_theta": 10000.0} | ROTATIONS[kind]
    edit_config(tmp_path / "model", rope_parameters=rope)
    read = ModelDirectory.open(write(tmp_path / "model", tmp_path / "m.gguf", "F32")).config
    assert read["rope_scaling"] | {"rope_theta": read["rope_theta"]} == pytest.approx(rope)


def test_a_vocabulary_of_pieces_is_written(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama-gqa-untied-32")
    own = byte_fallback()
    own.save(str(tmp_path / "model" / "tokenizer.json"))
    edit_config(tmp_path / "model", vocab_size=own.get_vocab_size() + 3)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.zeros(own.get_vocab_size() + 3, tensors[name].shape[1])
    save_file(tensors, path)
    file = write(tmp_path / "model", tmp_path / "m.gguf", "F32")
    read = tokenizer_of(file)
    for text in TEXTS:
        assert own.encode(text).ids == read.encode(text).ids, text
    header = GgufHeader.read(file)
    assert header.metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{own.get_vocab_size() + 2}]"
    assert header.metadata["tokenizer.ggml.token_type"][-1] == gguf.TokenType.UNUSED


def test_a_token_that_the_model_has_no_vector_for_is_not_written(tmp_path: Path) -> None:
    """For example the padding token, which fine-tuned models may add without enlarging the vocabulary."""
    make(tmp_path / "model", "llama")
    own = tokenizer_of(tmp_path / "model")
    own.add_special_tokens(["[PAD]"])
    own.save(str(tmp_path / "model" / "tokenizer.json"))
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": "[PAD]"}))
    header = GgufHeader.read(write(tmp_path / "model", tmp_path / "m.gguf", "F32"))
    assert len(header.metadata["tokenizer.ggml.tokens"]) == own.token_to_id("[PAD]") == 320
    assert "tokenizer.ggml.padding_token_id" not in header.metadata


@pytest.mark.extended
def test_types_are_mixed_as_llama_cpp_mixes_them(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=1))
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")

    def kinds(format: str) -> dict[str, str]:
        tensors = GgufHeader.read(write(tmp_path / "model", tmp_path / f"{format}.gguf", format)).tensors
        return {name.removesuffix(".weight"): Kind(each.ggml_type).name for name, each in tensors.items()}

    for format, usual, long in (("Q4_K_M", "Q4_K", "Q6_K"), ("Q5_K_M", "Q5_K", "Q6_K")):
        found = kinds(format)
        assert found["output"] == "Q6_K"
        assert {found[f"blk.{layer}.{name}"] for layer in range(8) for name in ("attn_q", "attn_k", "ffn_up")} == {
            usual
        }
        for name in ("attn_v", "ffn_down"):
            chosen = [layer for layer in range(8) if found[f"blk.{layer}.{name}"] == long]
            assert chosen == [0, 3, 6, 7], name
        assert (found["token_embd"], found["output_norm"], found["blk.3.attn_norm"]) == (usual, "F32", "F32")
    found = kinds("Q4_K_S")
    for name, chosen in (("attn_v", [0, 1, 2, 3]), ("ffn_down", [0])):
        assert [layer for layer in range(8) if found[f"blk.{layer}.{name}"] == "Q5_K"] == chosen, name
    found = kinds("IQ4_XS")
    assert [found[f"blk.{layer}.ffn_down"] for layer in (0, 1)] == ["Q5_K", "IQ4_XS"]
    assert {found[f"blk.{layer}.attn_v"] for layer in range(8)} == {"Q5_K"}
    assert {*kinds("Q8_0").values()} == {"Q8_0", "F32"}
    assert GgufHeader.read(tmp_path / "Q4_K_M.gguf").metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_K_M


@parametrize_once("format", list(FORMATS), second_tier=len(FORMATS) // 2)
def test_every_format_is_served_and_computes_what_its_dequantized_weights_do(tmp_path: Path, format: str) -> None:
    """The embedded model's down projections have 704 inputs: no multiple of 256."""
    source = resolve_model(None)
    file = write(source, tmp_path / "m.gguf", format)
    plain = tmp_path / "plain"
    plain.mkdir()
    for each in source.iterdir():
        if each.suffix == ".json":
            (plain / each.name).write_bytes(each.read_bytes())
    weights = gguf_weights(file)
    save_file(
        {name: each.read().bfloat16().contiguous() for name, each in weights.items()}, plain / "model.safetensors"
    )
    cpu: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    tokens = tokenizer_of(source).encode("<|user|>What is 47 + 38?<|end|><|assistant|>").ids
    found, expected = (
        PagedRunner(load_model(path, **cpu), [tokens], block_size=16).step(Span(0, 0, len(tokens)))
        for path in (file, plain)
    )
    assert torch.equal(found, expected)
    # 4 bits are enough for the first token of the answer, 85.
    assert found[-1].argmax() == tokenizer_of(source).token_to_id("4")
    read = ModelDirectory.open(file)
    assert (read.eos_token_ids, read.generation_defaults["temperature"], read.chat_template) == (
        (2, 6),
        0.0,
        ModelDirectory.open(source).chat_template,
    )


@pytest.mark.parametrize(
    ("kind", "largest"), [("Q4_K", 0.0085), ("Q5_K", 0.0022), ("Q6_K", 0.0006), ("IQ4_NL", 0.0095), ("IQ4_XS", 0.0095)]
)
def test_codes_are_near_the_numbers(kind: str, largest: float) -> None:
    """The mean squared error as a share of the mean square; plain rounding has a higher one."""
    generator = np.random.default_rng(0)
    normal, heavy = generator.standard_normal((64, 512)), generator.standard_t(4, (64, 512))
    for data in (normal * 0.02, heavy, normal * 1e-3, normal + 2, normal - 2):
        data = data.astype(np.float32)
        found = gguf.dequantize(encode(data, kind), Kind[kind])
        assert np.square(found - data).mean() / np.square(data).mean() < largest


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("value", [0.0, 0.7, -0.7, 1e-30, 1e4, -1e4])
def test_numbers_that_are_all_the_same_are_kept(kind: str, value: float) -> None:
    data = np.full((3, 512), value, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gguf.dequantize(encode(data, kind), Kind[kind])
    assert np.abs(found - data).max() <= max(abs(value) * 5e-4, 1e-8)


@pytest.mark.parametrize("kind", CODED)
def test_one_large_number_does_not_harm_other_groups(kind: str) -> None:
    data = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    data[:, 7] = 30
    found = gguf.dequantize(encode(data, kind), Kind[kind])
    assert np.abs(found - data)[:, 7].max() < 1.5
    assert np.square(found - data)[:, 32:].mean() < 0.02


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', and a GGUF file of such a model means 'silu'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "are not written to GGUF files"),
        ("llama", {"architectures": ["OPTForCausalLM"]}, "OPTForCausalLM is not written to GGUF files; written are Ll"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_by_layer is True, and a GGUF file of such a model means False",
        ),
        (
            "gemma2",
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"sliding_windows is \(None, 20\), and a GGUF file of such a model means \(20, None\)",
        ),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rotations as .*'linear'.* are not written to GGUF files for windows",
        ),
    ],
)
def test_what_files_do_not_say_is_refused(tmp_path: Path, family: str, changes: dict[str, Any], problem: str) -> None:
    make(tmp_path / "model", family)
    edit_config(tmp_path / "model", **changes)
    with pytest.raises(ConfigurationError, match=problem):
        write(tmp_path / "model", tmp_path / "m.gguf", "Q8_0")
    assert [*tmp_path.glob("*.gguf*")] == []


@pytest.mark.parametrize("room", [100, 40_000])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, room: int) -> None:
    make(tmp_path / "model", "llama")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(
            ConfigurationError, match=r"^cannot write .*m\.gguf: (File too large|.*is the disk full\?)$"
        ):
            write(tmp_path / "model", tmp_path / "m.gguf", "F32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*tmp_path.glob("*.gguf*")] == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.gguf"
    assert main(["quantize", "quire-tiny", "--format", "q4_k", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    assert GgufHeader.read(file).metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_K_M
    for arguments, problem in (
        (["quire-tiny", str(file)], f"the file {file} exists; remove it first"),
        (["quire-tiny", str(tmp_path / "m.bin")], "m.bin does not end in .gguf"),
        (["quire-tiny", str(tmp_path / "n.gguf"), "--format", "int8"], '--format is "int8"; formats are Q4_K_M, '),
        (["quire-tiny", str(tmp_path / "none" / "n.gguf")], "n.gguf: No such file or directory"),
        (["quire-tiny", str(file / "n.gguf")], "n.gguf: Not a directory"),
        (["quire-tiny"], "call it as quire quantize MODEL OUT.gguf"),
    ):
        assert main(["quantize", *arguments]) == 2
        assert problem in capsys.readouterr().err
    # A file can be written from a file, too.
    assert main(["quantize", str(file), str(tmp_path / "n.gguf"), "--format", "Q8_0"]) == 0
    gc.collect()
