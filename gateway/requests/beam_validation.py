"""What beam search asks of a request: its own parameters, and none that only sampling knows."""

from gateway.requests.limits import MAX_BEAM_CANDIDATES, MAX_LENGTH_PENALTY, NUMBERS, Limits
from gateway.requests.request import RequestOptions
from gateway.requests.violations import Violations, shown
from quire.common.v1.common_pb2 import EarlyStopping


def check_beam_search(violations: Violations, request: RequestOptions, limits: Limits) -> None:
    """Checks `beam_search` and what contradicts it in the request that asks for it."""
    width = request.asked("sampling.beam_search.beam_width")
    violations.check_range("sampling.beam_search.beam_width", width, 1, limits.max_n)
    length_penalty = request.asked("sampling.beam_search.length_penalty")
    violations.check_range(
        "sampling.beam_search.length_penalty", length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
    )
    early_stopping = request.sampling.beam_search.early_stopping
    if early_stopping not in EarlyStopping.values():
        names = ", ".join(EarlyStopping.keys()[1:])
        violations.add("sampling.beam_search.early_stopping", f"is {early_stopping}; it must be one of {names}")
    violations.check_range("sampling.n", request.asked("sampling.n"), 1, max(width, 1))
    best_of = request.asked("sampling.best_of")
    if best_of not in (None, width):
        violations.add(
            "sampling.best_of",
            f"is {shown(best_of)}; with beam search it must be absent or beam_width, which is {shown(width)}",
        )
    for name, number in NUMBERS.items():
        value = request.asked(f"sampling.{name}")
        if number.in_beam_search is not None and value not in (None, number.in_beam_search):
            violations.add(
                f"sampling.{name}",
                f"is {shown(value)}; with beam search it must be absent or {number.in_beam_search}: nothing is drawn",
            )
    num_stop_tokens = len(request.asked("stopping.stop_token_ids"))
    num_candidates = width * (1 + num_stop_tokens)
    if num_candidates > MAX_BEAM_CANDIDATES:
        violations.add(
            "stopping.stop_token_ids",
            f"has {num_stop_tokens:,} entries, so that each of {width:,} beams would report "
            f"{num_candidates:,} candidates; the most is {MAX_BEAM_CANDIDATES:,}",
        )
    if request.asked("stopping.stop"):
        # The search has chosen among whole hypotheses by the time their text is known.
        violations.add("stopping.stop", "cannot be used with beam search; use stop_token_ids")
