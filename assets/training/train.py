"""Makes assets/quire-tiny from nothing: python -m assets.training.train."""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from assets.training.batches import Batch, Lesson, lesson_batches
from assets.training.corpus import (
    BOS_ID,
    END_ID,
    EOS_ID,
    FIRST_EMPHASIS,
    PAD_ID,
    SECOND_EMPHASIS,
    THIRD_EMPHASIS,
    held_out_texts,
)
from assets.training.tokenizer import VOCABULARY_SIZE, save_tokenizer, train_tokenizer


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up, a long stay at the peak, linear decay to zero at `steps`."""

    steps: int
    warm_up: int
    decay: int
    peak: float

    def rate(self, step: int) -> float:
        rise = (step + 1) / self.warm_up
        fall = (self.steps - step) / self.decay
        return self.peak * min(1.0, rise, fall)


MAX_LENGTH = 1024


def make_model() -> LlamaForCausalLM:
    """Random weights in float32; seed torch before."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=[EOS_ID, END_ID],
        pad_token_id=PAD_ID,
        initializer_range=0.02,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The last lesson ends where the schedule does."""

    seed: int
    schedule: Schedule
    lessons: tuple[Lesson, ...]
    checkpoint_every: int = 100


def _make_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    scales = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def weighted_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Cross entropy of each token given those before it, averaged with the batch's weights."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch.tokens, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none"
    )
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def _save_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, step: int) -> None:
    partial = path.with_suffix(".partial")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    partial.replace(path)


def _load_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> int:
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def train(
    tokenizer: Tokenizer, plan: TrainingPlan, checkpoint: Path, log: Callable[[str], None] = print
) -> LlamaForCausalLM:
    """Trains from the start, or from `checkpoint` where that file exists, on the very batches it would have seen."""
    torch.manual_seed(plan.seed)
    model = make_model().train()
    optimizer = _make_optimizer(model)
    done = _load_checkpoint(checkpoint, model, optimizer) if checkpoint.exists() else 0
    started, seen = time.monotonic(), 0
    for step, batch in lesson_batches(tokenizer, plan.lessons, done):
        for group in optimizer.param_groups:
            group["lr"] = plan.schedule.rate(step)
        loss = weighted_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += batch.tokens.numel()
        if step % 20 == 0:
            pace = seen / (time.monotonic() - started)
            log(f"step {step} loss {loss.item():.4f} rate {plan.schedule.rate(step):.2e} tokens/s {pace:.0f}")
        if (step + 1) % plan.checkpoint_every == 0:
            _save_checkpoint(checkpoint, model, optimizer, step + 1)
    return model


HELD_OUT_SEED = 99
_HELD_OUT_TEXTS = 390


def _in_bfloat16(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy; the trained float32 weights stay as they are."""
    copy = LlamaForCausalLM(model.config).bfloat16()
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def _generation_config() -> GenerationConfig:
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=256,
        bos_token_id=BOS_ID,
        eos_token_id=[EOS_ID, END_ID],
        pad_token_id=PAD_ID,
    )


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        made = Path(scratch)
        copy = _in_bfloat16(model)
        copy.generation_config = _generation_config()
        copy.save_pretrained(made)
        save_tokenizer(tokenizer, made, MAX_LENGTH)
        (made / "heldout.txt").write_text("\n\n".join(held_out_texts(HELD_OUT_SEED, _HELD_OUT_TEXTS)) + "\n")
        for path in sorted(made.iterdir()):
            path.chmod(0o644)  # safetensors writes for the owner alone
            path.replace(directory / path.name)


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
