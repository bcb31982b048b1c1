"""A cost model fitted to the steps of a live worker, as `quire scheduler --trace-steps` records them.

A step that was sent while the one before it ran begins when that one is over: its time is the distance of the two
results, whatever its cause, so it includes the time that the scheduler, the gateways and their clients take from the
same processors. Non-negative least squares fit these times. A step that found the workers idle takes longer by the time
to send it and to receive its result: the median of that is `latency`.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.step import StepWork
from simulator.costs import StepSeconds

Array = NDArray[np.float64]

_WORK = tuple(field.name for field in fields(StepWork))
_TOKEN_KNOTS = (0, 4, 16, 64, 256)
"""The time of tokens is a line between these numbers of them: products of few rows wait for memory, of many compute."""

_NAMES = (
    "step",
    *(f"tokens from {knot}" for knot in _TOKEN_KNOTS),
    "samples",
    "chunks",
    "context tokens",
    "attended pairs",
    "copied blocks",
    "swapped blocks",
)
_MIN_STEPS = 2 * len(_NAMES)

_SIZES = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "vocab_size")
_LATER_SIZES = ("full_groups", "windowed_groups", "window", "state_blocks")
"""Traces of earlier releases have none of these."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Times in seconds of one clock: the plan began, the step was sent, its result was received."""

    planned: float
    sent: float
    received: float
    work: StepWork


@dataclass(frozen=True, slots=True)
class Trace:
    """The answered steps of a trace in order, by attachment of workers; and the sizes of the replica attached last."""

    attachments: Sequence[Sequence[TracedStep]]
    replica: Mapping[str, int]

    @classmethod
    def read(cls, path: Path) -> "Trace":
        """Reads a file of `--trace-steps`, even one that was cut off. Raises OSError, and ValueError with one line for
        any other file."""
        attachments: list[list[TracedStep]] = []
        replica: Mapping[str, int] = {}
        for attachment, sizes in _attachments(path):
            replica = sizes
            attachments.append(attachment)
        if not any(attachments):
            raise ValueError(
                f"{path} has no step that was answered; it must be a file of quire scheduler --trace-steps"
            )
        return cls(attachments, replica)


def _attachments(path: Path) -> Iterator[tuple[list[TracedStep], Mapping[str, int]]]:
    replica: Mapping[str, int] | None = None
    steps: dict[int, dict[str, Any]] = {}
    for event in _events(path):
        name, step = str(event.get("name")), event["args"].get("step")
        if name == "replica":
            if replica is not None:
                yield _answered(path, steps), replica
            replica, steps = _sizes(path, event["args"]), {}
        elif isinstance(step, int):
            steps.setdefault(step, {})[name] = event
    if replica is None:
        raise ValueError(f"{path} does not say what replica it is of; it is cut, or of an earlier version of Quire")
    yield _answered(path, steps), replica


