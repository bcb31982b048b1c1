"""Traffic as values: the requests of clients, their times, and the clients' behaviour."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random

from quire.client import BeamSearch, Constraint, EarlyStopping, GenerationOptions

NUM_SPECIAL_TOKENS = 16
EOS_TOKEN_ID = 2
VOCAB_SIZE = 250
MAX_MODEL_LEN = 256
_MAX_PROMPT, MAX_OUTPUT = 104, 60
ADAPTERS = ("adapter-1", "adapter-2", "adapter-3")
_DEADLY_SEED = 666_000
_DEADLY_PATTERN = "[q-t]+"
LONGEST = _MAX_PROMPT + MAX_OUTPUT
"""Maximum number of tokens in a sequence of a drawn request."""


class Kind(Enum):
    """The subject of a world. In a mixture, rare coincidences stay rare; so most worlds have much of one thing."""

    MIXED = "a little of everything"
    TIGHT = "pools too small for what runs at once"
    NETWORK = "connections that break under streams"
    RESTARTS = "processes that end"
    CALM = "nothing breaks"


@dataclass(frozen=True, slots=True)
class Tenant:
    """The holder of an API key, and the limits of the key."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    @property
    def limits(self) -> dict[str, int | None]:
        names = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
        return {name: getattr(self, name) for name in names}


TENANTS = (
    Tenant("ann"),
    Tenant("bob"),
    Tenant("metered", tokens_per_minute=1500),
    Tenant("limited", requests_per_minute=6, max_concurrent_requests=2),
)
TENANT = {each.name: each for each in TENANTS}
OPERATOR = Tenant("operator")
"""A tenant that asks for no tokens."""


class Verb(Enum):
    """How a client asks for tokens."""

    GENERATE = "generate"
    STREAM = "stream"
    DURABLE = "durable stream"
    CHAT = "chat"
    CHAT_STREAM = "chat stream"
    DURABLE_CHAT = "durable chat stream"

    @property
    def is_chat(self) -> bool:
        return self in (Verb.CHAT, Verb.CHAT_STREAM, Verb.DURABLE_CHAT)

    @property
    def is_durable(self) -> bool:
        return self in (Verb.DURABLE, Verb.DURABLE_CHAT)


class Front(Enum):
    """An API over HTTP, by its path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True)
class Generate:
    """A request for tokens at a time, in seconds since the world's beginning.

    Attributes:
        number: Identifies it in its world; its draws stay the same if other requests are left out.
        client: The host that asks.
        timeout_s: The deadline of the call.
        leaves_after_s: When its client leaves; None if it waits for the end.
        cancels_after_s: When another call of the tenant cancels it by its id.
        pause_s: Seconds that its client takes for each event.
        taken_over_after_s: When another call resumes its durable stream, from the client's position at that time.
        num_takeovers: Number of successive calls that do so.
        leaves_at_wait: Its client leaves when the n-th wait of its call at a gateway ends; None if it stays.
        takeovers_leave_at: The same of each call that resumes the stream.
        adapter: The name of the adapter that it chooses.
        deadly_at: The position of a token whose computation kills the worker; None if there is none.
        front: The API of a call over HTTP, with or without a stream; None if the call does not use HTTP.
        others: Further prompts of its call, whose answer has the sequences of all prompts.
        returns_after: Number of events of a durable stream over HTTP after which its client leaves and comes back for
            the rest, through any gateway; None if it stays.
    """

    number: int
    at: float
    client: str
    tenant: str
    prompt: tuple[int, ...]
    options: GenerationOptions = field(default_factory=GenerationOptions)
    verb: Verb = Verb.STREAM
    priority: int = 0
    timeout_s: float | None = None
    leaves_after_s: float | None = None
    cancels_after_s: float | None = None
    pause_s: float = 0.0
    taken_over_after_s: float | None = None
    num_takeovers: int = 1
    deadly_at: int | None = None
    adapter: str | None = None
    front: Front | None = None
    others: tuple[tuple[int, ...], ...] = ()
    returns_after: int | None = None
    leaves_at_wait: int | None = None
    takeovers_leave_at: tuple[int | None, ...] = ()

    @property
    def request_id(self) -> str:
        return f"request-{self.number}"

    @property
    def parts(self) -> "dict[str, Generate]":
        """The requests that its gateway makes of it, one for each prompt, by their ids."""
        if not self.others:
            return {self.request_id: self}
        prompts = (self.prompt, *self.others)
        return {
            f"{self.request_id}-{place}": replace(self, prompt=each, others=()) for place, each in enumerate(prompts)
        }

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.others))

    @property
    def num_returned(self) -> int:
        return (self.options.n or 1) * (1 + len(self.others))

    @property
    def needs(self) -> set[str | None]:
        """The preparations that a worker makes for it: an adapter by name, a constraint by pattern."""
        constraint = self.options.constraint
        return {self.adapter, None if constraint is None else constraint.regex}

    @property
    def chooses(self) -> bool:
        """Whether its sequences are chosen at the end."""
        return self.options.beam_search is not None or (self.options.best_of or 1) > (self.options.n or 1)


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that a client pins, and perhaps unpins."""

    number: int
    at: float
    client: str
    tenant: str
    prompt: tuple[int, ...]
    time_to_live_ms: int
    unpins_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Tokenize:
    """A text that a client tokenizes, and whose tokens it detokenizes."""

    number: int
    at: float
    client: str
    tenant: str
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mistake:
    """A wrong call over HTTP, which must be refused."""

    number: int
    at: float
    client: str
    tenant: str
    front: Front
    what: str


