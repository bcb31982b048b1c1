"""Vectors of encoders are equal to what sentence-transformers makes of the same files."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer

from gateway.offload import FairExecutor
from gateway.text.tokenizer import Tokenizer
from quire.model_files.embedding_files import EmbeddingFiles, RankingFiles, encoder_fields
from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from quire_kernels.packed_weight import Quantization
from tests.support.embedding_models import FAMILIES, RANKERS, Modules, make_embedding_model, make_ranking_model
from tests.support.tiers import parametrize_in_turn
from worker_svc.encoders.encoder import PackedTexts
from worker_svc.encoders.loading import load_encoder
from worker_svc.encoders.pooling import PairScores, TextVectors
from worker_svc.encoders.recorded import RecordedEncoder
from worker_svc.parallel.ranks import ALONE
from worker_svc.weights import Placement

TEXTS = ("the cat sat on the mat", "a", "", "once upon a time there was a small blue dog", "the cat sat on the mat")
# Texts of 0 to 58 tokens and two special ones: shorter and longer than windows.
WORDS = ("the", "cat", "sat", "on", "a", "big", "red", "mat")
LENGTHS = tuple(" ".join(WORDS[place % 8] for place in range(count)) for count in range(59))
MEAN: Modules = (("Pooling", {"pooling_mode_mean_tokens": True}),)
DENSE = {"in_features": 96, "out_features": 20, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
VARIANTS: dict[str, Modules | None] = {
    "first token": (("Pooling", {"pooling_mode_cls_token": True}), ("Normalize", None)),
    "largest": (("Pooling", {"pooling_mode_max_tokens": True}),),
    "root of the length": (("Pooling", {"pooling_mode_mean_sqrt_len_tokens": True}),),
    "weighted by place": (("Pooling", {"pooling_mode_weightedmean_tokens": True}), ("Normalize", None)),
    "last token": (("Pooling", {"pooling_mode": "lasttoken"}),),
    "two, as newer files name them": (("Pooling", {"pooling_mode": ["max", "cls"]}), ("Dense", DENSE)),
    "all of the older flags": (
        ("Pooling", {f"pooling_mode_{each}": True for each in ("mean_tokens", "cls_token")}),
        ("Dense", DENSE | {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}),
        ("Normalize", None),
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
    recorded = RecordedEncoder(encoder, 2 * len(packed.token_ids))
    # All widths of these models are whole blocks of floats, not of pairs.
    assert recorded.is_recorded or dtype == torch.bfloat16
    with torch.inference_mode():
        recorded(PackedTexts.of([packed.token_ids[:40]]))
        hidden = encoder(packed)
        assert torch.equal(recorded(packed), hidden)
        return vectors(hidden, packed.lengths)


def scores_of(path: Path) -> torch.Tensor:
    """[pairs] of `PAIRS` by Quire's encoder."""
    directory = ModelDirectory.open(path)
    files, tokenizer = RankingFiles.of(directory), Tokenizer.open(directory, FairExecutor(1))
    assert files is not None

    async def encode() -> list[list[int]]:
        return [await tokenizer.encode_pair(files.prompt + query, document) for query, document in PAIRS]

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


def test_the_fixed_ntk_scaling_of_gte_is_another_base_and_a_factor(tmp_path: Path) -> None:
    file = make_embedding_model(tmp_path, "gte") / "config.json"
    config = json.loads(file.read_text())
    # The frequencies are (factor * base) ** (-2i / size) / factor ** (2 / size).
    same = {"rope_type": "linear", "rope_theta": 8 * 500.0, "factor": 8 ** (2 / 12)}
    file.write_text(json.dumps(config | {"rope_parameters": same}))
    truth = SentenceTransformer(str(tmp_path), device="cpu").encode(list(TEXTS), convert_to_tensor=True)
    in_its_own_words = {"rope_theta": 500.0, "rope_scaling": {"type": "ntk", "factor": 8.0}, "rope_parameters": None}
    file.write_text(json.dumps(config | in_its_own_words | {"model_type": "new", "architectures": ["NewModel"]}))
    torch.testing.assert_close(vectors_of(tmp_path, torch.float32), truth, rtol=1e-4, atol=1e-4)


