"""Reading model directories without torch."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2_5_VLTextConfig

from quire.model_files import model_source
from quire.model_files.model_directory import SUPPORTED_ARCHITECTURES, ModelDirectory, weight_files
from quire.model_files.model_source import resolve_model
from quire.runtime.settings import ConfigurationError
from quire.service.model_flag import ModelFlag
from quire_cli.supervisor import ServeSettings
from quire_cli.supervisor.server import check_servable
from worker_svc.models.registry import FAMILIES

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a model directory: config.json with these fields, other files by name."""

    def write(config: object | None = None, **files: object) -> Path:
        directory = tmp_path / "my-model"
        directory.mkdir(exist_ok=True)
        config = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2} if config is None else config
        for name, content in {"config": config, **files}.items():
            (directory / f"{name}.json").write_text(json.dumps(content))
        return directory

    return write


def error_of(directory: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        ModelDirectory.open(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


WRONG_EOS = [-1, True, [2, None]]
OUTSIDE = ["../1.safetensors", "/1.safetensors"]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 9\n"
TAKEN = (
    "--model takes a directory as transformers saves it (config.json, tokenizer.json, *.safetensors), a GGUF file, a "
    "model of the Hugging Face Hub as ORG/NAME, ORG/NAME@REVISION or ORG/NAME:Q4_K_M, a model of a registry as "
    "oci://HOST/REPOSITORY:TAG, or quire-tiny"
)


def test_the_parts_of_a_whole_directory(make: Make) -> None:
    model = ModelDirectory.open(
        make(
            generation_config={"eos_token_id": [5, 2, 5], "temperature": 0.7, "top_k": None},
            tokenizer_config={"chat_template": "{{ messages }}", "x": 1},
        )
    )
    assert (model.name, model.architecture) == ("my-model", "LlamaForCausalLM")
    assert model.config["eos_token_id"] == 2
    assert model.eos_token_ids == (5, 2)
    assert model.generation_defaults == {"eos_token_id": [5, 2, 5], "temperature": 0.7}
    assert model.tokenizer_config["x"] == 1
    assert model.chat_template == "{{ messages }}"


BPE = {"added_tokens": [{"id": 9, "content": "<|im_end|>"}], "model": {"vocab": {"a": 0, "</s>": 2}}}
UNIGRAM = {"model": {"vocab": [["<unk>", 0.0], ["</s>", -1.5]]}}


@pytest.mark.parametrize(
    ("eos", "tokenizer", "decoder", "expected"),
    [
        ("<|im_end|>", BPE, None, (5, 2, 9)),
        ({"__type": "AddedToken", "content": "<|im_end|>"}, BPE, {}, (5, 2, 9)),
        # transformers also gives a listed token the id of the list.
        ("<|im_end|>", BPE, {"7": {"content": "<|im_end|>"}}, (5, 2, 7)),
        ("</s>", BPE, None, (5, 2)),
        ("</s>", UNIGRAM, None, (5, 2, 1)),
        ("<none>", BPE, None, (5, 2)),
        (None, BPE, None, (5, 2)),
        ("a", None, None, (5, 2)),
        *(("a", damaged, None, (5, 2)) for damaged in ([], 7, {"model": 3}, {"added_tokens": [1], "model": {}})),
    ],
)
def test_the_eos_token_of_the_tokenizer_ends_a_text_too(
    make: Make, eos: object, tokenizer: object, decoder: object, expected: tuple[int, ...]
) -> None:
    """Same as in vLLM, SGLang, TGI and llama.cpp: many chat fine-tunes set it only in the tokenizer's files."""
    files = {} if tokenizer is None else {"tokenizer": tokenizer}
    config = {"eos_token": eos} | ({} if decoder is None else {"added_tokens_decoder": decoder})
    model = ModelDirectory.open(make(generation_config={"eos_token_id": [5, 2]}, tokenizer_config=config, **files))
    assert model.eos_token_ids == expected


def test_the_eos_token_of_an_older_file_of_special_tokens_counts(make: Make) -> None:
    config = {"architectures": ["LlamaForCausalLM"]}
    model = ModelDirectory.open(make(config, tokenizer=BPE, special_tokens_map={"eos_token": "<|im_end|>"}))
    assert model.eos_token_ids == (9,)


def test_supported_architectures_are_taken_and_an_unknown_one_names_them(make: Make) -> None:
    for name in SUPPORTED_ARCHITECTURES:
        model = ModelDirectory.open(make({"architectures": [name]}))
        # Only config.json is needed.
        assert (model.architecture, model.eos_token_ids) == (name, ())
        assert (model.generation_config, model.tokenizer_config, model.chat_template) == ({}, {}, None)
    message = error_of(make({"architectures": ["BertModel"]}))
    assert "BertModel" in message
    assert all(name in message for name in SUPPORTED_ARCHITECTURES)
    assert set(SUPPORTED_ARCHITECTURES) == set(FAMILIES)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "names no architecture"),
        ({"architectures": "LlamaForCausalLM"}, "names no architecture"),
        ({"model_type": "doge"}, "names no architecture, and its model_type is doge; supported are GPT2LMHeadModel"),
        *(({"architectures": ["OPTForCausalLM"], "eos_token_id": eos}, "eos_token_id") for eos in WRONG_EOS),
    ],
)
def test_a_config_without_an_architecture_or_with_a_wrong_eos_is_refused(
    make: Make, config: dict[str, object], problem: str
) -> None:
    assert problem in error_of(make(config))


