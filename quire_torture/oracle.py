"""Judges answers: compares each with the answer of an undisturbed run of the same server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from quire_torture.answers import Answer, Choice
from quire_torture.traffic import Question, fits_schema

_SHOWN = 48
_MIN_ALIKE = 24
"""Characters that two texts must share before one counts as like the other."""


class Verdict(StrEnum):
    """A defect of an answer that the server calls complete, or of its end."""

    LOST = "lost"
    """Text is missing, or the stream ended without an end."""
    REPEATED = "repeated"
    REORDERED = "reordered"
    CHANGED = "changed"
    CONTAMINATED = "contaminated"
    """It has the canary of another question."""
    DRIFTED = "drifted"
    """The same text, with other log probabilities."""
    USAGE = "usage"
    """The usage does not add up, or differs for the same text."""
    MALFORMED = "malformed"
    HUNG = "hung"
    ERROR = "error"
    """The server or the connection reports that the request failed."""


WRONG = frozenset(Verdict) - {Verdict.ERROR}
"""Verdicts that no fault excuses: the caller cannot see that the answer is wrong, or gets none."""

BATCHING = frozenset({Verdict.CHANGED, Verdict.DRIFTED})
"""Verdicts that batching explains on servers whose sums depend on the other requests of a batch."""


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class Oracle:
    """Answers of the undisturbed run.

    Attributes:
        expected: By the number of the question; a question whose two answers differ while nothing else runs has None:
            only its form is checked.
        canaries: The canary of each question, by its number.
        max_drift: Maximum difference of log probabilities.
    """

    expected: Mapping[int, Answer | None]
    canaries: Mapping[int, str]
    max_drift: float = 0.0

    def judge(self, question: Question, answer: Answer, *, is_partial: bool = False) -> list[Finding]:
        """The defects of an answer; a partial one broke or was left, and must be the beginning of the expected."""
        findings = [Finding(Verdict.MALFORMED, each) for each in answer.breaches]
        said = "".join(choice.text for choice in answer.choices.values())
        expected = self.expected[question.number]
        known = "" if expected is None else "".join(choice.text for choice in expected.choices.values())
        for number, canary in self.canaries.items():
            if number != question.number and canary in said and canary not in known:
                findings.append(Finding(Verdict.CONTAMINATED, f"{canary} is of question {number}: {_shown(said)}"))
        if not is_partial and not answer.is_complete:
            missing = "an end of a choice" if answer.choices else "all choices"
            findings.append(Finding(Verdict.LOST, f"the answer ended without {missing} or [DONE]"))
            return findings
        if not is_partial and question.kind == "a JSON schema":
            findings += [
                Finding(Verdict.MALFORMED, f"not of the schema: {_shown(choice.text)}")
                for choice in answer.choices.values()
                if choice.end == "stop" and not fits_schema(choice.text)
            ]
        if not is_partial:
            findings += _usage(answer, expected)
        if expected is not None:
            for index, choice in answer.choices.items():
                if index in expected.choices:
                    findings += self._compare(expected.choices[index], choice, is_partial)
        return findings

    def _compare(self, expected: Choice, choice: Choice, is_partial: bool) -> list[Finding]:
        if is_partial:
            if expected.text.startswith(choice.text):
                return []
            expected_text = expected.text[: len(choice.text) + _MIN_ALIKE]
            verdict = difference(expected_text, choice.text)
            # The end is missing in any case.
            return [Finding(verdict, _became(expected.text, choice.text))]
        if choice.text != expected.text:
            return [Finding(difference(expected.text, choice.text), _became(expected.text, choice.text))]
        if (choice.calls, choice.end) != (expected.calls, expected.end):
            became = f"{(expected.calls, expected.end)} became {(choice.calls, choice.end)}"
            return [Finding(Verdict.CHANGED, became)]
        if (drift := logprob_drift(expected, choice)) > self.max_drift:
            return [Finding(Verdict.DRIFTED, f"log probabilities differ by {drift:.4g}")]
        return []

    def like(self, question: Question, answer: Answer) -> int | None:
        """The question whose expected answer has what is wrong in this one; None if there is none."""
        expected = self.expected[question.number]
        if expected is None:
            return None
        for index, choice in answer.choices.items():
            own = expected.choices[index].text if index in expected.choices else ""
            at = common_beginning(own, choice.text)
            piece = choice.text[at : at + _MIN_ALIKE]
            if len(piece) < _MIN_ALIKE or piece in own:
                continue
            for number, other in self.expected.items():
                if other is not None and any(piece in each.text for each in other.choices.values()):
                    return number
        return None


def same_answer(one: Answer, other: Answer) -> bool:
    """Whether texts, tool calls and ends are the same."""
    return one.choices.keys() == other.choices.keys() and all(
        (choice.text, choice.calls, choice.end)
        == (other.choices[index].text, other.choices[index].calls, other.choices[index].end)
        for index, choice in one.choices.items()
    )


def drift_of(one: Answer, other: Answer) -> float:
    """The largest difference of two log probabilities of the same answer."""
    return max((logprob_drift(choice, other.choices[index]) for index, choice in one.choices.items()), default=0.0)


def logprob_drift(expected: Choice, choice: Choice) -> float:
    """The largest difference of two log probabilities; infinite if their numbers differ."""
    if len(expected.logprobs) != len(choice.logprobs):
        return float("inf")
    pairs = zip(expected.logprobs, choice.logprobs, strict=True)
    return max((abs(one - other) for one, other in pairs), default=0.0)


def difference(expected: str, text: str) -> Verdict:
    """How a text differs from the expected one."""
    before = common_beginning(expected, text)
    after = common_beginning(expected[::-1], text[::-1])
    if len(text) < len(expected) and before + after >= len(text):
        return Verdict.LOST
    if len(text) > len(expected) and before + after >= len(expected):
        size = len(text) - len(expected)
        is_repeated = before >= size and text[before - size : before] == text[before : before + size]
        return Verdict.REPEATED if is_repeated else Verdict.CHANGED
    if len(text) == len(expected) and sorted(text.split()) == sorted(expected.split()):
        return Verdict.REORDERED
    if expected and _misses_pieces(expected, text):
        return Verdict.LOST
    return Verdict.CHANGED


def _misses_pieces(expected: str, text: str) -> bool:
    """Whether the text is most of the expected one, with some pieces left out."""
    if not len(expected) // 2 <= len(text) < len(expected):
        return False
    rest = iter(expected)
    return all(letter in rest for letter in text)


def common_beginning(one: str, other: str) -> int:
    """The number of characters with which both begin."""
    size = min(len(one), len(other))
    return next((at for at in range(size) if one[at] != other[at]), size)


def _usage(answer: Answer, expected: Answer | None) -> Sequence[Finding]:
    usage, known = answer.usage, None if expected is None else expected.usage
    if usage is None:
        return [Finding(Verdict.USAGE, f"none, where {known} came before")] if known is not None else []
    if usage.prompt + usage.completion != usage.total:
        return [Finding(Verdict.USAGE, f"it does not add up: {usage}")]
    if known is not None and usage.prompt != known.prompt:
        return [Finding(Verdict.USAGE, f"{usage.prompt} tokens of the prompt, which has {known.prompt}")]
    texts = {index: choice.text for index, choice in answer.choices.items()}
    before = {} if expected is None else {index: choice.text for index, choice in expected.choices.items()}
    if known is not None and texts == before and usage.completion != known.completion:
        return [Finding(Verdict.USAGE, f"{usage.completion} tokens for the text that had {known.completion}")]
    return []


def _became(expected: str, text: str) -> str:
    at = max(0, common_beginning(expected, text) - _SHOWN // 3)
    return f"at character {at}: {_shown(expected[at:])} became {_shown(text[at:])}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
