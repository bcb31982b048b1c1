"""Logs."""

import logging
import re
from collections.abc import Iterator

import pytest

from quire.rpc.process import configure_logging


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, which gets its handlers and level back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_record_is_one_line_with_service_and_logger(root_logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("worker", "warning")
    logging.getLogger("some.module").info("not shown")
    logging.getLogger("some.module").warning("%d blocks", 3)
    captured = capsys.readouterr()
    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} WARNING worker some\.module 3 blocks\n"
    assert re.fullmatch(pattern, captured.err)
    assert captured.out == ""
