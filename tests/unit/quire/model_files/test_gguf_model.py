"""A GGUF file's description of its model: configuration, tokenizer, templates."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

from gateway.offload import FairExecutor
from gateway.text.tokenizer import Tokenizer
from quire.model_files.gguf_families import CONFIGS
from quire.model_files.gguf_header import GgufFields, GgufHeader
from quire.model_files.gguf_tokenizer import _merges_of, ends_of_turns
from quire.model_files.model_directory import ModelDirectory, weight_files
from quire.model_files.model_source import resolve_model
from quire.runtime.settings import ConfigurationError
from quire.service.compatibility import ModelFingerprint
from tests.support.gguf_files import write_gguf
from tests.support.models import Family, make_model
from tests.support.tokenizers import byte_fallback
from worker_svc.gguf_weights import gguf_weights

TEXTS = ["the cat sat", " two  spaces", "naïve café 😀", "tabs\tand\n\nlines", "it's 12345 o'clock", "", "</s> x<s>"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    make_model(path, "llama-gqa-untied-32")
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


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_byte_level_texts_are_split_as_transformers_splits_them(directory: Path, tmp_path: Path, pre: str) -> None:
    file = write_gguf(tmp_path / "m.gguf", directory, pre=pre, further={"tokenizer.ggml.add_bos_token": False})
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        assert tokens_of(file, text) == expected.encode(text, add_special_tokens=False), text
        if pre == "gpt-2":
            original = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
            assert tokens_of(file, text) == original.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", "\u01201234", "\u0120It", "'", "S", "\u010a", "\u0120b"]),
        ("dbrx", ["a", "\u0120", "123", "4", "\u0120It", "'S", "\u010a", "\u0120b"]),
        ("megrez", ["a", "\u0120", "1", "2", "3", "4", "\u0120It", "'S", "\u010a", "\u0120b"]),
        ("gpt-4o", ["a", "\u0120", "123", "4", "\u0120It'S", "\u010a", "\u0120b"]),
        ("viking", ["a", "\u0120", "1", "2", "3", "4", "\u0120It'S", "\u010a", "\u0120b"]),
        ("deepseek-coder", ["a", "\u0120", "1", "2", "3", "4", "\u0120It", "'", "S", "\u010a", "\u0120b"]),
        ("deepseek-llm", ["a", "\u0120", "1", "2", "3", "4", "\u0120It", "'", "S", "\u010a", "\u0120b"]),
        ("deepseek-v3", ["a", "\u0120", "123", "4", "\u0120It", "'S", "\u010a", "\u0120b"]),
        ("glm4", ["a", "\u0120", "123", "4", "\u0120It", "'S", "\u010a", "\u0120b"]),
        ("jais-2", ["a", "\u0120", "123", "4", "\u0120It", "'S", "\u010a", "\u0120b"]),
        ("youtu", ["a", "\u0120", "1", "2", "3", "4", "\u0120It'S", "\u010a", "\u0120b"]),
        ("exaone-moe", ["a", "\u0120", "1", "2", "3", "4", "\u0120It", "'S", "\u010a", "\u0120b"]),
        ("kimi-k2", ["a", "\u0120", "123", "4", "\u0120It'S", "\u010a", "\u0120b"]),
        ("minicpm5", ["a", "\u0120", "123", "4", "\u0120It", "'S", "\u010a", "\u0120b"]),
        # Files of Qwen3.5, Ling, LFM2, GigaChat and Tiny Aya.
        ("qwen35", ["a", "\u0120", "1", "2", "3", "4", "\u0120It", "'S", "\u010a", "\u0120b"]),
        ("bailingmoe2", ["a", "\u0120", "1", "2", "3", "4", "\u0120It", "'S", "\u010a", "\u0120b"]),
        ("lfm2", ["a", "\u0120", "123", "4", "\u0120It", "'S", "\u010a", "\u0120b"]),
        ("gigachat", ["a", "\u01201234", "\u0120It", "'", "S", "\u010a", "\u0120b"]),
        ("tiny_aya", ["a", "\u0120", "1", "234", "\u0120It'S", "\u010a", "\u0120b"]),
    ],
)
def test_how_byte_level_texts_are_split(directory: Path, tmp_path: Path, pre: str, pieces: list[str]) -> None:
    file = write_gguf(tmp_path / "m.gguf", directory, pre=pre)
    splitter = tokenizers.Tokenizer.from_buffer(ModelDirectory.open(file).tokenizer_json()).pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str("a 1234 It'S\n b")] == pieces


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("kimi-k2", "ab\u4e2d\u6587cd\u3042", ["ab", "\u4e2d\u6587", "cd\u3042"]),
        ("youtu", "ab\u4e2d\u3042cd\uac00", ["ab", "\u4e2d\u3042", "cd", "\uac00"]),
        ("jais-2", "a" + 7 * " " + "b", ["a", "    ", "  ", " b"]),
        (
            "qwen35",
            "\u0928\u092e\u0938\u094d\u0924\u0947 \u0301a",
            ["\u0928\u092e\u0938\u094d\u0924\u0947", " \u0301a"],
        ),
        ("bailingmoe", "a\n\nb", ["a", "\n\n", "b"]),
    ],
)
def test_how_scripts_and_runs_of_spaces_are_split(
    directory: Path, tmp_path: Path, pre: str, text: str, pieces: list[str]
) -> None:
    file = write_gguf(tmp_path / "m.gguf", directory, pre=pre)
    splitter = tokenizers.Tokenizer.from_buffer(ModelDirectory.open(file).tokenizer_json()).pre_tokenizer
    assert [text[slice(*place)] for _, place in splitter.pre_tokenize_str(text)] == pieces


def test_sentence_pieces_are_merged_by_their_scores(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_scores = gguf.GGUFWriter.add_token_scores
    model = tmp_path / "pieces"
    model.mkdir()
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": byte_fallback().get_vocab_size()}
    (model / "config.json").write_text(json.dumps(config))
    byte_fallback().save(str(model / "tokenizer.json"))
    (model / "model.safetensors").symlink_to(directory / "model.safetensors")
    file = write_gguf(tmp_path / "m.gguf", model)
    tokenizer = Tokenizer.open(ModelDirectory.open(file), FairExecutor(1))
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS[:5]:
        found = tokens_of(file, text)
        assert found == byte_fallback().encode(text).ids, text
        if not text.startswith(" "):
            # transformers adds no second one there, like SentencePiece.
            assert found[1:] == expected.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(found, include_special_tokens=False) == text
    file = write_gguf(tmp_path / "n.gguf", model, further={"tokenizer.ggml.add_space_prefix": False})
    assert tokens_of(file, "the") != tokens_of(file, " the")
    # A converter with only a tokenizer.json writes such scores: then tokens are in the order of their merges.
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_token_scores", lambda self, scores: add_scores(self, [-1000.0] * len(scores))
    )
    file = write_gguf(tmp_path / "o.gguf", model)
    for text in TEXTS[:5]:
        assert tokens_of(file, text) == byte_fallback().encode(text).ids, text


def test_tokens_of_gemma_4_have_merges_of_their_own(directory: Path, tmp_path: Path) -> None:
    model = tmp_path / "pieces"
    model.mkdir()
    content = json.loads(byte_fallback().to_str())
    # The scores, which follow another order, would merge "at" first.
    content["model"]["merges"].insert(0, ["c", "a"])
    content["model"]["vocab"]["ca"] = size = byte_fallback().get_vocab_size()
    del content["normalizer"]["normalizers"][0], content["decoder"]["decoders"][-1]
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": size + 1}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text(json.dumps(content))
    (model / "model.safetensors").symlink_to(directory / "model.safetensors")
    expected = tokenizers.Tokenizer.from_str(json.dumps(content))
    written = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "tokenizer.ggml.scores": [-1000.0] * (size + 1),
        "tokenizer.ggml.add_bos_token": False,
    }
    file = write_gguf(tmp_path / "m.gguf", model, further=written)
    tokenizer = Tokenizer.open(ModelDirectory.open(file), FairExecutor(1))
    for text in ("the cat sat", " two  spaces", "naïve café 😀", "tabs\tand\n\nlines"):
        found = tokens_of(file, text)
        assert found == expected.encode(text).ids, text
        assert tokenizer.decode(found, include_special_tokens=False) == text


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
    others = [1.0, 2.0] * 8
    assert described(others) == {
        "rope_type": "longrope",
        "short_factor": others,
        "long_factor": others,
        "attention_factor": 1.0,
        "original_max_position_embeddings": 512,
    }
    for factors, problem in (([0.0] * 16, "has factors that are not above 0"), ([1.0] * 8, "is not 16 numbers in")):
        with pytest.raises(ConfigurationError, match=f"rope_freqs.weight {problem}"):
            described(factors)


@pytest.mark.parametrize(
    ("further", "expected"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        # Converters wrote it so before 2024.
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_attn_factor": 1.5,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
                "attention_factor": 1.5,
            },
        ),
    ],
)
def test_how_rotations_are_scaled(
    directory: Path, tmp_path: Path, further: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    file = write_gguf(tmp_path / "m.gguf", directory, further={f"llama.{key}": value for key, value in further.items()})
    assert ModelDirectory.open(file).config["rope_scaling"] == expected


def test_numbers_may_be_lists_that_have_the_same_one_for_each_layer(directory: Path, tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "plain.gguf", directory)
    names = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    fields = GgufFields(GgufHeader.read(plain))
    lists = {f"llama.{name}": [fields.size(name)] * 2 for name in names}
    listed = write_gguf(tmp_path / "listed.gguf", directory, further=lists)
    assert ModelDirectory.open(listed).config == ModelDirectory.open(plain).config
    assert gguf_weights(listed).keys() == gguf_weights(plain).keys()


def test_tokens_that_end_a_turn_end_a_text_too(directory: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).symlink_to(directory / name)
    content = (directory / "tokenizer.json").read_text()
    assert content.count('"<pad>"') == 2
    (model / "tokenizer.json").write_text(content.replace('"<pad>"', '"<|im_end|>"'))
    described = ModelDirectory.open(write_gguf(tmp_path / "m.gguf", model))
    assert described.eos_token_ids == (2, 0)
    assert described.config["eos_token_id"] == [2, 0]
    named = write_gguf(tmp_path / "n.gguf", model, further={"tokenizer.ggml.eot_token_id": 1})
    assert ModelDirectory.open(named).eos_token_ids == (2, 1, 0)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (("a", "b"), {"<|end|>"}),
        (("<|return|>", "b"), {"<|end|>", "<|return|>"}),
        (("<|return|>", "<|call|>"), {"<|return|>", "<|call|>"}),
        (("<|calls|>", "<|flush|>"), {"<|calls|>", "<|flush|>"}),
        (("<turn|>", "<|tool_response>"), {"<|end|>", "<turn|>", "<|tool_response>"}),
    ],
)
def test_a_token_that_ends_a_part_of_a_turn_does_not_end_a_text(others: tuple[str, ...], expected: set[str]) -> None:
    tokens = ("<|end|>", *others)
    assert ends_of_turns(tokens) & set(tokens) == expected


def test_how_to_sample_and_a_sliding_window_are_what_the_file_says(directory: Path, tmp_path: Path) -> None:
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05, "mirostat": 2}
    further = {f"general.sampling.{key}": value for key, value in sampling.items()}
    file = write_gguf(tmp_path / "m.gguf", directory, further={**further, "llama.attention.sliding_window": 64})
    model = ModelDirectory.open(file)
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert model.generation_config == expected
    assert (model.architecture, model.config["sliding_window"]) == ("MistralForCausalLM", 64)


@pytest.mark.parametrize(
    ("further", "problem"),
    [
        (
            {"general.architecture": "rwkv7"},
            "architecture 'rwkv7' of GGUF files is not read; Quire reads llama, mistral, qwen2",
        ),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
        ({"general.type": "mmproj"}, " is the part of a model that reads images or sound, which Quire does not"),
        ({"general.type": "adapter"}, " is an adapter (LoRA), not a model"),
        ({"general.type": ["model"], "llama.block_count": 3}, "block_count is 3"),
        ({"llama.attention.causal": False}, "its tokens attend to later ones, as in a model of embeddings"),
        ({"llama.block_count": 3}, "block_count is 3, and it has the tensors of 2 layers"),
        ({"llama.embedding_length": 64}, "embedding_length is 64, and token_embd.weight has 128 columns"),
        ({"llama.attention.key_length": 1 << 30}, "tensor blk.0.attn_q.weight is missing, or has not as many rows"),
        ({"llama.rope.freq_base": 0.0}, "llama.rope.freq_base is 0.0; expected is a number above 0"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two', not a whole number"),
        ({"llama.block_count": True}, "llama.block_count is True, not a whole number"),
        ({"llama.attention.head_count_kv": [1, 2]}, "head_count_kv is [1, 2], which differs by layer; such models are"),
        ({"llama.feed_forward_length": [0.5, 0.5]}, "feed_forward_length is [0.5, 0.5], not a whole number"),
        ({"tokenizer.ggml.pre": "superbpe"}, "tokenizer.ggml.pre is 'superbpe'; Quire reads gpt-2, phi-2"),
        ({"tokenizer.ggml.pre": "default"}, "it does not say how its tokenizer splits a text (tokenizer.ggml.pre)"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is rwkv; Quire reads gpt2 (byte-level BPE), llama"),
        ({"split.count": 3}, "is the first of 3 parts of a model; give them the names that they had, which end in"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'; Quire reads none, linear and yarn"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "eos_token_id is 5000, which is no token of the vocabulary"),
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


def test_baichuan_without_a_rotation_is_refused(directory: Path, tmp_path: Path) -> None:
    header = GgufHeader.read(write_gguf(tmp_path / "m.gguf", directory))
    named = {key.replace("llama.", "baichuan."): value for key, value in header.metadata.items()}
    named |= {"general.architecture": "baichuan", "baichuan.block_count": 40}
    with pytest.raises(ConfigurationError, match="Baichuan 13B has ALiBi in place of a rotation, which is not read"):
        CONFIGS["baichuan"](GgufFields(GgufHeader(header.path, named, header.tensors)))


def test_pieces_of_gemma_are_merged_in_their_order_and_runs_of_spaces_stay_whole(tmp_path: Path) -> None:
    make_model(tmp_path / "gemma", Family("Gemma2", {"head_dim": 16}))
    content = json.loads(byte_fallback().to_str())
    pieces = content["model"]
    names = [name for name in pieces["vocab"] if name != "▁▁"]
    # As in Gemma: after the bytes, with spaces, and added.
    runs = [" " * length for length in (2, 3, 4)]
    names[259:259] = runs
    pieces["vocab"] = {name: index for index, name in enumerate(names)}
    pieces["merges"].remove(["▁", "▁"])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"] += [{"id": names.index(run), "content": run, **plain} for run in runs]
    (tmp_path / "gemma" / "tokenizer.json").write_text(json.dumps(content))
    scoreless = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "gemma", further=scoreless)
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in (*TEXTS[:5], "a   b    c", "  the cat"):
        assert tokens_of(file, text) == expected.encode(text, add_special_tokens=False), text


def test_parts_are_one_model(directory: Path, tmp_path: Path) -> None:
    whole = ModelDirectory.open(write_gguf(tmp_path / "whole.gguf", directory))
    first = write_gguf(tmp_path / "m.gguf", directory, tensors_per_part=10)
    _, second, third = weight_files(first)
    assert second.name == "m-00002-of-00003.gguf"
    for part in (first, third):
        model = ModelDirectory.open(part)
        assert (model.name, model.config, model.tokenizer_json()) == ("m", whole.config, whole.tokenizer_json())
        assert ModelFingerprint.read(model) == ModelFingerprint.read(whole)


@pytest.mark.parametrize(
    ("further", "template", "changed"),
    [
        ({"general.name": "another", "general.sampling.temp": 0.5}, "{{ messages }}", []),
        ({"llama.rope.freq_base": 7000.0}, None, ["config"]),
        ({"tokenizer.ggml.add_bos_token": False}, None, ["tokenizer"]),
        ({"rope": [2.0] * 16}, None, ["weights"]),
    ],
)
def test_what_a_file_says_tells_models_apart(
    directory: Path, tmp_path: Path, further: dict[str, Any], template: str | None, changed: list[str]
) -> None:
    one, other = (
        asdict(ModelFingerprint.read(ModelDirectory.open(file)))
        for file in (
            write_gguf(tmp_path / "one.gguf", directory),
            write_gguf(tmp_path / "other.gguf", directory, further=further, template=template),
        )
    )
    assert [part for part in one if one[part] != other[part]] == changed


def fields_of(**tokenizer: object) -> GgufFields:
    metadata = {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    return GgufFields(GgufHeader(Path("m.gguf"), {"general.architecture": "llama", **metadata}, {}))


FIELDS = fields_of()


@pytest.mark.parametrize(("model", "expected"), [("llama", [1, 2, 0, None]), ("gpt2", [None] * 4)])
def test_sentence_pieces_have_the_special_tokens_of_llama_cpp(model: str, expected: list[int | None]) -> None:
    """Otherwise a file that lacks them would have texts without end."""
    fields = fields_of(model=model, tokens=["<unk>", "<s>", "</s>"])
    assert [fields.token_id(name) for name in ("bos", "eos", "unknown", "padding")] == expected


def naive_merges(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    is_text = {token for token, kind in zip(tokens, kinds, strict=True) if kind == 1}
    found = [
        (-score, -cut, cut - len(token), tokens.index(token[:cut]), token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        if token in is_text
        for cut in range(1, len(token))
        if token[:cut] in is_text and token[cut:] in is_text
    ]
    return [(left, right) for *_, left, right in sorted(found, key=lambda merge: merge[:4])]


@given(st.dictionaries(st.text("abc", max_size=7), st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 1, 3]))))
def test_pieces_are_merged_from_all_pairs_of_pieces(vocabulary: dict[str, tuple[float, int]]) -> None:
    tokens = list(vocabulary)
    scores, kinds = [score for score, _ in vocabulary.values()], [kind for _, kind in vocabulary.values()]
    assert _merges_of(FIELDS, tokens, scores, kinds) == naive_merges(tokens, scores, kinds)


def count_lines(run: Callable[[], object]) -> int:
    """The number of lines of Python that `run` executes, with repetitions."""
    counted = 0

    def trace(_: FrameType, event: str, __: object) -> Any:
        nonlocal counted
        counted += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return counted


@pytest.mark.parametrize("length", [40, 400])
def test_merges_are_found_in_steps_that_do_not_grow_with_the_length_of_tokens(length: int) -> None:
    """Each of the last tokens begins and ends with all earlier text, and none of them is a pair of tokens."""
    first, last = ("".join(chr(start + index) for index in range(length)) for start in (0x4E00, 0xAC00))
    tokens = [*(first[:size] for size in range(1, length)), *(last[-size:] for size in range(1, length))]
    tokens += [f"{first[:-1]}{number}{last[1:]}" for number in range(300)]
    lines = count_lines(lambda: _merges_of(FIELDS, tokens, [0.0] * len(tokens), [1] * len(tokens)))
    assert lines < 30 * len(tokens)


def test_a_vocabulary_with_merges_without_end_is_refused() -> None:
    tokens = ["a" * length for length in range(1, 1000)]
    with pytest.raises(ConfigurationError, match=r"m\.gguf: its tokens have merges of more than 67108864 characters"):
        _merges_of(FIELDS, tokens, [0.0] * len(tokens), [1] * len(tokens))


def test_parts_that_do_not_belong_together_are_refused(directory: Path, tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m.gguf", directory, tensors_per_part=10)
    _, second, third = weight_files(first)

    def problem() -> str:
        with pytest.raises(ConfigurationError) as caught:
            ModelDirectory.open(first)
        return str(caught.value)

    second.rename(tmp_path / "kept")
    assert problem() == f"{first} is one of 3 parts of a model; {second.name} is not next to it"
    second.write_bytes(third.read_bytes())
    assert problem() == f"{second} has the name of part 2 and is another one"
    other = write_gguf(tmp_path / "other.gguf", directory, tensors_per_part=9)
    second.write_bytes(other.with_name("other-00002-of-00003.gguf").read_bytes())
    assert "have 19 tensors, and 21 are expected; they are parts of several models" in problem()
