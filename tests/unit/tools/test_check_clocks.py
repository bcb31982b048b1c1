"""Modules that read clocks by themselves are found, and nothing else is."""

from pathlib import Path

import pytest

from tools.check_clocks import findings_in


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import time\nstarted = time.monotonic()", "time.monotonic"),
        ("import time\ndef wait(clock=time.monotonic): ...", "time.monotonic"),
        ("import time as t\nstarted = t.monotonic()", "time.monotonic"),
        ("from secrets import token_hex", "from secrets import token_hex"),
        ("import os\nkey = os.urandom(8)", "os.urandom"),
        ("from os import urandom", "from os import urandom"),
        ("import datetime\nnow = datetime.datetime.now()", "datetime.datetime.now"),
    ],
)
def test_a_clock_of_its_own_is_found(source: str, what: str) -> None:
    assert [each.what for each in findings_in(source, Path("module.py"))] == [what]


@pytest.mark.parametrize(
    "source",
    ["from quire import clock\nclock.monotonic()", "self.timing.time.begin()", "time = call.time\ntime.left_s()"],
)
def test_clocks_of_the_seam_are_allowed(source: str) -> None:
    assert not list(findings_in(source, Path("module.py")))
