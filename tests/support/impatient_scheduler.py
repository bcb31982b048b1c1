"""`python -m tests.support.impatient_scheduler`: the real scheduler, for which few losses of a worker prove a fault."""

import sys

from scheduler_svc.__main__ import main
from scheduler_svc.core import fault_isolation

if __name__ == "__main__":
    fault_isolation.LOSSES_BEFORE_TRIALS = fault_isolation.LOSSES_ON_TRIAL = 1
    sys.exit(main())
