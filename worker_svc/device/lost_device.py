"""Errors of a GPU that stay: after an illegal address, say, nothing that the process does there works any more."""

import torch


def is_lost(device: torch.device) -> bool:
    """Whether the device takes no more work of this process. Waits for what is queued there."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
