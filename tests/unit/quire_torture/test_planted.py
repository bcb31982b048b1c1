"""Defects that are planted in a small server are found, told and shrunk."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire_cli.torture import main
from quire_torture.faults import parse_fault
from quire_torture.oracle import Verdict
from quire_torture.report import script
from quire_torture.run import Plan, Report, Torture
from quire_torture.traffic import Call, Limits
from tests.support.openai_stub import Defects, Stub
from tests.support.processes import until_true

MAX_REQUESTS = 2_000


def make_plan(url: str, *faults: str, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "url": url,
        "model": None,
        "seed": 1,
        "num_requests": 150,
        "num_questions": 20,
        "num_streams": 8,
        "faults": tuple(map(parse_fault, faults)),
        "times": 2,
        "rate": 1e6,
        "max_s": 30.0,
        "hung_s": 1.0,
        "num_retries": 2,
        "limits": Limits(max_tokens=10, long_words=20),
    }
    return Plan(**values | changes)


@contextlib.asynccontextmanager
async def torturing(stub: Stub, *faults: str, **changes: Any) -> AsyncIterator[Torture]:
    async with stub.listening(), Torture.started(make_plan(stub.url, *faults, **changes), lambda _: None) as torture:
        yield torture


def verdicts(report: Report) -> set[Verdict]:
    return {each.finding.verdict for each in report.wrongs}


async def test_server_without_defects_has_no_findings() -> None:
    async with torturing(Stub()) as torture:
        report = await torture.run(torture.story(with_faults=False))
        assert report.num_equal + report.num_left == report.num_calls == 150
        assert report.num_left > 0
        assert not (await torture.run(torture.each_question(), num_streams=1)).wrongs
        assert torture.unsupported.keys() == {"a JSON schema", "tools"}


@pytest.mark.parametrize(
    ("defects", "verdict"),
    [
        (Defects(drops_every=997), Verdict.LOST),
        (Defects(mixes_at=120), Verdict.CONTAMINATED),
        pytest.param(Defects(hangs_at=100), Verdict.HUNG, marks=pytest.mark.extended),
        pytest.param(Defects(cuts_at=100), Verdict.LOST, marks=pytest.mark.extended),
        pytest.param(Defects(drifts_after=120), Verdict.DRIFTED, marks=pytest.mark.extended),
    ],
)
async def test_planted_defects_are_found(defects: Defects, verdict: Verdict) -> None:
    stub = Stub(defects)
    async with torturing(stub) as torture:
        report = await torture.run(torture.story(with_faults=False))
        assert verdict in verdicts(report)
        assert verdicts(report) <= {verdict, Verdict.CHANGED, Verdict.MALFORMED}
    assert stub.num_answers <= MAX_REQUESTS


async def test_a_server_that_never_answers_again_ends_the_run() -> None:
    async with torturing(Stub(Defects(dies_at=60)), max_s=1.5, hung_s=0.5) as torture:
        report = await asyncio.wait_for(torture.run(torture.story(with_faults=False)), 20)
        assert report.count(Verdict.HUNG) == 8
        assert report.seconds < 10


@pytest.mark.extended
async def test_story_of_a_defect_shrinks_to_a_script() -> None:
    stub = Stub(Defects(drops_every=97))
    async with torturing(stub) as torture:
        report = await torture.run(torture.story(with_faults=False))
        found = await torture.shrunk(report, 10.0)
        assert found is not None
        steps, wrongs = found
        assert len([each for each in steps if isinstance(each, Call)]) < report.num_calls // 4
        text = script(torture.plan, steps, wrongs)
        assert text.count(f"{stub.url}/v1/") == len(steps)
        assert "lost" in text


@pytest.mark.extended
async def test_faults_of_the_link_and_of_clients_happen_and_are_proven() -> None:
    async with torturing(Stub(), "cut", "leave", num_requests=300) as torture:
        report = await torture.run(torture.story(with_faults=True))
        assert not report.missed
        assert sorted(each.text for each in report.struck) == ["cut", "cut", "leave", "leave"]
        assert all(each.proof and each.served_s is not None for each in report.struck)
        assert verdicts(report) <= {Verdict.ERROR}


async def test_command_tells_what_it_found_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, repeated = tmp_path / "out.json", tmp_path / "again.sh"
    flags = ["--requests=60", "--questions=13", "--max-tokens=8", "--fault=leave", "--times=1", f"--out={out}"]
    async with Stub().listening() as stub:
        assert await asyncio.to_thread(main, [stub.url, *flags]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert runs["with faults"]["faults"]["leave"]["times"] == 1
    async with Stub(Defects(drops_every=97)).listening() as stub:
        assert await asyncio.to_thread(main, [stub.url, *flags, "--shrink=5", f"--script={repeated}"]) == 1
    assert "lost: call" in capsys.readouterr().out
    assert "curl" in repeated.read_text()


@pytest.mark.extended
async def test_ctrl_c_shows_what_was_found_so_far() -> None:
    async with Stub(Defects(drops_every=97)).listening() as stub:
        command = [sys.executable, "-m", "quire_cli.main", "torture", stub.url, "--requests=1000000", "--questions=13"]
        process = await asyncio.create_subprocess_exec(*command, "--max-tokens=8", stdout=asyncio.subprocess.PIPE)
        await until_true(lambda: stub.num_answers > 300)
        process.send_signal(signal.SIGINT)
        output, _ = await process.communicate()
    assert process.returncode == 130
    assert "without faults: lost: call" in output.decode()
