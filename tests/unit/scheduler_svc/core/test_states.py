"""States of layers: where sequences get checkpoints, what these cost, and what continues from them."""

from typing import Any

import pytest

from scheduler_svc.core.request import max_blocks
from tests.support.core_driver import Driver, expected_output, make_config, make_request

# Blocks of 4 tokens, and states of 2 blocks.
STATED = {"state_blocks": 2, "num_blocks": 400, "max_model_len": 512}


def prompt_of(length: int, end: int = 0) -> list[int]:
    """A prompt whose tokens from `end` on are others."""
    return [(7 * place + 40 * (place >= end > 0)) % 50 for place in range(length)]


def checkpoints(driver: Driver, tokens: list[int], *, on_disk: bool = False) -> list[int]:
    """Numbers of tokens of a sequence after which there is a checkpoint."""
    blocks, hashes = driver.scheduler.batch.blocks, make_request(99, prompt=tokens)
    driver.submit(hashes)
    sequence = driver.scheduler.waiting.get(hashes.key).sequences[0]
    count = len(tokens) // blocks.block_size
    names = [blocks.names.state(each) for each in sequence.prefix_hashes.first(count, tokens)]
    driver.scheduler.abort(hashes.key)
    found = {name for name, _ in driver.device.disk.values()} if on_disk else set(blocks.pool.sealed_hashes())
    return [4 * index for index, each in enumerate(names, 1) if found.issuperset(each)]


@pytest.mark.parametrize(("max_tokens", "num_cached"), [(3, 56), (4, 56), (20, 64), (80, 128)])
def test_the_next_turn_continues_before_the_end_of_the_prompt_or_of_64_output_tokens(max_tokens: int, num_cached: int):
    driver = Driver(make_config(**STATED))
    first = make_request(1, prompt_len=60, max_tokens=max_tokens)
    driver.submit(first)
    driver.finish(first)
    turn = make_request(2, prompt=[*first.prompt, *driver.outputs[1], 1, 2, 3], max_tokens=4)
    driver.submit(turn)
    driver.finish(turn)
    assert driver.usage[2].cached_tokens == num_cached


def test_prompts_that_part_leave_a_checkpoint_where_they_part():
    driver = Driver(make_config(**STATED))
    requests = [make_request(1 + index, prompt=prompt_of(40 + index, 20 * index), max_tokens=2) for index in range(2)]
    requests.append(make_request(3, prompt=[*prompt_of(20), *[49] * 9], max_tokens=2))
    for request in requests:
        driver.submit(request)
        driver.finish(request)
    # The first one has no checkpoint at 20 tokens. The second one, which parts there, makes one for the third.
    assert [driver.usage[handle].cached_tokens for handle in (1, 2, 3)] == [0, 0, 20]


def test_requests_that_wait_for_a_prompt_find_a_checkpoint_where_they_part():
    driver = Driver(make_config(**STATED, max_num_batched_tokens=16))
    first, second = (make_request(1 + index, prompt=prompt_of(100, 80 * index), max_tokens=2) for index in range(2))
    driver.submit(first)
    driver.next_plan()
    driver.submit(second)
    driver.finish(first, second)
    assert driver.usage[2].cached_tokens == 80


@pytest.mark.parametrize("end", [80, 0])
@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_requests_that_come_during_a_prompt_wait_for_the_rest_of_it(num_steps: int, end: int):
    driver = Driver(make_config(**STATED, max_num_batched_tokens=16))
    first, second = make_request(1, prompt=prompt_of(100), max_tokens=2), make_request(2, prompt=prompt_of(100, end))
    driver.submit(first)
    driver.run_steps(num_steps)
    driver.submit(second)
    driver.finish(first, second)
    # The checkpoint before the end of a prompt is at 96 tokens. After 5 steps the state is behind 80 tokens already.
    in_time = num_steps < 5 or not end
    assert driver.usage[2].cached_tokens == (end or 96) * in_time


