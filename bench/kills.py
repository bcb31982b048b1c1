"""Requests of every kind while processes are killed and stopped, links are cut, and requests move, for as long as the
user wants: `quire torture` from within.

`quire serve` serves a model; with several replicas two gateways stand before them. `bench/traffic.py` has the kinds of
requests, over gRPC and by OpenAI's API, and `quire_torture` sends them and judges the answers. Every few seconds a
fault happens, or two. Each answer must equal the answer of the same request before the first fault, log probabilities
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
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from bench.cluster import Cluster, Held, held_by, scheduler_address, shared_memory, until_none_left
from bench.report import Series, write_results
from bench.traffic import DURABLE, KINDS, Gateways, draw, until_served
from quire.client import AsyncClient, GenerationOptions
from quire.model_files.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from quire.model_files.model_directory import ModelDirectory, is_gguf
from quire.model_files.model_source import resolve_model
from quire.rpc.channel import open_channel
from quire.rpc.errors import QuireError
from quire.runtime import failpoint
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.testing.server import write_order
from quire_torture import traffic as torture_traffic
from quire_torture.faults import Fault, NothingHappenedError, Place, parse_fault
from quire_torture.oracle import Verdict
from quire_torture.report import as_json, fault_table, findings, table
from quire_torture.run import Plan, Report, Torture, Wrong
from quire_torture.traffic import draw_calls

_READY_TIMEOUT_S = 90.0
_CALL_TIMEOUT_S = 600.0
_OVERLAP = 0.25
"""The chance that the next fault does not wait until requests succeed again."""
_LONG_STOP = 0.1
"""The chance that a stop outlasts heartbeats and health checks."""
_FAILPOINT_S = 5.0
"""How long a failpoint is armed."""

_ALL_KINDS = (*KINDS, *torture_traffic.KINDS)
Act = Callable[[Cluster, random.Random], Awaitable[object]]
"""A fault of a cluster. LookupError if a process that it needs is between its end and its next start."""
_EXCUSES = ("gateway", "front", "serve", "helper", "clients", "everything", "roll")
"""A call that is not durable may fail with a fault whose name has one of these words."""


def _signals(number: signal.Signals, *kinds: str, within_s: float = 0.0) -> Act:
    """Signals one process of each of these kinds, or all processes of a kind that ends with *."""

    async def happen(cluster: Cluster, rng: random.Random) -> None:
        for kind in rng.sample(kinds, len(kinds)):
            pids = _pids_of(cluster, kind)
            for pid in pids if kind.endswith("*") else rng.sample(pids, min(1, len(pids))):
                _send(pid, number)
            await asyncio.sleep(rng.uniform(0, within_s))

    return happen


def _stop(*kinds: str) -> Act:
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
        await _until_served(cluster)
        await asyncio.sleep(rng.uniform(0, 1))
        with contextlib.suppress(ProcessLookupError):  # another fault may have ended or continued it
            old.send_signal(signal.SIGCONT)
        await asyncio.sleep(rng.uniform(0.1, 8))
    finally:
        with contextlib.suppress(ProcessLookupError):
            old.kill()
        await old.wait()


def _kill_at(name: str, provoke: Act | None = None) -> Act:
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


def _on_link(word: str, to: str) -> Act:
    """A fault of `quire torture` on a link that leads there."""
    fault = parse_fault(word)

    async def happen(cluster: Cluster, rng: random.Random) -> None:
        await fault.happen(Place(0, rng.choice(cluster.links[to]), lambda: False), rng)

    return happen


def _hold(to: str) -> Act:
    """A half-open link: bytes vanish in it, and at its end the connections may be reset."""

    async def happen(cluster: Cluster, rng: random.Random) -> None:
        link = rng.choice(cluster.links[to])
        link.hold()
        await asyncio.sleep(rng.uniform(0.5, 12))
        if rng.random() < 0.5:
            link.reset()
        link.let_pass()

    return happen


def _drain(*, then: Act | None = None, all_at_once: bool = False) -> Act:
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
        await _until_served(cluster)


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


def _load_adapter(directory: Path) -> Act:
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


def _fill(disk: Path) -> Act:
    """Fills the blocks' file system, which should be small and separate, for a while."""
    fault = parse_fault(f"fill {disk}")
    return lambda cluster, rng: fault.happen(Place(0, cluster.http[0], lambda: False), rng)


