"""Moves of whole blocks before a step: swap out, swap in, copy-on-write, in this order."""

import numpy as np
import torch

from kernels import ops
from worker_svc.kv_pool import KvPool
from worker_svc.steps import CacheOperations
from worker_svc.transfer import to_device


def apply_cache_operations(operations: CacheOperations, pool: KvPool) -> None:
    """Applies all moves of a step. Blocks that leave are saved before anything may overwrite them."""
    device = pool.gpu[0].device
    if len(operations.swap_out):
        ops.swap_blocks(pool.gpu, pool.host, torch.from_numpy(operations.swap_out.astype(np.int64)))
    if len(operations.swap_in):
        ops.swap_blocks(pool.host, pool.gpu, torch.from_numpy(operations.swap_in.astype(np.int64)))
    if len(operations.copy):
        ops.copy_blocks(pool.gpu, to_device(operations.copy.astype(np.int64), device))
