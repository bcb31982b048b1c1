"""Which requests are taken. Every refusal names the thing, its value and the limit."""

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import NeverFitsError, QueueFullError, RefusedError
from scheduler_svc.core.queues import GroupQueue
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
    if len(waiting) >= config.max_waiting_requests:
        raise QueueFullError(f"{len(waiting)} requests are waiting; the queue takes {config.max_waiting_requests}")
    held = sum(len(each.token_ids) for each in request.emitted if not each.has_ended)
    tokens = waiting.num_tokens + len(request.prompt) + held
    if len(waiting) and tokens > config.max_waiting_tokens:
        raise QueueFullError(f"{tokens} tokens would be waiting; the queue takes {config.max_waiting_tokens}")


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
