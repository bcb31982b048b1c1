"""`quire doctor`: the resources of this machine, Quire's use of them, and problems."""

import dataclasses
import importlib
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.model_files.architectures import RANKERS
from quire.model_files.embedding_files import EmbeddingFiles, hidden_size_of
from quire.model_files.model_directory import HubName, ModelDirectory, weight_files
from quire.model_files.model_source import hub_name, resolve_model
from quire.model_files.state_sizes import state_sizes
from quire.rpc.process import missing_package
from quire.runtime.finding import Finding, Verdict
from quire.runtime.processors import available_memory, cores, num_nodes, num_processors
from quire.runtime.settings import ConfigurationError, load_settings, setting
from quire.version import VERSION
from quire_cli.bench.machine import cpu_field

PROGRAM = "quire doctor"
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# The default --max-connections of two ports, and the other files that a gateway opens.
_FEW_OPEN_FILES = 8704
_GIB = 1 << 30
_FEW_FREE_BYTES = 10 * _GIB
_COLOURS = {"ok": "32", "note": "33", "wrong": "31"}


@dataclass(frozen=True, slots=True)
class DoctorFlags:
    """Shows the resources of this machine, Quire's use of them, and problems; the exit status is then 1."""

    model: str | None = setting(None, "look at this model, too; by default at the embedded one", metavar="DIR")
    grpc_port: int = setting(50051, "port for gRPC that should be free", minimum=1, maximum=65535)
    http_port: int = setting(8000, "port for HTTP that should be free", minimum=1, maximum=65535)
    format: str = setting("text", "how to print", choices=("text", "json"))


def main(argv: Sequence[str]) -> int:
    """Prints one line for each part; returns 1 if one of them is wrong."""
    flags = load_settings(DoctorFlags, argv, os.environ, program=PROGRAM)
    findings = []
    for finding in examine(flags):
        findings.append(finding)
        if flags.format == "text":
            _print(finding)
    if flags.format == "json":
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    return 1 if any(finding.verdict is Verdict.WRONG for finding in findings) else 0


def examine(flags: DoctorFlags) -> Iterator[Finding]:
    """Examines every part in turn; loading torch takes some seconds."""
    yield from (_versions(), _processors(), _memory(), _huge_pages(), _open_files(), _sockets())
    yield from (_port("gRPC port", "--grpc-port", flags.grpc_port), _port("HTTP port", "--http-port", flags.http_port))
    yield from (_service("gateway", "gateway.app"), _service("scheduler", "scheduler_svc.service.app"))
    yield from _worker()
    yield _model_cache()
    yield _model(flags.model)


def _versions() -> Finding:
    return Finding("quire", Verdict.OK, f"{VERSION}, Python {platform.python_version()}, {platform.platform()}")


def _processors() -> Finding:
    usable, there = num_processors(), os.cpu_count() or 1
    name = cpu_field("model name") or platform.machine()
    limit = "" if usable == there else f" (of {there}; the others are kept from this process)"
    found = f"{usable}{limit}, {name}{_topology()}"
    if usable == 1:
        return Finding("processors", Verdict.NOTE, found, "worker, scheduler and gateway share one; give two or more")
    return Finding("processors", Verdict.OK, found)


def _topology() -> str:
    """The layout of the processors, and whether a worker binds its threads to them."""
    available = os.sched_getaffinity(0)
    known, nodes = cores(available), num_nodes(available)
    if not known:
        return "; the system does not say which are threads of one core"
    place = f"; {len(known)} cores" + (f" in {nodes} NUMA nodes" if nodes > 1 else "")
    if num_processors() < len(known):
        return f"{place}; a worker's threads are not bound to cores, since not all may be used at once"
    return f"{place}; a worker binds a thread to each"


def _memory() -> Finding:
    available = available_memory()
    if available is None:
        return Finding("memory", Verdict.NOTE, "the system does not say", "set --kv-cache-memory and --swap-space")
    found = f"{available / _GIB:.1f} GiB available"
    if available < _GIB:
        return Finding("memory", Verdict.NOTE, found, "a worker needs about 1 GiB and its model; end other programs")
    return Finding("memory", Verdict.OK, found)


def _huge_pages() -> Finding:
    if not _HUGE_PAGES.exists():
        return Finding("huge pages", Verdict.NOTE, "the system has none", "attention is some percent slower without")
    words = _HUGE_PAGES.read_text()
    chosen = words.partition("[")[2].partition("]")[0]
    if chosen == "never":
        return Finding("huge pages", Verdict.NOTE, chosen, f"write madvise to {_HUGE_PAGES} for faster attention")
    return Finding("huge pages", Verdict.OK, chosen)


