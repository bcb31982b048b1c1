"""Fetches models of OCI registries: `oci://HOST/REPOSITORY:TAG`, or `@sha256:...` in the place of the tag.

It reads artifacts as `docker model package` and the tools of ModelPack make them: a layer for each file, named by the
annotation `org.cncf.model.filepath` or by its media type, or a tar archive of configuration files. Files lie below
HF_HOME, and are fetched once; a fetch that was interrupted continues. A folder in the layout of OCI images is read in
place.
"""

import base64
import fcntl
import hashlib
import json
import re
import tarfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from typing import Any, Self

from huggingface_hub import constants

from quire.model_files.gguf_header import SUFFIX as GGUF_SUFFIX
from quire.model_files.progress import DOWNLOADING, LoadProgress, Report, no_report
from quire.runtime.settings import ConfigurationError

SCHEME = "oci://"
_NAME = re.compile(
    r"oci://(?P<host>[\w.-]+(:\d+)?)/(?P<repository>[a-z0-9]+([._/-]+[a-z0-9]+)*)"
    r"(:(?P<tag>\w[\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_MANIFESTS = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
_FILE_PATH, _TITLE = "org.cncf.model.filepath", "org.opencontainers.image.title"
_DEFAULT_NAMES = {
    "application/vnd.docker.ai.gguf.v3": "{model}.gguf",
    "application/vnd.docker.ai.safetensors": "model.safetensors",
    "application/vnd.docker.ai.chat.template.jinja": "chat_template.jinja",
}
_SKIPPED = ("license", "mmproj", "dduf")
_PIECE = 1 << 20
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class OciName:
    """A model in a registry. `reference` is a tag or a digest."""

    host: str
    repository: str
    reference: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ConfigurationError if the name is malformed."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ConfigurationError(f"{text} names no model of a registry: it must be oci://HOST/REPOSITORY:TAG")
        return cls(match["host"], match["repository"], match["digest"] or match["tag"] or "latest")

    @property
    def model(self) -> str:
        """The last part of the repository's path."""
        return self.repository.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{SCHEME}{self.host}/{self.repository}{'@' if ':' in self.reference else ':'}{self.reference}"


def pull(text: str, report: Report = no_report) -> Path:
    """The model's directory, or its GGUF file. Raises ConfigurationError if the registry does not give it."""
    name = OciName.parse(text)
    registry = _Registry(name)
    with _explained(f"{name} cannot be fetched"):
        manifest = json.loads(registry.read_manifest())
        return _assemble(manifest, str(name), name.model, registry, report)


def open_layout(directory: Path) -> Path:
    """The model in a folder with the layout of OCI images. Raises ConfigurationError if it holds no model."""
    blobs = _Layout(directory)
    with _explained(f"{directory} holds no model in the layout of OCI images"):
        (first, *more) = json.loads((directory / "index.json").read_bytes())["manifests"]
        if more:
            raise ConfigurationError(f"{directory} has {1 + len(more)} models; --model takes a folder with one")
        manifest = json.loads(blobs.path_of(first["digest"]).read_bytes())
        return _assemble(manifest, str(directory), directory.absolute().name, blobs, no_report)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Converts errors of a registry, of its answers and of a disk to a ConfigurationError of one line."""
    try:
        yield
    except ConfigurationError:
        raise
    except (OSError, HTTPException, KeyError, ValueError, TypeError, tarfile.TarError) as error:
        raise ConfigurationError(f"{what}: {type(error).__name__} {error}") from error


class _Registry:
    """Blobs of one repository."""

    def __init__(self, name: OciName) -> None:
        is_local = name.host.partition(":")[0] in ("localhost", "127.0.0.1")
        self._base = f"{'http' if is_local else 'https'}://{name.host}/v2/{name.repository}"
        self._name = name
        self._authorization: str | None = None

    def read_manifest(self) -> bytes:
        with self._open(f"/manifests/{self._name.reference}", {"Accept": _MANIFESTS}) as response:
            text = response.read()
        if ":" in self._name.reference and _digest_of(text) != self._name.reference:
            raise ConfigurationError(f"{self._name}: the registry's manifest has another digest")
        return text

    def fetch(self, layer: Mapping[str, Any], to: Path, report: Report) -> None:
        """Writes a blob to `to`; continues where an earlier fetch ended."""
        digest, size, part = layer["digest"], int(layer["size"]), to.with_name(to.name + ".part")
        done = part.stat().st_size if part.exists() else 0
        if done < size:
            with self._open(f"/blobs/{digest}", {"Range": f"bytes={done}-"} if done else {}) as response:
                done = done if response.status == 206 else 0
                with part.open("r+b" if done else "wb") as file:
                    file.seek(done)
                    while piece := response.read(_PIECE):
                        file.write(piece)
                        done += len(piece)
                        report(LoadProgress(DOWNLOADING, done, size))
            if done < size:
                raise OSError(f"the connection ended after {done} of {size} bytes; the next start continues there")
        with part.open("rb") as file:
            found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        if found != digest:
            part.unlink()
            raise ConfigurationError(f"{self._name}: a file has the digest {found}, its manifest says {digest}")
        part.replace(to)

    @contextmanager
    def _open(self, path: str, headers: Mapping[str, str]) -> Iterator[HTTPResponse]:
        try:
            response = self._send(path, headers)
        except urllib.error.HTTPError as error:
            if error.code != 401 or self._authorization is not None:
                raise
            self._authorization = self._authorize(error.headers.get("WWW-Authenticate", ""))
            response = self._send(path, headers)
        with response:
            yield response

    def _send(self, path: str, headers: Mapping[str, str]) -> HTTPResponse:
        request = urllib.request.Request(self._base + path, headers=dict(headers))
        if self._authorization is not None:
            # Not for the hosts that a registry sends callers to.
            request.add_unredirected_header("Authorization", self._authorization)
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S)

    def _authorize(self, challenge: str) -> str:
        """The header that answers a challenge, with the user's login if `docker login` stored one."""
        login = _login(self._name.host)
        kind, _, rest = challenge.partition(" ")
        if kind.lower() != "bearer":
            if login is None:
                raise ConfigurationError(f"{self._name} needs a login: run `docker login {self._name.host}`")
            return f"Basic {login}"
        fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        query = urllib.parse.urlencode({key: fields[key] for key in ("service", "scope") if key in fields})
        request = urllib.request.Request(f"{fields.get('realm', '')}?{query}")
        if login is not None:
            request.add_unredirected_header("Authorization", f"Basic {login}")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            answer = json.load(response)
        return f"Bearer {answer.get('token') or answer['access_token']}"


class _Layout:
    """Blobs of a folder in the layout of OCI images."""

    def __init__(self, directory: Path) -> None:
        self._blobs = directory.absolute() / "blobs"

    def path_of(self, digest: str) -> Path:
        algorithm, _, number = digest.partition(":")
        return self._blobs / algorithm / PurePosixPath(number).name

    def fetch(self, layer: Mapping[str, Any], to: Path, report: Report) -> None:
        to.symlink_to(self.path_of(layer["digest"]))


def _assemble(manifest: Mapping[str, Any], name: str, model: str, blobs: "_Registry | _Layout", report: Report) -> Path:
    """Puts the files of a manifest into a directory of their own, `model` below a name that its digests give."""
    layers = [layer for layer in manifest.get("layers", ()) if not any(each in layer["mediaType"] for each in _SKIPPED)]
    key = _digest_of(json.dumps([name if isinstance(blobs, _Layout) else "", layers]).encode()).removeprefix("sha256:")
    directory = Path(constants.HF_HOME) / "oci" / key / model
    directory.mkdir(parents=True, exist_ok=True)
    # Gateway and worker of one machine fetch the same model at the same time.
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for layer in layers:
            if layer["mediaType"].endswith(".tar"):
                archive, done = directory / ".config.tar", directory / f".{layer['digest'][7:19]}.done"
                if not done.exists():
                    archive.unlink(missing_ok=True)
                    blobs.fetch(layer, archive, report)
                    with tarfile.open(archive) as files:
                        files.extractall(directory, filter="data")
                    done.touch()
                continue
            to = directory / _file_name(layer, name, model)
            if not to.exists():
                to.parent.mkdir(parents=True, exist_ok=True)
                to.unlink(missing_ok=True)  # a link to a file that is gone
                blobs.fetch(layer, to, report)
    weights = sorted(directory.rglob(f"*{GGUF_SUFFIX}"))
    if not weights and not any(directory.rglob("*.safetensors")):
        found = ", ".join(sorted({layer["mediaType"] for layer in manifest.get("layers", ())})) or "no layer"
        raise ConfigurationError(f"{name} holds no GGUF and no safetensors file; it has {found}")
    return weights[0] if weights else directory


def _file_name(layer: Mapping[str, Any], name: str, model: str) -> PurePosixPath:
    annotations = layer.get("annotations") or {}
    text = (
        annotations.get(_FILE_PATH)
        or annotations.get(_TITLE)
        or _DEFAULT_NAMES.get(layer["mediaType"], "").format(model=model)
    )
    if not text:
        raise ConfigurationError(f"{name}: a layer of type {layer['mediaType']} has no {_FILE_PATH}")
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or path.name in ("", ".lock"):
        raise ConfigurationError(f"{name}: {text} is no path of a file in a model's directory")
    return path


def _login(host: str) -> str | None:
    """The user and password that `docker login` stored for a host, in base64."""
    try:
        stored = json.loads((Path.home() / ".docker" / "config.json").read_bytes())["auths"][host]["auth"]
        base64.b64decode(stored, validate=True)
    except (OSError, KeyError, ValueError, TypeError, RuntimeError):
        return None
    return stored


def _digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
