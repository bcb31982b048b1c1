"""Vectors of encoders are equal to what sentence-transformers makes of the same files."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer

from gateway.offload import FairExecutor
from gateway.text.tokenizer import Tokenizer
from kernels.packed_weight import Quantization
from quire.model_files.embedding_files import EmbeddingFiles, RankingFiles, encoder_fields
from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from tests.support.embedding_models import FAMILIES, RANKERS, make_embedding_model, make_ranking_model
from worker_svc.encoders.encoder import PackedTexts
from worker_svc.encoders.loading import load_encoder
from worker_svc.encoders.pooling import PairScores, TextVectors
from worker_svc.parallel.ranks import ALONE
from worker_svc.weights import Placement

Modules = Sequence[tuple[str, Mapping[str, Any]]]

TEXTS = ("the cat sat on the mat", "a", "", "once upon a time there was a small blue dog", "the cat sat on the mat")
# Texts of 0 to 58 tokens and two special ones: shorter and longer than windows.
WORDS = ("the", "cat", "sat", "on", "a", "big", "red", "mat")
LENGTHS = tuple(" ".join(WORDS[place % 8] for place in range(count)) for count in range(59))
MEAN: Modules = (("Pooling", {"pooling_mode_mean_tokens": True}),)
DENSE = {"in_features": 96, "out_features": 20, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
VARIANTS: dict[str, Modules | None] = {
    "first token": (("Pooling", {"pooling_mode_cls_token": True}), ("Normalize", {})),
    "largest": (("Pooling", {"pooling_mode_max_tokens": True}),),
    "root of the length": (("Pooling", {"pooling_mode_mean_sqrt_len_tokens": True}),),
    "weighted by place": (("Pooling", {"pooling_mode_weightedmean_tokens": True}), ("Normalize", {})),
    "last token": (("Pooling", {"pooling_mode": "lasttoken"}),),
    "two, as newer files name them": (("Pooling", {"pooling_mode": ["max", "cls"]}), ("Dense", DENSE)),
    "all of the older flags": (
        ("Pooling", {f"pooling_mode_{each}": True for each in ("mean_tokens", "cls_token")}),
        ("Dense", DENSE | {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}),
        ("Normalize", {}),
    ),
    "no modules": None,
}


def vectors_of(path: Path, dtype: torch.dtype, texts: Sequence[str] = TEXTS) -> torch.Tensor:
    """[texts, size] by Quire's encoder."""
    directory = ModelDirectory.open(path)
    files = EmbeddingFiles.of(directory)
    assert files is not None
    tokenizer = Tokenizer.open(directory, FairExecutor(1))

    async def encode() -> list[list[int]]:
        return [await tokenizer.encode(text, add_special_tokens=True) for text in texts]

    packed = PackedTexts.of([torch.tensor(ids) for ids in asyncio.run(encode())])
    encoder = load_encoder(directory, Placement(torch.device("cpu"), dtype, ALONE, Quantization.NONE, None))
    vectors = TextVectors(files, encoder.hidden_size)
    with torch.inference_mode():
        return vectors(encoder(packed), packed.lengths)


def scores_of(path: Path) -> torch.Tensor:
    """[pairs] of `PAIRS` by Quire's encoder."""
    directory = ModelDirectory.open(path)
    files, tokenizer = RankingFiles.of(directory), Tokenizer.open(directory, FairExecutor(1))
    assert files is not None

    async def encode() -> list[list[int]]:
        return [await tokenizer.encode_pair(*pair) for pair in PAIRS]

    packed = PackedTexts.of([torch.tensor(ids) for ids in asyncio.run(encode())], files.separator)
    head = PairScores(files, directory.architecture, encoder_fields(directory))
    placement = Placement(torch.device("cpu"), torch.float32, ALONE, Quantization.NONE, None)
    encoder = load_encoder(directory, placement, head)
    with torch.inference_mode():
        return head(encoder(packed), packed.lengths)[:, 0]


