"""Waits before restarts, and the times at which a silent service is killed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire_cli.supervisor import hangs
from quire_cli.supervisor.hangs import HangLimits, watch
from quire_cli.supervisor.process import RestartBackoff


def test_waits_double_up_to_the_longest_for_who_died_and_a_long_life_forgives() -> None:
    backoff = RestartBackoff()
    assert [backoff.delay_s(lived_s=1) for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert [backoff.delay_s(lived_s=each) for each in (4.9, 5, 0)] == [5.0, 0.1, 0.2]
    backoff = RestartBackoff(reset_s=2.0)
    assert [backoff.delay_s(lived_s=each) for each in (1, 1.9, 2, 1)] == [0.1, 0.2, 0.1, 0.2]
    # A process that ended by itself did not die.
    backoff = RestartBackoff()
    assert [backoff.delay_s(lived_s=1, died=False) for _ in range(5)] == [0.1] * 5
    assert [backoff.delay_s(lived_s=1, died=died) for died in (True, False, True)] == [0.1, 0.1, 0.2]


# Exact in binary, as a limit divided by the interval must be a whole number.
CHECK_S = 1 / 1024
LIMITS = HangLimits(hang_timeout_s=3 * CHECK_S, start_timeout_s=5 * CHECK_S)
HANGS = "thing answers no health check for 0.00292969 s; killing it"
DOES_NOT_LISTEN = "thing does not listen after 0.00488281 s; killing it"
FAILED = "health checks of thing failed: [Errno 24] Too many open files; beginning them again in 0.001 s"


class ScriptedService:
    """A service as its health checks see it, one character a check: it answers (.), is silent (-), does not listen yet
    (o), was restarted meanwhile (R), does not run (x), or this process has no socket for the check (!)."""

    name = "thing"

    def __init__(self, script: str) -> None:
        self.starts = 1
        self.is_over = asyncio.Event()
        self._script = iter(script)
        self._now = ""

    @property
    def is_running(self) -> bool:
        return self._now != "x"

    async def answers(self, stub: object, timeout_s: float) -> bool:
        self._now = next(self._script, "")
        if not self._now:
            self.is_over.set()
            await asyncio.Event().wait()
        self.starts += self._now == "R"
        return self._now == "."

    def listens(self, path: Path) -> bool:
        if self._now == "!":
            raise OSError(24, "Too many open files")
        return self._now == "-"

    def kill_once(self) -> None:
        self.starts += 1


@pytest.mark.parametrize(
    ("script", "reports"),
    [
        ("..--.--.", []),
        ("..---", [HANGS]),
        # Silence before any check was answered, and then again as early.
        ("---R---", [HANGS, HANGS]),
        ("oooo", []),
        ("ooooo", [DOES_NOT_LISTEN]),
        # Silence counts anew from the time when it listens.
        ("oooo--.", []),
        ("oooo---", [HANGS]),
        # A service that begins anew in its process does not listen meanwhile.
        ("..-oooo--.", []),
        ("..ooooo", [DOES_NOT_LISTEN]),
        ("..--R--", []),
        ("..--xxxxx--", []),
        # A service that fails begins anew, and so does the count.
        ("..--!--", [FAILED]),
        ("!---", [FAILED, HANGS]),
    ],
)
async def test_a_service_that_is_silent_for_too_long_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reports: list[str]
) -> None:
    service, found = ScriptedService(script), list[str]()
    monkeypatch.setattr(hangs, "_answers", service.answers)
    monkeypatch.setattr(hangs, "_listens", service.listens)
    backoff = RestartBackoff(first_s=0.001, max_s=0.001)
    scripted: Any = service
    watching = asyncio.create_task(watch(scripted, tmp_path / "s", LIMITS, found.append, backoff))
    await asyncio.wait_for(service.is_over.wait(), 30)
    watching.cancel()
    assert found == reports
    # Each kill is a start, and so is each R.
    assert service.starts == 1 + script.count("R") + sum("killing it" in line for line in reports)
