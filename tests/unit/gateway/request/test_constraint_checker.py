"""Constraints are compiled on trial: verdicts, bounds of time and memory, turns of tenants."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.request import constraint_checker as checking
from gateway.request.constraint_checker import ConstraintChecker, TrialProcess
from quire.common.v1.common_pb2 import Choice, Constraint
from quire.constraints.check_process import HEADER
from quire.rpc.errors import InvalidArgument, ResourceExhausted, Unavailable
from tests.support.processes import until_true
from tests.support.tokenizers import byte_level, write_model_directory

HOSTILE = {
    "nested quantifiers": Constraint(regex="((((a{1,100}){1,100}){1,100}){1,100}){1,100}b"),
    "a counted class": Constraint(regex="(.{1,5000}[a-z]){1,5000}x{5000}"),
    "an ambiguous regex": Constraint(regex="(a|a|aa|a?){0,2000}(.*a.{300}|.*b.{300}){20}"),
    "a cycle of references": Constraint(json_schema='{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
    "a cycle with siblings": Constraint(
        json_schema='{"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}], "type": "object"}}}'
    ),
    "depth of 10,000": Constraint(json_schema='{"items":' * 10_000 + "true" + "}" * 10_000),
    "brackets of 200,000": Constraint(json_schema="[" * 200_000),
    "references that double": Constraint(
        json_schema=json.dumps(
            {
                "$ref": "#/$defs/n0",
                "$defs": {f"n{n}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/n{n + 1}"}] * 2}] * 2} for n in range(40)}
                | {"n40": {"type": "integer"}},
            }
        )
    ),
    "a grammar of nothing": Constraint(lark="start: start"),
    "an ambiguous grammar": Constraint(lark='start: a a a a a\na: a a | "x" | a a a |'),
    "parentheses of a grammar": Constraint(lark="start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "more than a megabyte": Constraint(regex="a" * (1 << 20) + "b"),
}

SLOW = Constraint(
    json_schema=json.dumps(
        {"type": "object", "properties": {f"name_{index}": {"type": "string"} for index in range(8000)}}
    )
)
SMALL_AFTER_ALL = ("nested quantifiers", "a counted class", "an ambiguous regex", "an ambiguous grammar")


async def checkers(directory: Path) -> AsyncIterator[ConstraintChecker]:
    checker = ConstraintChecker(TrialProcess(write_model_directory(directory / "m", byte_level())))
    yield checker
    checker.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_checker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ConstraintChecker]:
    async for checker in checkers(tmp_path_factory.mktemp("shared")):
        yield checker


@pytest.fixture
async def checker(tmp_path: Path) -> AsyncIterator[ConstraintChecker]:
    """A checker for tests that look at its cached verdicts, or end its process."""
    async for checker in checkers(tmp_path):
        yield checker


async def test_what_can_be_enforced_passes_and_the_rest_is_refused_by_field(shared_checker) -> None:
    await shared_checker.check(Constraint(regex="[0-9]+"), "a")
    await shared_checker.check(Constraint(choice=Choice(texts=["yes", "no"])), "a")
    with pytest.raises(InvalidArgument, match="unclosed group") as refused:
        await shared_checker.check(Constraint(regex="(a"), "a")
    assert [each.field for each in refused.value.violations] == ["sampling.constraint.regex"]
    with pytest.raises(InvalidArgument, match="has no kind") as refused:
        await shared_checker.check(Constraint(), "a")
    assert [each.field for each in refused.value.violations] == ["sampling.constraint"]


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_constraint_is_refused_and_harms_no_other(shared_checker, name) -> None:
    hostile = asyncio.create_task(shared_checker.check(HOSTILE[name], "attacker"))
    await shared_checker.check(Constraint(regex="[a-z]{1,3}"), "other")
    try:
        await hostile
    except InvalidArgument as error:
        refusal = error
    else:
        # The library unfolds as little of it as these few tokens need.
        assert name in SMALL_AFTER_ALL
        return
    assert len(refusal.message) < 1000
    assert refusal.violations[0].field.startswith("sampling.constraint")
    await shared_checker.check(Constraint(regex="[a-z]{2,3}"), "other")


async def test_what_takes_too_long_is_ended(checker, monkeypatch) -> None:
    """The CPU time ends it: on a busy machine it gets little, and the wall clock would end it before."""
    patient = "from quire.constraints import check_process as each; each.WALL_SECONDS = 3600; each.main()"
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        return popen([command[0], "-c", patient, command[-1]], **options)

    monkeypatch.setattr(checking.subprocess, "Popen", start)
    with pytest.raises(InvalidArgument, match="processor time to compile"):
        await checker.check(SLOW, "a")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("os.kill(os.getpid(), 11)", "by SIGSEGV: recursion that is too deep for the stack"),
        ("os.abort()", "by SIGABRT: the library does not accept it"),
        ("(os.write(2, b'memory allocation of 9 bytes failed'), os.abort())", "takes more than 512 MiB to compile"),
        ("os.kill(os.getpid(), 27)", "takes more than 0.5 s of processor time"),
        ("os._exit(3)", "ends the process that compiles it with status 3"),
        ("[][0]", "cannot be compiled: IndexError: list index out of range"),
    ],
)
async def test_a_compilation_that_dies_is_refused_with_how_it_ended(checker, monkeypatch, what, message) -> None:
    dying = (
        f"import os; from quire.constraints import check_process as each; each.check = lambda *_: {what}; each.main()"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        checking.subprocess, "Popen", lambda command, **rest: popen([command[0], "-c", dying, command[-1]], **rest)
    )
    with pytest.raises(InvalidArgument) as refused:
        await checker.check(Constraint(regex="a"), "a")
    assert message in refused.value.message


async def test_kept_verdicts_are_bounded_and_the_tenant_with_most_loses_first(checker, monkeypatch) -> None:
    monkeypatch.setattr(checking, "MAX_KEPT", 5)
    await checker.check(Constraint(regex="quiet"), "quiet")
    for index in range(12):
        await checker.check(Constraint(regex=f"busy {index}"), "busy")
    assert {tenant: len(kept) for tenant, kept in checker._kept.items()} == {"quiet": 1, "busy": 4}


async def test_constraints_under_trial_when_the_process_dies_fail_as_unavailable(checker) -> None:
    await checker.check(Constraint(regex="a"), "a")
    os.kill(checker._trial._process.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(checker.check(Constraint(regex="b"), "a"))
    await until_true(lambda: bool(checker._trial._answers))
    pid = checker._trial._process.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="try again"):
        await waiting
    with pytest.raises(ProcessLookupError):  # nor is it left as a zombie
        os.kill(pid, 0)


def test_a_gateway_killed_with_an_answer_unread_ends_the_process_quietly(tmp_path) -> None:
    """Its trials that still run end with it, too."""
    model = write_model_directory(tmp_path / "m", byte_level())
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "quire.constraints.check_process", str(model)]
    process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.PIPE)
    theirs.close()
    content = Constraint(regex="a").SerializeToString()
    ours.sendall(HEADER.pack(len(content), 1) + content)
    assert ours.recv(1, socket.MSG_PEEK)
    ours.close()
    assert process.communicate(timeout=60) == (None, b"")
    assert process.returncode == 0


async def test_without_open_files_constraints_are_unavailable_until_there_are_some(checker, monkeypatch) -> None:
    def full() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", full)
        with pytest.raises(Unavailable, match="try again"):
            await checker.check(Constraint(regex="[ab]+"), "tenant")
    await checker.check(Constraint(regex="[ab]+"), "tenant")


@pytest.mark.parametrize("end", [signal.SIGALRM, signal.SIGKILL])
async def test_an_end_that_says_nothing_about_the_constraint_is_no_verdict(checker, end) -> None:
    """Its time is over on a machine that stood still, or it is killed for another's memory: it may be tried again."""
    await checker.check(Constraint(regex="a"), "a")

    def trials() -> list[int]:
        pid = checker._trial._process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    await until_true(lambda: not trials())
    waiting = asyncio.create_task(checker.check(SLOW, "a"))
    await until_true(lambda: bool(trials()))
    os.kill(trials()[0], end)
    with pytest.raises(Unavailable, match="try again") as refused:
        await waiting
    assert refused.value.reason == "CONSTRAINTS_UNAVAILABLE"
    assert len(checker._kept["a"]) == 1, "a verdict on it is kept"


