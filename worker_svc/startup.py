"""From settings to a worker that is ready for steps: model, KV pool, first steps, a processor for each thread."""

import ctypes
import logging
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from tokenizers import Tokenizer

import quire
from kernels import ops
from kernels.cpu.library import LibraryUnavailableError, find_open_mp
from kernels.packed_weight import Quantization
from quire.common.v1.common_pb2 import SamplingParameters
from quire.constraints.matcher import Vocabulary
from quire.model_files.adapter_files import MAX_RANK, MAX_RANK_ON_GPU
from quire.model_files.model_directory import EMBEDDING_MODULES, ModelDirectory
from quire.model_files.model_source import resolve_model
from quire.model_files.progress import (
    PROFILING,
    READING,
    RECORDING,
    WARMING_UP,
    LoadProgress,
    Report,
    no_report,
    shown_bytes,
)
from quire.rpc.address import is_local
from quire.rpc.tls import Role, TlsIdentity
from quire.runtime import clock
from quire.runtime.processors import available_memory, cores, num_processors
from quire.runtime.settings import ConfigurationError
from quire.service.compatibility import UNKNOWN_MODEL, ModelFingerprint
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.device.disk_tier import BlockFile, DiskFailsError, DiskTier, file_of_rank, remove_files_of_more_ranks
from worker_svc.device.draft_choice import PayingDrafts
from worker_svc.device.kv_pool import KvPool, PoolPlace, PoolRequest, allocate_pool, block_bytes, pool_geometry
from worker_svc.device.pass_times import PassCosts, PassTimes
from worker_svc.device.pool_blocks import PoolBlocks
from worker_svc.device.pool_file import KvNamespace, PoolFile
from worker_svc.device.replay import check_cuda_graphs
from worker_svc.device.runner import ModelRunner, record_cuda_graphs
from worker_svc.loaded_adapters import AdapterSlots, takes_adapters
from worker_svc.models.base import CausalLM
from worker_svc.models.registry import load_model, resolve_dtype
from worker_svc.parallel.ranks import Ranks
from worker_svc.parallel.rendezvous import rendezvous
from worker_svc.protocol.stream import Worker
from worker_svc.sampling.constraints import RowMatchers, TemplateCache
from worker_svc.sampling.drafters import AUTO, KINDS, Drafter, Drafters
from worker_svc.settings import WorkerSettings
from worker_svc.step import (
    AdmittedStep,
    AssignRow,
    Batch,
    CacheOperations,
    LogitRules,
    ModelGeometry,
    RowChanges,
    RowSampling,
    SealedBlocks,
    Step,
    WorkerInfo,
    WorkerLimits,
)
from worker_svc.thread_binding import OWN_BINDING, processors_for
from worker_svc.weights import DTYPE_BYTES, Checkpoint

MAX_STEPS_IN_FLIGHT = 2
MAX_LOGPROBS = 64
_MAX_ADAPTERS = 8
_KV_DISK_BYTES = 10 << 30
_PROGRESS_INTERVAL_S = 2.0
# One parameter of each kind, so that every path of the sampler has been taken.
_SAMPLING = RowSampling(
    SamplingParameters(temperature=1.0, top_p=0.9, min_p=0.01),
    logprobs=1,
    prompt_logprobs=1,
    rules=LogitRules(presence_penalty=0.5, repetition_penalty=1.1, bad_sequences=(np.zeros(2, np.int32),)),
)
_PLAIN_SAMPLING = RowSampling(SamplingParameters(temperature=1.0, top_p=1.0))
# On a GPU, attention always cuts a longer context into pieces (`kernels.cuda.attention`), by kernels of its own.
_CUT_LENGTH = 2049
_MEASURED_S, _MEASURED_LARGE_S, _MAX_MEASURED = 0.1, 0.02, 40
_ROWS_MEASURED, _MAX_ROWS_MEASURED, _LONG_PASS_US = 8, 64, 25_000
"""Passes are measured up to `_ROWS_MEASURED` rows, and beyond that while half the rows take at most `_LONG_PASS_US`,
once each: the start waits for these measurements, and later passes correct small errors."""
_CONTEXT_MEASURED = 512
_MAX_PASSES = 8
_MIN_FIXED_TOKENS, _MAX_FIXED_TOKENS = 2, 1024
_NO_PAIRS = np.zeros((0, 2), np.int32)
_NO_MOVES = CacheOperations(_NO_PAIRS, _NO_PAIRS, _NO_PAIRS)
_logger = logging.getLogger(__name__)


