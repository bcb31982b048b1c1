"""Forward passes that are recorded once and replayed on the input of each step.

On CUDA a graph is recorded for each shape of decode batch, so that the host queues one graph instead of hundreds of
kernels. A batch is padded to a recorded shape by rows that compute token 0 at position 0 in a block of their own, which
no sequence has. Prefill and mixed batches, logits and sampling are queued kernel by kernel.

On the CPU one recording, a single call of the kernels' library, serves steps of any shape, for models whose layers
consist of the library's operations.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.runtime.settings import ConfigurationError
from quire_kernels.recording import NotRecordableError, record
from quire_kernels.states import StatePages
from worker_svc.device.flat_batch import reached_checkpoints
from worker_svc.device.kv_pool import KvPool, LayerCaches, zeros
from worker_svc.device.rows import Rows
from worker_svc.layers.attention import AttentionMetadata
from worker_svc.models.base import CausalLM, ModelInput, NativeCausalLM
from worker_svc.sampling.sampler import Drawn, RowDraws
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.step import Batch, Int32Array, WorkerLimits

# Larger batches gain little: the device works longer on each kernel than the host takes to queue it.
MAX_GRAPH_ROWS = 512
# The number of pieces into which attention cuts a context is fixed when a graph is recorded, for its longest context.
# Much shorter contexts leave most of the pieces empty, so there is a graph for each four times as long.
MIN_GRAPH_LENGTH = 1024
LENGTH_FACTOR = 4
# torch, Triton and the libraries below must not initialise at a first call while a graph is recorded.
_NUM_WARM_UPS = 2
_logger = logging.getLogger(__name__)

Replay = Callable[[], None]


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The constants of a graph: the number of rows, each with one new token, and the longest context."""

    num_rows: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """All shapes; both tuples are in rising order."""

    row_counts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def up_to(cls, max_num_rows: int, max_model_len: int) -> "GraphShapes":
        """The shapes for batches of at most these numbers of rows and tokens of context."""
        max_rows = min(max_num_rows, MAX_GRAPH_ROWS)
        counts = sorted({*(count for count in (1, 2, 4) if count < max_rows), *range(8, max_rows, 8), max_rows})
        lengths = []
        length = MIN_GRAPH_LENGTH
        while length < max_model_len:
            lengths.append(length)
            length *= LENGTH_FACTOR
        return cls(tuple(counts), (*lengths, max_model_len))

    @property
    def largest(self) -> GraphShape:
        return GraphShape(self.row_counts[-1], self.lengths[-1])

    def fit(self, num_rows: int, max_seq_len: int) -> GraphShape | None:
        """The smallest shape that holds such a batch; None if none does."""
        count = next((count for count in self.row_counts if count >= num_rows), None)
        length = next((length for length in self.lengths if length >= max_seq_len), None)
        return None if count is None or length is None else GraphShape(count, length)

    def __iter__(self) -> Iterator[GraphShape]:
        """The largest first: the others reuse the memory that it allocates."""
        for count in reversed(self.row_counts):
            for length in reversed(self.lengths):
                yield GraphShape(count, length)


def make_room(
    num_tokens: int,
    num_rows: int,
    num_columns: int,
    caches: LayerCaches,
    max_seq_len: int,
    device: torch.device,
    num_groups: int = 1,
    state_blocks: int = 0,
    num_checkpoints: int = 0,
) -> ModelInput:
    """Tensors that keep their addresses, which recordings use, for steps of at most `num_tokens` tokens and `num_rows`
    rows. All are zeros, but each row has one token. `num_columns` is the number of blocks of the longest sequence."""

    query_start_loc = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    seq_lens = zeros((num_rows,), torch.int32, device)
    groups = [
        AttentionMetadata(
            slot_mapping=zeros((num_tokens,), torch.int64, device),
            block_tables=zeros((num_rows, num_columns), torch.int32, device),
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            max_query_len=min(num_tokens, max_seq_len),
            max_seq_len=max_seq_len,
        )
        for _ in range(num_groups)
    ]
    token_ids, positions, adapter_slots = (zeros((num_tokens,), torch.int64, device) for _ in range(3))
    states = None
    if caches.pages is not None:
        states = StatePages(
            caches.pages,
            zeros((num_rows, state_blocks), torch.int32, device),
            query_start_loc,
            seq_lens,
            torch.full((num_tokens,), -1, dtype=torch.int32, device=device),
            zeros((num_checkpoints, state_blocks), torch.int32, device),
        )
    return caches.inputs(token_ids, positions, groups, adapter_slots, states)


