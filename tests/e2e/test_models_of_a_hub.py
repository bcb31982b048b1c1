"""A model from a hub, served by a whole server."""

from pathlib import Path

import pytest

from quire.client import Client, GenerationOptions
from quire.model_files.model_source import resolve_model
from quire.testing import EmbeddedServer
from tests.support.hub import LocalHub, commit_of

pytestmark = pytest.mark.extended
QUESTION = "What is the capital of France?"
GREEDY = GenerationOptions(max_tokens=12, temperature=0.0)


def answer(client: Client) -> str:
    return client.chat([{"role": "user", "content": QUESTION}], GREEDY).text


def test_a_model_is_downloaded_once_for_all_processes_and_served_by_its_name(tmp_path: Path) -> None:
    tiny = resolve_model(None)
    files = {path.name: path.read_bytes() for path in tiny.iterdir() if path.is_file()}
    with LocalHub({"org/tiny": files}) as hub:
        flags = ("--model", "org/tiny", "--num-threads", "1")
        with EmbeddedServer(*flags, environ=hub.environ(tmp_path)) as server, Client(server.grpc_address) as client:
            assert [model.name for model in client.list_models()] == ["org/tiny"]
            assert "Paris" in answer(client)
        assert server.exit_status == 0
        assert sorted(name for name, _ in hub.sent) == sorted(set(files) - {"heldout.txt"})
    assert list(tmp_path.glob(f"hub/models--org--tiny/snapshots/{commit_of(files)}/model.safetensors"))
