"""Requests as the core sees them, and the checks that accept them."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple, NewType

from quire.messages.prefix_hashes import PrefixHash, root_hash
from scheduler_svc.core.beam_search import BeamParameters, num_candidates
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.moves import KvSource


class RefusedError(ValueError):
    """A request that is rejected; nothing was changed. Each message names the thing, its value and the limit.

    RefusedError(ValueError)
    ├── NeverFitsError     the request could not run even with the whole pool to itself
    ├── QueueFullError     too many requests or tokens are waiting; come back later
    ├── NoAdaptersError    it has an adapter, and the workers have no slots for any
    ├── PinQuotaError      the tenant, or all tenants together, would pin too many blocks
    └── DuplicateKeyError  the client has a live request with this handle
    """


class NeverFitsError(RefusedError):
    pass


class QueueFullError(RefusedError):
    pass


class NoAdaptersError(RefusedError):
    pass


class PinQuotaError(RefusedError):
    pass


class DuplicateKeyError(RefusedError):
    pass


MAX_PRIORITY = 100
"""Priorities are from the negative of this to this; higher goes first."""

ClientId = NewType("ClientId", int)
"""One connection of a gateway."""

Handle = NewType("Handle", int)
"""A gateway's own number for one of its live requests."""


class RequestKey(NamedTuple):
    """Identifies a live request. A tuple, since every table of requests hashes it."""

    client: ClientId
    handle: Handle


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter, identified by its digest. Its directory on workers and its name at gateways are only carried."""

    digest: bytes
    directory: str = field(default="", compare=False)
    name: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint that workers compile, identified by the sampling parameters that contain it."""

    parameters: bytes


@dataclass(frozen=True, slots=True)
class MovedBlocks:
    """Blocks of one request that workers fetch from another replica or a tier."""

    key: RequestKey


Need = Constraint | Adapter | MovedBlocks
"""A thing that workers prepare before rows use it."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the worker draws a sequence's tokens: the gateway's `parameters`, which the core carries and never reads, and
    the fields that the core decides on or sets for each sequence."""

    seed: int
    parameters: bytes = b""
    """As the gateway wrote them for the worker."""
    logprobs: int | None = None
    """Report the chosen token and this many of the most likely ones; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for each prompt token from `prompt_logprobs_start` on."""
    prompt_logprobs_start: int = 1
    """At least 1: the first token of a prompt has no log probability."""
    num_candidates: int | None = None
    """Draw no token, but report this many of the most likely ones: the scheduler chooses."""


