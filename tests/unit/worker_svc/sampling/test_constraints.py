"""Matchers follow their rows, and masks allow only the tokens that may follow."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from quire.common.v1.common_pb2 import Constraint
from quire.constraints.matcher import Vocabulary
from tests.support.constraints import spelled, vocabulary
from tests.support.sampling import make_columns, make_row_sampling, make_sampling
from worker_svc.device.rows import Rows
from worker_svc.sampling.constraints import Masks, RowMatchers, TemplateCache, Terms, exclude
from worker_svc.sampling.logit_rules import History, apply_logit_rules
from worker_svc.sampling.logprobs import gather_candidates
from worker_svc.sampling.sampler import draw
from worker_svc.step import AssignRow, LogitRules, RowChanges, RowConstraint, RowSampling, SetTokens

HELD = vocabulary("byte level")
EOS_ID = next(iter(HELD.eos))
NONE = np.zeros(0, np.int32)
PAIRS = np.zeros((0, 2), np.int32)
PROMPT = spelled("the")


class FollowingMatchers(RowMatchers):
    """Matchers with rows, which know the constrained ones."""

    def __init__(self, templates: TemplateCache, host_width: int | None = None) -> None:
        super().__init__(templates, num_threads=1, host_width=host_width)
        self._held = Rows(4, 16, 1, torch.device("cpu"))

    def start(self, made: RowChanges, samplers: list[int], inputs: np.ndarray | None = None) -> "Future[Masks] | None":
        self._held.apply_row_changes(made)
        return self.start_masks(made, np.array(samplers, np.int32), self._held.sampling.has_constraint, inputs)


@pytest.fixture
def matchers():
    matchers = FollowingMatchers(TemplateCache(lambda: HELD))
    yield matchers
    matchers.close()


def constrained(regex: str, **changes) -> RowSampling:
    return make_sampling(constraint=RowConstraint(Constraint(regex=regex), (EOS_ID,), **changes))


def assign(row: int, sampling: RowSampling, output: str = "") -> AssignRow:
    token_ids = np.array([*PROMPT, *spelled(output)], np.int32)
    return AssignRow(row, token_ids, NONE, sampling, len(PROMPT))


def changes(*assigned: AssignRow, release: Any = NONE, fork: Any = PAIRS, set_tokens=()) -> RowChanges:
    as_ids = np.array(release, np.int32)
    return RowChanges(as_ids, assigned, np.array(fork, np.int32), (), tuple(set_tokens), np.zeros((0, 3), np.int32))


def allowed(masks: Masks | None) -> dict[int, set[bytes]]:
    """The texts that may follow, by sample place."""
    if masks is None:
        return {}
    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
    return {
        place: {HELD.token_bytes[token_id] for token_id in np.flatnonzero(row)}
        for place, row in zip(masks.places.tolist(), bits, strict=True)
    }


def step(matchers: FollowingMatchers, made: RowChanges, samplers: list[int], draws: str = "") -> dict[int, set[bytes]]:
    """Tokens that may follow in one step, in which the rows draw these characters in turn."""
    rows = np.array(samplers, np.int32)
    masks = matchers.start(made, samplers)
    found = allowed(None if masks is None else masks.result())
    if masks is not None and draws:
        ids = np.array([spelled(character)[0] for character in draws])
        matchers.record_draws(rows, lambda: ids)
    return found


def test_a_row_goes_on_by_the_tokens_that_it_draws(matchers) -> None:
    assert step(matchers, changes(assign(3, constrained("abc"))), [3], "a") == {0: {b"a"}}
    assert step(matchers, changes(), [3], "b") == {0: {b"b"}}
    assert step(matchers, changes(), [3], "c") == {0: {b"c"}}
    assert step(matchers, changes(), [3]) == {0: {b"</s>"}}


def test_a_row_that_is_assigned_with_output_goes_on_after_it(matchers) -> None:
    made = changes(assign(0, constrained("abcd"), "ab"), assign(1, constrained("x+")))
    assert step(matchers, made, [1, 0], "xc") == {0: {b"x"}, 1: {b"c"}}
    assert step(matchers, changes(release=[0]), [1]) == {0: {b"x", b"</s>"}}
    assert step(matchers, changes(assign(0, constrained("abcd"), "abc")), [0]) == {0: {b"d"}}


def test_rows_without_a_constraint_have_no_masks(matchers) -> None:
    plain = make_sampling()
    assert matchers.start(changes(assign(0, plain)), [0]) is None
    found = step(matchers, changes(assign(1, constrained("a"))), [0, 1], "xa")
    assert found == {1: {b"a"}}
    assert step(matchers, changes(), [0]) == {}
    # The row gets another sequence.
    assert step(matchers, changes(assign(1, plain), release=[1]), [0, 1]) == {}


def test_forks_are_independent_and_parents_are_read_before_children_are_written(matchers) -> None:
    made = changes(assign(0, constrained("a[bc]d")), assign(1, constrained("xy")))
    assert step(matchers, made, [0, 1], "ax") == {0: {b"a"}, 1: {b"x"}}
    # The two rows are exchanged.
    assert step(matchers, changes(fork=[(0, 1), (1, 0)]), [0, 1], "yb") == {0: {b"y"}, 1: {b"b", b"c"}}
    assert step(matchers, changes(fork=[(1, 2)]), [1, 2]) == {0: {b"d"}, 1: {b"d"}}


def test_replaced_tokens_take_a_row_back_and_forward(matchers) -> None:
    beam = make_sampling(constraint=RowConstraint(Constraint(regex="(ab|ac)*"), (EOS_ID,)), num_candidates=4)
    first = step(matchers, changes(assign(0, beam)), [0], "a")
    assert first == {0: {b"a", b"</s>"}}
    # A row that reports candidates draws no token.
    end = len(PROMPT)

    def replaced(position: int, text: str) -> RowChanges:
        return changes(set_tokens=[SetTokens(0, position, np.array(spelled(text), np.int32))])

    assert step(matchers, replaced(end, "a"), [0]) == {0: {b"b", b"c"}}
    assert step(matchers, replaced(end + 1, "c"), [0]) == {0: {b"a", b"</s>"}}
    assert step(matchers, replaced(end, "aba"), [0]) == {0: {b"b", b"c"}}


def test_the_end_waits_for_min_tokens_while_the_text_can_go_on(matchers) -> None:
    made = changes(assign(0, constrained("a{1,3}", min_tokens=2)), assign(1, constrained("a", min_tokens=9), "a"))
    assert step(matchers, made, [0, 1], "aa") == {0: {b"a"}, 1: {b"</s>"}}
    assert step(matchers, changes(), [0], "a") == {0: {b"a"}}
    assert step(matchers, changes(), [0]) == {0: {b"a", b"</s>"}}


def test_a_row_without_a_possible_token_fails_alone_and_says_why(matchers) -> None:
    made = changes(assign(0, constrained("abc"), "x"), assign(1, constrained("(")), assign(2, constrained("ab"), "a"))
    masks = matchers.start(made, [0, 1, 2])
    assert masks is not None
    held = masks.result()
    columns = make_columns([constrained("abc")] * 3)
    held.refuse(columns)
    assert columns.is_refused.tolist() == [True, True, False]
    assert "cannot follow" in columns.refusal[0]
    assert "unclosed group" in columns.refusal[1]
    assert allowed(held)[2] == {b"b"}


def test_a_vocabulary_that_cannot_be_read_fails_constrained_rows_alone() -> None:
    def broken() -> Vocabulary:
        raise ValueError("no decoder")

    matchers = FollowingMatchers(TemplateCache(broken))
    masks = matchers.start(changes(assign(0, constrained("a"))), [0])
    assert masks is not None
    assert "no decoder" in masks.result().errors[0]
    matchers.close()


def test_tokens_that_do_not_arrive_fail_the_next_step(matchers) -> None:
    """Matchers would lag behind their rows. The scheduler then assigns all rows anew."""
    rows = np.array([0])
    assert step(matchers, changes(assign(0, constrained("ab"))), [0]) == {0: {b"a"}}

    def lost() -> np.ndarray:
        raise RuntimeError("the device is gone")

    matchers.record_draws(rows, lost)
    masks = matchers.start(changes(), [0])
    assert masks is not None
    with pytest.raises(RuntimeError, match="the device is gone"):
        masks.result()
    assert step(matchers, changes(assign(0, constrained("ab"), "a")), [0]) == {0: {b"b"}}


@pytest.mark.parametrize(("cache_bytes", "num_kept"), [(3 * 4200, 3), (1, 2)])
def test_compiled_constraints_are_shared_by_content_and_bounded_but_the_last_ones_are_kept(
    monkeypatch, cache_bytes, num_kept
) -> None:
    monkeypatch.setattr("worker_svc.sampling.constraints._CACHE_BYTES", cache_bytes)
    monkeypatch.setattr("worker_svc.sampling.constraints.MIN_KEPT", 2)
    cache = TemplateCache(lambda: HELD)
    compiled = {regex: cache.get(Constraint(regex=regex)) for regex in "abcd"}
    for each in compiled.values():
        each.result()
    for regex in "dcba"[:num_kept]:
        assert cache.get(Constraint(regex=regex)) is compiled[regex], regex
    assert cache.get(Constraint(regex="a")) is not compiled["a"]
    cache.close()


def test_what_was_prepared_is_there_when_a_row_needs_it() -> None:
    cache = TemplateCache(lambda: HELD)
    prepared = cache.prepare(make_row_sampling(constraint=Constraint(regex="a")))
    assert prepared is cache.get(Constraint(regex="a"))
    assert cache.prepare(make_row_sampling()) is None
    assert cache.prepare(b"\xff\xff") is None
    cache.close()


@pytest.mark.parametrize("density", [0.0, 0.001, 0.5, 0.99, 1.0])
@pytest.mark.parametrize(("vocab_size", "num_words"), [(4096, 128), (4100, 129), (4099, 129), (4200, 129)])
def test_masks_leave_the_logits_of_allowed_tokens_alone(density, vocab_size, num_words) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((5, vocab_size), np.float32))
    bits = np.packbits(rng.random((2, num_words * 32)) < density, axis=1, bitorder="little").view(np.int32)
    is_allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").astype(bool)[:, :vocab_size]
    is_allowed = np.pad(is_allowed, ((0, 0), (0, max(0, vocab_size - is_allowed.shape[1]))))
    expected = logits.clone()
    places = np.array([3, 1])
    for place, row in zip(places, is_allowed, strict=True):
        expected[place, ~torch.from_numpy(row)] = -torch.inf
    on_device = logits.clone()
    Masks(places, bits, {}).exclude_tokens(logits)
    assert torch.equal(logits, expected)
    exclude(on_device, torch.from_numpy(places), torch.from_numpy(bits))
    assert torch.equal(on_device, expected)


def test_terms_follow_masks_from_step_to_step() -> None:
    terms, rng = Terms(300), np.random.default_rng(0)
    bits = rng.integers(-(2**31), 2**31, (4, 10), np.int64).astype(np.int32)
    for count in (2, 4, 3, 4):
        bits[rng.integers(4)] ^= 1 << int(rng.integers(31))
        is_allowed = np.unpackbits(bits[:count].view(np.uint8), axis=1, bitorder="little")[:, :300].astype(bool)
        assert np.array_equal(terms.from_masks(bits[:count]), np.where(is_allowed, 0, -np.inf))


def test_candidates_of_a_constrained_row_are_log_probabilities_of_all_tokens() -> None:
    """Same as in transformers: a constraint excludes hypotheses, and does not change the scores of the others."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((2, 320), np.float32))
    expected = logits.log_softmax(dim=1)
    mask = HELD.mask_of([5, 7])[None]
    columns = make_columns([make_sampling(num_candidates=2, constraint=constrained("a").constraint), make_sampling()])
    history = History(torch.zeros((2, 4), dtype=torch.int32), np.arange(2), np.zeros(2, np.int64), np.ones(2, np.int64))
    plain = logits[1].clone()
    apply_logit_rules(logits, columns, history, Masks(np.array([0]), mask, {}))
    assert logits[0].isfinite().nonzero().squeeze(1).tolist() == [5, 7]
    assert torch.equal(logits[0, [5, 7]], expected[0, [5, 7]])
    assert torch.equal(logits[1], plain)
    candidates = gather_candidates(logits, columns)
    assert candidates is not None
    assert torch.equal(candidates.logprobs[0], expected[0, candidates.token_ids[0]])


