"""Samples of the load have all that the page draws."""

import re
from importlib import resources

from gateway.api.ui.watch_messages import StateAt, load_sample
from quire.scheduler.v1 import scheduler_pb2


def make_state(seconds: float) -> StateAt:
    state = scheduler_pb2.GetStateResponse(scheduler_epoch=1, steps=int(seconds) * 10)
    state.gpu_pool.total_blocks = 8
    state.served.generated_tokens, state.served.running_sequences = int(seconds) * 100, 7
    state.served.first_token_ms_p50, state.served.first_token_ms_p95 = 20.0, 90.0
    return StateAt(seconds, state)


def test_a_sample_has_every_line_of_every_chart_of_the_page():
    sample = load_sample(make_state(4.0), make_state(2.0))
    drawn = re.findall(r'\{ name: "(\w+)"', (resources.files("gateway.api.ui") / "static/load.js").read_text("utf-8"))
    assert len(drawn) > 10
    assert set(drawn) <= sample.keys()
    assert (sample["generated"], sample["rows"], sample["ttft50"], sample["ttft95"]) == (100, 7, 20, 90)


def test_what_is_not_known_is_no_zero():
    state = make_state(4.0)
    state.state.served.ClearField("first_token_ms_p50")
    assert "ttft50" not in load_sample(state, make_state(2.0))
    # A scheduler of a release that does not say it.
    state.state.ClearField("served")
    assert not {"generated", "rows", "ttft50", "ttft95"} & load_sample(state, make_state(2.0)).keys()
