"""Timers that do not count a pause of this process against its peers."""

import asyncio
import socket
import time

import pytest

from quire.rpc.patience import PatientTimer
from tests.support.processes import until_true


def look_for(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Sets how long timers look once more, from now on."""
    monkeypatch.setattr("quire.rpc.patience.LAST_LOOK_S", seconds)


async def test_what_came_while_this_process_stood_still_is_seen_before_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_for(monkeypatch, 60.0)
    happened: list[str] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        timer = PatientTimer(0.02, happened.append, "over")
        reading = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(ours, 1))
        await asyncio.sleep(0)
        time.sleep(0.05)  # noqa: ASYNC251 (the whole process stands still)
        theirs.send(b"x")
        assert await reading == b"x"
        timer.cancel()
    assert happened == []


async def test_it_calls_back_once_where_nothing_comes_and_can_be_cancelled_also_while_it_looks_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_for(monkeypatch, 0.01)
    happened: list[str] = []
    PatientTimer(0.01, happened.append, "over")
    await until_true(lambda: happened)
    assert happened == ["over"]
    look_for(monkeypatch, 60.0)
    PatientTimer(0.0, happened.append, "early").cancel()
    late = PatientTimer(0.0, happened.append, "late")
    first = late._timer
    await until_true(lambda: late._timer is not first)
    late.cancel()
    assert late._timer.cancelled()
    late.cancel()
    assert happened == ["over"]
