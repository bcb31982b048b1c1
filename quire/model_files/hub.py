"""Fetches models of a hub: ORG/NAME becomes a snapshot in the cache that all tools of the Hugging Face Hub share.

    pull(HubName.parse("org/name@v1"))  # -> .../models--org--name/snapshots/COMMIT

`huggingface_hub` finds, authenticates and stores: its variables apply here, too (HF_ENDPOINT, HF_TOKEN, HF_HOME,
HF_HUB_OFFLINE and so on). This module adds two things: it fetches only the files that Quire reads, and it continues a
large file where a killed process left it, which `huggingface_hub` does within one process only (ADR 42).
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from io import SEEK_END, FileIO
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from huggingface_hub import (
    HfApi,
    ModelInfo,
    constants,
    get_hf_file_metadata,
    get_session,
    get_token,
    hf_hub_download,
    hf_hub_url,
)
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyrefly: ignore  # of httpx, or of httpx2
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, disable_progress_bars
from huggingface_hub.utils.logging import set_verbosity_error

from quire.model_files.gguf_header import SUFFIX as GGUF_SUFFIX
from quire.model_files.gguf_header import part_names
from quire.model_files.model_directory import (
    EMBEDDING_MODULES,
    INDEX_FILE,
    OLDER_QUANTIZATIONS,
    SINGLE_FILE,
    TRANSFORMER_SETTINGS,
    HubName,
    ModelDirectory,
    shard_names,
    weight_files,
)
from quire.model_files.progress import DOWNLOADING, LoadProgress, Report, no_report, of_bytes
from quire.rpc.process import DaemonThreads
from quire.runtime import clock
from quire.runtime.settings import ConfigurationError, TemporaryError
from quire.version import VERSION

_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
# Further files that `ModelDirectory` reads.
_SMALL = (
    _TOKENIZER,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    *OLDER_QUANTIZATIONS,
    EMBEDDING_MODULES,
    *TRANSFORMER_SETTINGS,
    "config_sentence_transformers.json",
)
# Further chat templates, and modules of embeddings.
_FURTHER_SMALL = re.compile(r"additional_chat_templates/[^/]+\.jinja|\d+_\w+/(?:config\.json|model\.safetensors)")
# Smaller files are fetched whole; larger ones than the second, by `huggingface_hub`: the hub sends them only by Xet.
_LARGE_BYTES = 8 << 20
_MAX_HTTP_BYTES = 50_000_000_000
_SUFFIX = ".quire.incomplete"
_FIRST_SERVER_ERROR = 500
_NUM_THREADS = 4
# Timeouts for the connection to the hub, and then for its description of a model.
_CONNECT_S = 5.0
_LISTING_S = 60.0
# Errors that `http_get` retries itself before it raises them; after others it is called once more if no byte came.
_REPEATED = ("ConnectError", "ConnectTimeout", "ReadTimeout", "WriteTimeout", "PoolTimeout", "RemoteProtocolError")
_MAX_FRUITLESS_ATTEMPTS = 2
_FORBIDDEN = 403
_LOCK_POLL_S = 0.5
_BROKEN = "the hub stopped answering"
_SHA256 = re.compile(r"[0-9a-f]{64}")
# An ETag becomes the name of a file.
_PLAIN_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_NUM_SHOWN_FILES = 8
_DEFAULT_QUANTIZATION = "Q4_K_M"
# Files of vision parts, and importance matrices for quantization.
_NOT_MODELS = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Listed:
    """A file of a repository.

    Attributes:
        size: In bytes.
        etag: The name of its blob in the cache, where the hub says it in the listing: of large files.
    """

    size: int
    etag: str | None

    def missing_bytes(self, blobs: Path) -> int:
        """Bytes missing in the cache, where this or a revision with the same content may have left some."""
        if self.etag is None:
            return self.size
        if (blobs / self.etag).exists():
            return 0
        partial = blobs / f"{self.etag}{_SUFFIX}"
        return max(self.size - (partial.stat().st_size if partial.exists() else 0), 0)


def pull(model: HubName, *, with_weights: bool = True, report: Report = no_report) -> Path:
    """Fetches the files missing in the cache; returns the snapshot's directory, or the file of a name with one.

    A branch or tag is looked up at the hub. Without the hub the cache is used if it has all files.

    Args:
        with_weights: Without them, it fetches the files that a gateway reads: configuration, tokenizer, chat templates.
        report: Called with the bytes of large files.

    Raises:
        ConfigurationError: one line with the obstacle and the way out.
    """
    disable_progress_bars()
    set_verbosity_error()
    with _explained(model):
        return _Pull(model, report).run(with_weights)


def cached(model: HubName) -> Path | None:
    """The same if the cache has all of it; else None. The hub is not asked."""
    try:
        with _explained(model):
            return _Pull(model, no_report, offline="the hub is not asked").run(with_weights=True)
    except ConfigurationError:
        return None


class _Pull:
    def __init__(self, model: HubName, report: Report, offline: str | None = None) -> None:
        self._model = model
        self._report = report
        self._api = HfApi(library_name="quire", library_version=VERSION)
        # Why the hub is not asked, once that is known.
        self._offline = offline
        self._done: dict[str, int] = {}
        self._total = 0
        self._counting = threading.Lock()

    def run(self, with_weights: bool) -> Path:
        self._offline = self._offline or self._look_for_hub()
        if self._model.file is not None:
            return self._gguf_model(self._model.file)
        if self._model.quantization is not None or (self._offline is not None and self._has_files_alone()):
            return self._gguf_model(self._gguf_file())
        # The only look-up of the revision: all other files are taken from the commit of this one.
        try:
            snapshot = self._fetch(_CONFIG, self._model.revision).parent
        except RemoteEntryNotFoundError:
            return self._gguf_model(self._gguf_file())
        info = self._info(snapshot.name)
        if info is None:
            return self._cached(snapshot, with_weights)
        listing = _files(info)
        if listing.keys().isdisjoint((SINGLE_FILE, INDEX_FILE)) and _gguf_files(listing):
            return self._gguf_model(self._gguf_file())
        if _TOKENIZER not in listing:
            raise ConfigurationError(
                f"{self._model} has no {_TOKENIZER}, the one form of tokenizer that is read; transformers writes it: "
                f'AutoTokenizer.from_pretrained("{self._model.repository}").save_pretrained(DIRECTORY)'
            )
        weights = self._weights(listing, snapshot.name) if with_weights else []
        small = [name for name in listing if name in _SMALL or _FURTHER_SMALL.fullmatch(name)]
        _in_threads(lambda name: self._fetch(name, snapshot.name), small)
        # A model that cannot be served is refused before its weights are fetched.
        ModelDirectory.open(snapshot)
        self._fetch_large({name: listing[name] for name in weights}, snapshot.name)
        _in_threads(lambda name: self._fetch(name, snapshot.name), weights)
        return snapshot

    def _look_for_hub(self) -> str | None:
        """The reason why the hub cannot be asked; None if it answers in any way. One attempt: `huggingface_hub` makes
        several with pauses between them, up to minutes, for each file that is not in the cache."""
        if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set"
        self._report(LoadProgress(DOWNLOADING))
        url = hf_hub_url(self._model.repository, self._model.file or _CONFIG, revision=self._model.revision)
        answer_s = constants.HF_HUB_ETAG_TIMEOUT
        # The times to connect, to read, to write, and to get a connection of the pool.
        timeout: Any = (_CONNECT_S, answer_s, answer_s, _CONNECT_S)
        try:
            get_session().head(url, follow_redirects=False, timeout=timeout)
        except HTTPError as error:
            reason = f"{type(error).__name__}: {_one_line(error)}"
            # The name is the same in httpx and in httpx2.
            if reason.startswith("ReadTimeout"):
                reason = f"no answer within {answer_s} s; HF_HUB_ETAG_TIMEOUT sets another time"
            return f"{constants.ENDPOINT} cannot be reached ({reason})"
        return None

    def _gguf_model(self, file: str) -> Path:
        """The file's path; also fetches the other parts of the model if it is one of several."""
        names = part_names(file)
        info = self._info(self._model.revision)
        if info is not None and info.sha is not None:
            listing = _files(info)
            for name in names:
                if name not in listing:
                    raise ConfigurationError(
                        f"{self._model.repository} has no {name}; its GGUF files: "
                        f"{_shown(_gguf_files(listing)) or 'none'}"
                    )
            self._fetch_large({name: listing[name] for name in names}, info.sha)
        # By the name of the revision, which offline mode then knows.
        first, *_ = [self._fetch(name, self._model.revision) for name in names]
        return first

    def _gguf_file(self) -> str:
        """The GGUF file of the quantization in the model's name; without one of Q4_K_M, else the first, as llama.cpp
        chooses. Raises ConfigurationError if there is none or several."""
        info, wanted = self._info(self._model.revision), self._model.quantization
        found = _gguf_files(self._cached_names() if info is None else _files(info))
        named = re.compile(rf"(?<![a-z0-9]){re.escape(wanted or _DEFAULT_QUANTIZATION)}[./-]", re.IGNORECASE)
        matching = [name for name in found if named.search(name)]
        if len(matching) == 1 or (wanted is None and found):
            return (matching or found)[0]
        if not found and info is None:
            raise _not_cached(self._model, self._offline or _BROKEN)
        if not found:
            problem = "it is no model as transformers saves it" if wanted is None else "name it without a quantization"
            raise ConfigurationError(f"{self._model} has no {_CONFIG if wanted is None else 'GGUF file'}; {problem}")
        said = f"{len(matching)} GGUF files of {wanted}" if matching else f"no GGUF file of {wanted}"
        raise ConfigurationError(
            f"{self._model.repository} has {said}; name one, as in {self._model.repository}/{(matching or found)[0]}: "
            f"{_shown(matching or found)}"
        )

    def _cached_names(self) -> list[str]:
        """The files of the revision in the cache."""
        folder, revision = self._folder(), self._model.revision or constants.DEFAULT_REVISION
        ref = folder / "refs" / revision
        snapshot = folder / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
        return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]

    def _has_files_alone(self) -> bool:
        """Whether the cache has GGUF files of the model and no directory."""
        names = self._cached_names()
        return _CONFIG not in names and bool(_gguf_files(names))

    def _folder(self) -> Path:
        return Path(constants.HF_HUB_CACHE) / f"models--{self._model.repository.replace('/', '--')}"

    def _weights(self, listing: Mapping[str, _Listed], commit: str) -> Sequence[str]:
        """The names of the weight files. Raises ConfigurationError if there are no readable ones."""
        if SINGLE_FILE in listing:
            return [SINGLE_FILE]
        if INDEX_FILE in listing:
            names = shard_names(self._fetch(INDEX_FILE, commit))
            for name in names:
                if name not in listing:
                    raise ConfigurationError(f"{self._model}: {INDEX_FILE} names {name}, which is not there")
            return names
        if pickles := [name for name in listing if name.endswith((".bin", ".pt", ".pth"))]:
            raise ConfigurationError(
                f"{self._model} has no safetensors, only pickles such as {pickles[0]}, which are never loaded; "
                "transformers converts it: AutoModelForCausalLM.from_pretrained"
                f'("{self._model.repository}").save_pretrained(DIRECTORY)'
            )
        raise ConfigurationError(f"{self._model} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")

    def _cached(self, snapshot: Path, with_weights: bool) -> Path:
        """The cached snapshot. Raises ConfigurationError if a needed file is missing."""
        try:
            ModelDirectory.open(snapshot).tokenizer_json()
            if with_weights:
                weight_files(snapshot)
        except ConfigurationError as error:
            raise _missing(
                f"{self._model} is not whole in the cache, and {self._offline or _BROKEN}: {error}; "
                f"`quire pull {self._model}` fetches the rest once there is a connection"
            ) from error
        return snapshot

    def _info(self, revision: str | None) -> ModelInfo | None:
        """The hub's description of a revision; None if it cannot be asked, or fails. Raises HfHubHTTPError."""
        if self._offline is not None:
            return None
        try:
            return self._api.model_info(
                self._model.repository, revision=revision, files_metadata=True, timeout=_LISTING_S
            )
        except HTTPError as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code < _FIRST_SERVER_ERROR:
                raise
            return None

    def _fetch(self, name: str, revision: str | None) -> Path:
        """A file's path in the cache; downloads the file if it is missing there."""
        try:
            return Path(
                hf_hub_download(
                    self._model.repository,
                    name,
                    revision=revision,
                    library_name="quire",
                    library_version=VERSION,
                    local_files_only=self._offline is not None,
                )
            )
        except LocalEntryNotFoundError:
            if self._offline is None:
                raise
            raise _not_cached(self._model, self._offline) from None

    def _fetch_large(self, files: Mapping[str, _Listed], commit: str) -> None:
        """Fetches the large ones of the files into the cache's blobs, where `_fetch` finds them."""
        folder = self._folder()
        snapshot, blobs = folder / "snapshots" / commit, folder / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        missing = {name: file for name, file in files.items() if not (snapshot / name).exists()}
        _check_space(self._model, sum(file.missing_bytes(blobs) for file in missing.values()), blobs)
        large = {name: file.size for name, file in missing.items() if _LARGE_BYTES <= file.size < _MAX_HTTP_BYTES}
        self._total = sum(large.values())
        _in_threads(lambda name: self._fetch_blob(name, commit, blobs), large)

    def _fetch_blob(self, name: str, commit: str, blobs: Path) -> None:
        """Fetches a file, from the byte where an earlier attempt of any process ended."""
        url = hf_hub_url(self._model.repository, name, revision=commit)
        num_fruitless = 0
        while True:
            headers = build_hf_headers(library_name="quire", library_version=VERSION)
            # Asked anew at each attempt: addresses of files are signed and expire.
            found = get_hf_file_metadata(url, headers=headers)
            if found.etag is None or found.size is None or not _PLAIN_NAME.fullmatch(found.etag):
                return
            if urlsplit(found.location).netloc != urlsplit(url).netloc:
                headers.pop("authorization", None)
            with _Partial.open(blobs, found.etag, lambda size: self._count(name, size)) as partial:
                if partial is None:
                    return
                started_at = partial.size
                try:
                    http_get(found.location, partial, resume_size=started_at, headers=headers, expected_size=found.size)
                    partial.finish(is_resumed=started_at > 0)
                    return
                except HTTPError as error:
                    has_grown = partial.size > started_at
                    if isinstance(error, HfHubHTTPError):
                        # The address may have expired meanwhile.
                        is_final = not has_grown or error.response.status_code != _FORBIDDEN
                    else:
                        num_fruitless = 0 if has_grown else num_fruitless + 1
                        is_final = type(error).__name__ in _REPEATED or num_fruitless == _MAX_FRUITLESS_ATTEMPTS
                    if is_final:
                        raise

    def _count(self, name: str, size: int) -> None:
        with self._counting:
            self._done[name] = size
            done = sum(self._done.values())
        self._report(LoadProgress(DOWNLOADING, min(done, self._total), self._total))


