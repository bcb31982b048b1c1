"""From settings to a worker that is ready for steps: model, KV pool, first steps, a processor for each thread."""

import ctypes
import logging
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from quire.constraints.matcher import Vocabulary
from quire.model_files.adapter_files import MAX_RANK, MAX_RANK_ON_GPU
from quire.model_files.architectures import ENCODERS, RANKERS
from quire.model_files.embedding_files import vector_files
from quire.model_files.model_directory import ModelDirectory
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
from quire.rpc.tls import Role, TlsIdentity
from quire.runtime import clock
from quire.runtime.processors import cores, num_processors
from quire.runtime.settings import ConfigurationError
from quire.service.compatibility import UNKNOWN_MODEL, ModelFingerprint
from quire_kernels import ops
from quire_kernels.cpu.library import LibraryUnavailableError, find_open_mp
from quire_kernels.packed_weight import Quantization
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.device.pool_blocks import PoolBlocks
from worker_svc.device.pool_file import KvNamespace
from worker_svc.device.replay import check_cuda_graphs
from worker_svc.device.runner import ModelRunner, record_cuda_graphs
from worker_svc.draft_setup import DraftPart, checked_draft_model, draft_directory, make_drafter, max_state_drafts
from worker_svc.encoders.decoder_runner import VectorRunner
from worker_svc.encoders.decoder_setup import VectorPart
from worker_svc.encoders.loading import make_encoder_worker
from worker_svc.first_steps import predict_passes, warm_up
from worker_svc.loaded_adapters import AdapterSlots
from worker_svc.models.base import CausalLM, NativeCausalLM
from worker_svc.models.registry import load_model, resolve_dtype
from worker_svc.parallel.ranks import Ranks
from worker_svc.parallel.rendezvous import rendezvous
from worker_svc.pool_setup import choose_cut, kv_namespace, make_pool, memory_of_each_rank, open_disk_tier
from worker_svc.protocol.stream import Worker
from worker_svc.quantized_module import ExpandedWeight
from worker_svc.quantized_weights import read_quantized_weights, with_mxfp4_experts
from worker_svc.sampling.constraints import RowMatchers, TemplateCache
from worker_svc.settings import WorkerSettings
from worker_svc.step import ModelGeometry, PoolGeometry, WorkerInfo, WorkerLimits
from worker_svc.thread_binding import OWN_BINDING, processors_for
from worker_svc.weights import DTYPE_BYTES, Checkpoint

MAX_STEPS_IN_FLIGHT = 2
MAX_LOGPROBS = 64
_MAX_ADAPTERS = 8
_PROGRESS_INTERVAL_S = 2.0
_MAX_PASSES = 8
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
    files = vector_files(directory, settings.pooling, settings.score_tokens)
    if files is not None and directory.architecture in (ENCODERS | RANKERS):
        worker = make_encoder_worker(
            directory, files, settings, device_loop, device=device, dtype=dtype, ranks=ranks, report=report
        )
        if settings.thread_binding == "auto":
            bind_threads(ranks)
        return worker
    fingerprint, part = ModelFingerprint.read(directory), None
    if files is not None:
        part = VectorPart.make(directory, files, settings, device)
        settings, fingerprint = part.settings(settings), fingerprint.with_vectors(files)
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
    of_draft = draft_directory(settings, directory, device)
    # Beside the weights, whose reading leaves the interpreter to others.
    templates = None
    if part is None:
        templates = TemplateCache(partial(Vocabulary.of_model, directory, directory.config.get("vocab_size")))
    try:
        model = load(directory, head=None if part is None else part.head)
        if model.rotation is not None:
            _logger.warning("%s: %s", directory.architecture, model.rotation)
        draft = None
        if of_draft is not None:
            longest = settings.max_model_len or model.max_model_len
            draft = DraftPart(load(of_draft, max_model_len=longest), ModelFingerprint.read(of_draft))
        _release_freed_memory()
        worker = make_worker(model, settings, device_loop, fingerprint, templates, report, draft, part)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"the model and a step of {settings.max_num_batched_tokens} tokens do not fit on {device}; "
            "lower --max-num-batched-tokens or --max-num-seqs, or choose a smaller --dtype"
        ) from error
    if device.type == "cpu" and settings.thread_binding == "auto":
        bind_threads(ranks)
    return worker


