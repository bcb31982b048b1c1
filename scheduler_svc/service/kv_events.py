"""KV events (`--kv-events`): changes of the prefix cache, published by ZeroMQ in the message format of vLLM.

A batch has the changes of one step. Batches are numbered from 0 in each process. Without subscribers, batches wait in
the buffer that replays are answered from, and the next subscriber gets them. ZeroMQ drops messages that a slow
subscriber does not read; the subscriber sees a gap in the numbers and requests a replay. Nothing here waits for a
subscriber.

Only `--kv-events` imports this module: pyzmq and msgspec come with the extra `quire-llm[events]`.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from quire.messages.prefix_hashes import BlockHash, PrefixHash, in_group, prefix_of, short
from quire.rpc.address import UnixAddress, check_bindable
from quire.runtime import clock
from quire.runtime.settings import ConfigurationError
from scheduler_svc.core.cache_log import CacheChanges
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.settings import SchedulerSettings

_logger = logging.getLogger(__name__)

_POOL = "GPU"
"""vLLM's name of the place of blocks that the model reads, on any device."""

_HOST = "CPU"
"""vLLM's name of host memory."""

_DISK = "STORAGE"
"""vLLM's name of disks: since 0.27, "FS" for some weeks before."""

_IPC = "ipc://"
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_SUBSCRIBED, _UNSUBSCRIBED = b"\x01", b"\x00"
_NUMBER_BYTES = 8
_ADAPTER_ID_BYTES = 4
_BATCHES_AT_ONCE = 100
"""Batches that are sent one after the other before the event loop gets a turn: about a millisecond."""

_MAX_LOGGED_REQUESTS = 10

_MAX_BUFFER_BYTES = 256 << 20
"""Maximum size of kept batches. At some 2 bytes a token of prompts it holds more than the default number of steps."""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Blocks that follow each other came into the cache. `token_ids` is empty if they are not known."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = _POOL
    lora_name: str | None = None


