"""The flags of `quire serve`: those of the three services, and how many of them to start."""

from dataclasses import dataclass
from pathlib import Path

from quire.settings import parse_bytes, setting
from quire.telemetry import LOG_LEVELS
from quire.tracing import parse_endpoint

_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Serves a model on this machine: starts worker, scheduler and gateway, and restarts those that die."""

    model: str | None = setting(None, "model directory; none serves the embedded model", metavar="DIR")
    served_model_name: str | None = setting(
        None, "the name under which clients ask for the model; none takes the directory's"
    )
    grpc_host: str = setting("127.0.0.1", "where to serve gRPC")
    grpc_port: int = setting(50051, "port of the gRPC API; 0 picks a free one", minimum=0, maximum=65535)
    http_host: str = setting("127.0.0.1", "where to serve HTTP")
    http_port: int = setting(8000, "port of the HTTP API; 0 picks a free one", minimum=0, maximum=65535)
    gateways: int = setting(1, "gateway processes, which share the ports", minimum=1, maximum=64)
    tensor_parallel_size: int = setting(1, "workers that share the model", minimum=1)

    tls_dir: Path | None = setting(
        None, "directory of certificates, as `quire certs` makes it; none encrypts nothing", metavar="DIR"
    )
    tls_client_auth: bool = setting(False, "callers must show a certificate that ca.pem of --tls-dir has signed")
    public_cert: Path | None = setting(
        None,
        "certificate of both ports, the chain after it, in the place of the gateway's in --tls-dir",
        metavar="FILE",
    )
    public_key: Path | None = setting(None, "key of --public-cert, not encrypted", metavar="FILE")

    model_impl: str = setting(
        "auto",
        "whose code runs the model; auto takes transformers' for what Quire has no code of its own for",
        choices=("auto", "native", "transformers"),
    )
    device: str = setting(
        "auto", "where the model runs; auto takes cuda where there is one", choices=("auto", "cpu", "cuda")
    )
    dtype: str = setting(
        "auto",
        "type of weights and KV pool; auto takes the model's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = setting(
        "none",
        "what linear layers hold: int8-weight-only rounds their weights to int8 when they are loaded, int8-dynamic "
        "their inputs too",
        choices=("none", "int8-weight-only", "int8-dynamic"),
    )
    kv_cache_dtype: str = setting(
        "auto", "type of the KV pool; auto takes --dtype, int8 holds about twice the tokens", choices=("auto", "int8")
    )
    cuda_graphs: str = setting(
        "off",
        "whether decode steps on cuda are replayed as CUDA graphs, recorded at start; never run on a GPU yet",
        choices=("on", "off"),
    )
    block_size: int = setting(16, "tokens of one KV block", minimum=1, maximum=1024)
    kv_cache_memory: int | None = setting(
        None,
        "most memory of the KV pool; never more is taken than max_num_seqs sequences of max_model_len tokens need; "
        "none is 1GiB on cpu, what is left on cuda",
        parse=parse_bytes,
        metavar="BYTES",
    )
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory to use", minimum=0.05, maximum=1.0)
    swap_space: int | None = setting(
        None,
        "host memory for swapped blocks, 0 for none; not given, on cpu as many blocks as the KV pool has and at most "
        "1GiB, on cuda 4GiB",
        parse=parse_bytes,
        metavar="BYTES",
    )
    num_gpu_blocks: int | None = setting(None, "blocks of the KV pool, instead of sizing it by memory", minimum=1)
    max_model_len: int | None = setting(None, "longest sequence; none is what the model knows", minimum=1)
    num_threads: int | None = setting(
        None, "threads of one operation on cpu; none gives each processor that may be used one", minimum=1
    )
    thread_binding: str = setting(
        "auto",
        "on cpu, auto keeps each thread of an operation on one processor where there are as many threads as processors",
        choices=("auto", "off"),
    )

    max_num_seqs: int = setting(256, "most sequences that run at once", minimum=1, maximum=65536)
    max_num_batched_tokens: int = setting(2048, "most tokens of one step", minimum=1, maximum=1 << 20)
    max_waiting_requests: int = setting(1024, "most requests that wait; more are refused", minimum=1)
    max_waiting_tokens: int = setting(1_000_000, "most prompt tokens that wait; more are refused", minimum=1)
    watermark: float = setting(0.01, "share of the blocks that admission leaves free", minimum=0, maximum=0.9)
    policy: str = setting(
        "fcfs",
        "who goes first: first come, first served; by priority; or tenants in equal shares",
        choices=("fcfs", "priority", "fair"),
    )
    preemption_mode: str = setting(
        "auto",
        "how preempted requests give blocks back: swap to host memory, recompute, or by what they are",
        choices=("auto", "swap", "recompute"),
    )
    pin_quota: float = setting(0.25, "share of the blocks that one tenant's pins may hold", minimum=0, maximum=1)
    max_pinned: float = setting(0.5, "share of the blocks that all pins may hold", minimum=0, maximum=1)
    max_steps_in_flight: int = setting(2, "steps that workers have before the first is answered", minimum=1, maximum=4)
    step_timeout: float = setting(
        60.0, "seconds after which an unanswered step means a lost worker", minimum=0.1, metavar="SECONDS"
    )

    trace_steps: str | None = setting(
        None, "file to write what happens in each step to, for Chrome's tracing page; none writes none", metavar="FILE"
    )

    max_message_bytes: int = setting(4 * 1024 * 1024, "largest request", parse=parse_bytes, metavar="BYTES")
    max_prompt_tokens: int | None = setting(None, "longest prompt; none is what the model takes", minimum=1)
    max_stop_strings: int = setting(16, "most stop strings of a request", minimum=0)
    max_stop_string_bytes: int = setting(1024, "longest stop string", minimum=1)
    max_logprobs: int = setting(20, "most log probabilities of a position", minimum=0)
    max_chat_messages: int = setting(1024, "most messages of a conversation", minimum=1)

    max_stop_token_ids: int = setting(128, "most stop token ids of a request", minimum=0)
    max_chunk_tokens: int = setting(256, "most tokens in one message to a slow client", minimum=1)
    request_id_prefix: str = setting("req-", "start of the request ids that the gateway makes")
    tokenizer_threads: int = setting(2, "threads for long texts and chat templates", minimum=1, maximum=64)

    keys_files: tuple[Path, ...] = setting(
        (),
        "files of API keys, made by `quire keys`; without one everybody may call",
        flag="--keys-file",
        metavar="FILE",
    )
    open_metrics: bool = setting(False, "show the gateway's /metrics without an API key")
    max_connections: int = setting(
        4096, "most connections to each port of the gateway; further ones are closed", minimum=1, maximum=1 << 20
    )
    max_streams_per_connection: int = setting(
        4096, "most calls at once in one gRPC connection; further ones wait in the client", minimum=1, maximum=1 << 20
    )
    handshake_timeout: float = setting(
        10.0, "seconds that a client may take to set a connection up", minimum=0.1, maximum=3600, metavar="SECONDS"
    )
    slow_reader_timeout: float = setting(
        60.0, "seconds that a client may take nothing while output waits for it", minimum=0.1, metavar="SECONDS"
    )
    slow_sender_timeout: float = setting(
        30.0, "seconds that a client may take to send a request whole", minimum=0.1, metavar="SECONDS"
    )

    connect_timeout: float = setting(
        30.0, "seconds that a request waits for a scheduler to come back", minimum=0, metavar="SECONDS"
    )
    first_connect_timeout: float = setting(
        2.0, "seconds that a request waits for the first scheduler", minimum=0, metavar="SECONDS"
    )
    failover_delay: float = setting(
        5.0, "seconds after which requests leave a lost scheduler for another", minimum=0, metavar="SECONDS"
    )
    reconnect_grace: float = setting(
        10.0, "seconds that schedulers keep requests of a lost gateway", minimum=0, metavar="SECONDS"
    )
    durable_grace: float = setting(
        60.0,
        "seconds that a durable request is kept without a reader, and after its end",
        minimum=0,
        maximum=3600,
        metavar="SECONDS",
    )
    max_durable_requests: int = setting(1024, "most durable requests that are kept", minimum=0)
    max_durable_tokens: int = setting(
        2_000_000, "most tokens of durable requests, those that they may still generate included", minimum=0
    )
    drain_timeout: float = setting(30.0, "seconds that live requests get at shutdown", minimum=0, metavar="SECONDS")
    niceness: int = setting(
        5,
        "how far gateways stand back for the other services on the same processors, see nice(1)",
        minimum=0,
        maximum=19,
    )

    admin_port: int | None = setting(
        None,
        "port of the gateway's channelz on 127.0.0.1, which shows connections and calls, further gateways have the "
        "ports after it; none shows nothing",
        minimum=0,
        maximum=65535,
    )
    metrics_host: str = setting("127.0.0.1", "where metrics are served apart from the HTTP API")
    gateway_metrics_port: int | None = setting(
        None,
        "port of the first gateway's own metrics, further ones have the ports after it; none serves them on the HTTP "
        "port alone, which tells those of whichever gateway answers",
        minimum=0,
        maximum=65535,
    )
    scheduler_metrics_port: int | None = setting(None, "port of the scheduler's metrics", minimum=0, maximum=65535)
    worker_metrics_port: int | None = setting(None, "port of the worker's metrics", minimum=0, maximum=65535)
    otlp_traces_endpoint: str | None = setting(
        None,
        "where to send OpenTelemetry traces by OTLP over gRPC; https is TLS; none traces nothing",
        parse=parse_endpoint,
        metavar="URL",
    )
    hang_timeout: float = setting(
        15.0,
        "time after which a service that answers no health check is killed and started again; 0 never",
        minimum=0,
        metavar="SECONDS",
    )
    log_level: str = setting("warning", "least level of the services' log records", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        if self.tls_client_auth and self.tls_dir is None:
            raise ValueError("--tls-client-auth asks for certificates, which needs TLS; give --tls-dir")
        if (self.public_cert is None) != (self.public_key is None):
            raise ValueError("--public-cert and --public-key go together; one of them is not given")
        highest = _LAST_PORT + 1 - self.gateways
        for flag, first in (("--gateway-metrics-port", self.gateway_metrics_port), ("--admin-port", self.admin_port)):
            if first and first > highest:
                raise ValueError(
                    f"{flag} is {first}; {self.gateways} gateways have a port each from there on, so at most {highest}"
                )
