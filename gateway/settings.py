"""The gateway's flags."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from gateway.text.formats.answer import REASONING_FORMATS, TOOL_FORMATS
from quire.rpc.address import parse_target
from quire.runtime.settings import overridden, parse_bytes, setting
from quire.service.model_flag import ModelFlag
from quire.service.service_flags import DrainFlags, ProcessFlags, ServedModelsFlags, ServiceFlags, TenantFlags
from quire.tracing import parse_endpoint

MAX_KEY_LENGTH = 512
FRONTS: Mapping[str, Sequence[str]] = {
    "openai": (),
    "responses": ("response_store", "max_stored_response_bytes"),
    "anthropic": (),
    "kserve": (),
    "batches": ("batch_dir", "batch_concurrency", "max_batch_requests", "max_batch_file_bytes", "max_batch_dir_bytes"),
    "ui": ("demo_socket", "demo"),
}
"""The fronts in the order in which they are opened, each with the settings that only it reads."""
FLAGS_OF_MODELS = (
    "served_model_name",
    "served_model_aliases",
    "pooling",
    "score_tokens",
    "score_template",
    "tool_call_parser",
    "reasoning_parser",
    "request_chat_templates",
    "adapters",
)
"""The settings of a gateway that each of several models may have for itself."""
KILLABLE = ("worker", "scheduler")
"""Services that a demonstration may kill."""
MEMORY, SQLITE = "memory", "sqlite:"
"""The value of --response-store for memory, and the prefix of a file's value."""
MAX_CHAT_MESSAGES = 1 << 16
"""The maximum number of messages in a conversation; a gateway's own limit may be lower."""
_GEN_AI = "gen_ai_latest_experimental"
_size = partial(setting, parse=parse_bytes, minimum=1024)
_seconds = partial(setting, minimum=0.1, metavar="SECONDS")


def is_key(text: str) -> bool:
    """Whether a text can be sent as an API key in a header."""
    return 0 < len(text) <= MAX_KEY_LENGTH and all("!" <= character <= "~" for character in text)


