"""Judgements of answers, differences of texts, and medians."""

import pytest

from quire_torture.answers import Answer, Reading
from quire_torture.oracle import Oracle, Verdict, difference
from quire_torture.shrinking import fewest
from quire_torture.statistics import median_of
from quire_torture.traffic import KINDS, Limits, draw_calls, draw_questions

TEXT = "Once upon a time there was a girl who had a red ball and a dog."


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (TEXT[:30], Verdict.LOST),
        (TEXT.replace(" there", ""), Verdict.LOST),
        (TEXT.replace(" there", "").replace(" red", ""), Verdict.LOST),
        (TEXT.replace(" upon", " upon upon"), Verdict.REPEATED),
        (TEXT.replace("a girl", "a little girl"), Verdict.CHANGED),
        (TEXT.replace("red", "blue"), Verdict.CHANGED),
        (TEXT.replace("girl who", "who girl"), Verdict.REORDERED),
    ],
)
def test_difference_of_texts(text: str, verdict: Verdict) -> None:
    assert difference(TEXT, text) is verdict


def read(text: str, *, usage: tuple[int, int, int] = (3, 2, 5), is_done: bool = True) -> Answer:
    reading = Reading(num_choices=1, is_stream=True)
    reading.add({"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]})
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    reading.add({"choices": [], "usage": dict(zip(names, usage, strict=True))})
    if is_done:
        reading.done()
    return reading.answer()


def test_answers_are_judged_by_those_to_single_requests() -> None:
    question, other = draw_questions(0, 2, Limits(), ["completion stream"])
    expected = {question.number: read(TEXT), other.number: read("x")}
    oracle = Oracle(expected, {each.number: each.canary for each in (question, other)})

    def verdicts(answer: Answer, *, is_partial: bool = False) -> list[Verdict]:
        return [each.verdict for each in oracle.judge(question, answer, is_partial=is_partial)]

    assert verdicts(read(TEXT)) == []
    assert verdicts(read(TEXT, is_done=False)) == [Verdict.LOST]
    assert verdicts(read(TEXT, usage=(3, 2, 6))) == verdicts(read(TEXT, usage=(4, 2, 6))) == [Verdict.USAGE]
    assert verdicts(read(TEXT, usage=(3, 3, 6))) == [Verdict.USAGE]
    assert Verdict.CONTAMINATED in verdicts(read(f"{TEXT} {other.canary}"))
    assert verdicts(read(TEXT[:20], is_done=False), is_partial=True) == []
    assert verdicts(read(TEXT[:20] + "?", is_done=False), is_partial=True) == [Verdict.CHANGED]


def test_rules_of_streams_are_checked() -> None:
    reading = Reading(num_choices=1, is_stream=True)
    reading.add({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]})
    reading.add({"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}]})
    reading.add({"choices": [{"index": 1, "delta": {}}]})
    reading.done()
    reading.done()
    breaches = " ".join(reading.answer().breaches)
    assert all(part in breaches for part in ("after the end", "two ends", "a second [DONE]", "choices [0, 1] of 1"))
    with pytest.raises(ValueError, match="KeyError"):
        reading.add({"choices": [{}]})


def test_same_seed_draws_the_same_traffic_and_each_canary_is_in_one_question() -> None:
    limits = Limits(api_keys=("a", "b"))
    questions = draw_questions(3, 30, limits)
    assert questions == draw_questions(3, 30, limits)
    assert {each.kind for each in questions} == set(KINDS)
    for each in questions:
        assert not any(each.canary in str(other.body) for other in questions if other is not each)
    calls = [call for call, _ in zip(draw_calls(3, questions, limits), range(200), strict=False)]
    assert [next(draw_calls(3, questions, limits, first=number)) for number in range(200)] == calls
    assert {call.api_key for call in calls} == {"a", "b"}
    assert any(call.pause_s for call in calls)
    assert any(call.leaves_after for call in calls)


def test_median_has_the_interval_of_order_statistics() -> None:
    median = median_of(range(1, 21))
    assert (median.value, median.low, median.high) == (10.5, 6, 15)
    assert (median_of([3.0, 1.0]).low, median_of([3.0, 1.0]).high) == (1.0, 3.0)
    assert median_of([]) is None


def test_fewest_parts_that_still_fail() -> None:
    assert fewest(tuple(range(50)), lambda parts: {7, 31} <= set(parts)) == (7, 31)
