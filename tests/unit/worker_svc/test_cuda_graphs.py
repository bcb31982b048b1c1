"""What is asked of torch.cuda to record and replay, and to keep streams in order; no GPU has a part."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.support.fake_cuda import FakeCuda
from tests.support.tiny_causal_lm import TinyCausalLM
from worker_svc.device.cuda_graphs import CudaGraphRecorder, record_cuda_graphs
from worker_svc.device.kv_pool import PoolRequest, allocate_pool, pool_geometry
from worker_svc.device.model_runner import ModelRunner
from worker_svc.device.streams import IN_ORDER, Streams
from worker_svc.info import WorkerLimits
from worker_svc.startup import model_geometry

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def make_runner() -> ModelRunner:
    model = TinyCausalLM()
    pool = allocate_pool(pool_geometry(model, PoolRequest(4, 9, None, 0, 0), None), model.device, model.dtype)
    padded = allocate_pool(pool.geometry, model.device, model.dtype, with_padding=True)
    return ModelRunner(model, padded, model_geometry(model, None), WorkerLimits(3, 64, 2, 4))


def test_work_is_warmed_up_and_recorded_on_one_side_stream_and_replayed_where_torch_queues(cuda: FakeCuda) -> None:
    recorder = CudaGraphRecorder(GPU)
    replays = [recorder.record(cuda.work), recorder.record(cuda.work)]
    for number in (1, 2):
        assert cuda.calls[:6] == [
            "stream 1 waits for default",
            "use stream 1",
            "work on stream 1",
            "work on stream 1",
            f"record graph {number} in pool, thread_local, on stream 1",
            "work on stream 1",
        ]
        del cuda.calls[:6]
    assert not cuda.calls
    replays[1]()
    assert cuda.calls == ["replay graph 2 on default"]


def test_no_garbage_is_collected_while_a_graph_is_recorded(cuda: FakeCuda) -> None:
    enabled: list[bool] = []
    CudaGraphRecorder(GPU).record(lambda: enabled.append(gc.isenabled()))
    assert enabled == [True, True, False]
    assert gc.isenabled()


def test_after_a_recording_that_fails_steps_go_where_they_went_before(cuda: FakeCuda) -> None:
    def fail() -> None:
        if "record" in cuda.calls[-1]:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraphRecorder(GPU).record(fail)
    assert cuda.current == "default"
    assert gc.isenabled()


def test_the_error_that_broke_a_recording_is_logged_with_the_one_at_its_end(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def broken(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    runner = make_runner()
    monkeypatch.setattr(torch.cuda, "graph", broken)
    monkeypatch.setattr(runner, "record_graphs", lambda recorder: recorder.record(lambda: fail_when_recorded(2)))
    rounds: list[int] = []

    def fail_when_recorded(warm_ups: int) -> None:
        rounds.append(len(rounds))
        if len(rounds) > warm_ups:
            raise ValueError("this is what went wrong")

    with caplog.at_level(logging.WARNING):
        record_cuda_graphs(runner, GPU)
    assert "cannot be recorded: operation failed due to a previous error during capture" in caplog.text
    assert "this is what went wrong" in caplog.text


@pytest.mark.usefixtures("cuda")
def test_recording_that_fails_is_logged_and_steps_run_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", fail)
    with caplog.at_level(logging.WARNING):
        record_cuda_graphs(make_runner(), GPU)
    assert "decodes run without CUDA graphs, which cannot be recorded: operation not permitted" in caplog.text


def test_a_runner_that_records_says_how_many_graphs_there_are(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        record_cuda_graphs(make_runner(), GPU)
    # Of 1, 2 and 3 rows.
    assert cuda.num_graphs == 3
    assert "3 CUDA graphs in" in caplog.text


def test_streams_of_a_gpu_wait_for_each_other_by_events(cuda: FakeCuda) -> None:
    streams = Streams.of(GPU)
    mark = streams.compute.mark()
    streams.swaps.wait_for(mark)
    with streams.swaps.used():
        cuda.work()
    streams.results.wait_for(streams.swaps.mark())
    assert not mark.is_passed()
    mark.wait()
    assert cuda.calls == [
        "stream 1 waits for event of default",
        "use stream 1",
        "work on stream 1",
        "stream 2 waits for event of stream 1",
        "to cuda:0",
        "host waits for event of default",
        "back from cuda:0",
    ]


def test_the_cpu_has_no_streams() -> None:
    assert Streams.of(torch.device("cpu")) == Streams(IN_ORDER, IN_ORDER, IN_ORDER)
