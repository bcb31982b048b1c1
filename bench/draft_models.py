"""A draft model for quire-tiny, about a quarter of its size: `python -m bench.draft_models DIR`.

It learns to say what quire-tiny says: the distribution of each next token, on the documents of quire-tiny's courses.
"""

import argparse
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.functional import kl_div, log_softmax
from transformers import LlamaConfig, LlamaForCausalLM

from assets.training.batches import Batch, lesson_batches
from assets.training.corpus import EMPHASES
from assets.training.courses import Course, Lesson
from assets.training.train import export
from quire.model_source import resolve_model

_WIDTH, _NUM_LAYERS, _HEAD_DIM = 128, 3, 32
_WARM_UP = 50
_SAVE_EVERY = 200


def make_draft_model(teacher: LlamaForCausalLM) -> LlamaForCausalLM:
    """Random weights; about 0.8 of quire-tiny's 3.4 million parameters."""
    changes = {
        "hidden_size": _WIDTH,
        "intermediate_size": 352,
        "num_hidden_layers": _NUM_LAYERS,
        "num_attention_heads": _WIDTH // _HEAD_DIM,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**teacher.config.to_dict(), **changes}))


def train(teacher: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path, num_steps: int) -> None:
    """Writes what is learnt every few minutes."""
    torch.manual_seed(1)
    model = make_draft_model(teacher).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.05)
    lessons = (Lesson(num_steps, 77, EMPHASES["fourth"], old=0.7, tools=0.05),)
    course = Course(((-1, 0.0), (_WARM_UP, 3e-3), (num_steps // 2, 3e-3), (num_steps, 0.0)), lessons)
    started = time.monotonic()
    for step, batch in lesson_batches(tokenizer, course.lessons, 0):
        for group in optimizer.param_groups:
            group["lr"] = course.rate(step)
        loss, share_equal = _loss(model, teacher, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            seconds = time.monotonic() - started
            print(f"step {step} loss {loss.item():.4f} equal {share_equal:.3f} {seconds:.0f} s", flush=True)
        if (step + 1) % _SAVE_EVERY == 0 or step + 1 == num_steps:
            export(model, tokenizer, directory)


def _loss(model: LlamaForCausalLM, teacher: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, float]:
    """The mean divergence from the teacher's distributions, and how often both find the same token most probable."""
    counts = batch.weights[:, 1:] > 0
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            of_teacher = teacher(input_ids=batch.tokens, use_cache=False).logits[:, :-1][counts]
        of_model = model(input_ids=batch.tokens, use_cache=False).logits[:, :-1][counts]
    targets, outputs = (log_softmax(each.float(), -1) for each in (of_teacher, of_model))
    share_equal = (targets.argmax(-1) == outputs.argmax(-1)).float().mean().item()
    return kl_div(outputs, targets, log_target=True, reduction="batchmean"), share_equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    source = resolve_model(None)
    teacher = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    train(teacher, Tokenizer.from_file(str(source / "tokenizer.json")), arguments.directory, arguments.steps)


if __name__ == "__main__":
    main()