def fill_decodes(room: ModelInput, inputs: ModelInput) -> None:
    """Copies a batch of one token a row. The rows after it keep their values."""
    num_rows, num_columns = inputs.groups[0].block_tables.shape
    room.token_ids[:num_rows].copy_(inputs.token_ids)
    room.positions[:num_rows].copy_(inputs.positions)
    assert room.adapter_slots is not None
    if inputs.adapter_slots is None:
        room.adapter_slots.zero_()
    else:
        room.adapter_slots[:num_rows].copy_(inputs.adapter_slots)
    room.groups[0].seq_lens[:num_rows].copy_(inputs.groups[0].seq_lens)
    for target, group in zip(room.groups, inputs.groups, strict=True):
        target.slot_mapping[:num_rows].copy_(group.slot_mapping)
        target.block_tables[:num_rows, :num_columns].copy_(group.block_tables)


def first_decodes(room: ModelInput, shape: GraphShape) -> ModelInput:
    """The first rows, of one token each. Block tables keep their full width: every shape has the same strides."""
    num_rows = shape.num_rows
    first = [
        AttentionMetadata(
            slot_mapping=group.slot_mapping[:num_rows],
            block_tables=group.block_tables[:num_rows],
            query_start_loc=group.query_start_loc[: num_rows + 1],
            seq_lens=group.seq_lens[:num_rows],
            max_query_len=1,
            max_seq_len=shape.max_seq_len,
        )
        for group in room.groups
    ]
    assert room.adapter_slots is not None
    return replace(
        room,
        token_ids=room.token_ids[:num_rows],
        positions=room.positions[:num_rows],
        groups=first,
        adapter_slots=room.adapter_slots[:num_rows],
    )


class GraphRecorder(Protocol):
    """Makes work repeatable."""

    def record(self, work: Callable[[], None]) -> Replay:
        """Runs `work`, which takes nothing from the host and always uses the same tensors. The result runs it again on
        the values that these tensors have then."""
        ...


class DecodeGraphs:
    """One graph per shape, over the same input and output tensors. Used only by the device thread."""

    def __init__(
        self, shapes: GraphShapes, room: ModelInput, hidden: Tensor, replays: Mapping[GraphShape, Replay]
    ) -> None:
        self._shapes = shapes
        self._room = room
        self._hidden = hidden
        self._replays = replays

    @classmethod
    def record(
        cls,
        model: CausalLM,
        shapes: GraphShapes,
        padding: ModelInput,
        num_columns: int,
        recorder: GraphRecorder,
    ) -> "DecodeGraphs":
        """Records all shapes. Raises any error of the device.

        Args:
            padding: A batch that has only padding, with the rows of the largest shape.
            num_columns: Blocks of the longest sequence.
        """
        num_rows, longest = shapes.largest.num_rows, shapes.largest.max_seq_len
        caches = LayerCaches(tuple(padding.kv_caches), tuple(padding.group_of))
        room = make_room(num_rows, num_rows, num_columns, caches, longest, model.device, len(padding.groups))
        fill_decodes(room, padding)
        hidden = torch.empty_like(model(first_decodes(room, shapes.largest)))

        def forward(shape: GraphShape) -> None:
            hidden[: shape.num_rows].copy_(model(first_decodes(room, shape)))

        return cls(shapes, room, hidden, {shape: recorder.record(partial(forward, shape)) for shape in shapes})

    def shape_for(self, batch: Batch) -> GraphShape | None:
        """The shape to pad this batch to; None if it must run as it is."""
        if int(batch.num_new_tokens.max()) > 1:
            return None
        return self._shapes.fit(len(batch.rows), int(batch.num_computed_tokens.max()) + 1)

    def run(self, shape: GraphShape, inputs: ModelInput) -> Tensor:
        """Hidden states [rows of the shape, hidden] of a batch that was padded to it, valid until the next run."""
        fill_decodes(self._room, inputs)
        self._replays[shape]()
        return self._hidden[: shape.num_rows]


