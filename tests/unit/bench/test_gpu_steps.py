"""The measurement of decode steps, on the CPU and a small shape: that it measures what it says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_model import config_of, make_model, step_bytes, write_model
from bench.gpu_serving import make_requests
from bench.gpu_steps import NUM_STEPS, DecodeRun
from bench.step_trace_busy import busy_share
from tests.support.graph_recorder import CallingRecorder
from worker_svc.models.registry import load_model

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 1200,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def small_config() -> dict[str, Any]:
    return config_of("llama-1b") | SMALL


@pytest.mark.parametrize("with_graphs", [False, True])
def test_steps_decode_all_rows_and_take_time(with_graphs: bool) -> None:
    recorder = CallingRecorder() if with_graphs else None
    run = DecodeRun(make_model(small_config(), CPU), 3, 20, recorder)
    times = run.measure(NUM_STEPS)
    assert 0 < times.model <= times.whole
    if recorder is not None:
        assert recorder.replays.total() > NUM_STEPS


def test_a_step_reads_all_weights_but_the_embedding_and_the_keys_and_values_of_its_context() -> None:
    model = make_model(small_config(), CPU)
    layer = 32 * (4 * 8 + 2 * 2 * 8) + 32 * 32 + 3 * 32 * 48 + 2 * 32
    weights = 2 * (2 * layer + 32 + 32 * 1200)
    assert step_bytes(model) == weights
    keys_and_values = 3 * 20 * 2 * 2 * 2 * 8 * 2
    assert DecodeRun(model, 3, 20, None).step_bytes == weights + keys_and_values


def test_a_written_model_can_be_loaded(tmp_path: Path) -> None:
    write_model(small_config(), tmp_path, CPU)
    model = load_model(tmp_path, device=CPU, dtype=torch.bfloat16)
    assert (model.vocab_size, model.num_layers, model.max_model_len) == (1200, 2, 256)
    assert (tmp_path / "tokenizer.json").exists()


def test_the_same_seed_gives_the_same_requests() -> None:
    first, second = make_requests(3, count=5), make_requests(3, count=5)
    assert [item.token_ids.tolist() for item in first] == [item.token_ids.tolist() for item in second]
    assert all(64 <= len(item.prompt) <= 512 for item in first)


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
