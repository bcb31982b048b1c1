"""Progress of a load: as a value in a message, and as a line of text."""

import io

from quire.model_files.progress import READING, STARTING, LoadProgress, ProgressLine, of_bytes

HALF = LoadProgress(READING, 3 << 29, 3 << 30)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_the_same_after_every_hop() -> None:
    for progress in (HALF, LoadProgress(STARTING)):
        assert LoadProgress.of(progress.message()) == progress
        assert LoadProgress.of_metadata(progress.metadata()) == progress
    assert LoadProgress.of_metadata({}) is None
    assert LoadProgress.of_metadata({**HALF.metadata(), "load_done_bytes": "much"}) is None


def test_progress_for_people() -> None:
    assert str(HALF) == "reading, 1.5 of 3.0 GiB (50%)"
    assert str(LoadProgress(STARTING)) == "starting"
    assert (HALF.percent, LoadProgress(STARTING).percent) == (50, None)
    assert (of_bytes(1, 1000), of_bytes(1 << 20, 5 << 19)) == (("1", "1000 B"), ("1.0", "2.5 MiB"))


def test_a_terminal_has_one_line_that_changes() -> None:
    now, stream = [0.0], Terminal()
    line = ProgressLine(stream, clock=lambda: now[0])
    for number in range(4):
        now[0] += 0.06
        line.show(f"step {number}")
    line.print("news")
    assert stream.getvalue() == "\r\x1b[Kstep 1\r\x1b[Kstep 3\r\x1b[Knews\n"
    line.clear()
    assert stream.getvalue().endswith("news\n")


def test_a_log_has_a_line_every_few_seconds() -> None:
    now, stream = [0.0], io.StringIO()
    line = ProgressLine(stream, clock=lambda: now[0])
    for number in range(12):
        now[0] += 1
        line.show(f"step {number}")
    line.clear()
    assert stream.getvalue() == "step 4\nstep 9\n"


def test_a_reader_that_is_gone_ends_nothing() -> None:
    class Broken(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    line = ProgressLine(Broken(), clock=iter(range(9)).__next__)
    line.show("x")
    line.print("y")