def test_fields_of_nomics_own_code_are_read(tmp_path: Path) -> None:
    file = make_embedding_model(tmp_path, "nomic_bert") / "config.json"
    expected = vectors_of(tmp_path, torch.float32)
    sizes = {"n_embd": 48, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 64}
    sizes |= {"vocab_size": 78, "type_vocab_size": 2}
    further = {"rotary_emb_base": 1000, "activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "prenorm": False}
    biases = dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False)
    own = {"model_type": "nomic_bert", "architectures": ["NomicBertModel"], **sizes, **further, **biases}
    file.write_text(json.dumps(own))
    assert torch.equal(vectors_of(tmp_path, torch.float32), expected)
    file.write_text(json.dumps(own | {"moe_every_n_layers": 2}))
    with pytest.raises(ConfigurationError, match="moe_every_n_layers is 2; expected 0, the only supported value"):
        vectors_of(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("family", "older"),
    [
        ("modernbert", {"global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "local_rope_theta": 1e4}),
        ("gemma3_text", {"_sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    ],
)
def test_fields_of_older_transformers_are_read(family: str, older: dict[str, Any], tmp_path: Path) -> None:
    file = make_embedding_model(tmp_path, family) / "config.json"
    expected = vectors_of(tmp_path, torch.float32, LENGTHS)
    config = {key: value for key, value in json.loads(file.read_text()).items() if key not in older}
    file.write_text(json.dumps(config | older | {"layer_types": None, "rope_parameters": None}))
    assert torch.equal(vectors_of(tmp_path, torch.float32, LENGTHS), expected)


def test_a_decoder_of_gemma_is_refused(tmp_path: Path) -> None:
    file = make_embedding_model(tmp_path, "gemma3_text") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_bidirectional_attention": False}))
    with pytest.raises(ConfigurationError, match="use_bidirectional_attention is False; expected true, the only"):
        vectors_of(tmp_path, torch.float32)


def test_vectors_are_cut_to_the_size_of_the_settings(tmp_path: Path) -> None:
    modules = (*MEAN, ("Normalize", None))
    check(make_embedding_model(tmp_path / "cut", modules=modules, settings={"truncate_dim": 16}))
    check(make_embedding_model(tmp_path / "whole", modules=modules, settings={"truncate_dim": 300}))
    files = EmbeddingFiles.of(ModelDirectory.open(tmp_path / "cut"))
    assert files is not None
    assert files.size(48) == 16


@pytest.mark.parametrize("name", VARIANTS)
def test_modules_are_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    check(make_embedding_model(tmp_path, modules=VARIANTS[name]))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 9, "do_lower_case": True}),
        ("sentence_roberta_config.json", {"max_seq_length": 9, "do_lower_case": True}),
        ("sentence_xlnet_config.json", {"max_seq_length": 50, "tokenizer_args": {"model_max_length": 7}}),
        ("sentence_bert_config.json", {}),
    ],
)
def test_texts_are_read_and_cut_as_the_settings_of_older_and_newer_releases_say(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    make_embedding_model(tmp_path, max_seq_length=None, max_positions=40)
    (tmp_path / "sentence_bert_config.json").unlink()
    (tmp_path / name).write_text(json.dumps(settings))
    for file, old, new in (
        ("tokenizer.json", '"lowercase": true', '"lowercase": false'),
        ("tokenizer_config.json", '"model_max_length": 40', '"model_max_length": 20'),
    ):
        text = (tmp_path / file).read_text()
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new))
    files = EmbeddingFiles.of(ModelDirectory.open(tmp_path))
    assert files is not None
    assert files.max_tokens == SentenceTransformer(str(tmp_path), device="cpu").max_seq_length
    check(tmp_path, ("the Cat SAT", "a big dog"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seq_length": 0}, "max_seq_length is 0; expected above 0"),
        ({"tokenizer_args": {"model_max_length": "9"}}, "model_max_length is '9'; expected above 0"),
        ({"tokenizer_args": [9]}, r"the arguments of the tokenizer are \[9\]; expected an object"),
    ],
)
def test_wrong_lengths_are_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_embedding_model(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigurationError, match=message):
        EmbeddingFiles.of(ModelDirectory.open(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "custom_st.Transformer"}, "has a module of the type custom_st.Transformer, which is not supported"),
        ({"path": "0_Transformer"}, "has the Transformer in the folder 0_Transformer; only a directory that has its"),
    ],
)
def test_transformers_of_other_packages_and_places_are_refused(
    change: dict[str, str], message: str, tmp_path: Path
) -> None:
    file = make_embedding_model(tmp_path) / "modules.json"
    first, *rest = json.loads(file.read_text())
    file.write_text(json.dumps([first | change, *rest]))
    with pytest.raises(ConfigurationError, match=message):
        EmbeddingFiles.of(ModelDirectory.open(tmp_path))


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


