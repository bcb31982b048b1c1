"""Cost models fitted to traces: what a made-up worker takes is found again, and bad files are refused in one line."""

from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.step import StepPlan, StepWork
from scheduler_svc.service.tracing import StepTrace
from simulator.measured import Measured, Trace, non_negative_least_squares

CONFIG = SchedulerConfig(num_blocks=64, block_size=16, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512)
IDLE_S = 0.003
EMPTY = np.zeros((0, 2), np.int64)


def true_seconds(work: StepWork) -> float:
    return 0.004 + 2e-4 * min(work.num_tokens, 16) + 5e-5 * max(work.num_tokens - 16, 0) + 1e-6 * work.context_tokens


def make_plan(step_id: int, num_new: np.ndarray, num_computed: np.ndarray) -> StepPlan:
    rows = np.arange(len(num_new))
    return StepPlan(
        step_id=step_id,
        swap_out=EMPTY,
        swap_in=EMPTY,
        copies=EMPTY,
        release=EMPTY[:, 0],
        assign=(),
        forks=EMPTY,
        reseed=(),
        set_tokens=np.zeros((0, 3), np.int64),
        block_table_deltas=np.zeros((0, 3), np.int64),
        rows=rows,
        num_new_tokens=num_new,
        num_computed_tokens=num_computed,
        samples=np.stack((rows, rows), axis=1),
        sealed=(),
    )


def write_trace(path: Path, num_steps: int, noise: float = 0.0, seed: int = 0) -> Path:
    """As the service writes it: steps overlap by one, and now and then the worker is idle."""
    rng = np.random.default_rng(seed)
    trace = StepTrace.open(str(path))
    trace.attached(CONFIG, vocab_size=1000)
    received, now = 0.0, 0.0
    for step_id in range(1, num_steps + 1):
        num_rows = int(rng.integers(1, 16))
        num_new = np.where(rng.random(num_rows) < 0.1, rng.integers(2, 60, num_rows), 1)
        plan = make_plan(step_id, num_new, rng.integers(0, 400, num_rows))
        is_idle = rng.random() < 0.1
        now = received + 0.01 if is_idle else max(received - 0.002, 0.0)
        took = true_seconds(StepWork.of(plan)) * (1 + noise * rng.standard_normal())
        received = now + IDLE_S + took if is_idle else received + took
        trace.planned(plan, now, now + 1e-4)
        trace.part("send", step_id, now + 1e-4, now + 2e-4)
        trace.answered(step_id, (0, 0, 1000, 10), received)
        trace.part("apply", step_id, received, received + 1e-4)
    trace.close()
    return path


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


def test_noise_stays_in_the_residual_and_no_cost_is_negative(tmp_path: Path) -> None:
    fitted = Measured.fit([Trace.read(write_trace(tmp_path / "steps.json", 600, noise=0.1))])
    assert min(fitted.coefficients) >= 0
    assert 0.05 < fitted.residual.mean_relative < 0.12
    assert "600" not in str(fitted.residual)
    assert f"{fitted.residual.num_steps} steps" in str(fitted.residual)


def test_several_traces_make_one_fit(tmp_path: Path) -> None:
    traces = [Trace.read(write_trace(tmp_path / f"{seed}.json", 100, seed=seed)) for seed in range(3)]
    assert Measured.fit(traces).residual.num_steps > 200


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
        ('{"runs": []}\n', "is no trace of steps"),
        ("[\nnonsense\n{}\n", "line 2, is no event of a trace"),
        ('[\n{"name":"thread_name","ph":"M","args":{}},\n', "does not say what replica it is of"),
        ('[\n{"name":"replica","ph":"M","args":{"num_blocks":1}},\n', "has no step that was answered"),
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
        # The conditions of Karush, Kuhn and Tucker.
        assert (gradient > -1e-6).all()
        assert np.abs(gradient[solution > 0]).max(initial=0) < 1e-6
