"""Logs: their two formats, the request of a record, and the level, which signals change."""

import asyncio
import json
import logging
import os
import re
import signal
from collections.abc import Iterator

import pytest

from quire.rpc.process import run_service
from quire.runtime.logs import REQUEST_ID, begin_logging, change_level, configure_logging, set_request_id
from quire.service.service_flags import ProcessFlags

LOGGER = logging.getLogger("some.module")


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, whose handlers and level are restored."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_record_is_one_line_with_service_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("worker", "warning")
    LOGGER.info("not shown")
    LOGGER.warning("%d blocks", 3)
    captured = capsys.readouterr()
    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} WARNING worker some\.module 3 blocks\n"
    assert re.fullmatch(pattern, captured.err)
    assert captured.out == ""


def test_a_variable_that_is_misspelt_is_logged_without_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"QUIRE_LOG_LEVL": "secret", "QUIRE_LOG_LEVEL": "info"}
    begin_logging("worker", "info", "json", ProcessFlags, environ, program="quire worker")
    (line,) = capsys.readouterr().err.splitlines()
    assert "QUIRE_LOG_LEVL is set, and no setting of quire worker; did you mean" in json.loads(line)["message"]
    assert "secret" not in line


def test_texts_of_callers_forge_no_record_and_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("worker", "warning")
    LOGGER.warning("request %s failed: \u00e9\t%s", "a\r\nb\x1b[31m", "\x9b\x7f\u2028")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.endswith("request a\\r\\nb\\x1b[31m failed: \u00e9\t\\x9b\\x7f\\u2028\n")


def test_names_and_metadata_of_calls_that_are_not_utf_8_fill_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("gateway")
    logger, sent = logging.getLogger("grpc._cython.cygrpc"), b"\xff" * 60_000
    try:
        sent.decode()
    except UnicodeDecodeError:
        logger.exception("Invalid encoding on %s", sent)
    logger.error("another error")
    assert capsys.readouterr().err.splitlines()[0].endswith("grpc._cython.cygrpc another error")


def records_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_record_in_json_has_the_same_and_the_time_in_utc(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("worker", "warning", "json")
    LOGGER.warning('%d "blocks"\nof two lines', 3)
    (record,) = records_of(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record.pop("time"))
    message = '3 "blocks"\nof two lines'
    assert record == {"level": "warning", "service": "worker", "logger": "some.module", "message": message}
    try:
        raise ValueError("what nobody thought of")
    except ValueError:
        LOGGER.exception("é\n\x00")
    (record,) = records_of(capsys)
    assert record["message"] == "é\n\x00"
    assert record["exception"].endswith("ValueError: what nobody thought of")


async def test_records_name_the_request_of_their_task_or_the_one_that_they_are_about(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("gateway", "info", "json")

    async def call(request_id: str) -> None:
        set_request_id(request_id)
        await asyncio.sleep(0)
        LOGGER.info("mine")

    await asyncio.gather(call("a"), call("b"))
    LOGGER.info("nobody's")
    LOGGER.info("of another", extra={REQUEST_ID: "c"})
    # Tasks of earlier tests may end, and say so.
    ours = [record for record in records_of(capsys) if record["logger"] == LOGGER.name]
    assert [record.get("request_id") for record in ours] == ["a", "b", None, "c"]


def test_the_level_is_lowered_and_set_back(root_logger: logging.Logger) -> None:
    configure_logging("worker", "error")
    assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)
    assert change_level("debug") == "debug"
    assert logging.getLogger("httpx").isEnabledFor(logging.DEBUG)
    assert change_level(None) == "error"
    assert root_logger.level == logging.ERROR
    assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)


def test_signals_change_the_level_of_a_service_that_runs(root_logger: logging.Logger) -> None:
    levels: list[int] = []

    async def main() -> None:
        configure_logging("worker", "warning")
        for number, level in ((signal.SIGUSR1, logging.DEBUG), (signal.SIGUSR2, logging.WARNING)):
            os.kill(os.getpid(), number)
            async with asyncio.timeout(30):
                while root_logger.level != level:  # noqa: ASYNC110 (the signal arrives between two turns of the loop)
                    await asyncio.sleep(0)
            levels.append(root_logger.level)

    assert run_service(main, program="quire worker") == 0
    assert levels == [logging.DEBUG, logging.WARNING]