def _files_of_blocks(disk: Path) -> list[Path]:
    return [*disk.glob("*/blocks*.kv")]


def _damage(disk: Path) -> Act:
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


def _faults(arguments: argparse.Namespace, adapter: Path | None) -> dict[str, Act]:
    """Faults that can happen with these flags, by name."""
    kill, term = signal.SIGKILL, signal.SIGTERM
    several, apart = arguments.replicas > 1, arguments.apart
    front = "front" if several or apart else "gateway"
    services, serve = ["worker", "scheduler", front], [] if apart else ["serve"]
    faults: dict[str, Act] = {f"kill {kind}": _signals(kill, kind) for kind in [*services, *serve, "helper"]}
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
        faults |= {f"{word} to {to}": _on_link(word, to) for word in ("cut", "delay", "slow")}
        faults[f"hold to {to}"] = _hold(to)
    if apart:
        faults["succeed a stopped scheduler"] = _succeed
    faults |= {
        "drain": _drain(),
        "drain, kill worker": _drain(then=_signals(kill, "worker")),
        "drain, kill scheduler": _drain(then=_signals(kill, "scheduler")),
        "drain, kill gateway": _drain(then=_signals(kill, front)),
        "drain, cut to clients": _drain(then=_on_link("cut", "clients")),
    }
    if several:
        faults |= {f"drain, cut to {to}": _drain(then=_on_link("cut", to)) for to in sorted(led_to - {"clients"})}
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
    parser.add_argument("--kinds", nargs="+", choices=[*_ALL_KINDS], help="kinds of requests; all that apply if absent")
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


def main(arguments: argparse.Namespace) -> None:
    shared = shared_memory()
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        torture, report, failures = asyncio.run(_run(arguments, Path(directory)))
        failures += [f"leak: {left}" for left in until_none_left(Path(directory))]
        if left := shared_memory() - shared:
            print(f"shared memory of this or another program: {sorted(left)}")
        log = (Path(directory) / "log").read_text(errors="replace")
        if arguments.log is not None:
            arguments.log.write_text(log)
        if tracebacks := log.count("Traceback (most recent call last)"):
            failures.append(f"{tracebacks} tracebacks in the log")
    failures += [f"not served after {each.text}" for each in report.struck if each.served_s is None]
    failures += [each for each in report.missed if "not served" in each]
    failures += [_told(each, report) for each in report.wrongs if not _is_excused(each, report)]
    reports = {"undisturbed": torture.undisturbed, "with faults": report}
    print(*table(reports), *fault_table(reports, arguments.streams), *findings(reports), sep="\n")
    print(*(f"FAILED: {each}" for each in failures), sep="\n")
    served_s = tuple(each.served_s for each in report.struck if each.served_s is not None)
    series = [Series("served again after a fault", "s", served_s)] if served_s else []
    calls = Counter(step.question.kind for step in report.steps if isinstance(step, torture_traffic.Call))
    facts = {**as_json(torture.plan, reports, {}), "calls": calls, "failures": failures}
    write_results(arguments.out, "streams through kills, stops, cuts and moves", series, **facts)
    if failures:
        sys.exit(1)


def _is_excused(wrong: Wrong, report: Report) -> bool:
    """Whether a call failed that may fail, with a fault that it may fail with."""
    kind = wrong.call.question.kind
    if wrong.finding.verdict is not Verdict.ERROR or kind in DURABLE:
        return False
    return any(
        (kind == "durable pinned" or any(word in each.text for word in _EXCUSES))
        and (each.served_s is None or each.acted + each.served_s >= wrong.began - 5)
        for each in report.struck
    )


