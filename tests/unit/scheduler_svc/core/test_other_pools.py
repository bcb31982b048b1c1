"""A worker that comes back with another pool: requests and pins move over."""

import pytest

from tests.support.core_driver import Driver, expected_output, make_config, make_request

STEM = [1, 2, 3, 4]


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4), (4, 3)])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_prompts_with_one_start_keep_their_own_context_in_blocks_of_another_size(before, after, num_sequences):
    # One request after the other, so that the second finds what the first has sealed.
    driver = Driver(make_config(block_size=before, max_num_seqs=num_sequences))
    requests = [
        make_request(handle, prompt=[*STEM, *range(first, first + 9)], max_tokens=20, num_sequences=num_sequences)
        for handle, first in ((1, 5), (2, 25))
    ]
    for request in requests:
        driver.submit(request)
    driver.run_steps(3)
    driver.crash(config=make_config(block_size=after, max_num_seqs=num_sequences))
    driver.run_until_idle()
    assert driver.finished == {1, 2}
    for request in requests:
        for index in range(num_sequences):
            assert driver.samples[request.key.handle, index] == expected_output(request, index)
    # Blocks of 4 can share the start of both prompts; those of 8 cannot, and none of 3 beyond its first.
    assert driver.usage[2].cached_tokens == len(STEM) // after * after


def test_sequences_that_fork_after_the_move_have_hashes_of_the_new_size():
    driver = Driver(make_config(block_size=8))
    request = make_request(1, prompt_len=17, max_tokens=12, num_sequences=2)
    driver.submit(request)
    driver.crash(config=make_config(block_size=4))
    driver.run_until_idle()
    follow_up = make_request(2, prompt=[*request.prompt, *expected_output(request, 1)], max_tokens=3)
    driver.submit(follow_up)
    driver.run_until_idle()
    assert driver.outputs[2] == expected_output(follow_up)
    # 17 tokens of prompt and 12 of output, the last of which was never computed.
    assert driver.usage[2].cached_tokens == 28
