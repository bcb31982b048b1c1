"""Makes the page docs/paper/README.md and its pictures: `python -m simulator.paper [FIGURE ...]`."""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simulator.paper.curves import Runner
from simulator.paper.figures import FIGURES
from simulator.paper.page import redraw, write_figure, write_page

_OUT = Path(__file__).parents[2] / "docs" / "paper"


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.figures if name not in FIGURES]:
        parser.error(f"{unknown[0]} is no figure; there are {', '.join(FIGURES)}")
    try:
        import matplotlib as _  # noqa: F401, ICN001
    except ModuleNotFoundError as error:
        sys.exit(f"pictures need {error.name}: pip install 'quire-llm[bench]'")
    try:
        # Before the measurements, which take minutes.
        with _writing_to(arguments.out):
            arguments.out.mkdir(parents=True, exist_ok=True)
        _make(arguments)
    except KeyboardInterrupt:
        print("interrupted; figures that were done are written", file=sys.stderr)
        sys.exit(130)


@contextmanager
def _writing_to(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        sys.exit(f"cannot write to {directory}: {error.strerror or error}")


def _make(arguments: argparse.Namespace) -> None:
    begun = time.perf_counter()
    if arguments.redraw:
        redraw(arguments.out)
        write_page(arguments.out)
        return
    with Runner(arguments.jobs, arguments.scale) as runner:
        for name in arguments.figures or FIGURES:
            started, cpu_before = time.perf_counter(), runner.cpu_s
            data = FIGURES[name].measure(runner)
            # After each, so that what is done is kept.
            with _writing_to(arguments.out):
                write_figure(FIGURES[name], arguments.out, data, arguments.scale)
                write_page(arguments.out)
            print(_line(name, time.perf_counter() - started, runner.cpu_s - cpu_before), flush=True)
        print(_line(f"wrote {arguments.out}", time.perf_counter() - begun, runner.cpu_s))


def _line(what: str, seconds: float, cpu_s: float) -> str:
    return f"{what}: {seconds:.0f} s, {cpu_s:.0f} s of processor time"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator.paper", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"among {', '.join(FIGURES)}; default: all")
    parser.add_argument("--out", type=Path, default=_OUT, help="directory of the page (default: %(default)s)")
    parser.add_argument("--redraw", action="store_true", help="draw and write again from the data that are there")
    parser.add_argument("--jobs", type=_count, metavar="N", help="processes (default: one for each processor)")
    parser.add_argument(
        "--scale", type=_share, default=1.0, help="shorten all loads to this share; the page says so (default: 1)"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of processes; expected 1 or more")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share; expected a number above 0, at most 1")
    return share


if __name__ == "__main__":
    main()
