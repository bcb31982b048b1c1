"""Models of an OCI registry, from a registry of this test that asks for a token and breaks off in the middle of a file,
and from folders."""

import hashlib
import io
import json
import re
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import constants

from quire.model_files.model_source import resolve_model
from quire.runtime.settings import ConfigurationError

GGUF = b"GGUF" + bytes(range(256)) * 400
DOCKER = "application/vnd.docker.ai"


def layer(kind: str, data: bytes, path: str | None = None) -> dict[str, Any]:
    about = {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}
    return about if path is None else {**about, "annotations": {"org.cncf.model.filepath": path}}


def archive_of(files: dict[str, bytes]) -> bytes:
    to = io.BytesIO()
    with tarfile.open(fileobj=to, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return to.getvalue()


@dataclass
class Registry:
    """Blobs by digest and manifests by tag. The next `cuts` answers with blobs end after half of it."""

    blobs: dict[str, bytes] = field(default_factory=dict[str, bytes])
    manifests: dict[str, bytes] = field(default_factory=dict[str, bytes])
    cuts: int = 0
    asked: list[str] = field(default_factory=list[str])
    port: int = 0

    def push(self, tag: str, *layers: tuple[str, bytes, str | None]) -> str:
        described = [layer(*each) for each in layers]
        self.blobs |= {about["digest"]: data for about, (_, data, _) in zip(described, layers, strict=True)}
        self.manifests[tag] = json.dumps({"schemaVersion": 2, "layers": described}).encode()
        return f"oci://127.0.0.1:{self.port}/ai/tiny:{tag}"


class Handler(BaseHTTPRequestHandler):
    registry: ClassVar[Registry]

    def do_GET(self) -> None:
        ours, host = self.registry, f"http://127.0.0.1:{self.registry.port}"
        kind, _, name = self.path.rpartition("/")
        if self.path.startswith("/token"):
            assert "service=here" in self.path
            return self._answer(200, b'{"token": "secret"}')
        if self.headers.get("Authorization") != "Bearer secret":
            challenge = f'Bearer realm="{host}/token",service="here",scope="repository:ai/tiny:pull"'
            return self._answer(401, b"", {"WWW-Authenticate": challenge})
        ours.asked.append(f"{name[:12]} {self.headers.get('Range', '')}".strip())
        found = (ours.manifests if kind.endswith("manifests") else ours.blobs).get(name)
        if found is None:
            return self._answer(404, b"")
        begin = int(re.sub(r"\D", "", self.headers.get("Range", "0")))
        data, length = found[begin:], len(found) - begin
        if ours.cuts and kind.endswith("blobs"):
            ours.cuts -= 1
            data = data[: length // 2]
        return self._answer(206 if begin else 200, data, {"Content-Length": str(length)})

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    Handler.registry = Registry()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Handler.registry.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Handler.registry
        server.shutdown()
        thread.join()


def test_a_gguf_file_is_fetched_once_and_an_interrupted_fetch_continues(registry: Registry) -> None:
    name = registry.push("1", (f"{DOCKER}.gguf.v3", GGUF, None), (f"{DOCKER}.license", b"free", None))
    registry.cuts = 1
    with pytest.raises(ConfigurationError, match=r"ai/tiny:1 cannot be fetched"):
        resolve_model(name)
    path = resolve_model(name)
    assert (path.name, path.read_bytes()) == ("tiny.gguf", GGUF)
    assert any("bytes=" in each for each in registry.asked)
    before = len(registry.asked)
    assert resolve_model(name) == path
    assert registry.asked[before:] == ["1"]  # its manifest, and no file


def test_files_have_the_paths_of_their_annotations_and_archives_are_unpacked(registry: Registry) -> None:
    weights, config = ("application/vnd.cncf.model.weight.v1.raw", b"weights", "a.safetensors"), b'{"a": 1}'
    archive = (f"{DOCKER}.vllm.config.tar", archive_of({"config.json": config}), None)
    directory = resolve_model(registry.push("2", weights, archive))
    assert (directory / "a.safetensors").read_bytes() == b"weights"
    assert (directory / "config.json").read_bytes() == config


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([(f"{DOCKER}.gguf.v3", GGUF, "../x.gguf")], r"\.\./x\.gguf is no path"),
        ([(f"{DOCKER}.gguf.v3", GGUF, "/x.gguf")], "/x.gguf is no path"),
        ([("application/vnd.oci.image.layer.v1.tar", archive_of({"a": b""}), None)], "holds no GGUF"),
        ([("application/octet-stream", b"a", None)], "has no org.cncf.model.filepath"),
        ([], "it has no layer"),
    ],
)
def test_an_artifact_without_a_model_is_refused(
    registry: Registry, layers: list[tuple[str, bytes, str | None]], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        resolve_model(registry.push("3", *layers))


def test_a_file_that_is_not_what_the_manifest_says_is_thrown_away(registry: Registry, tmp_path: Path) -> None:
    name = registry.push("4", (f"{DOCKER}.gguf.v3", GGUF, None))
    (digest,) = registry.blobs
    registry.blobs[digest] = GGUF[::-1]
    with pytest.raises(ConfigurationError, match="its manifest says"):
        resolve_model(name)
    assert not list((tmp_path / "cache").rglob("*.gguf*"))
    with pytest.raises(ConfigurationError, match="404"):
        resolve_model(name.removesuffix("4") + "5")
    with pytest.raises(ConfigurationError, match="must be oci://HOST/REPOSITORY:TAG"):
        resolve_model("oci://host")


def test_a_folder_in_the_layout_of_images_and_one_with_a_single_file_are_models(
    registry: Registry, tmp_path: Path
) -> None:
    registry.push("6", (f"{DOCKER}.gguf.v3", GGUF, "tiny.gguf"))
    folder, manifest = tmp_path / "layout", registry.manifests["6"]
    (folder / "blobs" / "sha256").mkdir(parents=True)
    for data in (GGUF, manifest):
        (folder / "blobs" / "sha256" / hashlib.sha256(data).hexdigest()).write_bytes(data)
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    index = {"manifests": [{"digest": f"sha256:{hashlib.sha256(manifest).hexdigest()}"}]}
    (folder / "index.json").write_text(json.dumps(index))
    assert resolve_model(folder).read_bytes() == GGUF
    assert resolve_model(folder).name == "tiny.gguf"
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "some.gguf").write_bytes(GGUF)
    assert resolve_model(volume) == volume / "some.gguf"
    (volume / "other.gguf").write_bytes(GGUF)
    assert resolve_model(volume) == volume
    (folder / "index.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="holds no model in the layout"):
        resolve_model(folder)
