"""A local stand-in for the Hugging Face Hub, as `huggingface_hub` uses it, for tests of downloads.

with LocalHub({"org/name": {"config.json": b"{}", ...}}) as hub:
    environ = hub.environ(tmp_path)  # for processes; `hub.use(monkeypatch, tmp_path)` for this one
"""

import functools
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

_API = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?")
_FILE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_CHUNK_BYTES = 1 << 18
# Files from this size on have the SHA-256 as their ETag, as in large file storage.
_LARGE_BYTES = 1 << 20


def commit_of(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha1()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + content)
    return digest.hexdigest()


@dataclass
class LocalHub:
    """Files by repository, revision and name; `main` is the revision of repositories that have only one.

    Attributes:
        token: The token that gated repositories need.
        cuts: For each file name, the bytes after which its next answers break off, one entry an answer.
        sent: The requests for files, with the bytes sent, in order.
        status: The status of every answer, if set.
        forbidden_once: Files whose next request with a range is refused, as by an expired address.
        stalled: An event that an answer waits for before it breaks off.
        held: An event that every answer waits for.
        ignores_ranges: Whether each file is sent from its beginning.
    """

    repositories: Mapping[str, Mapping[str, bytes]]
    branches: dict[tuple[str, str], Mapping[str, bytes]] = field(default_factory=dict)
    gated: frozenset[str] = frozenset()
    token: str = "hf_right"
    cuts: dict[str, list[int]] = field(default_factory=dict)
    sent: list[tuple[str, int]] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    status: int | None = None
    forbidden_once: set[str] = field(default_factory=set)
    stalled: threading.Event | None = None
    held: threading.Event | None = None
    ignores_ranges: bool = False

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, self))
        self._server.daemon_threads = True
        self._serving = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._serving.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environ(self, home: Path) -> dict[str, str]:
        """The variables that make a process use this hub, with the cache under `home`."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}

    def use(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
        """Makes this process use the hub; returns the cache. `huggingface_hub` reads its variables when imported."""
        constants: Any = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", _CHUNK_BYTES)
        monkeypatch.setattr("quire.model_files.hub._LARGE_BYTES", _LARGE_BYTES)
        # The library waits half a minute before it gives up on a hub.
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        return home / "hub"

    def files(self, repository: str, revision: str) -> Mapping[str, bytes] | None:
        """The files of a branch, or of a commit in full."""
        if revision == "main":
            return self.repositories.get(repository)
        if (repository, revision) in self.branches:
            return self.branches[repository, revision]
        known = [self.repositories.get(repository, {})]
        known += [files for (name, _), files in self.branches.items() if name == repository]
        return next((files for files in known if commit_of(files) == revision), None)

    def bytes_sent(self, file: str) -> int:
        return sum(sent for name, sent in self.sent if name == file)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: LocalHub, *connection: Any) -> None:
        self.hub = hub
        super().__init__(*connection)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked[path] += 1
        if self.hub.held is not None:
            self.hub.held.wait()
        match = _API.fullmatch(urlsplit(self.path).path) or _FILE.fullmatch(urlsplit(self.path).path)
        if self.hub.status is not None:
            self._refuse(self.hub.status, None, "the hub is being repaired")
        elif match is None or (match["repository"] not in self.hub.repositories):
            # As on the hub, a missing repository looks like a private one to a caller without a token.
            self._refuse(404 if self._token() else 401, "RepoNotFound", "Repository not found")
        else:
            revision = unquote(match["revision"] or "main")
            files = self.hub.files(match["repository"], revision)
            if files is None:
                self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            elif "file" in match.groupdict():
                self._send_file(match["repository"], files, unquote(match["file"]), with_body)
            else:
                self._send_info(match["repository"], files)

    def _token(self) -> str | None:
        return (self.headers.get("authorization") or "").removeprefix("Bearer ") or None

    def _begin(self, status: int, num_bytes: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(num_bytes)}.items():
            self.send_header(name, value)
        self.end_headers()

    def _refuse(self, status: int, code: str | None, message: str) -> None:
        self._begin(status, 0, ({} if code is None else {"X-Error-Code": code}) | {"X-Error-Message": message})

    def _send_info(self, repository: str, files: Mapping[str, bytes]) -> None:
        siblings: list[dict[str, Any]] = [
            {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
        ]
        for sibling, content in zip(siblings, files.values(), strict=True):
            if len(content) >= _LARGE_BYTES:
                digest = hashlib.sha256(content).hexdigest()
                sibling["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 134}
        info = {
            "id": repository,
            "modelId": repository,
            "sha": commit_of(files),
            "siblings": siblings,
            "private": False,
        }
        body = json.dumps(info).encode()
        self._begin(200, len(body), {"Content-Type": "application/json"})
        self.wfile.write(body)

    def _send_file(self, repository: str, files: Mapping[str, bytes], name: str, with_body: bool) -> None:
        if repository in self.hub.gated and self._token() != self.hub.token:
            known = self._token() is not None
            self._refuse(403 if known else 401, "GatedRepo", f"Access to model {repository} is restricted.")
            return
        content = files.get(name)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        if with_body and "range" in self.headers and name in self.hub.forbidden_once:
            self.hub.forbidden_once.remove(name)
            self._refuse(403, None, "Request has expired")
            return
        is_large = len(content) >= _LARGE_BYTES
        digest = hashlib.sha256(content).hexdigest() if is_large else hashlib.sha1(content).hexdigest()
        start = 0
        if not self.hub.ignores_ranges and (wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range") or "")):
            start = int(wanted[1])
        headers = {"X-Repo-Commit": commit_of(files), "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if is_large:
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._begin(206 if start else 200, len(content) - start, headers)
        if with_body:
            self._send_bytes(name, content, start)

    def _send_bytes(self, name: str, content: bytes, start: int) -> None:
        cuts = self.hub.cuts.get(name)
        end = min(len(content), start + cuts.pop(0)) if cuts else len(content)
        sent = start
        try:
            while sent < end:
                sent += self.wfile.write(content[sent : min(sent + _CHUNK_BYTES, end)])
            if end < len(content) and self.hub.stalled is not None:
                self.wfile.flush()
                self.hub.stalled.wait()
        except OSError:
            """The client left."""
        self.hub.sent.append((name, sent - start))
        if end < len(content):
            self.close_connection = True
