"""A worker whose full blocks are kept in 12 bits gives every request what one does that keeps them as they are."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels import ops
from kernels.short_cache import SHORT_DTYPE
from scheduler_svc.core.beam import BeamParameters
from scheduler_svc.core.request import Request
from tests.support.core_driver import make_request
from tests.support.cpu_kernels import ISAS
from tests.support.in_process import InProcessReplica, config_of
from tests.support.models import make_shape
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.models.base import CausalLM
from worker_svc.models.registry import load_model
from worker_svc.settings import WorkerSettings
from worker_svc.startup import make_worker

pytestmark = pytest.mark.extended

CPU = torch.device("cpu")
SETTINGS = WorkerSettings(
    device="cpu", block_size=4, num_gpu_blocks=40, swap_space=1 << 18, max_num_seqs=12, max_num_batched_tokens=40
)
# The same prompt several times, of whole blocks and of parts: found cached, forked, and written on by siblings.
REQUESTS = [
    make_request(
        handle,
        prompt=[3 + (handle % 2 * i) % 40 for i in range((12, 16, 21, 24)[handle % 4])],
        max_tokens=20,
        num_sequences=3 if handle % 3 == 0 else 1,
        priority=handle,
        beam=BeamParameters(width=3) if handle % 6 == 0 else None,
    )
    for handle in range(1, 17)
]


def run(model: CausalLM) -> tuple[Sequence[Sequence[list[int]]], InProcessReplica]:
    worker = make_worker(model, SETTINGS, DeviceLoop())
    replica = InProcessReplica(worker, config_of(worker))
    for request in REQUESTS:
        replica.submit(request)
    replica.run_until_idle(lambda _: None)
    return [outputs_of(replica, request) for request in REQUESTS], replica


def outputs_of(replica: InProcessReplica, request: Request) -> list[list[int]]:
    return [each.token_ids for each in replica.outputs[request.key.handle]]


@pytest.mark.parametrize("shape", ["llama-gqa-untied-32", "llama-mha-tied-64", "llama-gqa-explicit-128"])
def test_requests_get_the_same_while_blocks_are_shared_swapped_and_computed_again(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shape(tmp_path, shape)
    model = load_model(tmp_path, device=CPU, dtype=torch.bfloat16)
    kept = ops.stored_dtype(CPU, torch.bfloat16, SETTINGS.block_size, model.head_dim)
    assert kept == (SHORT_DTYPE if ISAS else torch.bfloat16)
    outputs, replica = run(model)
    assert replica.scheduler.num_preemptions > 0
    assert sum(usage.cached_tokens for usage in replica.usage.values()) > 0
    monkeypatch.setattr(ops, "stored_dtype", lambda _device, dtype, *_: dtype)
    assert run(model)[0] == outputs
