"""Makes the page docs/paper/README.md and its pictures: `python -m simulator.paper [FIGURE ...]`."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from simulator.paper.curves import Runner
from simulator.paper.figures import FIGURES

_OUT = Path(__file__).parents[2] / "docs" / "paper"


def main() -> None:
    arguments = _parser().parse_args()
    try:
        from simulator.paper.page import write
    except ModuleNotFoundError as error:
        sys.exit(f"pictures need {error.name}: pip install 'quire[bench]'")
    measured: dict[str, Any] = {}
    with Runner(arguments.jobs, arguments.scale) as runner:
        for name in arguments.figures or FIGURES:
            started = time.perf_counter()
            measured[name] = FIGURES[name].measure(runner)
            print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
            # After each, so that what is done is kept.
            write(arguments.out, {name: measured[name]})
    print(f"wrote {arguments.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator.paper", description=__doc__)
    parser.add_argument(
        "figures", nargs="*", metavar="FIGURE", choices=[*FIGURES, []], help=f"among {', '.join(FIGURES)}; default: all"
    )
    parser.add_argument("--out", type=Path, default=_OUT, help="directory of the page (default: %(default)s)")
    parser.add_argument("--jobs", type=int, help="processes (default: one for each processor)")
    parser.add_argument("--scale", type=float, default=1.0, help="shorten all loads to this share (default: 1)")
    return parser


if __name__ == "__main__":
    main()
