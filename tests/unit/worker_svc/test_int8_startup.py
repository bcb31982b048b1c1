"""A pool of int8 in a worker's size, report and refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.local.settings import ServeSettings
from quire.model_directory import resolve_model
from quire.settings import ConfigurationError, load_settings
from tests.support.in_process import load_worker
from tests.support.tiny_causal_lm import TinyCausalLM
from worker_svc.settings import WorkerSettings
from worker_svc.startup import requested_pool_dtype


def test_the_same_memory_has_more_than_three_times_the_blocks_of_float32() -> None:
    settings = WorkerSettings(kv_cache_memory=1 << 22)
    plain, rounded = (
        load_worker(Path(resolve_model(None)), each).info.pool
        for each in (settings, replace(settings, kv_cache_dtype="int8"))
    )
    assert (plain.dtype, rounded.dtype) == ("float32", "int8")
    assert rounded.num_gpu_blocks > 3 * plain.num_gpu_blocks
    assert rounded.num_gpu_blocks * rounded.block_bytes <= 1 << 22


def test_a_pool_of_int8_is_refused_on_another_device() -> None:
    model = TinyCausalLM()
    assert requested_pool_dtype("int8", model) == torch.int8
    assert requested_pool_dtype("auto", model) == model.dtype
    model.device = torch.device("cuda")
    with pytest.raises(ConfigurationError, match="--kv-cache-dtype is int8, which is for cpu, and the device is cuda"):
        requested_pool_dtype("int8", model)


@pytest.mark.parametrize("cls", [WorkerSettings, ServeSettings])
def test_flags_and_variables_are_there_and_checked(cls: type) -> None:
    environ = {"QUIRE_QUANTIZATION": "int8-dynamic", "QUIRE_KV_CACHE_DTYPE": "int8"}
    settings = load_settings(cls, [], environ, program="quire")
    assert (settings.quantization, settings.kv_cache_dtype) == ("int8-dynamic", "int8")
    for flag in ("--quantization=int4", "--kv-cache-dtype=fp8"):
        with pytest.raises(ConfigurationError, match="expected one of"):
            load_settings(cls, [flag], {}, program="quire")
