"""A scheduler that preempts, forks and swaps gets the same from a worker that replays its decodes as from any other."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.core_driver import make_request
from tests.support.cpu_kernels import without_packed_products
from tests.support.graph_recorder import CallingRecorder
from tests.support.in_process import InProcessReplica, config_of
from tests.support.models import make_shape
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.device.kv_pool import allocate_pool
from worker_svc.device.runner import ModelRunner
from worker_svc.models.registry import load_model
from worker_svc.protocol.stream import Worker
from worker_svc.settings import WorkerSettings
from worker_svc.startup import make_worker

pytestmark = pytest.mark.extended

SETTINGS = WorkerSettings(
    device="cpu", block_size=4, num_gpu_blocks=34, swap_space=1 << 18, max_num_seqs=11, max_num_batched_tokens=40
)
REQUESTS = [
    make_request(
        handle, prompt_len=1 + 7 * handle % 31, max_tokens=20, num_sequences=1 + 2 * (handle % 3 == 0), priority=handle
    )
    for handle in range(14)
]


def replay_decodes(worker: Worker, directory: Path, recorder: CallingRecorder) -> None:
    """Gives the worker a runner like its own, with graphs."""
    info = worker.info
    with without_packed_products():
        model = load_model(directory, device=torch.device("cpu"), dtype=torch.float32)
    pool = allocate_pool(info.pool, model.device, model.dtype, with_padding=True)
    runner = ModelRunner(model, pool, info.model, info.limits)
    runner.record_graphs(recorder)
    worker.runner = runner


def run(worker: Worker) -> tuple[Sequence[Sequence[list[int]]], int]:
    """What each sequence of each request was given, and how often a group gave way."""
    replica = InProcessReplica(worker, config_of(worker))
    for request in REQUESTS:
        replica.submit(request)
    replica.run_until_idle(lambda _: None)
    outputs = [[each.token_ids for each in replica.outputs[request.key.handle]] for request in REQUESTS]
    return outputs, replica.scheduler.num_preemptions


@pytest.mark.parametrize("shape", ["llama-gqa-untied-32", "gpt2-tied-32", "opt-pre-norm-32"])
def test_requests_get_the_same_with_replayed_decodes_while_blocks_run_out(shape: str, tmp_path: Path) -> None:
    make_shape(tmp_path, shape)
    recorder = CallingRecorder()
    outputs = []
    for with_graphs in (False, True):
        with without_packed_products():
            model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
        worker = make_worker(model, SETTINGS, DeviceLoop())
        if with_graphs:
            replay_decodes(worker, tmp_path, recorder)
        given, num_preemptions = run(worker)
        assert num_preemptions > 0
        assert all(len(tokens) == 20 for sequences in given for tokens in sequences)
        outputs.append(given)
    assert outputs[0] == outputs[1]
    assert recorder.replays.total() > 20
