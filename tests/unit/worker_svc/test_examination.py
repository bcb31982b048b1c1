"""The report of `quire doctor` on the device, on a machine with a GPU."""

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from quire.runtime.finding import Finding, Verdict
from worker_svc import examination


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of the installed distributions, with a GPU that Triton supports."""
    versions = {"transformers": "5.1", "gguf": "0.2"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(examination, "fastest_for", lambda _: None)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"triton": ["pytorch-triton"]})
    return versions


def find(part: str) -> Finding:
    (finding,) = [each for each in examination.examine_device() if each.part == part]
    return finding


def test_a_gpu_has_its_name_and_its_memory_and_triton_a_version_whatever_distributes_it(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions["pytorch-triton"] = "3.8"
    assert find("GPU 0") == Finding("GPU 0", Verdict.OK, "NVIDIA H200, 140 GiB, compute capability 9.0")
    assert find("Triton") == Finding("Triton", Verdict.OK, "3.8")
    versions["triton"] = "3.7"
    assert find("Triton") == Finding("Triton", Verdict.OK, "3.7")
    del versions["triton"]
    monkeypatch.setattr(importlib.metadata, "packages_distributions", dict)
    assert find("Triton") == Finding("Triton", Verdict.OK, "of unknown version")
