"""What the measurement of the GPU makes of errors and interruptions, and the truths that its figures rest on."""

import asyncio
import json
import math
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_serving
from bench.gpu_checks import Check
from bench.gpu_figures import Figure
from bench.gpu_findings import Findings
from bench.gpu_groups import Collector, DeviceLostError
from bench.gpu_model import config_of, make_model, step_bytes
from bench.gpu_problems import Heads, expected_attention, make_problem
from bench.gpu_steps import NUM_STEPS, DecodeRun
from bench.step_trace_busy import busy_share
from kernels import ops
from kernels.reference import ScoreRule
from quire_cli.supervisor import ServeSettings
from tests.support.graph_recorder import CallingRecorder

CHECK = Check("rms_norm", "float16", 1e-4, 2e-3)
FIGURE = Figure("decode", "GB/s", 3000.0, 4000.0, 12.5, 0.85)


def make_arguments(*flags: str) -> Namespace:
    parser = ArgumentParser()
    gpu.add_arguments(parser)
    return parser.parse_args(list(flags))


def test_a_run_of_some_groups_leaves_the_file_of_the_whole_one() -> None:
    assert gpu._path_of_results(make_arguments()) == gpu.RESULTS
    assert gpu._path_of_results(make_arguments("--only", "decode")) is None
    assert gpu._path_of_results(make_arguments("--check-only", "--out", "some.json")) is None


def test_another_run_keeps_the_seed_of_what_it_goes_on_with(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    Findings(7).write(path, {})
    assert gpu._begin(make_arguments("--resume", str(path))).seed == 7
    with pytest.raises(SystemExit, match=r"--seed is 8; what .* holds was drawn with 7"):
        gpu._begin(make_arguments("--resume", str(path), "--seed", "8"))


def good() -> Iterator[int]:
    yield from (3, 4)


def bad() -> Iterator[int]:
    yield 1
    raise ValueError("out of memory")


def make_collector(findings: Findings, *, works: bool = True) -> Collector:
    return Collector(findings, lambda: None, lambda: works)


def test_an_error_costs_its_own_group(capsys: pytest.CaptureFixture[str]) -> None:
    def groups() -> Iterator[tuple[str, Iterator[int]]]:
        yield from [("bad", bad()), ("good", good())]
        raise ImportError("no such kernel")

    findings, taken = Findings(3), list[int]()
    make_collector(findings).collect(groups(), taken.append, time.monotonic() + 60)
    assert taken == [1, 3, 4]
    assert (findings.begun, findings.broken) == (["bad", "good"], ["bad", "what comes before the next group"])
    printed = capsys.readouterr().err
    assert "out of memory" in printed
    assert "no such kernel" in printed


def test_no_group_is_begun_after_the_deadline() -> None:
    findings = Findings(7)
    gpu._run(make_arguments("--check-only", "--device", "cpu"), findings, time.monotonic() - 1)
    assert (findings.checks, findings.begun) == ([], [])
    assert "worker" in findings.late
    with pytest.raises(SystemExit, match="no time left"):
        gpu._report(findings)


def test_another_run_begins_only_what_was_not_begun_before_the_device_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "gpu.json"
    findings = Findings(3, [CHECK], [FIGURE], late=["tilings"])
    taken: list[int] = []
    with pytest.raises(DeviceLostError):
        make_collector(findings, works=False).collect([("bad", bad()), ("good", good())], taken.append, math.inf)
    findings.write(path, {"title": "kernels"})
    values = json.loads(path.read_text())
    assert (values["title"], values["seed"]) == ("kernels", 3)
    assert (values["checks"][0]["passed"], values["no_time_left"]) == (True, ["tilings"])
    later = Findings.read(path)
    assert later == replace(findings, late=[])
    make_collector(later).collect([("bad", bad()), ("good", good())], taken.append, math.inf)
    assert taken == [1, 3, 4]
    assert later.broken == ["bad"]


def test_a_run_that_is_killed_within_a_group_leaves_it_broken(tmp_path: Path) -> None:
    path, findings = tmp_path / "gpu.json", Findings(3)
    seen: list[list[str]] = []
    collector = Collector(findings, lambda: findings.write(path, {}), lambda: True)
    collector.collect([("good", good())], lambda _: seen.append(Findings.read(path).broken), math.inf)
    assert seen == [["good"], ["good"]]
    assert findings.broken == []


def test_what_is_left_is_done_by_another_process_that_knows_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], Findings]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append((command, Findings.read(Path(command[command.index("--resume") + 1]))))
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "bench.gpu", "--only", "decode"])
    findings = Findings(5, [CHECK], [FIGURE], ["decode"], ["decode"])
    assert gpu._run_another(findings, time.monotonic() + 100) == 7
    ((command, handed),) = calls
    assert command[1:5] == ["-m", "bench.gpu", "--only", "decode"]
    assert 90 < float(command[command.index("--seconds") + 1]) <= 100
    assert handed == findings


