"""Makes assets/quire-tiny: python -m assets.training.train.

The first course starts from random weights. The second goes on from the file of the first and teaches tools and answers
in JSON, the third from that of the second, with tools in many more words, the fourth from that of the third what
visitors ask (`courses`).
"""

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from assets.training.batches import Batch, lesson_batches
from assets.training.conversations import BOS_ID, END_ID, EOS_ID, PAD_ID
from assets.training.corpus import held_out_texts
from assets.training.courses import COURSES, Course
from assets.training.tokenizer import MODEL, add_json_marks, save_tokenizer, train_tokenizer

_TOKENS: dict[str, Any] = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, END_ID], "pad_token_id": PAD_ID}


def make_model() -> LlamaForCausalLM:
    """Random weights in float32; seed torch before."""
    return LlamaForCausalLM(LlamaConfig(**MODEL["config"], **_TOKENS))


def _make_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    scales = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def weighted_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Cross entropy of each token given those before it, times the batch's weights, summed."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state[:, :-1]
        counts = batch.weights[:, 1:] > 0
        logits = model.lm_head(hidden[counts])
    losses = torch.nn.functional.cross_entropy(logits.float(), batch.tokens[:, 1:][counts], reduction="none")
    return (losses * batch.weights[:, 1:][counts]).sum()


class _Gradients:
    """Gradients by several threads, each with a part of the batch's rows.

    Threads that meet once a step share a busy machine better than threads that meet in each product.
    """

    def __init__(self, model: LlamaForCausalLM, threads: int) -> None:
        self._model, self._threads = model, threads
        self._executor = ThreadPoolExecutor(threads)

    def compute(self, batch: Batch) -> float:
        """Sets the gradients of the mean loss of a batch, which it returns."""
        total = batch.weights[:, 1:].sum()
        rows = zip(batch.tokens.chunk(self._threads), batch.weights.chunk(self._threads), strict=True)
        parts = list(self._executor.map(lambda part: self._of_part(Batch(*part), total), rows))
        for parameter, *gradients in zip(self._model.parameters(), *(gradients for _, gradients in parts), strict=True):
            parameter.grad = torch.stack(gradients).sum(0) if len(gradients) > 1 else gradients[0]
        return sum(loss for loss, _ in parts)

    def _of_part(self, part: Batch, total: torch.Tensor) -> tuple[float, tuple[torch.Tensor, ...]]:
        loss = weighted_loss(self._model, part) / total
        return loss.item(), torch.autograd.grad(loss, list(self._model.parameters()))


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, course: Course, checkpoint: Path, threads: int) -> None:
    """Trains from the start, or from `checkpoint` where that file exists, on the very batches it would have seen."""
    model.train()
    optimizer = _make_optimizer(model)
    done = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    gradients = _Gradients(model, threads)
    started, seen = time.monotonic(), 0
    for step, batch in lesson_batches(tokenizer, course.lessons, done):
        for group in optimizer.param_groups:
            group["lr"] = course.rate(step)
        loss = gradients.compute(batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += batch.tokens.numel()
        if step % 20 == 0:
            pace = seen / (time.monotonic() - started)
            print(f"step {step} loss {loss:.4f} rate {course.rate(step):.2e} tokens/s {pace:.0f}", flush=True)
        if (step + 1) % course.checkpoint_every == 0:
            partial = checkpoint.with_suffix(".partial")
            torch.save({"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
            partial.replace(checkpoint)


HELD_OUT_SEED = 99
_HELD_OUT_TEXTS = 390


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        made = Path(scratch)
        copy = deepcopy(model).bfloat16()
        copy.generation_config = GenerationConfig(**MODEL["generation"], **_TOKENS)
        copy.save_pretrained(made)
        save_tokenizer(tokenizer, made)
        (made / "heldout.txt").write_text("\n\n".join(held_out_texts(HELD_OUT_SEED, _HELD_OUT_TEXTS)) + "\n")
        for path in sorted(made.iterdir()):
            path.chmod(0o644)  # safetensors writes for the owner alone
            path.replace(directory / path.name)


def widen(model: LlamaForCausalLM, before: Tokenizer, after: Tokenizer) -> None:
    """Gives each token that `after` has beyond `before` the mean of the embeddings of its pieces."""
    known, size = before.get_vocab_size(), after.get_vocab_size()
    if model.config.vocab_size == size:
        return
    embeddings = model.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        for token in range(known, size):
            pieces = before.encode(str(after.id_to_token(token)), add_special_tokens=False).ids
            embeddings.weight[token] = embeddings.weight[pieces].mean(0)


def move_towards(model: LlamaForCausalLM, other: LlamaForCausalLM, share: float) -> None:
    """Moves the weights of `model` on the straight line to those of `other`, of the same shape, by `share` of it."""
    with torch.no_grad():
        for weight, target in zip(model.parameters(), other.parameters(), strict=True):
            weight.lerp_(target, share)


def begin(start: Path | None) -> tuple[LlamaForCausalLM, Tokenizer]:
    """What a course begins with: the weights as they are stored, so that it does not matter when the course before was,
    in float32, with the marks of JSON in the vocabulary; or random weights and a new tokenizer, without them."""
    if start is None:
        torch.manual_seed(0)
        return make_model(), train_tokenizer()
    model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    before, tokenizer = (Tokenizer.from_file(str(start / "tokenizer.json")) for _ in range(2))
    add_json_marks(tokenizer)
    widen(model, before, tokenizer)
    return model, tokenizer


def take(course: Course, start: Path | None, output: Path, checkpoint: Path, threads: int) -> None:
    """Trains from the model in `start`, or from nothing, and writes what came of it to `output`."""
    model, tokenizer = begin(start)
    train(model, tokenizer, course, checkpoint, threads)
    if course.way_back:
        move_towards(model, begin(start)[0], course.way_back)
    export(model, tokenizer, output)
    checkpoint.unlink(missing_ok=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, default=Path("assets/quire-tiny"))
    add("--course", type=int, choices=range(1, len(COURSES) + 1), default=1, help="the first one to take")
    add("--from", type=Path, dest="start", help="what to begin with, after the course before (default: --output)")
    about = "where to keep the files by which an interrupted course goes on (default: %(default)s)"
    add("--checkpoints", type=Path, default=Path(tempfile.gettempdir()), help=about)
    add("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    output: Path = arguments.output
    checkpoints = [arguments.checkpoints / f"quire-tiny-course-{number}.pt" for number in range(1, len(COURSES) + 1)]
    # What an interrupted run was in goes on.
    first = max([arguments.course, *(number for number, path in enumerate(checkpoints, 1) if path.exists())])
    start = None if first == 1 else arguments.start or output
    for course, checkpoint in zip(COURSES[first - 1 :], checkpoints[first - 1 :], strict=True):
        take(course, start, output, checkpoint, arguments.threads)
        start = output
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
