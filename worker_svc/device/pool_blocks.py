"""The contents of blocks of the KV pool as bytes, for workers of other replicas and for the disk."""

from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.device.kv_pool import KvPool
from worker_svc.device.seals import SealInventory
from worker_svc.step import Int32Array


class PoolBlocks:
    """Reads and writes whole blocks of a pool during its steps. Blocks that are read must be final, and blocks that are
    written must be in no step. May be called in any thread, which waits for the result.

    Attributes:
        seals: Which blocks are final.
        block_bytes: The size of a block: of each layer keys, then values.
    """

    def __init__(self, pool: KvPool, seals: SealInventory) -> None:
        self.seals = seals
        self._layers = [layer.view(torch.uint8) for layer in pool.gpu]
        self._on_host = all(layer.is_cpu for layer in self._layers)
        # numpy copies in the calling thread, where torch would start a team of threads next to the steps' team.
        self._arrays = [layer.numpy() for layer in self._layers] if self._on_host else []
        # Where each layer ends within a block.
        self._ends = np.cumsum([layer.nbytes // layer.shape[1] for layer in self._layers])
        self.block_bytes = int(self._ends[-1])
        self._stream = None if self._on_host else torch.cuda.Stream(self._layers[0].device)

    def read(self, blocks: Int32Array) -> NDArray[np.uint8]:
        """[n, block_bytes]."""
        if not self._on_host:
            return self._read_from_device(torch.from_numpy(blocks.astype(np.int64))).numpy()
        content = np.empty((len(blocks), self.block_bytes), np.uint8)
        for layer, part in zip(self._arrays, np.split(content, self._ends[:-1], axis=1), strict=True):
            part[:] = layer[:, blocks].swapaxes(0, 1).reshape(part.shape)
        return content

    def write(self, blocks: Int32Array, contents: NDArray[np.uint8]) -> None:
        """`contents` is as `read` returns it."""
        contents = contents.reshape(len(blocks), self.block_bytes)
        if not self._on_host:
            self._write_to_device(torch.from_numpy(blocks.astype(np.int64)), torch.from_numpy(contents.copy()))
            return
        for layer, part in zip(self._arrays, np.split(contents, self._ends[:-1], axis=1), strict=True):
            layer[:, blocks] = part.reshape(len(blocks), layer.shape[0], *layer.shape[2:]).swapaxes(0, 1)

    def _read_from_device(self, blocks: Tensor) -> Tensor:
        with torch.inference_mode(), self._beside_steps():
            there = blocks.to(self._layers[0].device)
            parts = [layer[:, there].transpose(0, 1).reshape(len(blocks), -1) for layer in self._layers]
            return torch.cat(parts, dim=1).cpu()

    def _write_to_device(self, blocks: Tensor, contents: Tensor) -> None:
        # An earlier step may still copy some of these blocks to the host after its end.
        torch.cuda.synchronize(self._layers[0].device)
        with torch.inference_mode(), self._beside_steps():
            there, contents = blocks.to(self._layers[0].device), contents.to(self._layers[0].device)
            for layer, part in zip(self._layers, contents.tensor_split(self._ends[:-1].tolist(), dim=1), strict=True):
                part = part.reshape(len(blocks), layer.shape[0], *layer.shape[2:])
                layer.index_copy_(1, there, part.transpose(0, 1).contiguous())
            if self._stream is not None:
                self._stream.synchronize()

    def _beside_steps(self) -> "torch.cuda.StreamContext | nullcontext[None]":
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
