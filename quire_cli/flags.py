"""The common part of the client commands: flags, and reading text."""

import sys
from dataclasses import dataclass
from pathlib import Path

from quire.client import BeamSearch, ClientTls, EarlyStopping, GenerationOptions
from quire.runtime.settings import ConfigurationError, setting

DEFAULT_ADDRESS = "127.0.0.1:50051"


def _one_text(text: str) -> tuple[str, ...]:
    return (text,)


@dataclass(frozen=True, slots=True)
class CredentialFlags:
    """Flags for calling the gateway."""

    # Every user of a machine can see the command lines of its processes.
    api_key: str | None = setting(None, "API key, if the gateway requires one; safer in the variable", metavar="KEY")
    tls: bool = setting(False, "use TLS; a public authority has signed the gateway's certificate")
    tls_ca_file: Path | None = setting(None, "use TLS; this authority has signed the gateway's certificate")
    tls_cert_file: Path | None = setting(None, "certificate of the caller, if the gateway requires one")
    tls_key_file: Path | None = setting(None, "key of that certificate")
    tls_server_name: str | None = setting(
        None,
        "name in the gateway's certificate, if it is not the host of the address",
        metavar="NAME",
    )

    def client_tls(self) -> ClientTls | None:
        """The TLS settings; None if no flag of TLS is given."""
        tls = ClientTls(self.tls_ca_file, self.tls_cert_file, self.tls_key_file, self.tls_server_name)
        return tls if self.tls or tls != ClientTls() else None


@dataclass(frozen=True, slots=True)
class ConnectionFlags(CredentialFlags):
    """Flags for the address of a gateway, or of several."""

    address: str = setting(
        DEFAULT_ADDRESS,
        "gRPC address of the gateway; of several, with commas, calls go to each in turn",
        metavar="HOST:PORT",
    )


@dataclass(frozen=True, slots=True)
class ModelFlags(ConnectionFlags):
    """Flags for the model."""

    # Not QUIRE_MODEL, which names a directory to the services.
    model: str | None = setting(
        None, "name of a served model; by default the only one", variable="QUIRE_SERVED_MODEL_NAME", metavar="NAME"
    )


@dataclass(frozen=True, slots=True)
class GenerationFlags(ModelFlags):
    """Flags for generation; without a flag the model's default holds."""

    max_tokens: int | None = setting(None, "maximum number of tokens to generate", minimum=1)
    temperature: float | None = setting(None, "0 is greedy", minimum=0)
    top_k: int | None = setting(None, "keep the k most likely tokens", minimum=0)
    top_p: float | None = setting(None, "keep the most likely tokens up to this probability")
    min_p: float | None = setting(None, "drop tokens less likely than this share of the most likely one")
    seed: int | None = setting(None, "same seed, same tokens", minimum=0)
    stop: tuple[str, ...] = setting((), "end before this text; may be repeated", parse=_one_text, metavar="TEXT")
    ignore_eos: bool = setting(False, "continue after the model's end of text")
    beam_width: int | None = setting(
        None, "number of beams, for beam search instead of sampling; shows the best", minimum=1
    )
    length_penalty: float | None = setting(
        None, "beam search divides log probabilities by length to this power; above 0 favours long answers"
    )
    early_stopping: str | None = setting(
        None, "when a beam search ends", choices=tuple(each.value for each in EarlyStopping)
    )

    def __post_init__(self) -> None:
        for flag, value in (("--length-penalty", self.length_penalty), ("--early-stopping", self.early_stopping)):
            if value is not None and self.beam_width is None:
                raise ValueError(f"{flag} is for beam search, which needs --beam-width")

    def options(self) -> GenerationOptions:
        return GenerationOptions(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            ignore_eos=self.ignore_eos or None,
            beam_search=self._beam_search(),
        )

    def _beam_search(self) -> BeamSearch | None:
        if self.beam_width is None:
            return None
        early_stopping = None if self.early_stopping is None else EarlyStopping(self.early_stopping)
        return BeamSearch(self.beam_width, self.length_penalty, early_stopping)


def read_text(file: str) -> str:
    """A whole text; - is stdin. ConfigurationError if it cannot be read or is not UTF-8."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise not_utf8("stdin" if file == "-" else file, error) from error


def read_lines(file: str) -> list[str]:
    """The lines of a text, also blank ones; - is stdin. ConfigurationError if there is none, or as `read_text`."""
    text = read_text(file).removesuffix("\n")
    if not text:
        raise ConfigurationError(f"{'stdin' if file == '-' else file} holds no text")
    return text.split("\n")


def not_utf8(name: str, error: UnicodeDecodeError) -> ConfigurationError:
    return ConfigurationError(f"{name} is not UTF-8: {error}")
