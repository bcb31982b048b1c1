#!/usr/bin/env bash
# transformers 5.23.0: MPNet uses 32 buckets of distances and positions from 2, whatever its configuration says.
#
# Expected: `relative_attention_num_buckets` is the number of buckets, as in T5, and the first position is
# `pad_token_id + 1`, as in RoBERTa, from which the embedding with its padding row comes.
# Seen: the table of biases has the rows that the configuration says, and the buckets are those of 32, so further rows
# are never read; positions begin at 2 with any padding token.
. "$(dirname "$0")/prelude.sh"
install transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat >case.py <<'PY'
import torch
from transformers import MPNetConfig, MPNetModel

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.5,
}  # fmt: skip
ids = torch.arange(5, 25)[None]
for buckets in (32, 64, 128):
    torch.manual_seed(0)
    model = MPNetModel(MPNetConfig(relative_attention_num_buckets=buckets, **SIZES)).eval()
    table = model.encoder.relative_attention_bias.weight
    model.encoder.compute_position_bias(torch.zeros(1, 20, 32)).sum().backward()
    read = (table.grad.abs().sum(1) > 0).nonzero()
    print(buckets, "in the config:", len(table), "rows,", len(read), "of them read, the last", int(read.max()))
for padding in (1, 7):
    model = MPNetModel(MPNetConfig(pad_token_id=padding, **SIZES)).eval()
    found = []
    model.embeddings.position_embeddings.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    model(ids)
    print("pad_token_id", padding, "-> first position", int(found[0].min()))
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
32 in the config: 32 rows, 21 of them read, the last 26
64 in the config: 64 rows, 21 of them read, the last 26
128 in the config: 128 rows, 21 of them read, the last 26
pad_token_id 1 -> first position 2
pad_token_id 7 -> first position 2
TEXT
