"""The KV pool: one tensor a layer on the device, and as many on the host for swapped blocks (paper, section 4.2)."""

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.model_files.progress import shown_bytes
from quire.runtime import clock
from quire.runtime.processors import available_memory
from quire.runtime.settings import ConfigurationError
from quire_kernels.host_memory import collapse, lazy_zeros, populate, release
from quire_kernels.int8 import line_bytes
from quire_kernels.states import StatePages
from worker_svc.device.arena import arena_block_bytes, arena_shape, caches_of, pages_of
from worker_svc.device.layer_cut import LayerCut, place_layers, width
from worker_svc.device.pool_file import PoolFile
from worker_svc.device.seals import SealInventory
from worker_svc.layers.attention import AttentionMetadata
from worker_svc.models.base import CacheLayer, CausalLM, ModelInput
from worker_svc.step import PoolGeometry

CPU_POOL_BYTES = 1 << 30
CPU_SWAP_BYTES = 1 << 30
PINNED_SWAP_BYTES = 4 << 30
_POPULATED_AT_ONCE = 1 << 22
_FIRST_PART_S = 0.1
"""Maximum seconds that a start waits for the blocks that are handed out first."""
_KEPT_FREE = 1 << 28
_LOWEST_PRIORITY = 19
_REST = 9.0
"""In the background, a pause follows each part, this many times as long as the part took: a virtual machine stops while
its host allocates a page, and must serve requests in between."""
_logger = logging.getLogger(__name__)

Fill = Callable[[Tensor, int, int], bool]


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """The cache and the group of each layer of a model, and the pages of its states."""

    kv_caches: tuple[Tensor, ...]
    group_of: tuple[int, ...] = ()
    pages: Tensor | None = None
    """[num_blocks, block_bytes] uint8, for a model whose layers keep states."""

    def inputs(
        self,
        token_ids: Tensor,
        positions: Tensor,
        groups: Sequence[AttentionMetadata],
        adapter_slots: Tensor | None = None,
        states: StatePages | None = None,
    ) -> ModelInput:
        return ModelInput(token_ids, positions, groups, self.kv_caches, adapter_slots, self.group_of, states)


