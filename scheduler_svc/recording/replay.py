"""Runs the core on its recorded inputs, without workers and gateways, and compares its plans.

The core is deterministic: time, ids and results are its arguments. So the same version plans the very same steps, and a
changed version shows where its plans begin to differ.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from quire.messages.prefix_hashes import BlockHash, hashes_of
from scheduler_svc.core import invariants
from scheduler_svc.core.moves import Lease
from scheduler_svc.core.pins import PIN_CLIENT
from scheduler_svc.core.request import ClientId, Handle, RequestKey
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording.files import (
    DamagedError,
    RecordingError,
    append,
    create,
    frame,
    header_of,
    open_frames,
    read_header,
    segment_path,
    snapshot_path,
    sync,
)
from scheduler_svc.recording.messages import (
    Header,
    Operation,
    adapter_of,
    config_of,
    plan_message,
    request_of,
    result_of,
    sealed_of,
    tokens_of,
)
from scheduler_svc.recording.snapshot import dump, load

_MAX_DIFFERENCES = 20

_HALVES = frozenset({"refuse_in_flight", "lose_in_flight"})
"""Operations that `void_in_flight` must follow: in between, the state need not be consistent."""


@dataclass(slots=True)
class Report:
    """The result of a replay. `differences` are lines, the first ones of `num_differences`."""

    num_operations: int = 0
    num_requests: int = 0
    num_steps: int = 0
    num_differences: int = 0
    differences: list[str] = field(default_factory=list[str])
    ended_early: str | None = None
    """Why the rest cannot be replayed: the recorded inputs do not fit the core's state any more."""
    damage: str | None = None
    is_interrupted: bool = False

    @property
    def is_equal(self) -> bool:
        return not self.num_differences and self.ended_early is None

    def differ(self, line: str) -> None:
        self.num_differences += 1
        if len(self.differences) < _MAX_DIFFERENCES:
            self.differences.append(line)


class _CannotGoOnError(Exception):
    pass


class Replayer:
    """A core that runs one recorded operation after the other.

    Attributes:
        scheduler: The core; None before its start.
        before: The core that continues next with the limits of `scheduler`; None if there is none.

    Args:
        checks: Whether the core's invariants are checked after each operation.
        show: Gets a line for each step.
    """

    def __init__(self, *, checks: bool = True, show: Callable[[str], None] | None = None) -> None:
        self.scheduler: Scheduler | None = None
        self.before: Scheduler | None = None
        self.report = Report()
        self._checks = checks
        self._show = show
        self._start: float | None = None

    def run(self, operations: Iterator[Operation]) -> None:
        """Runs the operations up to the first one that does not fit; differences are in `report`."""
        try:
            for operation in operations:
                self._run(operation)
        except _CannotGoOnError as error:
            self.report.ended_early = str(error)
        except DamagedError as error:
            self.report.damage = str(error)

    def _run(self, operation: Operation) -> None:
        name = operation.WhichOneof("operation")
        if name is None:
            raise _CannotGoOnError(f"operation {self.report.num_operations + 1} is of a kind that this version lacks")
        self.report.num_operations += 1
        raised, cause = "", None
        try:
            self._perform(name, operation)
        except _CannotGoOnError:
            raise
        except Exception as error:
            raised, cause = type(error).__name__, error
        if raised != operation.raised:
            self.report.differ(
                f"{self._place(operation)}: {name} {_raises(raised)}{f' ({cause})' if cause else ''}; "
                f"when it was recorded it {_raises(operation.raised)}"
            )
            if name == "apply" and cause is not None:
                raise _CannotGoOnError(f"the result of step {operation.apply.step_id} fits no step here: {cause}")
        if self._checks and self.scheduler is not None and name not in _HALVES:
            try:
                invariants.check(self.scheduler)
            except invariants.InvariantViolationError as error:
                self.report.differ(f"{self._place(operation)}: after {name} an invariant does not hold: {error}")
                raise _CannotGoOnError("the state of the core contradicts itself") from error

    def _perform(self, name: str, operation: Operation) -> None:
        now = operation.now
        if name == "start":
            self.before, self.scheduler = self.scheduler, Scheduler(config_of(operation.start))
            return
        scheduler = self.scheduler
        if scheduler is None:
            raise _CannotGoOnError("the recording does not begin with the start of a core")
        match name:
            case "submit":
                self.report.num_requests += 1
                scheduler.submit(request_of(operation.submit), now)
            case "unpin":
                pin = scheduler.pins.of_key(_key(PIN_CLIENT, operation.unpin.handle))
                if pin is None:
                    raise _CannotGoOnError(f"there is no pin {operation.unpin.handle} to end")
                scheduler.unpin(pin.tenant, pin.pin_id)
            case "schedule":
                self._schedule(scheduler, operation)
            case "take_over":
                if self.before is None:
                    raise _CannotGoOnError("there is no core to take requests over from")
                self.before.refit(scheduler.config, now)
                self.before, self.scheduler = None, self.before
            case _:
                _CALLS[name](scheduler, getattr(operation, name), now)

    def _schedule(self, scheduler: Scheduler, operation: Operation) -> None:
        planned = plan_message(scheduler.schedule(operation.now), operation.now)
        here, recorded = planned.schedule, operation.schedule
        if here.HasField("plan"):
            self.report.num_steps += 1
        if here != recorded:
            self.report.differ(f"{self._place(operation)}: {_difference(here, recorded)}")
        elif self._show is not None and here.HasField("plan"):
            self._show(f"{self._place(operation)}: {_describe(here)}; {_queues(scheduler)}")

    def _place(self, operation: Operation) -> str:
        """The place in the recording; seconds are since its first operation with a time."""
        if self._start is None and operation.now:
            self._start = operation.now
        seconds = f" at {operation.now - (self._start or 0):.3f} s" if operation.now else ""
        step_id = 0 if self.scheduler is None else self.scheduler.num_attached_steps
        return f"operation {self.report.num_operations}{seconds}, step {step_id}"


