"""Forward passes of decode batches that were recorded once and are replayed: the host queues one graph, not hundreds
of kernels.

A batch is padded to a recorded shape by rows that compute token 0 at position 0 in a block of their own, which no
sequence ever has. Prefill and mixed batches, logits and sampling are queued kernel by kernel.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from worker_svc.device.graph_shapes import GraphShape, GraphShapes
from worker_svc.device.static_input import StaticInput
from worker_svc.models.base import CausalLM, ModelInput
from worker_svc.steps import Batch

Replay = Callable[[], None]


class GraphRecorder(Protocol):
    """Makes work repeatable."""

    def record(self, work: Callable[[], None]) -> Replay:
        """Runs `work`, which takes nothing from the host and always uses the same tensors; what it gives runs it again
        on what those tensors hold then."""
        ...


class DecodeGraphs:
    """One graph a shape, over the same input and output tensors. Used by the device thread alone."""

    def __init__(
        self, shapes: GraphShapes, inputs: StaticInput, hidden: Tensor, replays: Mapping[GraphShape, Replay]
    ) -> None:
        self._shapes = shapes
        self._inputs = inputs
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
        """Records all shapes.

        Args:
            padding: A batch of padding alone, as many rows as the largest shape has.
            num_columns: Blocks of the longest sequence.

        Raises whatever the device raises.
        """
        largest = shapes.largest
        inputs = StaticInput.allocate(largest.num_rows, num_columns, padding.kv_caches, model.device)
        inputs.fill(padding)
        hidden = torch.empty_like(model(inputs.view(largest)))

        def forward(shape: GraphShape) -> None:
            hidden[: shape.num_rows].copy_(model(inputs.view(shape)))

        return cls(shapes, inputs, hidden, {shape: recorder.record(partial(forward, shape)) for shape in shapes})

    def shape_for(self, batch: Batch) -> GraphShape | None:
        """The shape that this batch is to be padded to; None when it is to be run as it is."""
        if int(batch.num_new_tokens.max()) > 1:
            return None
        return self._shapes.fit(len(batch.rows), int(batch.num_computed_tokens.max()) + 1)

    def run(self, shape: GraphShape, inputs: ModelInput) -> Tensor:
        """Hidden states [rows of the shape, hidden] of a batch that was padded to it; they hold until the next run."""
        self._inputs.fill(inputs)
        self._replays[shape]()
        return self._hidden[: shape.num_rows]