@dataclass(frozen=True, slots=True)
class KvPool:
    """The tensors of the layers of a group, each [lines_per_token, num_blocks, num_kv_heads, block_size, head_dim] with
    the heads of its `CacheLayer`; in int8 with wider lines. Groups share the tensors, not the blocks. The layers of the
    draft model, if there is one, follow the model's. If layers keep states, the model has one tensor, as `arena`
    describes.
    """

    geometry: PoolGeometry
    gpu: tuple[Tensor, ...]
    host: tuple[Tensor, ...]
    padding_block: int | None = None
    """The first of the extra blocks of `gpu` that no sequence has, for what is computed and not kept: one block for
    tokens; if layers keep states, a state's more, and then the blocks of `num_draft_states` states."""
    num_draft_states: int = 0
    """The states after drafts that a pass may keep until it is known which drafts are right."""
    seals: SealInventory | None = None
    """The inventory next to the blocks in their file; None if no block is final at first."""
    is_released: threading.Event = field(default_factory=threading.Event)
    """Set once the memory was given back: it is not populated any more."""

    def layers_of(self, model: CausalLM) -> LayerCaches:
        """The caches of the model on the device."""
        layers, geometry = model.cache_layers, self.geometry
        slots, pages = self.gpu, None
        if model.state is not None:
            arena, dtype = self.gpu[0], self.gpu[0].dtype
            # Layers that are cut into groups share slots of the widest one.
            of_slots = layers if not geometry.groups.num_windowed else [max(layers, key=width)] * geometry.num_layers
            shapes = [(each.num_kv_heads, geometry.block_size, line_width(each.head_dim, dtype)) for each in of_slots]
            slots, pages = caches_of(arena, [(model.lines_per_token, *each) for each in shapes]), pages_of(arena)
        places = place_layers(layers, geometry.num_layers, geometry.groups)
        parts = (_part_of(slots[at.slot], layer, at.part) for layer, at in zip(layers, places, strict=True))
        return LayerCaches(tuple(parts), tuple(place.group for place in places), pages)

    def padding_states(self, count: int) -> list[list[int]]:
        """The blocks of states of `count` rows of the first steps, whose results do not matter. Neighbours differ."""
        size, first = self.geometry.state_blocks, self.padding_block or 0
        return [list(range(first + row % 2, first + row % 2 + size)) for row in range(count)]

    @property
    def draft_states(self) -> NDArray[np.int32]:
        """[num_draft_states, state_blocks], the blocks of these states."""
        size = self.geometry.state_blocks
        first = (self.padding_block or 0) + 1 + size
        return np.arange(first, first + self.num_draft_states * size, dtype=np.int32).reshape(-1, size)

    def of_draft_model(self) -> "KvPool":
        """The layers of its draft model, as a pool of the same blocks."""
        layers = self.gpu[1 if self.geometry.state_blocks else self.geometry.num_layers :]
        return replace(self, geometry=replace(self.geometry, num_layers=len(layers), state_blocks=0), gpu=layers)

    def release(self) -> None:
        """Gives the memory of a pool on the CPU back to the system. Its blocks hold zeros then, and take memory again
        when they are written. To be called when no step is running."""
        self.is_released.set()
        for tensors, is_over_file in ((self.gpu, self.seals is not None), (self.host, False)):
            # Each of them, also behind one that fails.
            are_released = [release(tensor, is_over_file=is_over_file) for tensor in tensors]
            if not all(are_released):
                _logger.warning("the system did not take all of the KV pool's memory back")

    def populate(self, num_first_blocks: int) -> None:
        """Populates the pages of a pool on the CPU, since the first step that touches a page waits for it.

        Args:
            num_first_blocks: Number of blocks that the first steps may write to. They are populated when this returns,
                if a short time allows; all others follow in the background.
        """
        layers = [weakref.ref(layer) for layer in self.gpu if layer.device.type == "cpu"]
        if not layers:
            return
        # A layer has all keys, then all values, or only latents.
        of_model = self.gpu[: max(self.geometry.num_layers, 1)]
        largest = max(of_model, key=lambda layer: layer.nbytes)
        num_lines, num_blocks = largest.shape[:2]
        half = largest.nbytes // num_lines
        fill = populate if self.seals is None else _populate_and_collapse
        end = min(num_first_blocks, num_blocks) * half // num_blocks
        if _populate(layers, end, half, fill, self.is_released, max_s=_FIRST_PART_S):
            arguments = (layers, half, fill, self.is_released)
            threading.Thread(target=_populate_beside, args=arguments, name="populate", daemon=True).start()


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """The pool's size in the settings, and the largest useful size."""

    block_size: int
    num_gpu_blocks: int | None
    """Instead of a size in bytes."""
    kv_cache_memory: int | None
    """Bytes; None takes the default of the device."""
    swap_space: int | None
    """Bytes, 0 for no host pool; None takes the default of the device."""
    max_useful_blocks: int
    """Blocks of as many full sequences as a step can have, the maximum of the default pool of a CPU."""
    dtype: torch.dtype | None = None
    """The dtype of keys and values; None takes the model's."""
    num_padding_blocks: int = 0
    """Blocks of the memory that are not for sequences."""
    host_memory: int | None = None
    """Bytes of this machine that pools may take; None if unknown."""
    cut: LayerCut | None = None
    """None keeps all layers in one group."""
    num_state_blocks: int = 0
    """Blocks for states and checkpoints of all rows, which the default pool of a CPU has in addition."""


def block_bytes(
    model: CausalLM,
    block_size: int,
    dtype: torch.dtype | None = None,
    layers: Sequence[CacheLayer] | None = None,
) -> int:
    """Bytes of one block over all layers, or these, keys and values, of a pool of this dtype; without it, the
    model's."""
    dtype = dtype or model.dtype
    widths = (layer.num_kv_heads * line_width(layer.head_dim, dtype) for layer in layers or model.cache_layers)
    of_tokens = model.lines_per_token * block_size * sum(widths) * dtype.itemsize
    return of_tokens if model.state is None else arena_block_bytes(of_tokens, model.state)


