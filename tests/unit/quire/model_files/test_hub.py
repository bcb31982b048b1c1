"""Models of a hub: downloaded files, resumption after a break, and error messages."""

import errno
import json
import os
import re
import shutil
import signal
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from quire.model_files import hub as hub_module
from quire.model_files.hub import pull
from quire.model_files.model_directory import HubName, ModelDirectory
from quire.model_files.model_source import hub_name, resolve_model
from quire.model_files.progress import DOWNLOADING, LoadProgress
from quire.runtime.settings import ConfigurationError, TemporaryError
from quire_cli.pull import DownloadLine, Stopped, fetch
from tests.support.hub import LocalHub, commit_of
from tests.support.processes import wait_true

CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
SMALL = {
    "config.json": CONFIG,
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "sentence_bert_config.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "2_Dense/model.safetensors": b"dense",
}
USELESS = {"README.md": b"read", "pytorch_model.bin": b"pickle", "model.gguf": b"GGUF", "onnx/model.safetensors": b"o"}
WEIGHTS = os.urandom(1 << 20) * 2
SHARDED = {
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    ).encode(),
    "m-1.safetensors": b"first",
    "m-2.safetensors": b"second",
    "consolidated.safetensors": b"all of it once more",
}
QUANTIZED = {
    "README.md": b"read",
    "m-IQ4_XS.gguf": b"iq4",
    "m-q4_k_m.gguf": b"q4",
    "m.Q5_K_M.gguf": b"q5",
    "m-UD-Q5_K_M.gguf": b"ud",
    "Q8_0/m-Q8_0-00001-of-00002.gguf": b"q8",
    "Q8_0/m-Q8_0-00002-of-00002.gguf": b"q8 too",
    "mmproj-Q6_K.gguf": b"images",
}
MODEL = HubName("org/model")


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    repositories = {
        "org/model": {**SMALL, **USELESS, "model.safetensors": WEIGHTS},
        "org/sharded": {**SMALL, **USELESS, **SHARDED},
        "org/pickled": {**SMALL, "pytorch_model.bin": b"pickle"},
        "org/gguf": {"a.gguf": WEIGHTS, "b.gguf": b"b"},
        "org/parts": {
            "Q8/m-00001-of-00002.gguf": WEIGHTS,
            "Q8/m-00002-of-00002.gguf": b"b",
            "lone-00001-of-00002.gguf": b"c",
        },
        "org/many": QUANTIZED,
        "org/both": {**SMALL, **QUANTIZED, "model.safetensors": WEIGHTS},
        "org/configured": {**SMALL, **QUANTIZED},
        "org/words": {name: content for name, content in SMALL.items() if name != "tokenizer.json"},
        "org/other": {**SMALL, "config.json": b'{"architectures": ["BertModel"]}', "model.safetensors": WEIGHTS},
    }
    with LocalHub(repositories, gated=frozenset({"org/sharded"})) as hub:
        hub.branches["org/model", "v2"] = {**SMALL, "model.safetensors": b"another"}
        yield hub


@pytest.fixture
def cache(hub: LocalHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return hub.use(monkeypatch, tmp_path)


def names(snapshot: Path) -> set[str]:
    return {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}


def keep(cache: Path, content: bytes) -> None:
    """Leaves this part of the weights, like a process that was killed during the download."""
    pull(MODEL, with_weights=False)
    digest = hub_module.hashlib.sha256(WEIGHTS).hexdigest()
    (cache / "models--org--model" / "blobs" / f"{digest}.quire.incomplete").write_bytes(content)


def error_of(name: HubName, with_weights: bool = True) -> str:
    with pytest.raises(ConfigurationError) as caught:
        pull(name, with_weights=with_weights)
    told = str(caught.value)
    assert "\n" not in told
    # Otherwise a service that starts while the hub is away would not be restarted.
    is_away = re.search("broke|later|cannot be reached|stopped answering", told) is not None
    assert isinstance(caught.value, TemporaryError) == is_away, told
    return told


def test_names_of_a_hub_are_told_apart_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "org/name": HubName("org/name"),
        "org/name@v1.0": HubName("org/name", "v1.0"),
        "org/name/Q4/a-Q4_K.gguf": HubName("org/name", None, "Q4/a-Q4_K.gguf"),
        "org/name/a.gguf@v1": HubName("org/name", "v1", "a.gguf"),
        "org/name:Q4_K_M": HubName("org/name", None, None, "Q4_K_M"),
        "org/name:q8_0@v1": HubName("org/name", "v1", None, "q8_0"),
    }
    assert {text: HubName.parse(text) for text in known} == known
    assert [str(each) for each in known.values()] == list(known)
    assert not any(map(HubName.parse, ("name", "./org/name", "a/b/c", "org/a.gguf", "a/b@", "a/b:", "a/b/c.gguf:Q8_0")))
    # A name that exists as a path is a path.
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/name") == HubName("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_name("org/name") is None
    assert resolve_model("org/name") == Path("org/name")


