"""Settings of a scheduler process."""

import re
from dataclasses import dataclass

from quire.rpc.address import check_address
from quire.runtime.settings import parse_bytes, setting
from quire.service.service_flags import DrainFlags, ProcessFlags, ReplicaFlags, ServiceFlags, StepFlags, TenantFlags

_LAST_PORT = 65535


def _parse_zmq_address(text: str) -> str:
    match = re.fullmatch(r"tcp://.+:(?P<port>[1-9]\d*)|ipc://.+", text)
    if match is None or int(match["port"] or 1) > _LAST_PORT:
        raise ValueError("expected tcp://HOST:PORT, tcp://*:PORT or ipc://PATH")
    return text


@dataclass(frozen=True)
class QueueFlags(ServiceFlags):
    """How schedulers queue, admit and preempt requests."""

    max_waiting_requests: int = setting(1024, "maximum number of waiting requests; more are refused", minimum=1)
    max_waiting_tokens: int = setting(1_000_000, "maximum number of waiting prompt tokens; more are refused", minimum=1)
    tenant_overflow: float = setting(
        1.0,
        "share of the bounds on waiting and on durable requests by which tenants that use less than an equal part may "
        "exceed them",
        minimum=0,
        maximum=1,
    )
    watermark: float = setting(0.01, "share of the blocks that admission leaves free", minimum=0, maximum=0.9)
    policy: str = setting(
        "fcfs",
        "which request goes first: first come, first served; by priority; or tenants in equal shares",
        choices=("fcfs", "priority", "fair"),
        common=True,
    )
    max_prefill_share: float = setting(
        0.5,
        "maximum share of a step's tokens for one prompt while shorter ones wait; 1 is no limit",
        minimum=0.01,
        maximum=1,
    )
    max_mixed_prefill_tokens: int | None = setting(
        None,
        "maximum number of prompt tokens in a step that also decodes, unless more requests wait than run: streams wait "
        "less for each step, and a prompt takes more steps; not given, 512 on a CPU, no limit on a GPU",
        minimum=16,
    )
    preemption_mode: str = setting(
        "auto",
        "how preempted requests free their blocks: swap to host memory, recompute, or auto by kind of request",
        choices=("auto", "swap", "recompute"),
    )
    output_checkpoints: bool = setting(
        True,
        "copy what layers with states keep every 64 tokens of output: the next turn, and a request that lost its "
        "worker, continue there and not at the end of the prompt; see docs/memory.md",
    )
    pin_quota: float = setting(0.25, "share of the blocks that one tenant's pins may hold", minimum=0, maximum=1)
    max_pinned: float = setting(0.5, "share of the blocks that all pins may hold", minimum=0, maximum=1)


@dataclass(frozen=True)
class SchedulerFlags(QueueFlags, StepFlags, TenantFlags):
    """Durable requests, recordings and steps of schedulers."""

    durable_grace: float = setting(
        60.0,
        "seconds that a durable request is kept without a reader, and after its end",
        minimum=0,
        maximum=3600,
        metavar="SECONDS",
    )
    idle_unload: float = setting(
        0.0,
        "seconds without a request after which the workers give back the memory of their KV pools and weights; the "
        "next request waits until the model is loaded again; 0 keeps the model",
        minimum=0,
        metavar="SECONDS",
    )
    max_durable_requests: int = setting(1024, "max durable requests that are kept", minimum=0)
    max_durable_tokens: int = setting(
        2_000_000,
        "max tokens of durable requests, counting up to 1,024 to come for each sequence; more requests are refused",
        minimum=0,
    )
    role: str = setting(
        "both",
        "requests that gateways prefer to send here: long prompts (prefill), which move on with their first token, "
        "requests that have tokens (decode), or both; see docs/kv.md",
        choices=("both", "prefill", "decode"),
    )
    max_steps_in_flight: int = setting(
        2, "max steps that are sent to workers before the first one is answered", minimum=1, maximum=4
    )
    trace_steps: str | None = setting(
        None, "file to write the parts of each step to, for Chrome's tracing page; absent writes none", metavar="FILE"
    )
    record: str | None = setting(
        None,
        "file to write all inputs of the scheduler's core to, for `quire replay`; absent writes none",
        metavar="FILE",
    )
    record_tokens: bool = setting(False, "write the token ids of prompts and answers into the recording, too")
    record_max_bytes: int = setting(
        1 << 30,
        "max size of a recording, with the files before FILE; the oldest part is replaced by a snapshot",
        parse=parse_bytes,
        minimum=1 << 20,
        metavar="BYTES",
    )

    kv_events: str | None = setting(
        None,
        "ZeroMQ address of events about cached blocks, in vLLM's format: tcp://*:PORT and ipc://PATH listen, others "
        "are connected to; absent publishes none; see docs/kv_events.md",
        parse=_parse_zmq_address,
        metavar="ADDRESS",
    )
    kv_events_replay: str | None = setting(
        None,
        "ZeroMQ address where subscribers request events that they missed",
        parse=_parse_zmq_address,
        metavar="ADDRESS",
    )
    kv_events_topic: str | None = setting(None, "topic of the events; llm-d reads kv@POD@MODEL", metavar="TOPIC")
    kv_events_buffer: int = setting(
        10_000,
        "max steps whose events are kept, for replays and while there is no subscriber, at most 256 MiB of them",
        minimum=1,
        maximum=1 << 30,
        metavar="STEPS",
    )
    kv_events_format: str = setting(
        "array",
        "how an event is written: array as vLLM did until June 2026 and llm-d reads in all versions, or map as vLLM "
        "does since",
        choices=("array", "map"),
    )
    kv_events_disk: bool = setting(
        False, "publish events about blocks on disk and in host memory, too, with medium STORAGE and CPU"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.record_tokens and self.record is None:
            raise ValueError("--record-tokens needs --record FILE")
        for flag in ("replay", "topic", "disk"):
            if getattr(self, f"kv_events_{flag}") and self.kv_events is None:
                raise ValueError(f"--kv-events-{flag} needs --kv-events ADDRESS")


@dataclass(frozen=True)
class SchedulerSettings(SchedulerFlags, DrainFlags, ReplicaFlags, ProcessFlags):
    """Runs the scheduler of one replica."""

    listen: str = setting("127.0.0.1:50052", "where gateways connect, HOST:PORT or unix:PATH")
    workers: tuple[str, ...] = setting(("127.0.0.1:50053",), "addresses of the workers in order of rank, with commas")
    # Workers have both flags too, to size memory; the lower value counts. `quire serve` passes the worker's.
    max_num_seqs: int = setting(256, "max sequences that run at once", minimum=1)
    max_num_batched_tokens: int = setting(2048, "max tokens of one step", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.workers or len(set(self.workers)) < len(self.workers):
            raise ValueError(f"--workers is {','.join(self.workers)!r}; it must be one address for each rank")
        for address in self.workers:
            check_address("--workers", address)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}; it must be at least --max-num-seqs "
                f"({self.max_num_seqs}), since every running sequence takes one token of a step"
            )
