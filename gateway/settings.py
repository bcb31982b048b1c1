"""The gateway's flags."""

from dataclasses import dataclass
from pathlib import Path

from gateway.text.formats.answer import REASONING_FORMATS, TOOL_FORMATS
from quire.rpc.address import parse_target
from quire.service_flags import DrainFlags, ModelFlags, ProcessFlags, ServiceFlags, TenantFlags
from quire.settings import parse_bytes, setting

MAX_KEY_LENGTH = 512
KILLABLE = ("worker", "scheduler")
"""Services that a demonstration may kill."""
MEMORY, SQLITE = "memory", "sqlite:"
"""A --response-store, and the beginning of one that is a file."""
MAX_CHAT_MESSAGES = 1 << 16
"""The maximum number of messages of a conversation; a gateway's own limit may be lower."""


def is_key(text: str) -> bool:
    """Whether a text can be sent as an API key in a header."""
    return 0 < len(text) <= MAX_KEY_LENGTH and all("!" <= character <= "~" for character in text)


@dataclass(frozen=True)
class ListenFlags(ServiceFlags):
    """Where gateways listen, and who may call them."""

    grpc_host: str = setting("127.0.0.1", "where to listen for gRPC")
    grpc_port: int = setting(50051, "port for gRPC; 0 picks a free one", minimum=0, maximum=65535, common=True)
    http_host: str = setting("127.0.0.1", "where to listen for HTTP", common=True)
    http_port: int = setting(8000, "port for HTTP; 0 picks a free one", minimum=0, maximum=65535, common=True)
    allowed_origins: tuple[str, ...] = setting(
        (), "origins of pages that may call the HTTP API from a browser (CORS); * allows all", metavar="ORIGIN"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "names by which HTTP clients may call, besides those of loopback; * is all of them. Without it, all names are "
        "allowed except at a gateway that listens on loopback without API keys",
        metavar="HOST",
    )
    tls_client_auth: bool = setting(False, "callers need a certificate that ca.pem of --tls-dir has signed")
    public_cert: Path | None = setting(
        None,
        "certificate of both ports, followed by its chain; replaces the gateway's in --tls-dir",
        metavar="FILE",
    )
    public_key: Path | None = setting(None, "key of --public-cert, not encrypted", metavar="FILE")
    keys_files: tuple[Path, ...] = setting(
        (),
        "files of API keys, made by `quire keys`; without one, calls need no key",
        flag="--keys-file",
        metavar="FILE",
        common=True,
        refuses_empty=True,
    )
    api_keys: tuple[str, ...] = setting(
        (),
        "API keys that allow everything, besides those of --keys-file; processes of this machine see what a command "
        "line has, and not what QUIRE_API_KEY or a configuration file has",
        flag="--api-key",
        metavar="KEY",
        refuses_empty=True,
    )
    ui: bool = setting(True, "serve /ui, a page that shows chats, memory and load; with API keys, to operators alone")
    open_metrics: bool = setting(False, "show /metrics of the HTTP port without an API key")
    vllm_metric_names: bool = setting(
        False,
        "show metrics under vLLM's names, too, for dashboards and autoscalers that know them; see docs/metrics.md",
    )

    @property
    def requires_keys(self) -> bool:
        """Whether calls need a key."""
        return bool(self.keys_files or self.api_keys)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tls_client_auth and self.tls_dir is None:
            raise ValueError("--tls-client-auth needs TLS; give --tls-dir")
        # Without the key: this line comes into logs.
        if not all(map(is_key, self.api_keys)):
            raise ValueError("--api-key has a key that is empty, longer than 512 characters, or not printable ASCII")
        if (self.public_cert is None) != (self.public_key is None):
            raise ValueError("--public-cert and --public-key go together; give both, or none")