def test_an_attempt_to_serve_that_fails_is_raised_after_all_others() -> None:
    attempts = gpu_serving.Attempts()
    assert attempts.make(int, "x") is None
    assert attempts.make(divmod, 7, 2) == (3, 1)
    with pytest.raises(ExceptionGroup, match="1 failed") as raised:
        attempts.check()
    assert isinstance(raised.value.exceptions[0], ValueError)


def test_services_that_never_become_ready_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(gpu_serving, "serve", never)
    monkeypatch.setattr(gpu_serving, "_SERVING_TIMEOUT_S", 0.05)
    with pytest.raises(TimeoutError):
        gpu_serving.serve_once(ServeSettings(), [], Path("trace.json"))


@pytest.mark.parametrize(
    "rule",
    [
        ScoreRule(0.3),
        ScoreRule(0.3, sliding_window=4, soft_cap=2.0, alibi_slopes=torch.tensor([0.5, 0.1, 1.0, 0.0])),
        ScoreRule(0.3, sliding_window=4, sinks=torch.tensor([0.5, -3.0, 4.0, 0.0])),
    ],
    ids=["plain", "window, cap and alibi", "window and sinks"],
)
def test_its_float64_attention_is_that_of_the_operation(rule: ScoreRule) -> None:
    rows = [(1, 9), (4, 4), (3, 20)]
    problem = make_problem(rows, Heads(4, 2, 16), torch.float32, "cpu", block_size=5, poisoned=True)
    options = {name: getattr(rule, name) for name in ("scale", "sliding_window", "soft_cap", "alibi_slopes", "sinks")}
    actual = ops.paged_attention(*problem.tensors, **options, **problem.limits)
    torch.testing.assert_close(actual.double(), expected_attention(problem, rule), rtol=1e-5, atol=1e-5)


def test_decode_steps_with_graphs_read_all_weights_but_the_embedding_and_the_keys_and_values() -> None:
    small = {"vocab_size": 1200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = make_model(config_of("llama-1b") | small | heads, torch.device("cpu"))
    layer = 32 * (4 * 8 + 2 * 2 * 8) + 32 * 32 + 3 * 32 * 48 + 2 * 32
    weights = 2 * (2 * layer + 32 + 32 * 1200)
    assert step_bytes(model) == weights
    run = DecodeRun(model, 3, 20, recorder := CallingRecorder())
    assert run.step_bytes == weights + 3 * 20 * 2 * 2 * 2 * 8 * 2
    times = run.measure(NUM_STEPS)
    assert 0 < times.model <= times.whole
    assert recorder.replays.total() > NUM_STEPS


def trace_line(name: str, step: int, start: float, duration: float, **details: int) -> str:
    return json.dumps({"name": name, "ts": start, "dur": duration, "args": {"step": step, **details}}) + ",\n"


def test_the_device_is_busy_while_it_is_in_a_step_of_the_longest_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    lines = ["[\n", '{"name":"thread_name","ph":"M","pid":1,"tid":1,"args":{"name":"worker"}},\n']
    # Three decodes of 8 tokens that take 9 of 10 us each, after a prefill and another two.
    for step, (num_tokens, end) in enumerate([(8, 5), (8, 9), (40, 50), (8, 60), (8, 70), (8, 80)]):
        lines.append(trace_line("plan", step, 0, 1, num_tokens=num_tokens))
        lines.append(trace_line("queue", step, end - 20, 11))
        lines.append(trace_line("cache operations", step, end - 9, 1))
        lines.append(trace_line("model", step, end - 8, 6))
        lines.append(trace_line("sample", step, end - 2, 2))
    trace.write_text("".join(lines))
    assert busy_share(trace, 8) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="no two steps of 40 tokens"):
        busy_share(trace, 40)