def _open_files() -> Finding:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in limits:
        return Finding("open files", Verdict.OK, "any number")
    # A gateway raises the first limit to its need.
    allowed, most = limits
    found = f"{allowed:,} (at most {most:,})"
    if most >= _FEW_OPEN_FILES:
        return Finding("open files", Verdict.OK, found)
    advice = f"raise it (ulimit -Hn {_FEW_OPEN_FILES}) or lower --max-connections: each connection takes one"
    return Finding("open files", Verdict.NOTE, found, advice)


def _sockets() -> Finding:
    directory = tempfile.gettempdir()
    try:
        with tempfile.TemporaryDirectory(prefix="quire-") as made, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(Path(made) / "gateway-63.sock"))
    except OSError as error:
        advice = "`quire serve` puts its sockets there; set TMPDIR to a short path that can be written"
        return Finding("sockets", Verdict.WRONG, f"cannot make one in {directory}: {error.strerror or error}", advice)
    return Finding("sockets", Verdict.OK, f"in {directory}")


def _port(part: str, flag: str, port: int) -> Finding:
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            advice = f"another program has it, perhaps a server that runs already; take another with {flag}"
            return Finding(part, Verdict.NOTE, f"{port}: {error.strerror}", advice)
    return Finding(part, Verdict.OK, f"{port} is free")


def _service(name: str, module: str) -> Finding:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return Finding(name, Verdict.NOTE, str(missing_package(error)), f"needed where a {name} runs")
    return Finding(name, Verdict.OK, "can run here")


def _worker() -> Iterator[Finding]:
    service = _service("worker", "worker_svc.startup")
    yield service
    if service.verdict is not Verdict.OK:
        return
    # Imported here: it loads torch.
    from worker_svc.examination import examine_device

    yield from examine_device()


def _model_cache() -> Finding:
    """The cache of the hub's models, which may not exist yet."""
    try:
        from huggingface_hub import constants
    except ModuleNotFoundError as error:
        return Finding("model cache", Verdict.NOTE, str(missing_package(error)), "needed for models of a hub")
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    found = f"{cache}, {free / _GIB:.1f} GiB free"
    if not os.access(existing, os.W_OK):
        return Finding("model cache", Verdict.NOTE, f"{cache} cannot be written", "HF_HOME names another place")
    if free < _FEW_FREE_BYTES:
        return Finding("model cache", Verdict.NOTE, found, "models have gigabytes; HF_HOME names another disk")
    return Finding("model cache", Verdict.OK, found)


def _model(name: str | None) -> Finding:
    if (of_hub := hub_name(name)) is not None:
        cached = _cached(of_hub)
        if cached is None:
            found = f"{of_hub}, a model of the hub that is not in the cache"
            return Finding("model", Verdict.NOTE, found, f"`quire pull {of_hub}` downloads it")
        name = str(cached)
    try:
        directory = ModelDirectory.open(resolve_model(name))
        size = sum(file.stat().st_size for file in weight_files(directory.path))
        vectors = EmbeddingFiles.of(directory)
        numbers = None if vectors is None else vectors.size(hidden_size_of(directory))
    except ConfigurationError as error:
        return Finding("model", Verdict.WRONG, str(error), "give another --model")
    found = f"{directory.path}, {directory.architecture}, {size / _GIB:.2f} GiB of weights"
    if numbers is not None:
        found += f"; it gives vectors of {numbers} numbers"
    elif directory.architecture in RANKERS:
        found += "; it ranks documents"
    if (states := state_sizes(directory.architecture, directory.config)) is not None:
        of_each = states.num_bytes / (1 << 20)
        found += (
            f"; {states.num_layers} layers ({states.kind}) keep a state of {of_each:.2f} MiB in float32 for each "
            "sequence, in blocks of the KV pool, which also keeps copies of it (checkpoints) for later prompts"
        )
    available = available_memory()
    if available is not None and size > available and importlib.util.find_spec("torch") is not None:
        advice = "more than the available memory: fine on a GPU that holds it; on the CPU take a smaller model"
        return Finding("model", Verdict.NOTE, found, advice)
    return Finding("model", Verdict.OK, found)


def _cached(name: HubName) -> Path | None:
    """The model in the cache; None if it is not there, or if the hub's package is not installed."""
    try:
        from quire.model_files.hub import cached
    except ModuleNotFoundError:
        return None
    return cached(name)


def _print(finding: Finding) -> None:
    paint = _painter()
    print(f"{paint(f'{finding.verdict:<5}')}  {finding.part:<12}  {finding.found}", flush=True)
    if finding.advice:
        print(f"{'':<21}{finding.advice}", flush=True)


def _painter() -> Callable[[str], str]:
    """Colours only on a terminal that has them, and only if NO_COLOR is not set (no-color.org)."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return lambda text: text
    return lambda text: f"\033[{_COLOURS[text.strip()]}m{text}\033[0m"