def test_all_that_is_read_is_downloaded_and_nothing_else(hub: LocalHub, cache: Path) -> None:
    reported: list[LoadProgress] = []
    snapshot = pull(MODEL, report=reported.append)
    assert names(snapshot) == {*SMALL, "model.safetensors"}
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert snapshot == cache / "models--org--model" / "snapshots" / commit_of(hub.repositories["org/model"])
    assert reported[-1] == LoadProgress(DOWNLOADING, len(WEIGHTS), len(WEIGHTS))
    assert len(reported) > 5
    assert ModelDirectory.open(snapshot).name == "org/model"
    sent = len(hub.sent)
    assert pull(MODEL) == snapshot
    assert len(hub.sent) == sent


def test_shards_are_those_of_the_index_a_revision_is_a_branch_or_a_commit_and_a_gateway_downloads_no_weights(
    hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert names(resolve_model("org/model", with_weights=False)) == set(SMALL)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    snapshot = pull(HubName("org/sharded"))
    assert names(snapshot) == {*SMALL, "model.safetensors.index.json", "m-1.safetensors", "m-2.safetensors"}
    branch = pull(HubName("org/model", "v2"))
    assert (branch / "model.safetensors").read_bytes() == b"another"
    assert pull(HubName("org/model", branch.name)) == branch
    assert error_of(HubName("org/model", "v3")) == (
        "org/model has no revision v3; a revision is a branch, a tag or a commit"
    )


def test_a_gguf_file_of_a_repository_is_pulled_with_all_its_parts(hub: LocalHub, cache: Path) -> None:
    file = pull(HubName("org/gguf", None, "a.gguf"))
    assert (file.name, file.read_bytes() == WEIGHTS, names(file.parent)) == ("a.gguf", True, {"a.gguf"})
    assert error_of(HubName("org/gguf", None, "c.gguf")) == "org/gguf has no c.gguf; its GGUF files: a.gguf, b.gguf"
    file = pull(HubName("org/parts", None, "Q8/m-00002-of-00002.gguf"))
    assert names(file.parent) == {"m-00001-of-00002.gguf", "m-00002-of-00002.gguf"}
    assert (file.name, file.read_bytes() == WEIGHTS) == ("m-00001-of-00002.gguf", True)
    assert error_of(HubName("org/parts", None, "lone-00001-of-00002.gguf")).startswith(
        "org/parts has no lone-00002-of-00002.gguf; its GGUF files: "
    )


def test_a_quantization_names_a_gguf_file(hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pulled(text: str) -> str:
        return pull(HubName.parse(text) or MODEL).name

    assert pulled("org/many:Q4_K_M") == pulled("org/many:q4_k_m") == "m-q4_k_m.gguf"
    assert pulled("org/many:UD-Q5_K_M") == "m-UD-Q5_K_M.gguf"
    assert pulled("org/many:Q8_0") == "m-Q8_0-00001-of-00002.gguf"
    # Without a name: Q4_K_M, or else the first.
    assert pulled("org/many") == "m-q4_k_m.gguf"
    assert pulled("org/gguf") == "a.gguf"
    # A directory of weights wins over files, but also has files.
    assert names(pull(HubName("org/both"))) == {*SMALL, "model.safetensors"}
    assert pulled("org/both:IQ4_XS") == "m-IQ4_XS.gguf"
    # A gateway reads the same file as a worker, even if there is also a configuration.
    assert [pull(HubName("org/configured"), with_weights=each).name for each in (True, False)] == ["m-q4_k_m.gguf"] * 2
    for text, problem in (
        (
            "org/many:Q5_K_M",
            "has 2 GGUF files of Q5_K_M; name one, as in org/many/m-UD-Q5_K_M.gguf: m-UD-Q5_K_M.gguf, m.Q",
        ),
        (
            "org/many:Q4_K",
            "has no GGUF file of Q4_K; name one, as in org/many/Q8_0/m-Q8_0-00001-of-00002.gguf: Q8_0/m-Q8_",
        ),
        ("org/many:Q6_K", "has no GGUF file of Q6_K; name one"),
        ("org/model:Q4_0", "has no GGUF file of Q4_0; name one, as in org/model/model.gguf: model.gguf"),
        ("org/pickled:Q4_0", "org/pickled:Q4_0 has no GGUF file; name it without a quantization"),
    ):
        assert problem in error_of(HubName.parse(text) or MODEL), text
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert pulled("org/many:Q8_0") == "m-Q8_0-00001-of-00002.gguf"
    assert pulled("org/many") == "m-q4_k_m.gguf"
    assert "org/none:Q8_0 is not in the cache" in error_of(HubName("org/none", None, None, "Q8_0"))


def test_a_cut_download_goes_on_where_it_ended_also_where_its_address_has_expired(hub: LocalHub, cache: Path) -> None:
    hub.cuts["model.safetensors"] = [len(WEIGHTS) // 2]
    hub.forbidden_once.add("model.safetensors")
    assert (pull(MODEL) / "model.safetensors").read_bytes() == WEIGHTS
    assert [sent for name, sent in hub.sent if name == "model.safetensors"] == [len(WEIGHTS) // 2] * 2


@pytest.mark.parametrize(
    ("kept", "ignores_ranges", "sent"),
    [
        (WEIGHTS[: 5 << 17], False, len(WEIGHTS) - (5 << 17)),
        (WEIGHTS, False, 0),
        # A hub without ranges sends the whole file again.
        (WEIGHTS[:1000], True, len(WEIGHTS)),
    ],
)
def test_what_a_killed_process_left_is_used(
    hub: LocalHub, cache: Path, kept: bytes, ignores_ranges: bool, sent: int
) -> None:
    keep(cache, kept)
    hub.ignores_ranges = ignores_ranges
    assert (pull(MODEL) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.bytes_sent("model.safetensors") == sent
    assert not list(cache.rglob("*.incomplete"))


def test_what_was_kept_of_another_content_is_deleted(hub: LocalHub, cache: Path) -> None:
    keep(cache, b"damaged" * 1000)
    assert error_of(MODEL).endswith("does not have the file's SHA-256; it is deleted, pull again")
    assert (pull(MODEL) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_that_stalls_is_given_up(hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    hub.cuts["model.safetensors"], hub.stalled = [0] * 100, threading.Event()
    try:
        assert error_of(MODEL) == (
            f"the connection to {hub.endpoint} broke (several attempts brought nothing within 0.05 s; "
            "HF_HUB_DOWNLOAD_TIMEOUT sets another time); what has arrived is kept, `quire pull org/model` goes on from "
            "there"
        )
        # Attempts that `huggingface_hub` repeats are not repeated again.
        wait_true(lambda: 100 - len(hub.cuts["model.safetensors"]) >= 6)
        assert 100 - len(hub.cuts["model.safetensors"]) == 6
    finally:
        hub.stalled.set()


def test_a_download_that_stands_still_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    line = DownloadLine(MODEL, lambda: now)
    line.look()
    line.report(LoadProgress(DOWNLOADING, 0, 4 << 20))
    now = 10.0
    line.report(LoadProgress(DOWNLOADING, 1 << 20, 4 << 20))
    now = 20.0
    line.look()
    now = 28.0
    line.look()
    assert capsys.readouterr().err.splitlines() == [
        "quire: org/model: downloading, 1.0 of 4.0 MiB (25%), 0.1 MiB/s, 30 s left",
        "quire: org/model: downloading, 1.0 of 4.0 MiB (25%), no progress for 18 s (a hub that sends nothing is given "
        "up after a minute)",
    ]


def test_several_at_once_download_a_large_file_once(hub: LocalHub, cache: Path) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull(MODEL))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert hub.bytes_sent("model.safetensors") == len(WEIGHTS)


def test_a_gated_model_is_for_a_token_that_was_granted_access(
    hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = HubName("org/sharded")
    expected = (
        f"org/sharded is gated: its owner grants access at {hub.endpoint}/org/sharded; then set HF_TOKEN to a token of "
        "that account "
    )
    assert error_of(gated) == expected + "(no token is set)"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert error_of(gated) == expected + "(a token is set)"


def test_what_the_hub_does_not_have_or_nobody_reads_is_not_downloaded(hub: LocalHub, cache: Path) -> None:
    assert error_of(HubName("org/nothing")) == (
        f"org/nothing is neither a directory here nor a model of {hub.endpoint}; check the name, or set HF_TOKEN if "
        "the model is private (no token is set)"
    )
    assert "only pickles such as pytorch_model.bin, which are never loaded" in error_of(HubName("org/pickled"))
    assert error_of(HubName("org/words")).startswith("org/words has no tokenizer.json, the one form of tokenizer")
    assert error_of(HubName("org/other")).startswith("architecture BertModel of")
    assert hub.bytes_sent("model.safetensors") == hub.bytes_sent("pytorch_model.bin") == 0
    hub.status = 503
    assert error_of(MODEL) == f"{hub.endpoint} cannot send org/model: the hub is being repaired; try again later"
    hub.status = 403
    assert error_of(MODEL).startswith(f"{hub.endpoint} refuses org/model: the hub is being repaired; check HF_TOKEN")


def test_without_a_network_the_cache_answers(hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert error_of(MODEL) == (
        f"org/model is not in the cache {cache}, and HF_HUB_OFFLINE is set; `quire pull org/model` fetches it once "
        "there is a connection"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    pull(MODEL, with_weights=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    pull(MODEL, with_weights=False)
    assert error_of(MODEL).startswith("org/model is not whole in the cache, and HF_HUB_OFFLINE is set: ")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    snapshot = pull(MODEL)
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nowhere)
    template = nowhere + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    assert pull(MODEL) == snapshot
    assert error_of(HubName("org/sharded")) == (
        f"org/sharded is not in the cache {cache}, and {nowhere} cannot be reached (ConnectError: [Errno 111] "
        "Connection refused); `quire pull org/sharded` fetches it once there is a connection"
    )


def test_a_hub_that_cannot_be_reached_is_asked_once(
    hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
    hub.held = threading.Event()
    try:
        assert f"{hub.endpoint} cannot be reached (no answer within 0.1 s; HF_HUB_ETAG_TIMEOUT" in error_of(MODEL)
        assert hub.asked.total() == 1
    finally:
        hub.held.set()


def test_a_signal_ends_a_download(hub: LocalHub, cache: Path) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    hub.held = threading.Event()

    def send() -> None:
        wait_true(lambda: hub.asked.total() > 0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    try:
        with pytest.raises(Stopped, match=r"^stopped by SIGTERM; what has arrived of org/model is kept$"):
            fetch(MODEL)
    finally:
        # Here the process lives on, and so does the thread until the hub's answer ends it.
        hub.status = 404
        hub.held.set()
        (abandoned,) = (thread for thread in threading.enumerate() if thread.name == "download")
        abandoned.join()
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_what_the_cache_has_needs_no_space(hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pull(MODEL, with_weights=False)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1 << 20))
    # Other content, as from a revision whose download was given up.
    (cache / "models--org--model" / "blobs" / f"{'0' * 64}.quire.incomplete").write_bytes(WEIGHTS)
    assert "needs 2.0 MiB more; 1.0 MiB are free" in error_of(MODEL)
    keep(cache, WEIGHTS[: 1 << 20])
    assert (pull(MODEL) / "model.safetensors").read_bytes() == WEIGHTS
    hub.branches["org/model", "v3"] = {**SMALL, "README.md": b"new", "model.safetensors": WEIGHTS}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 0))
    assert (pull(HubName("org/model", "v3")) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_disk_that_fills_up(hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: object, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_module._Partial, "write", write)
    assert error_of(MODEL) == (
        f"no space for org/model: it goes to {cache}; free some, or name another disk by HF_HOME"
    )
