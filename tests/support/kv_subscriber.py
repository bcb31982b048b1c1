"""A subscriber of KV events, written from vLLM's published format, and the mirror of a cache that it keeps."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

END_OF_REPLAY = b"\xff" * 8
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
_OF_GROUPS = ("extra_keys", "group_idx")
_FIELDS = {"BlockStored": _STORED, "BlockRemoved": ("block_hashes", "medium"), "AllBlocksCleared": ()}


def events_in(payload: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The name and the fields of each event, in either format."""
    at, events, rank = msgspec.msgpack.decode(payload)
    assert at > 1.6e9
    assert rank == 0
    named = []
    for event in events:
        if isinstance(event, dict):
            fields = dict(event)
        else:
            has_group = len(event) == 1 + len(_STORED) + len(_OF_GROUPS)
            names = ("type", *_FIELDS[event[0]], *(_OF_GROUPS if has_group else ()))
            fields = dict(zip(names, event, strict=True))
        named.append((fields.pop("type"), fields))
    return named


@dataclass
class KvSubscriber:
    """Follows one publisher. A replay fills a gap in the numbers; a number that comes again means that another process
    now publishes."""

    sub: zmq.asyncio.Socket
    replay: zmq.asyncio.Socket
    blocks: dict[int, tuple[int | None, tuple[int, ...]]] = field(default_factory=dict)
    """Cached blocks: hash -> the parent's hash and the tokens, which are empty if they are not known."""
    on_disk: set[int] = field(default_factory=set)
    next_number: int = 0
    num_replays: int = 0
    num_clears: int = 0
    num_removed: int = 0

    @classmethod
    @contextlib.contextmanager
    def open(cls, address: str, replay_address: str, topic: str = "") -> Iterator["KvSubscriber"]:
        context = zmq.asyncio.Context()
        try:
            sub, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
            sub.setsockopt(zmq.RECONNECT_IVL, 20)
            # The socket buffers few messages.
            sub.setsockopt(zmq.RCVHWM, 1)
            replay.setsockopt(zmq.RECONNECT_IVL, 20)
            sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
            sub.connect(address)
            replay.connect(replay_address)
            yield cls(sub, replay)
        finally:
            context.destroy(linger=0)

    async def read(self) -> None:
        """Takes in one message, and the missing ones before it."""
        _, number_bytes, payload = await self.sub.recv_multipart()
        number = int.from_bytes(number_bytes, "big")
        if number < self.next_number:
            self.next_number = 0
        if number > self.next_number:
            await self._catch_up(number)
        self._take(number, payload)

    async def follow(self) -> None:
        """Reads until it is cancelled."""
        while True:
            await self.read()

    async def _catch_up(self, end: int) -> None:
        self.num_replays += 1
        await self.replay.send_multipart([b"", self.next_number.to_bytes(8, "big")])
        while True:
            empty, number_bytes, payload = await self.replay.recv_multipart()
            assert empty == b""
            if number_bytes == END_OF_REPLAY:
                assert payload == b""
                break
            if (number := int.from_bytes(number_bytes, "big")) < end:
                self._take(number, payload)
        assert self.next_number == end, "the replay has not all that is missing"

    def _take(self, number: int, payload: bytes) -> None:
        assert number == self.next_number
        self.next_number = number + 1
        for name, fields in events_in(payload):
            match name:
                case "AllBlocksCleared":
                    self.num_clears += 1
                    self.blocks.clear()
                    self.on_disk.clear()
                case "BlockRemoved" if fields["medium"] == "STORAGE":
                    assert self.on_disk.issuperset(fields["block_hashes"])
                    self.on_disk.difference_update(fields["block_hashes"])
                case "BlockRemoved":
                    self.num_removed += len(fields["block_hashes"])
                    for content in fields["block_hashes"]:
                        del self.blocks[content]
                case "BlockStored":
                    self._store(fields)

    def _store(self, fields: dict[str, Any]) -> None:
        hashes, size, token_ids = fields["block_hashes"], fields["block_size"], fields["token_ids"]
        assert (fields["lora_id"], fields["lora_name"]) == (None, None)
        if fields["medium"] == "STORAGE":
            assert not token_ids
            self.on_disk.update(hashes)
            return
        assert fields["medium"] == "GPU"
        assert len(token_ids) in (0, len(hashes) * size)
        parent = fields["parent_block_hash"]
        for index, content in enumerate(hashes):
            self.blocks[content] = (parent, tuple(token_ids[index * size : (index + 1) * size]))
            parent = content if token_ids else None


async def until_equal(subscriber: KvSubscriber, content_of: Any, timeout_s: float = 60) -> None:
    """Waits until the mirror equals `content_of()`, the content of the cache, while another task calls `follow`."""
    async with asyncio.timeout(timeout_s):
        while subscriber.blocks.keys() != await content_of():  # noqa: ASYNC110 (the other side is a process)
            await asyncio.sleep(0.01)
