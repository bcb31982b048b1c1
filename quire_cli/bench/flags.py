"""The flags of `quire bench`.

Classes that are combined have no slots: Python can combine at most one class with slots.
"""

import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quire.load import LoadResult, Slo
from quire.load.plots import SUFFIXES, check_picture
from quire.runtime.settings import ConfigurationError, setting
from quire_cli.flags import CredentialFlags

DATASETS = ("sharegpt", "alpaca", "fixed", "shared-prefix", "chat")
DEFAULT_VOCAB_SIZE = 1000
DEFAULT_MAX_MODEL_LEN = 2048
DEFAULT_NUM_REQUESTS = 100
TRACE = "trace"
"""A rate: use the times of arrival of a file."""
_MIN_RATE, _MAX_RATE = 1e-4, 1e6
MAX_REQUESTS = 1_000_000
"""Maximum requests of a run: their prompts are in memory, about 1 kB each."""
_MAX_LEN = 1 << 24
_MAX_SEQUENCES = 65_536
MAX_SECONDS = 7 * 86_400.0

_DATASETS_OF = {
    "prompt_len": ("fixed", "shared-prefix"),
    "length_scale": ("sharegpt", "alpaca", "chat"),
    "prefix_len": ("shared-prefix",),
    "num_prefixes": ("shared-prefix",),
    "mean_turns": ("chat",),
    "turn_delay": ("chat",),
    "max_prompt_len": ("chat",),
}
"""The flags that apply to some datasets only."""


