"""A worker whose first word says how it exchanges tensors as a rank: by `memory` that ranks share or by `messages`."""

import sys

from tests.support.apart_worker import keep_apart
from worker_svc.__main__ import main

if __name__ == "__main__":
    by, *flags = sys.argv[1:]
    if by == "messages":
        keep_apart()
    sys.exit(main(flags))
