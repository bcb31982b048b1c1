#!/usr/bin/env bash
# torch 2.13.0 and ml_dtypes 0.6.0 make other scales (E8M0, the scales of MXFP4 and MXFP8) of the same numbers.
#
# Expected: the same bytes for all finite numbers.
# Seen: both round to the nearest power of two, halves up. For zero torch gives byte 0, the smallest scale, and
# ml_dtypes byte 255, which is NaN. torch drops the sign of a negative number without a word (-2 becomes 2), ml_dtypes
# gives NaN. Infinity is NaN in both.
. "$(dirname "$0")/prelude.sh"
install torch==2.13.0 ml_dtypes==0.6.0 numpy==2.4.6
cat >case.py <<'PY'
import ml_dtypes
import numpy as np
import torch

numbers = np.array([0.75, 1.4, 1.5, 3.0, 6.0, 1e-45, 0.0, -2.0, np.inf], np.float32)
print("number    ", numbers.tolist())
print("torch     ", torch.from_numpy(numbers).to(torch.float8_e8m0fnu).view(torch.uint8).tolist())
print("ml_dtypes ", numbers.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).tolist())
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
number     [0.75, 1.399999976158142, 1.5, 3.0, 6.0, 1.401298464324817e-45, 0.0, -2.0, inf]
torch      [127, 127, 128, 129, 130, 0, 0, 128, 255]
ml_dtypes  [127, 127, 128, 129, 130, 0, 255, 255, 255]
TEXT
