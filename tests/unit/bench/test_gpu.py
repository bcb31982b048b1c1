"""What the measurement of the GPU makes of errors and interruptions, and the truths that its figures rest on."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

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
from tests.support.graph_recorder import CallingRecorder

CHECK = Check("rms_norm", "float16", 1e-4, 2e-3)
FIGURE = Figure("decode", "GB/s", 3000.0, 4000.0, 12.5, 0.85)


def good() -> Iterator[int]:
    yield from (3, 4)


def bad() -> Iterator[int]:
    yield 1
    raise ValueError("out of memory")


def make_collector(findings: Findings, *, works: bool = True) -> Collector:
    return Collector(findings, lambda: None, lambda: works)


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


def test_its_float64_attention_is_that_of_the_operation() -> None:
    slopes, sinks = torch.tensor([0.5, 0.1, 1.0, 0.0]), torch.tensor([0.5, -3.0, 4.0, 0.0])
    rule = ScoreRule(0.3, sliding_window=4, soft_cap=2.0, alibi_slopes=slopes, sinks=sinks)
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
