"""Cost models fitted to traces: a made-up worker's costs are found again, and bad files are refused in one line."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.runtime.settings import load_settings
from quire_cli.simulate import SimulateFlags
from scheduler_svc.core.step import StepWork
from simulator.measured import Measured, Trace, non_negative_least_squares
from tests.support import step_traces
from tests.support.step_traces import IDLE_S, make_plan, true_seconds, write_trace

SIZES = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64}
SIZES |= {"max_model_len": 512, "num_host_blocks": 0, "vocab_size": 1000}
REPLICA = json.dumps({"name": "replica", "ph": "M", "args": SIZES}) + ",\n"


def step(ts: object) -> str:
    """One answered step with this time."""
    events = ({"name": name, "ts": ts, "dur": 1, "args": {"step": 1}} for name in ("plan", "send", "apply"))
    return "".join(f"{json.dumps(event)},\n" for event in events)


def test_the_costs_of_a_worker_are_found_again(tmp_path: Path) -> None:
    trace = Trace.read(write_trace(tmp_path / "steps.json", 400))
    assert trace.replica["num_blocks"] == 64
    assert trace.replica["vocab_size"] == 1000
    fitted = Measured.fit([trace])
    assert fitted.residual.mean_relative < 0.01
    assert fitted.residual.explained > 0.99
    assert fitted.latency == pytest.approx(IDLE_S, rel=0.1)
    for num_rows in (1, 8, 15):
        plan = make_plan(1, np.ones(num_rows, np.int64), np.full(num_rows, 200))
        work = StepWork.of(plan)
        assert fitted.seconds(work).device == pytest.approx(true_seconds(work), rel=0.03)


def test_a_trace_has_the_groups_and_states_of_its_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_traces, "CONFIG", replace(step_traces.CONFIG, state_blocks=3))
    path = write_trace(tmp_path / "steps.json", 400)
    flags = load_settings(SimulateFlags, ["--cost-trace", str(path)], {}, program="simulate")
    assert flags.replica().config.state_blocks == 3
    path.write_text(re.sub(r'("state_blocks": ?)3', r"\1-3", path.read_text()))
    with pytest.raises(ValueError, match="the replica's state_blocks is -3; it must be a whole number from 0 on"):
        Trace.read(path)


def test_a_trace_that_was_cut_off_is_read_up_to_the_cut(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "steps.json", 100)
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    (steps,) = Trace.read(path).attachments
    assert 40 <= len(steps) <= 55


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no trace of steps"),
        ("[\nnonsense\n{}\n", "line 2, is no event of a trace"),
        ('[\n{"name":"thread_name","ph":"M","args":{}},\n', "does not say what replica it is of"),
        ('[\n{"name":"replica","ph":"M","args":{"num_blocks":1}},\n', "the replica's block_size is None; it must be"),
        (f"[\n{REPLICA}", "has no step that was answered"),
        (f"[\n{REPLICA}{step(ts='soon')}", "step 1 is no step of a trace: could not convert"),
        (f"[\n{REPLICA}{step(ts=1e400)}", "step 1 has no finite times"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as refusal:
        Trace.read(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    trace = Trace.read(write_trace(tmp_path / "steps.json", 12))
    with pytest.raises(ValueError, match=r"steps that were sent while another one ran; a fit takes \d+"):
        Measured.fit([trace])


def test_least_squares_never_go_below_zero() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        matrix, wanted = rng.random((40, 6)), rng.normal(size=6)
        matrix[:, 2] = matrix[:, 3]
        target = matrix @ wanted
        solution = non_negative_least_squares(matrix, target)
        assert (solution >= 0).all()
        gradient = matrix.T @ (matrix @ solution - target)
        # The Karush-Kuhn-Tucker conditions.
        assert (gradient > -1e-6).all()
        assert np.abs(gradient[solution > 0]).max(initial=0) < 1e-6
