"""The parts of a step of the core that `bench.parts` measures."""

from bench.parts import Part
from scheduler_svc.core.admission import TokenShares
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.results import Results
from scheduler_svc.core.running_batch import Batch
from scheduler_svc.core.scheduler import Scheduler


def core_parts(scheduler: Scheduler) -> tuple[Part, ...]:
    """The parts of each step of this core."""
    return (
        Part("make room", Planner, "_displace"),
        Part("make room", Planner, "_preempt_for_decodes"),
        Part("decodes", Batch, "add_decodes"),
        Part("prefills and admission", Planner, "_resume_swapped"),
        Part("prefills and admission", TokenShares, "add_prefills"),
        Part("prefills and admission", Planner, "_admit"),
        Part("commit", Planner, "_commit"),
        Part("rest of schedule", scheduler, "schedule"),
        Part("seal", Results, "_seal"),
        Part("ends", Results, "_end_groups"),
        Part("ends", Batch, "end"),
        Part("tokens", scheduler, "apply"),
    )