def _told(wrong: Wrong, report: Report) -> str:
    """A defect, with the faults around its call."""
    near = (each for each in report.struck if abs(each.at - wrong.began) < _READY_TIMEOUT_S)
    faults = ", ".join(f"{each.text} at {each.at - wrong.began:.1f}" for each in near)
    return f"{wrong.finding.verdict}: {wrong.call.question.kind}: {wrong.finding.detail} [{faults}]"


async def _run(arguments: argparse.Namespace, directory: Path) -> tuple[Torture, Report, list[str]]:
    serve, gateway, adapter = _flags(arguments, directory)
    roles = arguments.roles or ["both"] * arguments.replicas
    kinds = arguments.kinds or [each for each in _ALL_KINDS if arguments.adapters or "adapter" not in each]
    plan = Plan("", arguments.seed, arguments.streams, max_s=arguments.seconds, hung_s=arguments.bound)
    apart = arguments.ranks if arguments.apart else 0
    async with Cluster.started(directory, serve, gateway, roles, apart=apart) as cluster:
        faults = _chosen_faults(arguments, adapter, cluster)
        grpc, http = [[link.address for link in links] for links in (cluster.grpc, cluster.http)]
        async with Gateways.connected(grpc, http) as gateways:
            questions = draw(arguments.seed, max(arguments.streams, len(kinds)), kinds)
            torture = Torture(plan, Place(0, cluster.http[0], lambda: False), gateways, print, questions)
            async with torture.prepared():
                if unstable := [each.kind for each in questions if torture.oracle.expected[each.number] is None]:
                    raise SystemExit(f"two answers without a fault: {unstable}")
                before = _held(cluster)
                report, rng = Report(), random.Random(arguments.seed)
                async with asyncio.TaskGroup() as group:
                    group.create_task(torture.run(draw_calls(plan.seed, questions, plan.limits), report=report))
                    for _ in range(arguments.at_once):
                        own = random.Random(rng.random())
                        group.create_task(_let_faults_happen(torture, report, faults, own, arguments))
        try:
            await _until_served(cluster)
        except LookupError as error:
            return torture, report, [str(error)]
        return torture, report, await _leaks(cluster, before)


async def _leaks(cluster: Cluster, before: dict[str, Held]) -> list[str]:
    leaks = [
        f"leak: {blocks} blocks of a replica are in use at the end"
        for replica in cluster.replicas
        if (blocks := await _blocks_in_use(scheduler_address(replica)))
    ]
    for name, after in sorted(_held(cluster).items()):
        print(line := f"{name}: {before.get(name)} before, {after} after")
        if name in before and after.too_much(before[name]):
            leaks.append(f"leak: {line}")
    return leaks


def _chosen_faults(arguments: argparse.Namespace, adapter: Path | None, cluster: Cluster) -> list[Fault]:
    faults = _faults(arguments, adapter)
    if unknown := set(arguments.faults or ()) - set(faults):
        raise SystemExit(f"unknown faults {sorted(unknown)}; there are {sorted(faults)}")

    def fault(name: str) -> Fault:
        async def happen(place: Place, rng: random.Random) -> str:
            try:
                await faults[name](cluster, rng)
            except LookupError as error:
                raise NothingHappenedError(str(error)) from error
            return "it is done"

        return Fault(name, happen)

    return [fault(name) for name in arguments.faults or faults]


async def _let_faults_happen(
    torture: Torture, report: Report, faults: Sequence[Fault], rng: random.Random, arguments: argparse.Namespace
) -> None:
    ends_at = time.monotonic() + arguments.seconds
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < ends_at:
            await asyncio.sleep(rng.uniform(0.1, arguments.interval))
            striking = group.create_task(torture.strike(rng.choice(faults), report, rng))
            if rng.random() >= _OVERLAP:
                await striking


async def _until_served(cluster: Cluster) -> None:
    """Waits until a request succeeds through each gateway; LookupError if none does."""
    try:
        async with asyncio.timeout(_READY_TIMEOUT_S):
            await until_served(link.address for link in cluster.grpc)
    except TimeoutError:
        raise LookupError(f"not served within {_READY_TIMEOUT_S:.0f} s") from None


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
