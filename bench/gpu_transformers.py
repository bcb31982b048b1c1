"""Output tokens per second of transformers' continuous batching, the second of two rounds.

Called as `python -m bench.gpu_transformers MODEL_DIR REQUESTS_FILE DEVICE`; the last line that it prints is the figure.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def main(directory: str, requests: str, device: str) -> None:
    asked = json.loads(Path(requests).read_text())
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
    # transformers decorates its own `to`, which hides its type from type checkers.
    torch.nn.Module.to(model.eval(), torch.device(device))
    config = GenerationConfig(max_new_tokens=asked["tokens"], do_sample=False, eos_token_id=-1, pad_token_id=0)
    rates = []
    for _ in range(2):
        started = time.perf_counter()
        outputs = model.generate_batch(asked["prompts"], generation_config=config, persistent_manager=True)
        seconds = time.perf_counter() - started
        rates.append(sum(len(output.generated_tokens) for output in outputs.values()) / seconds)
    print(rates[-1], flush=True)
    # The thread of its manager may go on, and the interpreter would wait for it.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
