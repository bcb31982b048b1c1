"""`quire torture`: ordinary requests while a server's processes die and its links break, each answer compared with that
of an undisturbed run."""

import asyncio
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from quire.runtime.settings import ConfigurationError, load_settings, setting
from quire_torture.faults import Fault, command_fault, parse_fault
from quire_torture.oracle import BATCHING, WRONG, Verdict
from quire_torture.report import as_json, fault_table, findings, first_outputs, script, table, write, wrong_beyond
from quire_torture.run import CannotTortureError, Plan, Report, Step, Torture
from quire_torture.traffic import Limits

PROGRAM = "quire torture"
_FULL = "HTTP 429"
"""The error of a server that has no room, which it may say of too many requests at once."""


def _one(text: str) -> tuple[str]:
    return (text,)


@dataclass(frozen=True, slots=True)
class TortureFlags:
    """Tortures a server with OpenAI's API: ordinary requests, while its processes are killed and stopped and its links
    are cut. Each answer is compared with the answer of the same request without company. First comes an equal run
    without faults: what it changes is not the faults' doing. Exits with 1 if an answer is lost, changed or hangs. It
    harms the server that it is pointed at: it may lose the requests of other users. So it refuses every address but
    this machine's, unless you say that the server is yours."""

    url: str | None = setting(None, "the server, as http://127.0.0.1:8000", positional=True)
    model: str | None = setting(None, "the model; not needed if there is only one")
    fault: tuple[str, ...] = setting(
        (),
        'a fault, which may be repeated: "kill -9 {pid:NAME}", "kill NAME", "term NAME", "stop NAME", cut, half-open, '
        'delay, slow, leave, "fill DIR", "memory 1GiB" (docs/torture.md)',
        parse=_one,
        common=True,
    )
    fault_cmd: tuple[str, ...] = setting(
        (), "a fault that is a command of the shell; it has happened if the command ends with status 0", parse=_one
    )
    times: int = setting(5, "how often each fault happens", minimum=1, maximum=1000, common=True)
    requests: int = setting(200, "requests of each run, at least", minimum=1, maximum=1_000_000, common=True)
    streams: int = setting(16, "requests at once", minimum=1, maximum=1024, common=True)
    questions: int = setting(39, "different requests among them", minimum=1, maximum=10_000)
    seed: int = setting(0, "same seed, same requests and faults", minimum=0)
    max_tokens: int = setting(64, "maximum tokens of an answer", minimum=1, maximum=100_000)
    long_words: int = setting(150, "words of a long prompt", minimum=1, maximum=1_000_000)
    rate: float = setting(1000.0, "maximum requests a second", minimum=0.001, maximum=1e6)
    seconds: float = setting(1800.0, "maximum seconds of each run", minimum=1, maximum=86_400)
    hung_after: float = setting(
        60.0, "seconds without output, while the server answers others, after which a request hangs", minimum=1
    )
    retries: int = setting(2, "retries of a request before its answer begins, as OpenAI's client has", minimum=0)
    api_key: tuple[str, ...] = setting((), "keys, by default $QUIRE_API_KEY; each request has one of them")
    process_tree: int | None = setting(
        None, "pid of the process that is the server, with all below it; found by the port if absent", minimum=2
    )
    shrink: float = setting(120.0, "seconds to find a short story of a failure; 0 is not at all", minimum=0)
    this_server_is_mine: bool = setting(
        False, "torture another machine than this one; without it a mistake in the address could harm others' users"
    )
    script: Path | None = setting(None, "write the short story as a script of curl to this file; else it is printed")
    out: Path | None = setting(None, "write all figures as JSON")


def main(argv: Sequence[str]) -> int:
    """Returns 0 if no answer is wrong beyond the run without faults, else 1."""
    # Variables are for services that run again and again; none may point a torture, or say whose the server is.
    flags = load_settings(TortureFlags, argv, None, program=PROGRAM)
    key = os.environ.get("QUIRE_API_KEY")
    plan = _plan(flags if flags.api_key or not key else replace(flags, api_key=(key,)))
    try:
        return asyncio.run(_torture(plan, flags))
    except CannotTortureError as error:
        raise ConfigurationError(str(error)) from error


