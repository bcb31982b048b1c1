"""Streams of every kind while processes are killed and stopped, links are cut, and requests move, for as long as the
user wants.

`quire serve` serves a model; with several replicas two gateways stand before them. Each caller sends the same request
again and again: `bench/kills_traffic.py` has the kinds, over gRPC and by OpenAI's client. Every few seconds a fault
happens, or two. Each answer must equal the answer of the same request before the first fault, log probabilities
included, bit for bit. Each token must come once and in order, and at the end no block may be in use, no process or file
be left over. Exits with 1 if that does not hold. Only a call that is not durable may fail with a gateway or a link.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
from safetensors.torch import save_file

from bench.kills_processes import Cluster, Held, held_by, scheduler_address, shared_memory, until_none_left
from bench.kills_traffic import DURABLE_KINDS, KINDS, AnswerError, Caller, Output
from bench.report import Series, write_results
from quire.client import AsyncClient, GenerationOptions, RetryPolicy
from quire.model_files.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from quire.model_files.model_directory import ModelDirectory, is_gguf
from quire.model_files.model_source import resolve_model
from quire.rpc.channel import open_channel
from quire.rpc.errors import QuireError
from quire.runtime import failpoint
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.testing.server import write_order
from quire_torture.client import FailedError

_READY_TIMEOUT_S, _FAULT_TIMEOUT_S, _CALL_TIMEOUT_S = 90.0, 240.0, 600.0
_OVERLAP = 0.25
"""The chance that the next fault does not wait until requests succeed again."""
_LONG_STOP = 0.1
"""The chance that a stop outlasts heartbeats and health checks."""
_STANDSTILL, _STANDSTILL_S = "the machine stood still", 5.0
_FAILPOINT_S = 5.0
"""How long a failpoint is armed."""
_PAUSE_S = 0.1
"""A shorter time between two events of a stream is no pause."""


_NOTHING = "nothing"
"""The kind of a fault whose process did not run, or did not reach the failpoint."""


@dataclass(slots=True)
class Happened:
    """One fault."""

    kind: str
    at: float
    pauses: dict[int, float] = field(default_factory=dict[int, float])
    """The longest pause of each caller's streams until the next fault."""
    excuses: bool = False
    """Whether a call that is not durable may fail with it."""
    ended: float = float("inf")
    """When requests succeeded again."""


@dataclass(slots=True)
class Findings:
    streams: Counter[str] = field(default_factory=Counter[str])
    told: Counter[str] = field(default_factory=Counter[str])
    """Errors that a fault excuses."""
    failures: Counter[str] = field(default_factory=Counter[str])
    verdicts: Counter[str] = field(default_factory=Counter[str])
    faults: list[Happened] = field(default_factory=list[Happened])
    recovery_s: list[float] = field(default_factory=list[float])
    served_s: float = 0.0
    last: dict[int, float] = field(default_factory=dict[int, float])

    def note_token(self, caller: Caller) -> None:
        """Records that a part of this caller's stream came."""
        now = time.monotonic()
        gap = now - max(self.last.get(caller.number, 0.0), caller.began)
        self.last[caller.number] = now
        if self.faults and gap >= _PAUSE_S:
            pauses = self.faults[-1].pauses
            pauses[caller.number] = max(gap, pauses.get(caller.number, 0.0))

    def fail(self, verdict: str, what: str) -> None:
        self.verdicts[verdict] += 1
        self.failures[what] += 1
        print(f"FAILURE ({verdict}) {what}", flush=True)


Fault = Callable[[Cluster, random.Random], Awaitable[None]]
_EXCUSES = ("gateway", "front", "serve", "helper", "clients", "everything", "roll")
"""A call that is not durable may fail with a fault whose name has one of these words."""


def _signals(number: signal.Signals, *kinds: str, within_s: float = 0.0) -> Fault:
    """Signals one process of each of these kinds, or all processes of a kind that ends with *."""

    async def happen(cluster: Cluster, rng: random.Random) -> None:
        for kind in rng.sample(kinds, len(kinds)):
            pids = _pids_of(cluster, kind)
            for pid in pids if kind.endswith("*") else rng.sample(pids, min(1, len(pids))):
                _send(pid, number)
            await asyncio.sleep(rng.uniform(0, within_s))

    return happen


