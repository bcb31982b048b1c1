#!/usr/bin/env bash
# transformers 5.23.0: decoders of RoBERTa's kind count positions from `padding_idx + 1`, others from 0.
#
# Expected: `position_ids=arange(n)` is what a model takes if it gets none, as for Llama (whose rotations do not mind
# a shift of all positions either).
# Seen: for RoBERTa, XLM-RoBERTa, CamemBERT and Data2Vec the logits differ, without a warning; counted from
# padding_idx + 1 they are equal. A server that passes positions of its own, counted from 0, answers wrongly.
. "$(dirname "$0")/prelude.sh"
install transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat >case.py <<'PY'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 1, "is_decoder": True, "initializer_range": 0.5,
}  # fmt: skip
ids = torch.arange(5, 13)[None]
for name in ("llama", "roberta", "xlm-roberta", "camembert", "data2vec-text"):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES)).eval()
    with torch.no_grad():
        own = model(ids).logits
        seen = {
            first: torch.allclose(own, model(ids, position_ids=torch.arange(8)[None] + first).logits, atol=1e-5)
            for first in (0, 2)
        }
    print(name, "from 0:", seen[0], "from padding_idx + 1:", seen[2])
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
llama from 0: True from padding_idx + 1: True
roberta from 0: False from padding_idx + 1: True
xlm-roberta from 0: False from padding_idx + 1: True
camembert from 0: False from padding_idx + 1: True
data2vec-text from 0: False from padding_idx + 1: True
TEXT
