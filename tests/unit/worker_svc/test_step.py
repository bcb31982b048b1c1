"""A field of a step has one name in the scheduler's core, in the message and in the worker."""

from dataclasses import fields

from quire.worker.v1 import worker_pb2
from scheduler_svc.core.step import StepPlan
from worker_svc.step import Batch, CacheOperations, RowChanges, Step

MESSAGES = (worker_pb2.StepRequest, worker_pb2.CacheOperations, worker_pb2.Batch)
GROUPS = {"cache_operations", "row_changes", "batch"}
SHORT_LIVED = {"short_lived"}
"""The worker has it with the sealed blocks."""
PARTS_OF_SEALED = {"sealed_block_ids", "sealed_hashes"} | SHORT_LIVED
"""The message has a list for each half of the pairs."""
TRACED = {"traced"}
"""In the core a part of the rows that are assigned; the worker's spans read it from the message."""
SESSION = {"scheduler_epoch", "worker_generation"}
"""The core knows no session; the worker checks the generation in the message."""


def names(*classes: type) -> set[str]:
    return {each.name for described in classes for each in fields(described)} - GROUPS


def test_a_field_of_a_step_has_one_name_everywhere() -> None:
    sent = {name for message in MESSAGES for name in message.DESCRIPTOR.fields_by_name} - GROUPS
    values = sent - TRACED - PARTS_OF_SEALED | {"sealed"}
    assert names(Step, CacheOperations, RowChanges, Batch) == values - {"worker_generation"}
    assert names(StepPlan) - SHORT_LIVED == values - SESSION
    assert names(StepPlan) >= SHORT_LIVED
