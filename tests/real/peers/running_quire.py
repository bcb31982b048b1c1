"""A pytest plugin for the process that runs a peer's tests: it gives the tests a running Quire in place of the server
that the peer's fixtures start.

$QUIRE_PEER is the name of the peer, $QUIRE_URL the server's address and $QUIRE_MODEL the directory of its model. No
test of a peer is changed; the outcome of each is written to the file $QUIRE_REPORT, as lines of JSON.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

PEER, URL, MODEL = (os.environ[name] for name in ("QUIRE_PEER", "QUIRE_URL", "QUIRE_MODEL"))


class RunningServer:
    """Replaces vLLM's class of the same interface, which starts `vllm serve` with a model and its flags."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, *ignored: Any, **named: Any) -> None:
        self.host, self.port = urlsplit(URL).hostname, urlsplit(URL).port

    def __enter__(self) -> "RunningServer":
        return self

    def __exit__(self, *ignored: object) -> None:
        return

    @property
    def url_root(self) -> str:
        return URL

    def url_for(self, *parts: str) -> str:
        return "/".join([URL, *(part.strip("/") for part in parts if part)])

    def get_client(self, **named: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{URL}/v1", api_key=self.DUMMY_API_KEY, max_retries=0, **named)

    def get_async_client(self, **named: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=self.DUMMY_API_KEY, max_retries=0, **named)

    def get_async_client_anthropic(self, **named: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=URL, api_key=self.DUMMY_API_KEY, max_retries=0, **named)


def get_tokenizer(*ignored: Any, **named: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


class _Stub(ModuleType):
    """Stands for a missing module of a peer that its tests import, with any name that they read from it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # It is a package.
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_stub = any(fullname == name or fullname.startswith(f"{name}.") for name in self._names)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_stub else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "vllm.tokenizers":
            vars(module).update(get_tokenizer=get_tokenizer)


sys.meta_path.insert(0, _Stubs("vllm", "tblib", "wget", "openai_harmony"))
if PEER == "vllm":
    sys.modules["tests.utils"] = helpers = _Stub("tests.utils")
    vars(helpers).update(RemoteOpenAIServer=RunningServer)


def _serve_llama_cpp() -> None:
    """Makes llama.cpp's class use a running server ($DEBUG_EXTERNAL), also for paths without /v1."""
    utils: Any = importlib.import_module("utils")

    def make_url(self: Any, path: str, host: str | None = None) -> str:
        versioned = path.startswith(("/chat/", "/completions", "/responses", "/models", "/messages"))
        return f"{URL}/v1{path}" if versioned else f"{URL}{path}"

    def stopped(self: Any) -> None:
        return

    utils.ServerProcess.make_url = make_url
    utils.ServerProcess.stop = stopped
    original = utils.ServerProcess.__init__

    def init(self: Any) -> None:
        original(self)
        self.server_port = urlsplit(URL).port

    utils.ServerProcess.__init__ = init


if PEER == "llama_cpp":
    _serve_llama_cpp()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests in vLLM's files that test its own code and call no server."""
    if PEER != "vllm":
        return
    items[:] = [item for item in items if any(name.startswith("server") for name in getattr(item, "fixturenames", ()))]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    file, _, name = report.nodeid.partition("::")
    last = (report.longreprtext.strip().splitlines() or [""])[-1].strip()
    outcome = report.outcome if report.outcome != "failed" else f"{report.when} failed: {last[:200]}"
    with Path(os.environ["QUIRE_REPORT"]).open("a", encoding="utf-8") as lines:
        print(json.dumps([file, name, outcome]), file=lines)
