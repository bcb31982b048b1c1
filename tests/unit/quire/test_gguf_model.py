"""What a GGUF file says of its model: configuration, tokenizer, templates."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from transformers import AutoConfig, AutoTokenizer

from gateway.text.tokenizer import Tokenizer
from quire.compatibility import ModelFingerprint
from quire.gguf_header import GgufHeader
from quire.model_directory import ModelDirectory, resolve_model, weight_files
from quire.settings import ConfigurationError
from tests.support.gguf_files import write_gguf
from tests.support.models import make_model
from tests.support.tokenizers import byte_fallback

TEXTS = ["the cat sat", " two  spaces", "naïve café 😀", "tabs\tand\n\nlines", "it's 12345 o'clock", "", "</s> x<s>"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    make_model(path, "llama")
    return path


def tokens_of(file: Path, text: str) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_buffer(ModelDirectory.open(file).tokenizer_json())
    return tokenizer.encode(text).ids


def test_a_file_is_a_model(directory: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "Small-Q8_0.gguf", directory, template="{{ messages }}")
    model = ModelDirectory.open(resolve_model(str(file)))
    assert (model.name, model.architecture, model.eos_token_ids) == ("Small-Q8_0", "LlamaForCausalLM", (2,))
    assert (model.chat_template, model.tool_chat_template, model.generation_config) == ("{{ messages }}", None, {})
    assert model.tokenizer_config == {"bos_token": "<s>", "eos_token": "</s>"}
    assert weight_files(file) == (file,)
    expected = AutoConfig.from_pretrained(tmp_path, gguf_file=file.name)
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size"):
        assert model.config[name] == pytest.approx(getattr(expected, name)), name
    assert model.config["dtype"] == "float32"


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_byte_level_texts_are_split_as_transformers_splits_them(directory: Path, tmp_path: Path, pre: str) -> None:
    file = write_gguf(tmp_path / "m.gguf", directory, pre=pre, further={"tokenizer.ggml.add_bos_token": False})
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        assert tokens_of(file, text) == expected.encode(text, add_special_tokens=False), text
        if pre == "gpt-2":
            original = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
            assert tokens_of(file, text) == original.encode(text, add_special_tokens=False).ids, text


def test_sentence_pieces_are_merged_by_their_scores(directory: Path, tmp_path: Path) -> None:
    model = tmp_path / "pieces"
    model.mkdir()
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": byte_fallback().get_vocab_size()}
    (model / "config.json").write_text(json.dumps(config))
    byte_fallback().save(str(model / "tokenizer.json"))
    (model / "model.safetensors").symlink_to(directory / "model.safetensors")
    file = write_gguf(tmp_path / "m.gguf", model)
    with ThreadPoolExecutor(1) as executor:
        tokenizer = Tokenizer.open(ModelDirectory.open(file), executor)
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS[:5]:
        found = tokens_of(file, text)
        assert found == byte_fallback().encode(text).ids, text
        if not text.startswith(" "):
            # There transformers adds no second one, as SentencePiece does.
            assert found[1:] == expected.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(found, include_special_tokens=False) == text
    file = write_gguf(tmp_path / "n.gguf", model, further={"tokenizer.ggml.add_space_prefix": False})
    assert tokens_of(file, "the") != tokens_of(file, " the")


def test_the_rotation_of_llama_3_is_found_in_its_factors(directory: Path, tmp_path: Path) -> None:
    def described(factors: list[float]) -> dict[str, Any]:
        file = write_gguf(tmp_path / "m.gguf", directory, further={"rope": factors})
        return ModelDirectory.open(file).config["rope_scaling"]

    # head_dim 32 and base 10,000: the wavelengths above 8192 are divided by 8.
    wavelengths = [6.283185307 * 10_000 ** (2 * index / 32) for index in range(16)]
    smooth = [min(max((8192 / each - 1) / 3, 0.0), 1.0) for each in wavelengths]
    factors = [1 / ((1 - each) / 8 + each) for each in smooth]
    assert described(factors) == {
        "rope_type": "llama3",
        "factor": pytest.approx(8.0),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(ConfigurationError, match=r"rope_freqs\.weight has other factors than Llama 3\.1"):
        described([1.0, 2.0] * 8)


def test_a_sliding_window_is_that_of_mistral(directory: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", directory, further={"llama.attention.sliding_window": 64})
    model = ModelDirectory.open(file)
    assert (model.architecture, model.config["sliding_window"]) == ("MistralForCausalLM", 64)


@pytest.mark.parametrize(
    ("further", "problem"),
    [
        (
            {"general.architecture": "mamba"},
            "architecture mamba of GGUF files is not read; read are llama, mistral, qwen2",
        ),
        ({"llama.expert_count": 8}, "models with experts are not read from GGUF files"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is tekken; read are gpt-2, smollm"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is t5; read are gpt2 (byte-level BPE) and llama"),
        ({"split.count": 3}, "is one of 3 parts of a model; join them: gguf-split --merge"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is longrope; read are none, linear and yarn"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "eos_token_id is 5000, which is no token of the vocabulary"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two', not a number"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    directory: Path, tmp_path: Path, further: dict[str, Any], problem: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", directory, further=further)
    with pytest.raises(ConfigurationError) as caught:
        ModelDirectory.open(file)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(str(file))


def test_headers_are_those_that_the_package_reads(directory: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", directory, quantization=gguf.GGMLQuantizationType.Q8_0)
    header, expected = GgufHeader.read(file), gguf.GGUFReader(file)
    for key, field in expected.fields.items():
        if not key.startswith("GGUF."):
            assert header.metadata[key] == field.contents(), key
    for tensor in expected.tensors:
        found = header.tensors[tensor.name]
        assert (found.start, found.ggml_type) == (tensor.data_offset, tensor.tensor_type)
        assert found.shape == tuple(reversed(tensor.shape.tolist()))


def test_fingerprints_of_files_tell_models_apart(directory: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "other", "llama", seed=1)
    first, copy, other = (
        ModelFingerprint.read(ModelDirectory.open(write_gguf(tmp_path / f"{name}.gguf", source)))
        for name, source in (("a", directory), ("b", directory), ("c", tmp_path / "other"))
    )
    assert first == copy
    assert all((first.config, first.tokenizer, first.weights))
    assert (first.config, first.tokenizer) == (other.config, other.tokenizer)
    assert first.weights != other.weights
