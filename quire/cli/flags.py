"""Flags that the client commands share."""

from dataclasses import dataclass

from quire.client import GenerationOptions
from quire.settings import setting


def _one_text(text: str) -> tuple[str, ...]:
    return (text,)


@dataclass(frozen=True, slots=True)
class ConnectionFlags:
    """Where the gateway is."""

    address: str = setting("127.0.0.1:50051", "gRPC address of the gateway", metavar="HOST:PORT")


@dataclass(frozen=True, slots=True)
class GenerationFlags(ConnectionFlags):
    """How to generate; what is not given is the model's choice."""

    # Not QUIRE_MODEL, which names a directory to the services.
    model: str | None = setting(
        None, "name of a served model; none is the only one", variable="QUIRE_SERVED_MODEL_NAME", metavar="NAME"
    )
    max_tokens: int | None = setting(None, "most tokens to generate", minimum=1)
    temperature: float | None = setting(None, "0 is greedy", minimum=0)
    top_k: int | None = setting(None, "keep the k most likely tokens", minimum=0)
    top_p: float | None = setting(None, "keep the most likely tokens up to this probability")
    min_p: float | None = setting(None, "drop tokens less likely than this share of the most likely one")
    seed: int | None = setting(None, "same seed, same tokens", minimum=0)
    stop: tuple[str, ...] = setting((), "end before this text; may be repeated", parse=_one_text, metavar="TEXT")
    ignore_eos: bool = setting(False, "go on after the model's end of text")

    def options(self) -> GenerationOptions:
        """The same as the client takes it."""
        return GenerationOptions(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            ignore_eos=self.ignore_eos or None,
        )