def _sizes(path: Path, given: Mapping[str, Any]) -> Mapping[str, int]:
    for name in (*_SIZES, "num_host_blocks", *_LATER_SIZES):
        value, least = given.get(name, 0 if name in _LATER_SIZES else None), 1 if name in _SIZES else 0
        if not isinstance(value, int) or value < least:
            raise ValueError(
                f"{path}: the replica's {name} is {value!r:.40}; it must be a whole number from {least} on"
            )
    return given


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """One event per line; the last line may be cut off."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        lines = []
    if not lines or lines[0].strip() != "[":
        raise ValueError(f"{path} is no trace of steps; it must be a file of quire scheduler --trace-steps")
    for number, line in enumerate(lines[1:], start=2):
        text = line.strip().removesuffix(",")
        if text == "]":
            return
        try:
            event = json.loads(text)
            known = isinstance(event["args"], dict)
        except (ValueError, KeyError, TypeError, RecursionError):
            if number == len(lines):
                return
            raise ValueError(f"{path}, line {number}, is no event of a trace") from None
        if known:
            yield event


def _answered(path: Path, steps: Mapping[int, Mapping[str, Any]]) -> list[TracedStep]:
    answered: list[TracedStep] = []
    for step_id in sorted(steps):
        parts = steps[step_id]
        if {"plan", "send", "apply"} <= parts.keys():
            plan, send, apply = parts["plan"], parts["send"], parts["apply"]
            try:
                work = StepWork(**{name: int(plan["args"].get(name, 0)) for name in _WORK})
                times = (float(plan["ts"]), float(send["ts"]) + float(send["dur"]), float(apply["ts"]))
            except (KeyError, OverflowError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: step {step_id} is no step of a trace: {error}") from None
            if not all(map(math.isfinite, times)):
                raise ValueError(f"{path}: step {step_id} has no finite times")
            planned, sent, received = (time / 1e6 for time in times)
            answered.append(TracedStep(planned, sent, received, work))
    return answered


@dataclass(frozen=True, slots=True)
class Residual:
    """How well the fit explains the steps that it was made from.

    num_steps      steps sent while another one ran, whose times were fitted; `num_idle` found the workers idle
    mean_ms        their mean time
    rms_ms         root of the mean squared difference
    mean_relative  mean of |difference| / time
    explained      share of the variance, at most 1
    """

    num_steps: int
    num_idle: int
    mean_ms: float
    rms_ms: float
    mean_relative: float
    explained: float

    def __str__(self) -> str:
        return (
            f"{self.num_steps} steps of {self.mean_ms:.2f} ms fitted, {self.num_idle} more found the worker idle: "
            f"residual {self.rms_ms:.2f} ms rms, {self.mean_relative:.1%} mean, {self.explained:.1%} of the variance "
            "explained"
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of each unit of work, in the order of `names`, and the additional latency of an idle worker."""

    coefficients: tuple[float, ...]
    latency: float
    residual: Residual

    @classmethod
    def fit(cls, traces: Sequence[Trace]) -> "Measured":
        """Fits all steps of the traces. Raises ValueError if they have too few steps."""
        busy: list[tuple[StepWork, float]] = []
        idle: list[tuple[StepWork, float]] = []
        for attachment in (each for trace in traces for each in trace.attachments):
            for before, step in itertools.pairwise(attachment):
                if step.sent <= before.received:
                    busy.append((step.work, step.received - before.received))
                else:
                    idle.append((step.work, step.received - step.planned))
        if len(busy) < _MIN_STEPS:
            raise ValueError(
                f"the trace has {len(busy)} steps that were sent while another one ran; a fit takes {_MIN_STEPS}: "
                "trace a worker under load, for longer"
            )
        matrix, times = _matrix([work for work, _ in busy]), np.array([time for _, time in busy])
        coefficients = non_negative_least_squares(matrix, times)
        latency = 0.0
        if idle:
            over = np.array([time for _, time in idle]) - _matrix([work for work, _ in idle]) @ coefficients
            latency = max(float(np.median(over)), 0.0)
        return cls(tuple(coefficients.tolist()), latency, _residual(times, matrix @ coefficients, len(idle)))

    @property
    def by_name(self) -> dict[str, float]:
        """The coefficients in seconds."""
        return dict(zip(_NAMES, self.coefficients, strict=True))

    def seconds(self, work: StepWork) -> StepSeconds:
        device = sum(coefficient * value for coefficient, value in zip(self.coefficients, _row(work), strict=True))
        return StepSeconds(device, launch=self.latency / 2, answer=0.0 if self.latency == 0 else self.latency / 2)


def _matrix(works: Sequence[StepWork]) -> Array:
    return np.array([_row(work) for work in works], dtype=np.float64).reshape(-1, len(_NAMES))


def _row(work: StepWork) -> tuple[float, ...]:
    upper = (*_TOKEN_KNOTS[1:], None)
    segments = (
        max(0, (work.num_tokens if end is None else min(work.num_tokens, end)) - start)
        for start, end in zip(_TOKEN_KNOTS, upper, strict=True)
    )
    others = (work.num_samples, work.num_chunks, work.context_tokens, work.attended_pairs)
    return (1, *segments, *others, work.copied_blocks, work.swapped_blocks)


def _residual(times: Array, fitted: Array, num_idle: int) -> Residual:
    difference = times - fitted
    variance = float(times.var())
    return Residual(
        num_steps=len(times),
        num_idle=num_idle,
        mean_ms=float(times.mean()) * 1e3,
        rms_ms=float(np.sqrt((difference**2).mean())) * 1e3,
        mean_relative=float((np.abs(difference) / np.maximum(times, 1e-9)).mean()),
        explained=1 - float((difference**2).mean()) / variance if variance else 1.0,
    )


def non_negative_least_squares(matrix: Array, target: Array) -> Array:
    """The x >= 0 that minimizes |matrix x - target|, by the method of active sets (Lawson and Hanson, 1974)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    gram, projected = scaled.T @ scaled, scaled.T @ target
    count = matrix.shape[1]
    solution, free = np.zeros(count), np.zeros(count, dtype=bool)
    tolerance = 1e-10 * max(float(np.abs(projected).max(initial=0.0)), 1e-300)
    for _ in range(10 * count):
        gradient = projected - gram @ solution
        candidates = np.flatnonzero(~free & (gradient > tolerance))
        if not len(candidates):
            break
        free[candidates[np.argmax(gradient[candidates])]] = True
        while True:
            attempt = np.zeros(count)
            attempt[free] = np.linalg.lstsq(gram[np.ix_(free, free)], projected[free], rcond=None)[0]
            if (attempt[free] > 0).all():
                solution = attempt
                break
            # Stops at the first coefficient that would fall below zero.
            falling = free & (attempt <= 0)
            steps = solution[falling] / np.maximum(solution[falling] - attempt[falling], 1e-300)
            solution = np.maximum(solution + float(steps.min()) * (attempt - solution), 0.0)
            free &= solution > 1e-15
    return solution / scale
