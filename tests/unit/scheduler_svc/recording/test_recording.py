"""Recordings as files: whole, cut, damaged, too large for one file, and on a full disk."""

import json
import logging
import random
import shutil
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from quire.messages.prefix_hashes import BlockHash
from quire.runtime.settings import ConfigurationError
from quire_cli.main import main
from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import files
from scheduler_svc.recording.messages import TokenHider
from scheduler_svc.recording.recorder import RecordedScheduler, Recorder, _Writer
from scheduler_svc.recording.replay import compact, replay
from tests.support import core_driver
from tests.support.core_driver import Driver, make_config, make_request

MANY_BYTES = 1 << 30
SECRET = 48_879
"""A token id that stands out in a file."""


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording waits for its snapshot, which takes long on a busy machine, and would otherwise end."""

    def after_waiting(act: Callable[[_Writer], None]) -> Callable[[_Writer], None]:
        def wait_and_act(writer: _Writer) -> None:
            if writer._compacting is not None:
                writer._compacting.wait(60)
            act(writer)

        return wait_and_act

    for act in (_Writer._go_on, _Writer.close):
        monkeypatch.setattr(_Writer, act.__name__, after_waiting(act))


def prepare(driver: Driver) -> None:
    """The worker compiles all constraints that it gets."""
    driver.tell()
    while driver.compile_next():
        pass


def record(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_requests: int = 30,
    with_token_ids: bool = False,
    max_bytes: int = MANY_BYTES,
) -> Driver:
    """Multi-turn chats arrive, and a full pool preempts some of them. The recording is closed."""
    recorder = Recorder.open(str(path), with_token_ids=with_token_ids, max_bytes=max_bytes)
    monkeypatch.setattr(core_driver, "Scheduler", recorder.make_scheduler)
    config = make_config(
        num_blocks=16, num_host_blocks=8, caches_on_host=True, max_waiting_requests=1000, prepares_constraints=True
    )
    driver = Driver(config)
    rng = random.Random(1)
    histories = [[SECRET, chat, 1, 2, 3] for chat in range(8)]
    for handle in range(num_requests):
        chat = rng.randrange(len(histories))
        tokens = histories[chat]
        request = make_request(
            handle, prompt=tokens, max_tokens=rng.randint(1, 12), num_sequences=rng.choice([1, 1, 3])
        )
        if handle % 4 == 0:
            sampling = replace(request.sampling, parameters=bytes([handle % 7]))
            request = replace(request, sampling=sampling, has_constraint=True)
        driver.submit(request)
        prepare(driver)
        driver.run_steps(rng.randint(1, 3))
        # The writer is as fast as a server's steps; these come faster, and it would write them in one piece.
        while not recorder._pending.empty():
            time.sleep(0.001)
        if handle in driver.finished:
            histories[chat] = [*tokens, *driver.outputs[handle], 7][:24]
    while driver.scheduler.num_live:
        prepare(driver)
        driver.run_until_idle()
    recorder.close()
    return driver


@dataclass(frozen=True, slots=True)
class Large:
    """A recording over several files. The first file became a snapshot, and then the snapshot and the next file."""

    path: Path
    num_steps: int
    """Steps of the core since its start."""

    def copy(self, folder: Path) -> Path:
        """The newest file of a copy that a test may change."""
        shutil.copytree(self.path.parent, folder, dirs_exist_ok=True)
        return folder / self.path.name


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Large:
    path = tmp_path_factory.mktemp("large") / "recording"
    with pytest.MonkeyPatch.context() as monkeypatch:
        be_patient(monkeypatch)
        driver = record(path, monkeypatch, num_requests=60, max_bytes=4 * 4096)
    return Large(path, driver.scheduler.num_steps)


@pytest.mark.parametrize("with_token_ids", [False, True])
def test_a_recording_is_planned_again_and_holds_token_ids_only_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_token_ids: bool
) -> None:
    path = tmp_path / "recording"
    driver = record(path, monkeypatch, with_token_ids=with_token_ids)
    assert driver.scheduler.num_preemptions
    assert any(each.cached_tokens for each in driver.usage.values())
    report = replay(path)
    assert report.is_equal, report.differences
    assert report.damage is None
    assert (report.num_requests, report.num_steps) == (30, driver.scheduler.num_steps)
    assert (struct.pack("<i", SECRET) in path.read_bytes()) == with_token_ids


def test_blocks_that_a_worker_kept_are_recorded_with_each_of_their_tokens_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_hidden = 0
    hide = TokenHider.hide

    def count(hider: TokenHider, token_ids: Sequence[int], positions: Any) -> Any:
        nonlocal num_hidden
        num_hidden += len(token_ids)
        return hide(hider, token_ids, positions)

    monkeypatch.setattr(TokenHider, "hide", count)
    path = tmp_path / "recording"
    recorder = Recorder.open(str(path), with_token_ids=False, max_bytes=MANY_BYTES)
    monkeypatch.setattr(core_driver, "Scheduler", recorder.make_scheduler)
    driver = Driver(make_config(num_blocks=256, max_model_len=500))
    request = make_request(1, prompt_len=200, max_tokens=200, num_sequences=2)
    scheduler, device = driver.scheduler, driver.device
    for _ in range(2):
        driver.submit(request)
        driver.run_until_idle()
        scheduler.lose_in_flight()
        scheduler.void_in_flight(driver.clock)
        scheduler.restore_sealed((BlockId(block), content) for block, content in device.seals.items())
        device.rows.clear()
        scheduler.judge_loss(was_alive=True)
    assert driver.usage[1].cached_tokens > 190
    # Twice the prompt and the results, and once both sequences, whose blocks were kept.
    assert num_hidden <= 2 * (200 + 2 * 200) + 2 * (200 + 200)
    # Beams that continue in the place of others share the recorded tokens of their blocks.
    beam = BeamParameters(3)
    driver.submit(
        make_request(2, prompt=list(request.prompt), max_tokens=9, num_sequences=3, num_returned=3, beam=beam)
    )
    driver.run_until_idle()
    recorder.close()
    report = replay(path)
    assert report.is_equal, report.differences


def test_a_core_that_plans_otherwise_is_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recording"
    record(path, monkeypatch)
    # A fault in the order of admission.
    monkeypatch.setattr("scheduler_svc.core.planner._MAX_ADMISSIONS", 0)
    assert main(["replay", str(path)]) == 1
    output = capsys.readouterr().out
    assert "step 0: the plan is nothing to compute; recorded was 1 rows, 5 tokens, 1 samples, 1 assigned" in output
    assert "the replay ends there: the result of step 1 fits no step here" in output


def test_whatever_is_before_the_damage_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recording"
    record(path, monkeypatch)
    whole = path.read_bytes()
    num_operations = replay(path).num_operations
    seen = set()
    for place in range(len(whole) // 4, len(whole), len(whole) // 7):
        path.write_bytes(whole[:place])
        cut = replay(path)
        assert cut.is_equal
        assert 0 < cut.num_operations < num_operations
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        damaged = replay(path)
        assert damaged.is_equal
        assert damaged.num_operations == cut.num_operations
        assert damaged.damage is not None
        assert damaged.damage.startswith(f"{path} is ")
        seen.add(cut.num_operations)
    assert len(seen) > 3
    assert main(["replay", str(path), "--no-check"]) == 0
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert "what comes before was replayed" in told.err
    assert "all as recorded" in told.out


def test_a_frame_that_is_no_operation_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recording"
    record(path, monkeypatch)
    num_operations = replay(path).num_operations
    with path.open("ab") as file:
        file.write(files.frame(b"\xff\xff\xff"))
    report = replay(path)
    assert (report.is_equal, report.num_operations) == (True, num_operations)
    assert report.damage == f"{path} is damaged: its frame {num_operations + 1} is no operation"


def test_a_frame_that_says_it_is_large_is_damage_and_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    files.create(path, files.new_header(has_token_ids=True)).close()
    with path.open("ab") as file:
        file.write(struct.pack("<II", (1 << 32) - 1, 0))
    _, frames = files.open_frames(path)
    tracemalloc.start()
    with pytest.raises(files.DamagedError, match="is cut or damaged at byte"):
        next(frames)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_replay_that_is_interrupted_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recording"
    record(path, monkeypatch)

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    report = replay(path, show=interrupt)
    assert report.is_interrupted
    assert report.num_operations > 0
    monkeypatch.setattr("quire_cli.replay.replay", lambda *_, **__: report)
    assert main(["replay", str(path)]) == 130
    told = capsys.readouterr()
    assert f"{report.num_operations} operations" in told.out
    assert told.err == "quire replay: interrupted: the rest of the recording was not replayed\n"


@pytest.mark.extended
def test_a_large_recording_goes_on_in_other_files_and_its_start_becomes_a_snapshot(
    tmp_path: Path, large: Large
) -> None:
    path = large.copy(tmp_path)
    names = {each.name for each in tmp_path.iterdir()}
    assert {"recording", "recording.snapshot"} <= names
    assert not {"recording.0", "recording.1"} & names
    report = replay(path)
    assert report.is_equal, report.differences or report.ended_early
    assert 0 < report.num_steps < large.num_steps

    newest = files.read_header(path).segment
    path.with_name(f"recording.{newest - 1}").unlink()
    assert main(["replay", str(path)]) == 2


def test_a_snapshot_between_the_start_of_a_core_and_its_takeover_has_both_cores(tmp_path: Path) -> None:
    told: list[Callable[[], Any]] = []
    core = RecordedScheduler(Scheduler(make_config()), told.append, None)
    core.submit(make_request(1), 0.0)
    core.refit(make_config(num_blocks=32), 1.0)
    assert core.schedule(1.0) is not None
    path, header = tmp_path / "recording", files.new_header(has_token_ids=True)
    for segment, part in enumerate((told[:3], told[3:])):
        file = path if segment else files.segment_path(path, 0)
        with files.create(file, files.header_of(header, segment)) as opened:
            files.append(opened, b"".join(files.frame(make().SerializeToString()) for make in part))
    compact(path, files.header_of(header, 1), 1)
    report = replay(path)
    assert report.is_equal, report.differences or report.ended_early
    assert (report.num_operations, report.num_steps) == (2, 1)


def test_names_of_blocks_that_are_nowhere_any_more_are_not_kept() -> None:
    hider = TokenHider(bytes(TokenHider.KEY_BYTES))
    core = RecordedScheduler(Scheduler(make_config(num_blocks=4)), lambda make: None, hider)
    for number in range(1000):
        core.tier_changed([number % 8], [BlockHash(number.to_bytes(32, "big"))])
        assert {BlockHash(each.to_bytes(32, "big")) for each in range(max(0, number - 7), number)} <= core.restored
    assert len(core.restored) < 100


@pytest.mark.extended
def test_a_snapshot_that_names_other_code_is_refused(
    tmp_path: Path, large: Large, capsys: pytest.CaptureFixture[str]
) -> None:
    path = large.copy(tmp_path)
    header = files.read_header(path.with_name("recording.snapshot"))
    for code in (
        "builtins.print",
        "numpy.ndarray",
        "scheduler_svc.core.planner.np",
        "scheduler_svc.recording.files.create",
    ):
        for content in ({}, "create"):
            with files.create(path.with_name("recording.snapshot"), header) as file:
                file.write(files.frame(json.dumps([[code, content]]).encode()))
            assert main(["replay", str(path)]) == 2
            assert f"does not fit the core of this version: it names {code}" in capsys.readouterr().err


def test_a_disk_that_is_slow_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("scheduler_svc.recording.recorder._MAX_PENDING", 10)
    recorder = Recorder.open(str(tmp_path / "recording"), with_token_ids=False, max_bytes=MANY_BYTES)
    may_write = threading.Event()
    monkeypatch.setattr(recorder._writer, "write", lambda operations: may_write.wait(60))
    monkeypatch.setattr(core_driver, "Scheduler", recorder.make_scheduler)
    driver = Driver(make_config())
    with caplog.at_level(logging.WARNING):
        driver.submit(make_request(1, max_tokens=30))
        driver.run_until_idle()
        may_write.set()
        recorder.close()
    assert driver.finished == {1}
    assert ["the disk is too slow" in each.getMessage() for each in caplog.records] == [True]


@pytest.mark.extended
def test_an_earlier_recording_is_set_aside_and_another_file_is_not_overwritten(
    tmp_path: Path, large: Large, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = large.copy(tmp_path)
    steps = replay(path).num_steps
    record(path, monkeypatch, num_requests=3)
    assert replay(path).num_requests == 3
    assert replay(tmp_path / "recording.old").num_steps == steps
    record(path, monkeypatch, num_requests=4)
    assert replay(tmp_path / "recording.old").num_requests == 3
    assert {each.name for each in tmp_path.iterdir()} == {"recording", "recording.old"}

    path.write_text("notes")
    with pytest.raises(ConfigurationError, match="the file exists, and it would be overwritten"):
        Recorder.open(str(path), with_token_ids=False, max_bytes=MANY_BYTES)
    with pytest.raises(ConfigurationError, match="No such file or directory"):
        Recorder.open(str(tmp_path / "missing" / "r"), with_token_ids=False, max_bytes=MANY_BYTES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"", "is no recording of a scheduler"),
        (b"GET / HTTP/1.1\r\n" * 10, "is no recording of a scheduler"),
        (b"quire recording\n", "is damaged at its start"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    path = tmp_path / "recording"
    if content is not None:
        path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_operations_that_are_written_together_go_into_several_files(tmp_path: Path) -> None:
    path, header = tmp_path / "recording", files.new_header(has_token_ids=True)
    writer = _Writer(path, files.create(path, header), header, max_bytes=4 * 5000)
    writer.write([bytes(1000)] * 8)
    writer.close()
    assert path.with_name("recording.0").stat().st_size < 5000 + 1100
    assert files.read_header(path).segment == 1
    assert len(list(files.open_frames(path)[1])) == 3
