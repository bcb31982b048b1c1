"""The parts of a step of the core that `bench.parts` measures."""

from bench.parts import Part
from scheduler_svc.core.admission import TokenShares
from scheduler_svc.core.batch import Batch
from scheduler_svc.core.results import Results
from scheduler_svc.core.scheduler import Scheduler

CORE_PARTS = (
    Part("make room", Scheduler, "_displace"),
    Part("make room", Scheduler, "_preempt_for_decodes"),
    Part("decodes", Batch, "add_decodes"),
    Part("prefills and admission", Scheduler, "_swap_in"),
    Part("prefills and admission", TokenShares, "add_prefills"),
    Part("prefills and admission", Scheduler, "_admit"),
    Part("commit", Scheduler, "_commit"),
    Part("rest of schedule", Scheduler, "schedule"),
    Part("seal", Results, "_seal"),
    Part("ends", Results, "_end"),
    Part("ends", Batch, "end"),
    Part("tokens", Scheduler, "apply"),
)
