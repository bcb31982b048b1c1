"""Traffic as values: what clients ask for, and when."""

from dataclasses import dataclass
from random import Random

NUM_SPECIAL_TOKENS = 16
VOCAB_SIZE = 250


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for at a time, in seconds since the world's beginning.

    Attributes:
        number: Names it in its world; what follows from it is the same where other requests are left out.
        leaves_after_s: When its client leaves; None where it waits for the end.
    """

    number: int
    at: float
    prompt: tuple[int, ...]
    max_tokens: int
    num_sequences: int = 1
    tenant: str = ""
    priority: int = 0
    leaves_after_s: float | None = None


def draw_requests(draw: Random, over_s: float) -> tuple[Request, ...]:
    """Requests within so many seconds; many begin alike, and some clients leave."""
    count = draw.choice((4, 12, 12, 30))
    stems = [[_draw_token(draw) for _ in range(64)] for _ in range(draw.choice((1, 4)))]
    return tuple(_draw_request(draw, number, draw.uniform(0, over_s), stems) for number in range(count))


def _draw_request(draw: Random, number: int, at: float, stems: list[list[int]]) -> Request:
    prompt = draw.choice(stems)[: draw.choice((0, 7, 33, 64, 64))]
    prompt = prompt + [_draw_token(draw) for _ in range(draw.choice((0, 1, 2, 40)) or not prompt)]
    return Request(
        number,
        at,
        tuple(prompt),
        max_tokens=draw.randrange(1, 60),
        num_sequences=draw.choice((1, 1, 2, 3)),
        tenant=draw.choice(("", "a", "b")),
        priority=draw.choice((0, 0, 1, -1)),
        leaves_after_s=draw.choice((None, None, None, draw.uniform(0, 3))),
    )


def _draw_token(draw: Random) -> int:
    return draw.randrange(NUM_SPECIAL_TOKENS, VOCAB_SIZE)
