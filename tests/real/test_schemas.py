"""Drawn schemas of all enforced keywords, against `jsonschema`."""

import contextlib
from random import Random

import pytest

from quire.constraints.json_schema import ConstraintError
from tests.support.drawn_schemas import SchemaDrawer, faults
from tests.support.tiers import is_third_tier

pytestmark = pytest.mark.real


@pytest.mark.parametrize("block", range(8))
def test_drawn_schemas_are_enforced_as_jsonschema_reads_them(block) -> None:
    count = 2000 if is_third_tier() else 100
    found = {}
    for seed in range(1_000_000 + block * count, 1_000_000 + (block + 1) * count):
        drawer = SchemaDrawer(Random(seed))
        schema = drawer.schema()
        # Refused, or one whose references make jsonschema call itself without an end.
        with contextlib.suppress(ConstraintError, RecursionError):
            if wrong := faults(drawer, schema):
                found[seed] = schema, wrong
    assert found == {}
