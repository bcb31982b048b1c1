"""Layers that keep a state compute the same, bit for bit, however the tokens come, and from checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.rpc.errors import InvalidArgument
from tests.support.models import STATES, make_model
from tests.support.sampling import make_sampling
from tests.support.steps import int32, make_assign, make_changes, make_operations, make_step
from tests.support.threaded_ranks import run_ranks
from tests.support.tiers import parametrize_in_turn
from worker_svc.device.arena import arena_shape, caches_of, pages_of
from worker_svc.device.kv_pool import PoolRequest, allocate_pool, pool_geometry
from worker_svc.device.replay import RecordedForward
from worker_svc.device.row_ledger import RowLedger
from worker_svc.device.runner import ModelRunner
from worker_svc.models.base import CausalLM, NativeCausalLM
from worker_svc.models.registry import load_model
from worker_svc.parallel.ranks import Ranks
from worker_svc.step import AdmittedStep, Batch, CacheOperations, ModelGeometry, RowChanges, StepOutput, WorkerLimits

MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE = 96, 400, 4
CPU = torch.device("cpu")


@dataclass
class Rows:
    """Steps of a worker whose blocks hold NaN at first."""

    model: CausalLM
    max_passes: int = 1
    outputs: dict[int, list[int]] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        request = PoolRequest(BLOCK_SIZE, NUM_BLOCKS, None, 0, 0, self.model.dtype)
        self.shape = pool_geometry(self.model, request, None)
        self.pool = allocate_pool(self.shape, CPU, self.model.dtype, with_padding=True, layers=self.model.cache_layers)
        (arena,) = self.pool.gpu
        arena.fill_(torch.nan)
        geometry = ModelGeometry("", "", self.model.vocab_size, MAX_MODEL_LEN, "cpu")
        limits = WorkerLimits(4, 64, 1, 0, max_passes=self.max_passes)
        self.runner = ModelRunner(self.model, self.pool, geometry, limits, multi_step_s=1e3)
        self.ledger = RowLedger(self.shape, geometry, limits)
        self.free, self.num_steps = list(range(NUM_BLOCKS)), 0
        self.states: dict[int, list[int]] = {}
        self.operations: CacheOperations | None = None

    def take(self, count: int) -> list[int]:
        """Blocks that nothing uses."""
        return [self.free.pop() for _ in range(count)]

    def assign(self, row: int, prompt: Sequence[int], state: Sequence[int] | None = None, table: Sequence[int] = ()):
        """A row for the prompt, which goes on behind the blocks of `table`, from a copy of `state`."""
        num_blocks = MAX_MODEL_LEN // BLOCK_SIZE
        self.tables[row] = [*table, *self.take(num_blocks - len(table))]
        self.states[row] = self.take(self.shape.state_blocks)
        self.computed[row], self.outputs[row] = len(table) * BLOCK_SIZE, []
        if state is not None:
            self.operations = make_operations(copy=list(zip(state, self.states[row], strict=True)))
        sampling = make_sampling(temperature=0.0)
        return make_assign(row, prompt, self.tables[row], sampling, len(prompt), state_blocks=self.states[row])

    def run(
        self,
        *spans: tuple[int, int],
        changes: RowChanges | None = None,
        samples: Sequence[int] = (),
        checkpoints: Sequence[Sequence[int]] = (),
    ) -> list[torch.Tensor]:
        """Computes the next tokens of rows, given as (row, number); returns the logits of each pass."""
        output, logits = self.step(*spans, changes=changes, samples=samples, checkpoints=checkpoints)
        drawn, passes = output.token_ids.tolist(), output.num_passes
        for index, row in enumerate(samples):
            self.outputs[row] += drawn[index * passes : (index + 1) * passes]
        return logits

    def step(
        self,
        *spans: tuple[int, int],
        changes: RowChanges | None = None,
        samples: Sequence[int] = (),
        checkpoints: Sequence[Sequence[int]] = (),
        spoils: tuple[int, int] | None = None,
    ) -> tuple[StepOutput, list[torch.Tensor]]:
        """Runs a step, and returns also the logits of each pass. In the pass and for the sample in `spoils`, these are
        not numbers."""
        rows, new = zip(*spans, strict=True)
        computed = [self.computed[row] for row in rows]
        passes = self.max_passes if len(samples) == len(rows) and set(new) == {1} else 1
        growth = [passes - 1] * len(samples) if passes > 1 else []
        pairs = [(row, row) for row in samples]
        batch = Batch(int32(rows), int32(new), int32(computed), int32(pairs, 2), int32(growth), passes)
        self.num_steps += 1
        step = make_step(changes, batch, self.operations, step_id=self.num_steps, checkpoints=checkpoints)
        self.operations, logits = None, list[torch.Tensor]()
        output = self._launch(self.ledger.admit(step), logits, spoils)
        self.ledger.record_output(output)
        assert output.num_passes == (passes if spoils is None else spoils[0] + 1)
        further = dict(zip(samples, (output.num_tokens - 1).tolist(), strict=False))
        for row, count in spans:
            self.computed[row] += count + further.get(row, 0)
        return output, logits

    def _launch(self, admitted: AdmittedStep, logits: list[torch.Tensor], spoils: tuple[int, int] | None) -> StepOutput:
        model = self.runner._model
        assert isinstance(model, NativeCausalLM)
        computed = model.finish

        def kept(values: torch.Tensor) -> torch.Tensor:
            logits.append(computed(values).clone())
            if spoils is not None and spoils[0] == len(logits) - 1:
                logits[-1][spoils[1]] = torch.nan
            return logits[-1]

        model.finish = kept  # type: ignore[method-assign]
        try:
            return self.runner.launch(admitted).wait()
        finally:
            del model.finish


def make(directory: Path, family: str, dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    make_model(directory, family)
    return load_model(directory, device=CPU, dtype=dtype)


def make_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]


@parametrize_in_turn(
    "family, dtype, max_passes",
    STATES,
    [(torch.bfloat16, 3), (torch.float32, 1), (torch.bfloat16, 1), (torch.float32, 3)],
)
def test_a_prompt_in_chunks_in_company_and_from_checkpoints_is_the_same_bit_for_bit(
    family: str, dtype: torch.dtype, max_passes: int, tmp_path: Path
) -> None:
    assert_same_bits(make(tmp_path, family, dtype), max_passes)


@pytest.mark.parametrize(
    ("family", "fields"), [("qwen3.5", {}), ("granite-hybrid", {"mamba_n_groups": 1}), ("jamba", {}), ("lfm2", {})]
)
def test_so_it_is_on_several_ranks(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """A group of Mamba 2 is normalized by both."""
    make_model(tmp_path, family, **fields)

    def run(ranks: Ranks) -> None:
        assert_same_bits(load_model(tmp_path, device=CPU, dtype=torch.bfloat16, ranks=ranks), 1)

    run_ranks(2, run)


def assert_same_bits(model: CausalLM, max_passes: int) -> None:
    """A prompt is computed by itself, in chunks next to another one, and from checkpoints."""
    first, second = make_prompts(41, 30)
    lone = Rows(model)
    expected = lone.run((0, 41), changes=make_changes(assign=[lone.assign(0, first)]), samples=[0])
    for _ in range(9):
        expected += lone.run((0, 1), samples=[0])
    assert all(each.isfinite().all() for each in expected)

    rows = Rows(model, max_passes)
    saved, later = rows.take(rows.shape.state_blocks), rows.take(rows.shape.state_blocks)
    assigned = [rows.assign(1, second), rows.assign(0, first)]
    rows.run((1, 7), (0, 13), changes=make_changes(assign=assigned))
    rows.run((0, 23), (1, 23), samples=[1], checkpoints=[(0, 32, *saved)])
    actual = rows.run((1, 1), (0, 5), samples=[1, 0])
    actual = [each[1:] for each in actual]
    while len(actual) < 10:
        # The last pass of this step writes it.
        checkpoints = [(0, 47, *later)] if max_passes > 1 and rows.computed[0] == 44 else []
        actual += [each[:1] for each in rows.run((0, 1), (1, 1), samples=[0, 1], checkpoints=checkpoints)]
    assert all(map(torch.equal, expected, actual))

    # Another row begins with the first 32 tokens of the first one.
    third = rows.assign(2, first, saved, rows.tables[0][: 32 // BLOCK_SIZE])
    actual = rows.run((2, 9), changes=make_changes(assign=[third]), samples=[2])
    while len(actual) < 10:
        actual += rows.run((2, 1), samples=[2])
    assert all(map(torch.equal, expected, actual))
    assert rows.outputs[2][:10] == lone.outputs[0]
    if max_passes > 1:
        # The checkpoint that a later pass of a step wrote.
        tokens, blocks = [*first, *rows.outputs[2][:7]], rows.tables[0][:11]
        rows.assign(3, tokens, later, blocks)
        rows.computed[3], rows.tables[3][11] = 47, rows.tables[0][11]
        fourth = make_assign(3, tokens, rows.tables[3], third.sampling, 41, state_blocks=rows.states[3])
        rows.max_passes = 1
        (logits,) = rows.run((3, 1), changes=make_changes(assign=[fourth], release=[0]), samples=[3])
        assert torch.equal(logits, expected[7])


@pytest.mark.parametrize("spoiled_pass", [1, 2])
def test_a_row_without_finite_logits_in_a_later_pass_fails_in_the_next_step(spoiled_pass: int, tmp_path: Path) -> None:
    """Its state counts its newest token already. A token drawn from it would be no output of the model."""
    rows = Rows(make(tmp_path, "qwen3.5"), max_passes=3)
    prompts = [rows.assign(row, prompt) for row, prompt in enumerate(make_prompts(20, 20))]
    rows.run((0, 20), (1, 20), changes=make_changes(assign=prompts), samples=[0, 1])
    spoiled, _ = rows.step((0, 1), (1, 1), samples=[0, 1], spoils=(spoiled_pass, 0))
    assert (spoiled.num_tokens.tolist(), spoiled.failed_rows) == ([spoiled_pass, spoiled_pass + 1], ())
    after, _ = rows.step((0, 1), (1, 1), samples=[0, 1])
    assert (after.failed_rows, after.num_passes) == ((0,), 3)


def test_a_fork_goes_on_from_a_copy_of_the_state(tmp_path: Path) -> None:
    rows = Rows(make(tmp_path, "qwen3.5"))
    (prompt,) = make_prompts(20)
    expected = rows.run((0, 20), changes=make_changes(assign=[rows.assign(0, prompt)]), samples=[0])
    copied = rows.take(rows.shape.state_blocks)
    rows.tables[1], rows.computed[1], rows.outputs[1] = list(rows.tables[0]), 20, list(rows.outputs[0])
    own = rows.take(len(rows.tables[0]) - 5)
    rows.tables[1][5:] = own
    rows.operations = make_operations(copy=list(zip(rows.states[0], copied, strict=True)))
    deltas = [(1, index, block) for index, block in enumerate(rows.tables[1]) if index >= 5]
    changes = make_changes(fork=[(0, 1)], deltas=deltas, state_tables=[(1, *copied)])
    (logits,) = rows.run((0, 1), (1, 1), changes=changes, samples=[0, 1])
    assert torch.equal(logits[0], logits[1])
    assert rows.outputs[0] == rows.outputs[1]
    for _ in range(3):
        (logits,) = rows.run((1, 1), (0, 1), samples=[1, 0])
        assert torch.equal(logits[0], logits[1])
    assert expected[0].isfinite().all()


def test_steps_that_would_break_states_are_refused(tmp_path: Path) -> None:
    rows = Rows(make(tmp_path, "qwen3.5"))
    first, second = make_prompts(20, 9)
    size = rows.shape.state_blocks
    changes, saved = make_changes(assign=[rows.assign(0, first)]), rows.take(2 * size)
    with pytest.raises(InvalidArgument, match="checkpoints names 9 tokens of row 0; the batch computes tokens 0 to 8"):
        rows.run((0, 8), changes=changes, checkpoints=[(0, 9, *saved[:size])])
    with pytest.raises(InvalidArgument, match="names 8 tokens of row 0 twice"):
        rows.run((0, 8), changes=changes, checkpoints=[(0, 8, *saved[:size]), (0, 8, *saved[size:])])
    rows.run((0, 8), changes=changes)
    with pytest.raises(InvalidArgument, match="takes one prompt token of row 0, after 8"):
        rows.run((0, 1))
    with pytest.raises(InvalidArgument, match="twice among the blocks that its rows write"):
        rows.run((0, 2), checkpoints=[(0, 9, *rows.states[0])])
    other = rows.assign(1, second)
    shared = make_assign(1, second, rows.tables[1], other.sampling, state_blocks=rows.states[0])
    with pytest.raises(InvalidArgument, match="twice among the blocks that its rows write"):
        rows.run((0, 2), (1, 2), changes=make_changes(assign=[shared]))
    rows.run((0, 2), (1, 1), changes=make_changes(assign=[other]))


@pytest.mark.parametrize("family", ["qwen3.5", "kimi-linear", "jamba", "mamba", "mamba-2"])
def test_models_with_states_are_recorded(family: str, tmp_path: Path) -> None:
    rows = Rows(make(tmp_path, family))
    assert isinstance(rows.runner._run_model, RecordedForward)
    assert rows.runner._run_decodes is not None


def test_caches_of_an_arena_that_is_a_part_of_a_file_lie_within_it() -> None:
    file = torch.zeros(1000)
    arena = file[100 : 100 + 3 * 64].view(arena_shape(3, 64 * 4, torch.float32))
    shapes = [(2, 1, 4, 2), (2, 2, 4, 2)]
    for value, cache in enumerate(caches_of(arena, shapes), 1):
        cache.fill_(value)
    assert not file[:100].any()
    assert pages_of(arena).view(torch.float32)[:, :48].bool().all()
