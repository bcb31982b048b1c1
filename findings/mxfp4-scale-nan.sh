#!/usr/bin/env bash
# In MXFP4 the scale byte 255 is NaN (OCP Microscaling 1.0). gguf 0.19.0 and transformers 5.23.0 read it as 2^128.
#
# Expected: NaN for all numbers of such a block, as torch's float8_e8m0fnu says.
# Seen: both readers give finite numbers for 0.5 (2^127) and infinity from 1 on. A damaged block is not seen as one: a
# check for NaN after loading passes.
. "$(dirname "$0")/prelude.sh"
install torch==2.13.0 transformers==5.23.0 gguf==0.19.0 numpy==2.4.6
cat >case.py <<'PY'
import gguf
import numpy as np
import torch
from gguf import quants
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

# A block of 32 numbers: code 1 is 0.5, code 2 is 1.
block = np.full((1, 17), 0x21, np.uint8)
block[0, 0] = 255
numbers = quants.dequantize(block, gguf.GGMLQuantizationType.MXFP4)[0]
print("gguf", [float(numbers[0]), float(numbers[16])])
codes = torch.full((1, 1, 1, 16), 0x21, dtype=torch.uint8)
scales = torch.full((1, 1, 1), 255, dtype=torch.uint8)
print("transformers", convert_moe_packed_tensors(codes, scales, dtype=torch.float32).flatten()[:2].tolist())
print("torch's dtype", torch.tensor([255], dtype=torch.uint8).view(torch.float8_e8m0fnu).float().tolist())
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
gguf [1.7014118346046923e+38, inf]
transformers [1.7014118346046923e+38, inf]
torch's dtype [nan]
TEXT