def _stop(*kinds: str) -> Fault:
    async def happen(cluster: Cluster, rng: random.Random) -> None:
        pids = [rng.choice(found) for kind in kinds if (found := _pids_of(cluster, kind))]
        if not pids:
            raise LookupError(f"no {kinds} run")
        for pid in pids:
            _send(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.uniform(10, 18) if rng.random() < _LONG_STOP else rng.uniform(0.2, 4))
        finally:
            for pid in pids:
                _send(pid, signal.SIGCONT)

    return happen


async def _succeed(cluster: Cluster, rng: random.Random) -> None:
    """Stops a scheduler, whose successor starts; the stopped one then goes on next to it until it is killed."""
    replica = rng.choice(cluster.replicas)
    old = replica.replace()
    with contextlib.suppress(ProcessLookupError):
        old.send_signal(signal.SIGSTOP)
    try:
        if rng.random() < 0.5:
            for link in cluster.links["scheduler"]:
                link.reset()
        await _wait_served(cluster)
        await asyncio.sleep(rng.uniform(0, 1))
        with contextlib.suppress(ProcessLookupError):  # another fault may have ended or continued it
            old.send_signal(signal.SIGCONT)
        await asyncio.sleep(rng.uniform(0.1, 8))
    finally:
        with contextlib.suppress(ProcessLookupError):
            old.kill()
        await old.wait()


def _kill_at(name: str, provoke: Fault | None = None) -> Fault:
    """Kills the process that passes this failpoint; `provoke` leads to it."""

    async def happen(cluster: Cluster, rng: random.Random) -> None:
        write_order(cluster.failpoints, name, f"kill {rng.randint(1, 30 if provoke is None else 2)}")
        if provoke is not None:
            await provoke(cluster, rng)
        place, ends_at = cluster.failpoints / name, time.monotonic() + _FAILPOINT_S
        while place.exists():
            if time.monotonic() > ends_at:
                place.unlink(missing_ok=True)
                raise LookupError(f"{name} was not passed")
            await asyncio.sleep(0.05)

    return happen


async def _wait_at_failpoints(cluster: Cluster, rng: random.Random) -> None:
    """Delays each pass of some failpoints."""
    chosen = rng.sample(failpoint.NAMES, 3)
    for name in chosen:
        write_order(cluster.failpoints, name, f"delay {rng.uniform(0.001, 0.2):.3f}")
    await asyncio.sleep(rng.uniform(1, 5))
    for name in chosen:
        (cluster.failpoints / name).unlink()


def _pids_of(cluster: Cluster, kind: str) -> list[int]:
    kind = kind.removesuffix("*")
    return [pid for name, pid in sorted(cluster.pids().items()) if name.partition("-")[0] == kind]


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _cut(to: str) -> Fault:
    async def happen(cluster: Cluster, rng: random.Random) -> None:
        links = cluster.links[to]
        for link in rng.sample(links, rng.randint(1, len(links))):
            link.reset()

    return happen


def _hold(to: str) -> Fault:
    """A half-open link: bytes vanish in it, and at its end the connections may be reset."""

    async def happen(cluster: Cluster, rng: random.Random) -> None:
        link = rng.choice(cluster.links[to])
        link.hold()
        await asyncio.sleep(rng.uniform(0.5, 12))
        if rng.random() < 0.5:
            link.reset()
        link.let_pass()

    return happen


def _delay(to: str) -> Fault:
    async def happen(cluster: Cluster, rng: random.Random) -> None:
        link = rng.choice(cluster.links[to])
        link.delay_s = rng.uniform(0.02, 0.5)
        await asyncio.sleep(rng.uniform(1, 5))
        link.let_pass()

    return happen


def _drain(*, then: Fault | None = None, all_at_once: bool = False) -> Fault:
    """Replicas are drained, and take requests again when their schedulers have restarted; `then` happens soon after
    the drain begins."""

    async def happen(cluster: Cluster, rng: random.Random) -> None:
        number = len(cluster.replicas) if all_at_once else 1
        replicas = rng.sample(list(cluster.replicas), number)
        calls = [asyncio.create_task(_call_drain(scheduler_address(each), rng.uniform(0.5, 15))) for each in replicas]
        await asyncio.sleep(rng.uniform(0, 0.5))
        if then is not None:
            await then(cluster, rng)
        await asyncio.gather(*calls)
        for each in replicas:
            name = each.name.replace("serve", "scheduler")
            if pid := cluster.pids().get(name):
                _send(pid, rng.choice([signal.SIGTERM, signal.SIGKILL]))

    return happen