class _Partial(FileIO):
    """The bytes of a blob that are there, for one process at a time. They outlive the process."""

    def __init__(self, path: Path, blob: Path, count: Callable[[int], None]) -> None:
        super().__init__(path, "a+b")
        self._blob = blob
        self._path = path
        self._count = count

    @classmethod
    @contextmanager
    def open(cls, blobs: Path, etag: str, count: Callable[[int], None]) -> "Iterator[_Partial | None]":
        """Opens it once no other process has it open; None if the blob is complete by then.

        Args:
            count: Called with its size as it grows, under this process or another one.
        """
        path, blob = blobs / f"{etag}{_SUFFIX}", blobs / etag
        while not blob.exists():
            with cls(path, blob, count) as partial:
                try:
                    fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    count(partial.size)
                    clock.sleep(_LOCK_POLL_S)
                    continue
                # Another process may have completed or removed it between the opening and the lock.
                if partial._is_current():
                    if blob.exists():
                        # Completed between the look and the opening, which has made a new and empty file.
                        path.unlink()
                        continue
                    count(partial.size)
                    yield partial
                    return
        count(blob.stat().st_size)
        yield None

    @property
    def size(self) -> int:
        return self.seek(0, SEEK_END)

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._count(self.tell())
        return written

    def finish(self, *, is_resumed: bool) -> None:
        """Makes it the blob. Raises ConfigurationError if an earlier part of it is not from this file."""
        if is_resumed and _SHA256.fullmatch(self._blob.name):
            self.seek(0)
            if hashlib.file_digest(self, "sha256").hexdigest() != self._blob.name:
                self._path.unlink()
                raise ConfigurationError(
                    f"{self._path} was resumed and does not have the file's SHA-256; it is deleted, pull again"
                )
        self._path.rename(self._blob)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self.fileno()))
        except FileNotFoundError:
            return False


