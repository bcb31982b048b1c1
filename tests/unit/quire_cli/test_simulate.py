"""`quire simulate`: same seed, same file; sweeps find the limit; bad input is refused in one line."""

import itertools
import json
from pathlib import Path

import pytest

from quire.load import LoadResult
from quire_cli import simulate
from quire_cli.bench.plan import PlannedRun
from quire_cli.main import main
from simulator.replica import Outcome, Replica
from tests.support.step_traces import write_trace

SMALL = ("simulate", "--hardware", "a100-40gb", "--model", "opt-125m", "--dataset", "alpaca", "--num-requests", "8")


def run(*arguments: str) -> int:
    return main([*SMALL, *arguments])


def test_the_same_seed_gives_the_same_file_to_the_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    flags = ("--request-rate", "2,20", "--num-gpu-blocks", "40", "--slo", "ttft=50ms")
    assert run(*flags, "--seed", "5", "--out", str(first)) == 0
    table = capsys.readouterr().out
    assert run(*flags, "--seed", "5", "--out", str(again)) == 0
    assert capsys.readouterr().out == table
    assert first.read_bytes() == again.read_bytes()
    run(*flags, "--seed", "6", "--out", str(other))
    assert first.read_bytes() != other.read_bytes()


def test_the_file_is_what_quire_bench_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "a.json", tmp_path / "a.svg"
    assert run("--request-rate", "4,8", "--out", str(path), "--plot", str(picture)) == 0
    result = LoadResult.read(path)
    assert result.source == "simulate"
    assert result.name == "a100-40gb, opt-125m, simulated"
    assert result.facts["hardware"]["bandwidth"] == 1555e9
    assert [run.report.request_rate for run in result.runs] == [4.0, 8.0]
    assert all(run.report.completed == 8 for run in result.runs)
    assert all((run.report.counters or {})["kv_tokens_share"] > 0 for run in result.runs)
    assert "<svg" in picture.read_text()
    assert "limited by demand 100%" in capsys.readouterr().out
    assert main(["bench", "plot", str(path), "--plot", str(tmp_path / "b.svg")]) == 0


def test_a_trace_is_all_that_a_simulation_of_its_worker_needs_and_a_fit_that_explains_little_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    flags = ("--dataset", "fixed", "--prompt-len", "20", "--output-len", "10", "--num-requests", "10")
    for noise, lines in ((0.05, 0), (0.9, 1)):
        trace = write_trace(tmp_path / "steps.json", 400, noise=noise)
        assert main(["simulate", "--cost-trace", str(trace), *flags, "--request-rate", "5", "--out", str(path)]) == 0
        told = capsys.readouterr()
        assert "64 blocks of 16 tokens" in told.out
        assert "of the variance explained" in told.out
        assert told.err.count("\n") == lines
        assert ("trace the worker again" in told.err) == bool(lines)
        facts = json.loads(path.read_text())["facts"]
        assert facts["fit"]["residual"]["num_steps"] > 100
        assert facts["config"]["max_num_seqs"] == 16


@pytest.mark.long
def test_a_sweep_finds_the_highest_rate_of_each_setting_and_what_limits_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "a.json", tmp_path / "a.svg"
    flags = ("--hardware", "a100-40gb", "--dataset", "fixed", "--prompt-len", "100", "--output-len", "5")
    slo, sweep = ("--slo", "ttft=500ms,tpot=40ms"), ("--sweep", "num_gpu_blocks=12:2%,max_num_seqs=1:64")
    files = ("--out", str(path), "--plot", str(picture), "--sweep-duration", "2")
    assert main(["simulate", *flags, *slo, *sweep, *files]) == 0
    points = json.loads(path.read_text())["facts"]["sweep"]
    rates = {tuple(point["settings"].values()): point["request_rate"] for point in points}
    limits = {tuple(point["settings"].values()): point["limited_by"] for point in points}
    assert limits["2%", "1"] == "rows"
    assert limits["12", "64"] == "blocks"
    assert rates["12", "64"] < rates["2%", "64"]
    assert rates["2%", "1"] < rates["2%", "64"]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(points) == 5
    assert "limits it" in picture.read_text()