async def _call_drain(address: str, timeout_s: float) -> None:
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("quire")),
        *("drain", address, f"--timeout={timeout_s:.1f}"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    await process.wait()


async def _roll(cluster: Cluster, rng: random.Random) -> None:
    """Ends each replica's services and a gateway, one after the other, as an upgrade does; goes on to the next replica
    once this one serves."""
    for number, _ in enumerate(cluster.replicas):
        for name in ("front", "gateway", "scheduler", "worker"):
            if pid := cluster.pids().get(f"{name}-{number}"):
                _send(pid, signal.SIGTERM)
                await asyncio.sleep(rng.uniform(0.1, 2))
        await _wait_served(cluster)


async def _sleep(cluster: Cluster, rng: random.Random) -> None:
    async with httpx.AsyncClient(base_url=f"http://{rng.choice(cluster.http).address}", timeout=60) as http:
        try:
            await http.post(f"/sleep?level={rng.choice([1, 2])}")
            await asyncio.sleep(rng.uniform(0.1, 3))
        except httpx.HTTPError:
            pass
        finally:
            while True:
                try:
                    (await http.post("/wake_up")).raise_for_status()
                    break
                except httpx.HTTPError:
                    await asyncio.sleep(0.2)


def _load_adapter(directory: Path) -> Fault:
    """Loads an adapter, uses it and unloads it."""
    numbers = itertools.count()

    async def happen(cluster: Cluster, rng: random.Random) -> None:
        name = f"extra-{next(numbers)}"
        async with AsyncClient(cluster.grpc[0].address) as client:
            with contextlib.suppress(QuireError):
                await client.load_adapter(name, directory, timeout_s=30)
                options = GenerationOptions(max_tokens=20, ignore_eos=True)
                await client.generate("Once", options, model=name, timeout_s=30)
            with contextlib.suppress(QuireError):
                await client.unload_adapter(name, timeout_s=30)

    return happen


def _fill(disk: Path) -> Fault:
    """Fills the blocks' file system, which should be small and separate, for a while."""

    async def happen(cluster: Cluster, rng: random.Random) -> None:
        filler = disk / "filler"
        try:
            _write_all(filler)
            await asyncio.sleep(rng.uniform(0.5, 4))
        finally:
            filler.unlink(missing_ok=True)

    return happen


def _write_all(filler: Path) -> None:
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass


def _files_of_blocks(disk: Path) -> list[Path]:
    return [*disk.glob("*/blocks*.kv")]


def _damage(disk: Path) -> Fault:
    """Flips bits in files of blocks."""

    async def happen(cluster: Cluster, rng: random.Random) -> None:
        for path in _files_of_blocks(disk):
            with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
                size = path.stat().st_size
                for _ in range(rng.randint(1, 200) if size else 0):
                    file.seek(rng.randrange(size))
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))

    return happen


