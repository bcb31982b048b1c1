"""The feed of a gateway's page (/ui/feed), for commands that show its numbers in a terminal."""

import http.client
import json
import ssl
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from quire.rpc.errors import NotFound, PermissionDenied, Unauthenticated, Unavailable
from quire.runtime.settings import ConfigurationError, setting
from quire_cli.flags import CredentialFlags

DEFAULT_URL = "http://127.0.0.1:8000"
# The gateway sends an event every second.
_SILENCE_S = 10.0
_MAX_STEPS = 64
# As in the gateway's own history.
_MAX_SAMPLES, _SAMPLE_S = 300, 2.0
_COUNTERS = ("generated_tokens", "computed_tokens", "steps", "preemptions")


@dataclass(frozen=True, slots=True)
class FeedFlags(CredentialFlags):
    """The gateway."""

    url: str = setting(
        DEFAULT_URL,
        "HTTP address of the gateway",
        flag="--address",
        aliases=("--url",),
        variable="QUIRE_URL",
        metavar="URL",
    )


def read_feed(
    flags: CredentialFlags, url: str, *, wants_memory: bool = False
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Names and objects of the events, until the gateway ends the feed; frames have the memory of replicas, with all
    sequences, if `wants_memory` is set.

    Raises:
        ConfigurationError: the URL or a file of TLS is wrong.
        QuireError: no gateway answers, or it refuses the key.
    """
    connection = _connection(flags, url)
    headers = {} if flags.api_key is None else {"authorization": f"Bearer {flags.api_key}"}
    with closing(connection):
        try:
            connection.request("GET", f"/ui/feed?memory={int(wants_memory)}", headers=headers)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                _refuse(answer, url)
            if not (answer.getheader("content-type") or "").startswith("text/event-stream"):
                raise NotFound(f"{url} answers, but not as a gateway of Quire does")
            yield from _events(answer)
        except (OSError, http.client.HTTPException) as error:
            reason = "nothing came for 10 s" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise Unavailable(f"{url}: {reason}") from error


def _connection(flags: CredentialFlags, url: str) -> http.client.HTTPConnection:
    if "://" not in url:
        url = f"{'http' if flags.client_tls() is None else 'https'}://{url}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f'--address: "{url}" is not valid: {error}') from error
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/"):
        raise ConfigurationError(f'--address: "{url}" is not valid: expected http://HOST:PORT or https://HOST:PORT')
    if parts.scheme == "http":
        if flags.client_tls() is not None:
            raise ConfigurationError(f'--address: "{url}" is not encrypted, but flags of TLS are given; use https://')
        return http.client.HTTPConnection(host, port, timeout=_SILENCE_S)
    used = flags.tls_ca_file
    try:
        context = ssl.create_default_context(cafile=used)
        if flags.tls_cert_file is not None:
            used = flags.tls_cert_file
            context.load_cert_chain(used, flags.tls_key_file)
    except OSError as error:
        raise ConfigurationError(f"{used} cannot be used for TLS: {error.strerror or error}") from error
    return http.client.HTTPSConnection(host, port, timeout=_SILENCE_S, context=context)


def _refuse(answer: http.client.HTTPResponse, url: str) -> None:
    """Raises the error of the gateway's answer."""
    text = answer.read(4096)
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"it answered {answer.status}"
    match answer.status:
        case 401:
            raise Unauthenticated(f"{message}; QUIRE_API_KEY takes the key of an operator", reason="INVALID_API_KEY")
        case 403:
            raise PermissionDenied(message, reason="OPERATORS_ONLY")
        case 404:
            raise NotFound(f"the gateway at {url} has no feed: it was started with --no-ui, or is older")
        case _:
            raise Unavailable(f"the gateway at {url} gives no feed: {message}")


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    while line := answer.readline():
        text = line.decode().rstrip("\r\n")
        if text.startswith("event: "):
            name = text.removeprefix("event: ")
        elif text.startswith("data: "):
            yield name, json.loads(text.removeprefix("data: "))


@dataclass(slots=True)
class ReplicaNumbers:
    """The numbers of one replica: the newest ones, rates over the last second or more, and times of the last minute."""

    address: str
    numbers: Mapping[str, Any] | None = None
    rates: Mapping[str, float] | None = None
    problem: str | None = None
    steps: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_MAX_STEPS))
    waiting: list[Mapping[str, Any]] = field(default_factory=list)
    sequences: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """The sequences that have blocks, by their numbers, if the feed has memory."""
    samples: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    """The load over the last ten minutes, by the names of the feed's history, oldest first."""
    _before: tuple[float, Mapping[str, Any]] | None = None

    def add_frame(self, frame: Mapping[str, Any]) -> None:
        now: float = frame["unix_seconds"]
        numbers: Mapping[str, Any] = frame["numbers"]
        self.numbers, self.problem, self.waiting = numbers, None, frame["waiting"]
        self.steps.extend(frame["steps"])
        if (memory := frame["memory"]) is not None:
            if frame["is_whole"]:
                self.sequences = {}
            self.sequences |= {each["number"]: each for each in memory["sequences"]}
            for row in range(0, len(memory["progress"]), 4):
                number, _, tokens, computed = memory["progress"][row : row + 4]
                if number in self.sequences:
                    self.sequences[number] = {**self.sequences[number], "tokens": tokens, "computed_tokens": computed}
            for number in memory["gone"]:
                self.sequences.pop(number, None)
        before = self._before
        if before is None or any(numbers[name] < before[1][name] for name in _COUNTERS):
            self._before = now, numbers
        elif (seconds := now - before[0]) >= 1:
            self.rates = {name: (numbers[name] - before[1][name]) / seconds for name in _COUNTERS}
            self._before = now, numbers
            if not self.samples or now - self.samples[-1]["at"] >= _SAMPLE_S:
                self.samples.append(self._sample(now, numbers, self.rates))

    def _sample(self, now: float, numbers: Mapping[str, Any], rates: Mapping[str, float]) -> dict[str, Any]:
        """A sample, by the names of the feed's history."""
        queues = {name: numbers[f"{name}_requests"] for name in ("running", "waiting", "swapped")}
        return {
            "at": now,
            **queues,
            "rows": numbers["running_sequences"],
            "generated": rates["generated_tokens"],
            "computed": rates["computed_tokens"],
            "preemptions": rates["preemptions"],
            "used": self.kv_use,
            "ttft50": numbers["first_token_ms_p50"],
        }

    @property
    def first_token_ms(self) -> float | None:
        """The median over the requests that ended in the last minute; None if none did."""
        return None if self.numbers is None else self.numbers["first_token_ms_p50"]

    @property
    def kv_use(self) -> float:
        """The share of blocks in use."""
        pool = self.numbers["gpu_pool"] if self.numbers is not None else {}
        return pool["used_blocks"] / pool["total_blocks"] if pool.get("total_blocks") else 0.0


