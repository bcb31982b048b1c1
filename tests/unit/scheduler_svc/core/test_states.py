"""Sequences whose layers keep states, where they continue from checkpoints."""

from tests.support.core_driver import Driver, make_config, make_request


def test_a_preempted_sequence_does_not_continue_with_the_last_token_of_its_prompt_alone():
    driver = Driver(make_config(state_blocks=2))
    first, other = make_request(1, prompt=[1, 1, 1, 1, 5], max_tokens=20), make_request(2, prompt=[1] * 4 + [6] * 5)
    driver.submit(first)
    driver.run_steps(4)
    # Leaves a checkpoint where both part, one token before the end of the first prompt.
    driver.submit(other)
    driver.run_steps(3)
    driver.preempt(first)
    driver.finish(first, other)
