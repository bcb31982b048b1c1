"""Serving is measured in attempts, each of which may fail alone and has its time."""

import asyncio
from pathlib import Path

import pytest

from bench import gpu_serving
from bench.gpu_serving import Attempts, serve_once
from quire_cli.supervisor import ServeSettings


def test_what_fails_is_raised_after_all_else_was_tried() -> None:
    attempts = Attempts()
    assert attempts.make(int, "4") == 4
    assert attempts.make(int, "x") is None
    assert attempts.make(divmod, 7, 2) == (3, 1)
    with pytest.raises(ExceptionGroup, match="1 failed") as raised:
        attempts.check()
    assert isinstance(raised.value.exceptions[0], ValueError)


def test_nothing_is_raised_where_nothing_failed() -> None:
    attempts = Attempts()
    attempts.make(int, "4")
    attempts.check()


def test_services_that_never_become_ready_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(gpu_serving, "serve", never)
    monkeypatch.setattr(gpu_serving, "_SERVING_TIMEOUT_S", 0.05)
    with pytest.raises(TimeoutError):
        serve_once(ServeSettings(), [], Path("trace.json"))
