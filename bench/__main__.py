"""Runs one benchmark: `python -m bench NAME [flags]`."""

import argparse
import importlib
import sys
from pathlib import Path

BENCHMARKS = (
    "blocks",
    "control",
    "core",
    "embeddings",
    "exactness",
    "floors",
    "gpu",
    "hostile",
    "hostile_files",
    "kernels",
    "kills",
    "llama_cpp",
    "neighbours",
    "reservations",
    "serve_overhead",
    "servers",
    "soak",
    "stages",
    "states",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", usage="python -m bench NAME [flags]")
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    name, flags = parser.parse_args(sys.argv[1:2]).name, sys.argv[2:]
    # The others are not imported: some import torch, whose memory and start time must not be measured.
    module = importlib.import_module(f"bench.{name}")
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", description=module.__doc__)
    module.add_arguments(parser)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    module.main(parser.parse_args(flags))


if __name__ == "__main__":
    main()
