"""Documents name only things that exist: flags in a command, files and folders, headings in their document, tests, and
parts of the core."""

import ast
import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterator
from fnmatch import translate
from functools import cache
from pathlib import Path

import pytest

import quire_cli
from gateway.settings import GatewaySettings
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("docs", "examples", "deploy")
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(document for folder in FOLDERS for document in (ROOT / folder).rglob("*.md")),
]
SERVICES = (GatewaySettings, SchedulerSettings, WorkerSettings)
# Modules that add flags by hand.
SCRIPTS = ("bench", "tools", "examples", "assets", "tests/sim")
# Flags of other programs: docker, kubectl, helm, systemctl, pip, chrt, vLLM, Optimum; protoc, up to an underscore, and
# buf.
FOREIGN_FLAGS = {
    *("--build", "--build-arg", "--from-file", "--namespace", "--now", "--profile", "--scale", "--set", "--tag"),
    *("--jinja", "--port", "--enable-auto-tool-choice", "--enforce-eager", "--task", "--weight-format"),
    *("--delete-emptydir-data", "--force", "--from", "--grace-period", "--ignore-daemonsets", "--image", "--push"),
    *("--offline", "--rm"),
    *("--cpp", "--dart", "--go", "--go-grpc", "--grpc", "--java", "--kotlin", "--php", "--plugin", "--ruby"),
    *(
        "--exclude-path",
        "--target",
        "--values",
        "--extra-index-url",
        "--no-deps",
        "--fifo",
        "--no-enable-prefix-caching",
    ),
}
# Files that documents mention as absent.
ABSENT = {"setup.py", "build/images"}

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
TEST = re.compile(r"def (test_\w+)")
PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)*/?")
# Files of a model, of results or of a user have other endings.
OUR_ENDINGS = (".py", ".cpp", ".h", ".proto", ".md", ".yaml", ".toml", ".sh")
HIDDEN = {"build", "dist", "node_modules", "__pycache__"}


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    return {"--help"} | set(flags_of_settings()) | set(flags_of_scripts())


@pytest.fixture(scope="module")
def files() -> set[str]:
    """All files and folders of the repository, folders without their slash, and the ends of their paths."""
    parts = [path.relative_to(ROOT).parts for path in walk(ROOT)]
    return {"/".join(each[start:]) for each in parts for start in range(len(each))}


def test_every_flag_is_one_of_a_command(known_flags: set[str]) -> None:
    known = known_flags | FOREIGN_FLAGS
    unknown = {document: set(FLAG.findall(document.read_text(encoding="utf-8"))) - known for document in DOCUMENTS}
    assert not {document: flags for document, flags in unknown.items() if flags}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    assert not [(document, link) for document in DOCUMENTS for link in links_in(document) if not leads(document, link)]


def test_every_path_is_in_the_repository(files: set[str]) -> None:
    missing = [
        (document, path)
        for document in DOCUMENTS
        for path in paths_in(document)
        if not is_there(path, document, files) and path not in ABSENT
    ]
    assert not missing


def test_every_test_and_every_member_of_a_class_of_the_core_that_a_document_names_is_there() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    tests = {path.stem for path in sources}.union(*(TEST.findall(source) for source in sources.values()))
    core = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "scheduler_svc" / "core").rglob("*.py"))
    for document in (ROOT / "docs").rglob("*.md"):
        named = CODE.findall(document.read_text(encoding="utf-8"))
        assert not {name for name in named if re.fullmatch(r"test_\w+", name)} - tests, document
        if document.name not in ("reading.md", "core_seams.md"):
            continue
        for owner, _, member in (name.partition(".") for name in named if re.fullmatch(r"[A-Z]\w+\.\w+", name)):
            assert re.search(rf"class {owner}\b", core), (document, owner)
            assert re.search(rf"def {member}\b|\b{member}\b.*[:=]", core), (document, owner, member)


def links_in(document: Path) -> Iterator[str]:
    """The links to other documents and to headings."""
    return (link for link in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in link)


def leads(document: Path, link: str) -> bool:
    name, _, heading = link.partition("#")
    target = document.parent / name if name else document
    return target.exists() and (not heading or heading in headings(target))


def flags_of_settings() -> Iterator[str]:
    """Flags of the services and of every command of `quire`."""
    modules = [
        importlib.import_module(module.name) for module in pkgutil.walk_packages(quire_cli.__path__, "quire_cli.")
    ]
    classes = {*SERVICES, *(value for module in modules for value in vars(module).values() if isinstance(value, type))}
    for cls in filter(dataclasses.is_dataclass, classes):
        for field in dataclasses.fields(cls):
            if (option := field.metadata.get("quire.setting")) is not None:
                flag = option.get("flag") or "--" + field.name.replace("_", "-")
                yield flag
                if field.type in (bool, "bool"):
                    yield flag.replace("--", "--no-", 1)


def flags_of_scripts() -> Iterator[str]:
    for file in (file for folder in SCRIPTS for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("add_argument", "addoption"):
                yield from (
                    each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
                )


def walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in HIDDEN or (path.name.startswith(".") and path.is_dir()):
            continue
        yield path
        if path.is_dir():
            yield from walk(path)


def paths_in(document: Path) -> Iterator[str]:
    """Code that looks like a file of ours, or like a folder or file below one of our folders."""
    for text in CODE.findall(document.read_text(encoding="utf-8")):
        if PATH.fullmatch(text) and (text.endswith(OUR_ENDINGS) or is_below_ours(text)):
            yield text


def is_below_ours(text: str) -> bool:
    first, slash, _ = text.partition("/")
    return bool(slash) and (ROOT / first).is_dir()


def is_there(path: str, document: Path, files: set[str]) -> bool:
    """Whether a path exists from the root, from the document's folder, or as the end of a path: `core/pins.py`."""
    name = path.rstrip("/")
    if "*" in name:
        matches = re.compile(translate(name)).match
        return any(matches(file) for file in files)
    return (document.parent / name).exists() or name in files


@cache
def headings(document: Path) -> set[str]:
    """The headings, and other named places, as links name them."""
    text = document.read_text(encoding="utf-8")
    lines = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))