def _faults(arguments: argparse.Namespace, adapter: Path | None) -> dict[str, Fault]:
    """Faults that can happen with these flags, by name."""
    kill, term = signal.SIGKILL, signal.SIGTERM
    several, apart = arguments.replicas > 1, arguments.apart
    front = "front" if several or apart else "gateway"
    services, serve = ["worker", "scheduler", front], [] if apart else ["serve"]
    faults: dict[str, Fault] = {f"kill {kind}": _signals(kill, kind) for kind in [*services, *serve, "helper"]}
    faults |= {f"end {kind}": _signals(term, kind) for kind in [*services, *serve]}
    faults |= {f"stop {kind}": _stop(kind) for kind in [*services, "helper"]}
    faults |= {
        "kill scheduler and worker": _signals(kill, "scheduler", "worker", within_s=0.5),
        "kill gateway and scheduler": _signals(kill, front, "scheduler", within_s=0.05),
        "kill gateway and worker": _signals(kill, front, "worker", within_s=0.5),
        "stop scheduler and worker": _stop("scheduler", "worker"),
        "stop gateway and scheduler": _stop(front, "scheduler"),
        "kill all gateways": _signals(kill, f"{front}*"),
        "kill all workers": _signals(kill, "worker*"),
        "kill everything": _signals(kill, *(f"{each}*" for each in services)),
        # A `quire serve` ends its services in their order; services without it end in any order.
        "end everything": _signals(term, f"{front}*", *(("scheduler*", "worker*") if apart else ("serve*",))),
        "sleep": _sleep,
        "roll": _roll,
        "wait at failpoints": _wait_at_failpoints,
    }
    led_to = {"clients"} | ({"scheduler"} if several or apart else set()) | ({"worker", "transfer"} if apart else set())
    for to in sorted(led_to - (set() if several else {"transfer"})):
        faults |= {f"cut to {to}": _cut(to), f"hold to {to}": _hold(to), f"delay to {to}": _delay(to)}
    if apart:
        faults["succeed a stopped scheduler"] = _succeed
    faults |= {
        "drain": _drain(),
        "drain, kill worker": _drain(then=_signals(kill, "worker")),
        "drain, kill scheduler": _drain(then=_signals(kill, "scheduler")),
        "drain, kill gateway": _drain(then=_signals(kill, front)),
        "drain, cut to clients": _drain(then=_cut("clients")),
    }
    if several:
        faults |= {f"drain, cut to {to}": _drain(then=_cut(to)) for to in sorted(led_to - {"clients"})}
        faults |= {"drain all": _drain(all_at_once=True), "drain, hold to scheduler": _drain(then=_hold("scheduler"))}
    leading = {
        "worker.load.begun": "kill worker",
        "worker.attach.before_inventory": "kill scheduler",
        "scheduler.attach.before_inventory": "kill worker",
        "scheduler.reader.changed": f"kill {front}",
        "scheduler.drain.begun": "drain",
        "gateway.connected.before_resubmit": "kill scheduler",
        "gateway.drain.begun": f"end {front}",
    }
    if several:
        leading |= {"worker.fetch.before_write": "drain", "worker.move.written": "drain"}
    for name in failpoint.NAMES:
        first = leading.get(name)
        faults[f"{first}, kill at {name}" if first else f"kill at {name}"] = _kill_at(
            name, faults[first] if first else None
        )
    if adapter is not None:
        faults["load adapter"] = _load_adapter(adapter)
    if arguments.kv_disk is not None:
        faults |= {"fill disk": _fill(arguments.kv_disk), "damage disk": _damage(arguments.kv_disk)}
    return faults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--model", help="model directory or file; default: the embedded model")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--roles", nargs="+", help="roles of the replicas; both if absent")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="start services without quire serve, with links between")
    parser.add_argument("--adapters", action="store_true", help="serve two adapters, and load and unload a third")
    parser.add_argument(
        "--kv-disk", type=Path, help="directory, preferably on a small separate file system, which is filled"
    )
    parser.add_argument("--blocks", type=int, default=512, help="blocks of each pool")
    parser.add_argument("--streams", type=int, default=24, help="callers at once")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], help="kinds of callers; all that apply if absent")
    parser.add_argument("--interval", type=float, default=2.0, help="maximum seconds of service between two faults")
    parser.add_argument("--at-once", type=int, default=1, help="number of independent faults at once")
    parser.add_argument("--faults", nargs="+", help="names of faults; all that apply if absent")
    parser.add_argument("--bound", type=float, default=120.0, help="seconds of service after which a stream hangs")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--speculate", default="auto", help="as in quire serve")
    parser.add_argument(
        "--serve", nargs="+", default=[], help="further flags of quire serve, or of workers, without the dashes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="write the output of the processes")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def main(arguments: argparse.Namespace) -> None:
    shared = shared_memory()
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        findings, held = asyncio.run(_run(arguments, Path(directory)))
        for left in until_none_left(Path(directory)):
            findings.fail("leak", left)
        if left := shared_memory() - shared:
            findings.told[f"shared memory of this or another program: {sorted(left)}"] += 1
        log = (Path(directory) / "log").read_text(errors="replace")
        if arguments.log is not None:
            arguments.log.write_text(log)
        if tracebacks := log.count("Traceback (most recent call last)"):
            findings.fail("traceback", f"{tracebacks} tracebacks in the log")
    findings.faults = [each for each in findings.faults if each.kind != _NOTHING]
    kinds = Counter(each.kind for each in findings.faults)
    pauses: dict[str, list[float]] = defaultdict(list[float])
    for each in findings.faults:
        pauses[each.kind] += each.pauses.values()
    print(f"{'faults':>6} {'pauses p50':>10} {'p99':>7}")
    figures = {kind: _percentiles(pauses[kind]) for kind in sorted(kinds)}
    for kind, (p50, p99) in figures.items():
        print(f"{kinds[kind]:>6} {p50:>8.1f} s {p99:>5.1f} s {kind}")
    if findings.recovery_s:
        print(
            f"served again after {statistics.median(findings.recovery_s):.1f} s, {max(findings.recovery_s):.1f} at most"
        )
    print(f"{sum(findings.streams.values())} answers as before the first fault:", dict(findings.streams))
    print(f"verdicts: {dict(findings.verdicts)}; {len(findings.faults)} faults")
    for text, counted in (("told", findings.told), ("FAILED", findings.failures)):
        for what, count in counted.most_common():
            print(f"{count:>5} x {text}: {what}")
    for line in held:
        print(line)
    if arguments.out is not None:
        series = [Series("served again after a fault", "s", tuple(findings.recovery_s))]
        facts = {
            "faults": kinds,
            "pauses_s": {kind: {"p50": p50, "p99": p99} for kind, (p50, p99) in figures.items()},
            "answers": findings.streams,
            "verdicts": {each: findings.verdicts[each] for each in ("lost", "changed", "doubled", "hung", "error")},
            "errors_of_faults": findings.told,
            "failures": findings.failures,
            "held": held,
        }
        write_results(arguments.out, "streams through kills, stops, cuts and moves", series, **facts)
    if findings.failures:
        sys.exit(1)


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values) or [0.0]
    return statistics.median(ordered), ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]


