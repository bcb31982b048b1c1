"""Compatibility of releases and of models, and messages if they do not fit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.model_files.model_directory import ModelDirectory
from quire.rpc.errors import FailedPrecondition
from quire.service.compatibility import ModelFingerprint, ProtocolVersions, check_model, check_protocol


@pytest.mark.parametrize(
    ("ours", "theirs", "problem"),
    [
        ((1, 1), (1, 1), None),
        ((1, 2), (2, 3), None),
        ((2, 3), (1, 2), None),
        ((1, 1), (2, 2), "the gateway speaks version 2 of x.v1, the scheduler version 1: .* upgrade the scheduler"),
        ((3, 4), (1, 2), "the gateway speaks versions 1 to 2 of x.v1, the scheduler versions 3 to 4: .* the gateway"),
        ((1, 1), (0, 0), "the gateway speaks no version of x.v1, the scheduler version 1: .* upgrade the gateway"),
    ],
)
def test_ranges_of_versions_fit_where_they_overlap(
    ours: tuple[int, int], theirs: tuple[int, int], problem: str | None
) -> None:
    def check() -> None:
        versions = ProtocolVersions(*ours), ProtocolVersions(*theirs)
        check_protocol("x.v1", *versions, us="the scheduler", them="the gateway")

    if problem is None:
        check()
        return
    with pytest.raises(FailedPrecondition, match=problem) as raised:
        check()
    assert raised.value.reason == "PROTOCOL_VERSION"


def test_models_fit_where_all_that_both_have_is_equal() -> None:
    whole = ModelFingerprint("c1", "t1", "w1")
    check_model(whole, ModelFingerprint("c1", "t1"), us="a", them="b")
    check_model(ModelFingerprint(), whole, us="a", them="b")
    message = "^a and b have different models: tokenizer t1 and t2, weights w1 and w2; give both the same one by --mod"
    with pytest.raises(FailedPrecondition, match=message) as raised:
        check_model(whole, ModelFingerprint("c1", "t2", "w2"), us="a", them="b")
    assert raised.value.reason == "MODEL_MISMATCH"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8}))
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    torch.manual_seed(0)
    save_file({f"layer.{index}": torch.randn(8, 8) for index in range(4)}, path / "model.safetensors")
    return path


def fingerprint(path: Path) -> ModelFingerprint:
    return ModelFingerprint.read(ModelDirectory.open(path))


def test_a_copy_is_the_same_model_wherever_it_lies_and_whatever_wrote_it(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())) | {"transformers_version": "9"}))
    (copy / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "chat_template": "x"}))
    assert fingerprint(copy) == fingerprint(directory)


def test_weights_are_the_same_in_one_file_or_in_several(directory: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    shutil.copytree(directory, sharded)
    (sharded / "model.safetensors").unlink()
    torch.manual_seed(0)
    tensors = {f"layer.{index}": torch.randn(8, 8) for index in range(4)}
    weight_map = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert fingerprint(sharded) == fingerprint(directory)


def test_each_part_tells_models_apart(directory: Path) -> None:
    def tuned(path: Path) -> None:
        torch.manual_seed(1)
        save_file({f"layer.{index}": torch.randn(8, 8) for index in range(4)}, path / "model.safetensors")

    for part, change in (
        ("config", lambda path: (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')),
        ("tokenizer", lambda path: (path / "tokenizer.json").write_text('{"version": "2"}')),
        ("tokenizer", lambda path: (path / "tokenizer_config.json").write_text("{}")),
        ("weights", tuned),
    ):
        before = fingerprint(directory)
        change(directory)
        after = fingerprint(directory)
        changed = [name for name in ("config", "tokenizer", "weights") if getattr(before, name) != getattr(after, name)]
        assert changed == [part]


def with_header(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
        with_header('{"a": {"dtype": "F32", "shape": [1]}}'),
        with_header('{"a": []}'),
        with_header("[]"),
    ],
)
def test_parts_that_are_missing_or_broken_are_empty(directory: Path, content: bytes) -> None:
    """The code that needs them reports the fault."""
    (directory / "tokenizer.json").unlink()
    (directory / "model.safetensors").write_bytes(content)
    found = fingerprint(directory)
    assert found.config
    assert not found.tokenizer
    assert not found.weights
