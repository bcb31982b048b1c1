"""Mutations of `python -m bench hostile_files`: each is loaded or refused by one line."""

from collections import Counter

import pytest

from bench.hostile_files import run
from tests.support.tiers import is_third_tier


@pytest.mark.extended
def test_mutations_of_model_files_are_loaded_or_refused_by_one_line() -> None:
    outcomes = run(range(1000 if is_third_tier() else 25), 1, 1 << 30, 120.0)
    assert [outcome for outcome in outcomes if outcome.is_failure] == []
    kinds = Counter(outcome.kind for outcome in outcomes)
    assert min(kinds["loaded"], kinds["refused"]) > 5
    assert {outcome.source.split("-")[0] for outcome in outcomes} == {"gpt2", "llama", "mixtral", "pieces", "qwen3"}