def check(path: Path, texts: Sequence[str] = TEXTS) -> None:
    truth = SentenceTransformer(str(path), device="cpu").encode(list(texts), convert_to_tensor=True)
    exact = vectors_of(path, torch.float32, texts)
    torch.testing.assert_close(exact, truth, rtol=1e-4, atol=1e-4)
    assert torch.cosine_similarity(exact, truth).min() > 0.99999
    rounded = vectors_of(path, torch.bfloat16, texts)
    assert torch.cosine_similarity(rounded, truth).min() > 0.9999


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    check(make_embedding_model(tmp_path, family, modules=MEAN, max_seq_length=60), LENGTHS)


@pytest.mark.parametrize("name", VARIANTS)
def test_modules_are_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    check(make_embedding_model(tmp_path, modules=VARIANTS[name]))


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_the_shortest_and_the_longest_text_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    directory = ModelDirectory.open(make_embedding_model(tmp_path, family))
    placement = Placement(torch.device("cpu"), torch.float32, ALONE, Quantization.NONE, None)
    encoder = load_encoder(directory, placement)
    texts = [torch.arange(length) % 20 + 5 for length in (1, encoder.max_tokens)]
    truth = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        expected = torch.cat([truth(text[None]).last_hidden_state[0] for text in texts])
        found = encoder(PackedTexts.of(texts))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_vector_do_not_depend_on_the_other_texts(dtype: torch.dtype, family: str, tmp_path: Path) -> None:
    modules = (*MEAN, ("Dense", DENSE | {"in_features": 48}), ("Normalize", {}))
    path = make_embedding_model(tmp_path, family, modules=modules)
    texts = (*TEXTS, LENGTHS[40])
    together = vectors_of(path, dtype, texts * 3)
    each_by_itself = torch.cat([vectors_of(path, dtype, [text]) for text in texts])
    assert torch.equal(together, each_by_itself.repeat(3, 1))


PAIRS = [("a cat", text) for text in ("the cat sat on the mat", "a big red dog", "", "once upon a time")]


@pytest.mark.parametrize(
    ("family", "activation"),
    [*((family, None) for family in RANKERS), ("bert", "torch.nn.modules.linear.Identity")],
)
def test_scores_are_those_of_a_cross_encoder(family: str, activation: str | None, tmp_path: Path) -> None:
    make_ranking_model(tmp_path, family, activation=activation, types=activation is not None)
    scores = scores_of(tmp_path)
    truth = CrossEncoder(str(tmp_path), device="cpu").predict(PAIRS, convert_to_tensor=True)
    torch.testing.assert_close(scores, truth, rtol=1e-4, atol=1e-5)
    assert scores.argsort().tolist() == truth.argsort().tolist()


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ((("WordWeights", {}),), "has a module of the type WordWeights, which is not supported; supported are"),
        ((("Normalize", {}),), "has no Pooling directly behind the Transformer"),
        ((("Pooling", {"include_prompt": False}),), "include_prompt of Pooling is false, which is not supported"),
        ((("Pooling", {"pooling_mode": "sum"}),), r"the pooling mode \['sum'\] is not supported; supported are cls, "),
        (
            (*MEAN, ("Dense", DENSE)),
            "in_features is 96, and the module before it gives 48 numbers",
        ),
        (
            (*MEAN, ("Dense", DENSE | {"in_features": 48, "activation_function": "os.system"})),
            "the activation function is 'os.system'; supported are Identity, Tanh",
        ),
    ],
)
def test_modules_that_are_not_supported_are_refused_by_name(modules: Modules, message: str, tmp_path: Path) -> None:
    directory = ModelDirectory.open(make_embedding_model(tmp_path, modules=modules))

    def read() -> None:
        files = EmbeddingFiles.of(directory)
        assert files is not None
        files.size(48)

    with pytest.raises(ConfigurationError, match=message):
        read()
