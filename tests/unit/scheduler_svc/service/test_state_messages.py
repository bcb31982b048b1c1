"""Answers of GetState and InspectBlocks about many blocks do not hold the event loop up."""

import asyncio
from typing import Any

import pytest

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.view import owners
from scheduler_svc.service import gateway_messages
from scheduler_svc.service.gateway_messages import blocks_message, state_message
from scheduler_svc.service.step_loop import StepLoop
from tests.support.core_driver import Driver, make_config, make_request
from tests.support.step_loop import make_step_loop


@pytest.fixture
def scheduler() -> Scheduler:
    """Two requests of 100 blocks each run, and an ended one has left 100 cached blocks."""
    driver = Driver(make_config(num_blocks=400, max_num_batched_tokens=2000, max_model_len=1000))
    driver.submit(make_request(0, prompt_len=402, max_tokens=1))
    driver.run_until_idle()
    for handle in (1, 2):
        driver.submit(make_request(handle, prompt_len=398, max_tokens=20))
    driver.run_steps(2)
    return driver.scheduler


@pytest.fixture
def loop(scheduler: Scheduler) -> StepLoop:
    return make_step_loop(scheduler)[0]


async def turns_of(coroutine) -> tuple[object, int]:
    """The coroutine's result, and the number of other tasks' turns meanwhile."""
    task, turns = asyncio.ensure_future(coroutine), 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    return task.result(), turns


@pytest.mark.parametrize("what", ["state", "blocks"])
async def test_others_have_their_turns_and_the_answer_is_of_one_moment(loop, scheduler, monkeypatch, what):
    async def answer():
        if what == "blocks":
            return await blocks_message(scheduler, None)
        return await state_message(loop.replica, loop.lifecycle, include_sequences=True, num_gateways=0)

    whole, _ = await turns_of(answer())
    monkeypatch.setattr(gateway_messages, "_BLOCKS_AT_ONCE", 16)
    asking = asyncio.ensure_future(answer())
    await asyncio.sleep(0)
    # The first piece is made; all blocks are released before the next.
    for handle in (1, 2):
        assert scheduler.abort(make_request(handle).key)
    message: Any
    message, turns = await turns_of(asking)
    assert turns >= 2 * 100 / 16 - 1
    assert message == whole
    assert [len(each.block_table) for each in message.sequences] == [100, 100]


async def test_tables_of_groups_of_layers_leave_out_blocks_that_no_layer_reads():
    driver = Driver(make_config(windowed_groups=1, window=6))
    driver.submit(make_request(1, prompt_len=30, max_tokens=50))
    driver.run_steps(12)
    scheduler = driver.scheduler
    (sequence,) = scheduler.running.first().unfinished
    message = await blocks_message(scheduler, None)
    table = message.sequences[0].block_table
    entries = list(enumerate(sequence.block_table))
    places = {divmod(place, 2): block for place, block in entries if block not in scheduler.batch.blocks.blank}
    assert {(each.logical_index, each.group): each.block_id for each in table} == places
    assert len(places) < len(entries)
    filled = [(each.filled, scheduler.num_computed_tokens(sequence) - 4 * each.logical_index) for each in table]
    assert all(number == min(left, 4) for number, left in filled)
    # The owners of a block of the second group have the tokens of its logical block.
    (index, group), block = next(each for each in places.items() if each[0][1])
    (owner,) = owners(scheduler, block, is_host=False)
    tokens = sequence.token_ids[4 * index : 4 * index + 4]
    assert (owner.logical_index, owner.group, list(owner.token_ids)) == (index, group, tokens)
    (blank,) = scheduler.batch.blocks.blank
    assert not owners(scheduler, blank, is_host=False)


async def test_blocks_of_states_are_shown_beside_tables_and_have_owners_without_tokens():
    driver = Driver(make_config(state_blocks=2))
    driver.submit(make_request(1, prompt=[1] * 9, max_tokens=30, num_sequences=2))
    driver.run_steps(6)
    scheduler = driver.scheduler
    sequences = scheduler.running.first().unfinished
    message = await blocks_message(scheduler, None)
    for sequence, state in zip(sequences, message.sequences, strict=True):
        assert [each.block_id for each in state.state] == sequence.state_blocks
        assert [(each.ref_count, each.filled, each.HasField("block_hash")) for each in state.state] == [
            (1, 0, False)
        ] * 2
        for piece, block in enumerate(sequence.state_blocks):
            (owner,) = owners(scheduler, block, is_host=False)
            assert (owner.sequence, owner.logical_index, list(owner.token_ids)) == (sequence, 0, [])
            # Behind the only group of layers.
            assert owner.group == 1 + piece
