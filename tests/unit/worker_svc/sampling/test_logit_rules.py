"""Bans, biases and penalties compared with a few lines of numpy for one row at a time."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sampling import make_columns, make_sampling
from worker_svc.sampling import logit_rules
from worker_svc.sampling.logit_rules import History, apply_logit_rules
from worker_svc.step import LogitRules

VOCAB, WIDTH = 40, 24


@dataclass(frozen=True)
class Row:
    """A sequence and its rules."""

    prompt: list[int]
    output: list[int]
    rules: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def make_rules(row: Row) -> LogitRules | None:
    arrays = ("bias_token_ids", "allowed_token_ids", "stop_token_ids", "first_excluded")
    values: dict[str, Any] = {
        name: np.array(value, np.int32) if name in arrays else value for name, value in row.rules.items()
    }
    if "bias_values" in values:
        values["bias_values"] = np.array(values["bias_values"], np.float32)
    values["bad_sequences"] = tuple(np.array(each, np.int32) for each in row.rules.get("bad_sequences", ()))
    biases = row.rules.get("sequence_biases", ())
    values["sequence_biases"] = tuple((np.array(each, np.int32), bias) for each, bias in biases)
    return LogitRules(**values) if row.rules else None


def oracle(logits: np.ndarray, row: Row) -> np.ndarray:
    """One row's logits after its rules, by the definitions of the contract."""
    result, rules, output = logits.astype(np.float64), row.rules, row.output
    if rules.get("allowed_token_ids"):
        result[[token not in rules["allowed_token_ids"] for token in range(len(logits))]] = -np.inf
    for token, value in zip(rules.get("bias_token_ids", ()), rules.get("bias_values", ()), strict=True):
        result[token] += value
    if len(output) < rules.get("min_tokens", 0):
        result[rules.get("stop_token_ids", [])] = -np.inf
    for *prefix, last in rules.get("bad_sequences", ()):
        if output[len(output) - len(prefix) :] == prefix and len(prefix) <= len(output):
            result[last] = -np.inf
    if not output:
        result[rules.get("first_excluded", [])] = -np.inf
    for (*prefix, last), bias in rules.get("sequence_biases", ()):
        if row.tokens[len(row.tokens) - len(prefix) :] == prefix and len(prefix) <= len(row.tokens):
            result[last] += bias
    if (size := rules.get("no_repeat_ngram_size", 0)) and len(row.tokens) >= size:
        end = row.tokens[len(row.tokens) - size + 1 :]
        for start in range(len(row.tokens) - size + 1):
            *before, last = row.tokens[start : start + size]
            if before == end:
                result[last] = -np.inf
    for token in set(row.tokens):
        penalty = rules.get("repetition_penalty", 1.0)
        result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
    for token in set(output):
        result[token] -= rules.get("frequency_penalty", 0.0) * output.count(token) + rules.get("presence_penalty", 0.0)
    return result


