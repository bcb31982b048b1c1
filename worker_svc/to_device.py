"""Small arrays to the device, without making the host wait for it."""

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device. On CUDA it goes through pinned memory in stream order, and the host does not wait.

    On the CPU the tensor shares the array's memory, so the caller must not write to it any more.
    """
    # torch warns about read-only memory, as views of messages are.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