Request = Generate | Pin | Tokenize | Mistake


@dataclass(frozen=True, slots=True)
class Mood:
    """Common properties of the requests of one world."""

    kind: Kind
    count: int
    over_s: float
    stems: Sequence[Sequence[int]]
    clients: Sequence[str]
    tenants: Sequence[str]
    max_sequences: int


def draw_requests(
    draw: Random, kind: Kind, clients: Sequence[str], pool_tokens: int, over_s: float
) -> tuple[Request, ...]:
    """Requests within `over_s` seconds, many with a common prefix. Each fits the pool of a replica."""
    mood = Mood(
        kind=kind,
        count=draw.choice((10, 20) if kind is Kind.TIGHT else (4, 10, 10, 20)),
        over_s=over_s,
        stems=[[_token(draw) for _ in range(64)] for _ in range(draw.choice((1, 4)))],
        clients=clients,
        tenants=draw.choice((("ann",), ("ann", "bob"), ("ann", "bob", "metered", "limited"))),
        max_sequences=min(4, pool_tokens // LONGEST),
    )
    match draw.choice(("mixed", "mixed", "mixed", "flood", "followers")):
        case "flood":
            # One tenant makes many requests at once, and others a few.
            count = mood.count + 10
            flood = [_generate(draw, number, mood, at=0.0) for number in range(count)]
            few = [_generate(draw, count + number, mood) for number in range(3)]
            return tuple(
                [replace(each, tenant="bob") for each in flood] + [replace(each, tenant="ann") for each in few]
            )
        case "followers":
            # One long prompt, and requests that wait for its blocks.
            stem = tuple(_token(draw) for _ in range(_MAX_PROMPT - 2))
            first = _generate(draw, 0, mood, at=0.0)
            rest = [_generate(draw, number, mood, at=draw.uniform(0, 0.05)) for number in range(1, mood.count)]
            last = [(_token(draw),) if draw.random() < 0.5 else () for _ in range(mood.count)]
            return tuple(
                replace(each, prompt=stem + end, tenant="ann") for each, end in zip([first, *rest], last, strict=True)
            )
        case _:
            return tuple(_request(draw, number, mood) for number in range(mood.count))


def grown(draw: Random, requests: Sequence[Request]) -> tuple[Request, ...]:
    """The same requests almost at once, with prompts so short that many run together before they fill the pool."""
    return tuple(
        replace(each, at=draw.uniform(0, 0.03), prompt=each.prompt[: draw.randint(1, 9)])
        if isinstance(each, Generate)
        else each
        for each in requests
    )


def with_takeovers(draw: Random, requests: Sequence[Request]) -> tuple[Request, ...]:
    """Makes more of the streams durable, and adds calls that take them over from each other."""
    changed: list[Request] = []
    for each in requests:
        if isinstance(each, Generate) and each.verb in (Verb.STREAM, Verb.DURABLE, Verb.DURABLE_CHAT):
            verb = Verb.DURABLE if each.verb is Verb.STREAM else each.verb
            after_s, count = draw.uniform(0, draw.choice((0.1, 1.0))), draw.randint(1, 4)
            each = replace(each, verb=verb, taken_over_after_s=after_s, num_takeovers=count)
        changed.append(each)
    return tuple(changed)


def with_adapters(draw: Random, requests: Sequence[Request]) -> tuple[Request, ...]:
    """Some of the requests choose an adapter."""
    names = draw.sample(ADAPTERS, draw.randint(1, len(ADAPTERS)))
    return tuple(
        replace(each, adapter=draw.choice((None, *names)))
        if isinstance(each, Generate) and each.front is None
        else each
        for each in requests
    )


def with_constraints(draw: Random, requests: Sequence[Request]) -> tuple[Request, ...]:
    """Many of the requests have a constraint."""
    changed: list[Request] = []
    for each in requests:
        if isinstance(each, Generate) and each.options.beam_search is None and draw.random() < 0.7:
            constraint = Constraint(regex=f"[{draw.choice('abcdef')}-{draw.choice('pqrs')}]+")
            options = replace(each.options, constraint=constraint, ignore_eos=None, stop_token_ids=())
            each = replace(each, options=options)
        changed.append(each)
    return tuple(changed)


def with_deadly(draw: Random, requests: Sequence[Request]) -> tuple[Request, ...]:
    """One of the requests kills each worker that computes a certain token of its first sequence."""
    changed = list(requests)
    mortal = [each for each in requests if isinstance(each, Generate) and each.options.beam_search is None]
    if mortal:
        request = draw.choice(mortal)
        last = len(request.prompt) + (request.options.max_tokens or 1)
        options = replace(request.options, seed=_DEADLY_SEED + request.number)
        changed[changed.index(request)] = replace(request, options=options, deadly_at=draw.randrange(last))
    return tuple(changed)


def with_deadly_need(draw: Random, requests: Sequence[Request]) -> tuple[tuple[Request, ...], str | None]:
    """Some requests need an adapter or a constraint that kills each worker that prepares it. Also returns its name or
    pattern; None if no request could need one."""
    if adapters := sorted({each.adapter for each in requests if isinstance(each, Generate) and each.adapter}):
        return tuple(requests), draw.choice(adapters)
    changed = list(requests)
    mortal = [
        each for each in requests if isinstance(each, Generate) and not each.front and each.options.beam_search is None
    ]
    for request in draw.sample(mortal, min(len(mortal), draw.randint(1, 3))):
        constraint = Constraint(regex=_DEADLY_PATTERN)
        options = replace(request.options, constraint=constraint, ignore_eos=None, stop_token_ids=())
        changed[changed.index(request)] = replace(request, options=options)
    return tuple(changed), _DEADLY_PATTERN if mortal else None


def _request(draw: Random, number: int, mood: Mood) -> Request:
    at, client, tenant = draw.uniform(0, mood.over_s), draw.choice(mood.clients), draw.choice(mood.tenants)
    match draw.choice(("generate",) * 8 + ("pin", "tokenize")):
        case "pin":
            lasts_ms, ends_s = draw.choice((200, 5_000, 60_000)), draw.choice((None, draw.uniform(0, 5)))
            return Pin(number, at, client, tenant, _prompt(draw, mood), lasts_ms, ends_s)
        case "tokenize":
            return Tokenize(number, at, client, tenant, _prompt(draw, mood))
        case _:
            return _generate(draw, number, mood)


def _generate(draw: Random, number: int, mood: Mood, at: float | None = None) -> Generate:
    sampled, is_tight = draw.random() < 0.5, mood.kind is Kind.TIGHT
    is_long = is_tight or mood.kind is Kind.NETWORK
    options = GenerationOptions(
        temperature=draw.choice((0.5, 1.0)) if sampled else 0.0,
        top_k=draw.choice((None, 40)),
        seed=draw.randrange(1 << 64) if sampled else None,
        max_tokens=draw.randrange(MAX_OUTPUT // 2 if is_long else 1, MAX_OUTPUT + 1),
        ignore_eos=True if is_tight else draw.choice((None, True)),
        stop_token_ids=tuple(_token(draw) for _ in range(draw.choice((0, 0, 0, 8)))),
        logprobs=draw.choice((None, None, 0, 3)),
        prompt_logprobs=draw.choice((None, None, None, None, 0, 2)),
    )
    often = Verb.DURABLE if mood.kind is Kind.RESTARTS else Verb.STREAM
    verb = draw.choice((Verb.GENERATE, often, often, Verb.DURABLE, Verb.DURABLE, Verb.CHAT))
    if verb is Verb.CHAT:
        verb = draw.choice((Verb.CHAT, Verb.CHAT_STREAM, Verb.DURABLE_CHAT))
    options = _with_sequences(draw, options, mood)
    return Generate(
        number,
        draw.uniform(0, mood.over_s) if at is None else at,
        draw.choice(mood.clients),
        draw.choice(mood.tenants),
        _prompt(draw, mood),
        options,
        verb,
        priority=draw.choice((0, 0, 1, -1)),
        timeout_s=draw.choice((None, None, None, draw.uniform(0.01, 4))),
        leaves_after_s=draw.choice((None, None, None, None, draw.uniform(0, 3))),
        cancels_after_s=draw.choice((None,) * 7 + (draw.uniform(0, 2),)),
        pause_s=draw.choice((0.0, 0.0, 0.0, draw.uniform(0, 0.5))),
        taken_over_after_s=draw.choice((None, None, draw.uniform(0, 0.3))) if verb.is_durable else None,
    )


def _with_sequences(draw: Random, options: GenerationOptions, mood: Mood) -> GenerationOptions:
    """One sequence, several, the best of several, or a beam search; stop strings where they may be."""
    several = draw.randint(1, mood.max_sequences)
    is_tight = mood.kind is Kind.TIGHT
    match draw.choice((*(("several",) if is_tight else ("one", "one")), "one", "several", "best", "beams")):
        case "several":
            options = replace(options, n=several)
        case "best":
            options = replace(options, n=draw.randint(1, several), best_of=several)
        case "beams":
            beams = BeamSearch(
                several,
                length_penalty=draw.choice((None, 0.0, 2.0)),
                early_stopping=draw.choice((None, EarlyStopping.TRUE, EarlyStopping.NEVER)),
            )
            return replace(
                options, n=draw.randint(1, several), beam_search=beams, temperature=0.0, top_k=None, seed=None
            )
        case _:
            pass
    if draw.random() < 0.1:
        pattern = Constraint(regex=draw.choice(("[a-e]+", "[c-p]+", "[x-z]+")))
        options = replace(options, constraint=pattern, ignore_eos=None, stop_token_ids=())
    if options.best_of in (None, options.n) and draw.random() < (0.5 if is_tight else 0.3):
        return replace(options, stop=tuple(draw.choice("abcdefgh") for _ in range(4)))
    return options


def _prompt(draw: Random, mood: Mood) -> tuple[int, ...]:
    stem = list(draw.choice(mood.stems)[: draw.choice((0, 7, 33) if mood.kind is Kind.TIGHT else (0, 7, 33, 64, 64))])
    return tuple(stem + [_token(draw) for _ in range(draw.choice((0, 1, 2, 40)) or not stem)])


def _token(draw: Random) -> int:
    return draw.randrange(NUM_SPECIAL_TOKENS, VOCAB_SIZE)