def line_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of one token and head in a pool of this dtype; int8 lines include a scale."""
    return line_bytes(head_dim) if dtype == torch.int8 else head_dim


def num_gpu_blocks(request: PoolRequest, bytes_per_block: int, available_bytes: int | None) -> int:
    """The number of blocks on the device.

    Args:
        available_bytes: Left on an accelerator by profiling; None on the CPU.

    Raises:
        ConfigurationError: not one block fits.
    """
    if request.num_gpu_blocks is not None:
        return request.num_gpu_blocks
    if request.kv_cache_memory is not None:
        memory, maximum, advice = request.kv_cache_memory, None, "raise --kv-cache-memory"
    elif available_bytes is not None:
        advice = "raise --gpu-memory-utilization or lower --max-num-batched-tokens"
        memory, maximum = available_bytes, None
    else:
        by_default = CPU_POOL_BYTES + request.num_state_blocks * bytes_per_block
        memory, maximum, advice = _half_at_most(by_default, request.host_memory), request.max_useful_blocks, None
    count = max(memory, 0) // bytes_per_block - request.num_padding_blocks
    if count < 1:
        raise ConfigurationError(
            f"the KV pool has {shown_bytes(max(memory, 0))} and one block takes {shown_bytes(bytes_per_block)}; "
            f"{advice or 'set --kv-cache-memory'} or lower --block-size"
        )
    return count if maximum is None else min(count, maximum)


def num_host_blocks(
    swap_space: int | None, bytes_per_block: int, device: torch.device, gpu_blocks: int, left_bytes: int | None = None
) -> int:
    """The number of blocks on the host, for swapped content.

    Args:
        swap_space: Bytes. None means 4 GiB with CUDA. On the CPU, None means the number of blocks of the pool there, at
            most 1 GiB, and at most half of the memory that is left.
        bytes_per_block: Over all layers.
        device: Where the other pool is.
        gpu_blocks: The number of its blocks.
        left_bytes: Memory of this machine that the other pool leaves; None if unknown.

    Raises:
        ConfigurationError: a size that holds no block, or is more than is left.
    """
    if swap_space is None:
        on_cpu = device.type == "cpu"
        count = _half_at_most(CPU_SWAP_BYTES if on_cpu else PINNED_SWAP_BYTES, left_bytes) // bytes_per_block
        return min(count, gpu_blocks) if on_cpu else count
    # Untouched memory costs nothing, so that too much of it would be granted, and the process killed when it is used.
    if left_bytes is not None and swap_space > left_bytes:
        part = " in addition to the KV pool" if device.type == "cpu" else ""
        raise ConfigurationError(
            f"--swap-space is {shown_bytes(swap_space)}; {shown_bytes(left_bytes)} of memory are available to "
            f"this worker{part}; set it to at most that"
        )
    if 0 < swap_space < bytes_per_block:
        raise ConfigurationError(
            f"--swap-space is {shown_bytes(swap_space)} and one block takes {shown_bytes(bytes_per_block)}; raise it, "
            "or use 0 for none"
        )
    return swap_space // bytes_per_block


def _half_at_most(num_bytes: int, left_bytes: int | None) -> int:
    """Bytes to take by default: at most half of `left_bytes`."""
    return num_bytes if left_bytes is None else min(num_bytes, left_bytes // 2)


def _check_memory(request: PoolRequest, pool_bytes: int) -> None:
    """Checks the size of a pool on the CPU before it is mapped: pages are allocated when they are touched, and a
    process that gets none is killed.

    Raises:
        ConfigurationError: this machine does not have the memory.
    """
    if request.host_memory is None or pool_bytes <= request.host_memory:
        return
    if request.num_gpu_blocks is not None:
        given = f"--num-gpu-blocks is {request.num_gpu_blocks}, which take {shown_bytes(pool_bytes)}"
    else:
        given = f"--kv-cache-memory is {shown_bytes(request.kv_cache_memory or pool_bytes)}"
    raise ConfigurationError(
        f"{given}; {shown_bytes(request.host_memory)} of memory are available to this worker; set it to at most that"
    )


def pool_geometry(
    model: CausalLM, request: PoolRequest, available_bytes: int | None, draft_model: CausalLM | None = None
) -> PoolGeometry:
    """The shape of the pool for a model. ConfigurationError when not one block fits."""
    dtype = request.dtype or model.dtype
    cut = request.cut or LayerCut(model.cache_layers)
    of_model = block_bytes(model, request.block_size, dtype, cut.slots)
    bytes_per_block = of_model + (0 if draft_model is None else block_bytes(draft_model, request.block_size, dtype))
    gpu_blocks = num_gpu_blocks(request, bytes_per_block, available_bytes)
    left_bytes = request.host_memory
    if model.device.type == "cpu":
        pool_bytes = gpu_blocks * bytes_per_block
        _check_memory(request, pool_bytes)
        left_bytes = None if left_bytes is None else left_bytes - pool_bytes
    return PoolGeometry(
        block_size=request.block_size,
        num_gpu_blocks=gpu_blocks,
        num_host_blocks=num_host_blocks(request.swap_space, bytes_per_block, model.device, gpu_blocks, left_bytes),
        num_layers=len(cut.slots),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        block_bytes=bytes_per_block,
        lines_per_token=model.lines_per_token,
        groups=cut.groups,
        state_blocks=0 if model.state is None else model.state.num_blocks(of_model),
    )


def allocate_pool(
    geometry: PoolGeometry,
    device: torch.device,
    dtype: torch.dtype,
    *,
    with_padding: bool = False,
    num_draft_states: int = 0,
    place: PoolFile | None = None,
    layers: Sequence[CacheLayer] | None = None,
    draft_model: CausalLM | None = None,
) -> KvPool:
    """Allocates all tensors: the device's zero, the host's untouched, and pinned if the device copies by DMA.

    The system allocates host memory that is not pinned when blocks are first written; see `KvPool.populate`.

    Args:
        dtype: of keys and values.
        with_padding: adds blocks on the device for what is computed and not kept.
        num_draft_states: as `KvPool` has them, with padding.
        place: file of a pool on the CPU that may hold blocks already. Without one it is private memory.
        layers: `LayerCut.slots`; None if all have the heads of the geometry.
        draft_model: has further layers.

    Raises:
        ConfigurationError: there is not enough memory.
    """
    num_padding = 1 + geometry.state_blocks * (1 + num_draft_states) if with_padding else 0
    gpu_shapes, host_shapes = (
        _layer_shapes(geometry, num_blocks, dtype, layers, draft_model)
        for num_blocks in (geometry.num_gpu_blocks + num_padding, geometry.num_host_blocks)
    )
    try:
        mapped = None if place is None else place.map(gpu_shapes[0][1], gpu_shapes, dtype)
        gpu, seals = mapped or (tuple(zeros(shape, dtype, device) for shape in gpu_shapes), None)
        pinned = device.type == "cuda" and geometry.num_host_blocks > 0
        # One allocation for all layers of a shape: torch rounds each pinned one up to a power of two.
        host = tuple(
            layer
            for shape, layers in groupby(host_shapes)
            for layer in torch.empty((len(list(layers)), *shape), dtype=dtype, pin_memory=pinned)
        )
    except (RuntimeError, MemoryError) as error:
        total = (geometry.num_gpu_blocks + geometry.num_host_blocks) * geometry.block_bytes
        raise ConfigurationError(
            f"cannot allocate the KV pool: {geometry.num_gpu_blocks} blocks on {device} and {geometry.num_host_blocks} "
            f"on the host take {shown_bytes(total)}; set a smaller --kv-cache-memory, --num-gpu-blocks or --swap-space"
        ) from error
    if seals is not None:
        # An earlier start may have had fewer of these blocks, and sequences there.
        seals.begin_write(np.arange(geometry.num_gpu_blocks, geometry.num_gpu_blocks + num_padding), 0)
    padding_block = geometry.num_gpu_blocks if with_padding else None
    return KvPool(geometry, gpu, host, padding_block, num_draft_states, seals)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory on the CPU only when they are touched."""
    return lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def _part_of(slot: Tensor, layer: CacheLayer, part: int) -> Tensor:
    """The cache of a layer: the slot, or a part of each of its blocks."""
    num_lines, num_blocks, num_heads, block_size, width = slot.shape
    if num_heads == layer.num_kv_heads and (slot.dtype == torch.int8 or width == layer.head_dim):
        return slot
    shape = (num_lines, num_blocks, -1, layer.num_kv_heads, block_size, layer.head_dim)
    return slot.view(shape)[:, :, part]


