"""Times of the device in a file that `--trace-steps` writes."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_DEVICE_STAGES = ("cache operations", "model", "sample")


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of a server that has ended, which writes the rest."""
    return [json.loads(line.rstrip(",")) for line in path.read_text().splitlines() if line.startswith("{")]


def device_seconds(events: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Seconds in which the device worked, by step."""
    seconds = defaultdict[int, float](float)
    for event in events:
        if event["name"] in _DEVICE_STAGES:
            seconds[event["args"]["step"]] += event["dur"] / 1e6
    return seconds


def busy_share(path: Path, num_tokens: int) -> float:
    """The share of time in which the device was in a step, in the longest run of steps with `num_tokens` tokens each.

    Raises:
        ValueError: the trace has no two such steps in a row.
    """
    events = read_events(path)
    busy = device_seconds(events)
    # The worker's stages are placed so that the last one ends when the result was received.
    received = {
        each["args"]["step"]: (each["ts"] + each["dur"]) / 1e6 for each in events if each["name"] in _DEVICE_STAGES
    }
    planned = {each["args"]["step"]: each["args"]["num_tokens"] for each in events if each["name"] == "plan"}
    best: list[int] = []
    run: list[int] = []
    for step_id in sorted(planned):
        run = [*run, step_id] if planned[step_id] == num_tokens and step_id in received else []
        best = max(best, run, key=len)
    if len(best) < 2:
        raise ValueError(f"{path} has no two steps of {num_tokens} tokens in a row")
    return sum(busy[step_id] for step_id in best[1:]) / (received[best[-1]] - received[best[0]])