def test_without_architectures_the_type_of_the_model_decides(make: Make) -> None:
    model = ModelDirectory.open(make({"model_type": "qwen3_moe"}))
    assert (model.architecture, model.whole) == ("Qwen3MoeForCausalLM", None)
    text = {"model_type": "gemma3_text", "eos_token_id": 1, "sliding_window": 9, "tie_word_embeddings": True}
    model = ModelDirectory.open(make({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}))
    assert (model.architecture, model.whole, model.eos_token_ids) == ("Gemma3ForCausalLM", "gemma3", (1, 106))
    assert model.config == text | {"architectures": ["Gemma3ForCausalLM"], "eos_token_id": [1, 106]}


def test_a_cap_on_logits_that_transformers_ignores_within_the_whole_model_is_refused(make: Make) -> None:
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "final_logit_softcapping": 30.0}}
    assert "final_logit_softcapping of text_config is 30.0; expected null" in error_of(make(config))


def test_what_is_said_of_the_whole_model_counts_for_its_language_model(make: Make) -> None:
    text = {"model_type": "qwen2_5_vl_text", "num_hidden_layers": 3, "rope_parameters": {"mrope_section": [1, 1, 2]}}
    whole = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": text, "torch_dtype": "bfloat16"}
    config = ModelDirectory.open(make(whole | {"tie_word_embeddings": True})).config
    expected = Qwen2_5_VLTextConfig(**text).to_dict()
    assert config["rope_parameters"] == {}
    assert (config["torch_dtype"], config["tie_word_embeddings"], config["model_type"]) == ("bfloat16", True, "qwen2")
    names = ("vocab_size", "hidden_size", "num_key_value_heads", "rms_norm_eps", "num_hidden_layers")
    assert {name: config[name] for name in names} == {name: expected[name] for name in names}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "paligemma"}, "attends to its prompts in both directions"),
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"text_config": {"model_type": "mllama"}}, "has a language model of the type mllama, which is not supported"),
        ({"architectures": ["XModel"], "text_config": None}, "gives embeddings and generates no text"),
        ({"architectures": ["XForSequenceClassification"], "text_config": None}, "classifies or ranks texts and"),
    ],
)
def test_models_that_are_not_served_are_refused_with_the_reason(
    make: Make, fields: dict[str, Any], reason: str
) -> None:
    config: dict[str, Any] = {
        "architectures": ["XForConditionalGeneration"],
        "text_config": {"model_type": "gemma"},
    } | fields
    message = error_of(make(config))
    assert re.match(rf"architecture {config['architectures'][0]} of \S+ {reason}", message)
    assert "the language models of these kinds within others (...ForConditionalGeneration)" in message


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7"}, "the WKV recurrence"),
        ({"model_type": "recurrent_gemma"}, "the RG-LRU recurrence"),
        (
            {"architectures": ["Qwen4ExpForConditionalGeneration"], "text_config": {"model_type": "qwen4_exp_text"}},
            "attention to the tokens that an indexer chooses, and embeddings of n-grams",
        ),
    ],
)
def test_a_model_with_states_that_is_not_served_is_refused_by_its_part(
    make: Make, config: dict[str, Any], part: str
) -> None:
    assert f"is not supported: it needs {part}, which Quire does not have" in error_of(make(config))


def test_what_is_no_directory_of_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    assert f"{tmp_path} has no config.json; {TAKEN}" in error_of(tmp_path)
    assert error_of(tmp_path / "no").startswith(f"model directory {tmp_path / 'no'} does not exist; {TAKEN}")
    file = tmp_path / "f"
    file.touch()
    assert f"{file} is a file; {TAKEN}" in error_of(file)
    (tmp_path / "config.json").mkdir()
    assert "cannot read" in error_of(tmp_path)
    with pytest.raises(ConfigurationError, match=r"^model directory ~no-such-user/x cannot be found: .*home directory"):
        resolve_model("~no-such-user/x")
    # A text that is no name of the hub is a path.
    for path in ("./nowhere", "a/b/c", "name", "models/x.gguf"):
        with pytest.raises(ConfigurationError, match="does not exist; --model takes"):
            resolve_model(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "is nested too deep"),
        (POINTER, "is a pointer of Git LFS; `git lfs pull` fetches the file"),
    ],
)
def test_a_broken_config_is_refused(make: Make, content: bytes, message: str) -> None:
    directory = make()
    (directory / "config.json").write_bytes(content)
    assert message in error_of(directory)


