"""Layers with a window compute the same, bit for bit, without the blocks that lie before it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.support.models import make_model
from tests.support.sampling import make_sampling
from tests.support.steps import int32, make_assign, make_changes, make_step
from tests.support.tiers import parametrize_in_turn
from worker_svc.device.kv_pool import PoolRequest, allocate_pool, pool_geometry
from worker_svc.device.layer_cut import LayerCut, cut_layers
from worker_svc.device.row_ledger import RowLedger
from worker_svc.device.runner import ModelRunner
from worker_svc.models.base import CausalLM, NativeCausalLM
from worker_svc.models.registry import load_model
from worker_svc.step import AdmittedStep, Batch, ModelGeometry, StepOutput, WorkerLimits

MAX_MODEL_LEN, NUM_BLOCKS, BLANK = 96, 200, 0
Change = tuple[int, int, int]


class WindowedRows:
    """Plans steps as a scheduler that gives back the blocks before a window at once.

    Blocks without an owner, and the blank one, hold NaN. Blocks that were given back are the next to be given out.
    """

    def __init__(self, model: CausalLM, cut: LayerCut, block_size: int, max_passes: int) -> None:
        request = PoolRequest(block_size, NUM_BLOCKS, None, 0, 0, model.dtype, cut=cut)
        self.shape = pool_geometry(model, request, None)
        self.pool = allocate_pool(self.shape, model.device, model.dtype, with_padding=True, layers=cut.slots)
        for layer in self.pool.gpu:
            layer.fill_(torch.nan)
        geometry = ModelGeometry("", "", model.vocab_size, MAX_MODEL_LEN, "cpu")
        limits = WorkerLimits(4, 64, 1, 0, max_passes=max_passes)
        self.runner = ModelRunner(model, self.pool, geometry, limits, multi_step_s=1e3)
        self.ledger = RowLedger(self.shape, geometry, limits)
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.num_steps, self.max_passes = 0, max_passes
        self.free = list(range(1, NUM_BLOCKS))

    def run(self, *spans: tuple[int, int], prompts: Mapping[int, Sequence[int]]) -> list[torch.Tensor]:
        """Computes the next tokens of rows, given as (row, number); returns the logits of each pass."""
        rows, new = zip(*spans, strict=True)
        computed = [self.computed.get(row, 0) for row in rows]
        are_decodes = all(self.computed.get(row, 0) >= len(prompts[row]) for row in rows)
        passes = self.max_passes if are_decodes else 1
        ends = [done + count for done, count in zip(computed, new, strict=True)]
        deltas = [
            change
            for row, done, end in zip(rows, computed, ends, strict=True)
            for change in self._plan(row, done, end + passes - 1)
        ]
        sampling = make_sampling(temperature=0.0)
        assign = [
            make_assign(row, prompts[row], self.tables[row], sampling, state_blocks=self._take(self.shape.state_blocks))
            for row in rows
            if row not in self.computed
        ]
        samples = [(row, row) for row, end in zip(rows, ends, strict=True) if end >= len(prompts[row])]
        growth = [passes - 1] * len(samples) if passes > 1 else []
        batch = Batch(int32(rows), int32(new), int32(computed), int32(samples, 2), int32(growth), passes)
        changes = make_changes(assign=assign, deltas=[each for each in deltas if each[0] in self.computed])
        self.num_steps += 1
        logits: list[torch.Tensor] = []
        output = self._launch(self.ledger.admit(make_step(changes, batch, step_id=self.num_steps)), logits)
        self.ledger.record_output(output)
        self.computed.update(zip(rows, ends, strict=True))
        if passes > 1:
            assert output.num_passes == passes
            for row in rows:
                self.computed[row] += passes - 1
        return logits

    @property
    def held_bytes(self) -> int:
        return (NUM_BLOCKS - 1 - len(self.free)) * self.shape.block_bytes

    def _take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def _launch(self, admitted: AdmittedStep, logits: list[torch.Tensor]) -> StepOutput:
        model = self.runner._model
        # Recorded decodes call only this.
        name = "finish" if isinstance(model, NativeCausalLM) else "logits"
        computed = getattr(model, name)

        def kept(values: torch.Tensor) -> torch.Tensor:
            logits.append(computed(values).clone())
            return logits[-1]

        setattr(model, name, kept)
        try:
            return self.runner.launch(admitted).wait()
        finally:
            delattr(model, name)

    def _plan(self, row: int, computed: int, end: int) -> list[Change]:
        """Gives blocks to a row that computes its tokens from `computed` up to `end`; returns the new entries."""
        groups, size = self.shape.groups, self.shape.block_size
        table = self.tables.setdefault(row, [])
        before = list(table)
        table += [BLANK] * (self.shape.table_len(end) - len(table))
        first = groups.first_read(computed) // size
        for index, entry in enumerate(table):
            place, group = divmod(index, groups.num_groups)
            if group >= groups.num_full and place < first:
                if entry != BLANK:
                    for layer in self.pool.gpu:
                        layer[:, entry] = torch.nan
                    self.free.append(entry)
                table[index] = BLANK
            elif entry == BLANK:
                table[index] = self.free.pop()
        return [(row, i, entry) for i, entry in enumerate(table) if before[i : i + 1] != [entry]]


@parametrize_in_turn(
    "case, max_passes",
    [
        ("gemma3-scaled", "native", torch.float32, 4, 3),
        ("gemma3-scaled", "native", torch.bfloat16, 16, 3),
        ("gpt-oss-moe", "native", torch.bfloat16, 4, 2),
        # Its last layers read the keys of others.
        ("gemma3n-shared", "native", torch.float32, 4, 2),
        ("gpt-oss-moe", "transformers", torch.float32, 16, 2),
        ("mistral-sliding", "native", torch.float32, 4, 1),
        ("gemma4-wide-shared", "native", torch.bfloat16, 4, 2),
        ("gemma4-shared", "native", torch.float32, 16, 4),
        # Other layers keep states.
        ("lfm3", "native", torch.float32, 4, 3),
        ("lfm3", "native", torch.bfloat16, 16, 3),
    ],
    [(1,), (3,)],
)
def test_rows_are_the_same_bit_for_bit_without_the_blocks_before_the_window(
    case: tuple[str, str, torch.dtype, int, int], max_passes: int, tmp_path: Path
) -> None:
    family, model_impl, dtype, block_size, num_groups = case
    make_model(tmp_path, family)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=dtype, model_impl=model_impl)
    generator = torch.Generator().manual_seed(3)
    prompts = {
        row: torch.randint(3, 300, (length,), generator=generator).tolist() for row, length in ((0, 61), (1, 40))
    }
    cut = cut_layers(model.cache_layers, MAX_MODEL_LEN, block_size)
    assert (cut.groups.num_groups, cut.groups.num_windowed > 0) == (num_groups, True)
    whole, windowed = (
        WindowedRows(model, each, block_size, max_passes) for each in (LayerCut(model.cache_layers), cut)
    )
    # Chunks, a lone token, a prompt next to decodes, decodes of both. With states no prompt token comes by itself.
    lone = 1 if model.state is None else 2
    prefills = [((0, 35),), ((0, lone),), ((0, 26 - lone), (1, 18 - lone)), ((0, 1), (1, 20 + 2 * lone))]
    steps = [*prefills, ((1, 1), (0, 1)), *[((0, 1), (1, 1))] * 9]
    for spans in steps:
        expected, actual = (each.run(*spans, prompts=prompts) for each in (whole, windowed))
        assert all(map(torch.equal, expected, actual))
        assert all(each.isfinite().all() for each in expected)
    assert windowed.held_bytes < whole.held_bytes