def log_what_is_not_served(directory: ModelDirectory) -> None:
    """Warns of a model that is made for more than texts."""
    if directory.whole is not None:
        _logger.warning("%s: of %s, only the language model is served", directory.path, directory.whole)


def make_worker(
    model: CausalLM,
    settings: WorkerSettings,
    device_loop: DeviceLoop,
    fingerprint: ModelFingerprint = UNKNOWN_MODEL,
    templates: TemplateCache | None = None,
    report: Report = no_report,
    draft: DraftPart | None = None,
    part: VectorPart | None = None,
) -> Worker:
    """The worker of a loaded model; without `templates` no row has a constraint. With `part` it gives vectors.

    Raises:
        ConfigurationError: the device lacks attention for the model's heads, or memory or graphs that settings ask for.
    """
    _check_device(model, settings)
    geometry = model_geometry(model, settings.max_model_len)
    vectors = None
    if part is not None:
        geometry, vectors = part.geometry(model, geometry, settings.max_model_len), part.vectors(model)
    adapters, max_adapters = make_adapter_slots(model, settings)
    drafter = make_drafter(model, settings)
    limits = _step_limits(model, settings, max_adapters, has_drafts=drafter is not None)
    report(LoadProgress(PROFILING))
    draft_model = None if draft is None else checked_draft_model(draft.model, geometry)
    cut = choose_cut(model, geometry.max_model_len, settings, draft_model)
    namespace = kv_namespace(model, cut, settings, fingerprint, draft)
    pool = make_pool(model, cut, geometry, limits, settings, namespace, draft_model)
    matchers = None if templates is None else _make_matchers(templates, model)
    multi_step_s = settings.multi_step_ms / 1e3 if limits.max_passes > 1 else 0.0
    if vectors is None:
        runner = ModelRunner(model, pool, geometry, limits, None, matchers, drafter, multi_step_s, draft_model)
    else:
        runner = VectorRunner(model, pool, geometry, limits, vectors)
    if settings.cuda_graphs == "on":
        report(LoadProgress(RECORDING))
        record_cuda_graphs(runner, model.device)
    report(LoadProgress(WARMING_UP))
    # The place of a vector has no position.
    longest = min(geometry.max_model_len, model.max_model_len, settings.max_model_len or model.max_model_len)
    warm_up(runner, pool, longest, limits)
    if templates is not None:
        # Before passes are measured, which this would disturb, and before a request has to wait for it.
        templates.wait_for_vocabulary()
    # The tokens of a whole step, and a partly filled block for each of its sequences.
    num_first = -(-limits.max_num_batched_tokens // settings.block_size) + limits.max_num_rows
    pool.populate(num_first * pool.geometry.groups.num_groups)
    device_loop.use(runner, is_lost=partial(is_lost, model.device), on_failure=model.ranks.fail)
    if drafter is not None or limits.max_passes > 1:
        limits = predict_passes(runner, model, pool, geometry, limits, chooses_drafts=drafter is not None)
    info = _describe_worker(model, settings, pool.geometry, geometry, limits, fingerprint, namespace)
    blocks = PoolBlocks(pool, runner.seals) if info.kv_namespace else None
    disk = None if blocks is None else open_disk_tier(model, settings, namespace, blocks, pool)
    tls = None if settings.tls_dir is None else TlsIdentity.of(settings.tls_dir, Role.WORKER)
    prepare = None if templates is None else templates.prepare
    return Worker(info, runner, device_loop, model.ranks.agree, prepare, adapters, blocks, tls, disk)


def _step_limits(model: CausalLM, settings: WorkerSettings, max_adapters: int, *, has_drafts: bool) -> WorkerLimits:
    least = settings.max_num_seqs + 2
    if model.state is not None and settings.max_num_batched_tokens < least:
        raise ConfigurationError(
            f"--max-num-batched-tokens is {settings.max_num_batched_tokens}; layers of {model.architecture} keep "
            f"states, so it must be at least --max-num-seqs + 2 ({least}): raise it, or lower --max-num-seqs"
        )
    most = max_state_drafts(model, settings)
    max_drafts = settings.max_drafts if most is None else min(settings.max_drafts, most)
    is_multi_step = model.device.type == "cpu" and model.ranks.size == 1 and settings.multi_step_ms > 0
    return WorkerLimits(
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        MAX_STEPS_IN_FLIGHT,
        MAX_LOGPROBS,
        max_adapters,
        max_drafts if has_drafts else 0,
        max_passes=_MAX_PASSES if is_multi_step else 1,
    )


def _describe_worker(
    model: CausalLM,
    settings: WorkerSettings,
    pool: PoolGeometry,
    geometry: ModelGeometry,
    limits: WorkerLimits,
    fingerprint: ModelFingerprint,
    namespace: KvNamespace,
) -> WorkerInfo:
    # One generation for all ranks, so that the same bytes of a step are right for each of them.
    (negative_generation,) = model.ranks.smallest(-clock.unix_ns())
    # The namespace of the whole group: each rank fetches from the same rank.
    name = replace(namespace, rank=0).digest().hex() if fingerprint.weights else ""
    rank, size, endpoint = model.ranks.rank, model.ranks.size, settings.transfer_endpoint or ""
    return WorkerInfo(-negative_generation, rank, size, pool, geometry, limits, fingerprint, name, endpoint)


def _make_matchers(templates: TemplateCache, model: CausalLM) -> RowMatchers:
    """On the CPU, the masks of a step are made on the processors that run the model; else while a GPU runs it."""
    if model.device.type == "cpu":
        return RowMatchers(templates, num_threads=1, host_width=model.vocab_size)
    return RowMatchers(templates, num_threads=max(1, num_processors() // 2), host_width=None)


def make_adapter_slots(model: CausalLM, settings: WorkerSettings) -> tuple[AdapterSlots | None, int]:
    """The slots of adapters, and their number. To be made before the KV pool, which takes the memory that they leave.

    Raises:
        ConfigurationError: the settings ask for adapters, and this model takes none.
    """
    on_host, possible = model.device.type == "cpu", isinstance(model, NativeCausalLM)
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


def _check_device(model: CausalLM, settings: WorkerSettings) -> None:
    largest = ops.largest_head_dim(model.device)
    if largest is not None and model.head_dim > largest:
        raise ConfigurationError(
            f"head_dim is {model.head_dim} in the widest layer of {model.architecture}; it must be at most {largest} "
            f"on {model.device.type}, use --device cpu"
        )
    if settings.cuda_graphs == "on":
        check_cuda_graphs(model)


def check_weights_fit(described: ModelDirectory, dtype: torch.dtype, settings: WorkerSettings) -> None:
    """Raises ConfigurationError where the weights of a model are larger than the memory that is available for them on
    the CPU: a process that takes more is killed, and started again, without end. Rounding makes them smaller. Logs the
    memory of weights that are larger than in the files."""
    quantization = Quantization(settings.quantization)
    if quantization is Quantization.INT8_WEIGHT_ONLY:
        return
    width = 1 if quantization is Quantization.INT8_DYNAMIC else dtype.itemsize
    checkpoint = with_mxfp4_experts(Checkpoint.of_model(described), described)
    stored = read_quantized_weights(checkpoint, described).tensors.values()
    expanded = [each for each in stored if isinstance(each, ExpandedWeight)]
    if expanded:
        _logger.warning(
            "%s: weights in %s are expanded when they are read: %s in the files take %s of memory",
            described.path,
            ", ".join(sorted({each.coding for each in expanded})),
            shown_bytes(sum(each.num_bytes for each in expanded)),
            shown_bytes(sum(math.prod(each.shape) for each in expanded) * width),
        )
    # Codes take the size that they have in the file, or more; codes of GGUF files stay codes only with bfloat16.
    has_codes = described.gguf is None or dtype == torch.bfloat16
    sizes = (
        each.num_bytes if has_codes and each.dtype not in DTYPE_BYTES else math.prod(each.shape) * width
        for each in stored
    )
    size, available = sum(sizes) // settings.tensor_parallel_size, memory_of_each_rank(settings)
    if available is not None and size > available:
        raise ConfigurationError(
            f"the weights of {described.path} take {shown_bytes(size)}; {shown_bytes(available)} of memory are "
            "available to this worker; take a model with fewer parameters or in fewer bits (`quire models` says what "
            "each takes; `quire quantize` makes a smaller one), or more memory"
        )


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
