"""Requests and refusals of `quire bench`, without a server."""

import json
import math
import re
import shlex
import sys
from pathlib import Path

import pytest

from quire.load import LoadRequest, Slo, make_report
from quire.runtime.settings import load_settings
from quire_cli.bench.command import shown_command
from quire_cli.bench.flags import BenchFlags
from quire_cli.bench.plan import Load, PlannedRun, read_file
from quire_cli.bench.table import make_errors, make_table
from quire_cli.main import main
from tests.unit.quire.load.test_report import make_record


def flags_of(*argv: str) -> BenchFlags:
    return load_settings(BenchFlags, argv, {}, program="quire bench")


def make_load(*argv: str) -> Load:
    flags = flags_of(*argv)
    return Load(flags, read_file(flags), vocab_size=1000, max_model_len=512)


def plan(*argv: str) -> list[tuple[PlannedRun, list[LoadRequest]]]:
    return [(run, list(run.requests)) for run in make_load(*argv).runs()]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The line with which a command is refused."""
    assert main(["bench", *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


def test_each_rate_is_a_run_with_the_same_lengths_and_other_tokens() -> None:
    slow, fast, at_once = plan("--request-rate=2,8,inf", "--num-requests=20", "--seed=3")
    assert [run.label for run, _ in (slow, fast, at_once)] == ["2/s", "8/s", "inf"]
    lengths = [[(len(each.token_ids), each.output_len) for each in load] for _, load in (slow, fast, at_once)]
    assert lengths[0] == lengths[1] == lengths[2]
    for a, b in zip(slow[1], fast[1], strict=True):
        assert not (a.token_ids == b.token_ids).any()
    assert slow[1][-1].arrival_s == pytest.approx((fast[1][-1].arrival_s or 0) * 4)
    assert {request.arrival_s for request in at_once[1]} == {0.0}


def test_limits_of_concurrency_are_runs_too_and_a_duration_is_as_many_requests_as_arrive_in_it() -> None:
    runs = [run for run, _ in plan("--max-concurrency=1,8", "--num-requests=3")]
    assert [(run.label, run.max_concurrency, run.is_closed) for run in runs] == [
        ("inf, 1 at once", 1, True),
        ("inf, 8 at once", 8, True),
    ]
    ((run, load),) = plan("--max-concurrency=4", "--request-rate=20", "--duration=5")
    assert (run.is_closed, run.num_requests) == (False, None)
    assert 50 < len(load) < 200
    assert all((request.arrival_s or 0) < 5 for request in load)


def test_the_dataset_is_that_of_the_flags() -> None:
    ((_, load),) = plan("--dataset=shared-prefix", "--prefix-len=40", "--num-prefixes=2", "--prompt-len=8")
    assert {len(request.token_ids) for request in load} == {48}
    assert {request.group for request in load} == {0, 1}
    ((_, load),) = plan("--dataset=fixed", "--prompt-len=8", "--output-len=9", "--n=3", "--num-requests=2")
    assert [(len(each.token_ids), each.output_len, each.n) for each in load] == [(8, 9, 3)] * 2
    ((_, load),) = plan("--dataset=chat", "--mean-turns=4", "--request-rate=1", "--num-requests=50")
    assert all((request.arrival_s is None) == (request.turn > 0) for request in load)
    assert any(request.turn for request in load)


def test_the_warm_up_is_like_the_first_requests_with_tokens_of_its_own() -> None:
    load = make_load("--dataset=chat")
    warm_up = load.warm_up(5)
    first = [next(run.requests) for run in load.runs()]
    assert len(warm_up) == 5
    assert {(request.turn, request.arrival_s) for request in warm_up} == {(0, None)}
    assert len(warm_up[0].token_ids) == len(first[0].token_ids)
    assert not (warm_up[0].token_ids == first[0].token_ids).any()
    assert {(each.n, each.beam_width) for each in make_load("--n=2", "--beam-width=4").warm_up(3)} == {(2, 4)}


def test_a_file_with_times_is_a_trace_unless_a_rate_is_given(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "arrival_s": time}) + "\n" for time in (1, 2, 4)))
    ((run, load),) = plan(f"--dataset={path}")
    assert (run.label, run.num_requests) == ("trace", 3)
    assert [request.arrival_s for request in load] == [0.0, 1.0, 3.0]
    ((_, load),) = plan(f"--dataset={path}", "--request-rate=inf", "--num-requests=2")
    assert [request.arrival_s for request in load] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dataset=nonsense"], '"nonsense" is not known; expected sharegpt, alpaca, fixed, shared-prefix, chat'),
        (["--dataset=missing.jsonl"], "cannot read missing.jsonl: No such file"),
        (["--request-rate=-1"], "-1 is no rate; expected numbers above 0, inf or trace"),
        (["--request-rate=1e-9"], "1e-9 is not in [0.0001, 1,000,000]; inf sends all at once"),
        (["--request-rate="], "it is empty; expected numbers above 0"),
        (["--request-rate=1000,inf", "--duration=86400", "--max-concurrency=2"], "are 86,400,000 requests; a run has"),
        (["--request-rate=trace"], "trace takes a file with arrival_s as --dataset"),
        (["--num-requests=5", "--duration=3"], "--num-requests and --duration are both given"),
        (["--duration=3"], "--duration with a rate of inf needs --max-concurrency"),
        (["--burstiness=0", "--request-rate=1"], "--burstiness is 0; it must be above 0"),
        (["--burstiness=2", "--request-rate=inf"], "--burstiness shapes arrivals at a rate"),
        (["--prompt-len=3"], "--prompt-len is for fixed, shared-prefix; --dataset is sharegpt"),
        (["--mean-turns=3"], "--mean-turns is for chat"),
        (["--n=4", "--beam-width=2"], "--n is 4; it must be at most --beam-width, 2"),
        (["--n=2", "--dataset=chat"], "--n is 2; it must be 1 for chat"),
        (["--n=2", "--temperature=0"], "all samples would be the same"),
        (["--top-p=0.9"], "--top-p changes nothing where --temperature is 0"),
        (["--endpoint=chat"], "--endpoint is for --backend openai; it is grpc"),
        (["--slo=ttft=5"], '"ttft=5" is no limit; expected NAME=NUMBERms or NAME=NUMBERs'),
        (["--out=/proc/nothing/a.json"], "cannot write /proc/nothing/a.json"),
        (["--backend=openai", "--url=localhost:8000"], "expected http://HOST:PORT or https://HOST:PORT"),
        (["--backend=openai", "--api-key=clé"], "--api-key has characters that a header cannot have"),
        (["--url=http://localhost:8000"], "is for --backend openai; gRPC takes HOST:PORT"),
        (["--backend=openai", "--tls"], "the flags of TLS are for --backend grpc"),
        (["--request-rate=2,fast"], "fast is no rate"),
        (["--output-len=3"], "--output-len is for fixed, shared-prefix and files; --dataset is sharegpt"),
        (["--plot=a.pdf"], "expected a file that ends in .svg or .png"),
        (["--backend=openai", "--url=http://localhost:99999"], "expected http://HOST:PORT or https://HOST:PORT"),
        (["plot"], "plot takes one or several results"),
        (["plot", "missing.json"], "cannot read missing.json: No such file"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert message in refused(capsys, *argv)


def test_files_that_are_something_else_and_pictures_without_matplotlib_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("Dear diary\n")
    assert "line 1, is no JSON" in refused(capsys, f"--dataset={path}")
    assert "is no JSON, so no result of quire bench" in refused(capsys, "plot", str(path))
    path.write_text('{"prompt": "a"}\n')
    assert "--num-requests is 2; " in refused(capsys, f"--dataset={path}", "--num-requests=2")
    assert f"{path} has none" in refused(capsys, f"--dataset={path}", "--request-rate=trace")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib is not installed; install quire-llm[bench]" in refused(capsys, "--plot=a.svg")


def test_the_table_has_a_column_for_each_run_and_leaves_out_what_nobody_knows() -> None:
    records = [make_record(prompt_tokens=1500), make_record(1, end_s=3.0, error="UNAVAILABLE")]
    reports = [make_report(records, request_rate=rate, slo=Slo(ttft=2.0)) for rate in (2.0, math.inf)]
    lines = [re.split(" {2,}", line.strip()) for line in make_table(["2/s", "inf"], reports).splitlines()]
    rows = {name: cells for name, *cells in lines}
    assert rows["request rate"] == ["2/s", "inf"]
    assert rows["failed"] == ["1", "1"]
    assert rows["prompt tokens"] == ["1,500", "1,500"]
    assert rows["TTFT mean, ms"] == ["1,000.0", "1,000.0"]
    assert rows["goodput/s (ttft=2000ms)"] == ["0.33", "0.33"]
    assert "preemptions" not in rows
    assert make_errors(reports, {"UNAVAILABLE": "gone"}) == ["2 failed, UNAVAILABLE: gone"]


def test_flags_and_the_command_in_a_result_have_no_key() -> None:
    given = flags_of("--api-key=secret", "--request-rate=2,inf", "--url=a:1", "--slo=ttft=1s").given()
    assert given == {"request_rate": [2.0, "inf"], "url": "a:1", "slo": "ttft=1000ms"}
    assert json.dumps(given)
    for key in (["--api-key", "secret"], ["--api-key=secret"]):
        hidden = [part.replace("secret", "...") for part in key]
        shown = shown_command(["--seed=1", *key, "--n", "2"])
        assert shown == shlex.join(["quire", "bench", "--seed=1", *hidden, "--n", "2"])
