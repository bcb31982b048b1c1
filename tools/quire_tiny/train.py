"""The training loop: Muon for the matrices, AdamW for the rest, packed rows, checkpoints."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tools.quire_tiny.batches import Batch, Shape, encoded_documents, next_batch
from tools.quire_tiny.model import make_model

# Every batch has 4,096 tokens; three of ten steps practise longer contexts.
SHAPES = (Shape(16, 256), Shape(16, 256), Shape(8, 512), Shape(16, 256), Shape(16, 256),
          Shape(4, 1024), Shape(16, 256), Shape(16, 256), Shape(8, 512), Shape(16, 256))  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    seed: int
    schedule: Schedule
    checkpoint_every: int = 500


def _optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=0.0, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def weighted_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Cross entropy of each token given those before it, averaged with the batch's weights."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch.tokens, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none"
    )
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def _save_checkpoint(path: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    state = {"step": step, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _load_checkpoint(path: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]) -> int:
    state = torch.load(path)
    model.load_state_dict(state["model"])
    for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer_state)
    return state["step"]


def train(
    tokenizer: Tokenizer, plan: TrainingPlan, checkpoint: Path, log: Callable[[str], None] = print
) -> LlamaForCausalLM:
    """Trains from the start, or from `checkpoint` where that file exists, on the very batches it would have seen."""
    torch.manual_seed(plan.seed)
    model = make_model().train()
    optimizers = _optimizers(model)
    done = _load_checkpoint(checkpoint, model, optimizers) if checkpoint.exists() else 0
    stream = encoded_documents(tokenizer, plan.seed)
    started, seen = time.monotonic(), 0
    for step in range(plan.schedule.steps):
        batch = next_batch(stream, SHAPES[step % len(SHAPES)])
        if step < done:
            continue
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plan.schedule.rate(step)
        loss = weighted_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += batch.tokens.numel()
        if step % 20 == 0:
            pace = seen / (time.monotonic() - started)
            log(f"step {step} loss {loss.item():.4f} rate {plan.schedule.rate(step):.2e} tokens/s {pace:.0f}")
        if (step + 1) % plan.checkpoint_every == 0:
            _save_checkpoint(checkpoint, model, optimizers, step + 1)
    return model