def _rename(core: Scheduler, rename: Any, now: float) -> None:
    for named in (core.batch.blocks.pool, core.batch.blocks.host.pool, core.tier):
        named.rename(BlockHash(rename.name), BlockHash(rename.hash))


def _prepared(core: Scheduler, prepared: Any, now: float) -> None:
    failure = prepared.failure if prepared.HasField("failure") else None
    core.prepared(prepared.number, failure, frozenset(tokens_of(prepared.failed_blocks)))


_CALLS: Mapping[str, Callable[[Scheduler, Any, float], object]] = {
    "abort": lambda core, each, now: core.abort(_key(each.client, each.handle)),
    "abort_sequence": lambda core, each, now: core.abort_sequence(_key(each.client, each.handle), each.sequence_index),
    "pin": lambda core, each, now: core.pin(
        each.tenant, tokens_of(each.token_ids), now, each.time_to_live_seconds, adapter_of(each.adapter_digest)
    ),
    "forget_cached": lambda core, each, now: core.forget_cached(),
    "expire_pins": lambda core, each, now: core.expire_pins(now),
    "apply": lambda core, each, now: core.apply(result_of(each), now),
    "refuse_in_flight": lambda core, each, now: core.refuse_in_flight(each.detail),
    "lose_in_flight": lambda core, each, now: core.lose_in_flight(each.detail if each.HasField("detail") else None),
    "judge_loss": lambda core, each, now: core.judge_loss(was_alive=each.was_alive),
    "void_in_flight": lambda core, each, now: core.void_in_flight(now),
    "restore_sealed": lambda core, each, now: core.restore_sealed(sealed_of(each)),
    "rename": _rename,
    "tier_changed": lambda core, each, now: core.tier_changed(tokens_of(each.slots), hashes_of(each.hashes)),
    "prepared": _prepared,
    "hand_over": lambda core, each, now: core.move_away(
        _key(each.client, each.handle), Lease(each.lease), now, each.lease_seconds
    ),
    "hold_new": lambda core, each, now: core.hold_new(now, each.seconds),
    "renew_lease": lambda core, each, now: core.renew_lease(Lease(each.lease), now, each.lease_seconds or None),
    "give_up_preparation": lambda core, each, now: core.end_late_preparation(each.number, 0.0),
    "take_preparations": lambda core, each, now: core.take_preparations(),
}
"""Operations that are one call of the core, with their message and the time."""


def _key(client: int, handle: int) -> RequestKey:
    return RequestKey(ClientId(client), Handle(handle))


def _raises(raised: str) -> str:
    return f"raised {raised}" if raised else "raised nothing"


def _describe(schedule: Any) -> str:
    if not schedule.HasField("plan"):
        return "nothing to compute"
    plan = schedule.plan
    text = f"{plan.num_rows} rows, {plan.num_tokens} tokens, {plan.num_samples} samples"
    for count, what in (
        (plan.num_assigned, "assigned"),
        (plan.num_released, "released"),
        (plan.num_swapped_out, "blocks swapped out"),
        (plan.num_swapped_in, "blocks swapped in"),
        (plan.num_copied, "blocks copied"),
    ):
        text += f", {count} {what}" if count else ""
    return text


def _difference(here: Any, recorded: Any) -> str:
    texts = _describe(here), _describe(recorded)
    if texts[0] == texts[1]:
        return f"the plan has other rows, blocks or positions than the recorded one ({texts[0]})"
    return f"the plan is {texts[0]}; recorded was {texts[1]}"