class GroupBlockStored(BlockStored, tag="BlockStored"):
    """The same for blocks of one group of layers of a model that has several."""

    extra_keys: None = None
    group_idx: int = 0


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks left the cache."""

    block_hashes: list[int]
    medium: str = _POOL


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The cache is empty: a scheduler started, or lost its worker."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def payload_of(events: list[Event], *, at: float, as_maps: bool) -> bytes:
    """One batch in MessagePack: the time in seconds since 1970, the events, and the data parallel rank, always 0. An
    event is a map with its name under "type", or a list of its name and its fields."""
    written = events if as_maps else [(_name_of(event), *msgspec.structs.astuple(event)) for event in events]
    return msgspec.msgpack.encode((at, written, 0))


def _name_of(event: Event) -> str:
    return str(event.__struct_config__.tag)


def events_of(changes: CacheChanges, config: SchedulerConfig, *, with_tiers: bool) -> list[Event]:
    """The same changes as events, in the order in which a subscriber applies them. It may forget the tokens of blocks
    that are in no place any more, and still has the tokens of blocks that moved between the pool and lower tiers."""
    tiers = ((_HOST, changes.host_stored, changes.host_removed), (_DISK, changes.tier_stored, changes.tier_removed))
    events, block_size = list[Event](), config.block_size
    if changes.is_cleared:
        events.append(AllBlocksCleared())
    for medium, stored, _ in tiers if with_tiers else ():
        if stored:
            events.append(BlockStored(list(map(_number, stored)), None, [], block_size, medium=medium))
    if changes.removed:
        events.append(BlockRemoved(list(map(_number, changes.removed))))
    events += _stored(changes, config)
    for medium, _, removed in tiers if with_tiers else ():
        if removed:
            events.append(BlockRemoved(list(map(_number, removed)), medium))
    return events


def _stored(changes: CacheChanges, config: SchedulerConfig) -> Iterator[BlockStored]:
    """One event for each chain of consecutive blocks of a group, and one for all blocks of unknown tokens."""
    block_size, num_groups = config.block_size, config.layout.num_groups
    if unknown := [_number(content) for content, tokens in changes.stored.items() if tokens is None]:
        yield BlockStored(unknown, None, [], block_size)
    event: BlockStored | None = None
    last: tuple[PrefixHash, int] | None = None
    for content, tokens in changes.stored.items():
        if tokens is None:
            continue
        if event is None or last is None or (tokens.parent, tokens.group) != last:
            if event is not None:
                yield event
            parent = None if tokens.parent is None else _number(in_group(tokens.parent, tokens.group))
            # A number that names the adapter by its content, equal in all schedulers.
            digest = tokens.adapter_digest
            adapter_id = None if digest is None else int.from_bytes(digest[:_ADAPTER_ID_BYTES], "big")
            event = BlockStored([], parent, [], block_size, adapter_id, lora_name=tokens.adapter_name)
            if num_groups > 1:
                event = GroupBlockStored(*msgspec.structs.astuple(event), group_idx=tokens.group)
        event.block_hashes.append(_number(content))
        event.token_ids += tokens.token_ids
        last = prefix_of(content, tokens.group), tokens.group
    if event is not None:
        yield event


def _number(content: BlockHash) -> int:
    return int.from_bytes(short(content), "big")


class _Checkpoints:
    """The blocks of checkpoints of states in the cache. There are no events of them: they have no tokens of their own,
    so a subscriber would take them for more copies of the blocks of tokens."""

    def __init__(self) -> None:
        self._known = set[BlockHash]()
        # Blocks that were published without tokens. They may turn out to be of checkpoints.
        self._unknown = set[BlockHash]()

    def hidden_in(self, changes: CacheChanges, num_groups: int) -> CacheChanges:
        """The changes without blocks of checkpoints."""
        if changes.is_cleared:
            self._known.clear()
            self._unknown.clear()
        groups = {name: None if tokens is None else tokens.group for name, tokens in changes.stored.items()}
        fresh = {name for name, group in groups.items() if group is not None and group >= num_groups}
        # They were published before.
        exposed = fresh & self._unknown
        self._unknown -= {name for name, group in groups.items() if group is not None}
        self._unknown |= {name for name, group in groups.items() if group is None}
        hidden = self._known | fresh
        self._known = hidden.difference(changes.removed)
        self._unknown.difference_update(changes.removed)

        def rest(names: Iterable[BlockHash]) -> list[BlockHash]:
            return [name for name in names if name not in hidden]

        return replace(
            changes,
            removed=[*rest(changes.removed), *exposed],
            stored={name: tokens for name, tokens in changes.stored.items() if name not in hidden},
            tier_stored=rest(changes.tier_stored),
            tier_removed=rest(changes.tier_removed),
            host_stored=rest(changes.host_stored),
            host_removed=rest(changes.host_removed),
        )


class KvEventPublisher:
    """A PUB socket for events and, if configured, a ROUTER socket for replays. `publish` is a watcher of the cache."""

    def __init__(self, pub: zmq.asyncio.Socket, settings: SchedulerSettings) -> None:
        self._pub = pub
        self._topic = (settings.kv_events_topic or "").encode()
        self._as_maps = settings.kv_events_format == "map"
        self._with_tiers = settings.kv_events_disk
        self._buffer: deque[tuple[bytes, bytes]] = deque()
        self._max_batches = settings.kv_events_buffer
        self._num_bytes = 0
        self._checkpoints = _Checkpoints()
        # Number of the newest batches that were not sent yet.
        self._num_waiting = 0
        self._next_number = 0
        # Subscriptions that match the topic.
        self._subscriptions: set[bytes] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: SchedulerSettings) -> AsyncIterator["KvEventPublisher"]:
        """Publishes until the block ends. Raises ConfigurationError if an address cannot be used."""
        assert settings.kv_events is not None
        with zmq.asyncio.Context() as context, contextlib.ExitStack() as sockets:
            # XPUB is PUB that reports subscriptions.
            pub = sockets.enter_context(context.socket(zmq.XPUB))
            pub.setsockopt(zmq.SNDHWM, settings.kv_events_buffer)
            _attach(sockets, pub, "--kv-events", settings.kv_events, binds=_is_local(settings.kv_events))
            replay = None
            if settings.kv_events_replay is not None:
                replay = sockets.enter_context(context.socket(zmq.ROUTER))
                # Room for a whole replay: a ROUTER drops messages above the limit.
                replay.setsockopt(zmq.SNDHWM, settings.kv_events_buffer + 1)
                _attach(sockets, replay, "--kv-events-replay", settings.kv_events_replay, binds=True)
            publisher = cls(pub, settings)
            tasks = [asyncio.create_task(publisher._follow_subscriptions())]
            if replay is not None:
                tasks.append(asyncio.create_task(publisher._answer_replays(replay)))
            for task in tasks:
                task.add_done_callback(_log_failure)
            try:
                yield publisher
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    def publish(self, changes: CacheChanges, config: SchedulerConfig) -> None:
        """Sends the changes of a step, or keeps them for the next subscriber."""
        if config.state_blocks:
            changes = self._checkpoints.hidden_in(changes, config.layout.num_groups)
        if not (events := events_of(changes, config, with_tiers=self._with_tiers)):
            return
        payload = payload_of(events, at=clock.unix_s(), as_maps=self._as_maps)
        self._buffer.append((self._next_number.to_bytes(_NUMBER_BYTES, "big"), payload))
        self._num_bytes += len(payload)
        while len(self._buffer) > self._max_batches or (self._num_bytes > _MAX_BUFFER_BYTES and len(self._buffer) > 1):
            self._num_bytes -= len(self._buffer.popleft()[1])
        self._next_number += 1
        self._num_waiting = min(self._num_waiting + 1, len(self._buffer))
        if self._num_waiting == 1 and self._is_heard:
            self._send_next()

    @property
    def _is_heard(self) -> bool:
        return bool(self._subscriptions)

    def _send_next(self) -> None:
        number, payload = self._buffer[-self._num_waiting]
        self._num_waiting -= 1
        # Never waits: ZeroMQ drops the message for a subscriber without room.
        self._pub.send_multipart([self._topic, number, payload])

    async def _follow_subscriptions(self) -> None:
        """Tracks subscriptions. The first subscriber gets the waiting batches."""
        while True:
            message = await self._pub.recv()
            # Other subscriptions never matter, and their number is unbounded.
            if message.startswith(_SUBSCRIBED) and self._topic.startswith(message[1:]):
                self._subscriptions.add(message[1:])
            elif message.startswith(_UNSUBSCRIBED):
                self._subscriptions.discard(message[1:])
            num_sent = 0
            while self._num_waiting and self._is_heard:
                self._send_next()
                num_sent += 1
                if num_sent % _BATCHES_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def _answer_replays(self, socket: zmq.asyncio.Socket) -> None:
        """Answers replay requests: each is the number of the first wanted batch, in 8 bytes; the answer is all kept
        batches from there on, and an end."""
        num_logged = 0
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != _NUMBER_BYTES:
                if num_logged < _MAX_LOGGED_REQUESTS:
                    num_logged += 1
                    sizes = ", ".join(str(len(frame)) for frame in frames)
                    _logger.warning("a replay was requested in frames of %s bytes; it takes an id, 0 and 8", sizes)
                continue
            identity, _, first = frames
            for index, (number, payload) in enumerate([batch for batch in self._buffer if batch[0] >= first]):
                socket.send_multipart([identity, b"", number, payload])
                if index % _BATCHES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            socket.send_multipart([identity, b"", _END_OF_REPLAY, b""])


def _log_failure(task: asyncio.Task[None]) -> None:
    """Logs a task's failure. Requests continue, but subscribers get no new events, or no replays."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _logger.error("KV events are no longer complete: restart the scheduler", exc_info=error)


