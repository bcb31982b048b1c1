"""Weights of GGUF files: those that transformers reads from the same file."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from quire.model_directory import ModelDirectory
from quire.settings import ConfigurationError
from tests.support.gguf_files import write_gguf
from tests.support.models import make_model, make_tokenizer, randomize
from worker_svc.gguf_weights import gguf_weights
from worker_svc.models.registry import load_model

Kind = gguf.GGMLQuantizationType
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def make(directory: Path, family: str):
    """A model of the family, written to the directory."""
    if family in ("llama", "gpt2"):
        return make_model(directory, family)
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    model = model_class(config_class(**SIZES, head_dim=16, tie_word_embeddings=True)).eval()
    randomize(model, 0)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return model


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_a_file_has_the_weights_that_transformers_reads_from_it(tmp_path: Path, family: str, kind: Kind) -> None:
    model = make(tmp_path / "model", family)
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model", quantization=kind)
    weights = gguf_weights(file)
    expected = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    assert weights.keys() >= expected.keys() - {"lm_head.weight"}
    for name, tensor in expected.items():
        if name in weights:
            assert weights[name].shape == tuple(tensor.shape), name
            assert torch.equal(weights[name].read().float(), tensor.float()), name
    if kind is Kind.F32:
        for name, parameter in model.state_dict().items():
            if name in weights:
                assert torch.equal(weights[name].read(), parameter), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_a_model_of_a_file_is_that_of_its_directory(tmp_path: Path, family: str) -> None:
    make(tmp_path / "model", family)
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model")
    cpu = {"device": torch.device("cpu"), "dtype": torch.float32}
    read: list[tuple[int, int]] = []
    of_file = load_model(file, **cpu, progress=lambda done, total: read.append((done, total)))
    of_directory = load_model(tmp_path / "model", **cpu)
    found, expected = dict(of_file.named_parameters()), dict(of_directory.named_parameters())
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    for name, buffer in of_directory.named_buffers():
        assert torch.equal(buffer, dict(of_file.named_buffers())[name]), name
    assert read[-1][0] == read[-1][1] > 100_000
    assert (of_file.max_model_len, of_file.vocab_size) == (of_directory.max_model_len, of_directory.vocab_size)


def read_kinds() -> list[Kind]:
    kinds = []
    for kind in Kind:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            kinds.append(kind)
        except NotImplementedError:
            pass
    return kinds


@pytest.mark.parametrize("kind", read_kinds(), ids=lambda kind: kind.name)
def test_every_quantization_of_the_package_is_read(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_svc.gguf_weights._CHUNK_ELEMENTS", 3000)
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = max(elements, 32) * 4
    generator = np.random.default_rng(0)
    data = generator.integers(0, 60, (17, columns // elements * num_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("output.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = gguf_weights(tmp_path / "m.gguf")["lm_head.weight"]
    assert (found.dtype, found.shape, found.num_bytes) == (kind.name, (17, columns), data.nbytes)
    expected = torch.from_numpy(np.ascontiguousarray(gguf.dequantize(data, kind), np.float32))
    assert torch.equal(found.read().float().nan_to_num(), expected.nan_to_num())


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    for name, kind, problem in (
        ("output.weight", Kind.Q8_K, "tensor output.weight is Q8_K, which is not read"),
        ("blk.0.ffn_gate_exps.weight", Kind.F32, "tensor blk.0.ffn_gate_exps.weight is not known in models of llama"),
    ):
        num_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.add_tensor(name, np.zeros((2, num_bytes * 2), np.uint8), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ConfigurationError) as caught:
            gguf_weights(tmp_path / "m.gguf")
        assert str(caught.value) == f"{tmp_path}/m.gguf: {problem}"


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama")
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model")
    content = file.read_bytes()
    for length in (len(content) - 1000, len(content) // 2, 5000, 100, 3, 0):
        file.write_bytes(content[:length])
        with pytest.raises(ConfigurationError, match=r"m\.gguf"):
            gguf_weights(ModelDirectory.open(file).path)