def _queues(scheduler: Scheduler) -> str:
    pool = scheduler.batch.blocks.pool
    return (
        f"running {len(scheduler.running)}, swapped {len(scheduler.swapped)}, waiting {len(scheduler.waiting)}, "
        f"{pool.num_free} blocks free"
    )


def replay(path: Path, *, checks: bool = True, show: Callable[[str], None] | None = None) -> Report:
    """Runs the core on a recording, from its snapshot if it has one. Raises RecordingError."""
    header = read_header(path)
    replayer = Replayer(checks=checks, show=show)
    first = _load_snapshot(path, header, replayer)
    report = replayer.report
    try:
        for segment in range(first, header.segment + 1):
            if report.damage is None and report.ended_early is None:
                _replay_segment(path, header, segment, replayer)
    except KeyboardInterrupt:
        report.is_interrupted = True
    return report


def _replay_segment(path: Path, newest: Header, segment: int, replayer: Replayer) -> None:
    """Runs `replayer` on one file of the recording. Raises RecordingError if it is missing, or of another one."""
    part = path if segment == newest.segment else segment_path(path, segment)
    header, frames = open_frames(part)
    with closing(frames):
        _check_same(part, header, newest)
        if header.segment != segment:
            raise RecordingError(f"{part} is file {header.segment} of the recording; file {segment} is missing")
        replayer.run(_operations(part, frames))


def _operations(part: Path, frames: Iterator[bytes]) -> Iterator[Operation]:
    for number, content in enumerate(frames, start=1):
        try:
            yield Operation.FromString(content)
        except DecodeError:
            raise DamagedError(f"{part} is damaged: its frame {number} is no operation") from None


def _check_same(part: Path, header: Header, newest: Header) -> None:
    if header.recording_id != newest.recording_id:
        raise RecordingError(f"{part} belongs to another recording")


# Snapshots


def compact(path: Path, newest: Header, end: int) -> None:
    """Replaces the files before number `end` by a snapshot of the core after them. If the core's plans differ from the
    recording, raises RecordingError and changes nothing."""
    replayer = Replayer(checks=False)
    first = _load_snapshot(path, newest, replayer)
    for segment in range(first, end):
        _replay_segment(path, newest, segment, replayer)
    report = replayer.report
    if not report.is_equal or report.damage is not None or replayer.scheduler is None:
        reason = report.damage or report.ended_early or next(iter(report.differences), "it holds no operation")
        raise RecordingError(f"{path}: its first files cannot be replaced by a snapshot: {reason}")
    # Another scheduler may have begun meanwhile, and its files have these names.
    _check_same(path, read_header(path), newest)
    _write_snapshot(path, newest, end, replayer)
    for segment in range(first, end):
        segment_path(path, segment).unlink()


def _write_snapshot(path: Path, newest: Header, segment: int, replayer: Replayer) -> None:
    """Writes the core as it is before the file `segment`, in place of an earlier snapshot. If the file begins between
    the start of a core and its takeover, writes the core before it too."""
    made = snapshot_path(path).with_suffix(".partial")
    with create(made, header_of(newest, segment)) as file:
        for scheduler in filter(None, (replayer.scheduler, replayer.before)):
            append(file, frame(dump(scheduler)))
        # The files before it are removed next.
        sync(file)
    made.replace(snapshot_path(path))


def _load_snapshot(path: Path, newest: Header, replayer: Replayer) -> int:
    """Loads the recording's snapshot, if it has one, and returns the number of the file that continues after it."""
    snapshot = snapshot_path(path)
    if not snapshot.exists():
        return 0
    header, frames = open_frames(snapshot)
    try:
        with closing(frames):
            if header.recording_id != newest.recording_id:
                # It has outlived the other files of an earlier recording.
                return 0
            cores = list(map(load, frames))
    except DamagedError as error:
        raise RecordingError(f"{snapshot} is damaged; what comes after it cannot be replayed") from error
    except Exception as error:
        raise RecordingError(
            f"{snapshot} was written by Quire {header.version} and does not fit the core of this version: {error}"
        ) from error
    if not cores or not all(isinstance(core, Scheduler) for core in cores):
        raise RecordingError(f"{snapshot} holds no core")
    replayer.scheduler, replayer.before = cores[0], next(iter(cores[1:]), None)
    return header.segment


def main() -> int:
    """`FILE END` replaces the files before number END by a snapshot, at the lowest priority: for the recorder."""
    path, end = Path(sys.argv[1]), int(sys.argv[2])
    os.nice(19)
    try:
        compact(path, read_header(path), end)
    except (RecordingError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