def test_forks_share_the_prompt_and_have_a_state_each():
    num_forks, num_prompt, size = 32, 8000, 16
    config = make_config(
        num_blocks=18_000,
        block_size=size,
        state_blocks=4,
        max_num_seqs=num_forks,
        max_num_batched_tokens=8192,
        max_model_len=8192,
    )
    driver = Driver(config, max_in_flight=1)
    request = make_request(1, prompt_len=num_prompt + 5, max_tokens=3, num_sequences=num_forks)
    driver.submit(request)
    driver.run_steps(1)
    driver.plan()
    once = -(-num_prompt // size)
    assert len(driver.scheduler.running) == 1
    assert driver.scheduler.batch.blocks.pool.num_used <= 1.05 * (once + num_forks * config.state_blocks + num_forks)
    driver.deliver()
    driver.finish(request)


@pytest.mark.parametrize("num_steps", [2, 4, 9])
def test_sequences_that_parted_are_computed_again_in_the_smallest_pool_that_their_request_is_accepted_for(
    num_steps: int,
):
    request = make_request(1, prompt_len=20, max_tokens=12, num_sequences=3)
    num_blocks = max_blocks(request, make_config(**STATED))
    # All share 4 blocks of the prompt. Each has 4 blocks of its own and its state; there is room for a checkpoint.
    assert num_blocks == 4 + 3 * (4 + 2) + 2
    driver = Driver(make_config(**STATED | {"num_blocks": num_blocks}))
    # Fills the pool with other content.
    before = [make_request(2 + index, prompt=[index] * 40, max_tokens=2) for index in range(3)]
    driver.submit(*before)
    driver.finish(*before)
    driver.submit(request)
    driver.run_steps(num_steps)
    driver.preempt(request)
    driver.finish(request)


# The sequence of 310 tokens takes 78 blocks and a state.
@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [8, 64, 128, 192, 256]),
        ({"num_blocks": 86}, [8, 64, 256]),
        ({"num_blocks": 84}, [8, 256]),
        ({"output_checkpoints": False}, [8]),
    ],
)
def test_checkpoints_of_output_give_way_before_the_newest(changes: dict[str, Any], kept: list[int]):
    driver = Driver(make_config(**STATED | changes))
    request = make_request(1, prompt_len=10, max_tokens=300)
    driver.submit(request)
    driver.finish(request)
    assert checkpoints(driver, [*request.prompt, *driver.outputs[1]]) == kept


@pytest.mark.parametrize(("state_blocks", "kept"), [(2, [16, 32, 48, 64, 80, 96, 108]), (9, [64, 96, 108])])
def test_large_checkpoints_within_a_prompt_give_way_to_the_next(state_blocks: int, kept: list[int], monkeypatch):
    monkeypatch.setattr("scheduler_svc.core.states.PROMPT_INTERVAL", 16)
    # Room for the short prompt and its checkpoint; and for the long one, its state and `kept`. The checkpoint at 96
    # tokens gives way to the one at 108, but no block is needed any more.
    num_blocks = 4 + state_blocks + 28 + (len(kept) + 1) * state_blocks
    config = make_config(state_blocks=state_blocks, num_blocks=num_blocks, max_num_batched_tokens=16, max_model_len=128)
    driver = Driver(config, max_in_flight=1)
    other, long = make_request(1, prompt=[5] * 14, max_tokens=2), make_request(2, prompt=prompt_of(110), max_tokens=1)
    for request in (other, long):
        driver.submit(request)
        driver.finish(request)
    assert checkpoints(driver, [*long.prompt]) == kept
    assert checkpoints(driver, [*other.prompt]) == [12]
    again = make_request(3, prompt=[*other.prompt], max_tokens=2)
    driver.submit(again)
    driver.finish(again)
    assert driver.usage[3].cached_tokens == 12


def test_a_lost_worker_costs_at_most_an_interval_of_a_prompt_however_large_its_state_is(monkeypatch):
    monkeypatch.setattr("scheduler_svc.core.states.PROMPT_INTERVAL", 16)
    config = make_config(state_blocks=9, num_blocks=100, max_num_batched_tokens=16, max_model_len=128)
    driver = Driver(config, max_in_flight=1)
    request = make_request(1, prompt=prompt_of(110), max_tokens=2)
    driver.submit(request)
    driver.run_steps(4)
    driver.preempt(request)
    driver.run_steps(1)
    (sequence,) = driver.scheduler.running.get(request.key).sequences
    assert driver.scheduler.batch.rows.num_computed[sequence.row] >= 64
    driver.finish(request)


@pytest.mark.parametrize("num_others", range(1, 5))
def test_a_conversation_loses_its_end_first_though_turns_compute_some_of_it_again(num_others: int):
    driver = Driver(make_config(**STATED | {"num_blocks": 60}), max_in_flight=1)
    first = make_request(1, prompt_len=60, max_tokens=25)
    driver.submit(first)
    driver.finish(first)
    # Continues from the checkpoint at 64 tokens. Meanwhile the other ones need what was used before.
    turn = make_request(2, prompt=[*first.prompt, *driver.outputs[1], 1, 2, 3], max_tokens=20)
    driver.submit(turn)
    driver.run_steps(3)
    assert driver.scheduler.batch.rows.num_computed.max() > 84
    others = [make_request(3 + index, prompt=[index] * 18, max_tokens=2) for index in range(num_others)]
    for request in others:
        driver.submit(request)
        driver.run_steps(3)
    driver.finish(turn, *others)
    request = make_request(99, prompt=[*turn.prompt, *driver.outputs[2]])
    driver.submit(request)
    sequence = driver.scheduler.waiting.get(request.key).sequences[0]
    pool, names = driver.scheduler.batch.blocks.pool, sequence.prefix_hashes.first(26, request.prompt)
    are_kept = [pool.hits([name]) != [] for name in names]
    assert are_kept == sorted(are_kept, reverse=True)


def test_checkpoints_of_long_prompts_are_after_whole_blocks():
    config = make_config(block_size=24, state_blocks=2, num_blocks=400, max_num_batched_tokens=512, max_model_len=4096)
    driver = Driver(config, max_in_flight=1)
    request = make_request(1, prompt=prompt_of(2500), max_tokens=2)
    driver.submit(request)
    places = set[int]()
    while driver.scheduler.num_live:
        places.update(place for _, place, _ in driver.next_plan().checkpoints)
        driver.deliver()
    assert places == {1032, 2064, 2496}