def _rates(text: str) -> tuple[float | str, ...]:
    rates: list[float | str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part == TRACE:
            rates.append(part)
            continue
        try:
            rate = float(part)
        except ValueError:
            rate = math.nan
        if not rate > 0:
            raise ValueError(f"{part} is no rate; expected numbers above 0, inf or {TRACE}, with commas")
        if rate != math.inf and not _MIN_RATE <= rate <= _MAX_RATE:
            raise ValueError(f"{part} is not in [{_MIN_RATE:g}, {_MAX_RATE:,.0f}]; inf sends all at once")
        rates.append(rate)
    if not rates:
        raise ValueError(f"it is empty; expected numbers above 0, inf or {TRACE}, with commas")
    return tuple(rates)


def _one_path(text: str) -> tuple[Path]:
    return (Path(text),)


def _picture(text: str) -> Path:
    if not text.endswith(SUFFIXES):
        raise ValueError(f"expected a file that ends in {' or '.join(SUFFIXES)}")
    return Path(text)


@dataclass(frozen=True)
class DatasetFlags:
    """The requests; a longer load begins as a shorter one, and the same seed gives the same."""

    dataset: str = setting(
        "sharegpt",
        f"lengths of prompts and outputs: {', '.join(DATASETS)}, or a file of JSON lines with prompt or messages, and "
        "optionally output_len and arrival_s",
        metavar="NAME|FILE",
    )
    seed: int = setting(0, "same seed, same requests", minimum=0)
    prompt_len: int | None = setting(
        None,
        "tokens of a prompt: fixed (128), shared-prefix (as ShareGPT's)",
        minimum=1,
        maximum=_MAX_LEN,
        metavar="TOKENS",
    )
    output_len: int | None = setting(
        None,
        "tokens of an output: fixed (128), shared-prefix (as ShareGPT's), lines of a file that do not say",
        minimum=1,
        maximum=_MAX_LEN,
        metavar="TOKENS",
    )
    length_scale: float | None = setting(
        None, "sharegpt, alpaca, chat: factor by which lengths are scaled (1)", minimum=0.001, maximum=1000
    )
    prefix_len: int | None = setting(
        None, "shared-prefix: tokens that prompts begin with (256)", minimum=1, maximum=_MAX_LEN
    )
    num_prefixes: int | None = setting(None, "shared-prefix: different beginnings (1)", minimum=1, maximum=MAX_REQUESTS)
    mean_turns: float | None = setting(
        None, "chat: mean turns of a conversation, which has at most 20 (3.5)", minimum=1, maximum=20
    )
    turn_delay: float | None = setting(
        None,
        "chat: mean seconds from an answer to the next message (0)",
        minimum=0,
        maximum=MAX_SECONDS,
        metavar="SECONDS",
    )
    max_prompt_len: int | None = setting(
        None, "chat: tokens that a prompt keeps of its history (half of what the model takes)", minimum=1
    )
    n: int = setting(1, "parallel samples, or best beams, of each request", minimum=1, maximum=_MAX_SEQUENCES)
    beam_width: int | None = setting(
        None, "beam search with this many beams instead of sampling", minimum=1, maximum=_MAX_SEQUENCES
    )
    max_model_len: int | None = setting(
        None,
        f"longest prompt and output together (the server's, or {DEFAULT_MAX_MODEL_LEN})",
        variable="QUIRE_BENCH_MAX_MODEL_LEN",
        minimum=2,
        maximum=_MAX_LEN,
        metavar="TOKENS",
    )
    vocab_size: int | None = setting(
        None, f"token ids of prompts are below (the server's, or {DEFAULT_VOCAB_SIZE})", minimum=11, maximum=1 << 30
    )

    def __post_init__(self) -> None:
        for name, datasets in _DATASETS_OF.items():
            if getattr(self, name) is not None and self.dataset not in datasets:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is for {', '.join(datasets)}; --dataset is {self.dataset}")
        if self.output_len is not None and self.dataset in ("sharegpt", "alpaca", "chat"):
            raise ValueError(f"--output-len is for fixed, shared-prefix and files; --dataset is {self.dataset}")
        if self.beam_width is not None and self.n > self.beam_width:
            raise ValueError(f"--n is {self.n}; it must be at most --beam-width, {self.beam_width}")
        if self.n > 1 and self.dataset == "chat":
            raise ValueError(f"--n is {self.n}; it must be 1 for chat, whose next turn carries one answer")


@dataclass(frozen=True)
class ArrivalFlags:
    """When requests are sent"""

    request_rate: tuple[float | str, ...] = setting(
        (),
        "requests a second, or conversations; several are run one after the other; inf sends all at once, "
        f"{TRACE} takes the times of a file (inf, or {TRACE} if the file has times)",
        parse=_rates,
        metavar="RATE,...",
    )
    burstiness: float = setting(1.0, "shape of the gamma distribution of gaps; 1 is Poisson, less comes in bursts")
    max_concurrency: tuple[int, ...] = setting(
        (), "requests, or conversations, that run at once; several are run one after the other", metavar="N,...",
        minimum=1,
    )  # fmt: skip
    num_requests: int | None = setting(
        None, f"requests of each run ({DEFAULT_NUM_REQUESTS}, or all of a file)", minimum=1, maximum=MAX_REQUESTS
    )
    duration: float | None = setting(
        None,
        "seconds during which requests are sent, instead of their number",
        minimum=0.001,
        maximum=MAX_SECONDS,
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        if self.num_requests is not None and self.duration is not None:
            raise ValueError("--num-requests and --duration are both given; give one of them")
        if self.duration is not None and math.inf in (self.request_rate or (math.inf,)) and not self.max_concurrency:
            raise ValueError(
                "--duration with a rate of inf needs --max-concurrency: all requests would be sent at once"
            )
        finite = [rate for rate in self.request_rate if isinstance(rate, float) and rate != math.inf]
        if self.duration is not None and (num := max(finite, default=0.0) * self.duration) > MAX_REQUESTS:
            raise ValueError(
                f"--request-rate {max(finite):g} for a --duration of {self.duration:g} s are {num:,.0f} requests; "
                f"a run has at most {MAX_REQUESTS:,}"
            )
        if not self.burstiness > 0:
            raise ValueError(f"--burstiness is {self.burstiness:g}; it must be above 0")
        if self.burstiness != 1 and not any(rate not in (math.inf, TRACE) for rate in self.request_rate):
            raise ValueError("--burstiness shapes arrivals at a rate; give --request-rate a number")


@dataclass(frozen=True)
class LoadFlags(DatasetFlags, ArrivalFlags):
    """The report"""

    slo: Slo | None = setting(
        None,
        "limits that a good request keeps, of ttft, tpot, itl, e2e and normalized",
        parse=Slo.parse,
        metavar="ttft=500ms,tpot=50ms",
    )
    out: Path | None = setting(None, "write the result as JSON", metavar="FILE.json")
    plot: Path | None = setting(None, "draw latency against rate", parse=_picture, metavar="FILE.svg|png")
    name: str | None = setting(None, "name of this result in pictures (by default the measurement)", metavar="TEXT")

    def __post_init__(self) -> None:
        DatasetFlags.__post_init__(self)
        ArrivalFlags.__post_init__(self)

    def given(self) -> dict[str, Any]:
        """The flags that are not at their defaults, without keys, as JSON has them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {each.name: values[each.name] for each in fields(self) if values[each.name] != each.default}
        return {
            "url" if name == "address" else name: _as_json(value)
            for name, value in changed.items()
            if name not in ("api_key", "tls_key_file", "out", "plot", "name")
        }

    def check_output(self) -> None:
        """Checks before a run, which may take long, that its result can be written. Raises ConfigurationError."""
        if self.plot is not None:
            check_picture(self.plot)
        for path in (self.out, self.plot):
            if path is not None:
                check_writable(path)

    def write(self, result: LoadResult, draw: Callable[[Path], object], program: str) -> bool:
        """Writes `--out` and `--plot`. Prints a line for one that cannot be written, and returns whether all are."""
        writes = ((self.out, result.write), (self.plot, draw))
        is_written = [path is None or try_to_write(path, write, program) for path, write in writes]
        return all(is_written)


@dataclass(frozen=True)
class BenchFlags(LoadFlags, CredentialFlags):
    """Sends requests to a server and reports its latencies and throughput. `quire bench plot` draws results of earlier
    runs."""

    backend: str = setting("grpc", "protocol of the server", choices=("grpc", "openai"))
    address: str | None = setting(
        None,
        "the server: HOST:PORT of gRPC (127.0.0.1:50051), or http://HOST:PORT of an OpenAI API (http://127.0.0.1:8000)",
        aliases=("--url",),
        variable="QUIRE_URL",
        metavar="URL",
    )
    endpoint: str | None = setting(
        None, "openai: the called API (completions, and chat for messages)", choices=("completions", "chat")
    )
    model: str | None = setting(
        None, "name of a served model; none is the only one", variable="QUIRE_SERVED_MODEL_NAME", metavar="NAME"
    )
    temperature: float | None = setting(None, "of sampling (0, and 1 with --n)", minimum=0, maximum=100)
    top_p: float | None = setting(None, "of sampling: the share of probability that is kept", minimum=0.001, maximum=1)
    top_k: int | None = setting(None, "of sampling: how many tokens are kept", minimum=1, maximum=1 << 30)
    ignore_eos: bool = setting(True, "outputs have the drawn length, even if the model ends earlier")
    warm_up_requests: int = setting(4, "requests before the first run that are not counted", minimum=0, maximum=1000)
    request_timeout: float = setting(
        600.0, "seconds until a request fails", minimum=0.001, maximum=MAX_SECONDS, metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.endpoint is not None and self.backend != "openai":
            raise ValueError(f"--endpoint is for --backend openai; it is {self.backend}")
        if self.n > 1 and self.beam_width is None and self.temperature == 0:
            raise ValueError("--temperature is 0 and --n above 1: all samples would be the same")
        for name in ("top_p", "top_k"):
            if getattr(self, name) is not None and not self.sampling["temperature"]:
                raise ValueError(f"--{name.replace('_', '-')} changes nothing where --temperature is 0")

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling parameters of all requests except beam searches, by their names in OpenAI's and Quire's API."""
        is_drawn = self.n > 1 and self.beam_width is None
        temperature = float(is_drawn) if self.temperature is None else self.temperature
        chosen = {"temperature": temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in chosen.items() if value is not None}


@dataclass(frozen=True, slots=True)
class PlotFlags:
    """Draws several results of `quire bench` and `quire simulate` into one picture."""

    files: tuple[Path, ...] = setting((), "results", parse=_one_path, positional=True, metavar="FILE.json")
    plot: Path = setting(Path("bench.svg"), "the picture", parse=_picture, metavar="FILE.svg|png")


def try_to_write(path: Path, write: Callable[[Path], object], program: str) -> bool:
    """Whether the file is written; if not, as on a full disk, prints a line that says so."""
    try:
        write(path)
    except OSError as error:
        print(f"{program}: error: cannot write {path}: {error.strerror or error}", file=sys.stderr)
        return False
    return True


def check_writable(path: Path) -> None:
    """Makes the directory of a file. Raises ConfigurationError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from None
    if path.is_dir():
        raise ConfigurationError(f"cannot write {path}: it is a directory")
    if path.exists() and not path.is_file():
        if not os.access(path, os.W_OK):
            raise ConfigurationError(f"cannot write {path}: it may not be written to")
        return
    try:
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from None


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _as_json(each) for name, each in value.items()}
    return value if isinstance(value, str | int | float | bool) and value != math.inf else str(value)