@dataclass(frozen=True)
class FormatFlags(ServiceFlags):
    """The model's name, its adapters, and the formats of its answers."""

    served_model_name: str | None = setting(
        None, "the name of the model for clients; by default the directory's name", metavar="NAME", common=True
    )
    served_model_aliases: tuple[str, ...] = setting(
        (), "further names of the model for clients, such as one that a client asks for by default", metavar="NAME"
    )
    tool_call_parser: str | None = setting(
        None,
        "format of the model's tool calls, by vLLM's name; by default detected in the chat template",
        choices=sorted(TOOL_FORMATS),
    )
    reasoning_parser: str | None = setting(
        None,
        "format of the model's reasoning, by vLLM's name; by default detected in the chat template",
        choices=sorted(REASONING_FORMATS),
    )
    request_chat_templates: bool = setting(
        False,
        "render a chat by the chat_template of its request, where it has one; a template is a program, which runs in a "
        "process of its own with at most 2 s of processor time and 256 MiB",
    )
    strict_fields: bool = setting(
        False, "refuse fields of requests that are not known; by default they are ignored, and named in the answer"
    )
    request_id_prefix: str = setting("req-", "prefix of the request ids that the gateway makes")
    adapters: tuple[str, ...] = setting(
        (),
        "LoRA adapters to serve as models of their own; directories are absolute and the same for gateways and workers",
        metavar="NAME=DIR",
        common=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [each.partition("=")[0] for each in self.adapters]
        for each, name in zip(self.adapters, names, strict=True):
            if "=" not in each:
                raise ValueError(f"--adapters has {each!r}; it must be NAME=DIR")
            if names.count(name) > 1:
                raise ValueError(f"--adapters has the name {name} twice; each adapter needs a name of its own")


@dataclass(frozen=True)
class RequestLimits(ServiceFlags):
    """Limits of requests and answers."""

    max_message_bytes: int = setting(
        4 * 1024 * 1024,
        "maximum bytes of a message of a client",
        parse=parse_bytes,
        minimum=1024,
        # Of protobuf and of gRPC.
        maximum=(1 << 31) - 1,
    )
    max_total_body_bytes: int = setting(
        256 * 1024 * 1024,
        "maximum memory of all requests that are held at once, as sent and as parsed, of which one tenant may take "
        "half; see docs/security.md",
        parse=parse_bytes,
        minimum=1024,
    )
    max_answer_bytes: int = setting(
        64 << 20, "maximum memory of the answer to one call", parse=parse_bytes, minimum=1024, metavar="BYTES"
    )
    max_key_answer_bytes: int = setting(
        128 << 20,
        "maximum memory of the answers to one API key's calls",
        parse=parse_bytes,
        minimum=1024,
        metavar="BYTES",
    )
    max_total_answer_bytes: int = setting(
        256 << 20, "maximum memory of the answers to all calls", parse=parse_bytes, minimum=1024, metavar="BYTES"
    )
    response_store: str = setting(
        MEMORY,
        "where responses are kept that later ones name as previous_response_id: in the memory of the gateway that made "
        "them (several gateways of one `quire serve` share a file until it ends), or in a file of SQLite, which "
        "outlives it and which all gateways of a machine share",
        metavar="memory|sqlite:PATH",
    )
    max_stored_response_bytes: int = setting(
        64 << 20,
        "maximum bytes of the responses that are kept, of each gateway or of the file; 0 keeps none",
        parse=parse_bytes,
        minimum=0,
        metavar="BYTES",
    )
    clamp_max_tokens: str = setting(
        "defaults",
        "when to cut max_tokens of chats and responses down to what the context has left: where it is a number that "
        "clients send by default, such as 4096 or 32000; always; or never, which refuses it",
        choices=("defaults", "always", "never"),
    )
    max_prompt_tokens: int | None = setting(
        None, "maximum tokens of a prompt; without it, the model's maximum", minimum=1
    )
    max_logprobs: int = setting(20, "maximum log probabilities of a position", minimum=0)
    max_stop_strings: int = setting(16, "maximum stop strings of a request", minimum=0)
    max_stop_string_bytes: int = setting(1024, "maximum bytes of a stop string, in UTF-8", minimum=1)
    max_stop_token_ids: int = setting(128, "maximum stop token ids of a request", minimum=0)
    max_chat_messages: int = setting(1024, "maximum messages of a conversation", minimum=1, maximum=MAX_CHAT_MESSAGES)
    max_call_sequences: int = setting(
        1024, "maximum sequences of a call: sequences per prompt times prompts", minimum=1
    )
    max_chunk_tokens: int = setting(256, "maximum tokens in one message to a slow client", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.response_store != MEMORY and not self.response_store.removeprefix(SQLITE).strip("/"):
            raise ValueError("--response-store is sqlite: without a path; give sqlite:PATH")
        if self.response_store != MEMORY and not self.response_store.startswith(SQLITE):
            raise ValueError(f"--response-store is {self.response_store!r}; it must be memory or sqlite:PATH")
        if self.max_total_body_bytes < self.max_message_bytes:
            raise ValueError(
                f"--max-total-body-bytes is {self.max_total_body_bytes}, less than one message may have "
                f"(--max-message-bytes, {self.max_message_bytes})"
            )


@dataclass(frozen=True)
class BatchFlags(ServiceFlags):
    """Files and batches."""

    batch_dir: Path | None = setting(
        None,
        "directory for /v1/files and /v1/batches, which gateways of one machine share; without it both are refused",
        metavar="DIR",
    )
    batch_concurrency: int = setting(
        32, "maximum requests of batches that run at once, of each gateway", minimum=1, maximum=4096
    )
    max_batch_requests: int = setting(50_000, "maximum requests of a batch", minimum=1, maximum=1_000_000)
    max_batch_file_bytes: int = setting(
        100 << 20, "maximum bytes of a file", parse=parse_bytes, minimum=1024, metavar="BYTES"
    )
    max_batch_dir_bytes: int = setting(
        4 << 30,
        "bytes of uploaded files, results and answers in --batch-dir from which on no file is uploaded and no batch "
        "begins; batches that have begun are finished beyond it",
        parse=parse_bytes,
        minimum=1024,
        metavar="BYTES",
    )


@dataclass(frozen=True)
class ConnectionLimits(ServiceFlags):
    """Connections, and slow clients."""

    max_connections: int = setting(
        4096, "maximum connections to each port of a gateway; further ones are closed", minimum=1, maximum=1 << 20
    )
    max_streams_per_connection: int = setting(
        2048,
        "maximum calls at once in one gRPC connection; further ones wait in the client, or are refused",
        minimum=1,
        maximum=1 << 20,
    )
    handshake_timeout: float = setting(
        10.0, "maximum seconds for a client to set up a connection", minimum=0.1, maximum=3600, metavar="SECONDS"
    )
    max_connection_age: float | None = setting(
        None,
        "seconds after which a gRPC client is told to open a new connection for its next calls, which spreads clients "
        "over gateways (default: 10 where several gateways share a port, else never)",
        minimum=0.1,
        maximum=1_000_000,
        metavar="SECONDS",
    )
    slow_reader_timeout: float = setting(
        60.0, "maximum seconds in which a client reads nothing while output is waiting", minimum=0.1, metavar="SECONDS"
    )
    slow_sender_timeout: float = setting(
        30.0, "maximum seconds for a client to send a whole request", minimum=0.1, metavar="SECONDS"
    )
    sse_keepalive: float = setting(
        15.0,
        "seconds without output after which a stream of server-sent events sends a comment; 0 sends none",
        minimum=0,
        metavar="SECONDS",
    )


@dataclass(frozen=True)
class GatewayFlags(ListenFlags, FormatFlags, RequestLimits, BatchFlags, ConnectionLimits, TenantFlags):
    """How gateways reach schedulers, and what they leave to others."""

    connect_timeout: float = setting(
        30.0, "seconds that a request waits for a scheduler to connect", minimum=0, metavar="SECONDS"
    )
    failover_delay: float = setting(
        5.0,
        "seconds after which requests move away from a scheduler that is lost, or not ready",
        minimum=0,
        metavar="SECONDS",
    )
    reconnect_grace: float = setting(
        10.0, "seconds that schedulers keep requests of a lost gateway", minimum=0, maximum=600, metavar="SECONDS"
    )
    tokenizer_threads: int = setting(2, "threads for long texts and chat templates", minimum=1, maximum=64)
    niceness: int = setting(
        5,
        "niceness of gateways, which leaves processors to the other services; see nice(1)",
        minimum=0,
        maximum=19,
    )


@dataclass(frozen=True)
class GatewaySettings(ModelFlags, GatewayFlags, DrainFlags, ProcessFlags):
    """Serves clients over gRPC and HTTP, and spreads their requests over schedulers."""

    schedulers: tuple[str, ...] = setting(
        ("127.0.0.1:50052",),
        "addresses of the schedulers, one per replica; dns:///NAME:PORT stands for all addresses that a name has, and "
        "follows it while they change",
        metavar="ADDRESS",
    )
    routing: str = setting(
        "cache",
        "how to choose among replicas: the one that has most of the prompt cached; by the prompt's beginning; or one "
        "after the other",
        choices=("cache", "affinity", "round-robin"),
    )
    long_prompt: int = setting(
        256,
        "tokens from which on a prompt goes to replicas for prefill, where there are some; cached tokens do not count",
        minimum=1,
        metavar="TOKENS",
    )
    reuse_port: bool = setting(False, "share both ports with other gateways of the same user on this machine")
    hand_over: bool = setting(
        False, "close both ports as soon as this gateway drains; other gateways that share them continue"
    )
    local_socket: Path | None = setting(
        None, "unix socket on which to serve gRPC too, to reach this gateway where ports are shared", metavar="PATH"
    )
    demo_socket: Path | None = setting(
        None,
        "unix socket of a supervisor that kills a service when the page /ui asks for it, for demonstrations",
        metavar="PATH",
    )
    metrics_port: int | None = setting(
        None,
        "port of this gateway's own metrics, without API keys, to find it where the HTTP port is shared; none serves "
        "them on the HTTP port alone",
        minimum=0,
        maximum=65535,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hand_over and not self.reuse_port:
            raise ValueError("--hand-over leaves the ports to gateways that share them; give --reuse-port")
        if not self.schedulers:
            raise ValueError("--schedulers is empty; give the address of at least one scheduler")
        for address in self.schedulers:
            parse_target(address)
        if len(set(self.schedulers)) < len(self.schedulers):
            raise ValueError(f"--schedulers names an address twice: {', '.join(self.schedulers)}")
