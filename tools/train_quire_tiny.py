"""Makes assets/quire-tiny from nothing: python -m tools.train_quire_tiny."""

import argparse
import tempfile
from pathlib import Path

import torch

from tools.quire_tiny.batches import Lesson
from tools.quire_tiny.conversation import FIRST_EMPHASIS, SECOND_EMPHASIS, THIRD_EMPHASIS
from tools.quire_tiny.export import export
from tools.quire_tiny.schedule import Schedule
from tools.quire_tiny.tokenizer import train_tokenizer
from tools.quire_tiny.train import TrainingPlan, train

PLAN = TrainingPlan(
    seed=0,
    schedule=Schedule(steps=4500, warm_up=100, decay=1100, peak=2e-3),
    lessons=(
        Lesson(until=2000, seed=0, emphasis=FIRST_EMPHASIS),
        Lesson(until=3400, seed=1, emphasis=SECOND_EMPHASIS),
        Lesson(until=4500, seed=2, emphasis=THIRD_EMPHASIS),
    ),
)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("assets/quire-tiny"))
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(tempfile.gettempdir()) / "quire-tiny-checkpoint.pt",
        help="where an interrupted training goes on; removed at the end (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def _log(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    tokenizer = train_tokenizer()
    model = train(tokenizer, PLAN, arguments.checkpoint, _log)
    export(model, tokenizer, arguments.output)
    arguments.checkpoint.unlink(missing_ok=True)
    _log(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