@dataclass(slots=True)
class Deployment:
    """The state of a deployment, from all events of one gateway's feed so far."""

    gateway: Mapping[str, Any] | None = None
    replicas: dict[str, ReplicaNumbers] = field(default_factory=dict)

    def add_event(self, name: str, value: Mapping[str, Any]) -> None:
        match name:
            case "gateway":
                self.gateway = value
                listed = {each["address"] for each in value["replicas"]}
                for address in self.replicas.keys() - listed:
                    del self.replicas[address]
                for each in value["replicas"]:
                    replica = self.replica(each["address"])
                    if not each["connected"]:
                        replica.problem = each["problem"] or "not connected"
            case "frame":
                self.replica(value["replica"]).add_frame(value)
            case "problem":
                self.replica(value["replica"]).problem = value["problem"]
            case "history":
                samples = self.replica(value["replica"]).samples
                samples.extend(each for each in value["samples"] if not samples or each["at"] > samples[-1]["at"])
            case _:
                """An event of a later version."""

    def replica(self, address: str) -> ReplicaNumbers:
        return self.replicas.setdefault(address, ReplicaNumbers(address))

    @property
    def is_known(self) -> bool:
        """Whether there are rates of each replica, or a reason why there are none."""
        return self.gateway is not None and all(
            each.rates is not None or each.problem is not None for each in self.replicas.values()
        )

    def health_of(self, replica: ReplicaNumbers) -> str:
        """One word, and the reason if it is not ready."""
        state = self._state_of(replica)
        if replica.problem is not None or state is None or not state["connected"]:
            return f"not connected: {replica.problem}" if replica.problem else "not connected"
        if state["ready"]:
            return "ready"
        return "drains" if replica.numbers and replica.numbers["draining"] else "no worker"

    def role_of(self, replica: ReplicaNumbers) -> str:
        """ ", prefill" or ", decode"; empty for both."""
        role = (self._state_of(replica) or {}).get("role") or "both"
        return "" if role == "both" else f", {role}"

    def _state_of(self, replica: ReplicaNumbers) -> Mapping[str, Any] | None:
        known = [] if self.gateway is None else self.gateway["replicas"]
        return next((each for each in known if each["address"] == replica.address), None)


def object_of(deployment: Deployment, replica: ReplicaNumbers) -> dict[str, Any]:
    """The known facts of a replica, for JSON: the feed's numbers, and rates per second."""
    return {
        "replica": replica.address,
        "health": deployment.health_of(replica),
        "rates": replica.rates,
        "first_token_ms": replica.first_token_ms,
        "numbers": replica.numbers,
    }


def milliseconds(value: float | None) -> str:
    """A readable time; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"


def line_of(deployment: Deployment, replica: ReplicaNumbers) -> str:
    """The numbers of a replica in one plain line."""
    health = deployment.health_of(replica)
    if replica.numbers is None:
        return f"replica {replica.address}: {health}"
    numbers, rates = replica.numbers, replica.rates or {}
    first_token = milliseconds(replica.first_token_ms)
    return (
        f"replica {replica.address}: {health}{deployment.role_of(replica)}, running {numbers['running_requests']}, "
        f"waiting {numbers['waiting_requests']}, swapped {numbers['swapped_requests']}, "
        f"{rates.get('generated_tokens', 0):.0f} tokens/s, first token {first_token}, "
        f"KV {replica.kv_use:.0%}, preemptions {numbers['preemptions']}{_drafts_of(numbers)}{_moves_of(numbers)}"
    )


def _moves_of(numbers: Mapping[str, Any]) -> str:
    """The blocks below the pool, and the moves, if there are any."""
    parts = {
        "{} blocks on disk": numbers.get("disk_blocks"),
        "{} fetched from disk": numbers.get("blocks_from_disk"),
        "{} from host memory": numbers.get("blocks_from_host"),
        "{} from replicas": numbers.get("blocks_from_replicas"),
        "{} requests moved in": numbers.get("requests_moved_in"),
        "{} requests moved out": numbers.get("requests_moved_out"),
    }
    return "".join(f", {text.format(f'{value:,}')}" for text, value in parts.items() if value)


def _drafts_of(numbers: Mapping[str, Any]) -> str:
    drafted = numbers.get("draft_tokens", 0)
    return f", drafts right {numbers['accepted_draft_tokens'] / drafted:.0%}" if drafted else ""
