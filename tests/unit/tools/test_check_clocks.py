"""Modules that read clocks by themselves are found, and nothing else is."""

from pathlib import Path

from tools.check_clocks import findings_in

SOURCE = """
import datetime, os, time as t
from quire import clock
from secrets import token_hex
def wait(clock=t.monotonic): ...
key, now = os.urandom(8), datetime.datetime.now()
clock.monotonic(), call.time.left_s(), self.timing.time.begin()
"""


def test_clocks_of_its_own_are_found_and_those_of_the_seam_allowed() -> None:
    found = [each.what for each in findings_in(SOURCE, Path("module.py"))]
    assert sorted(found) == ["datetime.datetime.now", "from secrets import token_hex", "os.urandom", "time.monotonic"]
