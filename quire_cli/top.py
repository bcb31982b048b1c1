"""`quire top`: the numbers of the page /ui in a terminal, until Ctrl-C; one plain snapshot without a terminal."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from quire.rpc.errors import Unavailable
from quire.runtime.settings import load_settings, setting
from quire_cli.feed import Deployment, FeedFlags, ReplicaNumbers, line_of, milliseconds, read_feed

PROGRAM = "quire top"
_RETRY_S = 1.0
_BAR = 20
_STEP_ROWS, _WAITING_ROWS, _MIN_ROWS = 6, 6, 2
_TABLE_HEAD = 5
_TABLE_WIDTH = 64
"""Columns of a terminal that tables need; a smaller one shows sentences."""
_HEAD_HEIGHT = 8
"""Lines of a terminal that has room for more than numbers."""
_COLUMN_GAP = 3
_MIN_NAME = 10
_BAR_COLUMN = ""
_COLUMNS = ("running", "waiting", "swapped", "rows", "tokens/s", "first token", "KV", _BAR_COLUMN, "preempted")
_OMITTED_FIRST = (_BAR_COLUMN, "rows", "swapped", "preempted", "first token")
"""Columns that a small terminal leaves out, in this order."""


_BARS = "▁▂▃▄▅▆▇█"
_LABEL, _VALUE, _MAX_CHART = 13, 14, 120
_CHARTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("generated", "tokens/s", "{:,.0f}".format),
    ("computed", "computed/s", "{:,.0f}".format),
    ("ttft50", "first token", milliseconds),
    ("running", "running", "{:,.0f}".format),
    ("waiting", "waiting", "{:,.0f}".format),
    ("swapped", "swapped", "{:,.0f}".format),
    ("rows", "rows", "{:,.0f}".format),
    ("used", "KV", "{:.0%}".format),
    ("preemptions", "preempted/s", "{:,.1f}".format),
)
_HISTORY_HEIGHT = len(_CHARTS) + 2
_MIN_COLUMN_S, _SECONDS_UP_TO = 4, 120
"""More than the time between two samples, so that no column is empty."""


@dataclass(frozen=True, slots=True)
class TopFlags(FeedFlags):
    """Shows queues, batch, tokens per second, memory and the last steps of all replicas, live."""

    interval: float = setting(0.5, "seconds between two pictures", minimum=0.1, maximum=60, metavar="SECONDS")


def main(argv: Sequence[str]) -> int:
    """Draws until Ctrl-C."""
    flags = load_settings(TopFlags, argv, os.environ, program=PROGRAM)
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return snapshot(flags)
    try:
        _draw(flags)
    except KeyboardInterrupt:
        return 0
    return 0


def snapshot(flags: FeedFlags) -> int:
    """Prints one line per replica, once rates are known."""
    deployment = Deployment()
    with closing(read_feed(flags, flags.url)) as events:
        for name, value in events:
            deployment.add_event(name, value)
            if deployment.is_known:
                break
    print(headline(deployment, flags.url))
    for replica in deployment.replicas.values():
        print(line_of(deployment, replica))
    return 0


def headline(deployment: Deployment, url: str) -> str:
    """The model, the gateway and its version, in one line."""
    gateway = deployment.gateway or {}
    return f"{gateway.get('model', '?')} at {url} (quire {gateway.get('version', '?')})"


def _draw(flags: TopFlags) -> None:
    console = Console()
    deployment, drawn_at, drawn_heard = Deployment(), 0.0, 0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for event in _events_for_ever(flags):
            if event is None:
                live.update(Text(f"no gateway answers at {flags.url}; trying again", style="red"), refresh=True)
                continue
            deployment.add_event(*event)
            # A replica with its first numbers is drawn at once: the next event may come late.
            heard = sum(each.numbers is not None for each in deployment.replicas.values())
            if heard != drawn_heard or time.monotonic() - drawn_at >= flags.interval:
                drawn_at, drawn_heard = time.monotonic(), heard
                live.update(picture(deployment, flags.url, console.width, console.height), refresh=True)


def _events_for_ever(flags: TopFlags) -> Iterator[tuple[str, dict[str, Any]] | None]:
    """The events; None if there is no gateway, which is tried again. Raises an error of the first connection."""
    has_answered = False
    while True:
        try:
            for event in read_feed(flags, flags.url):
                has_answered = True
                yield event
        except Unavailable:
            if not has_answered:
                raise
        yield None
        time.sleep(_RETRY_S)


def picture(deployment: Deployment, url: str, width: int, height: int) -> RenderableType:
    """All replicas, then the steps and the queue of each, while there is room in a terminal of this size."""
    parts: list[RenderableType] = []
    if height >= _HEAD_HEIGHT:
        parts.append(Text(headline(deployment, url), style="bold", no_wrap=True, overflow="ellipsis"))
    if width < _TABLE_WIDTH:
        parts += [_sentence(deployment, replica) for replica in deployment.replicas.values()]
    else:
        parts.append(_replicas(deployment, width))
        room = height - 6 - len(deployment.replicas)
        for replica in deployment.replicas.values():
            if replica.numbers is not None and room >= _HISTORY_HEIGHT:
                parts.append(_history(replica, width))
                room -= _HISTORY_HEIGHT
            for title, make in (("last steps of", _steps), ("requests that wait at", _waiting)):
                table = make(replica, room - _TABLE_HEAD) if room >= _MIN_ROWS + _TABLE_HEAD else None
                if table is not None:
                    # The title of a narrow table would have several lines.
                    parts += [Text(f"{title} {replica.address}", "bold", no_wrap=True, overflow="ellipsis"), table]
                    room -= table.row_count + _TABLE_HEAD
    if height >= _HEAD_HEIGHT:
        parts.append(Text("Ctrl-C ends", style="dim"))
    return Group(*parts)


def _sentence(deployment: Deployment, replica: ReplicaNumbers) -> Text:
    """The numbers of a replica, which has no name if it is the only one."""
    line = line_of(deployment, replica)
    return Text(line.removeprefix(f"replica {replica.address}: ") if len(deployment.replicas) == 1 else line)


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", overflow="ellipsis", no_wrap=True)
    return table


def _replicas(deployment: Deployment, width: int) -> Table:
    """One row per replica, with the columns that fit."""
    rows = [_cells(replica) for replica in deployment.replicas.values()]
    names = [(Text(replica.address), _health(deployment, replica)) for replica in deployment.replicas.values()]
    widths = {title: max([len(title), *(len(row[title]) for row in rows)]) for title in _COLUMNS}
    for title in _OMITTED_FIRST:
        if sum(widths.values()) + _COLUMN_GAP * len(widths) + 2 * (_MIN_NAME + _COLUMN_GAP) <= width:
            break
        widths.pop(title, None)
    left = width - sum(widths.values()) - _COLUMN_GAP * (len(widths) + 2)
    health_width = min(max([len("health"), *(len(health) for _, health in names)]), left - _MIN_NAME)
    table = _table("replica", "health", *widths)
    table.columns[0].max_width, table.columns[1].max_width = left - health_width, health_width
    for name, row in zip(names, rows, strict=True):
        table.add_row(*name, *(row[title] for title in widths))
    return table


def _health(deployment: Deployment, replica: ReplicaNumbers) -> Text:
    health = deployment.health_of(replica)
    return Text(health + deployment.role_of(replica), style="green" if health == "ready" else "red")


def _cells(replica: ReplicaNumbers) -> dict[str, Text]:
    """The numbers of a replica by the titles of their columns."""
    numbers, rates = replica.numbers, replica.rates or {}
    if numbers is None:
        return {title: Text("-") for title in _COLUMNS}
    texts = (
        Text(str(numbers["running_requests"])),
        Text(str(numbers["waiting_requests"])),
        Text(str(numbers["swapped_requests"])),
        Text(f"{numbers['running_sequences']}/{numbers['max_num_seqs']}"),
        Text(f"{rates.get('generated_tokens', 0):.0f}"),
        Text(milliseconds(replica.first_token_ms)),
        Text(f"{replica.kv_use:.0%}"),
        _bar(replica.kv_use),
        Text(str(numbers["preemptions"])),
    )
    return dict(zip(_COLUMNS, texts, strict=True))


def _heat(share: float) -> str:
    return "green" if share < 0.8 else "yellow" if share < 0.95 else "red"


def _bar(share: float) -> Text:
    filled = round(share * _BAR)
    return Text("█" * filled, style=_heat(share)).append("░" * (_BAR - filled), style="dim")


def _history(replica: ReplicaNumbers, width: int) -> Text:
    """The blocks of the pool as a strip, and the known part of the last ten minutes as small charts,
    each with its newest value."""
    assert replica.numbers is not None
    room = min(_MAX_CHART, width - _LABEL - _VALUE - 1)
    samples = list(replica.samples)
    times: list[float] = [each["at"] for each in samples]
    span_s = times[-1] - times[0] if times else 0.0
    column_s = max(_MIN_COLUMN_S, math.ceil(span_s / (room - 1)))
    pool, block_bytes = replica.numbers["gpu_pool"], replica.numbers["block_bytes"]
    lines = [_strip(pool, room)]
    if block_bytes:
        used, cached, total = (pool[f"{state}_blocks"] * block_bytes / 2**30 for state in ("used", "cached", "total"))
        of_state = replica.numbers.get("state_blocks", 0) * block_bytes / 2**20
        states = f"; a state has {of_state:.1f} MiB" if of_state else ""
        lines.append(Text(f"{'memory':<{_LABEL}}{used:.2f} GiB in use, {cached:.2f} cached, of {total:.2f}{states}"))
    for name, title, form in _CHARTS:
        values: list[float | None] = [each.get(name) for each in samples]
        shown = form(values[-1]) if values and values[-1] is not None else "-"
        line = Text(f"{title:<{_LABEL}}").append(sparkline(times, values, room, column_s), style="cyan")
        lines.append(line.append(f" {shown:>{_VALUE}}"))
    known = f"{span_s:.0f} s" if span_s < _SECONDS_UP_TO else f"{span_s / 60:.0f} min"
    lines.append(Text(f"{'':{_LABEL}}{f'the last {known}':>{room}}", style="dim"))
    return Text("\n").join(lines)


def _strip(pool: Mapping[str, int], room: int) -> Text:
    """All blocks as one strip: in use, cached and free."""
    total = max(1, pool["total_blocks"])
    used = min(room, math.ceil(pool["used_blocks"] / total * room))
    cached = min(room - used, math.ceil(pool["cached_blocks"] / total * room))
    strip = Text(f"{'blocks':<{_LABEL}}").append("█" * used, style=_heat(pool["used_blocks"] / total))
    strip.append("▒" * cached, style="blue").append("░" * (room - used - cached), style="dim")
    return strip.append(f" {pool['used_blocks']:>{_VALUE - 7},} in use")


def sparkline(times: Sequence[float], values: Sequence[float | None], width: int, column_s: float) -> str:
    """Values at rising times as bars of eight heights, the newest to the right; each is the mean of `column_s` seconds,
    a gap if none is known."""
    columns: list[list[float]] = [[] for _ in range(width)]
    for at, value in zip(times, values, strict=True):
        place = int(at // column_s) - int(times[-1] // column_s) - 1
        if value is not None and place >= -width:
            columns[place].append(value)
    shown = [sum(each) / len(each) if each else None for each in columns]
    most = max((value for value in shown if value is not None), default=0) or 1
    return "".join(" " if value is None else _BARS[min(7, int(8 * value / most))] for value in shown)


def _steps(replica: ReplicaNumbers, room: int) -> Table | None:
    if not replica.steps:
        return None
    table = _table("step", "decodes", "chunk tokens", "entered", "preempted", "copied", "plan")
    for step in list(replica.steps)[-min(_STEP_ROWS, room) :]:
        names = ("step_id", "num_decodes", "num_chunk_tokens", "num_entered", "num_preempted", "num_copied")
        table.add_row(*(str(step[name]) for name in names), f"{step['plan_us'] / 1000:.2f} ms")
    return table


def _waiting(replica: ReplicaNumbers, room: int) -> Table | None:
    if not replica.waiting:
        return None
    table = _table("request", "tokens", "for", "because")
    for each in replica.waiting[: min(_WAITING_ROWS, room)]:
        waited = milliseconds(each["waited_ms"])
        reason = each["reason"].replace("_", " ")
        table.add_row(escape(each["request_id"]), str(each["tokens_to_compute"]), waited, reason)
    return table
