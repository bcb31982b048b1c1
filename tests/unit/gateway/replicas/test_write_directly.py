"""New tokens go to the direct writer while the reader waits; other output, and tokens of a client that must be waited
for, go to the reader. Together they are the whole output, in order."""

import asyncio

import pytest

from gateway.replicas.events import (
    Chunk,
    Completed,
    EventBatch,
    Finished,
    FinishReason,
    RequestEnded,
    SequenceEnded,
    TokenRun,
    Usage,
)
from gateway.replicas.ledger import Ledger
from gateway.replicas.live import TokenBytes
from gateway.replicas.sequence import TokenGapError
from tests.support.parameters import make_request
from tests.support.tokenizers import byte_level, wrapped

REPLICA = "replica"
TOKENIZER = wrapped(byte_level())
KEPT, PENDING = 1, 100


def ids_of(text):
    return byte_level().encode(text, add_special_tokens=False).ids


class Rig:
    """A request whose reader lets the rig write directly from its first event on, as streams over HTTP do."""

    def __init__(self, **fields):
        self.ledger = Ledger(max_chunk_tokens=4)
        self.live = self.ledger.open(make_request(**fields), TOKENIZER)
        self.live.replica = REPLICA
        self.num_bytes = 0
        self.live.count_memory(self._count, TokenBytes(KEPT, PENDING, prompt=0))
        self.events = []
        # The writer of each event.
        self.writers = []
        self.is_ready = True
        self.reading = asyncio.create_task(self._read())

    def _count(self, num_bytes):
        self.num_bytes += num_bytes

    async def _read(self):
        async for event in self.live.events():
            self._add("reader", event)
            self.live.direct = self

    def write(self, chunk):
        assert self.is_ready
        self._add("direct", chunk)

    def _add(self, writer, event):
        self.writers.append(writer)
        self.events.append(event)

    async def give(self, *token_ids, index=0, offset=None, **fields):
        """Applies new tokens of a sequence, and lets the reader run."""
        offset = len(self.live.sequences[index].token_ids) if offset is None else offset
        runs = [TokenRun(self.live.handle, index, offset, list(token_ids))] if token_ids else []
        outcome = self.ledger.apply_events(REPLICA, EventBatch(runs, **fields))
        for live in outcome.arrivals.direct:
            live.write_directly()
        for _ in range(3):
            await asyncio.sleep(0)

    async def end(self, *token_ids):
        ends, handle = [], self.live.handle
        for stream in self.live.sequences:
            num_tokens = len(stream.token_ids) + (len(token_ids) if not stream.index else 0)
            ends.append(SequenceEnded(handle, stream.index, num_tokens, FinishReason.LENGTH, None, None))
        await self.give(*token_ids, ended=ends, completed=[RequestEnded(handle, Usage(3, 1))])
        await self.reading
        assert isinstance(self.events[-1], Completed)

    def text(self, index=0):
        chunks = [each for each in self.events if isinstance(each, Chunk) and each.sequence_index == index]
        offsets = [0]
        for chunk in chunks:
            assert chunk.offset == offsets[-1]
            offsets.append(chunk.offset + len(chunk.token_ids))
        return "".join(chunk.text for chunk in chunks)


async def test_tokens_are_written_while_the_reader_waits_and_the_end_wakes_it():
    rig, token_ids = Rig(), ids_of("the cat sat 😀 on the mat")
    for token_id in token_ids[:-1]:
        await rig.give(token_id)
    await rig.end(token_ids[-1])
    assert rig.text() == "the cat sat 😀 on the mat"
    assert rig.writers == ["reader"] + ["direct"] * (len(token_ids) - 2) + ["reader"] * 3
    assert [type(event) for event in rig.events[-2:]] == [Finished, Completed]


async def test_a_client_that_must_be_waited_for_gets_its_tokens_from_the_reader():
    rig, token_ids = Rig(), ids_of("the cat sat on the mat, hello world, hello there")
    await rig.give(token_ids[0])
    rig.is_ready = False
    await rig.give(token_ids[1])
    rig.is_ready = True
    # More than one chunk has: the reader gets the rest.
    await rig.give(*token_ids[2:8])
    await rig.give(*token_ids[8:])
    await rig.end()
    assert rig.text() == "the cat sat on the mat, hello world, hello there"
    assert rig.writers[:4] == ["reader", "reader", "direct", "reader"]


async def test_memory_of_tokens_is_counted_until_they_are_written():
    rig, token_ids = Rig(num_sequences=2), ids_of("hello world")
    for index in (0, 1):
        await rig.give(*token_ids, index=index)
    assert rig.num_bytes == 2 * len(token_ids) * KEPT
    rig.live.direct = None
    rig.reading.cancel()
    await rig.give(*token_ids)
    assert rig.num_bytes == 3 * len(token_ids) * KEPT + len(token_ids) * PENDING


async def test_sequences_of_a_request_are_written_as_they_come():
    rig = Rig(num_sequences=2)
    for index, text in ((0, "the"), (1, "hello"), (0, " cat"), (1, " there")):
        await rig.give(*ids_of(text), index=index)
    await rig.end()
    assert [rig.text(0), rig.text(1)] == ["the cat", "hello there"]
    assert "direct" in rig.writers


async def test_tokens_before_a_gap_wake_the_reader():
    rig = Rig()
    await rig.give(*ids_of("the"))
    (token_id,) = ids_of("a")
    with pytest.raises(TokenGapError):
        rig.ledger.apply_events(
            REPLICA,
            EventBatch([TokenRun(rig.live.handle, 0, 1, [token_id]), TokenRun(rig.live.handle, 0, 7, [token_id])]),
        )
    for _ in range(3):
        await asyncio.sleep(0)
    assert rig.text() == "thea"
    rig.reading.cancel()
