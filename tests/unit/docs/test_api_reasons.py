"""docs/api.md lists exactly the reasons that the services give; docs/operations.md explains some of them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from quire.rpc import errors
from tests.support.documents import explained_names

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("quire", "gateway", "scheduler_svc", "worker_svc", "quire_cli")
REASON = re.compile(r"[A-Z]+(_[A-Z]+)*")
GIVEN = re.compile(r"\bdefault_reason\b|\breason\s*=|\brequest_failure\b|\bRequestFailure\b")


def test_docs_and_code_name_the_same_reasons() -> None:
    assert documented_reasons() == given_reasons() - default_reasons()


def test_every_reason_has_a_status() -> None:
    statuses = documented_statuses()
    assert statuses.keys() == documented_reasons()
    assert all(statuses.values())


def test_every_reason_that_operations_explain_is_one_that_is_given() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = text.partition("## When something is wrong")[2].partition("| seen |")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert rows
    assert {reason for row in rows for reason in re.findall(r"`([A-Z_]+)`", row)} <= documented_reasons()


def documented_statuses() -> dict[str, set[str]]:
    """The statuses of each reason in docs/api_head.md."""
    head = (ROOT / "docs" / "api_head.md").read_text(encoding="utf-8")
    section = head.partition("### Reasons\n")[2].partition("\n## ")[0].replace("\n  ", " ")
    entries = (line[2:].partition(" (") for line in section.splitlines() if line.startswith("- `"))
    return {
        reason: set(re.findall(r"`([A-Z_]+)`", statuses.partition("):")[0]))
        for names, _, statuses in entries
        for reason in re.findall(r"`(\w+)`", names)
    }


def documented_reasons() -> set[str]:
    head = (ROOT / "docs" / "api_head.md").read_text(encoding="utf-8")
    return explained_names(head, "Reasons")


def given_reasons() -> set[str]:
    return {
        reason
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if not file.stem.endswith(("_pb2", "_pb2_grpc"))
        for reason in reasons_in(file.read_text(encoding="utf-8"))
    }


def reasons_in(source: str) -> Iterator[str]:
    """Texts given as `reason=...`, default reasons of error classes, and texts that make a RequestFailure, an event."""
    # Parsing all files takes a second.
    for node in ast.walk(ast.parse(source)) if GIVEN.search(source) else ():
        if isinstance(node, ast.Assign) and "default_reason" in (getattr(each, "id", "") for each in node.targets):
            yield from filter(REASON.fullmatch, [text_of(node.value)])
        if isinstance(node, ast.Call):
            given: list[ast.expr] = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in {"request_failure", "RequestFailure"}:
                given += node.args
            yield from (text for text in map(text_of, given) if REASON.fullmatch(text))


def text_of(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def default_reasons() -> set[str]:
    return {cls.default_reason for cls in errors.QuireError.__subclasses__()}
