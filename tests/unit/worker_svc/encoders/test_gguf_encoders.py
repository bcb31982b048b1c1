"""Vectors and scores by GGUF files of encoders equal the results by the directories that they were made of."""

import json
from pathlib import Path

import gguf
import pytest
import tokenizers
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer

from quire.model_files.embedding_files import EmbeddingFiles
from quire.model_files.gguf_header import GgufFields, GgufHeader
from quire.model_files.gguf_tokenizer import tokenizer_of
from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from tests.support.embedding_models import make_embedding_model, make_ranking_model
from tests.support.gguf_encoders import ARCHITECTURES, write_encoder_gguf
from tests.support.tiers import parametrize_in_turn
from tests.unit.worker_svc.encoders.test_vectors import LENGTHS, PAIRS, scores_of, vectors_of

NORMALIZED = ("Normalize", None)
DENSE = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}


@parametrize_in_turn(
    "family, mode, pooling",
    ARCHITECTURES,
    [("mean", gguf.PoolingType.MEAN), ("cls", gguf.PoolingType.CLS), ("lasttoken", gguf.PoolingType.LAST)],
)
def test_vectors_are_those_of_the_directory(family: str, mode: str, pooling: gguf.PoolingType, tmp_path: Path) -> None:
    modules = [("Pooling", {"pooling_mode": mode}), NORMALIZED]
    if family == "gemma3_text":
        sizes = ({"in_features": 48, "out_features": 96}, {"in_features": 96, "out_features": 48})
        modules[1:1] = [("Dense", DENSE | each) for each in sizes]
    directory = make_embedding_model(tmp_path / "model", family, modules=modules, max_seq_length=60)
    # No field of the file has it: llama.cpp takes the size of a head.
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"query_pre_attn_scalar": 12', '"query_pre_attn_scalar": 16'))
    file = write_encoder_gguf(tmp_path / "model.gguf", directory, pooling)
    truth = SentenceTransformer(str(directory), device="cpu").encode(list(LENGTHS), convert_to_tensor=True)
    torch.testing.assert_close(vectors_of(file, torch.float32, LENGTHS), truth, rtol=1e-4, atol=1e-5)
    rounded, expected = (vectors_of(each, torch.bfloat16, LENGTHS) for each in (file, directory))
    assert torch.cosine_similarity(rounded, expected).min() > 0.9999


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
@pytest.mark.parametrize("family", ["bert", "nomic_bert"])
def test_coded_weights_give_the_vectors_of_what_they_stand_for(family: str, kind: str, tmp_path: Path) -> None:
    modules = [("Pooling", {"pooling_mode": "mean"}), NORMALIZED]
    directory = make_embedding_model(tmp_path / "model", family, modules=modules, hidden_size=64)
    file = write_encoder_gguf(tmp_path / "coded.gguf", directory, quantization=gguf.GGMLQuantizationType[kind])
    coded, exact = vectors_of(file, torch.float32), vectors_of(directory, torch.float32)
    assert torch.cosine_similarity(coded, exact).min() > {"Q8_0": 0.999, "Q4_0": 0.9, "F16": 0.99999}[kind]
    assert not torch.equal(coded, exact)


@pytest.mark.parametrize("pooling", [gguf.PoolingType.RANK, None])
def test_scores_are_those_of_the_directory(tmp_path: Path, pooling: gguf.PoolingType | None) -> None:
    directory = make_ranking_model(tmp_path / "model", "roberta")
    file = write_encoder_gguf(tmp_path / "model.gguf", directory, pooling)
    truth = CrossEncoder(str(directory), device="cpu").predict(PAIRS, convert_to_tensor=True)
    torch.testing.assert_close(scores_of(file), truth, rtol=1e-4, atol=1e-5)


def test_a_unigram_vocabulary_splits_texts_as_the_tokenizer_that_it_was_made_of(tmp_path: Path) -> None:
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", "\u2581the", "\u2581cat", "the", "c", "a", "t", "at", "s"]
    scores = [0.0] * 4 + [-2.0, -3.0, -3.5, -6.0, -5.0, -5.1, -5.2, -4.0, -4.5]
    kinds = [3, 3, 3, 2] + [1] * (len(pieces) - 4)
    metadata = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    content = tokenizer_of(GgufFields(GgufHeader(tmp_path, metadata, {})), pieces)
    found = tokenizers.Tokenizer.from_str(json.dumps(content))
    truth = transformers.XLMRobertaTokenizer(vocab=list(zip(pieces, scores, strict=True)))
    for text in ("the cats", " the  cat", "", "cat the\ncat x"):
        assert found.encode(text).ids == truth(text)["input_ids"]
    assert found.encode("the", "cat").ids == truth("the", "cat")["input_ids"]


def test_a_kind_of_pooling_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    directory = make_embedding_model(tmp_path / "model")
    file = write_encoder_gguf(tmp_path / "model.gguf", directory, gguf.PoolingType.NONE)
    with pytest.raises(ConfigurationError, match=r"bert\.pooling_type is 0; supported are 1 \(mean\), 2 \(cls\)"):
        EmbeddingFiles.of(ModelDirectory.open(file))
    write_encoder_gguf(file, directory, gguf.PoolingType.RANK)
    without_head = r"it ranks documents, .* cls\.weight .* use the directory that it was made of"
    with pytest.raises(ConfigurationError, match=without_head):
        ModelDirectory.open(file)
    # Where the model has BERT's pooler, the converter leaves it out.
    write_encoder_gguf(file, make_ranking_model(tmp_path / "ranks"), None)
    with pytest.raises(ConfigurationError, match=without_head):
        ModelDirectory.open(file)
