"""Several models on one machine: their shares of its memory, and the priority of their workers."""

from collections.abc import Sequence

from quire.model_files.architectures import ENCODERS, RANKERS
from quire.model_files.embedding_files import vector_files
from quire.model_files.model_directory import ModelDirectory, weight_files
from quire.model_files.model_source import resolve_model
from quire.model_files.progress import shown_bytes
from quire.runtime.processors import available_memory
from quire.runtime.settings import ConfigurationError
from quire_cli.supervisor.settings import ServeSettings

_NICENESS = 10
"""Niceness of workers that generate no text next to workers that do: about a tenth of the CPU time if both want all."""


def generates_text(settings: ServeSettings) -> bool:
    """Whether the one model of these settings generates text."""
    return vector_files(_directory(settings), settings.pooling, settings.score_tokens) is None


def _has_pool(settings: ServeSettings) -> bool:
    """Whether the one model of these settings keeps keys and values; encoders keep none."""
    return _directory(settings).architecture not in ENCODERS | RANKERS


def _directory(settings: ServeSettings) -> ModelDirectory:
    return ModelDirectory.open(resolve_model(settings.served_models[0].source))


def niceness_of(settings: ServeSettings) -> list[int]:
    """The niceness that each model's workers have in addition to this process's."""
    parts = [settings.of_model(model) for model in settings.served_models]
    generate = [generates_text(each) for each in parts]
    by_default = [_NICENESS if any(generate) and not each else 0 for each in generate]
    return [
        own if part.worker_niceness is None else part.worker_niceness
        for part, own in zip(parts, by_default, strict=True)
    ]


def shares_of_memory(parts: Sequence[ServeSettings]) -> list[float]:
    """For each model, the share of the available memory that its KV pool counts with: pools without a given size divide
    equally what the given ones leave."""
    by_default = [_has_pool(each) and _given_pool(each) is None and each.num_gpu_blocks is None for each in parts]
    available = available_memory()
    given = sum(_given_pool(each) or 0 for each in parts)
    left = 1.0 if not available else max(1 - given / available, 0.001)
    return [left / max(sum(by_default), 1) if each else 1.0 for each in by_default]


def check_memory(parts: Sequence[ServeSettings]) -> None:
    """Raises ConfigurationError if the weights and the given KV pools of several models exceed the available memory.
    Workers check what only they know, such as the dtype of their weights."""
    available = available_memory()
    if available is None or len(parts) == 1:
        return
    needs = dict[str, int]()
    for each in parts:
        if each.device != "cuda":
            model = each.served_models[0]
            weights = sum(file.stat().st_size for file in weight_files(resolve_model(model.source)))
            needs[model.name] = weights + (_given_pool(each) or 0)
    if sum(needs.values()) > available:
        shown = ", ".join(f"{name} {shown_bytes(need)}" for name, need in needs.items())
        raise ConfigurationError(
            f"the weights and the given KV pools of all models take {shown_bytes(sum(needs.values()))} ({shown}); "
            f"{shown_bytes(available)} of memory are available: serve fewer or smaller models, or give less by model: "
            "--model NAME=DIR,kv-cache-memory=BYTES"
        )


def _given_pool(settings: ServeSettings) -> int | None:
    """The given size of the KV pool and the host pool in bytes; None if the KV pool has none."""
    pool = settings.kv_cache_memory
    return None if pool is None or settings.device == "cuda" else pool + (settings.swap_space or 0)
