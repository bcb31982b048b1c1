"""The KV pool of a worker: dtype and number of its blocks, the file that keeps them, and the disk tier."""

import logging
from dataclasses import astuple, replace

import torch

import quire
from quire.rpc.address import is_local
from quire.runtime.processors import available_memory
from quire.runtime.settings import ConfigurationError
from quire.service.compatibility import ModelFingerprint
from quire_kernels import ops
from worker_svc.device.disk_tier import BlockFile, DiskFailsError, DiskTier, file_of_rank, remove_files_of_more_ranks
from worker_svc.device.kv_pool import KvPool, PoolRequest, allocate_pool, block_bytes, pool_geometry
from worker_svc.device.layer_cut import LayerCut, cut_layers
from worker_svc.device.pool_blocks import PoolBlocks
from worker_svc.device.pool_file import KvNamespace, PoolFile
from worker_svc.draft_setup import DraftPart, max_state_drafts
from worker_svc.first_steps import memory_for_pool
from worker_svc.models.base import CausalLM
from worker_svc.settings import WorkerSettings
from worker_svc.step import ModelGeometry, WorkerLimits

_KV_DISK_BYTES = 10 << 30
_logger = logging.getLogger(__name__)


def choose_cut(
    model: CausalLM, max_model_len: int, settings: WorkerSettings, draft_model: CausalLM | None = None
) -> LayerCut:
    """The groups of the model's layers. ConfigurationError for layers with states that are not served so."""
    layers = model.cache_layers
    if model.state is not None and model.device.type != "cpu":
        raise ConfigurationError(
            f"layers of {model.architecture} keep states of sequences, and the device is {model.device.type}; use "
            "--device cpu"
        )
    whole, cut = LayerCut(layers), cut_layers(layers, max_model_len, settings.block_size)
    num_shapes, dtype = len({(each.num_kv_heads, each.head_dim) for each in layers}), settings.kv_cache_dtype

    def memory_of(cut: LayerCut) -> int:
        bytes_per_block = block_bytes(model, settings.block_size, requested_pool_dtype(dtype, model), cut.slots)
        return bytes_per_block * cut.groups.max_blocks(max_model_len, settings.block_size)

    if not cut.groups.num_windowed:
        return whole
    if draft_model is not None:
        reason = "blocks hold the layers of a draft model, too"
    elif model.state is not None and memory_of(cut) >= memory_of(whole):
        reason = "a block holds at least a part of a state, and would be larger than its tokens"
    elif num_shapes > 1 and dtype == "int8":
        reason = "in int8, their keys do not fit into the keys of other layers"
    else:
        return cut
    _logger.info("layers with a window keep all tokens: %s", reason)
    return whole


def kv_namespace(
    model: CausalLM,
    cut: LayerCut,
    settings: WorkerSettings,
    fingerprint: ModelFingerprint,
    draft: DraftPart | None = None,
) -> KvNamespace:
    """Names the format and the model of this rank's blocks."""
    of_draft = () if draft is None else (draft.fingerprint.config, draft.fingerprint.weights)
    rotations = (each.rotation for each in ((model,) if draft is None else (model, draft.model)))
    return KvNamespace(
        model=(fingerprint.config, fingerprint.tokenizer, fingerprint.weights, *of_draft),
        dtype=str(model.dtype),
        kv_dtype=str(requested_pool_dtype(settings.kv_cache_dtype, model)),
        block_size=settings.block_size,
        num_layers=len(cut.slots),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        lines_per_token=model.lines_per_token,
        groups=astuple(cut.groups),
        state=() if model.state is None else astuple(model.state),
        rank=model.ranks.rank,
        world_size=model.ranks.size,
        numerics=(
            quire.__version__,
            type(model).__name__,
            settings.quantization,
            *ops.numerics_of(model.device),
            torch.__version__,
            *(f"{rotation.name} rotation" for rotation in rotations if rotation is not None),
        ),
    )


def _place_of_pool(model: CausalLM, settings: WorkerSettings, namespace: KvNamespace) -> PoolFile | None:
    """The file of the pool. A model that is not known has none: its blocks might be another's."""
    config, _, *weights = namespace.model
    is_known = config and all(weights)
    if settings.kv_cache_file is None or settings.persistent_kv_cache == "off" or not is_known:
        return None
    if model.device.type != "cpu":
        _logger.info("the KV pool is on %s and ends with this worker", model.device)
        return None
    return PoolFile(settings.kv_cache_file, namespace, needs_huge_pages=settings.persistent_kv_cache == "auto")


def open_disk_tier(
    model: CausalLM, settings: WorkerSettings, namespace: KvNamespace, blocks: PoolBlocks, pool: KvPool
) -> DiskTier | None:
    """The blocks, or parts of blocks, that this rank has on disk. A single rank reads the newest ones into the pool.
    Several ranks may have different blocks; the blocks that all have are read when a prompt needs them."""
    if settings.kv_disk is None:
        return None
    if model.device.type != "cpu":
        raise ConfigurationError(
            f"--kv-disk is for workers on cpu, and this one is on {model.device.type}; leave it out"
        )
    space = _KV_DISK_BYTES if settings.kv_disk_space is None else settings.kv_disk_space
    path, space = file_of_rank(settings.kv_disk, model.ranks.rank), space // model.ranks.size
    try:
        file = BlockFile(path, space, namespace.digest(), blocks.block_bytes)
    except DiskFailsError as error:
        _logger.warning("no KV blocks go to disk: %s", error)
        return None
    tier = DiskTier(file, blocks, pool.geometry.num_gpu_blocks)
    if model.ranks.size == 1:
        tier.restore()
    if model.ranks.rank == 0:
        remove_files_of_more_ranks(settings.kv_disk, model.ranks.size)
    return tier