def test_the_template_that_counts(make: Make) -> None:
    """A file wins over the tokenizer's configuration, whose "default" counts; a processor's template is the last."""
    directory = make(chat_template={"chat_template": "processor's"})
    assert ModelDirectory.open(directory).chat_template == "processor's"
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for written, counts in (("own", "own"), (templates, "d")):
        assert ModelDirectory.open(make(tokenizer_config={"chat_template": written})).chat_template == counts
    assert "chat_template" in error_of(make(tokenizer_config={"chat_template": 1}))
    make(tokenizer_config={"chat_template": "old"})
    (directory / "chat_template.jinja").write_text("new")
    assert ModelDirectory.open(directory).chat_template == "new"


def test_added_tokens_are_read_where_the_tokenizer_config_lists_none(make: Make) -> None:
    assert "gives '<x>' the token id 'seven'" in error_of(make(added_tokens={"<x>": "seven"}))
    files = {"added_tokens": {"<x>": 7}, "special_tokens_map": {"additional_special_tokens": ["<x>"]}}
    config = ModelDirectory.open(make(**files)).tokenizer_config
    assert config == {"added_tokens": {"<x>": 7}, "additional_special_tokens": ["<x>"]}
    listed = {"added_tokens_decoder": {}}
    assert ModelDirectory.open(make(tokenizer_config=listed, **files)).tokenizer_config == listed


def index_of(*names: object) -> dict[str, object]:
    return {"model.safetensors.index": {"weight_map": {str(number): name for number, name in enumerate(names)}}}


def test_weight_files_are_those_of_the_index(make: Make) -> None:
    directory = make(**index_of("2.safetensors", "1.safetensors", "2.safetensors"))
    with pytest.raises(ConfigurationError, match=r"index\.json: shard 1\.safetensors is missing"):
        weight_files(directory)
    for name in ("1", "2", "other"):
        (directory / f"{name}.safetensors").touch()
    assert [file.name for file in weight_files(directory)] == ["1.safetensors", "2.safetensors"]


def test_a_single_weight_file_goes_before_the_index_and_without_both_none_counts(make: Make) -> None:
    directory = make()
    (directory / "adapter.safetensors").touch()
    with pytest.raises(ConfigurationError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        weight_files(directory)
    # Also before a worker starts.
    with pytest.raises(ConfigurationError, match=r"neither model\.safetensors nor"):
        check_servable(ServeSettings(models=(ModelFlag(None, str(directory)),)))
    make(**index_of("missing.safetensors"))
    (directory / "model.safetensors").touch()
    assert weight_files(directory) == (directory / "model.safetensors",)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        *(({"weight_map": {"0": name}}, f"shard '{name}' is not a plain file name") for name in OUTSIDE),
        ({}, "weight_map is .*; it must be an object of file names"),
    ],
)
def test_an_index_that_leads_elsewhere_or_nowhere_is_refused(make: Make, index: object, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        weight_files(make(**{"model.safetensors.index": index}))


def test_files_that_git_lfs_has_not_fetched_and_a_missing_tokenizer_are_refused(make: Make) -> None:
    for shards in ((), ("1.safetensors", "2.safetensors")):
        directory = make(**index_of(*shards)) if shards else make()
        for name in shards or ("model.safetensors",):
            (directory / name).write_bytes(POINTER)
        with pytest.raises(ConfigurationError, match=r"safetensors is a pointer of Git LFS"):
            weight_files(directory)
        (directory / "model.safetensors").unlink(missing_ok=True)
    model = ModelDirectory.open(directory)
    with pytest.raises(ConfigurationError, match=r"has no tokenizer\.json"):
        model.tokenizer_json()
    (directory / "tokenizer.json").write_bytes(POINTER)
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json is a pointer of Git LFS"):
        model.tokenizer_json()


def test_resolve_takes_a_path_or_the_embedded_model(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = make()
    assert resolve_model(directory) == resolve_model(str(directory)) == directory
    with pytest.raises(ConfigurationError, match="does not exist"):
        resolve_model("./some/model")
    embedded = tmp_path / "assets" / "quire-tiny"
    monkeypatch.setattr(model_source, "_ASSETS", (tmp_path / "none", tmp_path / "assets"))
    with pytest.raises(ConfigurationError, match="quire-tiny is not installed"):
        resolve_model(None)
    embedded.mkdir(parents=True)
    (embedded / "config.json").touch()
    assert resolve_model(None) == resolve_model("quire-tiny") == embedded