def test_what_ended_before_an_interruption_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    whole = simulate._run
    interrupt_at(monkeypatch, 2)
    assert run("--request-rate", "4,8", "--out", str(path)) == 130
    told = capsys.readouterr()
    assert "TTFT mean" in told.out
    assert told.err == "quire simulate: interrupted: the report has the runs that had ended, 4/s\n"
    result = LoadResult.read(path)
    assert (len(result.runs), result.facts["interrupted"]) == (1, True)
    monkeypatch.setattr(simulate, "_run", whole)
    interrupt_at(monkeypatch, 1)
    assert run("--request-rate", "4,8") == 130
    assert capsys.readouterr() == ("", "quire simulate: interrupted: no run has ended\n")


def test_settings_of_a_sweep_that_are_done_before_an_interruption_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    # The first setting misses the SLO at each of the five rates.
    interrupt_at(monkeypatch, 6)
    flags = ("--hardware", "a100-40gb", "--dataset", "fixed", "--output-len", "2", "--sweep-duration", "160")
    sweep = ("--slo", "ttft=1ms", "--sweep", "policy=fcfs:fair")
    assert main(["simulate", *flags, *sweep, "--out", str(path)]) == 130
    assert capsys.readouterr().err == "quire simulate: interrupted: 1 of 2 settings are done\n"
    points = json.loads(path.read_text())["facts"]["sweep"]
    assert [point["settings"] for point in points] == [{"policy": "fcfs"}]


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ctrl-C in the run of this number."""
    numbers, whole = itertools.count(1), simulate._run

    def run(replica: Replica, planned: PlannedRun, settings: str = "") -> Outcome:
        if next(numbers) == number:
            raise KeyboardInterrupt
        return whole(replica, planned, settings)

    monkeypatch.setattr(simulate, "_run", run)


def test_a_file_that_cannot_be_simulated_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, 1)
    path = tmp_path / "load.jsonl"
    good = '{"prompt": [1, 2], "output_len": 3}\n'
    for bad, message in (('{"prompt": [1]}', "request 2 leaves its end to the model"), ('{"prompt": "a"}', "a text")):
        path.write_text(good + bad)
        assert main(["simulate", "--hardware", "h100", "--dataset", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_a_disk_that_is_full_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--request-rate", "4", "--out", "/dev/full") == 1
    told = capsys.readouterr()
    assert "TTFT mean" in told.out
    assert told.err == "quire simulate: error: cannot write /dev/full: No space left on device\n"


def test_what_nothing_keeps_and_what_never_fits_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--hardware", "a100-40gb", "--dataset", "fixed", "--output-len", "5", "--sweep-duration", "5")
    assert main(["simulate", *flags, "--slo", "ttft=1ms", "--sweep", "policy=fcfs"]) == 1
    assert "none, limited by compute" in capsys.readouterr().out
    assert run("--num-gpu-blocks", "6", "--n", "8") == 1
    assert "8 failed, NEVER_FITS" in capsys.readouterr().out


REFUSALS = [
    ((), "give the device by --hardware, for example a100-40gb, or by --cost-trace; one of both"),
    (("--hardware", "a100"), '"a100" is not known; there are a100-40gb'),
    (("--hardware", "h100-x2"), "no model goes with h100-x2"),
    (("--hardware", "h100-x3", "--model", "opt-13b"), "3 devices cannot share opt-13b: they must divide its 40"),
    (("--hardware", "h100", "--num-gpu-blocks", "99999999"), "has 99,999,999 blocks; a scheduler takes at most"),
    (("--hardware", "a100-40gb", "--model", "opt-175b"), "opt-175b has 349.2 GB of weights"),
    (("--hardware", "h100", "--model", "opt"), '"opt" is not known; there are opt-125m'),
    (("--hardware", "h100", "--out", "docs"), "cannot write docs: it is a directory"),
    (("--hardware", "h100", "--dataset", "wiki"), '"wiki" is not known'),
    (("--hardware", "h100", "--num-gpu-blocks", "many"), "expected a whole number of blocks"),
    (("--hardware", "h100", "--num-gpu-blocks", "0"), "expected at least 1 block"),
    (
        ("--hardware", "h100", "--max-num-batched-tokens", "8", "--max-num-seqs", "9"),
        "must be at least max_num_seqs (9)",
    ),
    (("--hardware", "h100", "--sweep", "policy"), "within --slo, which is not given"),
    (
        ("--hardware", "h100", "--slo", "ttft=1s", "--sweep", "policy", "--duration", "9", "--request-rate", "1"),
        "looks for rates itself",
    ),
    (("--hardware", "h100", "--slo", "ttft=1s", "--sweep", "policy=lifo"), '--policy: "lifo" is not valid'),
    (("--hardware", "h100", "--slo", "ttft=1s", "--sweep", "speed"), '"speed" cannot be swept'),
    (("--hardware", "h100", "--cost-trace", "x.json"), "one of both"),
    (("--cost-trace", "missing.json"), "cannot read missing.json: No such file or directory"),
    (("--cost-trace", "pyproject.toml"), "pyproject.toml is no trace of steps"),
    (("--cost-trace", "x.json", "--efficiency", "0.5"), "--efficiency is for --hardware"),
    (("--hardware", "a100-40gb", "--max-model-len", "4096"), "--max-model-len is 4,096; the model takes at most 2,048"),
    (("--hardware", "h100", "--model-config", "docs"), "--model-config: docs has no config.json"),
    (("--hardware", "h100", "--out", "/proc/a.json"), "cannot write /proc/a.json: "),
    (("--hardware", "h100", "--replicas", "2", "--prefill-replicas", "2"), "is 2 of --replicas 2; it must leave one"),
    (("--cost-trace", "x.json", "--replicas", "2", "--prefill-replicas", "1"), "--prefill-replicas is for --hardware"),
    (("--hardware", "h100", "--transfer-bandwidth", "0"), "--transfer-bandwidth is 0"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS, ids=[" ".join(arguments) for arguments, _ in REFUSALS])
def test_bad_input_is_refused_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("quire simulate: error: ")
    assert error.count("\n") == 1


def test_drafts_are_simulated_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, drafts = tmp_path / "plain.json", tmp_path / "drafts.json"
    assert run("--request-rate", "4", "--out", str(plain)) == 0
    assert "drafts right" not in capsys.readouterr().out
    assert run("--request-rate", "4", "--max-drafts", "7", "--acceptance", "0.8", "--out", str(drafts)) == 0
    assert "drafts right" in capsys.readouterr().out
    before, after = (LoadResult.read(path).runs[0].report for path in (plain, drafts))
    assert (after.counters or {})["accepted_draft_tokens"] > 0 == (before.counters or {})["draft_tokens"]
    assert before.tpot is not None
    assert after.tpot is not None
    assert after.tpot.p50 < before.tpot.p50


def test_requests_move_between_replicas_for_prefill_and_decode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    long = ("--dataset", "fixed", "--prompt-len", "500", "--output-len", "40", "--request-rate", "20")
    pauses: list[float] = []
    for bandwidth in ("1GB", "10MB"):
        flags = ("--replicas", "3", "--prefill-replicas", "1", "--transfer-bandwidth", bandwidth, "--out", str(path))
        assert run(*long, *flags) == 0
        told = capsys.readouterr().out
        assert "3 such replicas: 1 for prefill, the others for decode" in told
        assert "pause of a move, p99, ms" in told
        result = LoadResult.read(path)
        counters = result.runs[0].report.counters or {}
        assert result.facts["fleet"]["num_prefill"] == 1
        assert 0 < counters["moves"] <= 8
        pauses.append(counters["move_pause_p99_ms"])
    assert 5 < pauses[0] < pauses[1]
    assert run(*long, "--replicas", "3") == 0
    told = capsys.readouterr().out
    assert "3 such replicas\n" in told