async def test_a_tokenizer_that_cannot_be_read_refuses_every_constraint(tmp_path) -> None:
    directory = write_model_directory(tmp_path / "m", byte_level())
    content = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps({**content, "decoder": None}))
    checker = ConstraintChecker(TrialProcess(directory))
    with pytest.raises(InvalidArgument, match="cannot be enforced with the tokenizer of this model"):
        await checker.check(Constraint(regex="a"), "a")
    checker.close()


async def test_a_process_that_was_started_before_answers_the_first_constraint_and_is_replaced_once_it_ended(
    tmp_path,
) -> None:
    trial = TrialProcess(write_model_directory(tmp_path / "m", byte_level()))
    trial.start()
    first = trial._process
    checker = ConstraintChecker(trial, is_starting=True)
    await checker.wait_until_started()
    await checker.check(Constraint(regex="a"), "a")
    assert trial._process is first is not None
    first.kill()
    first.wait()
    await until_true(lambda: trial._writer is None or trial._reading is None)
    await checker.check(Constraint(regex="b"), "a")
    assert trial._process is not first
    checker.close()


async def test_a_process_that_cannot_be_started_before_is_started_by_the_first_constraint(
    tmp_path, monkeypatch
) -> None:
    trial = TrialProcess(write_model_directory(tmp_path / "m", byte_level()))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refused_process)
        trial.start()
        checker = ConstraintChecker(trial, is_starting=True)
        await checker.wait_until_started()
    await checker.check(Constraint(regex="a"), "a")
    checker.close()


