"""The gateway's limits equal the limits of schedulers, to the token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.request.limits import Pool
from scheduler_svc.core.request import NeverFitsError, check_request
from tests.support.core_driver import make_config, make_request


@given(
    pool=st.builds(
        Pool,
        num_blocks=st.integers(7, 60) | st.integers(1, 6),
        block_size=st.sampled_from([1, 3, 4, 16]),
        state_blocks=st.sampled_from([0, 1, 3]),
    ).filter(lambda pool: pool.num_blocks > 2 * pool.state_blocks),
    prompt_tokens=st.integers(1, 200),
    num_sequences=st.integers(1, 8),
)
def test_the_longest_sequences_of_a_pool_are_the_longest_that_a_scheduler_takes(pool, prompt_tokens, num_sequences):
    config = make_config(
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        max_model_len=100_000,
        state_blocks=pool.state_blocks,
    )
    longest = min(config.max_len, pool.longest_sequence(prompt_tokens, num_sequences))

    def check(length: int) -> None:
        max_tokens = length - prompt_tokens
        check_request(
            make_request(1, prompt_len=prompt_tokens, max_tokens=max_tokens, num_sequences=num_sequences), config
        )

    if longest > prompt_tokens:
        check(longest)
    with pytest.raises(NeverFitsError):
        check(max(longest, prompt_tokens) + 1)
