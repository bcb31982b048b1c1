"""A few hundred of the mutations of `python -m bench hostile_files`: each is loaded or refused by one line."""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from bench.hostile_files import make_sources, mutated, run


@pytest.mark.extended
def test_mutations_of_model_files_are_loaded_or_refused_by_one_line() -> None:
    outcomes = run(range(200), 1, 1 << 30, 120.0)
    assert [outcome for outcome in outcomes if outcome.is_failure] == []
    kinds = Counter(outcome.kind for outcome in outcomes)
    assert min(kinds["loaded"], kinds["refused"]) > 20
    assert {outcome.source.split("-")[0] for outcome in outcomes} == {"gpt2", "llama", "mixtral", "pieces", "qwen3"}


def test_a_mutation_is_a_function_of_its_number(tmp_path: Path) -> None:
    make_sources(tmp_path / "sources")
    contents: list[bytes] = []
    for number in (*range(10), *range(10)):
        generator = random.Random(number)
        model = mutated(generator.choice(sorted((tmp_path / "sources").iterdir())), tmp_path, generator)
        contents.append((model / "model.safetensors" if model.is_dir() else model).read_bytes())
        shutil.rmtree(model) if model.is_dir() else model.unlink()
    assert contents[:10] == contents[10:]
    assert len(set(contents)) == 10