@dataclass(frozen=True, slots=True)
class EmittedSequence:
    """Output tokens of one sequence that an earlier scheduler produced already, and whether it ended with them."""

    token_ids: SequenceOf[int]
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, the number of sequences to sample from it, and the conditions to stop.

    `num_sequences` are sampled (`best_of`), and the `num_returned` (`n`) with the highest mean log probability are
    delivered. With `beam`, sequences are the beams of a search, one for each of its width, and the `num_returned` best
    hypotheses are delivered. `emitted` is empty, or holds the tokens of each sequence that an earlier scheduler
    produced: generation continues after them, and they count against `max_tokens`. A request that was
    `accepted_before`, by this scheduler or an earlier one, is exempt from the queue's bounds. `stop_token_ids` holds
    the model's eos ids too. Cached prefixes are shared within a tenant. Another replica, at `source`, may have blocks
    of the request. `traceparent` is passed on to the workers unchanged. With `has_constraint` the sampling parameters
    contain a constraint, which workers compile. `adapter` is None for the base model. `cache_salt` is a salt's digest,
    empty without a salt.
    An offer (`is_offer`) never runs: its request runs at another replica, and the offer waits here in its place until
    there is room, which is then kept. The request itself arrives later, `replaces` the offer with that handle, and gets
    its place.
    """

    key: RequestKey
    request_id: str
    prompt: SequenceOf[int]
    sampling: RowSampling
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    emitted: SequenceOf[EmittedSequence] = ()
    tenant: str = ""
    num_sequences: int = 1
    num_returned: int = 1
    priority: int = 0
    beam: BeamParameters | None = None
    traceparent: str | None = None
    accepted_before: bool = False
    has_constraint: bool = False
    adapter: Adapter | None = None
    cache_salt: bytes = b""
    source: KvSource | None = None
    is_offer: bool = False
    replaces: Handle | None = None

    @property
    def cache_root(self) -> PrefixHash:
        """The root of the hashes of its blocks: different tenants, adapters or salts share no blocks."""
        return cache_root(self.tenant, self.adapter, self.cache_salt)

    @property
    def needs(self) -> list[Need]:
        """The needs that workers prepare for it, without blocks that they may fetch."""
        needs: list[Need] = [Constraint(self.sampling.parameters)] if self.has_constraint else []
        if self.adapter is not None:
            needs.append(self.adapter)
        return needs

    @property
    def selects(self) -> bool:
        """Whether some sequences are dropped at the end, so that none can be delivered earlier."""
        return self.num_returned < self.num_sequences or self.beam is not None

    @property
    def max_len(self) -> int:
        """The maximum tokens of a sequence, prompt and output."""
        return len(self.prompt) + self.max_tokens

    def sampling_of(self, index: int) -> RowSampling:
        """The sampling of the sequence with this index: the first samples as a request of one sequence would, the
        others each with their own seed, derived from the request's. Beams draw nothing."""
        sampling = self.sampling
        if self.beam is not None:
            needed = num_candidates(self.beam.width, len(self.stop_token_ids))
            return replace(sampling, num_candidates=max(needed, sampling.logprobs or 0), logprobs=None)
        if self.selects and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        return sampling if index == 0 else replace(sampling, seed=sequence_seed(sampling.seed, index))


def cache_root(tenant: str, adapter: Adapter | None, salt: bytes = b"") -> PrefixHash:
    """The root of the hashes of a tenant's blocks with an adapter and a salt."""
    return root_hash(tenant, None if adapter is None else adapter.digest, salt)