@dataclass(frozen=True)
class ListenFlags(ServiceFlags):
    """Flags for the addresses of gateways, and for access to them."""

    grpc_host: str = setting("127.0.0.1", "address to listen on for gRPC")
    grpc_port: int = setting(50051, "port for gRPC; 0 picks a free one", minimum=0, maximum=65535, common=True)
    http_host: str = setting("127.0.0.1", "address to listen on for HTTP", common=True)
    http_port: int = setting(8000, "port for HTTP; 0 picks a free one", minimum=0, maximum=65535, common=True)
    allowed_origins: tuple[str, ...] = setting(
        (), "origins of web pages that may call the HTTP API from a browser (CORS); * allows all", metavar="ORIGIN"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "host names under which HTTP clients may call, in addition to loopback names; * allows all. Without this flag "
        "all names are allowed, except at a gateway that listens on loopback without API keys",
        metavar="HOST",
    )
    tls_client_auth: bool = setting(False, "require client certificates signed by ca.pem of --tls-dir")
    public_cert: Path | None = setting(
        None,
        "certificate of both ports, followed by its chain; replaces the gateway's certificate in --tls-dir",
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
        "API keys that allow everything, in addition to --keys-file; other local processes can read a command "
        "line, but not QUIRE_API_KEY or a configuration file",
        flag="--api-key",
        metavar="KEY",
        refuses_empty=True,
    )
    fronts: tuple[str, ...] = setting(
        tuple(FRONTS),
        f"APIs to serve in addition to gRPC: {', '.join(FRONTS)}; paths of other APIs are unknown then, and their code "
        "is not loaded",
        metavar="FRONT",
    )
    ui: bool = setting(True, "serve /ui, a page with chats, memory and load; with API keys, only operators may open it")
    open_metrics: bool = setting(False, "serve /metrics on the HTTP port without an API key")
    vllm_metric_names: bool = setting(
        False,
        "serve metrics also under vLLM's names, for dashboards and autoscalers that use them; see docs/metrics.md",
    )

    otlp_metrics_endpoint: str | None = setting(
        None,
        "where to send metrics with OpenTelemetry's names by OTLP over gRPC; https is TLS. /metrics also has them if "
        "OTEL_SEMCONV_STABILITY_OPT_IN has gen_ai_latest_experimental",
        parse=parse_endpoint,
        metavar="URL",
    )

    @property
    def shows_gen_ai_metrics(self) -> bool:
        """Whether OpenTelemetry's variable asks for its names of metrics."""
        return _GEN_AI in os.environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").replace(" ", "").split(",")

    @property
    def served_fronts(self) -> list[str]:
        """The fronts to open, in the order of `FRONTS`."""
        return [each for each in FRONTS if each in self.fronts and (each != "ui" or self.ui)]

    @property
    def requires_keys(self) -> bool:
        return bool(self.keys_files or self.api_keys)

    def __post_init__(self) -> None:
        super().__post_init__()
        for front in self.fronts:
            if front not in FRONTS:
                known = ", ".join(FRONTS)
                raise ValueError(f"--fronts has {front!r}; name some of {known}, or leave --fronts out to serve all")
        if "batches" in self.fronts and not {"openai", "responses"}.intersection(self.fronts):
            raise ValueError(
                "--fronts has batches, but neither openai nor responses, whose requests batches run; add one of them, "
                "or leave batches out"
            )
        defaults = {each.name: each.default for each in dataclasses.fields(self)}
        for front in (each for each in FRONTS if each not in self.fronts):
            for name in FRONTS[front]:
                if name in defaults and getattr(self, name) != defaults[name]:
                    flag = f"--{name.replace('_', '-')}"
                    fronts = ",".join(self.fronts) or "empty"
                    raise ValueError(
                        f"{flag} is set, but --fronts is {fronts}, without {front}; add {front}, or leave {flag} out"
                    )
        if self.tls_client_auth and self.tls_dir is None:
            raise ValueError("--tls-client-auth needs TLS; give --tls-dir")
        # The message omits the key, since it is logged.
        if not all(map(is_key, self.api_keys)):
            raise ValueError("--api-key has a key that is empty, longer than 512 characters, or not printable ASCII")
        if (self.public_cert is None) != (self.public_key is None):
            raise ValueError("--public-cert and --public-key go together; give both, or none")


