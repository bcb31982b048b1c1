"""`python -m tests.support.apart_worker`: the real worker, as a rank that shares no memory with the others.

Ranks of one model on several machines, or in separate containers, share none.
"""

import sys

from worker_svc.__main__ import main
from worker_svc.parallel import rendezvous


def keep_apart() -> None:
    """Prevents this process from finding memory that another rank shares."""
    rendezvous._open_memory = lambda name, size: None


if __name__ == "__main__":
    keep_apart()
    sys.exit(main())
