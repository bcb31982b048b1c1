"""Loads an encoder from its directory, and makes the worker that serves it."""

import logging

import torch

from quire.model_files.embedding_files import EmbeddingFiles, RankingFiles, encoder_fields, hidden_size_of
from quire.model_files.model_directory import ModelDirectory
from quire.model_files.progress import READING, WARMING_UP, LoadProgress, Report, no_report
from quire.runtime import clock
from quire.runtime.settings import ConfigurationError
from quire.service.compatibility import ModelFingerprint
from quire_kernels import ops
from quire_kernels.packed_weight import Quantization
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.encoders.encoder import Encoder, PackedTexts
from worker_svc.encoders.pooling import PairScores, TextVectors
from worker_svc.encoders.recorded import RecordedEncoder
from worker_svc.encoders.runner import EncoderRunner
from worker_svc.layers.products import check_quantization
from worker_svc.parallel.ranks import Ranks
from worker_svc.protocol.stream import Worker
from worker_svc.settings import WorkerSettings
from worker_svc.step import ModelGeometry, PoolGeometry, WorkerInfo, WorkerLimits
from worker_svc.weights import Checkpoint, Loadable, Placement, TensorSpec

MAX_STEPS_IN_FLIGHT = 2
# How the file of a model with a head names the parts of its encoder, and what the first BERT called a norm's numbers.
_PREFIXES = ("bert.", "roberta.", "mpnet.", "distilbert.", "nomic_bert.", "gte.", "new.", "model.")
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}
# Linear layers behind the pooling of a GGUF file.
_READ_ELSEWHERE = ("dense_2.weight", "dense_3.weight")
_logger = logging.getLogger(__name__)


def load_encoder(
    directory: ModelDirectory, placement: Placement, head: PairScores | None = None, longest: int | None = None
) -> Encoder:
    """Loads an encoder, and its head if it has one, for texts of at most `longest` tokens.

    Raises:
        ConfigurationError: a configuration that is not supported, or a tensor that is missing or has another shape or
            dtype.
    """
    encoder = Encoder(directory.architecture, encoder_fields(directory), placement, longest)
    checkpoint = Checkpoint.of_model(directory)
    checkpoint = checkpoint.with_tensors({_own_name(name): each for name, each in checkpoint.tensors.items()})
    modules = (*encoder.modules(), *(() if head is None else head.modules()))
    layers = [module for module in modules if isinstance(module, Loadable)]
    specs = [spec for layer in layers for spec in layer.tensors()]
    checkpoint.check(specs)
    checkpoint.check_all_used([*specs, *(TensorSpec(name, ()) for name in _READ_ELSEWHERE)])
    for layer in layers:
        layer.load(checkpoint)
    return encoder.eval()


def _own_name(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def make_encoder_worker(
    directory: ModelDirectory,
    files: EmbeddingFiles | RankingFiles,
    settings: WorkerSettings,
    device_loop: DeviceLoop,
    *,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks,
    report: Report = no_report,
) -> Worker:
    """The worker of an encoder. Raises ConfigurationError if the model or a setting is not supported."""
    if device.type != "cpu":
        raise ConfigurationError(f"{directory.architecture} gives vectors of texts, which needs --device cpu")
    quantization = Quantization(settings.quantization)
    check_quantization(quantization, device, dtype)
    report(LoadProgress(READING))
    placement, hidden_size, separator = Placement(device, dtype, ranks, quantization), hidden_size_of(directory), None
    if isinstance(files, RankingFiles):
        vectors = head = PairScores(files, directory.architecture, encoder_fields(directory))
        encoder = load_encoder(directory, placement, head, files.max_tokens)
        separator = files.separator
    else:
        vectors = TextVectors(files, hidden_size)
        encoder = load_encoder(directory, placement, longest=files.max_tokens)
    longest = encoder.max_tokens
    if settings.max_model_len is not None and settings.max_model_len > longest:
        raise ConfigurationError(
            f"--max-model-len is {settings.max_model_len}; texts of this model have at most {longest} tokens: use at "
            f"most {longest}"
        )
    longest = settings.max_model_len or longest
    # The place of the vector counts as one more.
    max_model_len = longest + 1
    limits = WorkerLimits(settings.max_num_seqs, settings.max_num_batched_tokens, MAX_STEPS_IN_FLIGHT, 0)
    geometry = ModelGeometry(
        architecture=directory.architecture,
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=encoder.vocab_size,
        max_model_len=max_model_len,
        device=str(device),
        device_name=ops.name_of(device),
    )
    # Nothing is kept of a text. The scheduler counts texts as blocks, each as long as the longest text, of no bytes.
    pool = PoolGeometry(max_model_len, 2 * limits.max_num_rows, 0, 0, 0, 0, geometry.dtype, 0)
    recorded = RecordedEncoder(encoder, limits.max_num_batched_tokens)
    runner = EncoderRunner(
        recorded, vectors, pool.num_gpu_blocks, max_tokens_at_once=limits.max_num_batched_tokens, separator=separator
    )
    report(LoadProgress(WARMING_UP))
    with torch.inference_mode():
        recorded(PackedTexts.of([torch.zeros(min(longest, limits.max_num_batched_tokens), dtype=torch.int64)]))
    device_loop.use(runner)
    info = WorkerInfo(clock.unix_ns(), 0, 1, pool, geometry, limits, ModelFingerprint.read(directory))
    _logger.info("%s gives vectors of %d numbers, of texts of at most %d tokens", directory.path, vectors.size, longest)
    return Worker(info, runner, device_loop)