def make_pool(
    model: CausalLM,
    cut: LayerCut,
    geometry: ModelGeometry,
    limits: WorkerLimits,
    settings: WorkerSettings,
    namespace: KvNamespace,
    draft_model: CausalLM | None,
) -> KvPool:
    dtype = requested_pool_dtype(settings.kv_cache_dtype, model)
    place = _place_of_pool(model, settings, namespace)
    # On the CPU, padding takes results that are not kept (`ModelRunner._forward_pairs`, and the first steps).
    with_padding = settings.cuda_graphs == "on" or model.device.type == "cpu"
    bytes_per_block = block_bytes(model, settings.block_size, dtype, cut.slots)
    of_state = 0 if model.state is None else model.state.num_blocks(bytes_per_block)
    num_draft_states = min(limits.max_verified, max_state_drafts(model, settings) or 0)
    num_padding = int(with_padding) + of_state * (1 + num_draft_states)
    count, host_memory = settings.num_gpu_blocks, memory_of_each_rank(settings)
    host_memory = None if host_memory is None else int(host_memory * settings.memory_share)
    if place is not None:
        if count is None and settings.kv_cache_memory is None:
            # A default follows from the memory that is available, which is not the same at each start.
            count = None if place.num_held is None else place.num_held - num_padding
        host_memory = None if host_memory is None else host_memory + place.held_bytes
    groups, block_size = cut.groups, settings.block_size
    held = groups.max_blocks(geometry.max_model_len, block_size)
    of_chunks = groups.num_windowed * -(-limits.max_num_batched_tokens // block_size)
    request = PoolRequest(
        block_size=block_size,
        num_gpu_blocks=count,
        kv_cache_memory=settings.kv_cache_memory,
        swap_space=settings.swap_space,
        # Each sequence may have a checkpoint.
        max_useful_blocks=limits.max_num_rows * (held + 2 * of_state) + of_chunks,
        num_state_blocks=limits.max_num_rows * 2 * of_state,
        dtype=dtype,
        num_padding_blocks=num_padding if of_state else int(settings.cuda_graphs == "on"),
        host_memory=host_memory,
        cut=cut,
    )
    available = None
    if model.device.type == "cuda" and request.num_gpu_blocks is None and request.kv_cache_memory is None:
        available = memory_for_pool(model, geometry, limits, settings.block_size, settings.gpu_memory_utilization)
    shape = pool_geometry(model, request, available, draft_model)
    # The rank with the least memory decides for all: each block is on every rank.
    num_gpu_blocks, num_host_blocks = model.ranks.smallest(shape.num_gpu_blocks, shape.num_host_blocks)
    if num_gpu_blocks <= 2 * of_state:
        raise ConfigurationError(
            f"the KV pool has {num_gpu_blocks} blocks; a sequence of {model.architecture} needs room for two states of "
            f"{of_state} blocks and for its tokens, so there must be at least {2 * of_state + 1}: raise "
            "--num-gpu-blocks or --kv-cache-memory"
        )
    shape = replace(shape, num_gpu_blocks=num_gpu_blocks, num_host_blocks=num_host_blocks)
    pool = allocate_pool(
        shape,
        model.device,
        dtype,
        with_padding=with_padding,
        num_draft_states=num_draft_states,
        place=place,
        layers=cut.slots,
        draft_model=draft_model,
    )
    _logger.info(
        "KV pool: %d blocks of %d tokens in %s (%.1f MiB), %d on the host",
        shape.num_gpu_blocks,
        shape.block_size,
        shape.dtype,
        shape.num_gpu_blocks * shape.block_bytes / 2**20,
        shape.num_host_blocks,
    )
    if groups.num_windowed:
        windowed = groups.num_windowed, groups.window
        _logger.info("of the groups of layers, %d keep all tokens and %d the last %d", groups.num_full, *windowed)
    if of_state:
        of_state_bytes = of_state * shape.block_bytes / 2**20
        _logger.info("the state of a sequence takes %d blocks (%.1f MiB)", of_state, of_state_bytes)
        if num_draft_states:
            _logger.info("up to %d states of drafts take %.1f MiB", num_draft_states, num_draft_states * of_state_bytes)
    held += of_state
    if shape.num_gpu_blocks < held:
        maximum = geometry.max_model_len
        _logger.warning("a sequence of %d tokens takes %d blocks; requests that do not fit are refused", maximum, held)
    return pool


def memory_of_each_rank(settings: WorkerSettings) -> int | None:
    """The available memory of this machine, divided by its ranks, before any of them has a pool."""
    available = available_memory()
    ranks_here = settings.tensor_parallel_size if is_local(settings.tensor_parallel_address) else 1
    return None if available is None else available // ranks_here


def requested_pool_dtype(name: str, model: CausalLM) -> torch.dtype:
    """The dtype of a setting; auto takes the model's. ConfigurationError when the device does not have it."""
    if name == "auto":
        return model.dtype
    if model.device.type != "cpu":
        raise ConfigurationError(
            f"--kv-cache-dtype is {name}, which is for cpu, and the device is {model.device.type}; use auto"
        )
    return torch.int8
