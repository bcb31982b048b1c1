"""Going on with a request from the tokens that its caller holds, as a scheduler goes on from those of a gateway.

Prompt, parameters, seed and tokens are all that a request is: whoever holds them can go on after the loss of every
process. What follows is what would have followed, where the model's logits are the same again.
"""

import math
from collections.abc import Sequence

from gateway.replicas.live import LiveRequest
from gateway.requests.limits import Limits
from gateway.requests.request import GenerationRequest, HeldSequence, RequestOptions
from gateway.requests.violations import Violations
from gateway.turns import TOKENS_PER_TURN, Turns
from quire.rpc.errors import invalid_field


async def check_continuation(options: RequestOptions, request: GenerationRequest, limits: Limits) -> None:
    """Raises InvalidArgument where the tokens that the caller holds cannot be of this request."""
    held = options.continue_from
    if not held:
        return
    violations, turns = Violations(), Turns()
    if len(held) != request.num_sequences:
        count = request.num_sequences
        violations.add("continue_from", f"has {len(held)} entries; the request has {count:,} sequences, each has one")
    for position, sequence in enumerate(held):
        _check_sequence(violations, f"continue_from[{position}]", sequence, request, limits)
        await turns.pause()
    if any(sequence.token_ids for sequence in held):
        if request.chooses:
            violations.add(
                "continue_from",
                "has tokens; where sequences are chosen at the end, none is delivered before: send the request anew",
            )
        elif request.sampling.temperature and not options.sampling.HasField("seed"):
            violations.add(
                "sampling.seed", "is absent; to go on from tokens that were sampled, send the seed that they came by"
            )
    violations.raise_if_any()


async def continue_from(live: LiveRequest, held: Sequence[HeldSequence]) -> None:
    """Gives a request that was not submitted yet the tokens that its caller holds, none of which it gets again. It is
    over afterwards where they end all its sequences.

    Raises:
        InvalidArgument: a sequence had ended before its last token.
    """
    turns = Turns()
    live.is_prepared = False
    for position, (stream, sequence) in enumerate(zip(live.sequences, held, strict=True)):
        token_ids = sequence.token_ids
        stream.skip(len(token_ids), sequence.num_characters, cumulative_logprob=sequence.cumulative_logprob)
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
    live.is_prepared = True
    live.end_if_complete()


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