@parametrize_in_turn("family, dtype", FAMILIES, [(torch.bfloat16,), (torch.float32,)])
def test_bits_of_a_vector_do_not_depend_on_the_other_texts(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    modules = (*MEAN, ("Dense", DENSE | {"in_features": 48}), ("Normalize", None))
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


@pytest.mark.parametrize("family", RANKERS)
def test_cross_encoders_as_sentence_transformers_saves_them_are_read(family: str, tmp_path: Path) -> None:
    make_ranking_model(tmp_path / "model", family)
    prompts = {"prompts": {"task": "a big "}, "default_prompt_name": "task"}
    model = CrossEncoder(str(tmp_path / "model"), device="cpu", max_length=30, **prompts)
    model.save_pretrained(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "modules.json").is_file()
    truth = CrossEncoder(str(tmp_path / "saved"), device="cpu").predict(PAIRS, convert_to_tensor=True)
    torch.testing.assert_close(scores_of(tmp_path / "saved"), truth, rtol=1e-4, atol=1e-5)
    files = RankingFiles.of(ModelDirectory.open(tmp_path / "saved"))
    assert files is not None
    assert (files.max_tokens, files.prompt) == (30, "a big ")


def test_a_cross_encoder_of_several_labels_is_refused(tmp_path: Path) -> None:
    make_ranking_model(tmp_path / "model")
    model = CrossEncoder(
        str(tmp_path / "model"), device="cpu", num_labels=3, model_kwargs={"ignore_mismatched_sizes": True}
    )
    model.save_pretrained(str(tmp_path / "saved"))
    with pytest.raises(ConfigurationError, match=r"classifies or ranks texts and generates none .* with one label"):
        ModelDirectory.open(tmp_path / "saved")


@pytest.mark.parametrize("has_configuration", [False, True])
def test_directories_that_begin_with_another_module_are_refused_by_its_name(
    has_configuration: bool, tmp_path: Path
) -> None:
    """A Router, or embeddings of words, has no config.json of a model."""
    make_embedding_model(tmp_path)
    (tmp_path / "config.json").unlink()
    if has_configuration:
        (tmp_path / "config.json").write_text('{"frozen": true}')
    package = "sentence_transformers.sentence_transformer.modules"
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "", "type": f"{package}.StaticEmbedding"}]))
    with pytest.raises(ConfigurationError, match="begins with a module of the type StaticEmbedding, which is not supp"):
        ModelDirectory.open(tmp_path)


@pytest.mark.parametrize("kind", ["SparseEncoder", "MultiVectorEncoder", "CrossEncoder"])
def test_models_of_another_class_of_the_package_are_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    directory = ModelDirectory.open(make_embedding_model(tmp_path, settings={"model_type": kind}))
    with pytest.raises(ConfigurationError, match=f"model_type is '{kind}', and modules as in modules.json are supp"):
        EmbeddingFiles.of(directory)


def test_pickled_weights_of_a_module_are_refused_with_the_way_out(tmp_path: Path) -> None:
    modules = (*MEAN, ("Dense", DENSE | {"in_features": 48}))
    make_embedding_model(tmp_path, modules=modules)
    weights = tmp_path / "2_Dense" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(
        ConfigurationError, match=r"is a pickle, which is never loaded; convert .* SentenceTransformer\("
    ):
        vectors_of(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ((("WordWeights", {}),), "has a module of the type WordWeights, which is not supported; supported are"),
        ((("Normalize", None),), "has no Pooling directly behind the Transformer"),
        ((("Pooling", {"include_prompt": False}),), "include_prompt of Pooling is false, which is not supported"),
        (
            (*MEAN, ("Normalize", {"module_input_name": "token_embeddings"})),
            "module_input_name is 'token_embeddings', w",
        ),
        (
            (*MEAN, ("Dense", DENSE | {"in_features": 48, "module_output_name": "x"})),
            "module_output_name is 'x', which",
        ),
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
