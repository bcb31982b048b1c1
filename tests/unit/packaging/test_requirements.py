"""Packages of an install: torch only if it is needed, one exact version of everything for development."""

import re
import tomllib
from pathlib import Path

from quire.version import VERSION
from tools.list_requirements import list_requirements
from tools.set_version import changed

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = ROOT / "pyproject.toml"
SERVICE_EXTRAS = ("gateway", "scheduler", "worker")


def read_pyproject() -> dict:
    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def read_pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins)
    return {name_of(pin): pin.partition("==")[2] for pin in pins}


def read_images() -> dict[str, list[str]]:
    """The extras of each image, by its target."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    stages = re.split(r"^FROM \S+ AS ", text, flags=re.MULTILINE)[1:]
    found = ((stage.split()[0], re.search(r"list_requirements\.py ([a-z ]+) >", stage)) for stage in stages)
    return {name.removesuffix("-packages"): listed[1].split() for name, listed in found if listed is not None}


def test_only_images_of_workers_have_torch() -> None:
    images = read_images()
    assert images.keys() == {"gateway", "scheduler", "worker-cpu", "worker-cuda"}
    for image, extras in images.items():
        names = {name_of(requirement) for requirement in list_requirements(PYPROJECT, extras)}
        assert "grpcio" in names
        assert ("torch" in names) == ("transformers" in names) == ("gguf" in names) == image.startswith("worker")
        assert names.isdisjoint({"triton", "accelerate"})


def test_images_are_built_with_every_package_of_the_wheel() -> None:
    """The build passes over a package whose folder is not there: the image's `quire` would miss a command."""
    packages = read_pyproject()["tool"]["scikit-build"]["wheel"]["packages"]
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{package}" for package in packages} <= set(lines)


def test_everything_required_is_pinned() -> None:
    pyproject = read_pyproject()
    required = (
        list_requirements(PYPROJECT, [*SERVICE_EXTRAS, "certs", "tracing", "bench", "dev"])
        + pyproject["build-system"]["requires"]
    )
    assert {name_of(requirement) for requirement in required} <= read_pins().keys()


def test_torch_brings_no_cuda_and_the_generator_of_the_stubs_is_of_one_version() -> None:
    pins, pyproject = read_pins(), read_pyproject()
    assert not [name for name in pins if name.startswith(("nvidia-", "cuda-"))]
    pinned = f"grpcio-tools=={pins['grpcio-tools']}"
    assert pinned in pyproject["build-system"]["requires"]
    assert pinned in pyproject["project"]["optional-dependencies"]["dev"]


def test_the_changelog_has_a_dated_section_of_each_release_and_one_for_what_comes() -> None:
    sections = re.findall(r"(?m)^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert sections[0] == "Unreleased"
    releases = [re.fullmatch(r"(\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)", section) for section in sections[1:]]
    assert all(releases)
    newest, here = (tuple(map(int, version.split(".")[:3])) for version in (releases[0][1], VERSION))
    # The commit of a release has the release's version; later commits have the next version in development.
    assert newest < here if ".dev" in VERSION else newest == here


def test_every_place_names_the_version_of_what_stands_here() -> None:
    marked = "9.8.7.dev6"
    places = {path.relative_to(ROOT).as_posix(): text for path, text in changed(VERSION, marked)}
    assert places.keys() >= {"Dockerfile", "compose.yaml", "deploy/chart/Chart.yaml", "deploy/chart/values.yaml"}
    assert "version: 9.8.7-dev.6\nappVersion: 9.8.7.dev6\n" in places["deploy/chart/Chart.yaml"]
    images = [
        text for text in places.values() for text in re.findall(r"quire-[a-z-]+:(?:\$\{QUIRE_TAG:-)?([\w.]+)", text)
    ]
    assert set(images) == {marked}
