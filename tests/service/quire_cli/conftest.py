"""Fixtures of the commands' and the supervisor's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_gateway import FakeGatewayThread, running_fake_gateway


@pytest.fixture
def gateway() -> Iterator[FakeGatewayThread]:
    with running_fake_gateway() as gateway:
        yield gateway


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """A directory that looks like a model to whoever does not load it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").touch()
    return directory
