"""Vectors and scores of decoders are what sentence-transformers makes of the same files, however a text is computed."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer

from gateway.offload import FairExecutor
from gateway.request.served_model import ServedModel
from gateway.text.tokenizer import Tokenizer
from quire.model_files.embedding_files import vector_files
from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from tests.support.embedding_models import DECODERS, PAIR_TEMPLATE, Modules, make_decoder, make_embedding_model
from tests.support.gguf_files import write_gguf
from tests.support.tiers import parametrize_once
from tests.support.whole_engine import WholeEngine, make_request

TEXTS = (
    "The cat sat on the mat.",
    "a",
    "",
    "Once upon a time there was a small blue dog. " * 9,
    "Where are blocks kept?",
)
LAST: Modules = (("Pooling", {"pooling_mode": "lasttoken"}), ("Normalize", {}))
DENSE = {"in_features": 128, "out_features": 20, "bias": True, "activation_function": "torch.nn.Tanh"}
POOLINGS: dict[str, Modules] = {
    "mean": (("Pooling", {"pooling_mode_mean_tokens": True}),),
    "root of the length": (("Pooling", {"pooling_mode": "mean_sqrt_len_tokens"}),),
    "weighted": (("Pooling", {"pooling_mode": "weightedmean"}), ("Normalize", {})),
    "two, and a layer": (("Pooling", {"pooling_mode": ["mean", "lasttoken"]}), ("Dense", DENSE)),
}
SMALL = ("--num-threads=1", "--max-num-seqs=8", "--num-gpu-blocks=400")


def encode(path: Path, texts: Sequence[str]) -> list[list[int]]:
    tokenizer = Tokenizer.open(ModelDirectory.open(path), FairExecutor(1))

    async def all_of_them() -> list[list[int]]:
        return [await tokenizer.encode(text, add_special_tokens=True) for text in texts]

    return asyncio.run(all_of_them())


def run(engine: WholeEngine, prompts: Sequence[Sequence[int]], **config: Any) -> np.ndarray:
    """The vectors of prompts, [prompts, size] float32."""
    requests = [make_request(number, prompt, max_tokens=1) for number, prompt in enumerate(prompts)]
    texts = engine.run(requests, **config)
    return np.stack([np.frombuffer(texts[number, 0].vector, np.float32) for number in range(len(prompts))])


def vectors_of(path: Path, texts: Sequence[str] = TEXTS, *flags: str) -> np.ndarray:
    return run(WholeEngine(f"--model={path}", *SMALL, *flags), encode(path, texts))


def cosines(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)


def check(path: Path, least: float = 0.99999, *flags: str) -> None:
    expected = SentenceTransformer(str(path), device="cpu").encode(list(TEXTS))
    found = vectors_of(path, TEXTS, "--dtype=float32", *flags)
    assert cosines(found, expected).min() >= least
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), np.linalg.norm(expected, axis=1), rtol=1e-4)


@pytest.mark.parametrize("task", ["ForCausalLM", "Model"])
@pytest.mark.parametrize("family", DECODERS)
def test_families_are_those_of_transformers(family: str, task: str, tmp_path: Path) -> None:
    check(make_decoder(tmp_path, family, task=task, modules=LAST))


@pytest.mark.parametrize("name", POOLINGS)
def test_poolings_are_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    check(make_decoder(tmp_path, modules=POOLINGS[name]))


@pytest.mark.parametrize("name", ["last", "mean"])
def test_bits_of_a_vector_do_not_depend_on_how_its_text_is_computed(name: str, tmp_path: Path) -> None:
    path = make_decoder(tmp_path, modules=LAST if name == "last" else (*POOLINGS["mean"], ("Normalize", {})))
    instruction = "Instruct: find the block that answers the question, and nothing else.\nQuery: "
    prompts = encode(path, [instruction + text for text in TEXTS])
    whole = WholeEngine(f"--model={path}", "--dtype=float32", *SMALL)
    expected = np.concatenate([run(whole, [prompt]) for prompt in prompts])
    np.testing.assert_array_equal(run(whole, prompts), expected)
    assert whole.usages[0].cached_tokens == 0
    # The core begins with the blocks of the run before, as after a worker that was killed.
    np.testing.assert_array_equal(run(whole, prompts, is_warm=True), expected)
    cached = [whole.usages[number].cached_tokens for number in range(len(prompts))]
    assert min(cached) >= 16
    assert max(cached) >= 64
    # One block after the other: all but the first text find the instruction, and none finds more than it.
    run(whole, prompts[:1])
    np.testing.assert_array_equal(run(whole, prompts[1:2], is_warm=True), expected[1:2])
    assert whole.usages[0].cached_tokens == 16
    for size in (10, 17, 33):
        chunked = WholeEngine(f"--model={path}", "--dtype=float32", *SMALL, f"--max-num-batched-tokens={size}")
        np.testing.assert_array_equal(run(chunked, prompts), expected)
        assert chunked.num_steps > len(prompts[3]) // size


@pytest.mark.parametrize("name", ["encoder", "last", "mean"])
def test_a_text_whose_vector_is_not_finite_fails_and_changes_no_other(name: str, tmp_path: Path) -> None:
    if name == "encoder":
        path, bad = make_embedding_model(tmp_path), 20
        prompts = [[2, 7, 3], [2, 8, 9, 10, 3], [2, 9, 3], [2, 10, 11, 3]]
    else:
        path, bad = make_decoder(tmp_path, modules=LAST if name == "last" else POOLINGS["mean"]), 99
        prompts = [[*range(3, 40), 2], [*range(3, 60), 2], [40, 41, 2], [*range(50, 90), 2]]
    weights = load_file(path / "model.safetensors")
    (embeddings,) = (each for each in weights if re.search(r"word_embeddings|embed_tokens", each))
    weights[embeddings][bad] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    engine = WholeEngine(f"--model={path}", "--dtype=float32", *SMALL)
    expected = run(engine, prompts)
    assert np.isfinite(expected).all()
    # One text has the bad token near its end, after a prefix of another text, and one begins with it.
    requests = [make_request(number, prompt, max_tokens=1) for number, prompt in enumerate(prompts)]
    requests.insert(1, make_request(10, [*prompts[0][:-1], bad, 3], max_tokens=1))
    requests.append(make_request(11, [bad, *prompts[1]], max_tokens=1))
    for is_warm in (False, True):
        texts = engine.run(requests, is_warm=is_warm, failing={10, 11})
        found = [np.frombuffer(texts[number, 0].vector, np.float32) for number in range(len(prompts))]
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(run(engine, prompts, is_warm=True), expected)


@parametrize_once("family", [*DECODERS])
def test_rounded_vectors_are_as_close_as_those_of_transformers(family: str, tmp_path: Path) -> None:
    path = make_decoder(tmp_path, family, modules=LAST)
    expected = SentenceTransformer(str(path), device="cpu").encode(list(TEXTS))
    rounded = SentenceTransformer(str(path), device="cpu", model_kwargs={"dtype": torch.bfloat16}).encode(list(TEXTS))
    # Processors with products of bfloat16 round otherwise than others.
    most = max(1e-4, 2 * (1 - cosines(rounded.astype(np.float32), expected).min()))
    assert 1 - cosines(vectors_of(path, TEXTS, "--dtype=bfloat16"), expected).min() < most
    for flag in ("--quantization=int8-weight-only", "--kv-cache-dtype=int8"):
        assert cosines(vectors_of(path, TEXTS, "--dtype=float32", flag), expected).min() > 0.999


@pytest.mark.parametrize(("pooling", "mode"), [("last", "lasttoken"), ("mean", "mean")])
def test_a_model_of_texts_gives_vectors_if_a_flag_says_how(pooling: str, mode: str, tmp_path: Path) -> None:
    named = make_decoder(tmp_path / "named", modules=(("Pooling", {"pooling_mode": mode}), ("Normalize", {})))
    plain = make_decoder(tmp_path / "plain", modules=None, tie_word_embeddings=False)
    flags = ("--dtype=float32", f"--pooling={pooling}")
    np.testing.assert_array_equal(vectors_of(plain, TEXTS, *flags), vectors_of(named, TEXTS, "--dtype=float32"))
    with pytest.raises(
        ConfigurationError, match=r"--pooling is \w+, and the files of .* say already how it makes vectors"
    ):
        vector_files(ModelDirectory.open(named), pooling)


def test_gguf_files_say_their_pooling(tmp_path: Path) -> None:
    directory = make_decoder(tmp_path / "model", modules=LAST)
    made = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.add_bos_token": False}
    file = write_gguf(tmp_path / "model.gguf", directory, further={"qwen3.pooling_type": 3, **made})
    prompts = encode(directory, TEXTS)
    assert encode(file, TEXTS) == prompts
    found = run(WholeEngine(f"--model={file}", "--dtype=float32", *SMALL), prompts)
    np.testing.assert_allclose(found, vectors_of(directory, TEXTS, "--dtype=float32"), atol=1e-5)
    file = write_gguf(tmp_path / "ranks.gguf", directory, further={"qwen3.pooling_type": 4, **made})
    with pytest.raises(ConfigurationError, match="pooling_type is 4; supported are 1, the mean of all tokens, and 3"):
        vector_files(ModelDirectory.open(file))


RANKERS: dict[str, Mapping[str, Any]] = {
    "head": {"modules": None, "task": "ForSequenceClassification", "num_labels": 1},
    "head and template": {
        "modules": None,
        "task": "ForSequenceClassification",
        "num_labels": 1,
        "template": PAIR_TEMPLATE,
    },
    "logits": {
        "modules": (("LogitScore", {"true_token_id": 700, "false_token_id": 701}),),
        "template": PAIR_TEMPLATE,
        "settings": {
            "model_type": "CrossEncoder",
            "activation_fn": "torch.nn.modules.linear.Identity",
            "prompts": {"query": "Judge whether the document fits the query."},
            "default_prompt_name": "query",
        },
        "of_transformer": {
            "transformer_task": "text-generation",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "logits"},
                "message": {"method": "forward", "method_output_name": "logits", "format": "flat"},
            },
            "module_output_name": "causal_logits",
        },
    },
    "one logit": {
        "modules": (("LogitScore", {"true_token_id": 700, "false_token_id": None}),),
        "of_transformer": {"transformer_task": "text-generation", "max_seq_length": 480},
        "settings": {"model_type": "CrossEncoder"},
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("name", RANKERS)
def test_scores_are_those_of_a_cross_encoder(name: str, tmp_path: Path) -> None:
    path = make_decoder(tmp_path, **RANKERS[name])
    pairs = [("Where are blocks kept?", text or "nothing") for text in TEXTS]
    truth = CrossEncoder(str(path), device="cpu", max_length=480)
    expected = truth.predict(pairs, convert_to_tensor=True)
    made = ServedModel.open(path, None, FairExecutor(1)).pairs
    assert made is not None

    async def prompts_of() -> list[list[int]]:
        return [await made.encode(*pair) for pair in pairs]

    found = run(WholeEngine(f"--model={path}", "--dtype=float32", *SMALL), asyncio.run(prompts_of()))
    torch.testing.assert_close(torch.tensor(found[:, 0]), expected, rtol=1e-4, atol=1e-4)


def test_a_model_of_texts_ranks_if_flags_say_how(tmp_path: Path) -> None:
    """As Qwen3-Reranker was first published: the probability of yes, of both answers."""
    path = make_decoder(tmp_path / "tiny", modules=None, template="{{ messages[0].content }}")
    template = tmp_path / "score.jinja"
    template.write_text(PAIR_TEMPLATE)
    directory = ModelDirectory.open(path)
    tokens = [word for word in ("Ġthe", "Ġa", "s", "t") if directory.id_of(word) is not None][:2]
    made = ServedModel.open(path, None, FairExecutor(1), score_tokens=tokens, score_template=template).pairs
    assert made is not None
    pairs = [("Where are blocks kept?", text or "nothing") for text in TEXTS]

    async def prompts_of() -> list[list[int]]:
        return [await made.encode(*pair) for pair in pairs]

    prompts = asyncio.run(prompts_of())
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = torch.stack([model(torch.tensor([each])).logits[0, -1] for each in prompts])
    expected = logits[:, [directory.id_of(each) or 0 for each in tokens]].softmax(1)[:, 0]
    flags = (f"--model={path}", "--dtype=float32", f"--score-tokens={','.join(tokens)}")
    found = run(WholeEngine(*flags, *SMALL), prompts)
    torch.testing.assert_close(torch.tensor(found[:, 0]), expected, rtol=1e-4, atol=1e-4)
    for given, message in (
        (("a b c", "s"), 'has "a b c", which is not a token of'),
        (("s",), "is 's'; it must be two tokens, such as yes,no"),
        (("s", "s"), "is 's,s'; it must be two tokens"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            vector_files(directory, score_tokens=given)
    with pytest.raises(ConfigurationError, match="--score-tokens makes a model that ranks; give one of them"):
        vector_files(directory, "last", tokens)
    with pytest.raises(ConfigurationError, match=r"does not show messages .* or --score-template"):
        ServedModel.open(path, None, FairExecutor(1), score_tokens=tokens)
    with pytest.raises(ConfigurationError, match="ranks nothing by a template"):
        ServedModel.open(path, None, FairExecutor(1), score_template=template)
    with pytest.raises(ConfigurationError, match=r"--score-template .*missing.jinja: .*No such file"):
        ServedModel.open(path, None, FairExecutor(1), score_tokens=tokens, score_template=tmp_path / "missing.jinja")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"modules": (("Pooling", {"pooling_mode": "cls"}),)},
            "the pooling mode cls is not supported for Qwen3ForCausal",
        ),
        ({"modules": (("SpladePooling", {}),)}, "has a module of the type SpladePooling, which is not supported"),
        (
            {"modules": (("LogitScore", {"true_token_id": "yes"}),)},
            r"LogitScore are \['yes', None\]; expected token ids",
        ),
        ({"modules": LAST, "is_causal": False}, "is_causal of config.json is False: its tokens attend to later ones"),
        ({"modules": None, "task": "Model"}, "has no output layer, .* give --pooling last or --pooling mean"),
        (
            {"modules": LAST, "of_transformer": {"modality_config": {"message": {}}}},
            "puts texts into the chat template, which is not supported for embeddings",
        ),
        (
            {"modules": None, "task": "ForSequenceClassification", "num_labels": 3},
            "architecture Qwen3ForSequenceClassification .* classifies or ranks texts and generates none",
        ),
    ],
)
def test_files_that_are_not_known_are_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = make_decoder(tmp_path, **fields)
    with pytest.raises(ConfigurationError, match=message):
        vector_files(ModelDirectory.open(path))


def test_a_template_without_query_and_document_is_refused(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content if message.role == 'user' }}{% endfor %}"
    path = make_decoder(tmp_path, modules=None, task="ForSequenceClassification", num_labels=1, template=template)
    with pytest.raises(ConfigurationError, match="does not show messages of the roles query and document"):
        ServedModel.open(path, None, FairExecutor(1))


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = make_decoder(tmp_path, modules=LAST)
    for flag, message in (
        ("--max-model-len=481", "texts of this model have at most 480 tokens: use at most 480"),
        ("--model-impl=transformers", "runs through transformers' code, which gives no vectors of texts"),
        ("--draft-model=x", "--draft-model is x; .* generates no text: leave it out"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            WholeEngine(f"--model={path}", *SMALL, flag)
    # The longest text takes every position.
    plain = make_decoder(tmp_path / "plain", modules=None)
    engine = WholeEngine(f"--model={plain}", *SMALL, "--pooling=mean")
    assert np.isfinite(run(engine, [[5] * 512])).all()