def build_worker(
    settings: WorkerSettings,
    device_loop: DeviceLoop,
    stopping: threading.Event | None = None,
    report: Report = no_report,
) -> Worker:
    """Loads the model, sizes and allocates the pool, and runs the first steps. To be called in the device thread.

    Args:
        report: called with the progress of loading.
        stopping: set when this process must stop; then the end of another rank is no reason to leave.

    Raises:
        ConfigurationError: the settings do not fit the model, the device or the memory.
    """
    device = choose_device(settings.device, settings.tensor_parallel_rank)
    # torch counts the processors of the machine and ignores the limits of a container.
    torch.set_num_threads(settings.num_threads or min(torch.get_num_threads(), num_processors()))
    ranks = rendezvous(settings, device, stopping or threading.Event())
    report = LoggedProgress(report)
    directory = ModelDirectory.open(resolve_model(settings.model, report=report))
    dtype = resolve_dtype(directory.config, settings.dtype, device)
    _logger.info("loading %s from %s in %s on %s", directory.architecture, directory.path, dtype, device)
    log_what_is_not_served(directory)
    if device.type == "cpu":
        check_weights_fit(directory, dtype, settings)
    load = partial(
        load_model,
        device=device,
        dtype=dtype,
        ranks=ranks,
        progress=lambda done, total: report(LoadProgress(READING, done, total)),
        model_impl=settings.model_impl,
        quantization=Quantization(settings.quantization),
        max_model_len=settings.max_model_len,
    )
    draft_directory = _draft_directory(settings, directory, device)
    # Beside the weights, whose reading leaves the interpreter to others.
    templates = TemplateCache(partial(Vocabulary.of_model, directory, directory.config.get("vocab_size")))
    try:
        model = load(directory)
        if model.rotation is not None:
            _logger.warning("%s: %s", directory.architecture, model.rotation)
        draft = None
        if draft_directory is not None:
            longest = settings.max_model_len or model.max_model_len
            draft = DraftPart(load(draft_directory, max_model_len=longest), ModelFingerprint.read(draft_directory))
        _release_freed_memory()
        worker = make_worker(model, settings, device_loop, ModelFingerprint.read(directory), templates, report, draft)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"the model and a step of {settings.max_num_batched_tokens} tokens do not fit on {device}; "
            "lower --max-num-batched-tokens or --max-num-seqs, or choose a smaller --dtype"
        ) from error
    if device.type == "cpu" and settings.thread_binding == "auto":
        bind_threads(ranks)
    return worker


def log_what_is_not_served(directory: ModelDirectory) -> None:
    """Warns of a model that is made for more than texts, or for something else."""
    if directory.whole is not None:
        _logger.warning("%s: of %s, only the language model is served", directory.path, directory.whole)
    if (directory.path / EMBEDDING_MODULES).is_file():
        _logger.warning(
            "%s has %s, as models of embeddings have: Quire generates text with it and gives no embeddings",
            directory.path,
            EMBEDDING_MODULES,
        )


@dataclass(frozen=True, slots=True)
class DraftPart:
    """A draft model that was loaded."""

    model: CausalLM
    fingerprint: ModelFingerprint


