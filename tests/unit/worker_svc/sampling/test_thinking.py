"""The limit of reasoning: tokens that must follow, in rows with and without a constraint; and named log
probabilities."""

import numpy as np
import pytest
import torch

from quire.common.v1.common_pb2 import Constraint
from quire.constraints.thinking import ThinkingLimit, ThinkingState
from tests.support.constraints import spelled, vocabulary
from tests.support.sampling import make_sampling
from tests.unit.worker_svc.sampling.test_constraints import EOS_ID, FollowingMatchers, allowed, assign, changes, step
from worker_svc.sampling.constraints import TemplateCache
from worker_svc.sampling.logprobs import logprobs_of
from worker_svc.step import RowConstraint, RowSampling, SetTokens

HELD = vocabulary("byte level")
END = tuple(spelled("</t>"))


def limited(budget: int, constraint: Constraint | None = None, **changed) -> RowSampling:
    limit = ThinkingLimit(b"<t>", b"</t>", END, budget)
    return make_sampling(constraint=RowConstraint(constraint, (EOS_ID,), thinking=limit), **changed)


@pytest.fixture
def matchers():
    matchers = FollowingMatchers(TemplateCache(lambda: HELD), len(HELD.token_bytes))
    yield matchers
    matchers.close()


@pytest.mark.parametrize(
    ("prompt", "output", "forced"),
    [
        ("hi<t>", "abc", "</t>"),
        ("hi<t>", "ab", ""),
        # An end that has begun goes on; a similar text does not.
        ("hi<t>", "ab<", "/t>"),
        ("hi<t>", "a</", "t>"),
        ("hi<t>", "</</", "t>"),
        ("hi<t>", "abc<", "/t>"),
        ("hi<t>", "abc<<", "/t>"),
        # The reasoning is over, or has not begun; a mark may lie across prompt and output.
        ("hi<t>", "a</t>abcdef", ""),
        ("hi<t>x</t>", "abcdef", ""),
        ("hi", "abcdef<t>ab", ""),
        ("hi", "abcdef<t>abc", "</t>"),
        ("hi<", "t>abc", "</t>"),
        ("</t>", "<t>abc", "</t>"),
        # All parts of the reasoning count together.
        ("", "<t>ab</t>x<t>", "</t>"),
    ],
)
def test_the_end_of_the_reasoning_is_forced_after_the_limit(prompt: str, output: str, forced: str) -> None:
    state = ThinkingState(ThinkingLimit(b"<t>", b"</t>", END, 3), HELD.token_bytes, spelled(prompt))
    *first, last = spelled(output)
    for token_id in first:
        state.consume(token_id)
    other = state.copy()
    for each in (state, other):
        each.consume(last)
        assert each.forced == tuple(spelled(forced))


def test_rows_are_free_up_to_the_limit_and_follow_forks_drafts_and_replaced_tokens(matchers) -> None:
    made = changes(assign(0, limited(1), "<t>"), assign(1, limited(9), "<t>"))
    assert step(matchers, made, [0, 1], "xx") == {}
    assert step(matchers, changes(fork=[(0, 2)]), [0, 1, 2], "<x<") == {0: {b"<"}, 2: {b"<"}}
    # Row 0 has drafts: each is allowed only after the earlier ones.
    masks = matchers.start(changes(), [0, 0, 0, 0], np.array([0, *spelled("/t>")], np.int32))
    assert masks is not None
    assert allowed(masks.result()) == {0: {b"/"}, 1: {b"t"}, 2: {b">"}}
    assert matchers.forced([0, 1, 2]) == {0: spelled("/t>"), 2: spelled("/t>")}
    beam = limited(2, num_candidates=4)
    assert step(matchers, changes(assign(0, beam, "<t>ab"), release=[0]), [0]) == {0: {b"<"}}
    taken_back = SetTokens(0, len(spelled("the<t>")), np.array(spelled("c"), np.int32))
    assert step(matchers, changes(set_tokens=[taken_back]), [0]) == {}


def test_a_constraint_of_the_answer_begins_behind_a_forced_end_and_one_of_all_text_goes_before(matchers) -> None:
    answer = Constraint(regex="yes", begins_after="</t>")
    made = changes(assign(0, limited(1, answer), "<t>a"), assign(1, limited(0, Constraint(regex="<t>a+")), "<t>a"))
    assert step(matchers, made, [0, 1], "<a") == {0: {b"<"}, 1: {b"a", b"</s>"}}
    for character in "/t>":
        assert step(matchers, changes(), [0], character) == {0: {character.encode()}}
    assert step(matchers, changes(), [0]) == {0: {b"y"}}


def test_named_tokens_take_the_place_of_the_most_likely_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0], [0.0, 3.0, 2.0, 1.0]])
    named = {1: np.array([3, 0], np.int32)}
    values = logprobs_of(logits, torch.tensor([1, 1]), np.zeros(2), 2, named)
    assert values.top_token_ids.tolist() == [[1, 2], [3, 0]]
    assert torch.equal(values.top_logprobs, logits.log_softmax(1).gather(1, values.top_token_ids))
