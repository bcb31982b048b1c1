"""Becomes a service of the release that a file names: `python -I -S service_of_release.py FILE MODULE FLAG...`.

FILE has two lines, the interpreter and the folder of the code (tests.support.releases). It is read at each start, so
that a supervisor's next start can be another release. Each release has a supervisor of its own; today's passes flags
that an earlier release does not have, and these are left out.
"""

import os
import subprocess
import sys


def main(file: str, module: str, *flags: str) -> None:
    with open(file, encoding="utf-8") as lines:  # noqa: PTH123  (pathlib takes as long to import as all of this)
        python, code = lines.read().splitlines()
    os.environ["PYTHONPATH"] = code
    if not __file__.startswith(code):
        command = [python, "-P", "-m", module, "--help"]
        known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        flags = tuple(flag for flag in flags if flag.partition("=")[0] in known)
    os.execv(python, [python, "-P", "-m", module, *flags])


if __name__ == "__main__":
    main(*sys.argv[1:])
