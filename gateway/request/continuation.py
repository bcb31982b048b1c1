"""Tokens that a caller already has: a request continues after them as after tokens of this gateway."""

import math
from collections.abc import Sequence

from gateway.replicas.generation_request import GenerationRequest
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import num_prompt_logprobs
from gateway.request.limits import Limits
from gateway.request.violations import Violations
from gateway.turns import TOKENS_PER_TURN, Turns
from gateway.types import HeldSequence, RequestOptions
from quire.rpc.errors import invalid_field


async def check_continuation(options: RequestOptions, request: GenerationRequest, limits: Limits) -> None:
    """Raises InvalidArgument if the tokens that the caller holds cannot be tokens of this request."""
    held = options.continue_from
    if not held:
        return
    violations, turns = Violations(), Turns()
    if len(held) != (count := request.sampling.n):
        violations.add("continue_from", f"has {len(held)} entries; the request has {count:,} sequences, each has one")
    for position, sequence in enumerate(held):
        _check_sequence(violations, f"continue_from[{position}]", sequence, request, limits)
        await turns.pause()
    if any(sequence.token_ids for sequence in held):
        if request.chooses:
            violations.add(
                "continue_from",
                "has tokens; if sequences are selected at the end, none is delivered earlier: send a new request",
            )
        elif request.sampling.temperature and not options.sampling.HasField("seed"):
            violations.add(
                "sampling.seed", "is absent; to continue after sampled tokens, send the seed of the first request"
            )
    violations.raise_if_any()


def _check_sequence(
    violations: Violations, field: str, sequence: HeldSequence, request: GenerationRequest, limits: Limits
) -> None:
    token_ids, max_tokens = sequence.token_ids, request.stopping.max_tokens
    if len(token_ids) > max_tokens:
        violations.add(f"{field}.token_ids", f"has {len(token_ids):,} tokens; max_tokens is {max_tokens:,}")
        return
    violations.check_token_ids(f"{field}.token_ids", token_ids, limits.vocab_size)
    before_the_last, ending = token_ids[:-1], request.ending_token_ids
    if not ending.isdisjoint(before_the_last):
        place = next(place for place, token_id in enumerate(before_the_last) if token_id in ending)
        description = f"is {token_ids[place]}, which ends a sequence; tokens follow it"
        violations.add(f"{field}.token_ids[{place}]", description)
    if sequence.cumulative_logprob is not None and not math.isfinite(sequence.cumulative_logprob):
        violations.add(f"{field}.cumulative_logprob", f"is {sequence.cumulative_logprob}; it must be finite")


async def continue_from(live: LiveRequest, held: Sequence[HeldSequence]) -> None:
    """Puts the tokens that the caller holds into a request that was not submitted yet; the caller does not get them
    again. If they end all sequences, the request is over.

    A scheduler continues from these tokens as it continues from a gateway's tokens after it has lost its own state:
    prompt, parameters, seed and tokens are the whole state of a request. Equal logits give an equal continuation.
    Log probabilities of the prompt come with its first token, so a request for them begins there; the caller still
    does not get again the tokens that it holds.

    Raises:
        InvalidArgument: a sequence had ended before its last token.
    """
    turns = Turns()
    begins_anew = bool(num_prompt_logprobs(live.request))
    for position, (stream, sequence) in enumerate(zip(live.sequences, held, strict=True)):
        token_ids = sequence.token_ids
        stream.skip(len(token_ids), sequence.num_characters, cumulative_logprob=sequence.cumulative_logprob)
        if begins_anew:
            continue
        for begin in range(0, len(token_ids), TOKENS_PER_TURN):
            stream.accept(begin, token_ids[begin : begin + TOKENS_PER_TURN])
            await turns.pause()
        if len(stream.token_ids) < len(token_ids):
            assert stream.finished is not None, "a stream takes all tokens up to its end"
            raise invalid_field(
                f"continue_from[{position}].token_ids",
                f"has {len(token_ids):,} tokens; the sequence ended with token {len(stream.token_ids):,} by the stop "
                f"string {stream.finished.stop_string!r:.80}",
            )
        stream.drop_skipped()
    live.num_brought_tokens = live.num_generated_tokens
    live.end_if_complete()