@contextmanager
def _explained(model: HubName) -> Iterator[None]:
    """Converts errors of a hub, a network and a disk to a ConfigurationError of one line."""
    try:
        yield
    except ConfigurationError:
        raise
    except GatedRepoError as error:
        raise ConfigurationError(
            f"{model.repository} is gated: its owner grants access at {constants.ENDPOINT}/{model.repository}; then "
            f"set HF_TOKEN to a token of that account ({_token_state()})"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"{model.repository} is neither a directory here nor a model of {constants.ENDPOINT}; check the name, or "
            f"set HF_TOKEN if the model is private ({_token_state()})"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigurationError(
            f"{model.repository} has no revision {model.revision}; a revision is a branch, a tag or a commit"
        ) from error
    except HfHubHTTPError as error:
        raise _refused(model, error) from error
    except LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, HfHubHTTPError):
            raise _refused(model, error.__cause__) from error
        if isinstance(error.__cause__, FileMetadataError):
            raise ConfigurationError(
                f"{constants.ENDPOINT} does not answer as a hub does; check HF_ENDPOINT and the proxy"
            ) from error
        raise _not_cached(model, _BROKEN) from error
    except HFValidationError as error:
        raise ConfigurationError(f"{model.repository} is no name of a model: {_one_line(error)}") from error
    except HTTPError as error:
        reason = f"{type(error).__name__}: {_one_line(error)}"
        if reason.startswith("ReadTimeout"):
            seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
            reason = f"several attempts brought nothing within {seconds} s; HF_HUB_DOWNLOAD_TIMEOUT sets another time"
        raise TemporaryError(
            f"the connection to {constants.ENDPOINT} broke ({reason}); what has arrived is kept, "
            f"`quire pull {model}` goes on from there"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(model, Path(constants.HF_HUB_CACHE), "") from error
        raise ConfigurationError(
            f"cannot store {model} in {constants.HF_HUB_CACHE}: {_one_line(error)}; HF_HOME names another place"
        ) from error


def _refused(model: HubName, error: HfHubHTTPError) -> ConfigurationError:
    status = error.response.status_code
    said = _one_line(error.server_message or f"HTTP status {status}")
    if status in (401, 403):
        return ConfigurationError(f"{constants.ENDPOINT} refuses {model}: {said}; check HF_TOKEN ({_token_state()})")
    if status == 429:
        return TemporaryError(
            f"{constants.ENDPOINT} limits the rate of requests: {said}; try again later, or set HF_TOKEN"
        )
    return TemporaryError(f"{constants.ENDPOINT} cannot send {model}: {said}; try again later")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]