@dataclass(frozen=True)
class FormatFlags(ServiceFlags):
    """Flags for the model's names, its adapters, and the formats of its answers."""

    served_model_name: str | None = setting(
        None, "name of the model for clients; by default the directory's name", metavar="NAME", common=True
    )
    served_model_aliases: tuple[str, ...] = setting(
        (), "further names of the model for clients, such as a client's default name", metavar="NAME"
    )
    tool_call_parser: str | None = setting(
        None,
        "format of the model's tool calls, by vLLM's name; by default detected from the chat template",
        choices=sorted(TOOL_FORMATS),
    )
    reasoning_parser: str | None = setting(
        None,
        "format of the model's reasoning, by vLLM's name; by default detected from the chat template",
        choices=sorted(REASONING_FORMATS),
    )
    request_chat_templates: bool = setting(
        False,
        "render a chat with the chat_template of its request, if it has one; a template is a program, which runs in a "
        "separate process with at most 2 s of CPU time and 256 MiB",
    )
    score_template: Path | None = setting(
        None,
        "file with the Jinja template of a model that ranks, in place of its chat template; it gets a message of the "
        "role query and one of the role document",
        metavar="FILE",
    )
    strict_fields: bool = setting(
        False, "reject requests with unknown fields; by default these fields are ignored, and named in the answer"
    )
    request_id_prefix: str = setting("req-", "prefix of request ids that the gateway generates")
    adapters: tuple[str, ...] = setting(
        (),
        "LoRA adapters to serve as separate models; directories are absolute, and equal for gateways and workers",
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
                raise ValueError(f"--adapters has the name {name} twice; names must be unique")


@dataclass(frozen=True)
class RequestLimits(ServiceFlags):
    """Limits of requests and answers."""

    # At most the limit of protobuf and of gRPC.
    max_message_bytes: int = _size(4 << 20, "maximum bytes of a message from a client", maximum=(1 << 31) - 1)
    max_total_body_bytes: int = _size(
        256 << 20,
        "maximum memory of all requests held at once, as sent and as parsed; one tenant may take half of it; see "
        "docs/security.md",
    )
    max_answer_bytes: int = _size(64 << 20, "maximum memory of the answer to one call")
    max_key_answer_bytes: int = _size(128 << 20, "maximum memory of the answers to one API key's calls")
    max_total_answer_bytes: int = _size(256 << 20, "maximum memory of the answers to all calls")
    response_store: str = setting(
        MEMORY,
        "store of the responses that a later request may name as previous_response_id: the memory of the gateway that "
        "made them (under `quire serve` a temporary file, which outlives each gateway), or an SQLite file, which "
        "persists and which all gateways of a machine share",
        metavar="memory|sqlite:PATH",
    )
    max_stored_response_bytes: int = _size(
        64 << 20, "maximum bytes of stored responses, of each gateway or of the file; 0 stores none", minimum=0
    )
    clamp_max_tokens: str = setting(
        "defaults",
        "when to reduce max_tokens of chats and responses to the rest of the context: for values that clients send by "
        "default, such as 4096 or 32000; always; or never, which rejects larger values",
        choices=("defaults", "always", "never"),
    )
    max_prompt_tokens: int | None = setting(
        None, "maximum tokens of a prompt; by default the model's maximum", minimum=1
    )
    max_logprobs: int = setting(20, "maximum log probabilities per position", minimum=0)
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
    """Flags for files and batches."""

    batch_dir: Path | None = setting(
        None,
        "directory for /v1/files and /v1/batches, which gateways of a machine share; without it both are unavailable",
    )
    batch_concurrency: int = setting(32, "maximum concurrent batch requests of each gateway", minimum=1, maximum=4096)
    max_batch_requests: int = setting(50_000, "maximum requests of a batch", minimum=1, maximum=1_000_000)
    max_batch_file_bytes: int = _size(100 << 20, "maximum bytes of a file")
    max_batch_dir_bytes: int = _size(
        4 << 30,
        "maximum bytes of uploaded files, results and answers in --batch-dir; beyond it, uploads and new batches are "
        "rejected, but running batches finish",
    )


@dataclass(frozen=True)
class ConnectionLimits(ServiceFlags):
    """Limits of connections and of slow clients."""

    max_connections: int = setting(
        4096, "maximum connections to each port of a gateway; others are closed", minimum=1, maximum=1 << 20
    )
    max_streams_per_connection: int = setting(
        2048,
        "maximum concurrent calls in one gRPC connection; others wait in the client, or are rejected",
        minimum=1,
        maximum=1 << 20,
    )
    handshake_timeout: float = _seconds(10.0, "maximum seconds for a client to set up a connection", maximum=3600)
    max_connection_age: float | None = _seconds(
        None,
        "maximum age of a gRPC connection in seconds; clients then open a new one for further calls, which spreads "
        "them over gateways (default: 10 if gateways share a port, else unlimited)",
        maximum=1_000_000,
    )
    slow_reader_timeout: float = _seconds(60.0, "maximum seconds without a read by a client while output waits")
    slow_sender_timeout: float = _seconds(30.0, "maximum seconds for a client to send a whole request")
    sse_keepalive: float = _seconds(
        15.0,
        "seconds without output after which a stream of server-sent events sends a comment, and the interval of the "
        "pings of a WebSocket; 0 disables both",
        minimum=0,
    )
    websocket_idle_timeout: float = _seconds(600.0, "seconds without a response after which a WebSocket is closed")


@dataclass(frozen=True)
class GatewayFlags(ListenFlags, FormatFlags, RequestLimits, BatchFlags, ConnectionLimits, TenantFlags):
    """Flags for connections to schedulers and for the CPU use of gateways, with all other flags of gateways."""

    connect_timeout: float = _seconds(30.0, "seconds that a request waits for a scheduler to connect", minimum=0)
    failover_delay: float = _seconds(
        5.0, "seconds after which requests leave a scheduler that is disconnected or not ready", minimum=0
    )
    reconnect_grace: float = _seconds(
        10.0, "seconds for which schedulers keep requests of a lost gateway", minimum=0, maximum=600
    )
    tokenizer_threads: int = setting(2, "threads for long texts and chat templates", minimum=1, maximum=64)
    niceness: int = setting(
        5,
        "niceness of gateways, which gives the other services priority on the CPU; see nice(1)",
        minimum=0,
        maximum=19,
    )


@dataclass(frozen=True)
class GatewaySettings(ServedModelsFlags, GatewayFlags, DrainFlags, ProcessFlags):
    """Serves clients over gRPC and HTTP, and distributes their requests over schedulers."""

    schedulers: tuple[str, ...] = setting(
        ("127.0.0.1:50052",),
        "addresses of the schedulers, one per replica; dns:///NAME:PORT means all addresses of a DNS name, which is "
        "resolved repeatedly. With several models NAME=ADDRESS is of the model NAME, others are of the first",
        metavar="ADDRESS",
    )
    routing: str = setting(
        "cache",
        "how to choose a replica: the one with the longest cached prefix; by the beginning of the prompt; or one "
        "after the other",
        choices=("cache", "affinity", "round-robin"),
    )
    long_prompt: int = setting(
        256,
        "minimum tokens of a prompt that goes to prefill replicas, if there are any; cached tokens do not count",
        minimum=1,
        metavar="TOKENS",
    )
    reuse_port: bool = setting(False, "share both ports with other gateways of the same user on this machine")
    hand_over: bool = setting(
        False, "close both ports as soon as this gateway drains; gateways that share them take over"
    )
    local_socket: Path | None = setting(
        None, "unix socket that also serves gRPC, to reach this gateway if ports are shared", metavar="PATH"
    )
    demo_socket: Path | None = setting(
        None,
        "unix socket of a supervisor that kills a service on request of the page /ui, for demonstrations",
        metavar="PATH",
    )
    metrics_port: int | None = setting(
        None,
        "port of this gateway's own metrics, without API keys, for gateways that share the HTTP port; by default only "
        "the HTTP port serves them",
        minimum=0,
        maximum=65535,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hand_over and not self.reuse_port:
            raise ValueError("--hand-over leaves the ports to gateways that share them; give --reuse-port")
        if not self.schedulers:
            raise ValueError("--schedulers is empty; give the address of at least one scheduler")
        self.check_only_by_model("served_model_name", "served_model_aliases", "adapters")
        named = [self._named_scheduler(each) for each in self.schedulers]
        addresses = [address for _, address in named]
        for address in addresses:
            parse_target(address)
        if len(set(addresses)) < len(addresses):
            raise ValueError(f"--schedulers names an address twice: {', '.join(self.schedulers)}")
        for model in self.served_models:
            if model.name not in [name for name, _ in named]:
                raise ValueError(f"--schedulers has no address of the model {model.name}; add {model.name}=ADDRESS")

    def of_model(self, model: ModelFlag) -> Self:
        """The settings of one of the served models, with its schedulers. Raises ConfigurationError."""
        bare = dataclasses.replace(model, overrides=())
        named = map(self._named_scheduler, self.schedulers)
        addresses = tuple(address for name, address in named if name == model.name)
        name = model.name if len(self.served_models) > 1 else model.given_name
        of_one = dataclasses.replace(
            self, models=(bare,), schedulers=addresses, served_model_name=name or self.served_model_name
        )
        return overridden(of_one, model.overrides, FLAGS_OF_MODELS, source=f"--model {model.name}")

    def _named_scheduler(self, text: str) -> tuple[str, str]:
        """The name of a model, and the address of one of its schedulers."""
        names = [each.name for each in self.served_models]
        name, equals, address = text.partition("=")
        if not equals or text.startswith("unix:"):
            return names[0], text
        if name not in names:
            raise ValueError(f"--schedulers has {text}, and no model is called {name}; models are {', '.join(names)}")
        return name, address
