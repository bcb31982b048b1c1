"""Which requests are taken. Every refusal names the thing, its value and the limit."""

from dataclasses import dataclass

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import NeverFitsError, QueueFullError, RefusedError
from scheduler_svc.core.policy import GroupQueue
from scheduler_svc.core.request import MAX_PRIORITY, Request


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Raises RefusedError for a request that makes no sense, NeverFitsError for one that could not run even alone."""
    if not request.prompt or request.max_tokens < 1:
        raise RefusedError(
            f"{len(request.prompt)} prompt tokens and max_tokens {request.max_tokens}: both must be >= 1"
        )
    if not 1 <= request.num_returned <= request.num_sequences:
        raise RefusedError(
            f"n is {request.num_returned}, best_of is {request.num_sequences}: 1 <= n <= best_of must hold"
        )
    if abs(request.priority) > MAX_PRIORITY:
        raise RefusedError(f"priority is {request.priority}; it must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    _check_beams(request)
    _check_emitted(request)
    _check_size(request, config)


def check_queue(request: Request, waiting: GroupQueue, config: SchedulerConfig) -> None:
    """Raises QueueFullError. The bounds do not hold for a request that was accepted before."""
    if request.accepted_before:
        return
    tenants, tenant = waiting.tenants(), request.tenant
    num_tenants = len(tenants) + (tenant not in tenants)
    num_tokens = len(request.prompt) + sum(len(each.token_ids) for each in request.emitted if not each.has_ended)
    check_shared_bound(
        "requests would be waiting",
        config.max_waiting_requests,
        Demand(len(waiting), waiting.num_of(tenant), 1, num_tenants),
        overflow=config.tenant_overflow,
    )
    check_shared_bound(
        "tokens would be waiting",
        config.max_waiting_tokens,
        Demand(waiting.num_tokens, waiting.num_tokens_of(tenant), num_tokens, num_tenants),
        overflow=config.tenant_overflow,
    )


@dataclass(frozen=True, slots=True)
class Demand:
    """What there is of all tenants and of one, what that one adds, and how many tenants there are then."""

    total: int
    own: int
    added: int
    num_tenants: int


def check_shared_bound(what: str, bound: int, demand: Demand, *, overflow: float) -> None:
    """A bound that tenants share. Raises QueueFullError that names `what`, its value and the limit.

    One tenant may take all of it while nobody else wants any. Once it is taken, tenants that hold less than an equal
    share of it still get that, up to `overflow` times the bound beyond it, so that nobody keeps others out by being
    first. A single request that is larger than the bound, or than the share, is taken where there is nothing yet.
    """
    total, own = demand.total + demand.added, demand.own + demand.added
    if total <= bound or not demand.total:
        return
    if demand.num_tenants == 1:
        raise QueueFullError(f"{total} {what}; there is room for {bound}")
    share, most = max(bound // demand.num_tenants, 1), bound + int(bound * overflow)
    if demand.own and own > share:
        raise QueueFullError(
            f"{own} {what} of this tenant; the room for {bound} is taken, and while {demand.num_tenants} tenants share "
            f"it each has {share}"
        )
    if total > most:
        raise QueueFullError(
            f"{total} {what}; there is room for {bound}, and for {most} where tenants have less than their share of "
            f"{share}"
        )


def most_blocks(request: Request, block_size: int) -> int:
    """Blocks that the request holds at its largest: full blocks of the prompt are shared, all others are not."""
    # The last token of a sequence is never computed.
    whole = -(-(request.max_len - 1) // block_size)
    shared = len(request.prompt) // block_size
    return shared + request.num_sequences * max(whole - shared, 0)


def _check_beams(request: Request) -> None:
    if request.beam is None:
        return
    if request.beam.width != request.num_sequences:
        raise RefusedError(
            f"beam_width is {request.beam.width}, best_of is {request.num_sequences}: both must be equal"
        )
    if request.emitted:
        raise RefusedError("a beam search cannot go on from emitted tokens: it delivers none before it is over")


def _check_emitted(request: Request) -> None:
    if request.emitted and len(request.emitted) != request.num_sequences:
        raise RefusedError(f"{len(request.emitted)} sequences were emitted, best_of is {request.num_sequences}")
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
    needed = most_blocks(request, config.block_size)
    if needed > config.num_blocks:
        raise NeverFitsError(
            f"{request.num_sequences} sequences of up to {request.max_len} tokens need {needed} blocks; the pool has "
            f"{config.num_blocks}: ask for fewer sequences or tokens"
        )