class CudaGraphRecorder:
    """Records on a stream of its own. All graphs share one memory pool: they never run at the same time, and their
    results are copied out of it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Replay:
        # The stream starts after all that is queued, and `torch.cuda.graph` waits for the device before it records.
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        # Around all of it: if a recording cannot be ended, `torch.cuda.graph` leaves its stream the current one, and
        # the following steps would go there, past every mark.
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_WARM_UPS):
                work()
            with _no_garbage_collection(), self._recording(graph):
                work()
        return graph.replay

    def _recording(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
        # Driver calls of other threads are not recorded and do not end the recording.
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Objects that the collector frees may call the driver in ways that end the recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_cuda_graphs(model: CausalLM) -> None:
    """ConfigurationError when this model cannot run with `--cuda-graphs on`."""
    if model.device.type != "cuda":
        raise ConfigurationError(
            f"--cuda-graphs is on, which is for cuda, and the device is {model.device.type}; use off"
        )
    if model.ranks.size > 1:
        raise ConfigurationError(
            f"--cuda-graphs is on and --tensor-parallel-size is {model.ranks.size}; graphs are for 1 rank, use off"
        )
    if not isinstance(model, NativeCausalLM):
        raise ConfigurationError(
            f"--cuda-graphs is on and {model.architecture} runs through transformers' code, which may wait for the "
            "device; use off"
        )
    if model.waits_for_device:
        raise ConfigurationError(
            f"--cuda-graphs is on and {model.architecture} has experts, for whose choice the host waits; use off"
        )


Forward = Callable[[ModelInput], torch.Tensor]
"""Returns a step's hidden states after the final norm, [T, hidden], which the next step may overwrite."""


class RecordedDecodes:
    """The layers and the output layer in one recording, for passes in which each row has one token.

    In one recording the threads go on from the layers to the output layer instead of sleeping and waking between them.
    """

    def __init__(self, model: NativeCausalLM, room: ModelInput) -> None:
        """Raises NotRecordableError."""
        self._model = model
        self._recorded = RecordedForward(model, room, model.outputs)

    def __call__(self, inputs: ModelInput) -> torch.Tensor:
        """The logits of all rows, [R, vocab] float32."""
        return self._model.finish(self._recorded(inputs))

    def set_rows(
        self,
        block_tables: NDArray[np.int32],
        adapter_slots: NDArray[np.int64],
        state_tables: NDArray[np.int32],
        checkpoint_tables: NDArray[np.int32],
    ) -> None:
        """The rows of the passes that `run` runs next.

        Args:
            block_tables: [groups of layers, R, columns], with the blocks of all these passes.
            adapter_slots: [R], as `Rows` has them.
            state_tables: [R, blocks of a state], the same.
            checkpoint_tables: [C, blocks of a state].
        """
        (_, num_rows, num_columns), room = block_tables.shape, self._recorded
        for (_, tables), of_group in zip(room.groups, block_tables, strict=True):
            tables[:num_rows, :num_columns] = of_group
        room.query_start_loc[: num_rows + 1] = np.arange(num_rows + 1)
        room.adapter_slots[:num_rows] = adapter_slots
        if room.states is not None:
            room.states.set_tables(state_tables, checkpoint_tables)

    def run(
        self,
        token_ids: NDArray[np.integer],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        checkpoints: NDArray[np.int32],
    ) -> torch.Tensor:
        """The logits of a token of each row, [R, vocab] float32. All are [R] but `slots` [groups of layers, R], which
        get its keys and values. `checkpoints` are as in `StatePages`."""
        num_rows, room = len(token_ids), self._recorded
        room.token_ids[:num_rows], room.positions[:num_rows] = token_ids, positions
        for (slot_mapping, _), of_group in zip(room.groups, slots, strict=True):
            slot_mapping[:num_rows] = of_group
        np.add(positions, 1, out=room.seq_lens[:num_rows], casting="same_kind")
        if room.states is not None:
            room.states.checkpoints[:num_rows] = checkpoints
        return self._model.finish(room.run(num_rows))