async def _run(arguments: argparse.Namespace, directory: Path) -> tuple[Findings, list[str]]:
    findings, rng = Findings(), random.Random(arguments.seed)
    serve, gateway, adapter = _flags(arguments, directory)
    faults = _faults(arguments, adapter)
    if unknown := set(arguments.faults or ()) - set(faults):
        raise SystemExit(f"unknown faults {sorted(unknown)}; there are {sorted(faults)}")
    chosen = arguments.faults or list(faults)
    roles = arguments.roles or ["both"] * arguments.replicas
    held: list[str] = []
    apart = arguments.ranks if arguments.apart else 0
    async with Cluster.started(directory, serve, gateway, roles, apart=apart) as cluster:
        await _wait_served(cluster)
        async with contextlib.AsyncExitStack() as stack:
            callers = [
                await _caller(stack, cluster, number, arguments, findings) for number in range(arguments.streams)
            ]
            expected = await asyncio.gather(*(_undisturbed(each) for each in callers))
            before = _held(cluster)
            ends_at = time.monotonic() + arguments.seconds
            watching = asyncio.create_task(_watch(findings))
            stack.callback(watching.cancel)
            async with asyncio.TaskGroup() as group:
                for caller, output in zip(callers, expected, strict=True):
                    group.create_task(_call_until(ends_at, caller, output, findings, arguments.bound))
                for _ in range(arguments.at_once):
                    these = {name: faults[name] for name in chosen}
                    own = random.Random(rng.random())
                    group.create_task(_let_faults_happen(ends_at, cluster, these, own, findings, arguments))
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await _wait_served(cluster)
        except TimeoutError:
            findings.fail("hung", f"not served {_READY_TIMEOUT_S:.0f} s after the last fault")
            return findings, held
        for replica in cluster.replicas:
            if blocks := await _blocks_in_use(scheduler_address(replica)):
                findings.fail("leak", f"{blocks} blocks of a replica are in use at the end")
        after = _held(cluster)
        for name in sorted(after):
            held.append(f"{name}: {before.get(name)} before, {after[name]} after")
            if name in before and after[name].too_much(before[name]):
                findings.fail("leak", held[-1])
    return findings, held


