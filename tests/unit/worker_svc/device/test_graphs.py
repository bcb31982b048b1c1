"""Decode batches that are padded and replayed give the same results as without padding and replay."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.model_files.adapter_files import read_adapter
from quire.model_files.model_source import resolve_model
from quire.runtime.settings import ConfigurationError
from tests.support.adapters import make_adapter
from tests.support.cpu_kernels import without_packed_products
from tests.support.fake_cuda import FakeCuda
from tests.support.graph_recorder import CallingRecorder
from tests.support.models import make_model
from tests.support.sampling import make_sampling
from tests.support.steps import make_assign, make_batch, make_changes, make_step
from tests.support.tiny_causal_lm import MAX_MODEL_LEN, TinyCausalLM
from worker_svc.device.kv_pool import KvPool, PoolRequest, allocate_pool, pool_geometry
from worker_svc.device.replay import MAX_GRAPH_ROWS, CudaGraphRecorder, GraphShapes, check_cuda_graphs
from worker_svc.device.runner import ModelRunner, record_cuda_graphs
from worker_svc.loaded_adapters import AdapterSlots
from worker_svc.models.base import CausalLM
from worker_svc.models.families import DECODERS
from worker_svc.models.registry import load_model
from worker_svc.startup import model_geometry
from worker_svc.step import AdmittedStep, RowChanges, StepOutput, WorkerLimits
from worker_svc.streams import Streams
from worker_svc.weights import Placement

NUM_ROWS, NUM_BLOCKS = 19, 130
CPU = torch.device("cpu")


def make_pool(model: CausalLM, block_size: int) -> KvPool:
    """A pool of NaN, which shows in the results of a row that reads foreign slots."""
    request = PoolRequest(block_size, NUM_BLOCKS, None, 0, 0)
    pool = allocate_pool(pool_geometry(model, request, None), CPU, model.dtype, with_padding=True)
    for layer in pool.gpu:
        layer.fill_(torch.nan)
    return pool


class Driver:
    """Rows with prompts in a runner; stores every output."""

    def __init__(self, model: CausalLM, block_size: int, recorder: CallingRecorder | None) -> None:
        self.pool = make_pool(model, block_size)
        limits = WorkerLimits(NUM_ROWS, 2048, 2, 4)
        self.runner = ModelRunner(model, self.pool, model_geometry(model, None), limits)
        self.lengths: dict[int, int] = {}
        self.adapter_slots: dict[int, int] = {}
        self.outputs: list[StepOutput] = []
        self._block_size = block_size
        if recorder is not None:
            self.num_graphs = self.runner.record_graphs(recorder)

    def prefill(self, prompts: dict[int, list[int]], temperature: float = 1.0) -> None:
        blocks = -(-MAX_MODEL_LEN // self._block_size)
        assign = [
            make_assign(
                row,
                tokens,
                list(range(row * blocks, (row + 1) * blocks)),
                make_sampling(temperature=temperature, seed=row, logprobs=2),
            )
            for row, tokens in prompts.items()
        ]
        self.lengths |= {row: len(tokens) for row, tokens in prompts.items()}
        assign = [replace(each, adapter_slot=self.adapter_slots.get(each.row)) for each in assign]
        self._run(list(prompts), [len(tokens) for tokens in prompts.values()], make_changes(assign=assign))

    def decode(self, rows: Sequence[int]) -> None:
        self._run(rows, [1] * len(rows), make_changes())

    def _run(self, rows: Sequence[int], new: Sequence[int], changes: RowChanges) -> None:
        computed = [self.lengths[row] - count for row, count in zip(rows, new, strict=True)]
        step = make_step(changes, make_batch(rows, new, computed))
        self.outputs.append(self.runner.launch(AdmittedStep(step, np.zeros(0, np.int32))).wait())
        for row in rows:
            self.lengths[row] += 1


def assert_same(eager: Driver, graphs: Driver) -> None:
    for expected, actual in zip(eager.outputs, graphs.outputs, strict=True):
        assert expected.token_ids.tolist() == actual.token_ids.tolist()
        assert expected.failed_rows == actual.failed_rows == ()
        assert expected.logprobs is not None
        assert actual.logprobs is not None
        assert expected.logprobs.samples.tolist() == actual.logprobs.samples.tolist()
        one, other = (each.logprobs.columns.chosen_logprobs for each in (expected, actual))
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_random_decode_batches_give_the_same_tokens_as_without_graphs() -> None:
    with without_packed_products():
        model = load_model(resolve_model(None), device=CPU, dtype=torch.float32)
    recorder = CallingRecorder()
    drivers = [Driver(model, 8, None), Driver(model, 8, recorder)]
    generator = np.random.default_rng(3)
    prompts = {row: generator.integers(3, 60, int(generator.integers(1, 20))).tolist() for row in range(NUM_ROWS)}
    for driver in drivers:
        driver.prefill(prompts)
    for _ in range(20):
        rows = generator.permutation(NUM_ROWS)[: int(generator.integers(1, NUM_ROWS + 1))].tolist()
        for driver in drivers:
            driver.decode(rows)
    assert_same(*drivers)
    assert recorder.replays.total() == 20
    assert len(recorder.replays) > 3
    assert recorder.num_recorded == drivers[1].num_graphs


def test_a_shorter_batch_after_a_longer_one_writes_nothing_for_the_rows_that_left() -> None:
    driver = Driver(TinyCausalLM(), 4, CallingRecorder())
    driver.prefill({row: [row + 1, 2, 3, 4, 5] for row in range(8)})
    driver.decode(range(8))
    (layer,) = driver.pool.gpu
    # As if other rows had used these blocks since.
    others = layer[:, 5 * 12 : NUM_BLOCKS]
    others.fill_(torch.nan)
    # Five rows are padded to eight as well.
    driver.decode(range(5))
    assert others.isnan().all()


def test_a_failed_recording_leaves_a_runner_that_works() -> None:
    class Failing(CallingRecorder):
        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("capture failed")

    model = TinyCausalLM()
    driver = Driver(model, 4, None)
    with pytest.raises(RuntimeError, match="capture failed"):
        driver.runner.record_graphs(Failing())
    plain = Driver(model, 4, None)
    for each in (driver, plain):
        each.prefill({0: [5, 6, 7]})
        each.decode([0])
    assert_same(plain, driver)


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
    assert not Streams.of(GPU).compute.mark().is_passed()


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
    assert "decodes run without CUDA graphs, which cannot be recorded: operation failed due to a" in caplog.text
    assert "this is what went wrong" in caplog.text


def test_a_batch_gets_the_smallest_shape_that_holds_it() -> None:
    shapes = GraphShapes.up_to(20, 5000)
    for num_rows in range(1, 21):
        for length in (1, 1023, 1024, 1025, 4096, 4097, 5000):
            shape = shapes.fit(num_rows, length)
            assert shape is not None
            smaller = [s for s in shapes if s.num_rows >= num_rows and s.max_seq_len >= length]
            assert shape == min(smaller, key=lambda s: (s.num_rows, s.max_seq_len))
            assert shape.num_rows - num_rows < 8


def test_no_graph_has_more_rows_than_pays_and_a_batch_beyond_all_shapes_gets_none() -> None:
    shapes = GraphShapes.up_to(65536, 50)
    assert shapes.row_counts[-1] == MAX_GRAPH_ROWS
    assert shapes.fit(MAX_GRAPH_ROWS + 1, 5) is None
    assert shapes.fit(1, 51) is None


def test_graphs_of_a_model_with_experts_are_refused() -> None:
    """The host waits for the experts that the tokens choose, which a recording cannot contain."""
    config = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = DECODERS["MixtralForCausalLM"].from_config(
        {**config, "num_attention_heads": 8}, Placement(CPU, torch.float32)
    )
    model.device = torch.device("cuda")
    with pytest.raises(ConfigurationError, match="--cuda-graphs is on and MixtralForCausalLM has experts"):
        check_cuda_graphs(model)


def test_graphs_have_the_adapters_of_each_batch(tmp_path: Path) -> None:
    whole = make_model(tmp_path / "model", "qwen3")
    with without_packed_products():
        model = load_model(tmp_path / "model", device=CPU, dtype=torch.float32)
    slots = AdapterSlots(model, 2, 8)
    for slot in range(2):
        directory = make_adapter(tmp_path / str(slot), whole, rank=4 + slot, seed=slot)
        slots.put(slot, slots.load(directory, read_adapter(directory).digest))
    drivers = [Driver(model, 32, None), Driver(model, 32, CallingRecorder())]
    for driver in drivers:
        driver.adapter_slots = {0: 1, 2: 0, 3: 1}
        driver.prefill({row: [3 + row, 4, 5] for row in range(4)}, temperature=0.0)
        # The last batch has no adapter, and follows a batch with one.
        for rows in ([0, 1, 2, 3], [3, 1], [1]):
            driver.decode(rows)
    assert_same(*drivers)
    tokens = [output.token_ids.tolist() for output in drivers[0].outputs]
    plain = Driver(model, 32, None)
    plain.prefill({row: [3 + row, 4, 5] for row in range(4)}, temperature=0.0)
    assert plain.outputs[0].token_ids.tolist() != tokens[0]