def test_a_constraint_that_allows_a_beam_no_token_leaves_it_candidates_that_are_banned() -> None:
    logits, nothing = torch.zeros((1, 320)), np.zeros_like(HELD.mask_of([]))[None]
    columns = make_columns([make_sampling(num_candidates=2, constraint=constrained("a").constraint)])
    history = History(torch.zeros((1, 4), dtype=torch.int32), np.arange(1), np.zeros(1, np.int64), np.ones(1, np.int64))
    apply_logit_rules(logits, columns, history, Masks(np.array([0]), nothing, {}))
    assert draw(logits, columns, np.ones(1, np.int64)).is_finite.tolist() == [True]
    candidates = gather_candidates(logits, columns)
    assert candidates is not None
    assert candidates.logprobs.tolist() == [[-torch.inf, -torch.inf]]


def test_other_rules_apply_to_the_tokens_that_are_left() -> None:
    logits = torch.zeros((1, 320))
    rules = LogitRules(bias_token_ids=np.array([5, 6], np.int32), bias_values=np.array([2, 3], np.float32))
    columns = make_columns([make_sampling(rules=rules, constraint=constrained("a").constraint)])
    history = History(torch.zeros((1, 4), dtype=torch.int32), np.arange(1), np.zeros(1, np.int64), np.ones(1, np.int64))
    apply_logit_rules(logits, columns, history, Masks(np.array([0]), HELD.mask_of([5, 7])[None], {}))
    assert {index: float(logits[0, index]) for index in (5, 6, 7)} == {5: 2.0, 6: -torch.inf, 7: 0.0}