def make_worker(
    model: CausalLM,
    settings: WorkerSettings,
    device_loop: DeviceLoop,
    fingerprint: ModelFingerprint = UNKNOWN_MODEL,
    templates: TemplateCache | None = None,
    report: Report = no_report,
    draft: DraftPart | None = None,
) -> Worker:
    """The worker of a loaded model; without `templates` no row has a constraint.

    Raises:
        ConfigurationError: the device has no attention for the model's heads, or not the memory or the graphs that the
            settings ask for.
    """
    _check_head_dim(model)
    ranks = model.ranks
    with_graphs = settings.cuda_graphs == "on"
    if with_graphs:
        check_cuda_graphs(model)
    geometry = model_geometry(model, settings.max_model_len)
    adapters, max_adapters = make_adapter_slots(model, settings)
    drafter = _make_drafter(model, settings)
    is_multi_step = model.device.type == "cpu" and ranks.size == 1 and settings.multi_step_ms > 0
    limits = WorkerLimits(
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        MAX_STEPS_IN_FLIGHT,
        MAX_LOGPROBS,
        max_adapters,
        0 if drafter is None else settings.max_drafts,
        max_passes=_MAX_PASSES if is_multi_step else 1,
    )
    report(LoadProgress(PROFILING))
    draft_model = None if draft is None else _checked_draft_model(draft.model, geometry)
    namespace = kv_namespace(model, settings, fingerprint, draft)
    pool = _make_pool(model, geometry, limits, settings, namespace, draft_model)
    # On the CPU, the masks of a step are made on the processors that run the model; else while a GPU runs it.
    on_host = model.device.type == "cpu"
    num_threads, host_width = (1, model.vocab_size) if on_host else (max(1, num_processors() // 2), None)
    matchers = None
    if templates is not None:
        matchers = RowMatchers(templates, num_threads=num_threads, host_width=host_width)
    multi_step_s = settings.multi_step_ms / 1e3 if is_multi_step else 0.0
    runner = ModelRunner(
        model,
        pool,
        geometry,
        limits,
        matchers=matchers,
        drafter=drafter,
        multi_step_s=multi_step_s,
        draft_model=draft_model,
    )
    if with_graphs:
        report(LoadProgress(RECORDING))
        record_cuda_graphs(runner, model.device)
    report(LoadProgress(WARMING_UP))
    warm_up(runner, pool, geometry.max_model_len, limits)
    if templates is not None:
        # Before passes are measured, which this would disturb, and before a request has to wait for it.
        templates.wait_for_vocabulary()
    # The tokens of a whole step, and a partly filled block for each of its sequences.
    pool.populate(-(-limits.max_num_batched_tokens // settings.block_size) + limits.max_num_rows)
    device_loop.use(runner, is_lost=partial(is_lost, model.device), on_failure=ranks.fail)
    # One generation for all ranks, so that the same bytes of a step are right for each of them.
    (negative_generation,) = ranks.smallest(-clock.unix_ns())
    if drafter is not None or is_multi_step:
        costs = _measure_passes(runner, limits, geometry, pool, ranks)
        times = PassTimes(costs)
        runner.predict_passes(times)
        if drafter is not None:
            costs, times = (PassCosts(), PassTimes(PassCosts())) if costs is None else (costs, times)
            # A context is read in the time that its bytes take.
            share = pool.geometry.block_bytes / block_bytes(model, settings.block_size, pool.gpu[0].dtype) - 1
            model_costs = runner.measure_draft_model(share * costs.context_s)
            runner.choose_drafts(PayingDrafts(limits.max_num_rows, times, model_costs))
            limits = replace(limits, fixed_tokens=_fixed_tokens(costs))
    info = WorkerInfo(-negative_generation, ranks.rank, ranks.size, pool.geometry, geometry, limits, fingerprint)
    info = replace(
        info,
        # The namespace of the whole group: each rank fetches from the same rank.
        kv_namespace=replace(namespace, rank=0).digest().hex() if fingerprint.weights else "",
        transfer_endpoint=settings.transfer_endpoint or "",
    )
    blocks = PoolBlocks(pool, runner.seals) if info.kv_namespace else None
    disk = None if blocks is None else _open_disk_tier(model, settings, namespace, blocks, pool)
    tls = None if settings.tls_dir is None else TlsIdentity.of(settings.tls_dir, Role.WORKER)
    if templates is None:
        return Worker(info, runner, device_loop, ranks.agree, adapters=adapters, blocks=blocks, tls=tls, disk=disk)
    return Worker(info, runner, device_loop, ranks.agree, templates.prepare, adapters, blocks, tls, disk)


def make_adapter_slots(model: CausalLM, settings: WorkerSettings) -> tuple[AdapterSlots | None, int]:
    """The slots of adapters, and their number. To be made before the KV pool, which takes the memory that they leave.

    Raises:
        ConfigurationError: the settings ask for adapters, and this model takes none.
    """
    on_host, possible = model.device.type == "cpu", takes_adapters(model)
    number = settings.max_adapters
    if number is None:
        number = _MAX_ADAPTERS if on_host and possible else 0
    if number == 0:
        return None, 0
    if not possible:
        raise ConfigurationError(
            f"--max-adapters is {number}, and {model.architecture} runs through transformers' code, which takes no "
            "adapters; use 0"
        )
    max_rank = settings.max_adapter_rank or (MAX_RANK if on_host else MAX_RANK_ON_GPU)
    return AdapterSlots(model, number, max_rank), number


def choose_device(name: str, rank: int = 0) -> torch.device:
    """The device of a setting; auto is the CPU, since GPUs are less tried. ConfigurationError when there is none.

    With several GPUs each rank takes its own, and makes it the current one of the calling thread, which queues kernels.
    """
    if name != "cuda":
        if name == "auto" and torch.cuda.is_available():
            found = torch.cuda.get_device_name()
            _logger.info("--device auto runs on the CPU; torch finds a GPU, %s, which --device cuda uses", found)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigurationError("--device is cuda, but torch sees no CUDA device; use --device cpu")
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def model_geometry(model: CausalLM, max_model_len: int | None) -> ModelGeometry:
    """The geometry that the scheduler sees. Sequences may be limited to fewer tokens than the model supports."""
    if max_model_len is not None and max_model_len > model.max_model_len:
        raise ConfigurationError(
            f"--max-model-len is {max_model_len}; this model has at most {model.max_model_len} positions"
        )
    return ModelGeometry(
        architecture=model.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=model.vocab_size,
        max_model_len=max_model_len or model.max_model_len,
        device=str(model.device),
        device_name=ops.name_of(model.device),
    )


def _check_head_dim(model: CausalLM) -> None:
    largest = ops.largest_head_dim(model.device)
    if largest is not None and model.head_dim > largest:
        raise ConfigurationError(
            f"head_dim is {model.head_dim} in the widest layer of {model.architecture}; it must be at most {largest} "
            f"on {model.device.type}, use --device cpu"
        )


def _make_drafter(model: CausalLM, settings: WorkerSettings) -> Drafter | None:
    named = {*settings.speculate, *(AUTO if "auto" in settings.speculate and model.device.type == "cpu" else ())}
    drafters = [make() for name, make in KINDS.items() if name in named]
    if not drafters and "draft" not in settings.speculate:
        return None
    if model.device.type != "cpu":
        raise ConfigurationError(
            f"--speculate is {','.join(settings.speculate)}, which is for cpu, and the device is {model.device.type}; "
            "use off"
        )
    return Drafters(drafters)


def _draft_directory(
    settings: WorkerSettings, directory: ModelDirectory, device: torch.device
) -> ModelDirectory | None:
    """Where the draft model is. ConfigurationError if it cannot guess for the model of `directory`."""
    if ("draft" in settings.speculate) != (settings.draft_model is not None):
        given = f"--speculate is {','.join(settings.speculate)} and --draft-model is {settings.draft_model}"
        raise ConfigurationError(f"{given}; give both --draft-model and --speculate draft, or neither")
    if settings.draft_model is None:
        return None
    if device.type != "cpu" or settings.tensor_parallel_size > 1:
        raise ConfigurationError(
            f"--draft-model is for workers on cpu with one rank; this one is on {device.type} with "
            f"{settings.tensor_parallel_size}; leave it out"
        )
    try:
        draft = ModelDirectory.open(resolve_model(settings.draft_model))
    except ConfigurationError as error:
        raise ConfigurationError(f"--draft-model: {error}") from error
    if _vocabulary(draft) != _vocabulary(directory):
        raise ConfigurationError(
            f"the tokenizers of --draft-model {draft.path} and --model {directory.path} have different vocabularies; a "
            "draft model must have the same tokens"
        )
    return draft


def _vocabulary(directory: ModelDirectory) -> dict[str, int]:
    return Tokenizer.from_buffer(directory.tokenizer_json()).get_vocab()


def _checked_draft_model(model: CausalLM, geometry: ModelGeometry) -> CausalLM:
    if model.max_model_len < geometry.max_model_len:
        raise ConfigurationError(
            f"--draft-model has {model.max_model_len} positions and sequences have up to {geometry.max_model_len} "
            f"tokens; set --max-model-len to {model.max_model_len} at most"
        )
    return model


def kv_namespace(
    model: CausalLM, settings: WorkerSettings, fingerprint: ModelFingerprint, draft: DraftPart | None = None
) -> KvNamespace:
    """Names the format and the model of this rank's blocks."""
    of_draft = () if draft is None else (draft.fingerprint.config, draft.fingerprint.weights)
    rotations = (each.rotation for each in ((model,) if draft is None else (model, draft.model)))
    return KvNamespace(
        model=(fingerprint.config, fingerprint.tokenizer, fingerprint.weights, *of_draft),
        dtype=str(model.dtype),
        kv_dtype=str(requested_pool_dtype(settings.kv_cache_dtype, model)),
        block_size=settings.block_size,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
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


def _place_of_pool(model: CausalLM, settings: WorkerSettings, namespace: KvNamespace) -> PoolPlace | None:
    """The file of the pool. A model that is not known has none: its blocks might be another's."""
    config, _, *weights = namespace.model
    is_known = config and all(weights)
    if settings.kv_cache_file is None or settings.persistent_kv_cache == "off" or not is_known:
        return None
    if model.device.type != "cpu":
        _logger.info("the KV pool is on %s and ends with this worker", model.device)
        return None
    return PoolPlace(PoolFile.open(settings.kv_cache_file), namespace, settings.persistent_kv_cache == "auto")


def _open_disk_tier(
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


def _make_pool(
    model: CausalLM,
    geometry: ModelGeometry,
    limits: WorkerLimits,
    settings: WorkerSettings,
    namespace: KvNamespace,
    draft_model: CausalLM | None,
) -> KvPool:
    dtype = requested_pool_dtype(settings.kv_cache_dtype, model)
    place = _place_of_pool(model, settings, namespace)
    # On the CPU, the padding block takes results that are not kept (`ModelRunner._forward_pairs`).
    with_padding = settings.cuda_graphs == "on" or model.device.type == "cpu"
    count, host_memory = settings.num_gpu_blocks, _memory_of_each_rank(settings)
    if place is not None:
        if count is None and settings.kv_cache_memory is None:
            # A default follows from the memory that is available, which is not the same at each start.
            held = place.file.num_held(place.namespace)
            count = None if held is None else held - with_padding
        host_memory = None if host_memory is None else host_memory + place.file.held_bytes
    request = PoolRequest(
        block_size=settings.block_size,
        num_gpu_blocks=count,
        kv_cache_memory=settings.kv_cache_memory,
        swap_space=settings.swap_space,
        max_useful_blocks=limits.max_num_rows * -(-geometry.max_model_len // settings.block_size),
        dtype=dtype,
        num_padding_blocks=int(settings.cuda_graphs == "on"),
        host_memory=host_memory,
    )
    available = None
    if model.device.type == "cuda" and request.num_gpu_blocks is None and request.kv_cache_memory is None:
        available = memory_for_pool(model, geometry, limits, settings.block_size, settings.gpu_memory_utilization)
    shape = pool_geometry(model, request, available, draft_model)
    # The rank with the least memory decides for all: each block is on every rank.
    num_gpu_blocks, num_host_blocks = model.ranks.smallest(shape.num_gpu_blocks, shape.num_host_blocks)
    shape = replace(shape, num_gpu_blocks=num_gpu_blocks, num_host_blocks=num_host_blocks)
    pool = allocate_pool(shape, model.device, dtype, with_padding=with_padding, place=place, draft_model=draft_model)
    tokens = shape.num_gpu_blocks * shape.block_size
    _logger.info(
        "KV pool: %d blocks of %d tokens in %s (%.1f MiB), %d on the host",
        shape.num_gpu_blocks,
        shape.block_size,
        shape.dtype,
        shape.num_gpu_blocks * shape.block_bytes / 2**20,
        shape.num_host_blocks,
    )
    if tokens < geometry.max_model_len:
        _logger.warning("the KV pool holds %d tokens; sequences longer than that are refused", tokens)
    return pool


def check_weights_fit(described: ModelDirectory, dtype: torch.dtype, settings: WorkerSettings) -> None:
    """Raises ConfigurationError where the weights of a model are larger than the memory that is available for them on
    the CPU: a process that takes more is killed, and started again, without end. Rounding makes them smaller."""
    quantization = Quantization(settings.quantization)
    if quantization is Quantization.INT8_WEIGHT_ONLY:
        return
    width = 1 if quantization is Quantization.INT8_DYNAMIC else dtype.itemsize
    stored = Checkpoint.of_model(described).tensors.values()
    # Codes take the size that they have in the file, or more; codes of GGUF files stay codes only with bfloat16.
    has_codes = described.gguf is None or dtype == torch.bfloat16
    sizes = (
        each.num_bytes if has_codes and each.dtype not in DTYPE_BYTES else math.prod(each.shape) * width
        for each in stored
    )
    size, available = sum(sizes) // settings.tensor_parallel_size, _memory_of_each_rank(settings)
    if available is not None and size > available:
        raise ConfigurationError(
            f"the weights of {described.path} take {shown_bytes(size)}; {shown_bytes(available)} of memory are "
            "available to this worker; take a model with fewer parameters or in fewer bits (`quire models` says what "
            "each takes; `quire quantize` makes a smaller one), or more memory"
        )


def _memory_of_each_rank(settings: WorkerSettings) -> int | None:
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


class LoggedProgress:
    """A report that also logs: each phase, and the bytes of a phase every few seconds and at its end."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._last = clock.monotonic()
        self._phase = ""

    def __call__(self, progress: LoadProgress) -> None:
        self._report(progress)
        now = clock.monotonic()
        is_new, is_done = progress.phase != self._phase, progress.percent == 100
        if is_new or is_done or now - self._last >= _PROGRESS_INTERVAL_S:
            self._last, self._phase = now, progress.phase
            _logger.info("loading: %s", progress)


def is_lost(device: torch.device) -> bool:
    """Whether the device accepts no more work from this process, as after an illegal address. Waits for queued work."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _release_freed_memory() -> None:
    """Returns freed memory that the C library keeps to the system, if it can.

    Loading allocates and frees every matrix once before it is packed. Measured with a 160M model: 45 MB stay unused in
    bfloat16, 117 MB in float32.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _prefill_step(
    lengths: list[int],
    num_new: list[int],
    block_size: int,
    block: int = 0,
    moves: CacheOperations = _NO_MOVES,
    sampling: RowSampling = _SAMPLING,
) -> AdmittedStep:
    """A step that assigns sequences to the first rows, computes the last new tokens of each and samples from each.

    All their blocks are the same one: the results do not matter. A single new token is one of the output.
    """
    rows, none = np.arange(len(lengths), dtype=np.int32), np.zeros(0, np.int32)
    assigned = tuple(
        AssignRow(
            row,
            np.zeros(length, np.int32),
            np.full(-(-length // block_size), block, np.int32),
            sampling,
            max(length - (new == 1), 1),
        )
        for row, (length, new) in enumerate(zip(lengths, num_new, strict=True))
    )
    new_tokens = np.array(num_new, np.int32)
    step = Step(
        step_id=0,
        scheduler_epoch=0,
        cache_operations=moves,
        row_changes=RowChanges(none, assigned, _NO_PAIRS, (), (), np.zeros((0, 3), np.int32)),
        batch=Batch(rows, new_tokens, np.array(lengths, np.int32) - new_tokens, np.stack((rows, rows), axis=1)),
        sealed=SealedBlocks(none, np.zeros((0, 32), np.uint8)),
    )
    return AdmittedStep(step, np.full(1, block, np.int32))


def _free_block(pool: KvPool) -> int:
    """A block that the first steps may write to: no block that may be final already, if there is another."""
    return pool.padding_block or 0


def warm_up(runner: ModelRunner, pool: KvPool, max_model_len: int, limits: WorkerLimits) -> None:
    """Runs sequences in one block, so that the first request does not wait for lazy initialisation or compilation.

    The steps compute several tokens if a step may have them, a single token, and one token of a long context:
    attention has a kernel for each. Before the last one, the block is moved in every way that this pool has.
    """
    block, block_size = _free_block(pool), pool.geometry.block_size
    several = min(2, block_size, max_model_len, limits.max_num_batched_tokens)
    for length in (several, 1):
        runner.launch(_prefill_step([length], [length], block_size, block)).wait()
    length = min(_CUT_LENGTH, max_model_len)
    runner.launch(_prefill_step([length], [1], block_size, block, _every_move(pool))).wait()


def _measure_passes(
    runner: ModelRunner, limits: WorkerLimits, geometry: ModelGeometry, pool: KvPool, ranks: Ranks
) -> PassCosts | None:
    """Measures the passes of decodes: the least of several times each, to exclude the load of other processes. All
    ranks get the same result. None if a step has at most one row."""
    block, block_size = _free_block(pool), pool.geometry.block_size

    def decodes(*lengths: int) -> AdmittedStep:
        """A step in which each row computes the last token of its length."""
        return _prefill_step(list(lengths), [1] * len(lengths), block_size, block, sampling=_PLAIN_SAMPLING)

    max_rows = min(limits.max_num_rows, limits.max_num_batched_tokens, _MAX_ROWS_MEASURED)
    counts = [2**power for power in range(min(max_rows, _ROWS_MEASURED).bit_length())]
    if len(counts) == 1:
        return None
    few, length = counts[min(2, len(counts) - 1)], min(_CONTEXT_MEASURED, geometry.max_model_len)
    # The last step is one sequence with drafts: its rows have a token more each.
    drafted = [max(length - behind, 1) for behind in reversed(range(few))]
    steps = [*(decodes(*[1] * count) for count in counts), decodes(*[length] * few), decodes(*drafted)]
    *micros, long, long_drafted = _least_micros(runner, steps, ranks, measured_s=_MEASURED_S, min_more=1)
    while 2 * counts[-1] <= max_rows and micros[-1] <= _LONG_PASS_US:
        counts.append(2 * counts[-1])
        micros += _least_micros(runner, [decodes(*[1] * counts[-1])], ranks, measured_s=_MEASURED_LARGE_S, min_more=0)
    without = micros[counts.index(few)]
    context_us = max(long - without, 0) / (few * max(length - 1, 1))
    draft_context_us = max(long_drafted - without - context_us * length, 0) / ((few - 1) * length)
    costs = PassCosts.of_measured([each / 1e6 for each in micros], context_us / 1e6, draft_context_us / 1e6)
    _logger.info(
        "decodes of %s rows take %s ms, and %.2f us more for each token of context, of a draft %.2f",
        ", ".join(map(str, counts)),
        ", ".join(f"{1e3 * each:.2f}" for each in costs.seconds),
        context_us,
        draft_context_us,
    )
    return costs


def _least_micros(
    runner: ModelRunner, steps: Sequence[AdmittedStep], ranks: Ranks, *, measured_s: float, min_more: int
) -> tuple[int, ...]:
    """The times of the model and the draws of each of these steps, which run in turn: once, and then for `measured_s`,
    at least `min_more` times. They exclude the cost of assigned rows, which decodes do not have."""
    seconds = [math.inf] * len(steps)

    def measure() -> None:
        for index, step in enumerate(steps):
            timings = runner.launch(step).wait().timings
            seconds[index] = min(seconds[index], (timings.model_us + timings.sample_us) / 1e6)

    measure()
    # All ranks take part in each step, so they run as many.
    (num_more,) = ranks.smallest(int(min(max(measured_s / max(sum(seconds), 1e-6), min_more), _MAX_MEASURED)))
    for _ in range(num_more):
        measure()
    return ranks.smallest(*(max(int(1e6 * each), 1) for each in seconds))


def _fixed_tokens(costs: PassCosts) -> int:
    """`WorkerLimits.fixed_tokens`."""
    last = min(_ROWS_MEASURED.bit_length() - 1, len(costs.num_rows) - 1)
    of_token = (costs.seconds[last] - costs.seconds[0]) / (costs.num_rows[last] - 1)
    return min(max(int(costs.seconds[0] / of_token - 1), _MIN_FIXED_TOKENS), _MAX_FIXED_TOKENS)


def _every_move(pool: KvPool) -> CacheOperations:
    """A block to the host and back if there are blocks, and another one onto it if there is one."""
    block, geometry = _free_block(pool), pool.geometry
    out = np.array([(block, 0)], np.int32)[: geometry.num_host_blocks]
    copy = np.array([(1 if block == 0 else 0, block)], np.int32)[: pool.gpu[0].shape[1] - 1]
    return CacheOperations(out, out[:, ::-1], copy)


def memory_for_pool(
    model: CausalLM, geometry: ModelGeometry, limits: WorkerLimits, block_size: int, utilization: float
) -> int:
    """Bytes of an accelerator that are left for the KV pool while a step of maximal size runs.

    The step runs on a pool of one block that all sequences share: only its memory matters.
    """
    device = model.device
    num_new = _worst_case(limits, geometry.max_model_len)
    # Attention allocates the results of as many pieces for every row as the longest context has.
    lengths = [geometry.max_model_len, *num_new[1:]]
    request = PoolRequest(block_size, num_gpu_blocks=1, kv_cache_memory=None, swap_space=0, max_useful_blocks=1)
    pool = allocate_pool(pool_geometry(model, request, None), device, model.dtype)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner = ModelRunner(model, pool, geometry, limits)
    runner.launch(_prefill_step(lengths, num_new, block_size)).wait()
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    del runner, pool
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - (total - free) - step_bytes


def _worst_case(limits: WorkerLimits, max_model_len: int) -> list[int]:
    """The new tokens of as many rows as a step may have, divided evenly: a maximum of logits and of tokens."""
    num_rows = min(limits.max_num_rows, limits.max_num_batched_tokens)
    least, over = divmod(limits.max_num_batched_tokens, num_rows)
    return [min(least + (row < over), max_model_len) for row in range(num_rows)]


def bind_threads(ranks: Ranks) -> None:
    """Binds the calling thread and its OpenMP team if `processors_for` gives each a processor (ADR 0011)."""
    if any(name in os.environ for name in OWN_BINDING):
        return
    processors = processors_for(ranks.rank, ranks.size, torch.get_num_threads(), cores(os.sched_getaffinity(0)))
    if not processors:
        return
    try:
        bind_team(processors)
    except LibraryUnavailableError as error:
        _logger.warning("threads stay unbound: %s", error)
        return
    _logger.info("threads are bound to processors %s", ", ".join(map(str, processors)))


def bind_team(processors: Sequence[int]) -> None:
    """Binds each thread of the calling thread's OpenMP team, itself included, to one of `processors`. Threads that
    OpenMP creates later are bound by `placed_threads`.

    Raises:
        LibraryUnavailableError: torch uses an OpenMP runtime that this function does not know.
    """
    path = find_open_mp()
    try:
        runtime = ctypes.CDLL(str(path))
        run_on_team, thread_num = runtime.GOMP_parallel, runtime.omp_get_thread_num
    except (OSError, AttributeError) as error:
        raise LibraryUnavailableError(f"{path} is not a usable OpenMP runtime: {error}") from error

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def bind(_: int | None) -> None:
        os.sched_setaffinity(0, {processors[thread_num()]})

    run_on_team(bind, None, len(processors), 0)