def make_logits(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((count, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3


def make_history(rows: list[Row]) -> History:
    """The rows lie anywhere in the buffer; other sequences' tokens follow theirs."""
    generator = np.random.default_rng(5)
    places = generator.permutation(len(rows) + 3)[: len(rows)]
    buffer = generator.integers(0, VOCAB, (len(rows) + 3, WIDTH)).astype(np.int32)
    for place, row in zip(places, rows, strict=True):
        buffer[place, : len(row.tokens)] = row.tokens
    lengths = np.array([len(row.tokens) for row in rows])
    return History(torch.from_numpy(buffer), places, np.array([len(row.prompt) for row in rows]), lengths)


def ruled_logits(rows: list[Row], logits: torch.Tensor) -> np.ndarray:
    changed = logits.clone()
    columns = make_columns([make_sampling(rules=make_rules(row)) for row in rows])
    apply_logit_rules(changed, columns, make_history(rows))
    return changed.numpy()


def assert_as_the_oracle_says(rows: list[Row]) -> None:
    logits = make_logits(len(rows))
    for found, line, row in zip(ruled_logits(rows, logits), logits.numpy(), rows, strict=True):
        np.testing.assert_allclose(found, oracle(line, row), rtol=1e-5, atol=1e-5)


PROMPT, OUTPUT = [1, 2, 3, 4, 3], [7, 7, 8, 2, 7]
RULES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.7, "presence_penalty": 0.2},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1e-30, "presence_penalty": -2.0, "frequency_penalty": -2.0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"bias_token_ids": [0, 7, 39], "bias_values": [100.0, -3.5, 0.25]},
    {"allowed_token_ids": [7]},
    {"allowed_token_ids": [5, 5, 7, 2, 39]},
    {"bad_sequences": [[9]]},
    {"bad_sequences": [[2, 7, 11]]},
    {"bad_sequences": [[8, 7, 11]]},
    {"bad_sequences": [[7, 12], [7, 12], [2, 7, 12], [6, 2, 7, 13], [14]]},
    {"bad_sequences": [[3, *OUTPUT, 20], [*OUTPUT, 21], [9] * 40, [*OUTPUT * 6, 22]]},
    {"min_tokens": 5, "stop_token_ids": [0, 7]},
    {"min_tokens": 6, "stop_token_ids": [0, 7]},
    {"first_excluded": [3, 7]},
    {"sequence_biases": [([7], 2.5), ([7], -1.0), ([2, 7, 11], -4.0), ([3, *OUTPUT, 20], -np.inf), ([9] * 40, 1.0)]},
    {"bad_sequences": [[7, 12]], "sequence_biases": [([7, 12], 3.0), ([4, 3, *OUTPUT, 12], 1.0), ([1, 2, 7, 9], 2.0)]},
    *({"no_repeat_ngram_size": size} for size in (1, 2, 3, 5, 9, 10, 11, 2**31)),
    {
        "first_excluded": [2],
        "sequence_biases": [([2, 7, 9], 3.0), ([2, 7, 7], 1.5), ([3, 7, 7, 10], -2.0)],
        "no_repeat_ngram_size": 2,
        "allowed_token_ids": [2, 3, 7, 8, 9, 10],
        "bias_token_ids": [2, 9],
        "bias_values": [5.0, -5.0],
        "min_tokens": 9,
        "stop_token_ids": [10],
        "bad_sequences": [[7, 9], [8]],
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.1,
    },
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_rule_does_what_its_definition_says(rules: dict[str, Any]) -> None:
    assert_as_the_oracle_says([Row(PROMPT, OUTPUT, rules)])


def test_rows_with_and_without_rules_do_not_touch_each_other() -> None:
    lengths = [(1, 4), (3, 2), (5, 0), (2, 1), (5, 5)]
    rows = [Row(PROMPT[:prompt], OUTPUT[:output], rules) for prompt, output in lengths for rules in [*RULES, {}]]
    assert_as_the_oracle_says(rows)


def test_rows_that_ask_for_nothing_keep_their_logits_and_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_rules, "to_device", None)
    logits = make_logits(3)
    assert (ruled_logits([Row([1], [2])] * 3, logits) == logits.numpy()).all()


def test_penalties_are_the_same_when_they_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(PROMPT, OUTPUT, rules) for rules in RULES]
    whole = ruled_logits(rows, make_logits(len(rows)))
    monkeypatch.setattr(logit_rules, "_MAX_ENTRIES", 2 * len(PROMPT + OUTPUT) + 1)
    assert (ruled_logits(rows, make_logits(len(rows))) == whole).all()


def test_a_token_that_is_banned_stays_banned_under_penalties_and_nan_stays() -> None:
    rules = {"repetition_penalty": 1.3, "frequency_penalty": -0.7, "presence_penalty": -9.0}
    logits = make_logits(2)
    logits[0, 7], logits[1, 2] = -np.inf, np.nan
    found = ruled_logits([Row(PROMPT, OUTPUT, rules)] * 2, logits)
    assert found[0, 7] == -np.inf
    assert np.isnan(found[1]).tolist() == [token == 2 for token in range(VOCAB)]
