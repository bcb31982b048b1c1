"""A service of another release: `python -m tests.support.versioned_service FILE MODULE FLAG...`.

Runs MODULE, which speaks those versions of its contracts that FILE names when it starts: "OLDEST NEWEST".
"""

import runpy
import sys
from pathlib import Path

from quire import compatibility


def main(versions: str, module: str, *flags: str) -> None:
    oldest, newest = map(int, Path(versions).read_text().split())
    spoken = compatibility.ProtocolVersions(oldest, newest)
    compatibility.SCHEDULER_PROTOCOL = compatibility.WORKER_PROTOCOL = spoken
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