def _is_local(address: str) -> bool:
    """Whether an address is one to listen on, by vLLM's rule: all interfaces, or a path. At other addresses a
    subscriber listens. 0.0.0.0, to which vLLM would connect, can only mean all interfaces."""
    return any(each in address for each in ("*", "::", "//0.0.0.0:")) or address.startswith(_IPC)


def _attach(sockets: contextlib.ExitStack, socket: zmq.asyncio.Socket, flag: str, address: str, *, binds: bool) -> None:
    """Listens or connects. The file of a listening socket is removed with `sockets`, before the socket is closed: after
    that another scheduler may have one there. Raises ConfigurationError."""
    socket.setsockopt(zmq.LINGER, 0)
    file = _file_of(address) if binds else None
    try:
        if file is not None:
            # ZeroMQ would replace any socket there, even a live one.
            check_bindable(UnixAddress(file))
        if binds:
            socket.bind(address)
        else:
            socket.connect(address)
    except (zmq.ZMQError, ConfigurationError) as error:
        raise ConfigurationError(f"{flag} {address}: {getattr(error, 'strerror', error)}") from error
    if file is not None:
        sockets.callback(_remove, file)
    if binds and not address.startswith(_IPC):
        _logger.warning(
            "%s %s: any client that can connect reads the token ids of all prompts; nothing is encrypted", flag, address
        )


def _file_of(address: str) -> Path | None:
    """The file of a socket; None for TCP, for a name without a file (@), and for a file that ZeroMQ chooses (*)."""
    path = address.removeprefix(_IPC)
    return None if path == address or path.startswith(("@", "*")) else Path(path)


def _remove(file: Path) -> None:
    """Removes the file of a socket, which ZeroMQ leaves behind."""
    with contextlib.suppress(OSError):
        file.unlink()
