"""`quire top`: the numbers of the page /ui in a terminal, until Ctrl-C; one plain snapshot where there is none."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from quire.cli.feed import Deployment, FeedFlags, ReplicaNumbers, line_of, milliseconds, read_feed
from quire.rpc.errors import Unavailable
from quire.settings import load_settings, setting

PROGRAM = "quire top"
_RETRY_S = 1.0
_BAR = 20
_STEP_ROWS, _WAITING_ROWS = 6, 6


@dataclass(frozen=True, slots=True)
class TopFlags(FeedFlags):
    """Shows queues, batch, tokens per second, memory and the last steps of all replicas, live."""

    interval: float = setting(0.5, "seconds between two pictures", minimum=0.1, maximum=60, metavar="SECONDS")


def main(argv: Sequence[str]) -> int:
    """Draws until Ctrl-C."""
    flags = load_settings(TopFlags, argv, os.environ, program=PROGRAM)
    if not sys.stdout.isatty():
        return snapshot(flags)
    try:
        _draw(flags)
    except KeyboardInterrupt:
        return 0
    return 0


def snapshot(flags: FeedFlags) -> int:
    """Prints one line a replica, once rates are known."""
    deployment = Deployment()
    with closing(read_feed(flags, flags.url)) as events:
        for name, value in events:
            deployment.take(name, value)
            if deployment.is_known:
                break
    print(headline(deployment, flags.url))
    for replica in deployment.replicas.values():
        print(line_of(deployment, replica))
    return 0


def headline(deployment: Deployment, url: str) -> str:
    """What is shown, in one line."""
    gateway = deployment.gateway or {}
    return f"{gateway.get('model', '?')} at {url} (quire {gateway.get('version', '?')})"


def _draw(flags: TopFlags) -> None:
    console = Console()
    deployment, drawn_at = Deployment(), 0.0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for event in _events_for_ever(flags):
            if event is None:
                live.update(Text(f"no gateway answers at {flags.url}; trying again", style="red"), refresh=True)
                continue
            deployment.take(*event)
            if time.monotonic() - drawn_at >= flags.interval:
                drawn_at = time.monotonic()
                live.update(picture(deployment, flags.url, console.height), refresh=True)


def _events_for_ever(flags: TopFlags) -> Iterator[tuple[str, dict[str, Any]] | None]:
    """The events; None where there is no gateway, which is tried again. An error of the first connection is raised."""
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


def picture(deployment: Deployment, url: str, height: int) -> RenderableType:
    """All replicas, then the steps and the queue of each, as far as the height goes."""
    parts: list[RenderableType] = [Text(headline(deployment, url), style="bold"), _replicas(deployment)]
    room = height - 6 - len(deployment.replicas)
    for replica in deployment.replicas.values():
        for table, rows in ((_steps(replica), _STEP_ROWS), (_waiting(replica), _WAITING_ROWS)):
            if table is not None and room >= rows + 4:
                parts.append(table)
                room -= min(rows, table.row_count) + 4
    parts.append(Text("Ctrl-C ends", style="dim"))
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", overflow="ellipsis", no_wrap=True)
    return table


def _replicas(deployment: Deployment) -> Table:
    table = _table(
        "", "replica", "health", "running", "waiting", "swapped", "rows", "tokens/s", "first token", "KV", "preempted"
    )
    for replica in deployment.replicas.values():
        health = deployment.health_of(replica)
        shown = Text(health, style="green" if health == "ready" else "red")
        if (numbers := replica.numbers) is None:
            table.add_row(escape(replica.address), shown, *["-"] * 8)
            continue
        rates = replica.rates or {}
        table.add_row(
            escape(replica.address),
            shown,
            str(numbers["running_requests"]),
            str(numbers["waiting_requests"]),
            str(numbers["swapped_requests"]),
            f"{numbers['running_sequences']}/{numbers['max_num_seqs']}",
            f"{rates.get('generated_tokens', 0):.0f}",
            milliseconds(replica.time_to_first_token_ms(0.5)),
            _bar(replica.kv_use),
            str(numbers["preemptions"]),
        )
    return table


def _bar(share: float) -> Text:
    filled = round(share * _BAR)
    style = "green" if share < 0.8 else "yellow" if share < 0.95 else "red"
    return Text("█" * filled, style=style).append("░" * (_BAR - filled), style="dim").append(f" {share:4.0%}")


def _steps(replica: ReplicaNumbers) -> Table | None:
    if not replica.steps:
        return None
    table = _table(
        f"last steps of {replica.address}", "step", "decodes", "chunk tokens", "entered", "preempted", "copied", "plan"
    )
    for step in list(replica.steps)[-_STEP_ROWS:]:
        names = ("step_id", "num_decodes", "num_chunk_tokens", "num_entered", "num_preempted", "num_copied")
        table.add_row(*(str(step[name]) for name in names), f"{step['plan_us'] / 1000:.2f} ms")
    return table


def _waiting(replica: ReplicaNumbers) -> Table | None:
    if not replica.waiting:
        return None
    table = _table(f"who waits at {replica.address}", "request", "tokens", "for", "because")
    for each in replica.waiting[:_WAITING_ROWS]:
        waited = milliseconds(each["waited_ms"])
        reason = each["reason"].replace("_", " ")
        table.add_row(escape(each["request_id"]), str(each["tokens_to_compute"]), waited, reason)
    return table
