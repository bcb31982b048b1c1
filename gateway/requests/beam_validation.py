"""What beam search asks of a request: its own parameters, and none that only sampling knows."""

from gateway.requests.limits import MAX_BEAM_CANDIDATES, MAX_LENGTH_PENALTY, Limits
from gateway.requests.request import BeamSearchOptions, EarlyStopping, SamplingOptions, StoppingOptions
from gateway.requests.violations import Violations, shown

# The values by which a sampling parameter changes nothing.
_NEUTRAL = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}


def check_beam_search(
    violations: Violations,
    beam_search: BeamSearchOptions,
    sampling: SamplingOptions,
    stopping: StoppingOptions,
    limits: Limits,
) -> None:
    """Checks `beam_search` and what contradicts it in the request that asks for it."""
    width = beam_search.beam_width
    violations.check_range("sampling.beam_search.beam_width", width, 1, limits.max_n)
    violations.check_range(
        "sampling.beam_search.length_penalty", beam_search.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
    )
    if not isinstance(beam_search.early_stopping, EarlyStopping):
        names = ", ".join(f"EARLY_STOPPING_{value.name}" for value in EarlyStopping)
        violations.add(
            "sampling.beam_search.early_stopping", f"is {beam_search.early_stopping}; it must be one of {names}"
        )
    violations.check_range("sampling.n", sampling.n, 1, max(width, 1))
    if sampling.best_of not in (None, width):
        violations.add(
            "sampling.best_of",
            f"is {shown(sampling.best_of)}; with beam search it must be absent or beam_width, which is {shown(width)}",
        )
    _check_nothing_is_sampled(violations, sampling)
    num_candidates = width * (1 + len(stopping.stop_token_ids))
    if num_candidates > MAX_BEAM_CANDIDATES:
        violations.add(
            "stopping.stop_token_ids",
            f"has {len(stopping.stop_token_ids):,} entries, so that each of {width:,} beams would report "
            f"{num_candidates:,} candidates; the most is {MAX_BEAM_CANDIDATES:,}",
        )
    if stopping.stop:
        # The search has chosen among whole hypotheses by the time their text is known.
        violations.add("stopping.stop", "cannot be used with beam search; use stop_token_ids")


def _check_nothing_is_sampled(violations: Violations, sampling: SamplingOptions) -> None:
    """Parameters that would truncate or flatten a distribution from which nothing is drawn."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(sampling, name)
        if value not in (None, neutral):
            violations.add(
                f"sampling.{name}",
                f"is {shown(value)}; with beam search it must be absent or {neutral}: nothing is drawn",
            )