def make_forward(model: CausalLM, pool: KvPool, max_model_len: int, limits: WorkerLimits) -> Forward:
    """The model's forward pass over this pool: recorded if possible, else the model itself."""
    if not _is_recordable(model):
        return model
    try:
        # Recomputed output tokens are rows of their own, and the last token of a prompt is paired with another.
        num_rows = max(_max_batch_rows(limits), limits.max_num_batched_tokens)
        num_tokens = limits.max_num_batched_tokens + limits.max_num_rows
        sizes = {"num_tokens": num_tokens, "num_rows": num_rows, "num_checkpoints": num_tokens}
        return RecordedForward(model, room_for(model, pool, max_model_len, **sizes))
    except NotRecordableError as reason:
        _logger.debug("operations of the model run one by one: %s", reason)
        return model


def make_decodes(model: CausalLM, pool: KvPool, max_model_len: int, limits: WorkerLimits) -> RecordedDecodes | None:
    """The model for passes that have only decodes, over this pool; None if it cannot be recorded."""
    if not _is_recordable(model):
        return None
    try:
        num_rows = _max_batch_rows(limits)
        sizes = {"num_tokens": num_rows, "num_rows": num_rows, "num_checkpoints": num_rows * limits.max_passes}
        room = room_for(model, pool, max_model_len, **sizes)
        return RecordedDecodes(model, room)
    except NotRecordableError:
        return None


def _max_batch_rows(limits: WorkerLimits) -> int:
    """The rows of the largest batch: each draft is one more."""
    return limits.max_num_rows + limits.max_verified


def _is_recordable(model: CausalLM) -> TypeGuard[NativeCausalLM]:
    return isinstance(model, NativeCausalLM) and model.device.type == "cpu" and model.ranks.is_recordable


class RoomForStates:
    """The states of the rows in a recording's room, as arrays."""

    def __init__(self, states: StatePages) -> None:
        self._tables, self._checkpoint_tables = states.tables.numpy(), states.checkpoint_tables.numpy()
        self.checkpoints = states.checkpoints.numpy()

    def set_tables(self, tables: NDArray[np.int32], checkpoint_tables: NDArray[np.int32]) -> None:
        """Takes the blocks of some rows' states and of checkpoints, [R, S] and [C, S]."""
        self._tables[: len(tables)] = tables
        self._checkpoint_tables[: len(checkpoint_tables)] = checkpoint_tables

    def set(self, states: StatePages) -> None:
        """Takes all of these rows."""
        self.set_tables(states.tables.numpy(), states.checkpoint_tables.numpy())
        self.checkpoints[: len(states.checkpoints)] = states.checkpoints.numpy()