def refused_process(*_: object, **__: object) -> None:
    raise OSError(errno.EAGAIN, "no more processes")


async def test_files_of_the_working_directory_do_not_stand_in_for_modules(tmp_path, monkeypatch) -> None:
    for name in ("resource.py", "quire.py"):
        (tmp_path / name).write_text("raise SystemExit('a file of the user')")
    monkeypatch.chdir(tmp_path)
    checker = ConstraintChecker(TrialProcess(write_model_directory(tmp_path / "m", byte_level())))
    await checker.check(Constraint(regex="a"), "a")
    checker.close()


class _Gate:
    """A trial that ends when the gate opens. Constraints are their names."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.begun: list[bytes] = []

    async def verdict(self, content: bytes) -> None:
        self.begun.append(content)
        await self.opened.wait()

    def close(self) -> None:
        self.opened.set()


@pytest.fixture
def gate(monkeypatch) -> _Gate:
    monkeypatch.setattr(checking, "MAX_RUNNING", 1)
    monkeypatch.setattr(checking, "MAX_WAITING", 3)
    monkeypatch.setattr(checking, "MAX_WAITING_OF_TENANT", 2)
    return _Gate()


async def begin_checks(checker: ConstraintChecker, *checks: tuple[str, str]) -> list[asyncio.Task[None]]:
    """Begins checks, each given by a tenant and a pattern, one after the other."""
    tasks: list[asyncio.Task[None]] = []
    for tenant, pattern in checks:
        tasks.append(asyncio.create_task(checker.check(Constraint(regex=pattern), tenant)))
        for _ in range(3):
            await asyncio.sleep(0)
    return tasks


async def test_tenants_take_turns(gate) -> None:
    checker = ConstraintChecker(gate)
    tasks = await begin_checks(checker, ("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"))
    gate.opened.set()
    await asyncio.gather(*tasks)
    assert gate.begun == [Constraint(regex=each).SerializeToString() for each in ("a1", "b1", "a2", "a3")]


async def test_too_many_waiting_constraints_are_refused_with_a_time_to_come_back(gate) -> None:
    checker = ConstraintChecker(gate)
    tasks = await begin_checks(checker, ("a", "1"), ("a", "2"), ("a", "3"))
    with pytest.raises(ResourceExhausted) as refused:
        await checker.check(Constraint(regex="4"), "a")
    assert refused.value.retry_after_ms
    tasks += await begin_checks(checker, ("b", "5"))
    with pytest.raises(ResourceExhausted):
        await checker.check(Constraint(regex="6"), "c")
    gate.opened.set()
    await asyncio.gather(*tasks)


async def test_a_verdict_is_kept_by_content(checker, monkeypatch) -> None:
    constraint = Constraint(regex="(a")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="unclosed group"):
            await checker.check(constraint, "a")
        # A known verdict needs no process.
        monkeypatch.setattr(checker, "_trial", None)
