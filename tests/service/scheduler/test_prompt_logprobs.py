"""Log probabilities of prompts reach the gateway before the first token, whatever is computed again."""

import asyncio

import pytest

from quire.arrays import decode_int32, decode_logprobs
from quire.common.v1 import common_pb2
from quire.compatibility import SCHEDULER_PROTOCOL
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.scheduler_process import make_submit, running_scheduler, state_of, wait_attached

ASKED = common_pb2.OutputOptions(prompt_logprobs=1)


@pytest.fixture
async def worker(tmp_path):
    running = FakeWorker(FakeWorkerConfig(num_blocks=10, max_num_batched_tokens=16, max_num_rows=8))
    yield await running.start(f"unix:{tmp_path / 'w.sock'}")
    await running.stop()


class Reader:
    """One gateway's stream; keeps the reports of each request as a gateway would."""

    def __init__(self, stub):
        self.call = stub.Connect()
        self.reports: dict[int, list[scheduler_pb2.PromptLogprobs]] = {}
        self.taken: dict[int, list[tuple[int, float, int, int]]] = {}
        """Id, log probability and rank of each position, and how many of the most likely tokens came."""
        self.completed: set[int] = set()

    async def open(self):
        hello = scheduler_pb2.Hello(protocol=SCHEDULER_PROTOCOL.message(), gateway_id="g")
        await self.call.write(scheduler_pb2.ConnectRequest(hello=hello))
        await self.call.read()

    async def run(self, *submits):
        for submit in submits:
            await self.call.write(scheduler_pb2.ConnectRequest(submit=submit))
        async with asyncio.timeout(30):
            while len(self.completed) < len(submits):
                self._take((await self.call.read()).events)

    def _take(self, events):
        assert not events.failed
        for report in events.prompt_logprobs:
            assert report.handle not in self.completed
            self.reports.setdefault(report.handle, []).append(report)
            taken = self.taken.setdefault(report.handle, [])
            assert report.first_position <= len(taken) + 1, "a position was lost"
            taken += positions_of(report)[len(taken) + 1 - report.first_position :]
        self.completed.update(end.handle for end in events.completed)


def positions_of(report):
    token_ids, columns = decode_int32(report.token_ids, "token_ids"), decode_logprobs(report, vocab_size=100)
    num_top = columns.top_counts.tolist()
    chosen = (token_ids.tolist(), columns.chosen_logprobs.tolist(), columns.chosen_ranks.tolist())
    return list(zip(*chosen, num_top, strict=True))


def assert_whole(reader, handle, prompt_len):
    assert reader.taken[handle] == [((handle + p) % 100, -p, p, 1) for p in range(1, prompt_len)]


async def test_each_position_is_reported_once_over_chunks_and_only_where_asked(worker, tmp_path):
    async with running_scheduler(str(tmp_path / "s.sock"), worker) as stub:
        await wait_attached(stub)
        reader = Reader(stub)
        await reader.open()
        await reader.run(
            make_submit(1, prompt_len=50, max_tokens=5, output=ASKED),
            make_submit(2, prompt_len=20, max_tokens=5),
            make_submit(3, prompt_len=1, max_tokens=5, output=ASKED),
        )
        assert_whole(reader, 1, 50)
        assert len(reader.reports[1]) >= 4
        assert sum(len(positions_of(report)) for report in reader.reports[1]) == 49
        assert set(reader.reports) == {1}
        reader.call.cancel()


async def test_the_same_prompt_again_is_not_taken_from_the_cache(worker, tmp_path):
    async with running_scheduler(str(tmp_path / "s.sock"), worker) as stub:
        await wait_attached(stub)
        for output in (common_pb2.OutputOptions(), ASKED):
            reader = Reader(stub)
            await reader.open()
            await reader.run(make_submit(1, prompt_len=50, max_tokens=5, output=output))
            reader.call.cancel()
        assert_whole(reader, 1, 50)


async def test_preemption_neither_loses_nor_repeats_what_was_delivered(worker, tmp_path):
    async with running_scheduler(str(tmp_path / "s.sock"), worker, watermark=0.0) as stub:
        await wait_attached(stub)
        reader = Reader(stub)
        await reader.open()
        await reader.run(*(make_submit(handle, prompt_len=30, max_tokens=60, output=ASKED) for handle in range(1, 6)))
        assert (await state_of(stub)).preemptions > 0
        for handle in range(1, 6):
            assert_whole(reader, handle, 30)
        reader.call.cancel()