def _plan(flags: TortureFlags) -> Plan:
    if flags.url is None:
        raise ConfigurationError("give the address of a server, such as http://127.0.0.1:8000")
    _check_address(flags.url, is_mine=flags.this_server_is_mine)
    faults: list[Fault] = [command_fault(each) for each in flags.fault_cmd]
    for text in flags.fault:
        try:
            faults.append(parse_fault(text))
        except ValueError as error:
            raise ConfigurationError(f"--fault: {error}") from error
    if flags.url.startswith("https:") and (on_link := [each.text for each in faults if each.needs_link]):
        raise ConfigurationError(f"--fault {on_link[0]} needs http: a certificate is not for the proxy's address")
    return Plan(
        url=flags.url,
        model=flags.model,
        seed=flags.seed,
        num_requests=flags.requests,
        num_questions=flags.questions,
        num_streams=flags.streams,
        faults=tuple(faults),
        times=flags.times,
        rate=flags.rate,
        max_s=flags.seconds,
        hung_s=flags.hung_after,
        num_retries=flags.retries,
        limits=Limits(flags.max_tokens, flags.long_words, flags.api_key),
        root=flags.process_tree,
    )


def _check_address(url: str, *, is_mine: bool) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f'"{url}" is not valid: {error}') from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f'"{url}" is not valid: expected http://HOST:PORT or https://HOST:PORT')
    try:
        found = socket.getaddrinfo(parts.hostname, port or 80, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(f'"{url}" has an unknown host: {error}') from error
    others = [str(each[4][0]) for each in found if not ipaddress.ip_address(each[4][0]).is_loopback]
    if others and not is_mine:
        raise ConfigurationError(
            f"{url} is {others[0]}, not this machine; a torture may lose the requests of other users: "
            "--this-server-is-mine says that there are none, or that they know"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def _torture(plan: Plan, flags: TortureFlags) -> int:
    async with Torture.started(plan, _say) as torture:
        for kind, why in torture.unsupported.items():
            print(f"not supported: {kind}: {why}")
        unstable = [each for each in torture.questions if torture.oracle.expected[each.number] is None]
        if unstable:
            print(f"{len(unstable)} of {len(torture.questions)} requests have two answers without company;", end=" ")
            print("only the form of their answers is checked:", ", ".join(sorted({each.kind for each in unstable})))
        reports = {"undisturbed": torture.undisturbed}

        async def run(name: str, story: Iterator[Step], num_streams: int | None = None) -> None:
            reports[name] = Report()
            await torture.run(story, num_streams, reports[name])

        try:
            await run("without faults", torture.story(with_faults=False))
            if plan.faults:
                await run("with faults", torture.story(with_faults=True))
            await run("undisturbed, after", torture.each_question(), 1)
        finally:
            # Ctrl-C ends a run, and what it has found so far is shown.
            _print(reports, plan)
            if flags.out is not None:
                write(flags.out, as_json(torture.plan, reports, torture.unsupported))
        bad = _bad(reports)
        if bad is not None and bad.count(*WRONG) and flags.shrink:
            await _shrink(torture, bad, flags)
        return 0 if bad is None else 1


def _bad(reports: Mapping[str, Report]) -> Report | None:
    """The run that has wrong answers which company does not explain: without faults, what is lost or another's."""
    without = reports["without faults"]
    if "with faults" in reports and wrong_beyond(reports["with faults"], without):
        return reports["with faults"]
    if without.count(*WRONG - BATCHING) or set(without.errors) - {_FULL}:
        return without
    after = reports["undisturbed, after"]
    excused = {each for each in BATCHING if without.count(each)}
    return after if after.count(*set(Verdict) - excused) else None


def _print(reports: Mapping[str, Report], plan: Plan) -> None:
    print(*table(reports), "", *first_outputs(reports), sep="\n")
    if plan.faults:
        print("", *fault_table(reports, plan.num_streams), sep="\n")
    print("", *findings(reports), sep="\n")


async def _shrink(torture: Torture, report: Report, flags: TortureFlags) -> None:
    _say(f"looking for a short story of this, for at most {flags.shrink:.0f} s; --shrink 0 is not at all")
    found = await torture.shrunk(report, flags.shrink)
    if found is None:
        print("a second run of the same story has no wrong answer")
        return
    steps, wrongs = found
    text = script(torture.plan, steps, wrongs)
    print(f"{len(steps)} of {len(report.steps)} steps are enough:")
    if flags.script is None:
        print(text)
    else:
        flags.script.write_text(text)
        print(flags.script)