def _populate_and_collapse(tensor: Tensor, start: int, num_bytes: int) -> bool:
    # Without huge pages it works, too.
    return populate(tensor, start, num_bytes) and (collapse(tensor, start, num_bytes) or True)


def _populate_beside(
    layers: Sequence["weakref.ref[Tensor]"], half: int, fill: Fill, is_released: threading.Event
) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    _populate(layers, half, half, fill, is_released, rest=_REST)


def _populate(
    layers: Sequence["weakref.ref[Tensor]"],
    end: int,
    half: int,
    fill: Fill,
    is_released: threading.Event,
    *,
    rest: float = 0.0,
    max_s: float = math.inf,
) -> bool:
    """Populates the first `end` bytes of keys and of values of all layers, in the order in which blocks are handed out.

    Args:
        end, half: for a layer with `half` bytes of keys; the same share of a layer with fewer bytes.
        fill: populates some bytes of a layer.
        is_released: It stops where this is set.
        rest: After each part it sleeps this many times as long as the part took.
        max_s: It stops after that time.

    Returns:
        False if nothing more can be populated: the pool is gone, memory runs short, or the system cannot do it.
    """
    deadline = clock.monotonic() + max_s
    for start in range(0, end, _POPULATED_AT_ONCE):
        num_bytes = min(_POPULATED_AT_ONCE, end - start)
        left = available_memory()
        if left is not None and left < _KEPT_FREE + 2 * num_bytes * len(layers):
            warning = "memory runs short: %s are available, and the KV pool will take more; lower --kv-cache-memory"
            _logger.warning(warning, shown_bytes(left))
            return False
        for layer in layers:
            started_at = clock.monotonic()
            if started_at >= deadline:
                return True
            tensor = layer()
            if is_released.is_set() or tensor is None:
                return False
            values = tensor.nbytes // tensor.shape[0]
            first, last = (place * values // half for place in (start, start + num_bytes))
            if not all(fill(tensor, part + first, last - first) for part in range(0, tensor.nbytes, values)):
                return False
            del tensor
            clock.sleep(rest * (clock.monotonic() - started_at))
    return True


def _layer_shapes(
    geometry: PoolGeometry,
    num_blocks: int,
    dtype: torch.dtype,
    layers: Sequence[CacheLayer] | None,
    draft_model: CausalLM | None,
) -> list[tuple[int, ...]]:
    if layers is None:
        layers = [CacheLayer(geometry.num_kv_heads, geometry.head_dim)] * geometry.num_layers
    of_models = [(geometry.lines_per_token, layers)]
    arenas, of_draft_model = list[tuple[int, ...]](), 0
    if draft_model is not None:
        of_models.append((draft_model.lines_per_token, draft_model.cache_layers))
        of_draft_model = block_bytes(draft_model, geometry.block_size, dtype)
    if geometry.state_blocks:
        arenas = [arena_shape(num_blocks, geometry.block_bytes - of_draft_model, dtype)]
        del of_models[0]
    return arenas + [
        (num_lines, num_blocks, layer.num_kv_heads, geometry.block_size, line_width(layer.head_dim, dtype))
        for num_lines, of_model in of_models
        for layer in of_model
    ]