def _token_state() -> str:
    return "no token is set" if get_token() is None else "a token is set"


def _missing(text: str) -> ConfigurationError:
    """The error for a file that the cache lacks, if the hub is not asked or does not answer."""
    return ConfigurationError(text) if constants.HF_HUB_OFFLINE else TemporaryError(text)


def _not_cached(model: HubName, reason: str) -> ConfigurationError:
    return _missing(
        f"{model} is not in the cache {constants.HF_HUB_CACHE}, and {reason}; `quire pull {model}` fetches it once "
        "there is a connection"
    )


def _check_space(model: HubName, needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        _, needed_text = of_bytes(needed, needed)
        _, free_text = of_bytes(free, free)
        raise _disk_full(model, folder, f" and needs {needed_text} more; {free_text} are free")


def _disk_full(model: HubName, folder: Path, sizes: str) -> ConfigurationError:
    return ConfigurationError(
        f"no space for {model}: it goes to {folder}{sizes}; free some, or name another disk by HF_HOME"
    )


def _files(info: ModelInfo) -> dict[str, _Listed]:
    """The files of a repository by their names."""
    found: dict[str, _Listed] = {}
    for each in info.siblings or ():
        etag = None if each.lfs is None else each.lfs.sha256
        found[each.rfilename] = _Listed(each.size or 0, etag if etag and _PLAIN_NAME.fullmatch(etag) else None)
    return found


def _gguf_files(names: Iterable[str]) -> list[str]:
    """The files of language models; the first part of models in several parts."""
    found = (name for name in names if name.endswith(GGUF_SUFFIX) and not _NOT_MODELS.search(name))
    return sorted({part_names(name)[0] for name in found})


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _NUM_SHOWN_FILES
    return ", ".join(names[:_NUM_SHOWN_FILES]) + (f" and {more} more" if more > 0 else "")


def _in_threads(work: Callable[[_T], object], items: Iterable[_T]) -> None:
    """Calls `work` for all items, a few at a time; raises the first error.

    By threads of its own, which do not keep the process from ending: Ctrl-C ends a download at once.
    """
    threads, turns = DaemonThreads("pull"), threading.BoundedSemaphore(_NUM_THREADS)

    def run(item: _T) -> None:
        with turns:
            work(item)

    for done in as_completed([threads.submit(run, item) for item in items]):
        done.result()
