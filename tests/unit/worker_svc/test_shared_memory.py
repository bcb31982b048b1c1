"""Memory that ranks share: all of them have it, or none."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels import exchange
from worker_svc.parallel import shared_memory
from worker_svc.parallel.shared_memory import share_memory

SIZE, TIMEOUT_S = 3, 30


class ThreadStore:
    """A store for ranks that are threads."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, TIMEOUT_S), f"nobody has set {key}"
            return self._values[key].encode()


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def shared_by_all() -> list[torch.Tensor | None]:
    store = ThreadStore()
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: share_memory(store, rank, SIZE), range(SIZE)))


def fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_what_one_rank_writes_all_others_read_and_no_file_is_left(directory: Path) -> None:
    memories = [memory for memory in shared_by_all() if memory is not None]
    assert len(memories) == SIZE
    for memory in memories:
        assert memory.shape == (exchange.shared_bytes(SIZE),)
        assert not memory.any()
    memories[1][-1] = 7
    assert [int(memory[-1]) for memory in memories] == [7] * SIZE
    assert list(directory.iterdir()) == []


def on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = shared_memory.os.open

    def open_but_for_others(path: Path, flags: int, *mode: int) -> int:
        if not flags & shared_memory.os.O_CREAT and threading.current_thread().name.endswith("_1"):
            raise FileNotFoundError(2, "No such file or directory")
        return opened(path, flags, *mode)

    monkeypatch.setattr(shared_memory.os, "open", open_but_for_others)


def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.os, "posix_fallocate", fail)


def without_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_SHARED_MEMORY", Path("/nonexistent"))


def without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.exchange, "can_exchange", lambda: False)


@pytest.mark.parametrize("spoil", [on_another_machine, without_room, without_a_directory, without_a_library])
def test_where_one_rank_has_none_none_has(
    spoil: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    with monkeypatch.context() as patch:
        spoil(patch)
        assert shared_by_all() == [None] * SIZE
    assert list(directory.iterdir()) == []