def sequence_seed(seed: int, index: int) -> int:
    """The 64-bit seed of a request's sequence with this index."""
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8, person=b"quire/seed/1")
    return int.from_bytes(digest.digest(), "little")


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Raises RefusedError for an invalid request, NoAdaptersError for a request with an adapter if workers have no
    adapter slots, NeverFitsError for a request that could not run even by itself."""
    if not request.prompt or request.max_tokens < 1:
        raise RefusedError(
            f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.max_tokens}; both must be >= 1"
        )
    if not 1 <= request.num_returned <= request.num_sequences:
        raise RefusedError(
            f"n is {request.num_returned}, best_of is {request.num_sequences}: 1 <= n <= best_of must hold"
        )
    if abs(request.priority) > MAX_PRIORITY:
        raise RefusedError(f"priority is {request.priority}; it must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    if request.adapter is not None and not config.max_adapters:
        raise NoAdaptersError("the workers run no adapters: start them with --max-adapters above 0")
    if request.beam is not None and request.beam.width != request.num_sequences:
        raise RefusedError(
            f"beam_width is {request.beam.width}, best_of is {request.num_sequences}: both must be equal"
        )
    if request.beam is not None and request.emitted:
        raise RefusedError("a beam search cannot continue after emitted tokens: it delivers none before it ends")
    _check_emitted(request)
    _check_size(request, config)


def check_shared_bound(
    what: str, bound: int, *, total: int, own: int, added: int, num_tenants: int, overflow: float
) -> None:
    """Checks a bound that tenants share: all tenants have `total`, one tenant has `own` of it and adds `added`, and
    there are `num_tenants` then. Raises QueueFullError that names `what`, its value and the limit.

    One tenant may take all of the bound while no other wants any. Once it is taken, tenants that hold less than an
    equal share still get their share, up to `overflow` times the bound beyond it, so that no tenant keeps others out by
    being first. A single request that is larger than the bound, or than the share, is accepted if nothing is there yet.
    """
    if total + added <= bound or not total:
        return
    had_some = own > 0
    total, own = total + added, own + added
    if num_tenants == 1:
        raise QueueFullError(f"{total} {what}; there is room for {bound}")
    share, max_total = max(bound // num_tenants, 1), bound + int(bound * overflow)
    if had_some and own > share:
        raise QueueFullError(
            f"{own} {what} of this tenant; the room for {bound} is taken, and while {num_tenants} tenants share "
            f"it each has {share}"
        )
    if total > max_total:
        raise QueueFullError(
            f"{total} {what}; there is room for {bound}, and for {max_total} if tenants have less than their share "
            f"of {share}"
        )


def max_blocks(request: Request, config: SchedulerConfig) -> int:
    """The number of blocks that the pool must have for the request: all sequences that have not ended share the full
    blocks of the prompt, and no other blocks. Each has a state, and a checkpoint is there to begin with."""
    # The last token of a sequence is never computed.
    if request.num_sequences == 1:
        return config.blocks_for(request.max_len - 1)
    whole, shared = -(-(request.max_len - 1) // config.block_size), num_shared(request, config)
    if request.max_tokens == 1:
        shared = whole
    count = _num_unended(request)
    return config.layout.num_groups * (shared + count * (whole - shared)) + (count + 1) * config.state_blocks


def num_shared(request: Request, config: SchedulerConfig) -> int:
    """Blocks of prompt tokens that all sequences of the request share. If layers keep states, there is a checkpoint
    behind them: at least two tokens of the prompt are left, since one is never computed by itself."""
    return max(len(request.prompt) - 2 * (config.state_blocks > 0), 0) // config.block_size


def max_blocks_apart(request: Request, config: SchedulerConfig) -> int | None:
    """The maximum number of blocks of a request whose sequences each continue from a checkpoint of their own; None if
    the pool has fewer. Then they continue together from the blocks of the prompt that they share."""
    most = max_blocks(request, config) + (_num_unended(request) - 1) * config.state_blocks
    return most if most <= config.num_usable_blocks else None


def _num_unended(request: Request) -> int:
    return request.num_sequences - sum(each.has_ended for each in request.emitted)


def _check_emitted(request: Request) -> None:
    if request.emitted and len(request.emitted) != request.num_sequences:
        raise RefusedError(
            f"emitted tokens of {len(request.emitted)} sequences came, best_of is {request.num_sequences}"
        )
    if request.emitted and all(each.has_ended for each in request.emitted):
        raise RefusedError("all sequences have ended already")
    for index, each in enumerate(request.emitted):
        if len(each.token_ids) >= request.max_tokens and not each.has_ended:
            raise RefusedError(
                f"{len(each.token_ids)} tokens of sequence {index} were emitted already, max_tokens is "
                f"{request.max_tokens}"
            )


def _check_size(request: Request, config: SchedulerConfig) -> None:
    if request.max_len > config.max_len:
        raise NeverFitsError(
            f"prompt ({len(request.prompt)} tokens) and max_tokens ({request.max_tokens}) make {request.max_len} "
            f"tokens; a sequence can have at most {config.max_len}"
        )
    if request.num_sequences > config.max_num_seqs:
        raise NeverFitsError(f"best_of is {request.num_sequences}; at most {config.max_num_seqs} sequences run at once")
    needed = max_blocks(request, config)
    if needed > config.num_usable_blocks:
        num_states = (_num_unended(request) + 1) * config.state_blocks
        of_states = f", {num_states} of them for states" if num_states else ""
        raise NeverFitsError(
            f"{request.num_sequences} sequences of up to {request.max_len} tokens need {needed} blocks{of_states}; the "
            f"pool has {config.num_usable_blocks}: ask for fewer sequences or tokens"
        )
