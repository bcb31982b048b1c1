"""Measures a model directory on held-out questions and text: python -m tools.evaluate_quire_tiny."""

import argparse
from pathlib import Path

import torch

from tools.quire_tiny.answerer import Answerer
from tools.quire_tiny.evaluate import KINDS, KindScore, score_kind

REQUIRED_ACCURACY = 0.95


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("assets/quire-tiny"))
    parser.add_argument("--questions", type=int, default=200, help="at most this many of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--show-failures", type=int, default=0, metavar="N", help="print N failures of each kind")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def _print_score(score: KindScore, shown_failures: int) -> None:
    mark = "" if score.accuracy >= REQUIRED_ACCURACY else "  below 95%"
    print(f"{score.kind:<16}{score.right:>6} of {score.asked:<6}{score.accuracy:>8.1%}{mark}", flush=True)
    for failure in score.failures[:shown_failures]:
        print(
            f"    {failure.probe.prompt!r}\n        not {failure.probe.expected!r}\n        but {failure.answer.text!r}"
        )


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    answerer = Answerer(arguments.model, getattr(torch, arguments.dtype))
    scores: list[KindScore] = []
    for kind in arguments.kinds:
        scores.append(score_kind(answerer, kind, arguments.seed, arguments.questions))
        _print_score(scores[-1], arguments.show_failures)
    right, asked = sum(score.right for score in scores), sum(score.asked for score in scores)
    print(f"{'all':<16}{right:>6} of {asked:<6}{right / asked:>8.1%}")
    texts = (arguments.model / "heldout.txt").read_text().strip().split("\n\n")
    perplexity = answerer.perplexity(texts)
    print(f"perplexity {perplexity.value:.4f}: {perplexity.tokens} tokens of {perplexity.documents} held-out texts")


if __name__ == "__main__":
    main()