def _flags(arguments: argparse.Namespace, directory: Path) -> tuple[list[str], list[str], Path | None]:
    """Flags of each `quire serve`, flags of gateways, and the directory of the adapter that is loaded and unloaded."""
    of_all = [f"--model={arguments.model}"] if arguments.model else []
    serve = [
        *of_all,
        f"--dtype={arguments.dtype}",
        f"--num-gpu-blocks={arguments.blocks}",
        f"--speculate={arguments.speculate}",
        f"--tensor-parallel-size={arguments.ranks}",
        *(f"--{each}" for each in arguments.serve),
    ]
    if arguments.kv_disk is not None:
        serve += [f"--kv-disk={arguments.kv_disk}/REPLICA", "--kv-disk-space=1GiB"]
    gateway = [
        f"--response-store=sqlite:{directory}/responses.db",
        f"--batch-dir={directory}/batches",
        f"--connect-timeout={_CALL_TIMEOUT_S:g}",
    ]
    if arguments.replicas == 1 and not arguments.apart:
        gateway.append("--gateways=2")
    else:
        gateway += [*of_all, "--long-prompt=128", "--failover-delay=2"]
    if not arguments.adapters:
        return serve, gateway, None
    directories = [_write_adapter(directory / name, arguments.model, seed) for seed, name in enumerate("abc")]
    gateway.append(f"--adapters=a={directories[0]},b={directories[1]}")
    return serve, gateway, directories[2]


def _write_adapter(directory: Path, model: str | None, seed: int) -> Path:
    """Writes an adapter of the query projections, with random numbers that change the model's output."""
    source = resolve_model(model)
    assert not is_gguf(source), "adapters are written for directories of models"
    config: dict[str, Any] = ModelDirectory.open(source).config
    hidden, rank = config["hidden_size"], 8
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": torch.randn(
            shape, generator=generator
        )
        * 0.2
        for layer in range(config["num_hidden_layers"])
        for side, shape in (("A", (rank, hidden)), ("B", (hidden, rank)))
    }
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(
        '{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}'
    )
    return directory


async def _caller(
    stack: contextlib.AsyncExitStack, cluster: Cluster, number: int, arguments: argparse.Namespace, findings: Findings
) -> Caller:
    kinds = arguments.kinds or [each for each in KINDS if arguments.adapters or not each.startswith("adapter")]
    addresses = [link.address for link in cluster.grpc]
    # On a busy machine all processes may start later than the 30 s for which clients and gateways wait by default.
    client = await stack.enter_async_context(
        AsyncClient(
            addresses[number % len(addresses) :] + addresses[: number % len(addresses)],
            retry=RetryPolicy(resume_for_s=_CALL_TIMEOUT_S),
        )
    )
    base_url = f"http://{cluster.http[number % len(cluster.http)].address}"
    plain = await stack.enter_async_context(httpx.AsyncClient(timeout=_CALL_TIMEOUT_S))
    http = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0, timeout=_CALL_TIMEOUT_S)
    await stack.enter_async_context(http)
    name = (await client.list_models())[0].name
    kind = kinds[(number + arguments.seed) % len(kinds)]
    return Caller(number, kind, client, http, plain, base_url, name, findings.note_token)


async def _undisturbed(caller: Caller) -> Output:
    """The caller's output without a fault. RuntimeError if two calls differ."""
    first, second = await caller.call(), await caller.call()
    if first != second:
        raise RuntimeError(f"{caller.kind} says something else the second time without a fault: {first} {second}")
    return first


