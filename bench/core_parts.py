"""The parts of a step, as the core has them."""

from bench.parts import Part
from scheduler_svc.core import scheduler
from scheduler_svc.core.admission import Admission
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.results import Results
from scheduler_svc.core.state import SchedulerState

CORE_PARTS = (
    Part("make room", Admission, "displace"),
    Part("make room", Preemption, "make_room_for_decodes"),
    Part("decodes", scheduler, "plan_decodes"),
    Part("prefills and admission", scheduler, "plan_prefills"),
    Part("prefills and admission", Admission, "swap_in"),
    Part("prefills and admission", Admission, "admit"),
    Part("commit", scheduler.Scheduler, "_commit"),
    Part("rest of schedule", scheduler.Scheduler, "schedule"),
    Part("seal", Results, "_seal"),
    Part("ends", Results, "_end"),
    Part("ends", SchedulerState, "end"),
    Part("tokens", scheduler.Scheduler, "apply"),
)
