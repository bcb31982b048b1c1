"""The search finds the same hypotheses as transformers' own beam search, on a small model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from scheduler_svc.core.beam_search import (
    BeamParameters,
    BeamSearch,
    BeamStep,
    Candidates,
    EarlyStopping,
    Hypothesis,
    num_candidates,
)
from tests.support.models import randomize

EARLY_STOPPING = {EarlyStopping.FALSE: False, EarlyStopping.TRUE: True, EarlyStopping.NEVER: "never"}
PROMPTS = [[3, 5, 7], [9, 2, 11], [4, 4, 20], [13, 8, 1]]
LENGTH_PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
VOCAB_SIZE = 24
MAX_TOKENS = 9
OFTEN_STOPS = (6, 1)
"""Tokens that are likely in many places: hypotheses of all lengths finish."""


@dataclass(slots=True)
class Model:
    """A random GPT-2, and the log probabilities of all sequences that it has computed."""

    gpt2: GPT2LMHeadModel
    known: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    def logprobs(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """[sequences][vocab] after sequences of one length."""
        unknown = [each for each in dict.fromkeys(sequences) if each not in self.known]
        if unknown:
            with torch.inference_mode():
                logits = self.gpt2(torch.tensor(unknown)).logits[:, -1].float()
            self.known.update(zip(unknown, logits.log_softmax(dim=-1).tolist(), strict=True))
        return [self.known[each] for each in sequences]


@pytest.fixture(scope="module")
def model() -> Model:
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=None
    )
    gpt2 = GPT2LMHeadModel(config).eval()
    randomize(gpt2, seed=7)
    return Model(gpt2)


@dataclass(frozen=True, slots=True)
class Case:
    """Parameters of one search. No token of `banned` is ever taken."""

    parameters: BeamParameters
    stop_token_ids: Sequence[int]
    banned: Sequence[int] = ()
    max_tokens: int = MAX_TOKENS


def search(model: Model, case: Case, prompt: Sequence[int]) -> list[Hypothesis]:
    """Drives a search to its end as a scheduler does."""
    width = case.parameters.width
    beams = BeamSearch(case.parameters, case.max_tokens, frozenset(case.stop_token_ids))
    outputs: list[list[int]] = [[] for _ in range(width)]
    for _ in range(case.max_tokens):
        lines = model.logprobs([(*prompt, *output) for output in outputs])
        candidates = [make_candidates(line, case) for line in lines]
        step = beams.advance(candidates, outputs)
        assert_step(step, beams, candidates, outputs)
        if not step.continuations:
            return beams.best()
        assert len(step.continuations) == width
        outputs = [[*outputs[each.parent], each.token_id] for each in step.continuations]
    raise AssertionError(f"{case.max_tokens} steps did not end the search")


def make_candidates(line: Sequence[float], case: Case) -> Candidates:
    line = [-math.inf if token in case.banned else logprob for token, logprob in enumerate(line)]
    best = sorted(range(len(line)), key=lambda token: (-line[token], token))
    best = best[: num_candidates(case.parameters.width, len(case.stop_token_ids))]
    return Candidates(best, [line[token] for token in best])


def assert_step(
    step: BeamStep, beams: BeamSearch, candidates: Sequence[Candidates], outputs: Sequence[Sequence[int]]
) -> None:
    logprobs, num_scores = [each.cumulative_logprob for each in step.continuations], len(beams.scores)
    assert logprobs[:num_scores] == beams.scores == sorted(beams.scores)[::-1]
    assert set(logprobs[num_scores:]) <= {-1e9}
    for each in step.finished:
        assert each in beams.best()
        assert each.token_ids[:-1] == tuple(outputs[each.parent])
        assert each.token_ids[-1] == candidates[each.parent].token_ids[each.place]
    for each in step.continuations:
        assert each.token_id == candidates[each.parent].token_ids[each.place]
        assert candidates[each.parent].logprobs[each.place] > -math.inf


def search_by_transformers(model: Model, case: Case) -> list[list[tuple[list[int], float]]]:
    """For each of PROMPTS the outputs without padding, and the scores of `width` hypotheses."""
    width = case.parameters.width
    batch = torch.tensor(PROMPTS)
    with torch.inference_mode():
        generated = model.gpt2.generate(  # pyrefly: ignore
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=case.max_tokens,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=case.parameters.length_penalty,
            early_stopping=EARLY_STOPPING[case.parameters.early_stopping],
            eos_token_id=list(case.stop_token_ids) or None,
            suppress_tokens=list(case.banned) or None,
            pad_token_id=0,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            # The default of `generate`, except for one beam, which would be greedy.
            custom_generate=type(model.gpt2)._beam_search,  # pyrefly: ignore
        )
    rows = [unpadded(row, case.stop_token_ids) for row in generated.sequences[:, batch.shape[1] :].tolist()]
    pairs = list(zip(rows, generated.sequences_scores.tolist(), strict=True))
    return [pairs[first : first + width] for first in range(0, len(pairs), width)]


def unpadded(row: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    end = next((place for place, token in enumerate(row) if token in stop_token_ids), len(row))
    return row[: end + 1]


def assert_like_transformers(model: Model, case: Case) -> None:
    for prompt, expected in zip(PROMPTS, search_by_transformers(model, case), strict=True):
        found = search(model, case, prompt)
        # Scores of -1e9 in transformers are made up: copies of other hypotheses, or texts with banned tokens.
        possible = [(tokens, score) for tokens, score in expected if score > -1e6]
        assert [list(each.token_ids) for each in found[: len(possible)]] == [tokens for tokens, _ in possible], case
        assert [each.score for each in found[: len(possible)]] == pytest.approx([s for _, s in possible], abs=1e-4)
        assert len(found) == case.parameters.width
        assert set(found[len(possible) :]) <= set(found[: len(possible)])
        for each in found:
            length = len(each.token_ids)
            assert each.ended_by_token == (each.token_ids[-1] in case.stop_token_ids)
            assert each.score == pytest.approx(each.cumulative_logprob / length**case.parameters.length_penalty)


@pytest.mark.parametrize("width", [1, 2, 3, 6])
@pytest.mark.parametrize("num_stops", range(3))
def test_hypotheses_and_scores_are_those_of_transformers(model, width, num_stops):
    for place, (length_penalty, early_stopping) in enumerate(product(LENGTH_PENALTIES, EarlyStopping)):
        # Each penalty with one kind of early stopping, over all widths and stop tokens.
        if (place // len(EarlyStopping) + place + width + num_stops) % len(EarlyStopping):
            continue
        parameters = BeamParameters(width, length_penalty, early_stopping)
        assert_like_transformers(model, Case(parameters, OFTEN_STOPS[:num_stops]))


# With TRUE, transformers may end the search for copies that it counts as finished; here only real texts count.
@pytest.mark.parametrize("early_stopping", [EarlyStopping.FALSE, EarlyStopping.NEVER])
@pytest.mark.parametrize("allowed", [(4, 6), (4, 13, 1), (6,), (4,)])
def test_where_fewer_texts_than_beams_are_possible_the_real_ones_are_those_of_transformers(
    model, allowed, early_stopping
):
    banned = [token for token in range(VOCAB_SIZE) if token not in allowed]
    for width, max_tokens in product((2, 4, 6), (1, 2, 4)):
        parameters = BeamParameters(width, early_stopping=early_stopping)
        assert_like_transformers(model, Case(parameters, OFTEN_STOPS, banned=banned, max_tokens=max_tokens))
