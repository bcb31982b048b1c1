"""The contents of blocks of the KV pool as bytes, for workers of other replicas."""

from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.device.kv_pool import KvPool
from worker_svc.device.seals import SealInventory
from worker_svc.step import Int32Array


class PoolBlocks:
    """Reads and writes whole blocks of a pool beside its steps. What is read must be final, and what is written in no
    step. For any threads, each of which waits until it is done.

    Attributes:
        seals: Which blocks are final.
        block_bytes: The size of a block: of each layer keys, then values.
    """

    def __init__(self, pool: KvPool, seals: SealInventory) -> None:
        self.seals = seals
        self._layers = [layer.view(torch.uint8) for layer in pool.gpu]
        self._on_host = all(layer.is_cpu for layer in self._layers)
        # numpy copies in the calling thread, where torch would start a team of threads beside that of the steps.
        self._arrays = [layer.numpy() for layer in self._layers] if self._on_host else []
        two, _, *rest = self._layers[0].shape
        self._shape = (len(self._layers), two, *rest)
        self.block_bytes = int(np.prod(self._shape))
        self._stream = None if self._on_host else torch.cuda.Stream(self._layers[0].device)

    def read(self, blocks: Int32Array) -> NDArray[np.uint8]:
        """[n, block_bytes]."""
        if self._on_host:
            content = np.empty((len(blocks), *self._shape), np.uint8)
            for index, layer in enumerate(self._arrays):
                content[:, index] = layer[:, blocks].swapaxes(0, 1)
        else:
            content = self._read_from_device(torch.from_numpy(blocks.astype(np.int64))).numpy()
        return content.reshape(len(blocks), self.block_bytes)

    def write(self, blocks: Int32Array, contents: NDArray[np.uint8]) -> None:
        """`contents` is as `read` returns it."""
        parts = contents.reshape(len(blocks), *self._shape)
        if self._on_host:
            for index, layer in enumerate(self._arrays):
                layer[:, blocks] = parts[:, index].swapaxes(0, 1)
        else:
            self._write_to_device(torch.from_numpy(blocks.astype(np.int64)), torch.from_numpy(parts.copy()))

    def _read_from_device(self, blocks: Tensor) -> Tensor:
        with torch.inference_mode(), self._beside_steps():
            there = blocks.to(self._layers[0].device)
            content = torch.stack([layer[:, there].transpose(0, 1) for layer in self._layers], dim=1)
            return content.cpu()

    def _write_to_device(self, blocks: Tensor, parts: Tensor) -> None:
        with torch.inference_mode(), self._beside_steps():
            there, parts = blocks.to(self._layers[0].device), parts.to(self._layers[0].device)
            for index, layer in enumerate(self._layers):
                layer.index_copy_(1, there, parts[:, index].transpose(0, 1).contiguous())
            if self._stream is not None:
                self._stream.synchronize()

    def _beside_steps(self) -> "torch.cuda.StreamContext | nullcontext[None]":
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
