"""The share of time in which the device worked, from a file that `--trace-steps` writes."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

_DEVICE_STAGES = ("cache operations", "model", "sample")


@dataclass(slots=True)
class _TracedStep:
    num_tokens: int = 0
    busy_us: float = 0.0
    received_us: float | None = None


def busy_share(path: Path, num_tokens: int) -> float:
    """The share of time in which the device was in a step, in the longest run of steps with `num_tokens` tokens each.

    Raises:
        ValueError: the trace has no two such steps in a row.
    """
    steps = _read(path)
    best: list[_TracedStep] = []
    run: list[_TracedStep] = []
    for step_id in sorted(steps):
        step = steps[step_id]
        run = [*run, step] if step.num_tokens == num_tokens and step.received_us is not None else []
        best = max(best, run, key=len)
    if len(best) < 2:
        raise ValueError(f"{path} has no two steps of {num_tokens} tokens in a row")
    received = [step.received_us or 0.0 for step in best]
    return sum(step.busy_us for step in best[1:]) / (received[-1] - received[0])


def _read(path: Path) -> dict[int, _TracedStep]:
    steps: defaultdict[int, _TracedStep] = defaultdict(_TracedStep)
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.rstrip().rstrip(",")
        if not text.startswith("{"):
            continue
        event = json.loads(text)
        if "step" not in event["args"]:
            continue
        step = steps[event["args"]["step"]]
        if event["name"] == "plan":
            step.num_tokens = event["args"]["num_tokens"]
        elif event["name"] in _DEVICE_STAGES:
            step.busy_us += event["dur"]
            # The worker's stages are placed so that the last one ends when the result was received.
            step.received_us = event["ts"] + event["dur"]
    return steps
