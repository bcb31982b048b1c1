"""A draft model for quire-tiny, about a quarter of its size: `python -m bench.draft_models DIR`.

It learns to say what quire-tiny says: the distribution of each next token, on the documents of quire-tiny's courses.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.functional import kl_div, log_softmax
from transformers import LlamaConfig, LlamaForCausalLM

from assets.training.train import Batch, Course, Lesson, export, train
from quire.model_source import resolve_model

_WIDTH, _NUM_LAYERS, _HEAD_DIM = 128, 3, 32
_WARM_UP = 50


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


def teach(teacher: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path, num_steps: int) -> None:
    torch.manual_seed(1)
    model = make_draft_model(teacher)
    rates = [(-1, 0.0), (_WARM_UP, 3e-3), (num_steps // 2, 3e-3), (num_steps, 0.0)]
    course = Course(rates, (Lesson(num_steps, 77, "fourth", old=0.7, tools=0.05),))
    train(model, tokenizer, course, partial(_divergence, teacher))
    export(model, tokenizer, directory)


def _divergence(teacher: LlamaForCausalLM, model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """The mean divergence from the teacher's distributions."""
    counts = batch.weights[:, 1:] > 0
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            of_teacher = teacher(input_ids=batch.tokens, use_cache=False).logits[:, :-1][counts]
        of_model = model(input_ids=batch.tokens, use_cache=False).logits[:, :-1][counts]
    targets, outputs = (log_softmax(each.float(), -1) for each in (of_teacher, of_model))
    return kl_div(outputs, targets, log_target=True, reduction="batchmean")


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
    teach(teacher, Tokenizer.from_file(str(source / "tokenizer.json")), arguments.directory, arguments.steps)


if __name__ == "__main__":
    main()