async def _watch(findings: Findings) -> None:
    """Counts the seconds of service, and records standstills of this machine, which virtual ones have now and then: all
    timeouts are over then."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(1)
        findings.served_s += all(each.ended < began for each in findings.faults)
        if (still_s := time.monotonic() - began - 1) > _STANDSTILL_S:
            findings.faults.append(Happened(_STANDSTILL, began, excuses=True, ended=time.monotonic()))
            print(f"{_STANDSTILL} for {still_s:.0f} s", flush=True)


async def _let_faults_happen(
    ends_at: float,
    cluster: Cluster,
    faults: dict[str, Fault],
    rng: random.Random,
    findings: Findings,
    arguments: argparse.Namespace,
) -> None:
    begun: list[Happened] = []
    while time.monotonic() < ends_at:
        await asyncio.sleep(rng.uniform(0.1, arguments.interval))
        name = rng.choice(list(faults))
        happened = Happened(name, time.monotonic(), excuses=any(each in name for each in _EXCUSES))
        findings.faults.append(happened)
        begun.append(happened)
        try:
            async with asyncio.timeout(_FAULT_TIMEOUT_S):
                await faults[name](cluster, rng)
        except LookupError:  # a process that it needs is between its end and its next start
            happened.kind = _NOTHING
        except TimeoutError:
            findings.fail("hung", f"not over after {_FAULT_TIMEOUT_S:.0f} s: {name}")
        acted = time.monotonic()
        if rng.random() < _OVERLAP:
            continue
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await _wait_served(cluster)
        except TimeoutError:
            if any(each.kind == _STANDSTILL and each.ended >= acted for each in findings.faults):
                continue
            findings.fail("hung", f"not served {_READY_TIMEOUT_S:.0f} s after: {name}")
            return
        served = time.monotonic()
        findings.recovery_s.append(served - acted)
        for each in begun:
            each.ended = min(each.ended, served)


async def _wait_served(cluster: Cluster) -> None:
    """Waits until a request succeeds through each gateway."""
    for link in cluster.grpc:
        while True:
            try:
                async with AsyncClient(link.address) as client:
                    await client.generate("a", GenerationOptions(max_tokens=1), timeout_s=20)
                break
            except QuireError:
                await asyncio.sleep(0.05)


async def _call_until(ends_at: float, caller: Caller, expected: Output, findings: Findings, bound_s: float) -> None:
    while time.monotonic() < ends_at:
        began = time.monotonic()
        try:
            output = await _within(caller.call(), findings, bound_s)
        except (AnswerError, FailedError, QuireError, openai.OpenAIError, TimeoutError) as error:
            # By then a standstill of the machine is known.
            await asyncio.sleep(2)
            _judge(error, caller, began, findings)
            continue
        if output == expected:
            findings.streams[caller.kind] += 1
        else:
            findings.fail("changed", f"{caller.kind}: {_difference(expected, output)} {_story(findings, began)}")


async def _within(call: Coroutine[Any, Any, Output], findings: Findings, bound_s: float) -> Output:
    """Raises TimeoutError once requests could have succeeded for `--bound` seconds."""
    task, began_s = asyncio.create_task(call), findings.served_s
    try:
        while not (await asyncio.wait([task], timeout=1.0))[0]:
            if findings.served_s - began_s > bound_s:
                raise TimeoutError
        return task.result()
    finally:
        task.cancel()


def _judge(error: Exception, caller: Caller, began: float, findings: Findings) -> None:
    what = f"{caller.kind}: {type(error).__name__} {' '.join(str(error).split())[:200]}"
    with_fault = any((each.excuses or caller.kind == "pinned") and each.ended >= began - 5 for each in findings.faults)
    if any(each.kind == _STANDSTILL and each.ended >= began for each in findings.faults):
        findings.told[f"{_STANDSTILL}: {type(error).__name__}"] += 1
    elif isinstance(error, TimeoutError):
        findings.fail("hung", f"{what} {_story(findings, began)}")
    elif isinstance(error, AnswerError):
        is_told = caller.kind not in DURABLE_KINDS and with_fault and str(error).startswith("lost")
        if is_told:
            findings.told[what] += 1
        else:
            findings.fail(str(error).partition(":")[0], f"{what} {_story(findings, began)}")
    elif with_fault and caller.kind in _FRAGILE:
        findings.told[what] += 1
    else:
        findings.fail("error", f"{what} {_story(findings, began)}")


_FRAGILE = (frozenset(KINDS) - DURABLE_KINDS) | {"background", "batch", "pinned"}
"""Kinds with a call that may fail with its gateway: it is not durable, or creates something with an unknown id."""


def _story(findings: Findings, began: float) -> str:
    """The faults while a call ran."""
    now = time.monotonic()
    return (
        f"[{now - began:.1f} s; "
        + ", ".join(f"{each.kind} at {each.at - began:.1f}" for each in findings.faults if each.ended >= began - 5)
        + "]"
    )


def _difference(expected: Output, output: Output) -> str:
    ours, theirs = repr(expected), repr(output)
    at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"...{ours[max(0, at - 60) : at + 60]!r} became {theirs[max(0, at - 60) : at + 60]!r}"


def _held(cluster: Cluster) -> dict[str, Held]:
    return {name: held for name, pid in cluster.pids().items() if (held := held_by(pid)) and "helper" not in name}


async def _blocks_in_use(address: str) -> int:
    """Blocks that are in use once abandoned requests have had time to end."""
    async with open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        in_use = 0
        for _ in range(150):
            state = await stub.GetState(scheduler_pb2.GetStateRequest(), wait_for_ready=True, timeout=30)
            in_use = state.gpu_pool.used_blocks
            if not in_use:
                break
            await asyncio.sleep(0.5)
        return in_use
