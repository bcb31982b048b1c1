"""The training loop: AdamW on packed rows, with checkpoints."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tools.quire_tiny.batches import Batch, Lesson, lesson_batches
from tools.quire_tiny.model import make_model
from tools.quire_tiny.schedule import Schedule


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
