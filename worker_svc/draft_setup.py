"""The drafters and the draft model of a worker, which guess the next tokens (speculative decoding), by its settings."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from quire.model_files.model_directory import ModelDirectory
from quire.model_files.model_source import resolve_model
from quire.runtime.settings import ConfigurationError
from quire.service.compatibility import ModelFingerprint
from worker_svc.device.kv_pool import CPU_POOL_BYTES
from worker_svc.models.base import CausalLM
from worker_svc.sampling.drafters import AUTO, KINDS, Drafter, Drafters
from worker_svc.settings import WorkerSettings
from worker_svc.step import ModelGeometry

_MAX_STATE_DRAFTS, _SHARE_OF_POOL = 8, 4
"""If layers keep states, drafts of all rows that a run of the model verifies: each takes the memory of a sequence's
state, and all of them at most one part in four of the pool's memory."""


@dataclass(frozen=True, slots=True)
class DraftPart:
    """A draft model that was loaded."""

    model: CausalLM
    fingerprint: ModelFingerprint


def make_drafter(model: CausalLM, settings: WorkerSettings) -> Drafter | None:
    """The drafter of a model; None if it has none."""
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


def max_state_drafts(model: CausalLM, settings: WorkerSettings) -> int | None:
    """Maximum drafts that a run of the model verifies, since each takes a state; None if its layers keep none."""
    if model.state is None:
        return None
    if settings.num_gpu_blocks is not None:
        return _MAX_STATE_DRAFTS
    memory = settings.kv_cache_memory or CPU_POOL_BYTES
    return min(max(memory // (_SHARE_OF_POOL * model.state.num_bytes), 1), _MAX_STATE_DRAFTS)


def draft_directory(settings: WorkerSettings, directory: ModelDirectory, device: torch.device) -> ModelDirectory | None:
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


def checked_draft_model(model: CausalLM, geometry: ModelGeometry) -> CausalLM:
    """The draft model. ConfigurationError if its layers keep states, or it has too few positions."""
    if model.state is not None:
        raise ConfigurationError(
            f"--draft-model is a {model.architecture}, whose layers keep states of sequences; use a model with only "
            "attention"
        )
    if model.max_model_len < geometry.max_model_len:
        raise ConfigurationError(
            f"--draft-model has {model.max_model_len} positions and sequences have up to {geometry.max_model_len} "
            f"tokens; set --max-model-len to {model.max_model_len} at most"
        )
    return model
