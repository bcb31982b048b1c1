"""`quire models`: the models that it finds, and its line for each."""

import json
import os
from pathlib import Path

import huggingface_hub.constants
import pytest

from quire.model_files.hub import cached
from quire.model_files.model_directory import HubName
from quire.model_files.model_source import resolve_model
from quire.model_files.state_sizes import state_sizes
from quire_cli.doctor import _model
from quire_cli.main import main
from quire_cli.models import _LATENTS, _LEFT_OUT
from tests.support.gguf_files import write_gguf
from tests.support.models import make_model
from worker_svc.models.decoder import DecoderFamily
from worker_svc.models.families_with_latents import WITH_LATENTS
from worker_svc.models.registry import FAMILIES

TINY = {
    "model": "quire-tiny",
    "path": str(resolve_model(None)),
    "architecture": "LlamaForCausalLM",
    "format": "BF16",
    "parameters": 3_352_832,
    "weight_bytes": 6_709_752,
    # Keys and values of 4 layers, 2 heads of 32, in 2 bytes.
    "kv_bytes": 2 * 4 * 2 * 32 * 2 * 1000,
    "state_bytes": None,
    "problem": None,
}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def snapshot(cache: Path, name: str, commit: str, ref: str | None) -> Path:
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "snapshots" / commit).mkdir(parents=True)
    if ref is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return folder / "snapshots" / commit


def test_models_of_the_cache_and_of_directories_are_listed(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [TINY]
    made = tmp_path / "made" / "llama"
    make_model(made, "llama-gqa-untied-32", max_shard_size="100KB")
    whole = snapshot(cache, "org/llama", "c0ffee", "main")
    for file in made.iterdir():
        os.link(file, whole / file.name)
    tagged = snapshot(cache, "org/files", "beef", "v1")
    write_gguf(tagged / "m.gguf", made, further={"general.file_type": 0}, tensors_per_part=10)
    (snapshot(cache, "org/broken", "dead", None) / "b.gguf").write_bytes(b"GGUF")
    (snapshot(cache, "org/without-weights", "feed", "main") / "config.json").write_text("{}")
    capsys.readouterr()
    assert main(["models", "--json", str(tmp_path / "made")]) == 0
    found = {each.pop("model"): each for each in json.loads(capsys.readouterr().out)}
    assert [*found] == [
        "quire-tiny",
        str(made),
        "org/broken/b.gguf@dead",
        "org/files/m-00001-of-00003.gguf@v1",
        "org/llama",
    ]
    llama, files = found["org/llama"], found["org/files/m-00001-of-00003.gguf@v1"]
    assert llama | {"path": str(made)} == found[str(made)]
    assert (llama["format"], files["format"], llama["parameters"]) == ("F32", "F32", files["parameters"])
    assert 0 < llama["weight_bytes"] - 4 * llama["parameters"] < 10_000
    assert llama["kv_bytes"] == files["kv_bytes"] == 2 * 2 * 2 * 32 * 4 * 1000
    assert "cannot be read as a GGUF file" in found["org/broken/b.gguf@dead"]["problem"]
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[1].split() == ["quire-tiny", "BF16", "3,352,832", "6.4", "MiB", "1000.0", "KiB", "-"]
    assert main(["models", str(tmp_path / "none")]) == 2
    # `quire doctor` checks the files that a model has.
    assert cached(HubName("org/llama")) == whole
    assert cached(HubName("org/without-weights")) is None
    assert cached(HubName("org/nothing", None, None, "Q8_0")) is None


def test_a_damaged_directory_is_named(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path / "llama", "llama-gqa-untied-32")
    for content in (b"", b"\xff" * 100, (3).to_bytes(8, "little") + b"[1]", (2).to_bytes(8, "little") + b"{}"):
        (tmp_path / "llama" / "model.safetensors").write_bytes(content)
        assert main(["models", "--json", str(tmp_path)]) == 0
        problem = json.loads(capsys.readouterr().out)[1]["problem"]
        assert (problem is None) == content.endswith(b"{}")
        assert problem is None or problem.endswith("model.safetensors: damaged or truncated safetensors file")


@pytest.mark.parametrize(
    "odd",
    [{"head_dim": "x"}, {"num_key_value_heads": [1]}, {"dtype": ["a"], "torch_dtype": ["a"]}, {"hidden_size": {}}],
)
def test_an_odd_configuration_hides_no_other_model(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], odd: dict[str, object]
) -> None:
    for name in ("a", "b"):
        make_model(tmp_path / name, "llama-gqa-untied-32")
    file = tmp_path / "a" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | odd))
    assert main(["models", "--json", str(tmp_path)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["model"] for each in listed][1:] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert listed[2]["kv_bytes"]


def test_keys_of_a_model_whose_configuration_leaves_out_its_heads(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same as for Gemma 3 of 4B, 12B and 27B."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert main(["models", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)[1]["kv_bytes"] == 2 * 34 * 4 * 256 * 2 * 1000
    for architecture, assumed in _LEFT_OUT.items():
        family = FAMILIES[architecture]
        assert isinstance(family, DecoderFamily)
        served = family.read_config({})
        found = {"num_attention_heads": served.num_heads, "num_key_value_heads": served.num_kv_heads}
        assert assumed.items() <= (found | {"head_dim": served.head_dim}).items()


def test_only_layers_with_keys_count_and_a_state_has_a_size_of_its_own(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path, "granite-hybrid")
    assert main(["models", "--json", str(tmp_path)]) == 0
    dense, hybrid = json.loads(capsys.readouterr().out)
    assert dense["state_bytes"] is None
    # One of three layers attends.
    assert hybrid["kv_bytes"] == 2 * 2 * 16 * 4 * 1000
    sizes = state_sizes("GraniteMoeHybridForCausalLM", json.loads((tmp_path / "config.json").read_text()))
    assert sizes is not None
    assert hybrid["state_bytes"] == sizes.num_units * sizes.unit_bytes
    assert main(["models", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("state")
    assert "2 layers (Mamba 2) keep a state of" in _model(str(tmp_path)).found


def test_a_token_has_one_line_with_latent_attention(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("minicpm3", "deepseek-v32", "gemma3n-shared", "gemma4-shared"):
        make_model(tmp_path / name, name)
    assert main(["models", "--json", str(tmp_path)]) == 0
    # V3.2 runs through transformers' code, whose layers decide. Two layers of Gemma 3n read the keys of the others.
    expected = [None, 2 * 2 * 2 * 16 * 4 * 1000, None, 2 * (32 + 8) * 4 * 1000]
    assert [each["kv_bytes"] for each in json.loads(capsys.readouterr().out)[1:]] == expected
    assert _LATENTS.keys() == WITH_LATENTS.keys()
    for architecture, assumed in _LATENTS.items():
        assert sum(assumed.values()) == WITH_LATENTS[architecture].read_config({"num_experts_per_tok": 2}).head_dim
