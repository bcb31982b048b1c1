"""The stages of a forward pass: what is kept of them lets every floor be computed again."""

import pytest

from bench.stages import Stage, floors


def test_floors_are_kept_by_what_they_are_computed_from() -> None:
    stages = [Stage("all layers", 5_000_000, (9.0, 8.0)), Stage("rms_norm", 0, (1.0,)), Stage("product", 3, (2.0,))]
    kept = floors(64, stages, 12.5)
    assert (kept["batch"], kept["rate"], kept["unit"]) == (64, 12.5, "GB/s")
    # What reads nothing has no floor.
    assert kept["read_bytes"] == {"all layers": 5_000_000, "product": 3}
    assert kept["read_bytes"]["all layers"] / kept["rate"] / 1e6 == pytest.approx(stages[0].floor_ms(12.5))
