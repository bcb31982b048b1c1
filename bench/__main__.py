"""usage: python -m bench {split,core} [flags]   (without a name: split)"""

import argparse
import sys

from bench import core, split

BENCHMARKS = {"split": split, "core": core}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, module in BENCHMARKS.items():
        module.add_arguments(commands.add_parser(name, help=(module.__doc__ or "").splitlines()[0]))
    arguments = parser.parse_args(sys.argv[1:] or ["split"])
    BENCHMARKS[arguments.benchmark].main(arguments)


if __name__ == "__main__":
    main()
