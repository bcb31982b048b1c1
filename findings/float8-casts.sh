#!/usr/bin/env bash
# torch 2.13.0 and ml_dtypes 0.6.0 cast the same float32 numbers to other bytes of float8.
#
# Expected: the same bytes, and infinity to something that a check for NaN or infinity finds.
# Seen, float8_e4m3fn (no infinity in the format): torch gives 448, the largest number, for all that is larger,
# infinity included, so an overflow leaves no trace; ml_dtypes gives NaN from 465 on. Seen, float8_e8m0fnu (scales of
# MXFP4 and MXFP8): both round to the nearest power of two, halves up. For zero torch gives byte 0, the smallest
# scale, and ml_dtypes byte 255, NaN. torch drops the sign of a negative number (-2 becomes 2), ml_dtypes gives NaN.
. "$(dirname "$0")/prelude.sh"
install torch==2.13.0 ml_dtypes==0.6.0 numpy==2.4.6
cat >case.py <<'PY'
import ml_dtypes
import numpy as np
import torch

CASES = {
    "float8_e4m3fn": [448, 464, 465, 480, np.inf, -np.inf, np.nan],
    "float8_e8m0fnu": [0.75, 1.4, 1.5, 3, 6, 1e-45, 0, -2, np.inf],
}
for name, values in CASES.items():
    numbers = np.array(values, np.float32)
    print(name, [round(float(number), 2) for number in numbers])
    print("  torch    ", torch.from_numpy(numbers).to(getattr(torch, name)).view(torch.uint8).tolist())
    print("  ml_dtypes", numbers.astype(getattr(ml_dtypes, name)).view(np.uint8).tolist())
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
float8_e4m3fn [448.0, 464.0, 465.0, 480.0, inf, -inf, nan]
  torch     [126, 126, 126, 126, 126, 254, 127]
  ml_dtypes [126, 126, 127, 127, 127, 255, 127]
float8_e8m0fnu [0.75, 1.4, 1.5, 3.0, 6.0, 0.0, 0.0, -2.0, inf]
  torch     [127, 127, 128, 129, 130, 0, 0, 128, 255]
  ml_dtypes [127, 127, 128, 129, 130, 0, 255, 255, 255]
TEXT
