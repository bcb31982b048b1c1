"""Fixtures of the commands' and the supervisor's tests."""

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire_cli.main import main
from tests.support.fake_gateway import FakeGatewayThread, running_fake_gateway


@pytest.fixture
def gateway() -> Iterator[FakeGatewayThread]:
    with running_fake_gateway() as gateway:
        yield gateway


@pytest.fixture
def run(
    gateway: FakeGatewayThread, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command, by default against the fake gateway; returns status, stdout and stderr."""
    monkeypatch.setenv("QUIRE_ADDRESS", gateway.address)

    def call(*arguments: str, stdin: str = "x\n") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """A directory that looks like a model until it is loaded."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").touch()
    return directory
