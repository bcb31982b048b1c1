"""How much one call may ask for by standing for many requests."""

import pytest

from gateway.request.limits import MAX_CALL_PARAMETER_ENTRIES, MAX_CALL_STOP_BYTES
from gateway.request.validation import check_call
from quire.rpc.errors import InvalidArgument
from tests.support.parameters import make_options
from tests.unit.gateway.request.test_validation import LIMITS


def options(sampling=None, stop=()):
    return make_options(sampling=sampling, stopping={"stop": list(stop)})


def refused(call, num_requests):
    with pytest.raises(InvalidArgument) as caught:
        check_call(call, num_requests, LIMITS)
    return caught.value.violations


@pytest.mark.parametrize(
    ("sampling", "num_prompts", "field"),
    [
        ({}, 257, "sampling.n"),
        ({"n": 2}, 129, "sampling.n"),
        ({"n": 1, "best_of": 128}, 3, "sampling.best_of"),
        ({"beam_search": {"beam_width": 8}}, 33, "sampling.beam_search.beam_width"),
    ],
)
def test_sequences_of_all_prompts_are_bounded_together(sampling, num_prompts, field):
    (violation,) = refused(options(sampling), num_prompts)
    assert violation.field == field
    for part in (f"{num_prompts} prompts", "sequences together", "at most 256", "send fewer prompts"):
        assert part in violation.description
    check_call(options(sampling), num_prompts - 1, LIMITS)


def test_what_one_request_may_not_have_is_left_to_its_own_check():
    check_call(options({"n": 10**9}), 1, LIMITS)
    check_call(options(stop=["x" * 10**6] * 100), 1, LIMITS)


def test_stop_strings_of_all_sequences_are_bounded_together():
    stop = ["x" * (MAX_CALL_STOP_BYTES // 256)]
    check_call(options({"n": 4}, stop), 64, LIMITS)
    (violation,) = refused(options({"n": 4}, [stop[0] + "x"]), 64)
    assert violation.field == "stopping.stop"
    assert "256 sequences" in violation.description


def test_parameters_of_all_prompts_are_bounded_together():
    limits_of_one = LIMITS.vocab_size
    num_prompts = MAX_CALL_PARAMETER_ENTRIES // limits_of_one + 1
    allowed = options({"allowed_token_ids": list(range(limits_of_one))})
    violations = refused(allowed, num_prompts)
    assert "sampling.allowed_token_ids" in [violation.field for violation in violations]