@pytest.mark.parametrize(("num_others", "num_cached"), [(2, 128), (3, 56), (4, 56)])
def test_what_evicts_the_end_of_a_conversation_leaves_the_checkpoints_before(num_others: int, num_cached: int):
    driver = Driver(make_config(**STATED | {"num_blocks": 72}), max_in_flight=1)
    first = make_request(1, prompt_len=60, max_tokens=75)
    others = [
        make_request(2 + index, prompt=prompt_of(44, 1)[index + 1 :], max_tokens=2) for index in range(num_others)
    ]
    for request in (first, *others):
        driver.submit(request)
        driver.finish(request)
    turn = make_request(9, prompt=[*first.prompt, *driver.outputs[1], 1, 2, 3], max_tokens=4)
    driver.submit(turn)
    driver.finish(turn)
    assert driver.usage[9].cached_tokens == num_cached


@pytest.mark.parametrize("leave", ["finish", "abort", "preempt"])
def test_of_the_checkpoints_of_output_the_last_one_goes_to_disk_when_the_sequence_leaves(leave: str):
    driver = Driver(make_config(**STATED, max_drafts=3))
    request = make_request(1, prompt_len=10, max_tokens=300)
    driver.submit(request)

    def on_disk() -> list[int]:
        return checkpoints(driver, [*request.prompt, *driver.outputs[1]], on_disk=True)

    def run_to(length: int) -> None:
        """The disk takes each block as soon as it is final."""
        while driver.scheduler.num_live and len(driver.outputs.get(1, ())) < length:
            driver.run_steps(1)
            driver.device.keep_on_disk(1000)

    run_to(200)
    assert on_disk() == [8]
    if leave == "preempt":
        driver.preempt(request)
        run_to(205)
        assert on_disk() == [8, 192]
    if leave == "abort":
        driver.scheduler.abort(request.key)
    run_to(300)
    driver.run_until_idle()
    driver.device.keep_on_disk(1000)
    assert on_disk() == {"finish": [8, 256], "abort": [8, 192], "preempt": [8, 192, 256]}[leave]


@pytest.mark.parametrize(("num_blocks", "are_made"), [(22, False), (30, True)])
def test_checkpoints_take_only_blocks_that_no_sequence_needs(num_blocks: int, are_made: bool):
    # Two sequences of 8 blocks and a state each have 20 blocks, and take two more for their next tokens.
    driver = Driver(make_config(**STATED | {"num_blocks": num_blocks}, max_num_batched_tokens=64), max_in_flight=1)
    requests = [make_request(handle, prompt_len=32, max_tokens=3) for handle in (1, 2)]
    driver.submit(*requests)
    plan = driver.next_plan()
    assert len(plan.assign) == 2
    assert bool(plan.checkpoints) == are_made
    driver.finish(*requests)
    assert driver.scheduler.num_preemptions == 0


@pytest.mark.parametrize("num_blocks", [4, 8])
def test_a_pool_without_room_for_two_states_is_refused(num_blocks: int):
    with pytest.raises(ValueError, match="a sequence needs room for two and for its tokens"):
        make_config(num_blocks=num_blocks, state_blocks=4)


def test_the_last_token_of_a_prompt_is_computed_with_the_output_behind_it():
    driver = Driver(make_config(**STATED, max_num_batched_tokens=64), max_in_flight=1)
    # The checkpoint of the other one is before the last token of this prompt.
    other = make_request(1, prompt=prompt_of(38), max_tokens=2)
    request = make_request(2, prompt=prompt_of(37), max_tokens=6)
    driver.submit(other)
    driver.finish(other)
    driver.submit(request)
    driver.run_steps(1)
    driver.preempt(request)
    driver.finish(request)


def test_a_prompt_goes_on_however_small_its_share_of_a_step_is():
    driver = Driver(make_config(**STATED, max_num_batched_tokens=16, max_prefill_share=0.01), max_in_flight=1)
    request = make_request(1, prompt=prompt_of(90), max_tokens=2)
    driver.submit(request)
    driver.run_steps(1)
    for handle in range(2, 30):
        driver.submit(make_request(handle, prompt_len=30, max_tokens=1))
    driver.run_steps(10)
    (sequence,) = driver.scheduler.running.get(request.key).sequences
    assert sequence.row is not None
    assert driver.scheduler.batch.rows.num_computed[sequence.row] > 30


def test_a_preempted_sequence_has_no_checkpoint_in_another_pool():
    driver = Driver(make_config(**STATED))
    driver.submit(first := make_request(1, prompt=prompt_of(400), max_tokens=2))
    driver.finish(first)
    driver.submit(request := make_request(2, prompt=prompt_of(20, 1), max_tokens=150))
    driver.run_steps(80)
    driver.preempt(request)
    driver.crash(config=make_config(**(STATED | {"num_blocks": 60, "max_model_len": 200})))
    driver.finish(request)
    assert driver.outputs[2] == expected_output(request)


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
