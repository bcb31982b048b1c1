"""Log probabilities of prompt tokens, on their way from the worker's rows to the gateways' requests.

They pass the core by: nothing is decided by them. They reach a gateway before the first generated token of their
request, so a sequence that has output is never asked for them again (`worker_convert`). A prompt that is computed again
before that is reported again, and the gateway takes each position once.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from quire.logprob_columns import LogprobColumns
from scheduler_svc.core.batch import RowTable
from scheduler_svc.core.request import Handle, Request
from scheduler_svc.core.step import StepPlan


@dataclass(frozen=True, slots=True)
class RowPromptLogprobs:
    """Consecutive prompt tokens of a row."""

    row: int
    first_position: int
    columns: LogprobColumns

    def of(self, request: Request) -> "PromptLogprobs":
        """As the request's, whose prompt is in the row. Raises ValueError where it has no such positions."""
        first, end = self.first_position, self.first_position + len(self.columns)
        if not 1 <= first <= end <= len(request.prompt):
            raise ValueError(
                f"row {self.row} reports positions {first} to {end} of {len(request.prompt)} prompt tokens"
            )
        return PromptLogprobs(request.key.handle, first, request.prompt[first:end], self.columns)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Consecutive prompt tokens of a request."""

    handle: Handle
    first_position: int
    token_ids: SequenceOf[int]
    columns: LogprobColumns

    @property
    def end(self) -> int:
        """The position behind the last of them."""
        return self.first_position + len(self.columns)

    def since(self, position: int) -> "PromptLogprobs | None":
        """What is of no earlier position; None where that is nothing."""
        if position <= self.first_position:
            return self
        if position >= self.end:
            return None
        known = position - self.first_position
        columns = self.columns.part(known, len(self.columns))
        return PromptLogprobs(self.handle, position, self.token_ids[known:], columns)


class PromptLogprobsRouter:
    """Knows, for each step in flight, whose prompt is in the rows that were asked for log probabilities."""

    def __init__(self) -> None:
        self._asked: dict[int, Request] = {}
        self._by_step: dict[int, Mapping[int, Request]] = {}

    def planned(self, plan: StepPlan, rows: RowTable) -> None:
        """A step goes out. To be called before anything else changes the rows."""
        for row in plan.release.tolist():
            self._asked.pop(row, None)
        for assigned in plan.assign:
            sequence = rows.sequences[assigned.row]
            if assigned.sampling.prompt_logprobs is not None and sequence is not None:
                self._asked[assigned.row] = sequence.request
        if self._asked:
            self._by_step[plan.step_id] = dict(self._asked)

    def answered(self, step_id: int, reports: Iterable[RowPromptLogprobs]) -> list[PromptLogprobs]:
        """The step's reports, by request. Raises ValueError for a report that no request asked for."""
        asked = self._by_step.pop(step_id, {})
        routed: list[PromptLogprobs] = []
        for report in reports:
            request = asked.get(report.row)
            if request is None:
                raise ValueError(f"step {step_id} reports prompt logprobs of row {report.row}, which was not asked")
            routed.append(report.of(request))
        return routed

    def clear(self) -> None:
        """Forgets all steps, as when a worker was lost."""
        self._asked.clear()
        self._by_step.clear()