class RecordedForward:
    """Runs a model's layers from a recording, on tensors to which each step's input is copied.

    Args:
        room: tensors of the size of the largest step, over the pool of all steps.
        finish: applied to the hidden states, and recorded too.

    Attributes:
        token_ids, positions, adapter_slots, query_start_loc, seq_lens: the room, as arrays.
        groups: the slot mapping and the block tables of each group of layers, as arrays.
        states: of the rows, if layers keep them.

    Raises:
        NotRecordableError: the layers compute something that is not an operation of the library.
    """

    def __init__(
        self, model: NativeCausalLM, room: ModelInput, finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self._model = model
        one_token = ModelInput(room.token_ids[:1].zero_(), room.positions[:1].zero_(), room.groups, ())
        num_tokens = room.token_ids.shape[0]
        one_embedded = model.embed(one_token)
        embedded = one_embedded.new_empty(num_tokens, one_embedded.shape[1])
        outputs: list[torch.Tensor] = []

        def run() -> None:
            hidden = model.run_adapted_layers(embedded, room)
            outputs.append(hidden if finish is None else finish(hidden))

        self._recording = record(num_tokens, run)
        self._embedded, (self._output,), self._room = embedded, outputs, room
        assert room.adapter_slots is not None
        # numpy takes a fraction of torch's time for a few numbers.
        self.token_ids, self.positions = room.token_ids.numpy(), room.positions.numpy()
        self.adapter_slots = room.adapter_slots.numpy()
        self.groups = [(each.slot_mapping.numpy(), each.block_tables.numpy()) for each in room.groups]
        self.query_start_loc, self.seq_lens = room.groups[0].query_start_loc.numpy(), room.groups[0].seq_lens.numpy()
        self.states = None if room.states is None else RoomForStates(room.states)

    @torch.inference_mode()
    def __call__(self, inputs: ModelInput) -> torch.Tensor:
        attention = inputs.groups[0]
        num_tokens, num_rows = inputs.token_ids.shape[0], attention.seq_lens.shape[0]
        self._embedded[:num_tokens] = self._model.embed(inputs)
        self.positions[:num_tokens] = inputs.positions
        self.adapter_slots[:num_tokens] = 0 if inputs.adapter_slots is None else inputs.adapter_slots
        for (slot_mapping, tables), group in zip(self.groups, inputs.groups, strict=True):
            slot_mapping[:num_tokens] = group.slot_mapping
            tables[:num_rows, : group.block_tables.shape[1]] = group.block_tables
        self.query_start_loc[: num_rows + 1] = attention.query_start_loc
        self.seq_lens[:num_rows] = attention.seq_lens
        if self.states is not None and inputs.states is not None:
            self.states.set(inputs.states)
        self._recording.run(num_tokens, num_rows)
        return self._output[:num_tokens]

    @torch.inference_mode()
    def run(self, num_rows: int) -> torch.Tensor:
        """The output for `num_rows` rows of one token each, which the room holds."""
        tokens = ModelInput(self._room.token_ids[:num_rows], self._room.positions[:num_rows], self._room.groups, ())
        self._embedded[:num_rows] = self._model.embed(tokens)
        self._recording.run(num_rows, num_rows)
        return self._output[:num_rows]


def room_for(
    model: CausalLM, pool: KvPool, max_model_len: int, *, num_tokens: int, num_rows: int, num_checkpoints: int = 0
) -> ModelInput:
    """The room of a recording on the CPU, over the pool of all steps."""
    num_columns, num_groups = pool.geometry.blocks_for(max_model_len), pool.geometry.groups.num_groups
    caches, state_blocks = pool.layers_of(model), pool.geometry.state_blocks
    sizes = num_groups, state_blocks, num_checkpoints
    return make_room(num_tokens, num_rows, num_columns, caches, max_model_len, torch.device("cpu"), *sizes)


class DecodeRun:
    """Some passes of the same n rows on the CPU. Each gives each row one token, which the next one computes.

    The general preparation of a pass by `ModelRunner` (drafts, masks, rules, reports) takes about half a millisecond of
    Python. Between two passes of rows that need only a draw from their logits, just the tokens, their positions and
    their slots change, and the random numbers of all passes are made at once.

    Attributes:
        num_left: The passes that may still run.
    """

    def __init__(
        self,
        decodes: RecordedDecodes,
        rows: Rows,
        chosen: NDArray[np.integer],
        columns: SamplingColumns,
        starts: NDArray[np.int64],
        num_passes: int,
        block_size: int,
        checkpoints: Int32Array,
    ) -> None:
        """
        Args:
            chosen: [n], which of `rows`. They have blocks for all passes.
            columns: of these, which need only a draw from their logits.
            starts: [n], the position of the token of each that the first pass computes.
            checkpoints: as `Step` has them.
        """
        self.num_left = num_passes
        self._decodes, self._token_ids = decodes, rows.token_ids.numpy()
        self._rows = chosen.astype(np.int64)
        self._positions = starts + np.arange(num_passes + 1)[:, None]
        blocks, offsets = np.divmod(self._positions[:-1], block_size)
        tables = rows.by_group.numpy()
        slots = tables[self._rows, blocks].astype(np.int64) * block_size + offsets[..., None]
        self._slots = slots.transpose(0, 2, 1)
        self._draws = RowDraws.from_columns(columns, starts + 1, num_passes)
        held = tables[self._rows, : int(blocks.max()) + 1].transpose(2, 0, 1)
        self._checkpoints, used = reached_checkpoints(
            checkpoints, self._rows[None], self._positions[:-1], rows.state_blocks
        )
        decodes.set_rows(held, rows.adapter_slots[self._rows], rows.state_tables[self._rows], used)

    def next(self) -> Drawn:
        """Runs a pass, and appends the drawn tokens to the rows."""
        index = len(self._slots) - self.num_left
        self.num_left -= 1
        positions, after = self._positions[index : index + 2]
        token_ids, checkpoints = self._token_ids[self._rows, positions], self._checkpoints[index]
        logits = self._decodes.run(token_ids, positions, self._slots[index], checkpoints)
        drawn = self._draws.draw(logits, index)
        self._token_ids[self._rows, after] = drawn.token_ids.numpy()
        return drawn
