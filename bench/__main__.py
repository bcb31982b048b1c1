"""Runs one benchmark: `python -m bench NAME [flags]`, without a name split."""

import argparse
import importlib
import sys

BENCHMARKS = (
    "split",
    "core",
    "first_tokens",
    "sharing",
    "blocks",
    "reservations",
    "soak",
    "hostile",
    "hostile_files",
    "kills",
    "control",
    "gpu",
    "kernels",
    "quality",
    "perplexity",
    "logprobs",
    "stages",
    "ranks",
    "load_cost",
    "servers",
    "grammar",
    "recording",
    "compiling",
    "programs",
    "watch",
    "routing",
    "routing_model",
    "prediction",
    "drawing",
    "adapters",
    "moves",
    "fleet",
    "contiguous",
    "virtual_pages",
    "speculation",
    "copying",
    "speculation_cost",
)


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["split", *arguments]
    name, *flags = arguments
    if name not in BENCHMARKS:
        usage = f"python -m bench {{{','.join(BENCHMARKS)}}} [flags] (none: split)"
        parser = argparse.ArgumentParser(prog="python -m bench", usage=usage)
        parser.add_argument("benchmark", choices=BENCHMARKS)
        parser.parse_args(arguments)
        return
    # Only the one that runs: some bring torch along, whose memory and start the others must not count.
    module = importlib.import_module(f"bench.{name}")
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", description=module.__doc__)
    module.add_arguments(parser)
    module.main(parser.parse_args(flags))


if __name__ == "__main__":
    main()
